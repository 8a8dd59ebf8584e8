#!/usr/bin/env bash
# Every number of results/accuracy.md, from the trained models: RULER's tasks densely and with every selector and budget,
# then the tables and the figures.
#
#   bash bench/accuracy.sh              goes on where the JSON files end; all of it takes hours
#   SAMPLES=20 RESULTS=/tmp/a bash bench/accuracy.sh    less of it, elsewhere
#
# DECODER: the program, built with -DQUOKA_NATIVE=ON. MODELS: where they lie. LENGTHS, BUDGETS, SELECTORS, THREADS: as decoder ruler's flags.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

decoder=${DECODER:-build/examples/decoder/decoder}
models=${MODELS:-examples/decoder/trained}
results=${RESULTS:-bench/results}
selectors=${SELECTORS:-$(paste -sd, <<'LIST'
quoka
quoka.uniform
quoka.last
quoka.dissimilar_and_last
quoka.window7
quoka.per_head
quoka.dissimilar_and_last.window7
quoka.dissimilar_and_last.per_head
quoka.dissimilar_and_last.per_head.window7
oracle
oracle.max
sample_attention
sample_attention.logit
sparq
sparq.logit
loki
loki.logit
quest
quest.softmax
less_is_more
tidal_decode
snapkv
keydiff
first_recent
random
LIST
)}

# run MODEL TASKS: the tasks that the model was trained on.
run() {
  "$decoder" ruler --model "$models/$1.gguf" --tasks "$2" --lengths "${LENGTHS:-512,1024,2048,4096}" \
    --samples "${SAMPLES:-200}" --selectors "$selectors" --budgets "${BUDGETS:-0.03125,0.0625,0.125,0.25}" \
    --threads "${THREADS:-0}" --json "$results/accuracy_$1.json"
}

mkdir -p "$results"
run needles single,multi_key,haystack,multi_value,multi_query,vt
run words cwe,fwe

[[ -f $results/accuracy.md ]] || cp bench/results/accuracy.md "$results"
python3 bench/tables.py "$results"
python3 bench/plot.py "$results"
