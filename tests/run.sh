#!/usr/bin/env bash
# Builds the library's tests for this machine and runs them. Arguments go to ctest, except
#   --all     (first) also the programs' tests: examples, Python's arrays, ggml backend, MPI, users' projects, code that
#             must not compile, packages, pages
#   --levels  (first) other tests: the library's by AVX2, AVX-VNNI where there is one, and without packets, linked with a
#             library of all ISA levels, and the tests of the levels themselves
#   --long    (first) a long run: nine times the draws of each suite, then mutants. Its arguments: tests/long_run.py
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../.ci/setup.sh"

everything=OFF levels=OFF long=OFF target=quoka_tests packages=("${quoka_test_packages[@]}")
if [[ ${1-} == --all ]]; then
  shift
  everything=ON packages=("${quoka_packages[@]}")
elif [[ ${1-} == --levels ]]; then
  shift
  levels=ON target=quoka_level_tests
  set -- -L levels "$@"
elif [[ ${1-} == --long ]]; then
  shift
  long=ON packages+=(python3 git)
fi
install_missing "${packages[@]}"
# The ggml backend is tested where llama.cpp's libraries can be had.
if [[ $everything == ON && ! -f $quoka_root/build/llama.cpp/whole ]]; then
  { command -v npm && bash "$quoka_root/examples/bindings/ggml/get_llama_cpp.sh"; } >/dev/null ||
    echo "No tests of the ggml backend: bash examples/bindings/ggml/get_llama_cpp.sh gets what they need" >&2
fi
# Python's arrays are tested where a Python with its headers can get what it needs: in a folder of build/.
python=$quoka_root/build/python_of_tests/bin/python
if [[ $everything == OFF ]]; then
  python=
elif ! "$python" -c "import nanobind, numpy, hypothesis" 2>/dev/null; then
  say "Getting nanobind, numpy, ml_dtypes and hypothesis into build/python_of_tests"
  { python3 -m venv "$quoka_root/build/python_of_tests" &&
    "$python" -m pip install --quiet nanobind numpy ml_dtypes "${quoka_hypothesis[@]}" &&
    "$python" -c "import os, sysconfig; os.stat(sysconfig.get_path('include') + '/Python.h')"; } >/dev/null 2>&1 || {
    echo "No tests of Python's arrays: they need python3-venv, python3-dev (3.10 or later) and a package index" >&2
    python=
  }
fi
# With -O2 the kernels compile in two thirds of the time that -O3 takes.
build_native "$quoka_root/build" $target -DCMAKE_CXX_FLAGS_RELEASE="-O2 -DNDEBUG" \
  -DQUOKA_BUILD_TESTS=ON -DQUOKA_BUILD_EXAMPLES=ON -DQUOKA_INSTALL_COMPILED=ON -DQUOKA_KERNELS_APART=ON -DQUOKA_PYTHON="$python" \
  -DQUOKA_TEST_LEVELS=$levels -DQUOKA_TEST_LEVELS_WERROR="${QUOKA_TEST_LEVELS_WERROR:-OFF}" \
  -DQUOKA_TEST_SLOW="${QUOKA_TEST_SLOW:-ON}" -DQUOKA_TEST_PROGRAMS=$everything -DQUOKA_BUILD_GGML=$everything
[[ $long == OFF ]] || exec python3 "$quoka_root/tests/long_run.py" --build "$quoka_root/build" --jobs "$quoka_jobs" "$@"
exec ctest --test-dir "$quoka_root/build" --output-on-failure -j "$quoka_jobs" "$@"
