// GgufFile::get, for every type of value.
#include "decoder/file/gguf.hpp"

#include <cmath>
#include <concepts>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "decoder/file/gguf_format.hpp"

namespace quoka_decoder {

using namespace gguf_format;

namespace {

template <class T>
struct ElementOf {
  using type = T;
};
template <class T>
struct ElementOf<std::vector<T>> {
  using type = T;
};

template <class T>
constexpr ValueType type_of() {
  if constexpr (std::same_as<T, std::uint8_t>) return uint8;
  if constexpr (std::same_as<T, std::int8_t>) return int8;
  if constexpr (std::same_as<T, std::uint16_t>) return uint16;
  if constexpr (std::same_as<T, std::int16_t>) return int16;
  if constexpr (std::same_as<T, std::uint32_t>) return uint32;
  if constexpr (std::same_as<T, std::int32_t>) return int32;
  if constexpr (std::same_as<T, std::uint64_t>) return uint64;
  if constexpr (std::same_as<T, std::int64_t>) return int64;
  if constexpr (std::same_as<T, float>) return float32;
  if constexpr (std::same_as<T, double>) return float64;
  if constexpr (std::same_as<T, bool>) return boolean;
  if constexpr (std::same_as<T, std::string>) return string;
}

bool is_integer(std::uint32_t type) { return type <= int32 || type == uint64 || type == int64; }
bool is_float(std::uint32_t type) { return type == float32 || type == float64; }

// May a stored value of this type be read as a T, if it fits?
template <class T>
bool is_read_as(std::uint32_t type) {
  constexpr ValueType wanted = type_of<T>();
  return type == wanted || (is_integer(type) && is_integer(wanted)) ||
         (is_float(type) && is_float(wanted));
}

std::string describe(std::uint32_t type, bool is_array) {
  return (is_array ? "an array of " : "") + std::string(name_of_value(type));
}

template <class To, class From>
bool fits(From value) {
  if constexpr (std::integral<To>) {
    return std::in_range<To>(value);
  } else {
    return !std::isfinite(value) ||
           std::abs(static_cast<double>(value)) <= std::numeric_limits<To>::max();
  }
}

// Where a value stands, for reading and for messages.
struct Source {
  const std::string& file;
  std::string_view key;
  std::span<const std::byte> bytes;
};

template <class To, class From>
To convert(const Source& from, std::uint64_t offset) {
  const From value = read_at<From>(from.bytes, offset);
  if (!fits<To>(value)) {
    fail(from.file, offset, "key ", in_quotes(from.key), " holds ", +value, "; ",
         name_of_value(type_of<To>()), " goes from ", +std::numeric_limits<To>::lowest(), " to ",
         +std::numeric_limits<To>::max());
  }
  return static_cast<To>(value);
}

// Reads the element of the given type at the offset, and moves the offset behind it.
template <class T>
T read_element(const Source& from, std::uint32_t type, std::uint64_t& offset) {
  const std::uint64_t at = offset;
  if constexpr (std::same_as<T, std::string>) {
    const auto length = read_at<std::uint64_t>(from.bytes, at);
    offset += 8 + length;
    return {reinterpret_cast<const char*>(from.bytes.data()) + at + 8, length};
  } else {
    offset += least_bytes[type];
    if constexpr (std::same_as<T, bool>) {
      return read_at<std::uint8_t>(from.bytes, at) != 0;
    } else if constexpr (std::floating_point<T>) {
      return type == float32 ? convert<T, float>(from, at) : convert<T, double>(from, at);
    } else {
      switch (type) {
        case uint8:
          return convert<T, std::uint8_t>(from, at);
        case int8:
          return convert<T, std::int8_t>(from, at);
        case uint16:
          return convert<T, std::uint16_t>(from, at);
        case int16:
          return convert<T, std::int16_t>(from, at);
        case uint32:
          return convert<T, std::uint32_t>(from, at);
        case int32:
          return convert<T, std::int32_t>(from, at);
        case uint64:
          return convert<T, std::uint64_t>(from, at);
        default:
          return convert<T, std::int64_t>(from, at);
      }
    }
  }
}

}  // namespace

template <GgufValue T>
T GgufFile::get(std::string_view key) const {
  using Element = typename ElementOf<T>::type;
  constexpr bool wants_array = is_gguf_array<T>;
  const std::string wanted = describe(type_of<Element>(), wants_array);
  const auto found = values_.find(key);
  if (found == values_.end()) {
    throw std::runtime_error(name_ + ": there is no key " + in_quotes(key) + " (" + wanted +
                             " is wanted) among its " + std::to_string(values_.size()));
  }
  const Value& value = found->second;
  if (value.is_array != wants_array || !is_read_as<Element>(value.type)) {
    fail(name_, value.offset, "key ", in_quotes(key), " is ", describe(value.type, value.is_array),
         "; ", wanted, " is wanted");
  }
  const Source from{name_, key, bytes_};
  std::uint64_t offset = value.offset;
  if constexpr (wants_array) {
    T result;
    result.reserve(value.count);  // the parser saw that the file holds so many
    for (std::uint64_t i = 0; i < value.count; ++i) {
      result.push_back(read_element<Element>(from, value.type, offset));
    }
    return result;
  } else {
    return read_element<Element>(from, value.type, offset);
  }
}

#define QUOKA_DECODER_GET(T)                           \
  template T GgufFile::get<T>(std::string_view) const; \
  template std::vector<T> GgufFile::get<std::vector<T>>(std::string_view) const

QUOKA_DECODER_GET(std::int8_t);
QUOKA_DECODER_GET(std::uint8_t);
QUOKA_DECODER_GET(std::int16_t);
QUOKA_DECODER_GET(std::uint16_t);
QUOKA_DECODER_GET(std::int32_t);
QUOKA_DECODER_GET(std::uint32_t);
QUOKA_DECODER_GET(std::int64_t);
QUOKA_DECODER_GET(std::uint64_t);
QUOKA_DECODER_GET(float);
QUOKA_DECODER_GET(double);
QUOKA_DECODER_GET(bool);
QUOKA_DECODER_GET(std::string);

#undef QUOKA_DECODER_GET

}  // namespace quoka_decoder
