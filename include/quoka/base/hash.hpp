// FNV-1a of bytes, to tell whether two processes hold the same.
#pragma once

#include <quoka/base/version.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

inline std::int64_t hash_of(std::span<const std::byte> bytes) {
  std::uint64_t hash = 14695981039346656037u;
  for (const std::byte byte : bytes)
    hash = (hash ^ std::to_integer<std::uint64_t>(byte)) * 1099511628211u;
  return static_cast<std::int64_t>(hash);
}
inline std::int64_t hash_of(std::string_view text) {
  return hash_of(std::as_bytes(std::span(text.data(), text.size())));
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
