#!/usr/bin/env bash
# llama.cpp's own test of attention, test-backend-ops test -o FLASH_ATTN_EXT, with this backend:
#
#     operator_test.sh BUILD_FOLDER [ARGUMENT...]      arguments go to the test: -p 'hsk=128'
#
# Every case is computed by the library and compared with the CPU backend: QUOKA_MIN_QUERIES=1 takes single queries,
# too. Says how many passed, failed, were not taken. 20 minutes of a busy core; the log is BUILD_FOLDER/operator_test.log.
set -euo pipefail
build=$(cd "$1" && pwd)
shift
cmake --build "$build" --target test-backend-ops ggml-quoka >/dev/null
libraries=$(sed -n 's/^GGML_DIR:PATH=//p' "$build/CMakeCache.txt")
[[ -n $libraries ]] || libraries=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)/build/llama.cpp
cd "$libraries/lib" # where the test looks for the CPU backends
log=$build/operator_test.log
GGML_BACKEND_PATH=$build/examples/bindings/ggml/libggml-quoka.so QUOKA_MODE=exact QUOKA_MIN_QUERIES=1 \
  "$build/examples/bindings/ggml/test-backend-ops" test -o FLASH_ATTN_EXT -b QuoKA "$@" >"$log" 2>&1 || true
passed=$(grep -c ' *FLASH_ATTN_EXT(.*OK' "$log" || true)
failed=$(grep -c 'FAIL' "$log" || true)
refused=$(grep -c 'not supported' "$log" || true)
echo "passed $passed, failed $failed, not taken $refused"
((passed > 0 && failed == 0))
