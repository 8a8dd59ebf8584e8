#!/usr/bin/env bash
# Builds and installs the operator for ONNX Runtime as one file for every processor of this kind, with what it needs:
#
#     install.sh [--prefix DIR]      ~/.local unless said otherwise: DIR/lib/quoka/libonnxruntime-quoka.so
#
# Three minutes of two cores. The last line says where it is.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../.ci/setup.sh"

prefix=$HOME/.local
while (($#)); do
  case $1 in
    --prefix) prefix=${2:?--prefix DIR} && shift 2 ;;
    --help | -h) sed -n '2,6s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && exit ;;
    *) echo "install.sh: no option $1, only --prefix DIR" >&2 && exit 2 ;;
  esac
done
install_missing g++ cmake ninja-build libeigen3-dev binutils
header=$(bash "$quoka_root/examples/onnxruntime/get_header.sh")
build=$quoka_root/build/onnxruntime
cmake -S "$quoka_root/examples/onnxruntime" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DQUOKA_ONNXRUNTIME_INCLUDE="$header" >&2
cmake --build "$build" -j "$quoka_jobs" --target onnxruntime-quoka >&2
cmake --install "$build" --component onnxruntime --prefix "$prefix" --strip >&2
find "$(realpath "$prefix")" -name libonnxruntime-quoka.so | head -n 1
