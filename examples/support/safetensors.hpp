// Reads .safetensors files, the format in which the captured queries, keys and values of
// the examples are stored.
//
// Format, after the description in github.com/huggingface/safetensors (README, "Format"):
//     8 bytes     N, unsigned, little-endian
//     N bytes     JSON, padded with spaces: {"__metadata__": {"KEY": "TEXT"},
//                 "NAME": {"dtype": "F16", "shape": [2, 3], "data_offsets": [BEGIN, END]}, ...}
//     the rest    raw row-major little-endian data; offsets count from its first byte
//
// Cost: opening maps the file and parses the header; data is touched when it is read. A file is not
// trusted: every number of the header is checked before it is used. A bad one throws
// std::runtime_error with the file, the byte offset and both numbers. So does a name that the
// header has twice. Ranges that overlap or leave gaps are accepted, because they are safe to read.
// The file must not shrink while it is open. Deviations: read() takes tensors of type F16, BF16 and
// F32 and of rank 3 or 4. Others may be in the file and are listed; what the header says of them
// must be sound too.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include <unsupported/Eigen/CXX11/Tensor>

#include "support/mapped_file.hpp"

namespace quoka_examples {

static_assert(std::endian::native == std::endian::little, "safetensors data is little-endian");

using Index = Eigen::Index;
template <class T>
using Tensor = Eigen::Tensor<T, 4, Eigen::RowMajor>;  // [batch, heads, len, dim]
using Metadata = std::map<std::string, std::string>;

enum class DType { F16, BF16, F32 };

constexpr const char* name_of(DType dtype) {
  return dtype == DType::F16 ? "F16" : dtype == DType::BF16 ? "BF16" : "F32";
}

template <class T>
constexpr DType dtype_of() {
  static_assert(std::is_same_v<T, Eigen::half> || std::is_same_v<T, Eigen::bfloat16> ||
                    std::is_same_v<T, float>,
                "tensors hold Eigen::half, Eigen::bfloat16 or float");
  if constexpr (std::is_same_v<T, Eigen::half>)
    return DType::F16;
  else if constexpr (std::is_same_v<T, Eigen::bfloat16>)
    return DType::BF16;
  else
    return DType::F32;
}

struct TensorInfo {
  std::string dtype_name;           // as in the file
  std::optional<DType> dtype;       // none: a type that read() does not take
  std::vector<Index> shape;         // as in the file, row-major; the last axis is contiguous
  const std::byte* data = nullptr;  // first element; any alignment; valid while the file is open
  std::size_t bytes = 0;            // of a dtype: the product of shape times an element's
  std::size_t offset = 0;           // of data, in bytes from the start of the file
};

namespace detail {

// Throws std::runtime_error: "PATH: at byte OFFSET: " and the parts, printed one after the other.
template <class... Parts>
[[noreturn]] void fail(const std::string& path, std::uint64_t offset, const Parts&... parts) {
  std::ostringstream text;
  text << path << ": at byte " << offset << ": ";
  (text << ... << parts);
  throw std::runtime_error(text.str());
}

}  // namespace detail

// The number that a text is in JSON, in every locale; nothing for other texts.
std::optional<double> number_from(const std::string& text);

// An open file: move-only; threads may share it, since nothing changes after the constructor.
class SafetensorsFile {
 public:
  // Throws std::runtime_error if the file cannot be mapped or its header is not sound.
  explicit SafetensorsFile(const std::filesystem::path& path);

  const std::string& path() const { return path_; }
  const Metadata& metadata() const { return metadata_; }
  bool contains(const std::string& name) const { return tensors_.count(name) != 0; }

  // All tensors' names, in alphabetical order.
  std::vector<std::string> names() const;

  // The contents of the file, for an error message: "the file has 2 tensors:" and a line for each
  // of the first dozen, its name, dtype and shape.
  std::string listing() const;

  // Throws std::runtime_error if there is no such tensor.
  const TensorInfo& info(const std::string& name) const;

  // A copy as T: Eigen::half, Eigen::bfloat16 or float; rank 3 is read as batch 1. The same dtype
  // is copied bit for bit; another is converted through float, to nearest even, overflowing to
  // infinity. Throws std::runtime_error if there is no such tensor, or for another dtype or rank.
  template <class T>
  Tensor<T> read(const std::string& name) const;

  Tensor<float> read_float(const std::string& name) const { return read<float>(name); }

 private:
  struct Header;  // its JSON, while it is read

  std::string path_;
  MappedFile file_;
  std::size_t data_start_ = 0;
  std::map<std::string, TensorInfo> tensors_;
  Metadata metadata_;
};

}  // namespace quoka_examples
