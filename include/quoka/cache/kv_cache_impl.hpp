// Definitions of kv_cache.hpp.
#pragma once

#include <quoka/cache/kv_cache.hpp>
#include <quoka/formats/format_table.hpp>
#include <quoka/kernels/inverse_norm.hpp>
#include <quoka/views/overlap.hpp>

#include <cstring>

namespace quoka {
inline namespace QUOKA_ABI {

QUOKA_FUNC KvCache::KvCache(Index batch, Index kv_heads, Index key_dim, Index value_dim,
                            const Format& k_format, const Format& v_format)
    : k_format_(&k_format), v_format_(&v_format), key_dim_(key_dim), value_dim_(value_dim) {
  detail::require_at_least("batch", batch, 1);
  detail::require_at_least("kv_heads", kv_heads, 1);
  detail::require_at_least("head_dim", key_dim, 1);
  detail::require_at_least("v's dim", value_dim, 1);
  for (const Format* const format : {k_format_, v_format_})
    if (!format->writes)
      detail::fail_because(std::string("a cache writes, and rows of format ") + format->name +
                           " are only read");
  k_ = RowStore<std::byte>(batch, kv_heads, k_format.row_bytes({key_dim}));
  v_ = RowStore<std::byte>(batch, kv_heads, v_format.row_bytes({value_dim}));
  inverse_norms_ = RowStore<float>(batch, kv_heads, 1);
  row_.reserve(std::max(key_dim, value_dim));
}

QUOKA_FUNC void KvCache::check(const Rows& k, const Rows& v) const {
  detail::require_sizes("k", k.sizes(), {k_.batch(), k_.heads(), k.len(), key_dim_});
  detail::require_sizes("v", v.sizes(), {k_.batch(), k_.heads(), k.len(), value_dim_});
  require_outside(k, "k lies in the cache that it is to be appended to");
  require_outside(v, "v lies in the cache that it is to be appended to");
}

QUOKA_FUNC void KvCache::require_outside(const Rows& x, std::string_view message) const {
  const auto whole = [](const auto& store) {
    return detail::ByteLattice(store.data(), store.bytes(), {1, 1, store.bytes() > 0 ? 1 : 0},
                               {0, 0, 0});
  };
  const detail::ByteLattice rows(x);
  if (share_memory(whole(k_), rows) || share_memory(whole(v_), rows) ||
      share_memory(whole(inverse_norms_), rows))
    detail::fail_because(message);
}

QUOKA_FUNC void KvCache::append(const Rows& k, const Rows& v) {
  check(k, v);
  const Index begin = len(), n = k.len();
  grow(begin + n);
  const auto put = [&](const Rows& from, Index b, Index head, Index i, const Format& as,
                       std::byte* to) {
    const RowShape shape{from.dim()};
    if (&from.format() == &as && from.stores_alone()) {
      std::memcpy(to, from.row(b, head, i), static_cast<std::size_t>(as.row_bytes(shape)));
    } else {
      from.format().widen(from.row(b, head, i), from.shape(head), row_.data());
      as.narrow(row_.data(), shape, to);
    }
  };
  for (Index b = 0; b < k.batch(); ++b) {
    for (Index head = 0; head < k.heads(); ++head) {
      for (Index i = 0; i < n; ++i) {
        std::byte* const key = k_.row(b, head, begin + i);
        put(k, b, head, i, *k_format_, key);
        put(v, b, head, i, *v_format_, v_.row(b, head, begin + i));
        const float* floats = reinterpret_cast<const float*>(key);
        if (!k_format_->is_float) {
          k_format_->widen(key, {key_dim_}, row_.data());
          floats = row_.data();
        }
        *inverse_norms_.row(b, head, begin + i) = detail::inverse_norm_of_row(floats, key_dim_);
      }
    }
  }
  set_len(begin + n);
}

}  // namespace QUOKA_ABI
}  // namespace quoka
