#!/usr/bin/env bash
# Builds and installs the operator for ONNX Runtime as one file for every processor of this kind, with what it needs:
#
#     install.sh [--prefix DIR]      ~/.local unless said otherwise: DIR/lib/quoka/libonnxruntime-quoka.so
#
# Three minutes of two cores. The last line says where it is.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../../.ci/setup.sh"

prefix=$HOME/.local
read_options prefix "$@"
install_missing g++ cmake ninja-build libeigen3-dev binutils
header=$(bash "$quoka_root/examples/bindings/onnxruntime/get_header.sh")
build=$quoka_root/build/onnxruntime
cmake -S "$quoka_root/examples/bindings/onnxruntime" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DQUOKA_ONNXRUNTIME_INCLUDE="$header" >&2
cmake --build "$build" -j "$quoka_jobs" --target onnxruntime-quoka >&2
cmake --install "$build" --component onnxruntime --prefix "$prefix" --strip >&2
find "$(realpath "$prefix")" -name libonnxruntime-quoka.so | head -n 1
