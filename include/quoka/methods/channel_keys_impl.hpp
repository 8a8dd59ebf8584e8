// Definitions of channel_keys.hpp.
#pragma once

#include <quoka/methods/channel_keys.hpp>
#include <quoka/select/kit_impl.hpp>

#include <algorithm>
#include <cmath>

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

// Some channels of channel-major keys.
class ChannelKeys final : public MassKeys {
 public:
  ChannelKeys(const float* blocks, Index stride, Index keys, const Index* channels, Index count)
      : blocks_(blocks), stride_(stride), keys_(keys), channels_(channels), count_(count) {}

  bool pack(Index first, Index count, float* packed) override {
    const float* const block = blocks_ + first / width() * stride_;
    simd::Packet poison = simd::zero();  // x * 0 is NaN for NaN and infinity
    for (Index s = 0; s < count_; ++s) {
      for (Index i = 0; i < width(); i += simd::lanes) {
        const simd::Packet x = simd::load(block + channels_[s] * width() + i);
        poison = simd::fma(x, simd::zero(), poison);
        simd::store(packed + i, x);
      }
      packed += width();
    }
    next_ = first + count < keys_ ? block + stride_ : nullptr;
    at_ = 0;
    return simd::reduce_add(poison) == 0.0f;
  }
  void prefetch(Index parts) override {
    if (next_ == nullptr) return;
    for (Index left = ceil_div(count_, parts); left > 0 && at_ < count_; --left, ++at_)
      for (Index i = 0; i < width(); i += 16) simd::prefetch(next_ + channels_[at_] * width() + i);
  }
  bool finite(Index key) override {
    const float* const at = blocks_ + key / width() * stride_ + key % width();
    return std::all_of(channels_, channels_ + count_,
                       [&](Index channel) { return std::isfinite(at[channel * width()]); });
  }
  void logits(const float* packed, const float* panel, Index count, float* x,
              PanelPackets& top) override {
    block_logits(count, x, top, [&](auto& acc, Index key) QUOKA_INLINE_LAMBDA {
      simd::unroll<tuning::tile_rows, tuning::tile_packets>(
          [&](auto i, auto j) QUOKA_INLINE_LAMBDA { acc[i][j] = simd::zero(); });
      rank1_updates<tuning::tile_rows, tuning::tile_packets, 1>(acc, packed + key, width(), panel,
                                                                count_);
    });
  }

 private:
  static Index width() { return tuning::block_keys; }
  static_assert(tuning::most_block_keys % simd::lanes == 0);

  const float* blocks_;
  Index stride_, keys_;
  const Index* channels_;
  Index count_;
  const float* next_ = nullptr;
  Index at_ = 0;
};

}  // namespace detail

QUOKA_FUNC void ChannelSource::with_keys(Index b, Index head, Index heads, RowReader&,
                                         FunctionRef<void(detail::MassKeys&)> use) const {
  const RowStore<float>& blocks = keys_.blocks;
  const Index kv_head = head / (heads / blocks.heads());
  detail::ChannelKeys of_head(blocks.row(b, kv_head, 0), blocks.dim(), keys_.len,
                              chosen_ + (b * blocks.heads() + kv_head) * stride_, count_);
  use(of_head);
}

}  // namespace QUOKA_ABI
}  // namespace quoka
