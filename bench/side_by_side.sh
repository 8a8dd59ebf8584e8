#!/usr/bin/env bash
# Compares this library with its alternatives on this machine: torch, ONNX Runtime, OpenVINO, llama.cpp, NumKong,
# transformers. One layer's attention by each, then whole models to their first token.
#
#   bash bench/side_by_side.sh             goes on where it was stopped; 20 minutes for layers, 30 for models
#   bash bench/side_by_side.sh layers      the first half; models: the second
#
#   --quick      layers in six minutes, models in ten
#   --install    makes an environment with all of them in build/side_by_side: 7 GB, most of it torch's
#   --quiet      a turn has a real-time priority, so that other work on the machine does not disturb it; as root
#   --again      measures again what the results have
#
# IK_LLAMA: a folder with a build of ik_llama.cpp (its target llama-sweep-bench), which then takes part in models.
# Only what is installed takes part. PYTHON: the interpreter that has it, build/side_by_side/bin/python if there is one. RESULTS: the
# file, build/side_by_side.json. Copied to bench/results/data it is what `tables.py --write` reads. THREADS: of whole models, 2.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source examples/support/npm.sh

halves=() flags=() install=
for argument in "$@"; do
  case $argument in
    layers | models) halves+=("$argument") ;;
    --quick | --quiet | --again) flags+=("$argument") ;;
    --install) install=1 ;;
    *) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; [[ $argument == --help || $argument == -h ]]; exit ;;
  esac
done
((${#halves[@]})) || halves=(layers models)
folder=$PWD/build/side_by_side results=${RESULTS:-$PWD/build/side_by_side.json}
mkdir -p "$(dirname "$results")"

if [[ -n $install ]]; then
  install_missing g++ libeigen3-dev python3-venv python3-dev binutils
  [[ -x $folder/bin/python ]] || python3 -m venv "$folder"
  "$folder/bin/python" -m pip install --quiet torch onnxruntime onnx openvino openvino-genai "transformers>=5" accelerate gguf numkong ml_dtypes . >&2
fi
[[ -z ${IK_LLAMA:-} || -x $IK_LLAMA/bin/llama-sweep-bench || -x $IK_LLAMA/build/bin/llama-sweep-bench || -x $IK_LLAMA/llama-sweep-bench ]] ||
  fail "IK_LLAMA is $IK_LLAMA, where there is no llama-sweep-bench: build ik_llama.cpp's target of that name"
python=${PYTHON:-$folder/bin/python}
[[ -x $(command -v "$python") ]] || fail "there is no $python: --install makes it, or PYTHON names another"
"$python" -c "import quoka, numpy, ml_dtypes" 2>/dev/null || fail "$python needs this library's package and ml_dtypes: $python -m pip install . ml_dtypes"

GGML_DIR=$(ggml_folder)
export GGML_DIR
if [[ ${halves[*]} == *layers* ]]; then
  [[ -x build/bench/arithmetic_rates ]] || bash examples/build.sh arithmetic_rates
  "$python" bench/side_by_side/operators.py --out "$results" --peaks build/bench/arithmetic_rates "${flags[@]}"
fi
if [[ ${halves[*]} == *models* ]]; then
  bash examples/build.sh ggml-quoka first_token requantize
  work=$PWD/build/side_by_side_models
  mkdir -p "$work"
  if [[ ! -s $work/emma.txt ]]; then # 2 MB: six novels; of the package nothing is installed
    (cd "$work" && apt-get download r-cran-janeaustenr=1.0.0-1 >/dev/null)
    python3 bench/novel.py "$work"/r-cran-janeaustenr_1.0.0-1_all.deb emma --out "$work/emma.txt"
  fi
  slow=$(bash examples/support/get_model.sh smollm2) fast=$work/SmolLM2-135M-Instruct.Q4_0.gguf
  [[ -s $fast ]] || { build/examples/bindings/ggml/requantize "$slow" "$fast.new" Q4_0 && mv "$fast.new" "$fast"; }
  models=("SmolLM2-135M Q4_0=$fast" "SmolLM2-135M Q4_1=$slow" "Gemma 3 270M Q4_K_M=$(bash examples/support/get_model.sh gemma3-270m)")
  "$python" bench/side_by_side/models.py --out "$results" --text "$work/emma.txt" --programs build/examples/bindings/ggml --threads "${THREADS:-2}" ${IK_LLAMA:+--ik-llama "$IK_LLAMA"} "${flags[@]}" "${models[@]}"
fi
echo "$results"
