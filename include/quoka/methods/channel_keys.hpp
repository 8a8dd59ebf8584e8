// Channel-major keys: a copy in which each channel of a block of keys is a contiguous run.
//
//   [batch, kv_heads, block, channel, keys of a block]
//
// For methods that read some channels of every key: from row-major keys that would be one element
// of each cache line. A block is what the kernels take at a time; a chosen channel is copied from
// it as it lies. Float; kept as keys come, head_dim + 1 float moves per key.
#pragma once

#include <quoka/rows/row_store.hpp>
#include <quoka/rows/rows.hpp>
#include <quoka/select/query_scores.hpp>

namespace quoka {
inline namespace QUOKA_ABI {

// [batch, kv_heads, blocks, head_dim * block_keys]: block after block, in it channel after channel.
struct ChannelMajorKeys {
  RowStore<float> blocks;  // [batch, kv_heads, blocks, head_dim * block_keys]
  Index len = 0;           // keys
  RowReader row;    // one key, widened

  // Copies the keys [len, k.len()) of k [batch, kv_heads, kv_len, head_dim]; room for `capacity`.
  void append(const Rows& k, Index capacity);
  // Back to the first kv_len keys.
  void truncate(Index kv_len) { len = kv_len < len ? kv_len : len; }
};

// `count` channels of each key: those of a KV head begin at chosen[(b * kv_heads + head) * stride].
class ChannelSource final : public KeySource {
 public:
  // Nothing is copied.
  ChannelSource(const ChannelMajorKeys& keys, const Index* chosen, Index count, Index stride)
      : keys_(keys), chosen_(chosen), count_(count), stride_(stride) {}
  void with_keys(Index b, Index head, Index heads,
                 FunctionRef<void(detail::MassKeys&)> use) const override;

 private:
  const ChannelMajorKeys& keys_;
  const Index* chosen_;
  Index count_, stride_;
};

}  // namespace QUOKA_ABI
}  // namespace quoka

#if QUOKA_DEFINES
#include <algorithm>
#include <cmath>
#include <span>

namespace quoka {
inline namespace QUOKA_ABI {

QUOKA_FUNC void ChannelMajorKeys::append(const Rows& k, Index capacity) {
  const Index width = tuning::block_keys;
  if (blocks.batch() != k.batch() || blocks.heads() != k.heads() || blocks.dim() != k.dim() * width)
    len = 0;
  blocks.reshape(k.batch(), k.heads(), k.dim() * width);
  blocks.resize(ceil_div(k.len(), width), ceil_div(capacity, width));
  row.reserve(k);
  for (Index b = 0; b < k.batch(); ++b) {
    for (Index head = 0; head < k.heads(); ++head) {
      for (Index t = std::min(len, k.len()); t < k.len(); ++t) {
        float* const block = blocks.row(b, head, t / width);
        if (t % width == 0) std::fill_n(block, blocks.dim(), 0.0f);
        const float* const key = row.read(k, b, head, t);
        for (Index c = 0; c < k.dim(); ++c) block[c * width + t % width] = key[c];
      }
    }
  }
  len = k.len();
}

namespace detail {

// Some channels of channel-major keys: packed as [channel][key of the block].
class ChannelKeys final : public MassKeys {
 public:
  ChannelKeys(const float* blocks, Index stride, Index keys, std::span<const Index> channels)
      : MassKeys(keys), blocks_(blocks), stride_(stride), channels_(channels) {}

  const PackedBlock& pack(const KeyRange& keys) override {
    const float* const block = block_of(keys);
    float* const packed = reinterpret_cast<float*>(block_.keys);
    simd::Packet poison = simd::zero();  // x * 0 is NaN for NaN and infinity
    float* to = packed;
    for (const Index channel : channels_)
      for (Index i = 0; i < width(); i += simd::lanes, to += simd::lanes) {
        const simd::Packet x = simd::load(block + channel * width() + i);
        poison = simd::fma(x, simd::zero(), poison);
        simd::store(to, x);
      }
    note_finite(keys.count(), simd::reduce_add(poison) == 0.0f, [&](Index i) {
      for (Index s = 0; s < std::ssize(channels_); ++s)
        if (!std::isfinite(packed[s * width() + i])) return false;
      return true;
    });
    return block_;
  }
  BlockPrefetch prefetch(const KeyRange& keys, Index panels) override {
    if (keys.count() == 0) return {};
    const Index count = std::min<Index>(std::ssize(channels_), tuning::most_block_keys);
    for (Index s = 0; s < count; ++s)
      next_[s] = reinterpret_cast<ConstRow>(block_of(keys) +
                                            channels_[static_cast<std::size_t>(s)] * width());
    return {{next_, count, width() * Index{sizeof(float)}}, {}, panels};
  }
  void multiply(const PackedBlock& block, const float* queries, Index count, float* x,
                PanelPackets& top) const override {
    const float* const packed = reinterpret_cast<const float*>(block.keys);
    block_logits(count, x, top, [&](auto& acc, Index key) QUOKA_INLINE_LAMBDA {
      rank1_updates<tuning::tile_rows, tuning::tile_packets, 1>(acc, packed + key, width(), queries,
                                                                std::ssize(channels_));
    });
  }

 private:
  static Index width() { return tuning::block_keys; }
  static_assert(tuning::most_block_keys % simd::lanes == 0);
  const float* block_of(const KeyRange& keys) const {
    return blocks_ + keys.begin / width() * stride_;
  }

  const float* blocks_;
  Index stride_;
  std::span<const Index> channels_;
  ConstRow next_[tuning::most_block_keys];
};

}  // namespace detail

QUOKA_FUNC void ChannelSource::with_keys(Index b, Index head, Index heads,
                                         FunctionRef<void(detail::MassKeys&)> use) const {
  const RowStore<float>& blocks = keys_.blocks;
  const Index kv_head = head / (heads / blocks.heads());
  const Index* const chosen = chosen_ + (b * blocks.heads() + kv_head) * stride_;
  detail::ChannelKeys head_keys(blocks.row(b, kv_head, 0), blocks.dim(), keys_.len,
                                {chosen, static_cast<std::size_t>(count_)});
  use(head_keys);
}

}  // namespace QUOKA_ABI
}  // namespace quoka
#endif  // QUOKA_DEFINES
