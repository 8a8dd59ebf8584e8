// What selecting costs in arithmetic, by the formulas at the head of each selector: FLOPs of one
// chunk of one layer, a multiply-add is 2. P = kv_len, B = q_len, d = head_dim, N = n_queries or B
// if that is less.
//
//   quoka             2 kv_heads R P d, R = N, or group N rows with per_head
//                     + 4 q_heads N d, + 5 q_heads B d where queries are ranked
//   sample_attention  2 q_heads N P d;   logit  2 kv_heads P d + q_heads N d
//   sparq             2 q_heads B P r + 2 q_heads B d;   logit  2 kv_heads P d + 3 q_heads B d
//   loki              2 q_heads B P r + 2 (q_heads + kv_heads) B d r
//                     logit  2 kv_heads P r + q_heads B r + the projections
//   oracle            2 q_heads B P d
//   tidal_decode, less_is_more   the oracle's at the layers that choose, none at the others
//   quest             4 q_heads B (P / page) d;   logit  4 kv_heads (P / page) d + 2 q_heads B d
//   xattention        2 q_heads B (P + B) d / S, query and key rows of S rounded up
//   flash_prefill     2 q_heads B (P / block) d;   + kv_heads B d for the means
//   snapkv            2 q_heads w (budget + B) d, w = observation or B if that is less
//   keydiff           4 kv_heads (budget + B) d
//   dense, random, first_recent   none
//
// As in bench/README.md they count what the mathematics needs: no exponentials, comparisons, top-k
// or copies, and products of 8-bit codes (QuoKA's sketch) as if they were float's.
#pragma once

#include <quoka/prefill/layer_shape.hpp>
#include <quoka/methods/all.hpp>

#include <algorithm>

namespace quoka_examples {

using quoka::Index;

// A chunk of q_len queries before kv_len cached keys.
struct ChunkShape {
  Index q_heads, kv_heads, head_dim, q_len, kv_len;
};

namespace detail {

inline double product(std::initializer_list<Index> factors) {
  double x = 1.0;
  for (const Index factor : factors) x *= static_cast<double>(factor);
  return x;
}

// Rows times keys that QuokaOptions scores for each KV head by a cascade, `sets` sets of n rows; 0: it does not.
inline double cascade_products(const quoka::QuokaOptions& o, Index n, Index sets, Index kv_len) {
  const Index candidates = o.cascade * o.budget.count(kv_len), step = o.cascade_step;
  if (candidates == 0 || o.domain == quoka::Domain::logit || o.sketch == quoka::Sketch::off ||
      o.budget.by_scores() || kv_len <= 2 * candidates)
    return 0.0;
  Index first = 0;
  for (Index m = 0; m < n * sets; ++m)
    first += m % n == n - 1 || m % n % step == m / n % step ? 1 : 0;
  return 2 * first > n * sets ? 0.0 : product({first, kv_len}) + product({n, sets, candidates});
}

inline double flops(const quoka::QuokaOptions& o, const ChunkShape& c) {
  const Index n = std::min(o.n_queries.per_head(c.q_heads / c.kv_heads), c.q_len);
  const bool per_head = o.group_mode == quoka::GroupMode::per_head;
  using quoka::QueryChoice;
  // Of mixed queries a quarter is ranked.
  const bool ranked = c.q_len > n && (o.query_choice == QueryChoice::dissimilar || n >= 4);
  const double cascade = cascade_products(o, n, per_head ? c.q_heads / c.kv_heads : 1, c.kv_len);
  return (cascade > 0.0
              ? 2.0 * cascade * product({c.kv_heads, c.head_dim})
              : product({2, per_head ? c.q_heads : c.kv_heads, n, c.kv_len, c.head_dim})) +
         product({4, c.q_heads, n, c.head_dim}) +
         (ranked ? product({5, c.q_heads, c.q_len, c.head_dim}) : 0.0);
}

inline double flops(const quoka::SampleAttentionOptions& o, const ChunkShape& c) {
  const Index n = std::min(o.n_queries, c.q_len);
  if (o.domain == quoka::Domain::softmax) return product({2, c.q_heads, n, c.kv_len, c.head_dim});
  return product({2, c.kv_heads, c.kv_len, c.head_dim}) + product({c.q_heads, n, c.head_dim});
}

inline double flops(const quoka::SparqOptions& o, const ChunkShape& c) {
  const Index rank = std::min(o.rank, c.head_dim);
  const double of_queries = product({c.q_heads, c.q_len, c.head_dim});
  if (o.domain == quoka::Domain::softmax)
    return product({2, c.q_heads, c.q_len, c.kv_len, rank}) + 2.0 * of_queries;
  return product({2, c.kv_heads, c.kv_len, c.head_dim}) + 3.0 * of_queries;
}

inline double flops(const quoka::LokiOptions& o, const ChunkShape& c) {
  const Index rank = std::min(o.rank, c.head_dim);
  const double projections = product({2, c.q_heads + c.kv_heads, c.q_len, c.head_dim, rank});
  if (o.domain == quoka::Domain::softmax)
    return product({2, c.q_heads, c.q_len, c.kv_len, rank}) + projections;
  return product({2, c.kv_heads, c.kv_len, rank}) + product({c.q_heads, c.q_len, rank}) +
         projections;
}

inline double exact_flops(const ChunkShape& c) {
  return product({2, c.q_heads, c.q_len, c.kv_len, c.head_dim});
}
inline double flops(const quoka::OracleOptions&, const ChunkShape& c) { return exact_flops(c); }
inline double flops(const quoka::TidalDecodeOptions& o, const ChunkShape& c) {
  return o.plan.chooses() ? exact_flops(c) : 0.0;
}
inline double flops(const quoka::LessIsMoreOptions& o, const ChunkShape& c) {
  return o.plan.chooses() ? exact_flops(c) : 0.0;
}

inline double flops(const quoka::QuestOptions& o, const ChunkShape& c) {
  const Index pages = (c.kv_len + o.page - 1) / o.page;
  if (o.domain == quoka::Domain::softmax)
    return product({4, c.q_heads, c.q_len, pages, c.head_dim});
  return product({4, c.kv_heads, pages, c.head_dim}) + product({2, c.q_heads, c.q_len, c.head_dim});
}

inline double flops(const quoka::XAttentionOptions& o, const ChunkShape& c) {
  const auto rows = [&](Index tokens) { return (tokens + o.stride - 1) / o.stride; };
  return product({2, c.q_heads, rows(c.q_len), rows(c.kv_len + c.q_len), o.stride, c.head_dim});
}
inline double flops(const quoka::FlashPrefillOptions& o, const ChunkShape& c) {
  const Index blocks = (c.kv_len + o.block - 1) / o.block;
  return product({2, c.q_heads, c.q_len, blocks, c.head_dim}) +
         product({c.kv_heads, c.q_len, c.head_dim});
}

inline double flops(const quoka::SnapKvOptions& o, const ChunkShape& c) {
  const Index candidates = o.budget.count(c.kv_len) + c.q_len;
  return product({2, c.q_heads, std::min(o.observation, c.q_len), candidates, c.head_dim});
}
inline double flops(const quoka::KeyDiffOptions& o, const ChunkShape& c) {
  return product({4, c.kv_heads, o.budget.count(c.kv_len) + c.q_len, c.head_dim});
}

inline double flops(const quoka::DenseSelector::Options&, const ChunkShape&) { return 0.0; }
inline double flops(const quoka::RandomOptions&, const ChunkShape&) { return 0.0; }
inline double flops(const quoka::FirstRecentOptions&, const ChunkShape&) { return 0.0; }

}  // namespace detail

// FLOPs of selecting for this chunk by a selector with these options. 0 where all of the past is
// kept, or none: nothing is scored then.
template <class Options>
double scoring_flops(const Options& options, const ChunkShape& chunk) {
  static_assert(
      requires { detail::flops(options, chunk); }, "a selector without a formula: write one above");
  if constexpr (requires { options.budget; }) {
    const Index least = options.budget.least(chunk.kv_len);
    if (least == chunk.kv_len || options.budget.count(chunk.kv_len) == 0) return 0.0;
  }
  return detail::flops(options, chunk);
}

}  // namespace quoka_examples
