#!/usr/bin/env bash
# Gets the header of ONNX Runtime's C interface, which the package on Python's index does not have, and prints its folder:
#
#     get_header.sh [--to DIR]      build/onnxruntime_header of this repository, unless said otherwise
#
# Debian 13 and later have it in libonnxruntime-dev. On Debian 12 that package is taken from Debian 13's list and unpacked in
# DIR, nothing is installed: 10 MB of lists and 85 KB come over the network, 0.2 MB stay. The interface only grows, so a
# header of 1.21 serves later runtimes.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../../.ci/setup.sh"

to=$quoka_root/build/onnxruntime_header
read_options to "$@"
for folder in /usr/include/onnxruntime "$to"; do
  if [[ -f $folder/onnxruntime_c_api.h ]]; then
    echo "$folder"
    exit
  fi
done
if apt-cache show libonnxruntime-dev >/dev/null 2>&1; then
  install_missing libonnxruntime-dev
  echo /usr/include/onnxruntime
  exit
fi
keys=/usr/share/keyrings/debian-archive-keyring.gpg
if [[ ! -f $keys ]] || ! command -v apt-get dpkg-deb >/dev/null; then
  echo "get_header.sh: no Debian. Take onnxruntime_c_api.h from a release of ONNX Runtime: -DQUOKA_ONNXRUNTIME_INCLUDE=its folder" >&2
  exit 1
fi
# Where this system's own packages come from, and the next release's list of them, in a folder of its own.
mirror=$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' 'Label: Debian' | head -n 1)
if [[ -z $mirror ]]; then
  echo "get_header.sh: this system has no list of Debian's packages: as root, apt-get update" >&2
  exit 1
fi
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
mkdir -p "$folder"/{lists/partial,cache/archives/partial,parts}
echo "deb [signed-by=$keys] $mirror trixie main" >"$folder/sources.list"
options=(-o Dir::Etc::sourcelist="$folder/sources.list" -o Dir::Etc::sourceparts="$folder/parts" -o Dir::State::lists="$folder/lists"
  -o Dir::Cache="$folder/cache" -o APT::Sandbox::User=root -o Acquire::Languages=none
  -o Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false -o Acquire::IndexTargets::deb::Contents-deb::DefaultEnabled=false)
echo "Getting onnxruntime_c_api.h, of Debian 13's package libonnxruntime-dev" >&2
apt-get "${options[@]}" update -qq >&2
(cd "$folder" && apt-get "${options[@]}" download -qq libonnxruntime-dev >&2)
dpkg-deb -x "$folder"/libonnxruntime-dev_*.deb "$folder/package"
mkdir -p "$to"
cp "$folder"/package/usr/include/onnxruntime/onnxruntime_c_api.h "$folder"/package/usr/share/doc/libonnxruntime-dev/copyright "$to"
echo "$to"
