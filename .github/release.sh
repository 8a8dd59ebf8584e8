#!/usr/bin/env bash
# Makes the parts of a release from HEAD, and checks them:
#
#     release.sh [--tag TAG] [--to DIR] [--plugin | --library FILE] [--check FILE]
#
#     --tag TAG         v and the version; by default that of the header
#     --to DIR          build/release, unless said otherwise; must be empty or not there
#     --plugin          also the ggml backend, for x86-64 and aarch64, and `check`, for Python's wheel: takes ggml from the npm
#                       registry, and some minutes
#     --library FILE    also the ggml backend's packages, of this libggml-quoka.so for machines of this kind
#     --check FILE      Python's wheel carries this program `check`, beside the backend; --plugin builds one
#
#     DIR/quoka-VERSION.tar.gz              headers and CMake files, reproducible; a user's project is built from it
#     DIR/quoka.hpp                         the library as one header; README's first example is compiled with it
#     DIR/quoka-VERSION-python.tar.gz       Python's sdist, of which pip builds the package where it has a compiler and Eigen
#     DIR/quoka-VERSION-*.whl               its wheel for this machine's Python, built of the sdist; tested where nothing else is
#     DIR/ggml-quoka-VERSION-ARCH.tar.gz    the backend
#     DIR/ggml-quoka-VERSION.tgz            the same for npm, and as wheels: DIR/ggml_quoka-VERSION-*-ARCH.whl;
#                                           the npm package is tried with node-llama-cpp and a small model,
#                                           this machine's wheel is installed and loaded
#     DIR/SHA256SUMS, DIR/notes.md          the changelog's section
#
# Refused: a tag that is not the header's version, a changelog without its section, a Debian changelog of another version, and a
# version that does not come after the last tag.
set -euo pipefail
# shellcheck source=SCRIPTDIR/../examples/support/npm.sh
source "$(dirname "${BASH_SOURCE[0]}")/../examples/support/npm.sh"
cd "$quoka_root"

fail() {
  echo "release.sh: $*" >&2
  exit 1
}

version=$(quoka_version)
tag=v$version to=build/release plugin='' library='' check=''
while (($#)); do
  case $1 in
    --tag) tag=${2:?--tag TAG} && shift 2 ;;
    --to) to=${2:?--to DIR} && shift 2 ;;
    --plugin) plugin=1 && shift ;;
    --library) library=$(realpath "${2:?--library FILE}") && shift 2 ;;
    --check) check=$(realpath "${2:?--check FILE}") && shift 2 ;;
    *) fail "no option $1; there are --tag TAG, --to DIR, --plugin, --library FILE, --check FILE" ;;
  esac
done
[[ -z $plugin || -z $library ]] || fail "--plugin builds what --library names: give one of them"
for file in $library $check; do [[ -f $file ]] || fail "there is no file $file"; done
[[ $tag == "v$version" ]] || fail "the tag is $tag, include/quoka/base/version.hpp says $version"
[[ -z $(git status --porcelain --untracked-files=no) ]] || fail "there are changes that are not committed: $(git status --short)"
if [[ -d $to && -n $(ls -A "$to") ]]; then fail "$to is not empty"; fi
install_missing g++ clang cmake ninja-build libeigen3-dev python3 python3-venv git
mkdir -p "$to"
to=$(cd "$to" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# ---- what is claimed ---------------------------------------------------------------------------
awk -v heading="## $version" '$0 == heading { inside = 1; next } /^## / { inside = 0 } inside' .github/CHANGELOG.md |
  sed '/./,$!d' >"$to/notes.md"
[[ -s $to/notes.md ]] || fail ".github/CHANGELOG.md has no section \"## $version\"; it has: $(grep '^## ' .github/CHANGELOG.md | tr '\n' ';')"
grep -q "(${version//./\\.}-" examples/packaging/debian/changelog ||
  fail "examples/packaging/debian/changelog is not of version $version"

previous=$(git describe --tags --match 'v[0-9]*' --exclude "$tag" --abbrev=0 HEAD 2>/dev/null || true)
if [[ -n $previous ]]; then
  latest=$(printf '%s\n' "${previous#v}" "$version" | sort -V | tail -n 1)
  [[ $latest == "$version" && $version != "${previous#v}" ]] || fail "$version does not come after $previous"
fi

# ---- what is handed out -------------------------------------------------------------------------
name=quoka-$version
git archive --prefix="$name/" HEAD CMakeLists.txt LICENSE .cmake include | gzip -9n >"$to/$name.tar.gz"
tar -C "$work" -xf "$to/$name.tar.gz"
diff -rq include "$work/$name/include" || fail "$name.tar.gz has other headers than the tree"
# The headers are the tree's, so a part of them is enough.
cmake -S tests/consumer -B "$work/consumer" -G Ninja -DQUOKA_URL="file://$to/$name.tar.gz" -DQUOKA_WANTED="$version" \
  -DQUOKA_MAIN=little.cpp -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG="-O0 -DQUOKA_ALLOW_UNOPTIMIZED" >"$work/log" || fail "$(<"$work/log")"
cmake --build "$work/consumer" >"$work/log" || fail "$(<"$work/log")"
"$work/consumer/consumer" || fail "a user's program, built from $name.tar.gz, returned $?"

python3 -B examples/packaging/amalgamate.py -o "$to/quoka.hpp"
# By Clang: the test packaging.single_header has it compiled by GCC, and compares its code with the headers'.
grep -v '^#include <quoka/' examples/01_first_screen.cpp | cat <(echo '#include "quoka.hpp"') - >"$work/single.cpp"
clang++ -std=c++20 -O1 -I"$to" -isystem /usr/include/eigen3 "$work/single.cpp" -o "$work/single" -pthread ||
  fail "clang++ does not compile README's first example with quoka.hpp"
"$work/single" >"$work/log" || fail "README's first example, compiled with quoka.hpp, returned $?"

# backend ARCH FOLDER COMMAND...: the plug-in for every usual ISA level, beside the ggml in FOLDER, for glibc 2.17 and
# later. It must load: COMMAND runs a program of its machine. For this machine's ARCH the program `check`, too.
backend() {
  local arch=$1 folder=$work/ggml-quoka-$version-$1 programs=()
  if [[ $arch == "$(uname -m)" ]]; then programs=(-DQUOKA_BUILD_EXAMPLES=ON -Dfmt_DIR="/usr/lib/$arch-linux-gnu/cmake/fmt"); fi
  cmake -S . -B "$work/$arch" -G Ninja --toolchain "$quoka_root/.cmake/zig.cmake" -DCMAKE_BUILD_TYPE=Release \
    -DQUOKA_ZIG_TARGET="$arch-linux-gnu.2.17" -DQUOKA_ISA_LEVELS=usual -DQUOKA_BUILD_GGML=ON \
    "${programs[@]}" -DGGML_DIR="$2" >"$work/log" || fail "$(<"$work/log")"
  cmake --build "$work/$arch" -j "$quoka_jobs" --target ggml-quoka ${programs:+check} >"$work/log" || fail "$(tail -50 "$work/log")"
  [[ -z ${programs:-} ]] || cmake --install "$work/$arch" --component ggml_check --prefix "$work/check" --strip >"$work/log"
  cmake --install "$work/$arch" --component ggml --prefix "$folder" --strip >"$work/log"
  [[ -n $(find "$folder" -name '*ggml-quoka*.so' 2>/dev/null) ]] ||
    fail "cmake --install --component ggml put no ggml-quoka into the package: $(<"$work/log")"
  "$arch-linux-gnu-gcc" tests/packaging/load_backend.c -o "$work/load" -ldl -Wl,--no-as-needed -Wl,--allow-shlib-undefined \
    "$2/lib/libggml-base.so"  # whose functions the backend finds in what loads it
  "${@:3}" "$work/load" "$(find "$folder" -name '*ggml-quoka*.so')" >"$work/log" ||
    fail "the backend for $arch does not load"
  tar --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$(git log -1 --format=%ct)" -C "$work" \
    -cf - "${folder##*/}" | gzip -9n >"$to/${folder##*/}.tar.gz"
}
# As ${llama_cpp[@]} of npm.sh, for Arm.
arm=(@node-llama-cpp/linux-arm64@3.22.1 node-llama-cpp-linux-arm64-3.22.1.tgz
  sha512-W+7naKCXX9/eEjjFmRS8vvx91QyLXDbeFxexZc3bh/PtQABZgmRL3C0AtYYXn4YGTj/3Qor4lWZn2tpjZFPLdQ==)
libraries=()
if [[ -n $library ]]; then libraries=(--library "$(uname -m)=$library"); fi
if [[ -n $plugin ]]; then
  install_missing "${quoka_example_packages[@]}"
  command -v npm >/dev/null || install_missing npm
  bash examples/bindings/ggml/get_llama_cpp.sh
  bash .ci/get_zig.sh
  backend x86_64 "$quoka_root/build/llama.cpp" env LD_LIBRARY_PATH="$quoka_root/build/llama.cpp/lib"
  install_missing g++-aarch64-linux-gnu qemu-user
  mkdir -p "$work/ggml/unfinished" "$work/ggml/lib"
  cp -r build/llama.cpp/include "$work/ggml"
  (cd "$work/ggml" && fetch "${arm[@]}" && unpack "${arm[1]}" lib 3 'package/bins/linux-arm64/*.so')
  backend aarch64 "$work/ggml" \
    qemu-aarch64 -L /usr/aarch64-linux-gnu -E LD_LIBRARY_PATH="$work/ggml/lib:/usr/aarch64-linux-gnu/lib"
  for arch in x86_64 aarch64; do
    libraries+=(--library "$arch=$(find "$work/ggml-quoka-$version-$arch" -name '*ggml-quoka*.so')")
  done
  library=$(find "$work/ggml-quoka-$version-$(uname -m)" -name '*ggml-quoka*.so')
  check=${check:-$(find "$work/check" -name check -type f)}
fi
if [[ -n $library ]]; then
  python3 -B examples/packaging/plugin.py "${libraries[@]}" --to "$to"
  bash examples/packaging/try_plugin.sh "$to" "$(bash examples/support/get_model.sh smollm2)"
fi

python3 -m venv "$work/python"
"$work/python/bin/pip" install --quiet build
"$work/python/bin/python" -m build --sdist --outdir "$work/sdist" . >"$work/log" 2>&1 || fail "$(tail -30 "$work/log")"
mv "$work/sdist/$name.tar.gz" "$to/$name-python.tar.gz"  # beside the other archive of that name
bash examples/bindings/python/wheel.sh --from "$to/$name-python.tar.gz" --to "$to" --test \
  ${library:+--plugin "$library"} ${check:+--check "$check"} >"$work/log" 2>&1 || fail "$(tail -30 "$work/log")"

(cd "$to" && find . -maxdepth 1 -type f ! -name SHA256SUMS ! -name notes.md -printf '%P\n' | sort | xargs sha256sum >SHA256SUMS)
echo "quoka $version in $to:"
ls -l "$to"
