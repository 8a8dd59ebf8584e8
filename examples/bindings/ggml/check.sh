#!/usr/bin/env bash
# Will it work on my model? Measures gain and loss by settings in unmodified llama.cpp:
#
#     check.sh MODEL.gguf [TEXT ...] [OPTION ...]
#     check.sh --compare DIR DIR ...       one page of several results
#     check.sh --estimate MODEL.gguf       in a second, from the file alone: how much of a prefill is attention, at 2K to
#                                          128K tokens, and so the most that can be gained; --budget 1024: of selection
#
# Writes to a folder: check.html, the page to look at; check.json, all numbers; and, where something is recommended,
# settings.json, which QUOKA_CONFIG names to use it. A run that was stopped goes on where it was. Says how long it will
# take before it starts. Installs what is missing. Takes the llama.cpp of GGML_DIR, or one that is installed, or else
# gets its libraries.
#
#     --out DIR            the folder; build/check/MODEL unless said otherwise
#     --quick              2,048 tokens at most, presets without a budget alone
#     --lengths 512,2048   of prompts, in tokens; unless said otherwise 512, 1024 and so on up to the context or 8,192
#     --modes paper,recommended       presets beside exact mode; with settings: recommended:chunk=256; exact: none
#     --arithmetics automatic,bf16    each mode in each of them; those that come to the same here are one
#     --budgets own,1024   past keys for each head, with a point a share of the past, or own: what the preset keeps without
#                          a budget; own and an eighth of the longest length
#     --cache f16          how llama.cpp stores keys and values: f16 or q8_0
#     --threads 4          as many as there are processors
#     --ubatch 256         tokens that llama.cpp computes together
#     --samples 384        positions at which logits are compared
#     --questions 12       needles that are asked for at each length
#     --together 8         settings that read side by side; as many as half of the memory holds
#     --seed 1             of the facts in the text
#     --measure-only       reads the text and gives no advice, so writes check.json alone
#     --rounding           llama.cpp without flash attention, too: what its own rounding moves
#     --max-perplexity 1   percent that settings may add
#     --max-kl 0.01        divergence from llama.cpp's logits that settings may have beyond exact mode's, in nats; and
#                          that a single layer may have
#     --max-needles 5      points of 100 that settings may lose
#     --min-gain 1.05      times as fast as exact mode, at least
#     --fresh              does not go on with what the folder holds
#     --json FILE          who measured, when, how: the program's own report
#     --help               this
set -euo pipefail
# shellcheck source=../../support/npm.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../support/npm.sh"
here=$quoka_root/examples/bindings/ggml
build=$quoka_root/build/check-programs

usage() { sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; }
for argument in "$@"; do
  [[ $argument != --help && $argument != -h ]] || { usage; exit; }
done
(($#)) || { usage >&2; exit 2; }

if [[ $1 == --compare ]]; then
  shift
  (($#)) || fail "--compare wants the folders of the results"
  for folder in "$@"; do
    [[ -f $folder/check.json ]] || fail "--compare wants folders of results: there is no file $folder/check.json"
  done
  command -v python3 >/dev/null || install_missing python3
  python3 "$here/check_page.py" "${@/%//check.json}" --out "$quoka_root/build/check/comparison.html"
  exit
fi

if [[ $1 == --estimate ]]; then
  shift
  (($#)) || fail "--estimate wants a MODEL.gguf"
  command -v python3 >/dev/null || install_missing python3
  exec python3 "$here/estimate.py" "$@"
fi

# Options of the program `check`, with their values as a pattern and in words. Other values are refused before anything
# is installed and built; the program itself checks ranges.
whole='[0-9]+' positive='0*[1-9][0-9]*' number='-?[0-9]*[.]?[0-9]+(e[-+]?[0-9]+)?'
budget='(own|0*(1[6-9]|[2-9][0-9]|[1-9][0-9]{2,})|0*[.]0*[1-9][0-9]*|0*1[.]0*)'
declare -A pattern=(
  [--out]='.+' [--json]='.+' [--lengths]="$positive(,$positive)*" [--modes]='(exact|paper|balanced|recommended)([:,].*)?'
  [--arithmetics]='(automatic|float|bf16|int8)(,(automatic|float|bf16|int8))*' [--budgets]="$budget(,$budget)*"
  [--cache]='(f16|q8_0)' [--threads]=$positive [--ubatch]=$positive [--samples]=$positive [--questions]=$positive [--together]=$positive
  [--seed]=$whole [--max-perplexity]=$number [--max-kl]=$number [--max-needles]=$number [--min-gain]=$number)
declare -A words=(
  [--out]='a folder' [--json]='a file' [--lengths]='numbers of tokens with commas between them'
  [--modes]='exact, paper, balanced or recommended, with commas between them' [--arithmetics]='automatic, float, bf16 or int8, with commas between them'
  [--budgets]='own, counts of keys from 16 on, or with a point shares of the past, such as 0.25 and 1.0 for all of it, with commas between them' [--cache]='f16 or q8_0')
flags=' --quick --measure-only --rounding --fresh '
wrong=() model='' out=''
for ((i = 1; i <= $#; ++i)); do
  name=${!i} value=''
  if [[ $name != --* ]]; then
    [[ -f $name ]] || wrong+=("there is no file $name")
    [[ -n $model ]] || model=$name
    continue
  fi
  [[ $flags != *" $name "* ]] || continue
  if [[ $name == *=* ]]; then
    value=${name#*=} name=${name%%=*}
  elif [[ -n ${pattern[$name]:-} ]] && ((i < $#)); then
    ((++i))
    value=${!i}
  fi
  if [[ $flags == *" $name "* ]]; then
    wrong+=("$name takes no value")
  elif [[ -z ${pattern[$name]:-} ]]; then
    wrong+=("$name is not an option: --help lists them")
  elif [[ ! $value =~ ^${pattern[$name]}$ ]]; then
    kind='a number'
    [[ ${pattern[$name]} != "$positive" ]] || kind='a whole number above 0'
    wrong+=("$name is ${value:-without a value}, but must be ${words[$name]:-$kind}")
  fi
  [[ $name != --out ]] || out=$value
done
[[ -n $model ]] || wrong+=("no MODEL.gguf among the arguments")
if ((${#wrong[@]})); then
  printf 'check.sh: %s\n' "${wrong[@]}" >&2
  exit 2
fi
if [[ -z $out ]]; then
  out=$quoka_root/build/check/$(basename "$model" .gguf)
  set -- "$@" --out "$out"
fi

install_missing "${quoka_example_packages[@]}" python3
ggml=$(ggml_folder)
echo "Building for this machine, a minute the first time" >&2
cmake -S "$quoka_root" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DQUOKA_NATIVE=ON -DGGML_DIR="$ggml" \
  -DQUOKA_BUILD_EXAMPLES=ON -DQUOKA_BUILD_GGML=ON >"$quoka_root/build/check.log"
cmake --build "$build" --target check -j "$quoka_jobs" >>"$quoka_root/build/check.log" ||
  { tail -n 40 "$quoka_root/build/check.log" >&2; exit 1; }

python3 "$here/estimate.py" "$model" --weights >&2 || true # a hint; check says what is wrong with a file
"$build/examples/bindings/ggml/check" "$@"
[[ " $* " == *" --measure-only "* ]] || python3 "$here/check_page.py" "$out/check.json"  # whose page is of the advice
