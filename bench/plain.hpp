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

template <class T>
float inverse_norm(const T* x, Index dim) {
  const float norm = std::sqrt(dot(x, x, dim));
  return norm > 0.0f ? 1.0f / norm : 0.0f;
}

// ---- selection ----------------------------------------------------------------------------------

// The positions kept of one head, lowest cosine with the mean query first.
template <class T>
std::vector<Index> subselect_head(const TensorView<const T>& q, Index head, Index n_queries) {
  const Index len = q.len(), dim = q.dim();
  std::vector<Index> order(static_cast<std::size_t>(len));
  std::iota(order.begin(), order.end(), Index{0});
  if (len <= n_queries) return order;
  std::vector<float> mean(static_cast<std::size_t>(dim)), cosine(static_cast<std::size_t>(len));
  for (Index i = 0; i < len; ++i)
    for (Index c = 0; c < dim; ++c)
      mean[static_cast<std::size_t>(c)] += static_cast<float>(q.row(0, head, i)[c]);
  for (auto& x : mean) x /= static_cast<float>(len);
  for (Index i = 0; i < len; ++i) {
    const T* row = q.row(0, head, i);
    cosine[static_cast<std::size_t>(i)] =
        dot(row, mean.data(), dim) * inverse_norm(row, dim) * inverse_norm(mean.data(), dim);
  }
  std::stable_sort(order.begin(), order.end(), [&](Index a, Index b) {
    return cosine[static_cast<std::size_t>(a)] < cosine[static_cast<std::size_t>(b)];
  });
  order.resize(static_cast<std::size_t>(n_queries));
  return order;
}

// The queries kept: [q_heads, min(n_queries, q_len), head_dim].
template <class T>
Rows subselect_queries(const TensorView<const T>& q, Index n_queries) {
  Rows kept(q.heads(), std::min(n_queries, q.len()), q.dim());
  for (Index head = 0; head < q.heads(); ++head) {
    const auto order = subselect_head(q, head, n_queries);
    for (Index m = 0; m < kept.len; ++m)
      for (Index c = 0; c < kept.dim; ++c)
        kept.row(head, m)[c] =
            static_cast<float>(q.row(0, head, order[static_cast<std::size_t>(m)])[c]);
  }
  return kept;
}

// Normalise each kept query, average over the group by slot: [kv_heads, n, head_dim].
inline Rows pre_aggregate(const Rows& kept, Index kv_heads) {
  const Index group = kept.heads / kv_heads;
  Rows q_bar(kv_heads, kept.len, kept.dim);
  for (Index head = 0; head < kept.heads; ++head)
    for (Index m = 0; m < kept.len; ++m) {
      const float* row = kept.row(head, m);
      const float factor = inverse_norm(row, kept.dim) / static_cast<float>(group);
      for (Index c = 0; c < kept.dim; ++c) q_bar.row(head / group, m)[c] += row[c] * factor;
    }
  return q_bar;
}

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

// The selected rows: [kv_heads, count, dim].
template <class T>
std::vector<T> gather(const TensorView<const T>& past, const Positions& keep) {
  std::vector<T> rows;
  for (Index head = 0; head < past.heads(); ++head)
    for (const Index kv : keep[static_cast<std::size_t>(head)])
      for (Index c = 0; c < past.dim(); ++c) rows.push_back(past.row(0, head, kv)[c]);
  return rows;
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

// ---- the cache and the chunk step ---------------------------------------------------------------

struct Cache {
  Cache(Index kv_heads, Index capacity, Index dim)
      : k(kv_heads, capacity, dim),
        v(kv_heads, capacity, dim),
        inverse_norms(kv_heads, capacity, 1) {}
  Rows k, v, inverse_norms;
  Index len = 0;

  void append(const TensorView<const float>& new_k, const TensorView<const float>& new_v) {
    for (Index head = 0; head < k.heads; ++head)
      for (Index i = 0; i < new_k.len(); ++i) {
        for (Index c = 0; c < k.dim; ++c) k.row(head, len + i)[c] = new_k.row(0, head, i)[c];
        for (Index c = 0; c < v.dim; ++c) v.row(head, len + i)[c] = new_v.row(0, head, i)[c];
        *inverse_norms.row(head, len + i) = inverse_norm(new_k.row(0, head, i), k.dim);
      }
    len += new_k.len();
  }
  TensorView<const float> view(const Rows& rows) const {
    return {rows.data.data(),
            {1, rows.heads, len, rows.dim},
            {rows.heads * rows.len * rows.dim, rows.len * rows.dim, rows.dim, 1}};
  }
  TensorView<const float, 3> norms() const {
    const Rows& x = inverse_norms;
    return {x.data.data(), {1, x.heads, len}, {x.heads * x.len, x.len, 1}};
  }
};

// QuoKA's choice.
template <class T>
Positions select(const TensorView<const T>& q, const TensorView<const T>& past_k,
                 const TensorView<const float, 3>& inverse_norms, Index n_queries, Index budget) {
  return top_k(score_keys(pre_aggregate(subselect_queries(q, n_queries), past_k.heads()), past_k,
                          inverse_norms),
               budget);
}

// Select, attend, append. A budget of all the past is dense attention and selects nothing.
inline Rows chunk_step(const TensorView<const float>& q, const TensorView<const float>& k,
                       const TensorView<const float>& v, Index n_queries, Index budget,
                       Cache& cache) {
  const auto past_k = cache.view(cache.k), past_v = cache.view(cache.v);
  Positions keep;
  if (budget < cache.len) keep = select(q, past_k, cache.norms(), n_queries, budget);
  Rows out =
      attention(Attention<float>{q, past_k, past_v, k, v, budget < cache.len ? &keep : nullptr});
  cache.append(k, v);
  return out;
}

}  // namespace quoka_bench::plain
