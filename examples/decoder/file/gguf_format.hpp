// What the parser of GGUF files and the reader of their values share: the types of values, numbers
// at any alignment, and the form of every message. Included by gguf*.cpp alone.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>

namespace quoka_decoder::gguf_format {

static_assert(std::endian::native == std::endian::little, "files are little-endian");

// The numbers are those of the files.
enum ValueType : std::uint32_t {
  uint8 = 0,
  int8 = 1,
  uint16 = 2,
  int16 = 3,
  uint32 = 4,
  int32 = 5,
  float32 = 6,
  boolean = 7,
  string = 8,
  array = 9,
  uint64 = 10,
  int64 = 11,
  float64 = 12,
};
inline constexpr std::uint32_t value_types = 13;

inline const char* name_of_value(std::uint32_t type) {
  static constexpr const char* names[value_types] = {
      "UINT8", "INT8",   "UINT16", "INT16",  "UINT32", "INT32",  "FLOAT32",
      "BOOL",  "STRING", "ARRAY",  "UINT64", "INT64",  "FLOAT64"};
  return type < value_types ? names[type] : "unknown";
}

// Bytes of a value, the least for a string (its length alone) and an array (type and count).
inline constexpr std::uint64_t least_bytes[value_types] = {1, 1, 2, 2, 4, 4, 4, 1, 8, 12, 8, 8, 8};

template <class T>
T read_at(std::span<const std::byte> bytes, std::uint64_t offset) {
  T result;
  std::memcpy(&result, bytes.data() + offset, sizeof(T));
  return result;
}

// A name from a file, for a message: in quotes, without control characters, at most 80 bytes of it.
inline std::string in_quotes(std::string_view text) {
  std::string result = "'";
  for (const char letter : text.substr(0, 80)) {
    const bool is_control = static_cast<unsigned char>(letter) < 32 || letter == 127;
    result += is_control ? '?' : letter;
  }
  return result + (text.size() > 80 ? "...'" : "'");
}

// Throws std::runtime_error: "FILE: at byte OFFSET: " and the parts, printed one after the other.
template <class... Parts>
[[noreturn]] void fail(const std::string& file, std::uint64_t offset, const Parts&... parts) {
  std::ostringstream text;
  text << file << ": at byte " << offset << ": ";
  (text << ... << parts);
  throw std::runtime_error(text.str());
}

}  // namespace quoka_decoder::gguf_format
