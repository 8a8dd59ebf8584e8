# shellcheck shell=bash
# Sourced by the scripts that get files out of packages of the npm registry, each pinned by its
# version and its integrity. A package here is an array: PACKAGE@VERSION, what npm calls its tarball, and
# `npm view PACKAGE dist.integrity`.
# shellcheck source=../../.ci/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../.ci/setup.sh"

# llama.cpp release v0.5.0, built for dynamic backends.
# shellcheck disable=SC2034  # for those who source this
llama_cpp=(@node-llama-cpp/linux-x64@3.22.1 node-llama-cpp-linux-x64-3.22.1.tgz
  sha512-5uCCDNqWCNfaAm8aR/Uzxbo4HBpKgNF91kCHPepKhgMgV2OAmatoefbOlMihsqCiH2Od35E/eUHQCFbfRBJuOg==)
# A git bundle of the same release: its sources.
# shellcheck disable=SC2034
llama_cpp_sources=(node-llama-cpp@3.22.1 node-llama-cpp-3.22.1.tgz
  sha512-bltIipuWmc123H7tMIgDGKSsSrhmhlQYeVUC48XTjVW7XGJJiJJyCdlTMzQ/LiWoPkGDpcL4FviDpgw7qfTiDw==)

# ggml_folder: what the ggml backend is built against. GGML_DIR; else an installed llama.cpp, if it has
# ggml-backend-impl.h besides what it installs by itself; else what get_llama_cpp.sh gets.
ggml_folder() {
  local installed
  if [[ -n ${GGML_DIR:-} ]]; then
    echo "$GGML_DIR"
    return
  fi
  installed=$(pkg-config --variable=prefix llama 2>/dev/null || true)
  if [[ -n $installed && -f $installed/include/ggml-backend-impl.h ]]; then
    echo "$installed"
    return
  fi
  [[ -z $installed ]] || say "The llama.cpp in $installed is without ggml-backend-impl.h, which backends are built on:" \
    "taking another. GGML_DIR=FOLDER names one with its sources."
  bash "$quoka_root/examples/bindings/ggml/get_llama_cpp.sh" >&2
  echo "$quoka_root/build/llama.cpp"
}

# enter FOLDER: into it, made if need be, and alone in it.
enter() {
  [[ $(uname -sm) == "Linux x86_64" ]] || fail "what it gets is built for Linux on x86-64, this is $(uname -sm)"
  mkdir -p "$1"
  cd "$1"
  exec 9<. # the folder itself is the lock
  flock --nonblock 9 || fail "another run is at work in $1"
}

# integrity_is INTEGRITY FILE: is the file there, and is that its sha512 in base 64, as npm writes it?
integrity_is() {
  [[ -f $2 ]] &&
    [[ $1 == "sha512-$(sha512sum "$2" | cut -c 1-128 | tr a-f A-F | basenc --base16 -d | base64 -w 0)" ]]
}

# fetch PACKAGE TARBALL INTEGRITY: into unfinished/, unless an earlier run has done so.
fetch() {
  integrity_is "$3" "unfinished/$2" && return
  command -v npm >/dev/null || install_missing npm
  say "Fetching $1"
  # A cache of its own: npm would otherwise keep a second copy of every tarball.
  npm pack --loglevel=error --cache unfinished/npm-cache --pack-destination unfinished "$1" >/dev/null ||
    fail "npm could not fetch $1"
  integrity_is "$3" "unfinished/$2" || fail "the tarball of $1 is not the one this script was written for"
}

# unpack TARBALL FOLDER DEPTH PATH...: these of it (patterns) into the folder, without DEPTH leading folders.
unpack() {
  mkdir -p "$2"
  tar -xzf "unfinished/$1" -C "$2" --strip-components="$3" --wildcards "${@:4}"
}

# checkout_sources PATH...: these of llama.cpp's sources, fetched before, into unfinished/source.
checkout_sources() {
  rm -rf unfinished/source
  unpack "${llama_cpp_sources[1]}" unfinished 2 package/llama/gitRelease.bundle
  git clone --quiet --no-checkout unfinished/gitRelease.bundle unfinished/source
  git -C unfinished/source checkout --quiet HEAD -- "$@"
}
