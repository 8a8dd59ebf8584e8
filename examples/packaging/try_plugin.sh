#!/usr/bin/env bash
# The ggml backend's packages as a user gets them, in an empty folder:
#
#     try_plugin.sh PACKAGES MODEL.gguf [PYTHON]
#
# PACKAGES: the folder that plugin.py wrote. The npm package is installed beside node-llama-cpp, which comes over the
# network (50 MB), and a program of two imports reads a text with it. PYTHON, an interpreter that has llama-cpp-python: the
# wheel is installed for it, in that folder. Fails unless the backend says of each layer that it selected. Without PYTHON
# the wheel is installed for python3 and loaded into the ggml that came with node-llama-cpp.
set -euo pipefail
# shellcheck source=SCRIPTDIR/../support/npm.sh
source "$(dirname "${BASH_SOURCE[0]}")/../support/npm.sh"

(($# == 2 || $# == 3)) || fail "wants PACKAGES MODEL.gguf [PYTHON], has $# arguments"
packages=$(realpath "$1") model=$(realpath "$2") python=${3:-}
[[ -f $model ]] || fail "no file $model"
npm_package=$(find "$packages" -name "ggml-quoka-$(quoka_version).tgz")
wheel=$(find "$packages" -name "ggml_quoka-$(quoka_version)-*_$(uname -m).whl")
[[ -n $npm_package && -n $wheel ]] || fail "no packages of version $(quoka_version) in $packages: plugin.py makes them"
command -v npm >/dev/null || install_missing npm
[[ -z $python ]] || "$python" -c 'import llama_cpp' || fail "$python has no llama-cpp-python"

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
export QUOKA_STATS=$folder/stats.json
unset GGML_BACKEND_PATH QUOKA_MODE QUOKA_CONFIG

# selected NAME: every layer but the first, which is dense by default, says that it selected.
selected() {
  python3 - "$QUOKA_STATS" <<'END' || fail "$1: not every layer selected: $(cat "$QUOKA_STATS" 2>/dev/null || echo nothing came to the backend)"
import json, sys
layers = json.load(open(sys.argv[1]))["layers"]
sys.exit(len(layers) < 2 or any("selected" not in layer["did"] for layer in layers[1:]))
END
  say "$1: $(basename "$2") works"
  rm "$QUOKA_STATS"
}

# Without scripts: these would compile llama.cpp where no binary fits.
npm install --loglevel=error --no-audit --no-fund --ignore-scripts --omit=optional --cache npm-cache \
  "${llama_cpp[0]}" "${llama_cpp_sources[0]}" "$npm_package" >&2
cat >app.mjs <<'END'
import {settings} from "ggml-quoka";
import {getLlama} from "node-llama-cpp";
settings({mode: "recommended", budget: 64});
const llama = await getLlama({gpu: false});
const model = await llama.loadModel({modelPath: process.argv[2]});
const context = await model.createContext({contextSize: 1024});
const tokens = model.tokenize("It is a truth universally acknowledged. ".repeat(120)).slice(0, 700);
await context.getSequence().evaluateWithoutGeneratingNewTokens(tokens);
await llama.dispose();
END
node app.mjs "$model"
selected node-llama-cpp "$npm_package"

if [[ -z $python ]]; then
  python3 -m pip --version >/dev/null 2>&1 || install_missing python3 python3-pip
  python3 -m pip install --quiet --disable-pip-version-check --no-deps --target site "$wheel" >&2
  ggml=$(find "$PWD"/node_modules/@node-llama-cpp -path '*bins/linux-*/libggml.*so')
  [[ -f $ggml ]] || fail "node-llama-cpp has not one libggml, but: ${ggml:-none}"
  PYTHONPATH=site python3 -c 'import sys, ggml_quoka; ggml_quoka.load(sys.argv[1], mode="recommended")' "$ggml"
  say "python3: $(basename "$wheel") is installed, and loaded by $(basename "$ggml"); not tried with llama-cpp-python"
  exit
fi
"$python" -m pip install --quiet --no-deps --target site "$wheel"
cat >app.py <<'END'
import sys
import ggml_quoka; ggml_quoka.load(mode="recommended", budget=64)
import llama_cpp
llm = llama_cpp.Llama(sys.argv[1], n_ctx=1024, flash_attn=True, verbose=False)
llm.eval(llm.tokenize(b"It is a truth universally acknowledged. " * 120)[:700])
END
PYTHONPATH=site "$python" app.py "$model"
selected llama-cpp-python "$wheel"
