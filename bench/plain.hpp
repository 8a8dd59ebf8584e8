// The plain twins: each fast path once more, in its simplest form.
//
// Naive loops in float on one thread, from the formulas at the head of each header; of the library
// they use views to read rows and nothing else. A fast path's time is compared with theirs, and its
// results are checked against theirs.
#pragma once

#include <quoka/rows/tensor.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numeric>
#include <vector>

namespace quoka_bench::plain {

using quoka::Index;
using quoka::TensorView;

// [heads][len][dim], batch 1.
struct Rows {
  Rows(Index heads_in, Index len_in, Index dim_in)
      : heads(heads_in),
        len(len_in),
        dim(dim_in),
        data(static_cast<std::size_t>(heads_in * len_in * dim_in)) {}
  Index heads, len, dim;
  std::vector<float> data;

  float* row(Index head, Index i) { return data.data() + (head * len + i) * dim; }
  const float* row(Index head, Index i) const { return data.data() + (head * len + i) * dim; }
};

// Ascending positions per KV head.
using Positions = std::vector<std::vector<Index>>;

template <class A, class B>
float dot(const A* a, const B* b, Index dim) {
  float sum = 0.0f;
  for (Index c = 0; c < dim; ++c) sum += static_cast<float>(a[c]) * static_cast<float>(b[c]);
  return sum;
}

// ---- selection ----------------------------------------------------------------------------------

// The score of one key.
template <class T>
float score_key(const Rows& q_bar, Index kv_head, const T* key, float inverse) {
  float best = -std::numeric_limits<float>::infinity();
  for (Index m = 0; m < q_bar.len; ++m)
    best = std::max(best, dot(q_bar.row(kv_head, m), key, q_bar.dim) * inverse);
  return best;
}

// [kv_heads, kv_len, 1].
template <class T>
Rows score_keys(const Rows& q_bar, const TensorView<const T>& k,
                const TensorView<const float, 3>& inverse_norms) {
  Rows scores(k.heads(), k.len(), 1);
  for (Index kv_head = 0; kv_head < k.heads(); ++kv_head)
    for (Index kv = 0; kv < k.len(); ++kv)
      *scores.row(kv_head, kv) =
          score_key(q_bar, kv_head, k.row(0, kv_head, kv), inverse_norms.at(0, kv_head, kv));
  return scores;
}

// The k best of each head by std::nth_element on indices; ties to the earlier position.
inline Positions top_k(const Rows& scores, Index k) {
  Positions kept;
  for (Index head = 0; head < scores.heads; ++head) {
    const float* score = scores.row(head, 0);
    std::vector<Index> order(static_cast<std::size_t>(scores.len));
    std::iota(order.begin(), order.end(), Index{0});
    if (k < scores.len) {
      std::nth_element(order.begin(), order.begin() + k, order.end(), [score](Index a, Index b) {
        return score[a] != score[b] ? score[a] > score[b] : a < b;
      });
      order.resize(static_cast<std::size_t>(k));
      std::sort(order.begin(), order.end());
    }
    kept.push_back(std::move(order));
  }
  return kept;
}

// ---- attention ----------------------------------------------------------------------------------

// The input of attention; keep == nullptr is all of the past.
template <class T>
struct Attention {
  TensorView<const T> q;
  TensorView<const T> past_k, past_v;
  TensorView<const T> chunk_k, chunk_v;
  const Positions* keep = nullptr;
};

// One query's output, out [dim]: logits, softmax, weighted sum.
template <class T>
void attend_row(const Attention<T>& in, Index q_head, Index q, float* out) {
  const Index dim = in.q.dim(), kv_head = q_head / (in.q.heads() / in.chunk_k.heads());
  const std::vector<Index>* keep =
      in.keep != nullptr ? &(*in.keep)[static_cast<std::size_t>(kv_head)] : nullptr;
  std::vector<const T*> past_k, past_v;
  const Index past = keep != nullptr ? static_cast<Index>(keep->size()) : in.past_k.len();
  for (Index i = 0; i < past; ++i) {
    const Index kv = keep != nullptr ? (*keep)[static_cast<std::size_t>(i)] : i;
    past_k.push_back(in.past_k.row(0, kv_head, kv));
    past_v.push_back(in.past_v.row(0, kv_head, kv));
  }
  std::vector<const T*> chunk_k, chunk_v;
  for (Index i = 0; i <= q; ++i) {
    chunk_k.push_back(in.chunk_k.row(0, kv_head, i));
    chunk_v.push_back(in.chunk_v.row(0, kv_head, i));
  }

  const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
  std::vector<float> weight(past_k.size() + chunk_k.size());
  float max = -std::numeric_limits<float>::infinity(), sum = 0.0f;
  const auto take_logits = [&](const auto& k, float* to) {
    for (std::size_t t = 0; t < k.size(); ++t)
      max = std::max(max, to[t] = dot(in.q.row(0, q_head, q), k[t], dim) * scale);
  };
  take_logits(past_k, weight.data()), take_logits(chunk_k, weight.data() + past);
  for (auto& w : weight) sum += w = std::exp(w - max);
  std::fill_n(out, dim, 0.0f);
  const auto add_values = [&](const auto& v, const float* w) {
    for (std::size_t t = 0; t < v.size(); ++t)
      for (Index c = 0; c < dim; ++c) out[c] += w[t] / sum * static_cast<float>(v[t][c]);
  };
  add_values(past_v, weight.data()), add_values(chunk_v, weight.data() + past);
}

// The chunk, row by row: [q_heads, q_len, dim].
template <class T>
Rows attention(const Attention<T>& in) {
  Rows out(in.q.heads(), in.q.len(), in.q.dim());
  for (Index q_head = 0; q_head < out.heads; ++q_head)
    for (Index q = 0; q < out.len; ++q) attend_row(in, q_head, q, out.row(q_head, q));
  return out;
}

}  // namespace quoka_bench::plain
