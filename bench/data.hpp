// Generated tensors: the same numbers on every machine and with every compiler.
//
// Channels are independent normal numbers, as queries and keys roughly are after their norms: dense
// attention spreads over all keys, so no selector can keep much of it. Speed does not depend on
// that; accuracy is measured elsewhere, on recorded data.
#pragma once

#include "normal.hpp"

#include <quoka/quoka.hpp>
#include <quoka/rows/tensor.hpp>

#include <cstdint>
#include <map>
#include <memory>
#include <tuple>
#include <vector>

namespace quoka_bench {

using quoka::Index;
using quoka::LayerShape;
using quoka::TensorView;

// ---- shapes -------------------------------------------------------------------------------------

inline constexpr LayerShape qwen3_4b{.q_heads = 32, .kv_heads = 8, .head_dim = 128};
inline constexpr LayerShape llama32_3b{.q_heads = 24, .kv_heads = 8, .head_dim = 128};
inline constexpr LayerShape qwen25_7b{.q_heads = 28, .kv_heads = 4, .head_dim = 128};
inline constexpr LayerShape tinyllama{.q_heads = 32, .kv_heads = 4, .head_dim = 64};
inline constexpr LayerShape head_dim_64{.q_heads = 32, .kv_heads = 8, .head_dim = 64};
inline constexpr LayerShape head_dim_80{.q_heads = 32, .kv_heads = 8, .head_dim = 80};

inline constexpr Index chunk_len = 128;  // q_len of a prefill chunk
inline constexpr Index n_queries = 16;
inline constexpr Index longest_kv_len = 32768;

// ---- FLOPs, a multiply-add counting 2: README.md ------------------------------------------------

// A causal chunk of q_len queries over `past` keys and itself.
inline double attention_flops(const LayerShape& shape, Index q_len, Index past) {
  const auto n = static_cast<double>(q_len);
  const double pairs = n * (static_cast<double>(past) + 0.5 * (n + 1.0));
  const Index v_dim = shape.v_dim > 0 ? shape.v_dim : shape.head_dim;
  return 2.0 * static_cast<double>(shape.batch * shape.q_heads * (shape.head_dim + v_dim)) * pairs;
}
inline double score_flops(const LayerShape& shape, Index rows, Index kv_len) {
  return 2.0 * static_cast<double>(shape.kv_heads * rows * shape.head_dim) *
         static_cast<double>(kv_len);
}

// ---- tensors ------------------------------------------------------------------------------------

// Owns [batch 1, heads, len, dim] in memory like a cache's, huge pages where it is large.
template <class T>
class Tensor {
 public:
  // Uninitialised.
  Tensor(Index heads, Index len, Index dim)
      : heads_(heads), len_(len), dim_(dim), data_(buffer_.reserve(size())) {}
  // Normal numbers.
  Tensor(Index heads, Index len, Index dim, std::uint64_t seed) : Tensor(heads, len, dim) {
    fill_normal(data_, size(), seed);
  }

  Index size() const { return heads_ * len_ * dim_; }
  T* data() { return data_; }
  TensorView<T> view() { return {data_, {1, heads_, len_, dim_}, {size(), len_ * dim_, dim_, 1}}; }
  TensorView<const T> view() const {
    return {data_, {1, heads_, len_, dim_}, {size(), len_ * dim_, dim_, 1}};
  }

 private:
  Index heads_, len_, dim_;
  quoka::Buffer<T> buffer_;
  T* data_;
};

// One chunk: q, k, v and a place for the result.
template <class T>
struct ChunkData {
  ChunkData(const LayerShape& shape, Index q_len)
      : q(shape.q_heads, q_len, shape.head_dim, 11),
        k(shape.kv_heads, q_len, shape.head_dim, 12),
        v(shape.kv_heads, q_len, shape.head_dim, 13),
        out(shape.q_heads, q_len, shape.head_dim) {}
  Tensor<T> q, k, v, out;
};

// The cached keys and values of one layer, as views.
template <class T>
struct PastData {
  TensorView<const T> k, v;                  // [1, kv_heads, kv_len, head_dim]
  TensorView<const float, 3> inverse_norms;  // [1, kv_heads, kv_len]

  PastData first(Index kv_len) const {
    return {k.slice(0, kv_len), v.slice(0, kv_len), inverse_norms.slice(0, kv_len)};
  }
};

// ---- caches: built when first asked for, shared by all benchmarks of the process ----------------

// Keys and values [begin, begin + n) of the endless sequence that all caches hold.
template <class T>
void append_generated(const LayerShape& shape, Index begin, Index n, quoka::KvCache& cache) {
  const auto seed = static_cast<std::uint64_t>(begin);
  const Tensor<T> k(shape.kv_heads, n, shape.head_dim, 1000 + 2 * seed),
      v(shape.kv_heads, n, shape.head_dim, 1001 + 2 * seed);
  cache.append(k.view(), v.view());
}

// One cache per shape and storage type, grown to the longest length that was asked for.
template <class T>
PastData<T> past_of(const LayerShape& shape, Index kv_len) {
  using Key = std::tuple<Index, Index>;
  static std::map<Key, std::unique_ptr<quoka::KvCache>> caches;
  auto& cache = caches[Key{shape.kv_heads, shape.head_dim}];
  if (cache == nullptr)
    cache = std::make_unique<quoka::KvCache>(1, shape.kv_heads, shape.head_dim, shape.head_dim,
                                             quoka::format_of<T>(), quoka::format_of<T>());
  constexpr Index step = 512;
  cache->reserve(quoka::round_up(kv_len, step));
  while (cache->len() < kv_len) append_generated<T>(shape, cache->len(), step, *cache);
  const auto k = cache->k().template typed<T>(), v = cache->v().template typed<T>();
  return PastData<T>{k, v, cache->inverse_norms()}.first(kv_len);
}

// Selections of `count` positions per head, one from each of `count` equal stretches of the past
// and the others elsewhere in theirs: together they visit every key once. So a benchmark that takes
// them in turn reads the rows from memory and not from a cache, as a chunk does after the keys were
// scored. kv_len is a multiple of count.
inline std::vector<quoka::Selection> scattered_selections(const LayerShape& shape, Index kv_len,
                                                          Index count) {
  const Index stretch = kv_len / count;
  std::vector<quoka::Selection> selections(static_cast<std::size_t>(stretch));
  for (Index s = 0; s < stretch; ++s) {
    quoka::SelectionWriter writer(selections[static_cast<std::size_t>(s)], 1, shape.kv_heads,
                                  kv_len, count);
    for (Index head = 0; head < shape.kv_heads; ++head)
      for (Index i = 0; i < count; ++i)
        writer.row(0, head)[static_cast<std::size_t>(i)] =
            static_cast<quoka::Position>(i * stretch + (s + 7 * i + head) % stretch);
    writer.commit();
  }
  return selections;
}

}  // namespace quoka_bench
