#!/usr/bin/env bash
# Tests the Python package whole, as a user installs it: arrays, torch, transformers. Makes an environment in
# build/python_whole and installs there what is missing, torch and transformers among it (3 GB).
#
#     test.sh            everything
#     test.sh arrays     without torch; also: threads, torch, transformers, overhead
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../../.ci/setup.sh"

parts=("$@")
(($#)) || parts=(arrays threads torch transformers overhead)
for part in "${parts[@]}"; do
  [[ $part =~ ^(arrays|threads|torch|transformers|overhead)$ ]] || { sed -n '2,6s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2; }
done
install_missing g++ libeigen3-dev python3-venv python3-dev binutils
folder=$quoka_root/build/python_whole python=$quoka_root/build/python_whole/bin/python
[[ -x $python ]] || python3 -m venv "$folder"
"$python" -m pip install --quiet "$quoka_root" ml_dtypes "${quoka_hypothesis[@]}" >&2
if [[ " ${parts[*]} " =~ torch|transformers ]]; then
  "$python" -c "import torch, transformers" 2>/dev/null || "$python" -m pip install --quiet torch "transformers>=5" >&2
fi
cd "$folder"  # not beside the sources, whose package has no module
for part in "${parts[@]}"; do
  printf '== %s\n' "$part"
  if [[ $part == overhead ]]; then
    "$python" -B "$quoka_root/examples/bindings/python/tests/overhead.py"
  else
    "$python" -B "$quoka_root/examples/bindings/python/tests/test_$part.py"
  fi
done
