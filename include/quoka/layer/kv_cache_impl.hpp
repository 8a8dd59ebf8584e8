// Definitions of kv_cache.hpp.
#pragma once

#include <quoka/kernels/format_table.hpp>
#include <quoka/kernels/inverse_norm.hpp>
#include <quoka/layer/kv_cache.hpp>
#include <quoka/rows/overlap.hpp>

#include <cstdio>
#include <cstring>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// n scales of one head for each of `heads`, or for all of them; `name` is k or v.
inline void require_scales(const char* name, const Format& format, std::span<const float> scales,
                           Index heads, Index n) {
  char what[64], relation[128];
  const Index count = std::ssize(scales);
  if (count != n && count != heads * n) {
    std::snprintf(what, sizeof what, "the number of %s's scales", name);
    std::snprintf(relation, sizeof relation,
                  "but format %s has %td of a head, the same for all, or", format.name, n);
    fail(what, count, relation, "", heads * n);
  }
  for (Index i = 0; i < count; ++i) {
    const float scale = scales[static_cast<std::size_t>(i)];
    if (scale >= 0.0f && scale < simd::infinity) continue;
    std::snprintf(what, sizeof what, "%s's scale %td", name, i);
    fail_range(what, scale, "[0, infinity)");
  }
}

// Are rows of the two formats and scales the same bytes?
inline bool stored_alike(const Format& a, const RowShape& a_shape, const Format& b,
                         const RowShape& b_shape) {
  if (&a != &b || a_shape.channel_step != b_shape.channel_step) return false;
  if (a_shape.scales == b_shape.scales) return true;
  const auto scale = [](const RowShape& shape, Index i) {
    return shape.scales != nullptr ? shape.scales[i] : 1.0f;
  };
  const Index n = a.separate_scales(a_shape.dim);
  for (Index i = 0; i < n; ++i)
    if (scale(a_shape, i) != scale(b_shape, i)) return false;
  return n > 0;  // scales of a format that does not say how many are its own
}

}  // namespace detail

QUOKA_FUNC KvCache::Part::Part(const char* name, Index batch, Index kv_heads, Index channels,
                               const CacheFormat& as)
    : format(as.format), dim(channels) {
  detail::require_at_least("batch", batch, 1);
  detail::require_at_least("kv_heads", kv_heads, 1);
  detail::require_at_least(*name == 'k' ? "head_dim" : "v's dim", dim, 1);
  if (!format->writes)
    detail::fail_because(std::string("a cache writes, and rows of format ") + format->name +
                         " are only read");
  rows = RowStore<std::byte>(batch, kv_heads, format->row_bytes({dim}));
  if (as.scales.empty()) return;
  const Index n = format->separate_scales(dim), count = std::ssize(as.scales);
  detail::require_scales(name, *format, as.scales, kv_heads, n);
  scales_step = n;
  float* to = scales.reserve(kv_heads * n);
  for (Index head = 0; head < kv_heads; ++head)
    std::copy_n(as.scales.data() + (count == n ? 0 : head * n), n, to + head * n);
}

QUOKA_FUNC RowShape KvCache::Part::shape(Index head) const {
  return {dim, 0, scales_step > 0 ? scales.data() + head * scales_step : nullptr};
}

QUOKA_FUNC Rows KvCache::Part::view(Index len) const {
  const Rows all(rows.data(), *format, {rows.batch(), rows.heads(), len, dim}, rows.strides());
  return scales_step > 0 ? all.with_scales(scales.data(), scales_step) : all;
}

QUOKA_FUNC void KvCache::Part::put(const Rows& from, Index b, Index head, Index n, Index i,
                                   float* row) {
  const RowShape own = shape(head), other = from.shape(head);
  std::byte* const to = rows.row(b, head, i);
  if (detail::stored_alike(from.format(), other, *format, own)) {
    std::memcpy(to, from.row(b, head, n), static_cast<std::size_t>(format->row_bytes(own)));
  } else {
    from.format().widen(from.row(b, head, n), other, row);
    format->narrow(row, own, to);
  }
}

QUOKA_FUNC KvCache::KvCache(Index batch, Index kv_heads, Index key_dim, Index value_dim,
                            const CacheFormat& k_format, const CacheFormat& v_format)
    : k_("k", batch, kv_heads, key_dim, k_format),
      v_("v", batch, kv_heads, value_dim, v_format),
      inverse_norms_(batch, kv_heads, 1) {
  rows_.reserve(std::max(key_dim, value_dim));
}

QUOKA_FUNC void KvCache::check(const Rows& k, const Rows& v) const {
  const Index batch = k_.rows.batch(), heads = k_.rows.heads();
  detail::require_sizes("k", k.sizes(), {batch, heads, k.len(), k_.dim});
  detail::require_sizes("v", v.sizes(), {batch, heads, k.len(), v_.dim});
  detail::require_at_most("k's len", k.len(), "max_keys without the cache's", max_keys - len());
  require_outside(k, "k lies in the cache that it is to be appended to");
  require_outside(v, "v lies in the cache that it is to be appended to");
}

QUOKA_FUNC void KvCache::require_outside(const Rows& x, std::string_view message) const {
  const auto whole = [](const auto& store) {
    return detail::Footprint(store.data(), store.bytes(), {});
  };
  const detail::Footprint rows(x);
  if (share_memory(whole(k_.rows), rows) || share_memory(whole(v_.rows), rows) ||
      share_memory(whole(inverse_norms_), rows))
    detail::fail_because(message);
}

QUOKA_FUNC void KvCache::append_checked(const Rows& k, const Rows& v, ExecutorRef executor) {
  const Index begin = len(), count = k.len(), heads = k.batch() * k.heads();
  const int workers = executor.workers();
  grow(begin + count);
  rows_.reserve(workers * row_room());
  // Rows of a task: some 0.2 us each.
  const Index wanted = std::max<Index>(1, 2 * Index{workers} / heads);
  const Index size =
      std::max<Index>(1, std::max(std::min<Index>(count, 8), ceil_div(count, wanted)));
  const Index parts = ceil_div(count, size);
  const auto append_part = [&](Index task, int worker) {
    const Index head = task / parts, b = head / k.heads(), kv_head = head % k.heads(),
                first = task % parts * size;
    float* const row = rows_.data() + worker * row_room();
    for (Index i = first; i < std::min(first + size, count); ++i) {
      k_.put(k, b, kv_head, i, begin + i, row);
      v_.put(v, b, kv_head, i, begin + i, row);
      const std::byte* const key = k_.rows.row(b, kv_head, begin + i);
      const float* floats = reinterpret_cast<const float*>(key);
      if (!k_.format->is_float) {
        k_.format->widen(key, k_.shape(kv_head), row);
        floats = row;
      }
      *inverse_norms_.row(b, kv_head, begin + i) = detail::inverse_norm_of_row(floats, k_.dim);
    }
  };
  detail::run_rows(executor, heads * count, detail::few_copies, heads * parts, append_part);
  set_len(begin + count);
}

}  // namespace QUOKA_ABI
}  // namespace quoka
