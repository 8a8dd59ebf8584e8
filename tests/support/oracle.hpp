// The oracle: QuoKA and causal attention in naive double precision, for the tests to compare
// against.
//
// Written from the QuoKA paper, Algorithm 1 (selection: `select` and its stages), and from the definition of softmax
// attention. It shares nothing with the library on purpose, not even a type: an error can then hardly be in both.
// Everything is a plain loop over doubles; nothing is blocked, fused, streamed or reordered.
//
// Tensors are row-major [batch, heads, len, dim]. Query head h reads KV head h / group, where
// group = q_heads / kv_heads. Sizes are trusted: the library's contract checks have their own
// tests.
#pragma once

#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <limits>
#include <optional>
#include <span>
#include <stdexcept>
#include <vector>

namespace oracle {

using Index = std::ptrdiff_t;
using Row = std::span<const double>;
using Positions =
    std::vector<std::vector<std::vector<Index>>>;              // [batch][head] -> list of positions
using Scores = std::vector<std::vector<std::vector<double>>>;  // [batch][head][position]

inline constexpr double infinity = std::numeric_limits<double>::infinity();
inline constexpr double not_a_number = std::numeric_limits<double>::quiet_NaN();

enum class Aggregation { max, mean };

// The unsigned subscript of std::vector.
inline std::size_t uz(Index i) {
  assert(i >= 0);
  return static_cast<std::size_t>(i);
}

// Row-major [batch, heads, len, dim], zero-filled; a default one is empty and can be appended to.
struct Tensor {
  Index batch = 0, heads = 0, len = 0, dim = 0;
  std::vector<double> data;

  Tensor() = default;
  Tensor(Index b, Index h, Index n, Index d)
      : batch(b), heads(h), len(n), dim(d), data(uz(b * h * n * d), 0.0) {}

  // ((b heads + h) len + i) dim + c
  std::size_t offset(Index b, Index h, Index i, Index c) const {
    assert(b < batch && h < heads && i < len && c < dim);
    return uz(((b * heads + h) * len + i) * dim + c);
  }
  double& at(Index b, Index h, Index i, Index c) { return data[offset(b, h, i, c)]; }
  const double& at(Index b, Index h, Index i, Index c) const { return data[offset(b, h, i, c)]; }
  Row row(Index b, Index h, Index i) const {
    return Row(data).subspan(offset(b, h, i, 0), uz(dim));
  }
};

// sum_c x[c] y[c]
double dot(Row x, Row y);

// sqrt(sum_c x[c]^2)
double norm(Row x);

// x.y / (|x| |y|), and 0 when either is the zero vector
double cosine(Row x, Row y);

// Neither a NaN nor an infinity in the row.
bool is_finite(Row x);

// first, first + 1, ..., end - 1
std::vector<Index> range(Index first, Index end);

// Every position 0..len-1 for every batch and head.
Positions all_positions(Index batch, Index heads, Index len);

// `candidates`, largest value first, ties by position; positions whose value is not finite come
// last, by position.
std::vector<Index> ranked(std::vector<Index> candidates, const std::vector<double>& value);

// ---- Algorithm 1: selection ----

// cos(q[i], M) with M = mean of the finite raw rows of that head; NaN for a row that is not finite.
// [b][q_head][i]
Scores query_cosines(const Tensor& q);

// Chunk positions of the n queries of the lowest cosines with the head's mean query, by (cosine, position) ascending; of a
// chunk of up to n queries all, in their order. [b][q_head]
Positions subselect_queries(const Tensor& q, Index n_queries);

// kept[b, h, m] = q[b, h, positions[b][h][m]]. [b, q_heads, n, dim]
Tensor gather_queries(const Tensor& q, const Positions& positions);

// qhat = q / |q|; the zero vector for a zero row or one that is not finite.
// q_bar[g][m] = 1/group sum_{r < group} qhat[g group + r][m]    [b, kv_heads, n, dim]
Tensor pre_aggregate(const Tensor& kept, Index kv_heads);

// S[t] = max_m or 1/n sum_m of q_bar[m].k[t] / |k[t]|, 0 for a zero key; NaN for a key that is not
// finite. q_bar has at least one row and is finite, as pre_aggregate returns it. [b][kv_head][kv]
Scores score_keys(const Tensor& q_bar, const Tensor& keys, Aggregation aggregation);

// score'[t] = max of the finite score[u] with t - (w-1)/2 <= u <= t + w/2 and u in range; NaN where
// score[t] itself is not finite (no comparison with a NaN is true, so it stays).
Scores window_max(const Scores& scores, Index w);

// The first min(keep_first, k) positions, the last min(keep_last, what is left of k), then the best
// of the others by (score descending, position ascending), scores that are not finite last by
// position. Ascending, unique, min(k, len).
Positions top_k(const Scores& scores, Index k, Index keep_first, Index keep_last);

struct QuokaOptions {
  Index budget = 1024;   // B_SA
  Index n_queries = 16;  // N_Q
  Index keep_first = 0, keep_last = 0;
};

// Algorithm 1: top_k(scores of the queries that subselect_queries keeps). [b][kv_head]
Positions select(const Tensor& q, const Tensor& past_k, const QuokaOptions& options);

// ---- attention ----

struct AttentionOptions {
  double scale = 0;    // 0: 1/sqrt(dim)
  double softcap = 0;  // 0: none; else logit = cap tanh(logit / cap), after scaling
  std::vector<double> sinks =
      {};              // [q_heads] or empty: a logit without a value, neither scaled nor capped
  Index window = 0;    // 0: none; else a query at position p sees positions t with p - t < window
  bool causal = true;  // a query sees no later position; false: it does
  std::vector<double> alibi_slopes{};  // [q_heads] or empty: logit -= slope (p - t), after the cap
  // Added to the logit, last: of query i of head h and key t, past rows first, then the chunk's.
  // -infinity: the query does not see the key at all.
  std::function<double(Index b, Index h, Index i, Index t)> mask{};
  std::vector<double> mask_factors{};  // [q_heads] or empty: times what the mask adds
  Index first_position = 0;            // of past key 0
  std::optional<Index> q_offset{};     // of query 0 and chunk key 0; absent: behind the past
  bool logits_of_float = false;        // each step to a logit is rounded to float
};

struct AttentionResult {
  Tensor out;               // [b, q_heads, q_len, value dim]
  std::vector<double> lse;  // [b, q_heads, q_len] flattened: natural log of sum_t exp(logit[t]),
                            // the sink's included
  // [b, q_heads, q_len] flattened: of the keys that it sees, past ones first
  std::vector<std::vector<double>> logits;
};

// scale q.k, then softcap
double logit(Row query, Row key, const AttentionOptions& options);

// t <= p where causal, and p - t < window if there is one
bool sees(Index q_offset, Index key_position, const AttentionOptions& options);

// out = sum_t softmax(logit)[t] v[t] over the keys that query row i, at position past_len + i,
// sees: past keys t in `keep` ([b][kv_head or q_head]; nullptr: all) and chunk keys j <= i, at
// past_len + j; both without those that the mask hides. Either part may be empty or a Tensor{}.
// Keys it does not see are never read. Nothing to see: zeros, and lse -infinity.
AttentionResult attention(const Tensor& q, const Tensor& past_k, const Tensor& past_v,
                          const Positions* keep, const Tensor& k, const Tensor& v,
                          const AttentionOptions& options = {});

// [past, chunk] along the length
Tensor append(const Tensor& past, const Tensor& chunk);

// ---- measures ----

// |a - reference| / |reference| in the Frobenius norm; 0 for two zero tensors, infinity if only the
// reference is zero.
double relative_error(const Tensor& a, const Tensor& reference);

}  // namespace oracle
