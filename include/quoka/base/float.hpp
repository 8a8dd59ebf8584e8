// Constants of float, and the prefetch of memory, for code with and without packets.
#pragma once

#include <quoka/base/abi.hpp>
#include <quoka/base/version.hpp>

#include <limits>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

inline constexpr float infinity = std::numeric_limits<float>::infinity();
inline constexpr float log2_e = 1.44269504088896341f;

// Prefetches a cache line into L2.
QUOKA_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
