// What a chunk costs a method in arithmetic: FLOPs of its scores, a multiply-add is 2.
//
// Each method has a formula beside its options, flops(options, chunk), in which P = kv_len, B = q_len, d = head_dim.
// They count what the mathematics needs: no exponentials, comparisons, top-k or copies, and products of 8-bit codes as
// if they were float's. scoring_flops() (scoring_flops.hpp) asks any of them.
#pragma once

#include <quoka/base/index.hpp>

#include <initializer_list>

namespace quoka {
inline namespace QUOKA_ABI {

// A chunk of q_len queries before kv_len cached keys.
struct ChunkShape {
  Index q_heads;   // query heads
  Index kv_heads;  // KV heads
  Index head_dim;  // channels of a head
  Index q_len;     // tokens of the chunk
  Index kv_len;    // cached before it
};

namespace detail {

inline double product(std::initializer_list<Index> factors) {
  double x = 1.0;
  for (const Index factor : factors) x *= static_cast<double>(factor);
  return x;
}

// Of every query with every key.
inline double exact_flops(const ChunkShape& c) {
  return product({2, c.q_heads, c.q_len, c.kv_len, c.head_dim});
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
