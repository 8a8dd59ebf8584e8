// Channel-major keys: a copy in which each channel of a block of keys is a contiguous run.
//
//   [batch, kv_heads, block, channel, keys of a block]
//
// For methods that read some channels of every key: from row-major keys that would be one element
// of each cache line. A block is what the kernels take at a time; a chosen channel is copied from
// it as it lies. Float; kept as keys come, head_dim + 1 float moves per key.
#pragma once

#include <quoka/cache/row_store.hpp>
#include <quoka/select/query_scores.hpp>
#include <quoka/views/float_rows.hpp>
#include <quoka/views/rows.hpp>

namespace quoka {
inline namespace QUOKA_ABI {

// [batch, kv_heads, blocks, head_dim * block_keys]: block after block, in it channel after channel.
struct ChannelMajorKeys {
  RowStore<float> blocks;  // [batch, kv_heads, blocks, head_dim * block_keys]
  Index len = 0;           // keys
  detail::FloatRow row;    // one key, widened

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

#if !defined(QUOKA_COMPILED)
#include <quoka/methods/channel_keys_impl.hpp>
#endif
