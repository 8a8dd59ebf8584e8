// FLOPs of selecting for a chunk, by any selector: 0 where nothing is scored, else by its method's formula
// (chunk_shape.hpp). Those of QuoKA and of dense attention stand here.
#pragma once

#include <quoka/methods/chunk_shape.hpp>
#include <quoka/select/dense.hpp>
#include <quoka/select/quoka.hpp>

#include <algorithm>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// Rows times keys that QuokaOptions scores for each KV head by a cascade, `sets` sets of n rows; 0: it does not.
inline double cascade_products(const QuokaOptions& o, Index n, Index sets, Index kv_len) {
  const Index candidates = o.cascade * o.budget.count(kv_len), step = o.cascade_step;
  if (candidates == 0 || o.domain == Domain::logit || o.sketch == Sketch::off ||
      kv_len <= 2 * candidates)
    return 0.0;
  Index first = 0;
  for (Index m = 0; m < n * sets; ++m)
    first += m % n == n - 1 || m % n % step == m / n % step ? 1 : 0;
  return 2 * first > n * sets ? 0.0 : product({first, kv_len}) + product({n, sets, candidates});
}

}  // namespace detail

// FLOPs of a chunk's scores: 2 kv_heads R P d, R = N, or group N rows with per_head, + 4 q_heads N d, + 5 q_heads B d where
// queries are ranked; N = n_queries or B if that is less.
inline double flops(const QuokaOptions& o, const ChunkShape& c) {
  const Index n = std::min(o.n_queries.per_head(c.q_heads / c.kv_heads), c.q_len);
  const bool per_head = o.group_mode == GroupMode::per_head;
  // Of mixed queries a quarter is ranked.
  const bool ranked = c.q_len > n && (o.query_choice == QueryChoice::dissimilar || n >= 4);
  const double cascade =
      detail::cascade_products(o, n, per_head ? c.q_heads / c.kv_heads : 1, c.kv_len);
  return (cascade > 0.0
              ? 2.0 * cascade * detail::product({c.kv_heads, c.head_dim})
              : detail::product({2, per_head ? c.q_heads : c.kv_heads, n, c.kv_len, c.head_dim})) +
         detail::product({4, c.q_heads, n, c.head_dim}) +
         (ranked ? detail::product({5, c.q_heads, c.q_len, c.head_dim}) : 0.0);
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
