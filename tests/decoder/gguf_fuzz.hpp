// One input of a fuzzer for the reader of GGUF files: shared by gguf_fuzz_test.cpp, which mutates a
// sound file, and fuzz/gguf_fuzz.hpp.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "decoder/file/gguf.hpp"

namespace quoka_decoder {

struct FuzzResult {
  std::string refusal;  // the message, if the file was refused
  // What a sound file gave; sums make the compiler read the bytes.
  std::size_t keys = 0;
  std::size_t tensors = 0;  // of readable types
  std::uint64_t sum = 0;    // of all bytes of their data
};

// Is the key read as a T? Wrong types and ranges are refused; all else escapes.
template <class T>
bool reads(const GgufFile& file, const std::string& key) {
  try {
    const T value = file.get<T>(key);
    static_cast<void>(value);
    return true;
  } catch (const std::runtime_error&) {
    return false;
  }
}

template <class... Ts>
bool reads_as_one_of(const GgufFile& file, const std::string& key) {
  return (reads<Ts>(file, key) || ...) || (reads<std::vector<Ts>>(file, key) || ...);
}

// Reads a file whole: every key, every byte of every tensor, and its first values as
// floats. Throws std::logic_error if the reader contradicts itself; what else escapes is a fault.
inline FuzzResult fuzz_one(std::span<const std::byte> bytes) {
  FuzzResult result;
  try {
    const GgufFile file = GgufFile::parse(bytes, "fuzz");
    for (const std::string& key : file.keys()) {
      // The widest of each kind: between them they hold every value there is.
      if (!reads_as_one_of<std::int64_t, std::uint64_t, double, bool, std::string>(file, key)) {
        throw std::logic_error("key " + key + " is read as no type");
      }
      ++result.keys;
    }
    for (const GgufTensor& tensor : file.tensors()) {
      const Index values = tensor.rows() * tensor.columns();
      if (static_cast<Index>(tensor.data.size()) != bytes_of(tensor.type, values)) {
        throw std::logic_error("tensor " + tensor.name + " has not the bytes of its shape");
      }
      if (file.find_tensor(tensor.name) != &tensor) throw std::logic_error("two tensors, one name");
      for (const std::byte byte : tensor.data) result.sum += static_cast<std::uint64_t>(byte);
      std::vector<float> floats(static_cast<std::size_t>(std::min<Index>(values, 512)));
      dequantize(tensor.type, tensor.data.data(),
                 static_cast<Index>(floats.size()) / values_per_block(tensor.type) *
                     values_per_block(tensor.type),
                 floats.data());
      ++result.tensors;
    }
  } catch (const std::runtime_error& error) {
    result = {};
    result.refusal = error.what();
  }
  return result;
}

}  // namespace quoka_decoder
