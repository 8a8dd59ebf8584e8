// The entry point of libFuzzer for the reader of GGUF files:
//
//   clang++ -std=c++20 -g -O1 -fsanitize=fuzzer,address,undefined -I include -I examples -I tests
//     -I /usr/include/eigen3 tests/decoder/file/gguf_fuzz.cpp examples/decoder/file/*.cpp -o gguf_fuzz
//   ./gguf_fuzz -max_len=4096 CORPUS        (a small GGUF file in CORPUS helps)
#include <cstddef>
#include <cstdint>

#include "decoder/gguf_fuzz.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  quoka_decoder::fuzz_one({reinterpret_cast<const std::byte*>(data), size});
  return 0;
}
