// As much of a GGUF file as a small model needs: numbers, texts, and tensors of F32 and F16.
// Versions 2 and 3, little-endian.
//
//   magic "GGUF", version u32, tensor count u64, key count u64
//   each key:     string, type u32, value; a string is a u64 length and bytes, an array an element
//                 type u32, a u64 count and the elements (arrays are skipped)
//   each tensor:  string, rank u32, extents u64 (innermost first), type u32, offset u64
//   padding up to general.alignment (32 if there is no such key); the tensors' data
//
// A file is not trusted: every number is checked before it is used. A wrong one throws
// std::runtime_error with the file, the byte and both numbers. Source: docs/gguf.md of ggml.
#pragma once

#include "support/mapped_file.hpp"

#include <quoka/base/index.hpp>

#include <Eigen/Core>

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <optional>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace quoka_examples {

using quoka::Index;

// The numbers are ggml's.
enum class TensorType : std::uint32_t { f32 = 0, f16 = 1, q8_0 = 8 };

struct GgufTensor {
  std::uint32_t type = 0;
  std::vector<Index> shape;  // innermost first
  std::uint64_t offset = 0;  // from the start of the data
};

// Move-only; nothing changes after the constructor.
class GgufFile {
 public:
  using RowMajor = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

  explicit GgufFile(const std::string& path) : name_(path), mapped_(path) {
    bytes_ = {mapped_->data(), mapped_->size()};
    read();
  }
  // Reads bytes that outlive the result; `name` stands for the path in messages.
  GgufFile(std::span<const std::byte> bytes, std::string name)
      : name_(std::move(name)), bytes_(bytes) {
    read();
  }

  const std::string& name() const { return name_; }
  const std::map<std::string, GgufTensor>& tensors() const { return tensors_; }
  bool has(const std::string& key) const { return values_.contains(key); }

  // Throw std::runtime_error where there is no such key or its value is of another kind. integer():
  // from 0 to 2^31 - 1.
  std::string text(const std::string& key) const { return value<std::string>(key, "a text"); }
  double number(const std::string& key) const { return value<double>(key, "a number"); }
  Index integer(const std::string& key) const {
    const double x = number(key);
    if (!(x >= 0 && x <= std::numeric_limits<std::int32_t>::max() && x == std::floor(x)))
      fail("key ", key, " is ", x, ", but must be a whole number from 0 to 2147483647");
    return static_cast<Index>(x);
  }

  // [rows, columns]. Throws std::runtime_error if there is no such tensor, and for one of another
  // type or shape.
  RowMajor matrix(const std::string& tensor, Index rows, Index columns) const {
    const auto found = tensors_.find(tensor);
    if (found == tensors_.end()) fail("there is no tensor ", tensor);
    const GgufTensor& t = found->second;
    if (t.type > 1) fail("tensor ", tensor, " has type ", t.type, "; 0 (F32) and 1 (F16) are read");
    const Index columns_there = t.shape.empty() ? 1 : t.shape.front();
    const Index rows_there = values_of(t) / columns_there;
    if (rows_there != rows || columns_there != columns)
      fail("tensor ", tensor, " has ", rows_there, " rows of ", columns_there, ", not ", rows,
           " of ", columns);
    RowMajor result(rows, columns);
    const std::byte* const from = bytes_.data() + data_ + t.offset;
    if (t.type == 0) {
      std::memcpy(result.data(), from, static_cast<std::size_t>(result.size()) * sizeof(float));
    } else {
      for (Index i = 0; i < result.size(); ++i) {
        Eigen::half x;
        std::memcpy(&x, from + 2 * i, 2);
        result.data()[i] = static_cast<float>(x);
      }
    }
    return result;
  }

 private:
  static_assert(std::endian::native == std::endian::little, "files are little-endian");

  template <class... Parts>
  [[noreturn]] void fail(const Parts&... parts) const {
    std::ostringstream text;
    text << name_ << ": ";
    (text << ... << parts);
    throw std::runtime_error(text.str());
  }

  template <class T>
  T value(const std::string& key, const char* kind) const {
    const auto found = values_.find(key);
    if (found == values_.end()) fail("there is no key ", key);
    const T* const value = std::get_if<T>(&found->second);
    if (value == nullptr) fail("key ", key, " is not ", kind);
    return *value;
  }

  static Index values_of(const GgufTensor& t) {
    Index values = 1;
    for (const Index extent : t.shape) values *= extent;
    return values;
  }

  std::uint64_t remaining() const { return bytes_.size() - at_; }
  void require_bytes(const std::string& what, std::uint64_t count, std::uint64_t each = 1) const {
    if (count > remaining() / each)
      fail("at byte ", at_, ": ", what, " takes ", count, " times ", each, " bytes; ", remaining(),
           " remain");
  }
  template <class T>
  T take(const std::string& what) {
    require_bytes(what, sizeof(T));
    T x;
    std::memcpy(&x, bytes_.data() + at_, sizeof(T));
    at_ += sizeof(T);
    return x;
  }
  std::string take_text(const std::string& what) {
    const auto length = take<std::uint64_t>("the length of " + what);
    require_bytes(what, length);
    std::string text(reinterpret_cast<const char*>(bytes_.data()) + at_, length);
    at_ += length;
    return text;
  }

  // One of the file's numbers; integers beyond 2^53 are rounded.
  double take_number(std::uint32_t type, const std::string& what) {
    switch (type) {
      case 0:
      case 7:
        return take<std::uint8_t>(what);
      case 1:
        return take<std::int8_t>(what);
      case 2:
        return take<std::uint16_t>(what);
      case 3:
        return take<std::int16_t>(what);
      case 4:
        return take<std::uint32_t>(what);
      case 5:
        return take<std::int32_t>(what);
      case 6:
        return take<float>(what);
      case 10:
        return static_cast<double>(take<std::uint64_t>(what));
      case 11:
        return static_cast<double>(take<std::int64_t>(what));
      case 12:
        return take<double>(what);
      default:
        fail("at byte ", at_, ": ", what, " has type ", type, "; types go from 0 to 12");
    }
  }

  void read_key() {
    const std::string key = take_text("a key"), what = "key " + key;
    if (has(key)) fail("at byte ", at_, ": ", what, " occurs twice");
    const auto type = take<std::uint32_t>("the type of " + what);
    if (type == 8) {
      values_[key] = take_text(what);
    } else if (type == 9) {
      const auto element = take<std::uint32_t>("the type of " + what);
      const auto count = take<std::uint64_t>("the count of " + what);
      if (element == 9) fail("at byte ", at_, ": ", what, " is an array of arrays; none are read");
      require_bytes(what, count, element == 8 ? 8 : 1);
      for (std::uint64_t i = 0; i < count; ++i)
        element == 8 ? static_cast<void>(take_text(what))
                     : static_cast<void>(take_number(element, what));
      values_[key] = std::monostate();
    } else {
      values_[key] = take_number(type, what);
    }
  }

  void read_tensor() {
    const std::string name = take_text("a tensor's name"), what = "tensor " + name;
    const auto rank = take<std::uint32_t>("the rank of " + what);
    if (rank > 4) fail("at byte ", at_, ": ", what, " has ", rank, " dimensions; up to 4 are read");
    GgufTensor t;
    constexpr std::uint64_t most = std::numeric_limits<Index>::max() / 4;
    std::uint64_t values = 1;
    for (std::uint32_t axis = 0; axis < rank; ++axis) {
      const auto extent = take<std::uint64_t>("an extent of " + what);
      if (extent == 0 || extent > most / values)
        fail("at byte ", at_, ": ", what, " has extent ", extent, " after a product of ", values);
      values *= extent;
      t.shape.push_back(static_cast<Index>(extent));
    }
    t.type = take<std::uint32_t>("the type of " + what);
    t.offset = take<std::uint64_t>("the offset of " + what);
    if (!tensors_.emplace(name, t).second) fail("at byte ", at_, ": ", what, " occurs twice");
  }

  void read() {
    if (take<std::uint32_t>("the magic") != 0x46554747) fail("the file does not begin with GGUF");
    const auto version = take<std::uint32_t>("the version");
    if (version != 2 && version != 3) fail("the version is ", version, "; 2 and 3 are read");
    const auto tensors = take<std::uint64_t>("the number of tensors");
    const auto keys = take<std::uint64_t>("the number of keys");
    require_bytes("the list of tensors", tensors, 24);
    require_bytes("the list of keys", keys, 13);
    for (std::uint64_t i = 0; i < keys; ++i) read_key();
    for (std::uint64_t i = 0; i < tensors; ++i) read_tensor();
    const auto alignment =
        static_cast<std::uint64_t>(has("general.alignment") ? integer("general.alignment") : 32);
    if (!std::has_single_bit(alignment))
      fail("general.alignment is ", alignment, ", but must be a power of 2");
    data_ = (at_ + alignment - 1) / alignment * alignment;
    const std::uint64_t there = bytes_.size() > data_ ? bytes_.size() - data_ : 0;
    for (const auto& [name, t] : tensors_) {
      if (t.offset % alignment != 0)
        fail("tensor ", name, " has the offset ", t.offset, ", not a multiple of ", alignment);
      if (t.type > 1) continue;  // refused when it is asked for
      const std::uint64_t bytes = static_cast<std::uint64_t>(values_of(t)) * (t.type == 0 ? 4 : 2);
      if (bytes > there || t.offset > there - bytes)
        fail("tensor ", name, " has ", bytes, " bytes at offset ", t.offset, "; the file has ",
             there, " bytes of data");
    }
  }

  std::string name_;
  std::optional<MappedFile> mapped_;
  std::span<const std::byte> bytes_;
  std::uint64_t at_ = 0;    // while the file is read
  std::uint64_t data_ = 0;  // where the tensors' data begin
  std::map<std::string, std::variant<std::monostate, double, std::string>> values_;
  std::map<std::string, GgufTensor> tensors_;
};

}  // namespace quoka_examples
