#!/usr/bin/env bash
# Tests the operator as a user has it: built by install.sh, loaded by onnxruntime and onnxruntime-genai of Python's
# index, in an environment of its own in build/onnxruntime_test (60 MB come over the network).
#
#     test.sh [LIBRARY]      libonnxruntime-quoka.so, or what install.sh makes
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../../.ci/setup.sh"

folder=$quoka_root/build/onnxruntime_test python=$quoka_root/build/onnxruntime_test/bin/python
install_missing python3-venv
[[ -x $python ]] || python3 -m venv "$folder"
"$python" -c "import hypothesis, onnx, onnxruntime, onnxruntime_genai" 2>/dev/null ||
  "$python" -m pip install --quiet "${quoka_hypothesis[@]}" onnx onnxruntime onnxruntime-genai >&2
library=${1:-$(bash "$quoka_root/examples/bindings/onnxruntime/install.sh" --prefix "$folder/installed")}
for name in operator genai; do
  printf '== %s\n' "$name"
  QUOKA_ONNXRUNTIME_LIBRARY=$(realpath "$library") "$python" -B "$quoka_root/examples/bindings/onnxruntime/tests/test_$name.py"
done
