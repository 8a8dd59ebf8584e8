// Writes GGUF files: version 3, or 2 if asked, little-endian.
//
//   magic "GGUF", version u32, tensor count u64, key count u64
//   each key:     string, value type u32, value (a string is a u64 length and its bytes;
//                 an array is an element type u32, a u64 count and the elements)
//   each tensor:  string, dimension count u32, dimensions u64 (innermost first), type u32,
//                 offset u64 from the start of the data
//   zeros up to the alignment; the tensors' data, each on the alignment
//
// Nothing is checked: a test may write what a reader has to refuse.
// Source: docs/gguf.md of ggml.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "support/gguf_file.hpp"

namespace quoka_examples {

class GgufWriter {
 public:
  explicit GgufWriter(std::uint32_t version = 3, std::uint32_t alignment = 32)
      : version_(version), alignment_(alignment) {
    if (alignment != 32) add("general.alignment", alignment);
  }

  // V: an integer of any width, float, double, bool, a string or a std::vector of these.
  template <class V>
  void add(const std::string& key, const V& value) {
    append(keys_, key);
    append(keys_, type_number<V>());
    append(keys_, value);
    ++key_count_;
  }

  // A key whose value is of this type and consists of these bytes, right or wrong.
  void add_raw(const std::string& key, std::uint32_t type, const std::vector<std::byte>& value) {
    append(keys_, key);
    append(keys_, type);
    keys_.insert(keys_.end(), value.begin(), value.end());
    ++key_count_;
  }

  // shape in GGUF's order, innermost first; the data is stored as it is.
  void add_tensor(const std::string& name, const std::vector<Index>& shape, TensorType type,
                  const std::vector<std::byte>& data) {
    data_.resize(round_up(data_.size()));
    append(tensors_, name);
    append(tensors_, static_cast<std::uint32_t>(shape.size()));
    for (const Index extent : shape) append(tensors_, static_cast<std::uint64_t>(extent));
    append(tensors_, static_cast<std::uint32_t>(type));
    append(tensors_, static_cast<std::uint64_t>(data_.size()));
    data_.insert(data_.end(), data.begin(), data.end());
    ++tensor_count_;
  }

  void add_tensor(const std::string& name, const std::vector<Index>& shape,
                  const std::vector<float>& values) {
    std::vector<std::byte> data(values.size() * sizeof(float));
    if (!values.empty()) std::memcpy(data.data(), values.data(), data.size());
    add_tensor(name, shape, TensorType::f32, data);
  }

  std::vector<std::byte> bytes() const {
    std::vector<std::byte> result;
    append(result, std::uint32_t{0x46554747});  // "GGUF"
    append(result, version_);
    append(result, tensor_count_);
    append(result, key_count_);
    result.insert(result.end(), keys_.begin(), keys_.end());
    result.insert(result.end(), tensors_.begin(), tensors_.end());
    if (tensor_count_ != 0) result.resize(round_up(result.size()));
    result.insert(result.end(), data_.begin(), data_.end());
    return result;
  }

  // Throws std::runtime_error if the file cannot be written whole.
  void write(const std::string& path) const {
    const std::vector<std::byte> all = bytes();
    std::ofstream file(path, std::ios::binary | std::ios::trunc);
    file.write(reinterpret_cast<const char*>(all.data()), static_cast<std::streamsize>(all.size()));
    file.close();
    if (!file) throw std::runtime_error("could not write " + path);
  }

 private:
  template <class T>
  struct IsVector : std::false_type {};
  template <class T>
  struct IsVector<std::vector<T>> : std::true_type {};

  template <class V>
  static constexpr std::uint32_t type_number() {
    if constexpr (std::same_as<V, std::uint8_t>) return 0;
    if constexpr (std::same_as<V, std::int8_t>) return 1;
    if constexpr (std::same_as<V, std::uint16_t>) return 2;
    if constexpr (std::same_as<V, std::int16_t>) return 3;
    if constexpr (std::same_as<V, std::uint32_t>) return 4;
    if constexpr (std::same_as<V, std::int32_t>) return 5;
    if constexpr (std::same_as<V, float>) return 6;
    if constexpr (std::same_as<V, bool>) return 7;
    if constexpr (std::convertible_to<V, std::string_view>) return 8;
    if constexpr (IsVector<V>::value) return 9;
    if constexpr (std::same_as<V, std::uint64_t>) return 10;
    if constexpr (std::same_as<V, std::int64_t>) return 11;
    if constexpr (std::same_as<V, double>) return 12;
  }

  template <class V>
  static void append(std::vector<std::byte>& to, const V& value) {
    if constexpr (IsVector<V>::value) {
      using Element = typename V::value_type;
      append(to, type_number<Element>());
      append(to, static_cast<std::uint64_t>(value.size()));
      for (const Element& element : value) append(to, element);
    } else if constexpr (std::convertible_to<V, std::string_view>) {
      const std::string_view text = value;
      append(to, static_cast<std::uint64_t>(text.size()));
      for (const char letter : text) to.push_back(std::byte(letter));
    } else {
      static_assert(std::is_arithmetic_v<V>, "no such GGUF value");
      std::byte raw[sizeof(V)];
      std::memcpy(raw, &value, sizeof(V));
      for (const std::byte byte : raw) to.push_back(byte);
    }
  }

  std::size_t round_up(std::size_t size) const {
    return alignment_ == 0 ? size : (size + alignment_ - 1) / alignment_ * alignment_;
  }

  std::uint32_t version_;
  std::size_t alignment_;
  std::uint64_t key_count_ = 0;
  std::uint64_t tensor_count_ = 0;
  std::vector<std::byte> keys_;
  std::vector<std::byte> tensors_;
  std::vector<std::byte> data_;
};

}  // namespace quoka_examples
