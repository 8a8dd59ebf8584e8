#!/usr/bin/env bash
# Every number of results/accuracy.md, from the trained models: RULER's tasks densely and with every selector and budget.
#
#   bash bench/accuracy.sh            goes on where the JSON files end; all of it takes hours
#   SAMPLES=20 bash bench/accuracy.sh    less of it
#   bash bench/accuracy.sh long       only the part of 1,024 to 16,384 tokens
#
# RESULTS: the folder of the JSON files, build/accuracy. Copied to bench/results/data they are what `tables.py --write` reads.
# PROGRAM: bench/accuracy.cpp; built, with what it needs, if this is not given. MODELS: where they lie. LENGTHS, BUDGETS,
# SELECTORS, THREADS: as the program's flags. Lengths are run at budget 1/8, budgets at LENGTH tokens, ablations there
# and at budget 1/16.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source .ci/setup.sh

[[ -n ${PROGRAM-} ]] || bash examples/build.sh accuracy
program=${PROGRAM:-build/bench/accuracy}
models=${MODELS:-examples/data/trained}
results=${RESULTS:-build/accuracy}
selectors=${SELECTORS:-$(paste -sd, <<'LIST'
quoka
quoka.recommended
quoka.balanced
sample_attention
sample_attention.logit
sparq
sparq.logit
loki
loki.logit
less_is_more
xattention
flash_prefill
oracle
LIST
)}
# Choices of the paper, one changed; at one length and budget.
ablations=$(paste -sd, <<'LIST'
quoka.mean
quoka.per_head
quoka.queries64
quoka.softmax.mean
quoka.mixed
quoka.mixed.softmax.mean
random
LIST
)

# run MODEL TASKS SELECTORS LENGTHS BUDGETS: tasks that the model answers (words.gguf was trained on fwe, too, and does not).
run() {
  "$program" --model "$models/$1.gguf" --tasks "$2" --selectors "$3" --lengths "$4" --budgets "$5" \
    --samples "${SAMPLES:-200}" --threads "${THREADS:-0}" --json "$results/accuracy_$1.json"
}

# Longer prompts, with the models that were trained on them. MODEL TASKS SELECTORS LENGTHS BUDGETS SAMPLES
seed_of_long=16  # all else that was ever run, tuning above all, had 1
long() {
  "$program" --model "$models/$1_16k.gguf" --tasks "$2" --selectors "$3" --lengths "$4" --budgets "$5" \
    --samples "${SAMPLES:-$6}" --seed $seed_of_long --threads "${THREADS:-0}" --json "$results/long_$1.json"
}
both() { long needles $needles "$@" && long words cwe "$@"; }

mkdir -p "$results"
needles=single,multi_key,haystack,multi_value,multi_query,vt
if [[ ${1:-all} != long ]]; then
  run needles $needles "$selectors" "${LENGTHS:-512,1024,2048,4096}" 0.125
  run needles $needles "$selectors" "${LENGTH:-2048}" "${BUDGETS:-0.03125,0.0625,0.25}"
  run needles $needles "$ablations" "${LENGTH:-2048}" 0.0625
  run words cwe "$selectors" "${LENGTHS:-512,1024,2048,4096}" 0.125
  # As they are called, without a budget, and the parts of the longest prompts beside them.
  called=quoka.recommended.threshold41.least1024,quoka.balanced.threshold82.least512
  for model in needles words; do
    tasks=$([[ $model == needles ]] && echo $needles || echo cwe)
    run $model "$tasks" $called 4096 1.0
    run $model "$tasks" quoka.recommended,quoka.balanced 4096 0.125,0.0625,0.03125
  done
fi

shares=0.125,0.0625,0.03125
presets=quoka.recommended,quoka.balanced,quoka
both $presets,sample_attention,xattention,flash_prefill,oracle 8192,16384 $shares 200
both $presets,sample_attention 1024,2048,4096 $shares 96
both $presets,sample_attention 1024 0.5 96  # 512 keys, as 1/8 of 4,096 tokens and 1/32 of 16,384
both $presets,sample_attention 2048 0.25 96
both quoka.recommended,quoka.balanced 1024,2048,4096,8192,16384 128 48
