#!/usr/bin/env bash
# RULER's tasks, by lm-eval, of models with real weights in llama-server: llama.cpp, exact attention, and selection. Prompts,
# needles and scores are lm-eval's; of its essays' tasks a novel is the haystack (ruler/haystack.py).
#
#   bash bench/ruler.sh --install     lm-eval and what it needs to an environment of its own, build/ruler/lm-eval: 6 GB, most of
#                                     it torch, which transformers needs to read a GGUF file's vocabulary
#   bash bench/ruler.sh               asks; goes on where it was stopped. 5 CPU seconds a task, sample and setting
#   bash bench/ruler.sh --quick       four samples of each task
#   bash bench/ruler.sh --choose      which tasks does exact attention answer? By samples that are not reported
#   bash bench/ruler.sh --report      asks nothing, and writes the answers until now
#
# MODELS: which, of "smollm2 gemma3-270m". LENGTHS: of prompts, 2048,4096. SAMPLES: of each task. THREADS: of each server, 1; seven
# servers answer at once. RESULTS: the folder of ruler.json, build/ruler. SERVER, BACKEND: llama-server and libggml-quoka.so;
# built where they are not given. Copied to bench/results/data ruler.json is what `tables.py --write` reads.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source examples/support/npm.sh

environment=build/ruler/lm-eval
asked=()
case ${1-} in
  --install)
    install_missing python3 python3-venv
    [[ -x $environment/bin/python ]] || python3 -m venv "$environment"
    "$environment/bin/python" -m pip install --disable-pip-version-check --quiet 'lm-eval[api,ruler]==0.4.13' 'transformers==5.24.0' torch gguf sentencepiece
    say "Done. Ask: bash bench/ruler.sh"
    exit
    ;;
  --quick) asked=(--samples 4) ;;
  --choose | --report) asked=("$1") ;;
  '') ;;
  *) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; [[ $1 == --help || $1 == -h ]]; exit ;;
esac
[[ -x $environment/bin/python ]] || fail "lm-eval is not there: bash bench/ruler.sh --install"
results=${RESULTS:-build/ruler}
mkdir -p "$results"

if [[ -z ${SERVER-} || -z ${BACKEND-} ]]; then
  bash examples/bindings/ggml/get_llama_server.sh >&2
  GGML_DIR=$quoka_root/build/llama.cpp bash examples/build.sh ggml-quoka requantize
fi
[[ -z ${LENGTHS-} ]] || asked+=(--lengths "$LENGTHS")
[[ -z ${SAMPLES-} ]] || asked+=(--samples "$SAMPLES")
files=()
for name in ${MODELS:-smollm2 gemma3-270m}; do
  [[ $name != tinyllama ]] || { say "TinyLlama is not asked: a prompt takes it minutes"; continue; }
  file=$(bash examples/support/get_model.sh "$name")
  if [[ $name == smollm2 ]]; then # by weights that llama.cpp multiplies faster
    fast=$results/SmolLM2-135M-Instruct.Q4_0.gguf
    if [[ ! -s $fast ]]; then
      if [[ ! -x build/examples/bindings/ggml/requantize ]]; then # SERVER and BACKEND were given, and nothing is built
        bash examples/bindings/ggml/get_llama_cpp.sh >&2
        bash examples/build.sh requantize
      fi
      build/examples/bindings/ggml/requantize "$file" "$fast.new" Q4_0
      mv "$fast.new" "$fast"
    fi
    file=$fast
  fi
  files+=("$name=$file")
done
"$environment/bin/python" bench/ruler.py --server "${SERVER:-build/llama.cpp/lib/llama-server}" \
  --backend "${BACKEND:-build/examples/bindings/ggml/libggml-quoka.so}" --book "$(bash bench/get_emma.sh "$results")" --work "$results" \
  --out "$results/ruler.json" --threads "${THREADS:-1}" "${asked[@]}" "${files[@]}"
