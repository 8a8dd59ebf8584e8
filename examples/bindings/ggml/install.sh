#!/usr/bin/env bash
# Builds and installs the ggml backend as one file for every processor of this kind, with what it needs:
#
#     install.sh [--prefix DIR]      ~/.local unless said otherwise: DIR/lib/quoka/libggml-quoka.so
#
# Takes the llama.cpp of GGML_DIR, or one that is installed, or else gets its headers and libraries. Three minutes of
# two cores.
set -euo pipefail
# shellcheck source=../../support/npm.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../support/npm.sh"

prefix=$HOME/.local
read_options prefix "$@"
install_missing g++ cmake ninja-build libeigen3-dev nlohmann-json3-dev
ggml=$(ggml_folder)
cd "$quoka_root"
cmake --preset plugin -DGGML_DIR="$ggml" >&2
cmake --build --preset plugin -j "$quoka_jobs" --target ggml-quoka >&2
cmake --install build/plugin --component ggml --prefix "$prefix" --strip >&2
library=$(find "$prefix" -name libggml-quoka.so | head -n 1)
say "Installed. For any program on ggml: export GGML_BACKEND_PATH=$library"
