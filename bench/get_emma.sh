#!/usr/bin/env bash
# Gets Jane Austen's *Emma*, a text that no setting was chosen by, and prints the path of the file:
#
#     get_emma.sh FOLDER
#
# From a Debian package that holds six novels, 2 MB; of it nothing is installed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
(($# == 1)) || { sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" >&2; exit 2; }
mkdir -p "$1"
folder=$(cd "$1" && pwd)
if [[ ! -s $folder/emma.txt ]]; then
  (cd "$folder" && apt-get download r-cran-janeaustenr=1.0.0-1 >/dev/null)
  python3 bench/novel.py "$folder"/r-cran-janeaustenr_1.0.0-1_all.deb emma --out "$folder/emma.txt" >&2
fi
echo "$folder/emma.txt"
