#!/usr/bin/env bash
# Builds and installs the library for C, and for every language that calls C, as one file for every processor of this kind:
#
#     install.sh [--prefix DIR]      ~/.local unless said otherwise: include/quoka/c.h, lib/libquoka_c.so, lib/pkgconfig
#
# Then compiles engine.c against what was installed, and runs it. Installs packages that are missing. Some minutes of two
# cores.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../../.ci/setup.sh"

prefix=$HOME/.local
read_options prefix "$@"
install_missing gcc g++ cmake ninja-build libeigen3-dev pkg-config
prefix=$(realpath -m "$prefix")
cmake -S "$quoka_root" -B "$quoka_root/build/c" -G Ninja -DCMAKE_BUILD_TYPE=Release -DQUOKA_INSTALL_COMPILED=ON \
  -DCMAKE_INSTALL_PREFIX="$prefix" -DCMAKE_INSTALL_LIBDIR=lib >&2
cmake --build "$quoka_root/build/c" -j "$quoka_jobs" >&2
cmake --install "$quoka_root/build/c" --strip >&2

export PKG_CONFIG_PATH=$prefix/lib/pkgconfig
read -ra flags <<<"$(pkg-config --cflags --libs quoka-c)"
cc -std=c99 -O2 "$quoka_root/examples/bindings/c/engine.c" "${flags[@]}" -lm -Wl,-rpath,"$prefix/lib" -o "$quoka_root/build/c/engine"
"$quoka_root/build/c/engine"
echo "Installed: PKG_CONFIG_PATH=$prefix/lib/pkgconfig pkg-config --cflags --libs quoka-c"
