#!/usr/bin/env bash
# Tests the operator as a user has it: built by install.sh, loaded by the onnxruntime and onnx of Python's index, in an
# environment of its own in build/onnxruntime_test (45 MB come over the network).
#
#     test.sh [LIBRARY]      libonnxruntime-quoka.so, or what install.sh makes
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../.ci/setup.sh"

folder=$quoka_root/build/onnxruntime_test python=$quoka_root/build/onnxruntime_test/bin/python
install_missing python3-venv
[[ -x $python ]] || python3 -m venv "$folder"
"$python" -c "import onnx, onnxruntime" 2>/dev/null || "$python" -m pip install --quiet onnx onnxruntime >&2
library=${1:-$(bash "$quoka_root/examples/onnxruntime/install.sh" --prefix "$folder/installed")}
QUOKA_ONNXRUNTIME_LIBRARY=$(realpath "$library") "$python" -B "$quoka_root/examples/onnxruntime/tests/test_operator.py"
