#!/usr/bin/env bash
# Measures this machine in about ten minutes and writes build/report.html, one page that needs no network, and
# build/report.json beside it. Arguments go to report.py: --threads 2, --out FOLDER.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../.ci/setup.sh"

install_missing "${quoka_packages[@]}" python3
build=$quoka_root/build/report
echo "Building quoka_bench and speedup for this machine, some minutes the first time" >&2
cmake -S "$quoka_root" -B "$build" -G Ninja -DQUOKA_NATIVE=ON -DQUOKA_BUILD_BENCHES=ON >"$build.log" 2>&1 &&
  cmake --build "$build" -j "$quoka_jobs" --target quoka_bench speedup >>"$build.log" 2>&1 || {
  tail -n 30 "$build.log" >&2
  exit 1
}
exec python3 "$quoka_root/bench/report.py" --programs "$build/bench" "$@"
