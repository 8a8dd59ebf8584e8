// Channel-major keys: a copy in which each channel of a block of keys is a contiguous run.
//
//   [batch, kv_heads, block, channel, tuning::block_keys]
//
// For methods that read some channels of every key: from row-major keys that would be one element
// of each cache line. A block is what the kernels take at a time; a chosen channel is copied from
// it as it lies. Float; kept as keys come, head_dim + 1 float moves per key.
#pragma once

#include <quoka/cache/row_store.hpp>
#include <quoka/core/panel_kernels.hpp>

#include <algorithm>
#include <cmath>
#include <span>

namespace quoka::inline QUOKA_ABI {
namespace detail {

// [batch, kv_heads, blocks, head_dim * block_keys]: block after block, in it channel after channel.
struct ChannelMajorKeys {
  RowStore<float> blocks;
  Index len = 0;

  template <class T>
  void catch_up(const TensorView<const T>& k, Index capacity) {
    constexpr Index width = tuning::block_keys;
    if (blocks.batch() != k.batch() || blocks.heads() != k.heads() ||
        blocks.dim() != k.dim() * width)
      len = 0;
    blocks.reshape(k.batch(), k.heads(), k.dim() * width);
    blocks.reserve(ceil_div(capacity, width));
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
}  // namespace quoka::inline QUOKA_ABI
