#!/usr/bin/env bash
# Builds the tests for this machine and runs them; every argument goes to ctest.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../.ci/setup.sh"

install_missing "${quoka_packages[@]}"
# The ggml backend is tested where llama.cpp's libraries can be had.
if [[ ! -f $quoka_root/build/llama.cpp/whole ]]; then
  { command -v npm && bash "$quoka_root/examples/ggml/get_llama_cpp.sh"; } >/dev/null ||
    echo "No tests of the ggml backend: bash examples/ggml/get_llama_cpp.sh gets what they need" >&2
fi
build_native "$quoka_root/build" quoka_tests \
  -DQUOKA_BUILD_EXAMPLES=ON -DQUOKA_BUILD_TESTS=ON -DQUOKA_BUILD_DECODER=ON -DQUOKA_INSTALL_COMPILED=ON
exec ctest --test-dir "$quoka_root/build" --output-on-failure -j "$quoka_jobs" "$@"
