# shellcheck shell=bash
# Sourced by the scripts that build, test and measure: what a bare Debian lacks, and a build for this machine.
# All that is said here goes to stderr, so that a program's own output stays alone on stdout.

quoka_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
quoka_jobs=${JOBS:-$(nproc)}  # of a compiler, of tests
quoka_example_packages=(g++ cmake ninja-build libeigen3-dev nlohmann-json3-dev libcli11-dev libfmt-dev)
quoka_test_packages=("${quoka_example_packages[@]}" pkg-config libgtest-dev)
quoka_packages=("${quoka_test_packages[@]}" libbenchmark-dev)  # for everything in the tree
# Of Python's index. Another version draws other cases.
quoka_hypothesis=("hypothesis==6.170.17; python_version >= '3.11'" "hypothesis; python_version < '3.11'")

say() { echo "$*" >&2; }

fail() {
  say "$(basename "$0"): $*"
  exit 1
}

# read_options "NAME..." ARGUMENT...: `--NAME VALUE` sets the variable NAME; --help prints the head of the script.
read_options() {
  local names=$1
  shift
  while (($#)); do
    if [[ $1 == -h || $1 == --help ]]; then
      sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"
      exit
    fi
    [[ $1 == --* && " $names " == *" ${1#--} "* ]] || fail "$1 is not an option: there is --${names// / and --}"
    (($# > 1)) || fail "$1 wants a value"
    printf -v "${1#--}" %s "$2"
    shift 2
  done
}

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
  # One at a time: apt's own locks refuse a second one.
  # shellcheck disable=SC2016  # for the inner shell
  "${as_root[@]}" flock /run/lock/quoka-packages sh -c 'apt-get update -qq &&
    DEBIAN_FRONTEND=noninteractive exec apt-get install -qq -y --no-install-recommends "$@"' sh "${missing[@]}" >&2
}

# The library's version, of its header.
quoka_version() {
  awk '/^#define QUOKA_VERSION_(MAJOR|MINOR|PATCH) / { printf "%s%s", dot, $3; dot = "." }' \
    "$quoka_root/include/quoka/base/version.hpp"
}

# New build folders use ccache where it is installed. Without that sloppiness it skips what has a precompiled header.
# It must compare the headers' own text (CCACHE_DEPEND), not what is left of it after preprocessing: where comments alone
# had changed it would hand out the precompiled header of the old text, whose headers GCC takes for others and reads again.
if command -v ccache >/dev/null; then
  export CMAKE_CXX_COMPILER_LAUNCHER=${CMAKE_CXX_COMPILER_LAUNCHER-ccache}
  export CCACHE_SLOPPINESS=${CCACHE_SLOPPINESS-pch_defines,time_macros}
  export CCACHE_DEPEND=${CCACHE_DEPEND-1}
fi

# build_native FOLDER "TARGET..." [CMAKE ARGUMENT...]: builds them for this machine in FOLDER.
build_native() {
  local folder=$1 targets
  read -ra targets <<<"$2"
  shift 2
  # What tests/run.sh has set in the same folder is set back.
  cmake -S "$quoka_root" -B "$folder" -G Ninja -DQUOKA_NATIVE=ON -DQUOKA_KERNELS_APART=OFF \
    -DCMAKE_CXX_FLAGS_RELEASE="-O3 -DNDEBUG" "$@" >&2
  cmake --build "$folder" -j "$quoka_jobs" --target "${targets[@]}" >&2
}
