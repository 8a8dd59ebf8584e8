// Sizes of one attention layer.
#pragma once

#include <quoka/base/index.hpp>
#include <quoka/rows/format.hpp>

#include <span>

namespace quoka {
inline namespace QUOKA_ABI {

struct LayerShape {
  Index q_heads = 0;   // a multiple of kv_heads
  Index kv_heads = 0;  // at least 1
  Index head_dim = 0;  // channels of a query and of a key
  Index v_dim = 0;     // channels of a value; 0: head_dim
  Index batch = 1;     // sequences of equal length
  // Formats of the layer's cache, which they outlive; null: that of the layer's element type.
  const Format *k_format = nullptr, *v_format = nullptr;
  // Scales of formats that keep them apart: CacheFormat::scales (kv_cache.hpp). The layer copies
  // them.
  std::span<const float> k_scales = {}, v_scales = {};
};

}  // namespace QUOKA_ABI
}  // namespace quoka
