// A hash of bytes with a key: has memory changed since?
#pragma once

#include <quoka/base/index.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// NH (Black and others, UMAC, 1999): the sum of (low + its key) * (high + the key's) over the words, sums of 32 bits.
// key_of(i) is that of word i; with random ones different bytes have the same hash once in 2^32 times, whatever they
// are.
template <class KeyOf>
std::uint64_t keyed_hash(const std::byte* bytes, Index count, const KeyOf& key_of) {
  const Index whole = count / 8;
  std::uint64_t hash = 0;
  const auto add = [&hash](std::uint64_t word, std::uint64_t key) {
    constexpr std::uint64_t half = 0xffffffff;
    hash += ((word + key) & half) * (((word >> 32) + (key >> 32)) & half);
  };
  for (Index i = 0; i < whole; ++i) {
    std::uint64_t word;
    std::memcpy(&word, bytes + 8 * i, 8);
    add(word, key_of(i));
  }
  std::uint64_t rest = 0;
  std::memcpy(&rest, bytes + 8 * whole, static_cast<std::size_t>(count % 8));
  if (count % 8 != 0) add(rest, key_of(whole));
  return hash;
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
