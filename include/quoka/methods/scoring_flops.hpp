// FLOPs of selecting for a chunk, by any selector: 0 where nothing is scored, else by its method's formula
// (chunk_shape.hpp). Those of QuoKA, MassSelector and dense attention stand here.
#pragma once

#include <quoka/methods/chunk_shape.hpp>
#include <quoka/select/dense.hpp>
#include <quoka/select/mass_selector.hpp>
#include <quoka/select/quoka.hpp>

#include <algorithm>

namespace quoka {
inline namespace QUOKA_ABI {
// FLOPs of a chunk's scores: 2 kv_heads N P d + 4 q_heads N d, + 5 q_heads B d where queries are ranked; N = n_queries or B
// if that is less.
inline double flops(const QuokaOptions& o, const ChunkShape& c) {
  const Index n = std::min(o.n_queries, c.q_len);
  return detail::product({2, c.kv_heads, n, c.kv_len, c.head_dim}) +
         detail::product({4, c.q_heads, n, c.head_dim}) +
         (c.q_len > n ? detail::product({5, c.q_heads, c.q_len, c.head_dim}) : 0.0);
}

// 2 q_heads N (P + B / 2) d: N queries of each query head, with the past and what they see of the chunk.
inline double flops(const MassOptions& o, const ChunkShape& c) {
  const Index n = std::min(o.queries_per_head(c.q_heads / c.kv_heads), c.q_len);
  return detail::product({c.q_heads, n, 2 * c.kv_len + c.q_len, c.head_dim});
}
// None.
inline double flops(const DenseSelector::Options&, const ChunkShape&) { return 0.0; }

// FLOPs of selecting for this chunk by a selector with these options. 0 where all of the past is
// kept, or none: nothing is scored then.
template <class Options>
double scoring_flops(const Options& options, const ChunkShape& chunk) {
  static_assert(
      requires { flops(options, chunk); },
      "quoka: options without flops(options, ChunkShape): a method has it beside them");
  if constexpr (requires { options.by_threshold(); })
    if (options.by_threshold()) return flops(options, chunk);
  if constexpr (requires { options.budget; }) {
    const Index count = options.budget.count(chunk.kv_len);
    if (count == chunk.kv_len || count == 0) return 0.0;
  }
  return flops(options, chunk);
}

}  // namespace QUOKA_ABI
}  // namespace quoka
