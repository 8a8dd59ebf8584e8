// The reader of GGUF files: any bytes are read whole or refused.
#pragma once

#include "fuzz/bytes.hpp"
#include "support/gguf_file.hpp"

#include <span>
#include <stdexcept>
#include <string>

namespace quoka_fuzz {

struct GgufRead {
  std::string refusal;  // the message, if the file was refused
  std::size_t tensors = 0;
  float sum = 0;  // of all values; it makes the compiler read them
};

// Reads every value of every tensor of F32 and F16. Any exception but std::runtime_error is a
// fault.
inline GgufRead read_gguf(std::span<const std::byte> bytes) {
  using quoka_examples::Index;
  GgufRead result;
  try {
    const quoka_examples::GgufFile file(bytes, "fuzz");
    for (const auto& [name, tensor] : file.tensors()) {
      ++result.tensors;
      if (tensor.type > 1) continue;
      const Index columns = tensor.shape.empty() ? 1 : tensor.shape.front();
      Index rows = 1;
      for (std::size_t axis = 1; axis < tensor.shape.size(); ++axis) rows *= tensor.shape[axis];
      result.sum += file.matrix(name, rows, columns).sum();
    }
  } catch (const std::runtime_error& error) {
    result = {};
    result.refusal = error.what();
  }
  return result;
}

inline void fuzz_gguf(Input input) {
  read_gguf({reinterpret_cast<const std::byte*>(input.data()), input.size()});
}

}  // namespace quoka_fuzz
