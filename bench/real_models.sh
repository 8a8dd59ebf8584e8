#!/usr/bin/env bash
# Every number of results/real_models.md: what exact attention and selection cost models with real weights,
# in unmodified llama.cpp, on a novel that no setting was chosen by.
#
#   bash bench/real_models.sh            goes on where it was stopped; an hour or two
#   bash bench/real_models.sh --quick    one length, one reading, two budgets of each model
#   bash bench/real_models.sh --no-times    on a machine that has other work: what is lost alone, no seconds
#
# RULER's tasks come after it where ruler.sh --install was run: another hour.
#
# MODELS: which, of "smollm2 gemma3-270m tinyllama". THREADS: 1. RESULTS: the folder of real_models.json, build/real_models.
# Copied to bench/results/data it is what `tables.py --write` reads. CHECK: the program `check`; built, with what it needs, if this
# is not given.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source examples/support/npm.sh

quick=()
case ${1-} in
  --quick | --no-times) quick=("$1") ;;
  '') ;;
  *) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; [[ $1 == --help || $1 == -h ]]; exit ;;
esac
results=${RESULTS:-build/real_models}
mkdir -p "$results"

install_missing python3 dpkg
if [[ -z ${CHECK-} ]]; then
  GGML_DIR=$(ggml_folder)
  export GGML_DIR
  bash examples/build.sh ggml-quoka check requantize
fi
check=${CHECK:-build/examples/bindings/ggml/check}

book=$(bash bench/get_emma.sh "$results")
files=()
for name in ${MODELS:-smollm2 gemma3-270m tinyllama}; do
  file=$(bash examples/support/get_model.sh "$name")
  if [[ $name == smollm2 ]]; then # by weights that llama.cpp multiplies faster
    fast=$results/SmolLM2-135M-Instruct.Q4_0.gguf
    [[ -s $fast ]] || { "$(dirname "$check")/requantize" "$file" "$fast.new" Q4_0 && mv "$fast.new" "$fast"; }
    file=$fast
  fi
  files+=("$name=$file")
done
python3 bench/real_models.py --check "$check" --text "$book" --work "$results" --out "$results/real_models.json" \
  --threads "${THREADS:-1}" "${quick[@]}" "${files[@]}"
echo "$results/real_models.json"
if [[ -x build/ruler/lm-eval/bin/python ]]; then
  [[ ${quick[*]-} != --no-times ]] || quick=()
  bash bench/ruler.sh "${quick[@]}"
else
  say "RULER's tasks: bash bench/ruler.sh --install, then without --install"
fi
