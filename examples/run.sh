#!/usr/bin/env bash
# Builds the prefill example for this machine and runs it; every argument goes to the program. It has a build folder of
# its own: it needs fewer packages than build/ does.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../.ci/setup.sh"

install_missing "${quoka_example_packages[@]}"
build_native "$quoka_root/build/prefill" prefill -DQUOKA_BUILD_EXAMPLES=ON
exec "$quoka_root/build/prefill/examples/prefill" "$@"
