#!/usr/bin/env bash
# Measures how long a user waits for the compiler: wall time in seconds, the best of three, of each translation unit
# alone.
#
#   bash bench/compile_time.sh                          g++ or what CXX names, -O2 -march=native
#   CXX=clang++ bash bench/compile_time.sh -march=x86-64-v3 -O3    other flags, after -O2; CXXFLAGS, if there are no arguments
#
# RUNS: of how many the best counts. Writes nothing outside a temporary folder; installs g++ and Eigen if they are missing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source .ci/setup.sh
install_missing g++ libeigen3-dev

compiler=${CXX:-g++}
runs=${RUNS:-3}
if (($# > 0)); then flags=("$@"); else read -ra flags <<<"${CXXFLAGS:--march=native}"; fi
read -ra eigen <<<"$(pkg-config --cflags-only-I eigen3 2>/dev/null || echo -I/usr/include/eigen3)"
includes=(-Iinclude)
for folder in "${eigen[@]}"; do includes+=(-isystem "${folder#-I}"); done

objects=$(mktemp -d)
trap 'rm -rf "$objects"' EXIT
echo '#include <quoka/quoka.hpp>' >"$objects/umbrella.cpp"

microseconds() { echo "${EPOCHREALTIME/[.,]/}"; }

row() {  # name, source, and flags of its own
  local name=$1 source=$2 best=0 run start taken
  shift 2
  for ((run = 0; run < runs; ++run)); do
    start=$(microseconds)
    "$compiler" -std=c++20 -O2 "${flags[@]}" "$@" "${includes[@]}" -c "$source" -o "$objects/object.o"
    taken=$(($(microseconds) - start))
    if ((run == 0 || taken < best)); then best=$taken; fi
  done
  printf '%-42s %4d.%02d\n' "$name" $((best / 1000000)) $((best / 10000 % 100))
}

echo "$("$compiler" --version | head -n 1); -std=c++20 -O2 ${flags[*]}; best of $runs"
echo
printf '%-42s %7s\n' "translation unit" "seconds"
row "quoka.hpp alone, header-only" "$objects/umbrella.cpp"
row "quoka.hpp alone, QUOKA_COMPILED" "$objects/umbrella.cpp" -DQUOKA_COMPILED
row "first example, header-only" examples/01_first_screen.cpp
row "first example, QUOKA_COMPILED" examples/01_first_screen.cpp -DQUOKA_COMPILED
row "a selector of one's own, header-only" examples/04_custom_selector.cpp
row "a selector of one's own, QUOKA_COMPILED" examples/04_custom_selector.cpp -DQUOKA_COMPILED
row "the library, once (quoka/compiled.cpp)" include/quoka/compiled.cpp -DQUOKA_COMPILED
