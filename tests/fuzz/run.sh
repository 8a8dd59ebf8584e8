#!/usr/bin/env bash
# Runs every fuzzer for SECONDS (60), or those that are named: tests/fuzz/run.sh [SECONDS [NAME...]]
#
# Finds go to build/fuzz/finds; a copy in tests/fuzz/corpus/NAME is replayed by the ordinary tests from then on.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../.ci/setup.sh"
cd "$quoka_root"
install_missing "${quoka_packages[@]}" clang libclang-rt-14-dev
seconds=${1:-60}
shift || true
[[ $seconds =~ ^[0-9]+$ ]] || { echo "tests/fuzz/run.sh: SECONDS is $seconds, but must be a whole number" >&2; exit 2; }
names=("$@")
((${#names[@]})) || names=(attention top_k settings gguf)

cmake --preset fuzz >&2
cmake --build build/fuzz -j "$quoka_jobs" --target fuzzers >&2
mkdir -p build/fuzz/finds
for name in "${names[@]}"; do
  mkdir -p "build/fuzz/corpus/$name"
  echo "== $name, $seconds s" >&2
  "build/fuzz/tests/fuzz/fuzz_$name" -max_total_time="$seconds" -max_len=4096 -timeout=60 -rss_limit_mb=4096 -verbosity=0 \
    -print_final_stats=1 -artifact_prefix="build/fuzz/finds/$name-" "build/fuzz/corpus/$name" "tests/fuzz/corpus/$name"
done
