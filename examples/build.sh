#!/usr/bin/env bash
# Builds everything besides the library, for this machine: examples, ggml backend (where get_llama_cpp.sh has
# been run), benchmarks, all of them or the targets that are named.
#
#     build.sh [TARGET ...]      evaluate, quoka_bench, ggml-quoka, ...: to build/examples and build/bench
#
# Installs packages that are missing. The tests: tests/run.sh.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../.ci/setup.sh"

if [[ ${1-} == -* ]]; then
  sed -n '2,7s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
  [[ $1 == --help || $1 == -h ]] && exit
  exit 2
fi
install_missing "${quoka_packages[@]}"
build_native "$quoka_root/build" "${*:-all}" -DQUOKA_BUILD_EXAMPLES=ON -DQUOKA_BUILD_GGML=ON \
  -DQUOKA_BUILD_BENCHES=ON
