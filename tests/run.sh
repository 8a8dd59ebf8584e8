#!/usr/bin/env bash
# Builds the tests for this machine and runs them; every argument goes to ctest.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../.ci/setup.sh"

install_missing "${quoka_packages[@]}"
build_native "$quoka_root/build" quoka_tests \
  -DQUOKA_BUILD_EXAMPLES=ON -DQUOKA_BUILD_TESTS=ON -DQUOKA_BUILD_DECODER=ON
exec ctest --test-dir "$quoka_root/build" --output-on-failure -j "$quoka_jobs" "$@"
