#!/usr/bin/env bash
# Will it work on my model? What is gained, what is lost, with which settings, measured in unmodified llama.cpp:
#
#     check.sh MODEL.gguf [TEXT ...] [--quick] [--lengths 2048,8192] [--out DIR] [OPTION ...]
#     check.sh --compare DIR DIR ...       one page of several results
#
# Writes to DIR (build/check/MODEL unless said otherwise): check.html, the page to look at; check.json, all numbers; and
# settings.json, which QUOKA_CONFIG names to use what is recommended. A run that was stopped goes on where it was.
# Installs what is missing. Takes the llama.cpp of GGML_DIR, or one that is installed, or else gets its libraries. --help
# lists all options.
set -euo pipefail
# shellcheck source=../support/npm.sh
source "$(dirname "${BASH_SOURCE[0]}")/../support/npm.sh"
here=$quoka_root/examples/ggml
build=$quoka_root/build/check-programs

install_missing "${quoka_packages[@]}" python3
if [[ ${1:-} == --compare ]]; then
  shift
  python3 "$here/check_page.py" "${@/%//check.json}" --out "$quoka_root/build/check/comparison.html"
  exit
fi
[[ $# -gt 0 ]] || { sed -n '2,10s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2; }

ggml=$(ggml_folder)
echo "Building for this machine, a minute the first time" >&2
cmake -S "$quoka_root" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DQUOKA_NATIVE=ON -DGGML_DIR="$ggml" \
  -DQUOKA_BUILD_EXAMPLES=ON -DQUOKA_BUILD_GGML=ON >"$quoka_root/build/check.log"
cmake --build "$build" --target check -j "$quoka_jobs" >>"$quoka_root/build/check.log" ||
  { tail -n 40 "$quoka_root/build/check.log" >&2; exit 1; }

out=
for ((i = 1; i <= $#; ++i)); do
  [[ ${!i} == --help || ${!i} == -h ]] && exec "$build/examples/ggml/check" --help
  [[ ${!i} == --out ]] && ((i < $#)) && { ((++i)); out=${!i}; }
  [[ ${!i} == --out=* ]] && out=${!i#--out=}
done
if [[ -z $out ]]; then
  for argument in "$@"; do [[ $argument == *.gguf ]] && { out=$quoka_root/build/check/$(basename "$argument" .gguf); break; }; done
  [[ -n $out ]] || { echo "check.sh: no model.gguf among the arguments: give --out" >&2; exit 2; }
  set -- "$@" --out "$out"
fi
"$build/examples/ggml/check" "$@"
python3 "$here/check_page.py" "$out/check.json"
