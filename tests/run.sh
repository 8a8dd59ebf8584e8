#!/usr/bin/env bash
# Builds the library's tests for this machine and runs them. Arguments go to ctest, but for
#   --all   first: the programs' tests, too (decoder, ggml backend, MPI, packages, pages)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../.ci/setup.sh"

everything=OFF packages=("${quoka_test_packages[@]}")
if [[ ${1-} == --all ]]; then
  shift
  everything=ON packages=("${quoka_packages[@]}")
fi
install_missing "${packages[@]}"
# The ggml backend is tested where llama.cpp's libraries can be had.
if [[ $everything == ON && ! -f $quoka_root/build/llama.cpp/whole ]]; then
  { command -v npm && bash "$quoka_root/examples/ggml/get_llama_cpp.sh"; } >/dev/null ||
    echo "No tests of the ggml backend: bash examples/ggml/get_llama_cpp.sh gets what they need" >&2
fi
build_native "$quoka_root/build" quoka_tests -DQUOKA_BUILD_TESTS=ON -DQUOKA_BUILD_EXAMPLES=ON -DQUOKA_INSTALL_COMPILED=ON \
  -DQUOKA_TEST_PROGRAMS=$everything -DQUOKA_BUILD_DECODER=$everything -DQUOKA_BUILD_GGML=$everything
exec ctest --test-dir "$quoka_root/build" --output-on-failure -j "$quoka_jobs" "$@"
