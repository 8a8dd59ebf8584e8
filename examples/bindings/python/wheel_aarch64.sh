#!/usr/bin/env bash
# Builds the wheel for aarch64 on a machine of another kind, and runs it under qemu: imports it, attends once, with --test all of
# test_arrays.py:
#
#     wheel_aarch64.sh [--to DIR] [--python python3.12] [--test]      DIR: build/wheels unless said otherwise
#
# It needs a Python from 3.12 on, whose wheels serve all later ones and need no headers of the other machine. Installs
# packages that are missing, and unpacks Debian 13's Python for aarch64, with numpy and hypothesis, into build/aarch64_root.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../../.ci/setup.sh"

to=$quoka_root/build/wheels python=python3 test=
while (($#)); do
  case $1 in
    --to) to=${2:?--to DIR} && shift 2 ;;
    --python) python=${2:?--python PROGRAM} && shift 2 ;;
    --test) test=yes && shift ;;
    --help | -h) sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && exit ;;
    *) echo "wheel_aarch64.sh: no option $1, only --to DIR, --python PROGRAM and --test" >&2 && exit 2 ;;
  esac
done
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 12) and
  f"wheel_aarch64.sh: Python is {sys.version_info[0]}.{sys.version_info[1]}, but must be at least 3.12: --python PROGRAM")'
install_missing g++-aarch64-linux-gnu libeigen3-dev qemu-user
mkdir -p "$to" && to=$(realpath "$to")
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT

# Without isolation: what builds is of this machine, and pip would take it for the other one.
"$python" -m venv "$folder/build"
"$folder/build/bin/pip" install --quiet "scikit-build-core>=0.11" "nanobind>=2.2" cmake ninja >&2
PATH=$folder/build/bin:$PATH _PYTHON_HOST_PLATFORM=linux-aarch64 \
  CMAKE_ARGS="-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_C_COMPILER=aarch64-linux-gnu-gcc \
-DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ ${CMAKE_ARGS:-}" \
  "$folder/build/bin/pip" wheel --no-deps --no-build-isolation --config-settings=build-dir="$quoka_root/build/python_aarch64" \
  --wheel-dir "$folder/wheels" "$quoka_root" >&2

root=$quoka_root/build/aarch64_root
if [[ ! -e $root/site/hypothesis ]]; then
  rm -rf "$root" && mkdir -p "$root"/apt/{parts,lists/partial,cache/archives/partial,debs}
  cd "$root/apt"
  echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian trixie main" >list
  touch status
  apt=(apt-get -qq -o Dir::Etc::sourcelist="$PWD/list" -o Dir::Etc::sourceparts="$PWD/parts" -o Dir::State::lists="$PWD/lists"
    -o Dir::Cache="$PWD/cache" -o Dir::State::status="$PWD/status" -o APT::Architecture=arm64 -o APT::Architectures=arm64
    -o APT::Sandbox::User=)
  "${apt[@]}" update >&2
  (cd debs && "${apt[@]}" download libbz2-1.0 libc6 libexpat1 libffi8 libgcc-s1 liblzma5 libpython3.13-minimal \
    libpython3.13-stdlib libssl3t64 libstdc++6 libzstd1 python3.13-minimal zlib1g >&2)
  for package in debs/*.deb; do dpkg-deb -x "$package" "$root"; done
  ln -sfn usr/lib "$root/lib"
  "$folder/build/bin/pip" download --quiet --no-deps --only-binary=:all: --platform manylinux_2_28_aarch64 \
    --platform manylinux2014_aarch64 --python-version 3.13 --dest wheels numpy "${quoka_hypothesis[@]}" sortedcontainers >&2
  for wheel in wheels/*.whl; do "$folder/build/bin/python" -m zipfile -e "$wheel" "$root/site"; done
fi
"$folder/build/bin/python" -m zipfile -e "$folder"/wheels/quoka-*_aarch64.whl "$folder/site"
cd "$folder"
run() { PYTHONPATH=$folder/site:$root/site OPENBLAS_NUM_THREADS=1 qemu-aarch64 -cpu max -L "$root" "$root/usr/bin/python3.13" -B "$@"; }
run -c '
import numpy, platform, quoka
q = numpy.ones((1, 4, 2, 64), numpy.float32)
assert (quoka.attention(q, q[:, :2], q[:, :2]) == 1).all()
print("quoka", quoka.__version__, "imports on", platform.machine() + "; instructions:", quoka.isa())' >&2
if [[ $test ]]; then QUOKA_PYTHON_CASES=20 run "$quoka_root/examples/bindings/python/tests/test_arrays.py"; fi
cp wheels/quoka-*.whl "$to"
ls "$to"/quoka-*_aarch64.whl
