# shellcheck shell=bash
# Sourced by examples/run.sh, tests/run.sh and .ci/run: what a bare Debian lacks, and one build directory, build/.
# All that is said here goes to stderr, so that a program's own output stays alone on stdout.

quoka_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
quoka_jobs=$(nproc)
quoka_packages=(g++ cmake ninja-build pkg-config
  libeigen3-dev libgtest-dev libbenchmark-dev nlohmann-json3-dev libcli11-dev libpcre2-dev libopenblas-pthread-dev)

# install_missing PACKAGE...: installs those that are not there, and does nothing when all are.
install_missing() {
  local package missing=() as_root=()
  if ! command -v dpkg-query >/dev/null; then
    echo "Not a Debian: I take it that you have the equivalents of: $*" >&2
    return
  fi
  for package in "$@"; do
    dpkg-query -W -f '${Status}\n' "$package" 2>/dev/null | grep -q '^install ok installed$' ||
      missing+=("$package")
  done
  ((${#missing[@]})) || return 0
  if ((EUID != 0)); then
    if ! command -v sudo >/dev/null; then
      echo "Missing packages: ${missing[*]}" >&2
      echo "I am not root and there is no sudo. As root: apt-get install ${missing[*]}" >&2
      return 1
    fi
    as_root=(sudo)
  fi
  echo "Installing: ${missing[*]}" >&2
  "${as_root[@]}" apt-get update -qq >&2
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
    apt-get install -qq -y --no-install-recommends "${missing[@]}" >&2
}

# build_native TARGET...: builds them for this machine in build/.
build_native() {
  cmake -S "$quoka_root" -B "$quoka_root/build" -G Ninja -DQUOKA_NATIVE=ON >&2
  cmake --build "$quoka_root/build" -j "$quoka_jobs" --target "$@" >&2
}
