// SparQ: approximate logits from the few channels in which the queries are largest.
//
//   channels  C = the r channels with the largest sum of |q| over the chunk and the group's heads
//   logits    l[h][j][t] = scale * sum over c in C of q[h][j][c] k[t][c] / sqrt(share[h][j]),
//             share[h][j] = sum over C of |q[h][j]| / sum over all channels; 0 / 0 counts as 1
//   score[t]  = mean over heads and queries of softmax over t of l, or of l itself (Domain)
//
// 2 * q_heads * q_len * kv_len * r FLOPs (softmax); kv_len * head_dim more (logit). Keeps a second,
// channel-major copy of the keys in float, in blocks of tuning::block_keys keys, made as they come:
// a chosen channel is a contiguous run, so r of head_dim channels are read. r >= head_dim is the
// exact scorer. Source: Ribar et al., "SparQ Attention: Bandwidth-Efficient LLM Inference", arXiv
// 2312.04985, and Graphcore's code, which decodes one query at a time. Deviations: one channel set
// and one key set per KV head and chunk; no forced local keys; no mean-value term for the keys left
// out.
#pragma once

#include <quoka/cache/row_store.hpp>
#include <quoka/select/query_scores.hpp>
#include <quoka/select/scored_selector.hpp>

#include <numeric>

namespace quoka::inline QUOKA_ABI {

struct SparqOptions {
  Budget budget = 1024;
  Index rank = 64;  // r: channels used; head_dim or more: all
  Domain domain = Domain::softmax;
  Index window = 1;      // neighbouring keys kept together; 1: none
  Index keep_first = 0;  // attention sinks, inside the budget
  Index keep_last = 0;   // recent keys, inside the budget
};

namespace detail {

// [batch, kv_heads, blocks, head_dim * block_keys]: block after block, in it channel after channel.
struct ChannelMajorKeys {
  RowStore<float> blocks;
  Index len = 0;

  template <class T>
  void catch_up(const TensorView<const T>& k) {
    constexpr Index width = tuning::block_keys;
    if (blocks.batch() != k.batch() || blocks.heads() != k.heads() ||
        blocks.dim() != k.dim() * width)
      len = 0;
    blocks.reshape(k.batch(), k.heads(), k.dim() * width);
    blocks.resize(ceil_div(k.len(), width));
    for (Index b = 0; b < k.batch(); ++b) {
      for (Index head = 0; head < k.heads(); ++head) {
        for (Index t = std::min(len, k.len()); t < k.len(); ++t) {
          float* block = blocks.row(b, head, t / width);
          if (t % width == 0) std::fill_n(block, blocks.dim(), 0.0f);
          const T* key = k.row(b, head, t);
          for (Index c = 0; c < k.dim(); ++c)
            block[c * width + t % width] = static_cast<float>(key[c]);
        }
      }
    }
    len = k.len();
  }
};

// Some channels of channel-major keys, as the Keys of softmax_mass.hpp.
class ChannelKeys {
 public:
  ChannelKeys(const float* blocks, Index stride, Index keys, std::span<const Index> channels)
      : blocks_(blocks), stride_(stride), keys_(keys), channels_(channels) {}

  bool pack(Index first, Index count, float* packed) {
    const float* block = blocks_ + first / width * stride_;
    simd::Packet poison = simd::zero();  // x * 0 is NaN for NaN and infinity
    for (const Index channel : channels_) {
      for (Index i = 0; i < width; i += simd::lanes) {
        const simd::Packet x = simd::load(block + channel * width + i);
        poison = simd::fma(x, simd::zero(), poison);
        simd::store(packed + i, x);
      }
      packed += width;
    }
    next_ = first + count < keys_ ? block + stride_ : nullptr;
    channel_ = 0;
    return simd::reduce_add(poison) == 0.0f;
  }
  void prefetch(Index parts) {
    if (next_ == nullptr) return;
    const Index size = std::ssize(channels_);
    for (Index left = ceil_div(size, parts); left > 0 && channel_ < size; --left, ++channel_)
      for (Index i = 0; i < width; i += 16)
        simd::prefetch(next_ + channels_[static_cast<std::size_t>(channel_)] * width + i);
  }
  bool finite(Index key) const {
    const float* at = blocks_ + key / width * stride_ + key % width;
    return std::all_of(channels_.begin(), channels_.end(),
                       [&](Index channel) { return std::isfinite(at[channel * width]); });
  }
  void logits(const float* packed, const float* panel, Index count, float* x,
              PanelPackets& top) const {
    block_logits(count, x, top, [&](auto& acc, Index key) QUOKA_INLINE_LAMBDA {
      simd::unroll<tuning::tile_rows, tuning::tile_packets>(
          [&](auto i, auto j) QUOKA_INLINE_LAMBDA { acc[i][j] = simd::zero(); });
      rank1_updates<tuning::tile_rows, tuning::tile_packets, 1>(acc, packed + key, width, panel,
                                                                std::ssize(channels_));
    });
  }

 private:
  static constexpr Index width = tuning::block_keys;
  static_assert(width % simd::lanes == 0);

  const float* blocks_;
  Index stride_, keys_;
  std::span<const Index> channels_;
  const float* next_ = nullptr;
  Index channel_ = 0;
};

}  // namespace detail

class SparqScorer {
 public:
  using Options = SparqOptions;

  struct State {
    detail::ChannelMajorKeys keys;
    Buffer<float> magnitudes;  // [batch, kv_heads, head_dim], sum of |q|
    Buffer<Index> channels;    // [batch, kv_heads, head_dim], the chosen first, ascending
    detail::QueryScoreState scores;

    void truncate(Index kv_len) { keys.len = std::min(keys.len, kv_len); }
    Index bytes() const {
      return keys.blocks.bytes() + magnitudes.bytes() + channels.bytes() + scores.bytes();
    }
  };

  // Throws std::invalid_argument for a rank < 1.
  explicit SparqScorer(const Options& options = {}) : options_(options) {
    detail::require_at_least("rank", options.rank, 1);
  }

  template <class T, class E>
  void score(const SelectorInput<T>& input, State& state, float* scores, E&& executor) const {
    const TensorView<const T>&q = input.q, &k = input.k;
    const Index dim = k.dim(), group = input.group(), tasks = k.batch() * k.heads();
    const Index rank = std::min(options_.rank, dim);
    Index* channels = state.channels.reserve(tasks * dim);
    float* magnitudes = state.magnitudes.reserve(tasks * dim);
    executor.run(tasks, [&](Index task, int) {
      choose(q, task / k.heads(), task % k.heads() * group, group, rank, magnitudes + task * dim,
             channels + task * dim);
    });
    const auto chosen = [&](Index task) {
      return std::span<const Index>(channels + task * dim, static_cast<std::size_t>(rank));
    };
    // A row of the chosen channels alone, or of all with zeros in place of the others.
    const auto fill_with = [&](bool packed) {
      return [&, packed](Index task, float factor, detail::RowWriter& rows) {
        for (Index r = 0; r < group; ++r)
          for (Index j = 0; j < q.len(); ++j)
            add_row(q.row(task / k.heads(), task % k.heads() * group + r, j), dim,
                    factor * input.logit_scale(), chosen(task), packed, rows);
      };
    };
    if (options_.domain == Domain::logit)
      return detail::mean_logit_scores({tasks, group * q.len(), dim}, fill_with(false), k, scores,
                                       state.scores, executor);
    state.keys.catch_up(k);
    const auto keys_of = [&](Index task) {
      const RowStore<float>& blocks = state.keys.blocks;
      return detail::ChannelKeys(blocks.row(task / k.heads(), task % k.heads(), 0), blocks.dim(),
                                 k.len(), chosen(task));
    };
    detail::softmax_scores({tasks, group * q.len(), rank}, fill_with(true), k.len(), input.capacity,
                           keys_of, detail::MassOver::sum, scores, state.scores, executor);
  }

 private:
  template <class T>
  static void choose(const TensorView<const T>& q, Index b, Index first_head, Index group,
                     Index rank, float* magnitudes, Index* channels) {
    std::fill_n(magnitudes, q.dim(), 0.0f);
    for (Index r = 0; r < group; ++r) {
      for (Index j = 0; j < q.len(); ++j) {
        const T* row = q.row(b, first_head + r, j);
        if (!is_finite_row(row, q.dim(), inverse_norm(row, q.dim()))) continue;
        for (Index c = 0; c < q.dim(); ++c) magnitudes[c] += std::abs(static_cast<float>(row[c]));
      }
    }
    std::iota(channels, channels + q.dim(), Index{0});
    std::partial_sort(channels, channels + rank, channels + q.dim(), [&](Index x, Index y) {
      return magnitudes[x] > magnitudes[y] || (magnitudes[x] == magnitudes[y] && x < y);
    });
    std::sort(channels, channels + rank);
  }

  template <class T>
  static void add_row(const T* row, Index dim, float factor, std::span<const Index> channels,
                      bool packed, detail::RowWriter& rows) {
    float all = 0.0f, some = 0.0f;
    for (Index c = 0; c < dim; ++c) all += std::abs(static_cast<float>(row[c]));
    for (const Index c : channels) some += std::abs(static_cast<float>(row[c]));
    const float share = all > 0.0f && some > 0.0f ? some / all : 1.0f;
    const float scaled = factor / std::sqrt(share);
    float* to = rows.next();
    if (!packed) std::fill_n(to, dim, 0.0f);
    for (std::size_t s = 0; s < channels.size(); ++s) {
      const Index c = channels[s];
      to[packed ? static_cast<Index>(s) : c] = static_cast<float>(row[c]) * scaled;
    }
    if (std::isfinite(all)) rows.keep_if_finite();
  }

  Options options_;
};

using SparqSelector = ScoredSelector<SparqScorer>;
static_assert(Selector<SparqSelector>);

}  // namespace quoka::inline QUOKA_ABI
