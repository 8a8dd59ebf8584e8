#!/usr/bin/env bash
# Builds the prefill example for this machine and runs it; every argument goes to the program.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../.ci/setup.sh"

install_missing "${quoka_packages[@]}"
build_native prefill
exec "$quoka_root/build/examples/prefill" "$@"
