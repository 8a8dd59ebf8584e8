#!/usr/bin/env bash
# Gets what this folder is built and tested against, llama.cpp release v0.5.0 on Linux, x86-64:
#
#     get_llama_cpp.sh [--to DIR]      build/llama.cpp of this repository, unless said otherwise
#
# The npm registry (the one that npm is set up with) has both halves: the package node-llama-cpp holds a git bundle of
# the release, of which headers and the operator test are checked out; @node-llama-cpp/linux-x64 holds its libraries,
# built for dynamic backends. Pinned by version and checksum. 47 MB come over the network, 34 MB stay:
#
#     DIR/include    ggml's and llama's headers, and ggml-backend-impl.h
#     DIR/lib        libllama, libggml, libggml-base, one libggml-cpu for each kind of processor
#     DIR/tests      test-backend-ops.cpp
set -euo pipefail
# shellcheck source=../../support/npm.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../support/npm.sh"

to=$quoka_root/build/llama.cpp
read_options to "$@"
enter "$to"
if [[ -f whole ]]; then
  say "Nothing to do: $PWD is there and whole."
  exit
fi
command -v git >/dev/null || install_missing git
rm -rf include lib tests
mkdir -p unfinished include tests
fetch "${llama_cpp[@]}"
fetch "${llama_cpp_sources[@]}"
unpack "${llama_cpp[1]}" lib 3 'package/bins/linux-x64/*.so'
checkout_sources ggml/include ggml/src/ggml-backend-impl.h include LICENSE tests/test-backend-ops.cpp
cp unfinished/source/ggml/include/*.h unfinished/source/include/*.h unfinished/source/ggml/src/ggml-backend-impl.h include
cp unfinished/source/tests/test-backend-ops.cpp tests
cp unfinished/source/LICENSE .
rm -rf unfinished
touch whole
say "Done. Build against it: cmake ... -DQUOKA_BUILD_GGML=ON -DGGML_DIR=$PWD (examples/build.sh takes build/llama.cpp)"
