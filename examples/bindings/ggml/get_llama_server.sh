#!/usr/bin/env bash
# Makes llama-server of llama.cpp release v0.5.0, which loads the backend like every program on ggml:
#
#     get_llama_server.sh [--to DIR]      build/llama.cpp of this repository, unless said otherwise
#
# Gets llama.cpp's libraries first (get_llama_cpp.sh), and compiles the server alone from the same release: a minute
# of two cores. 36 MB come over the network, 4 MB stay: DIR/lib/llama-server
set -euo pipefail
# shellcheck source=../../support/npm.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../support/npm.sh"
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

to=$quoka_root/build/llama.cpp
read_options to "$@"
bash "$here/get_llama_cpp.sh" --to "$to"
enter "$to"
if [[ -x lib/llama-server ]]; then
  say "Nothing to do: $PWD/lib/llama-server is there."
  exit
fi
install_missing g++ cmake ninja-build git
mkdir -p unfinished
fetch "${llama_cpp_sources[@]}"
checkout_sources common vendor include src ggml/include tools/server tools/mtmd tools/ui/ui.h.in tools/ui/ui.cpp.in
say "Compiling llama-server"
cmake -S "$here/server" -B unfinished/server -G Ninja -DSOURCE="$PWD/unfinished/source" -DLIBRARIES="$PWD/lib" >unfinished/log
cmake --build unfinished/server -j "$quoka_jobs" >>unfinished/log || { tail -n 30 unfinished/log >&2; exit 1; }
rm -rf unfinished
say "Done. Start it: GGML_BACKEND_PATH=.../libggml-quoka.so $PWD/lib/llama-server -m model.gguf"
