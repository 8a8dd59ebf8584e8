// The reader of GGUF files: any bytes are read whole or refused. tests/decoder/file/gguf_fuzz_test.cpp mutates a sound
// file with the same.
#pragma once

#include "decoder/gguf_fuzz.hpp"
#include "fuzz/bytes.hpp"

namespace quoka_fuzz {

inline void fuzz_gguf(Input input) {
  quoka_decoder::fuzz_one({reinterpret_cast<const std::byte*>(input.data()), input.size()});
}

}  // namespace quoka_fuzz
