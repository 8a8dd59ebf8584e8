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
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=../../.ci/setup.sh
source "$here/../../.ci/setup.sh"

# Package, what npm calls its tarball, its integrity (npm view PACKAGE dist.integrity).
sources=(node-llama-cpp@3.22.1 node-llama-cpp-3.22.1.tgz
  sha512-bltIipuWmc123H7tMIgDGKSsSrhmhlQYeVUC48XTjVW7XGJJiJJyCdlTMzQ/LiWoPkGDpcL4FviDpgw7qfTiDw==)
libraries=(@node-llama-cpp/linux-x64@3.22.1 node-llama-cpp-linux-x64-3.22.1.tgz
  sha512-5uCCDNqWCNfaAm8aR/Uzxbo4HBpKgNF91kCHPepKhgMgV2OAmatoefbOlMihsqCiH2Od35E/eUHQCFbfRBJuOg==)

say() { echo "$*" >&2; }
fail() {
  say "get_llama_cpp.sh: $*"
  exit 1
}

to=$quoka_root/build/llama.cpp
while (($#)); do
  case $1 in
    --to)
      (($# > 1)) || fail "--to wants a value"
      to=$2
      shift 2
      ;;
    -h | --help)
      sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
      exit
      ;;
    *) fail "$1 is not --to" ;;
  esac
done
[[ $(uname -sm) == "Linux x86_64" ]] || fail "the libraries are for Linux on x86-64, this is $(uname -sm)"

# fetch PACKAGE TARBALL INTEGRITY
fetch() {
  say "Fetching $1"
  npm pack --loglevel=error --cache unfinished/npm-cache --pack-destination unfinished "$1" >/dev/null ||
    fail "npm could not fetch $1"
  [[ $3 == "sha512-$(sha512sum "unfinished/$2" | cut -c 1-128 | tr a-f A-F | basenc --base16 -d | base64 -w 0)" ]] ||
    fail "the tarball of $1 is not the one this script was written for"
}

mkdir -p "$to"
cd "$to"
exec 9<. # the folder itself is the lock
flock --nonblock 9 || fail "another run is at work in $to"
if [[ -f whole ]]; then
  say "Nothing to do: $PWD is there and whole."
  exit
fi
for tool in npm git; do
  command -v "$tool" >/dev/null || install_missing "$tool"
done
rm -rf unfinished include lib tests
mkdir unfinished
fetch "${libraries[@]}"
fetch "${sources[@]}"
mkdir include lib tests
tar -xzf "unfinished/${libraries[1]}" -C lib --strip-components=3 --wildcards 'package/bins/linux-x64/*.so'
tar -xzf "unfinished/${sources[1]}" -C unfinished --strip-components=2 package/llama/gitRelease.bundle
git clone --quiet --no-checkout unfinished/gitRelease.bundle unfinished/source
git -C unfinished/source checkout --quiet HEAD -- ggml/include ggml/src/ggml-backend-impl.h include LICENSE \
  tests/test-backend-ops.cpp
cp unfinished/source/ggml/include/*.h unfinished/source/include/*.h unfinished/source/ggml/src/ggml-backend-impl.h include
cp unfinished/source/tests/test-backend-ops.cpp tests
cp unfinished/source/LICENSE .
rm -rf unfinished
touch whole
say "Done. Build against it: cmake ... -DGGML_DIR=$PWD"
