// The arithmetic of a method for a chunk: FLOPs of its scores; a multiply-add is 2.
//
// A formula for each method's options, flops(options, chunk), in which P = kv_len, B = q_len, d =
// head_dim. They count what the mathematics needs: no exponentials, comparisons, top-k or copies,
// and products of 8-bit codes as if they were float's.
#pragma once

#include <quoka/methods/all.hpp>

#include <algorithm>
#include <initializer_list>

namespace quoka_examples {

using quoka::Index;

// A chunk of q_len queries before kv_len cached keys.
struct ChunkShape {
  Index q_heads;   // query heads
  Index kv_heads;  // KV heads
  Index head_dim;  // channels of a head
  Index q_len;     // tokens of the chunk
  Index kv_len;    // cached before it
};

inline double product(std::initializer_list<Index> factors) {
  double x = 1.0;
  for (const Index factor : factors) x *= static_cast<double>(factor);
  return x;
}

// FLOPs of every query with every key.
inline double exact_flops(const ChunkShape& c) {
  return product({2, c.q_heads, c.q_len, c.kv_len, c.head_dim});
}

// None.
inline double flops(const quoka::DenseSelector::Options&, const ChunkShape&) { return 0.0; }
inline double flops(const quoka::RandomOptions&, const ChunkShape&) { return 0.0; }
inline double flops(const quoka::FirstRecentOptions&, const ChunkShape&) { return 0.0; }

// 2 kv_heads N P d + 4 q_heads N d, + 5 q_heads B d where queries are ranked; N = n_queries or B if
// that is less.
inline double flops(const quoka::QuokaOptions& o, const ChunkShape& c) {
  const Index n = std::min(o.n_queries, c.q_len);
  return product({2, c.kv_heads, n, c.kv_len, c.head_dim}) +
         product({4, c.q_heads, n, c.head_dim}) +
         (c.q_len > n ? product({5, c.q_heads, c.q_len, c.head_dim}) : 0.0);
}
// 2 q_heads N (P + B / 2) d: N queries of each query head, with the past and what they see of the
// chunk.
inline double flops(const quoka::MassOptions& o, const ChunkShape& c) {
  const Index n = std::min(o.queries_per_head(c.q_heads / c.kv_heads), c.q_len);
  return product({c.q_heads, n, 2 * c.kv_len + c.q_len, c.head_dim});
}
// 2 q_heads B P d.
inline double flops(const quoka::OracleOptions&, const ChunkShape& c) { return exact_flops(c); }
// 2 q_heads N P d, N = n_queries or B if that is less.
inline double flops(const quoka::SampleAttentionOptions& o, const ChunkShape& c) {
  return product({2, c.q_heads, std::min(o.n_queries, c.q_len), c.kv_len, c.head_dim});
}
// 2 q_heads B P r + 2 q_heads B d.
inline double flops(const quoka::SparqOptions& o, const ChunkShape& c) {
  return product({2, c.q_heads, c.q_len, c.kv_len, std::min(o.rank, c.head_dim)}) +
         product({2, c.q_heads, c.q_len, c.head_dim});
}
// 2 q_heads B P r + 2 (q_heads + kv_heads) B d r.
inline double flops(const quoka::LokiOptions& o, const ChunkShape& c) {
  const Index rank = std::min(o.rank, c.head_dim);
  return product({2, c.q_heads, c.q_len, c.kv_len, rank}) +
         product({2, c.q_heads + c.kv_heads, c.q_len, c.head_dim, rank});
}
// The oracle's at the layers that choose, none at the others.
inline double flops(const quoka::TidalDecodeOptions& o, const ChunkShape& c) {
  return o.plan.chooses() ? exact_flops(c) : 0.0;
}
inline double flops(const quoka::LessIsMoreOptions& o, const ChunkShape& c) {
  return o.plan.chooses() ? exact_flops(c) : 0.0;
}
// 4 kv_heads (P / page) d + 2 q_heads B d.
inline double flops(const quoka::QuestOptions& o, const ChunkShape& c) {
  return product({4, c.kv_heads, quoka::ceil_div(c.kv_len, o.page), c.head_dim}) +
         product({2, c.q_heads, c.q_len, c.head_dim});
}
// 4 kv_heads (budget + B) d.
inline double flops(const quoka::KeyDiffOptions& o, const ChunkShape& c) {
  return product({4, c.kv_heads, o.budget.count(c.kv_len) + c.q_len, c.head_dim});
}
// 2 q_heads w (budget + B) d, w = window_size or B if that is less.
inline double flops(const quoka::SnapKvOptions& o, const ChunkShape& c) {
  const Index candidates = o.budget.count(c.kv_len) + c.q_len;
  return product({2, c.q_heads, std::min(o.window_size, c.q_len), candidates, c.head_dim});
}
// 2 q_heads B (P + B) d / S, query and key rows of S rounded up.
inline double flops(const quoka::XAttentionOptions& o, const ChunkShape& c) {
  const auto rows = [&](Index tokens) { return quoka::ceil_div(tokens, o.stride); };
  return product({2, c.q_heads, rows(c.q_len), rows(c.kv_len + c.q_len), o.stride, c.head_dim});
}
// 2 q_heads B (P / block) d, and kv_heads B d for the means.
inline double flops(const quoka::FlashPrefillOptions& o, const ChunkShape& c) {
  return product({2, c.q_heads, c.q_len, quoka::ceil_div(c.kv_len, o.block), c.head_dim}) +
         product({c.kv_heads, c.q_len, c.head_dim});
}

// FLOPs of selecting for this chunk by a selector with these options. 0 where all of the past is
// kept, or none: nothing is scored then.
template <class Options>
double scoring_flops(const Options& options, const ChunkShape& chunk) {
  static_assert(
      requires { flops(options, chunk); },
      "options without flops(options, ChunkShape): support/scoring_flops.hpp has one for each "
      "method");
  bool by_threshold = false;
  if constexpr (requires { options.by_threshold(); }) by_threshold = options.by_threshold();
  if constexpr (requires { options.budget; }) {
    const Index count = options.budget.count(chunk.kv_len);
    if (!by_threshold && (count == chunk.kv_len || count == 0)) return 0.0;
  }
  return flops(options, chunk);
}

}  // namespace quoka_examples
