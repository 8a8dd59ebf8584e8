// A GGUF file: keys with values, and tensors. Versions 2 and 3, little-endian.
//
//   magic "GGUF", version u32, tensor count u64, key count u64
//   each key:     string, type u32, value; a string is a u64 length and bytes, an array an element
//                 type u32, a u64 count and the elements
//   each tensor:  string, rank u32, extents u64 (innermost first), type u32, offset u64
//   padding up to general.alignment (32 if there is no such key); the tensors' data
//
// Cost: opening maps the file and walks the header; values and data are read when asked for.
// A file is not trusted: every number is checked before it is used or anything is allocated for it,
// and what is wrong throws std::runtime_error naming the file, the byte offset and both numbers.
// The file must not shrink while it is open. Source: docs/gguf.md of ggml. Deviations: arrays in
// arrays and extents of 0 are refused; gaps between and overlaps of tensors' data are accepted.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "decoder/file/block_types.hpp"
#include "support/mapped_file.hpp"

namespace quoka_decoder {

// A tensor's place in the file. As a matrix it is row-major: rows() rows of columns() values.
struct GgufTensor {
  std::string name;
  TensorType type = TensorType::f32;
  std::vector<Index> shape;         // innermost first; up to 4 extents, none of them 0
  std::span<const std::byte> data;  // whole blocks, row after row; valid while the file is open

  Index columns() const { return shape.empty() ? 1 : shape[0]; }
  Index rows() const;  // the product of the other extents
};

template <class T, class... Ts>
concept OneOf = (std::same_as<T, Ts> || ...);

template <class T>
concept GgufScalar =
    OneOf<T, std::int8_t, std::uint8_t, std::int16_t, std::uint16_t, std::int32_t, std::uint32_t,
          std::int64_t, std::uint64_t, float, double, bool, std::string>;

template <class T>
inline constexpr bool is_gguf_array = false;
template <GgufScalar T>
inline constexpr bool is_gguf_array<std::vector<T>> = true;

// What a key may be read as.
template <class T>
concept GgufValue = GgufScalar<T> || is_gguf_array<T>;

// Move-only; threads may share it, since nothing changes after the constructor.
class GgufFile {
 public:
  // Maps the file. Throws std::runtime_error if it cannot be mapped or is not sound.
  explicit GgufFile(const std::string& path);

  // Reads bytes that outlive the result; `name` stands for the path in messages.
  static GgufFile parse(std::span<const std::byte> bytes, std::string name);

  GgufFile(GgufFile&&) = default;
  GgufFile& operator=(GgufFile&&) = default;

  const std::string& name() const { return name_; }

  bool has(std::string_view key) const { return values_.find(key) != values_.end(); }
  std::vector<std::string> keys() const;  // in alphabetical order

  // The value of a key. An integer may be stored in any width, as long as T holds it; a float or a
  // double may be stored as either (a double is rounded); the rest must be stored as it is read.
  // Throws std::runtime_error, with the type found and the type wanted, if there is no such key,
  // its type is another or T does not hold it.
  template <GgufValue T>
  T get(std::string_view key) const;

  // The same, or the fallback if there is no such key.
  template <GgufValue T>
  T get_or(std::string_view key, T fallback) const {
    return has(key) ? get<T>(key) : std::move(fallback);
  }

  // All tensors of readable types, in the file's order. One of another type does not spoil the
  // file, whose keys may be all that is wanted: it is refused, by its type's name, when asked for.
  const std::vector<GgufTensor>& tensors() const { return tensors_; }

  // Of all tensors, those of other types too; in alphabetical order.
  std::vector<std::string> tensor_names() const;

  // Throws std::runtime_error if its type is not read; null if there is no such tensor.
  const GgufTensor* find_tensor(std::string_view name) const;

  // Throws std::runtime_error if its type is not read or there is no such tensor.
  const GgufTensor& tensor(std::string_view name) const;

 private:
  class Parser;

  // A value stays in the file, checked to lie within it, and is decoded when it is read.
  struct Value {
    std::uint32_t type = 0;  // of the elements
    bool is_array = false;
    std::uint64_t count = 1;   // of elements
    std::uint64_t offset = 0;  // of the first element, from the start of the file
  };

  // Of a tensor: its index among tensors_, or -1 if its type is not read.
  struct Place {
    std::ptrdiff_t index = -1;
    std::uint32_t type = 0;         // its number in the file
    std::uint64_t type_offset = 0;  // of that number, from the start of the file
  };

  GgufFile() = default;

  std::string name_;
  std::optional<quoka_examples::MappedFile> mapped_;
  std::span<const std::byte> bytes_;
  std::map<std::string, Value, std::less<>> values_;
  std::vector<GgufTensor> tensors_;
  std::map<std::string, Place, std::less<>> places_;
};

}  // namespace quoka_decoder
