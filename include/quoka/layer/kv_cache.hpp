// A KV cache for programs that have none: one layer's keys and values, and each key's inverse norm.
//
// Append-only, with truncate() for multi-turn use and prefix reuse. append() rounds keys and values
// to the cache's formats, and computes the scales that a row holds (q8_0, u8 with its zero point).
// Scales of a head or a channel (i8, i8_channel, e4m3) are set before the first key: the caller
// measures them on similar data. Growth doubles (row_store.hpp); after reserve() nothing is copied
// or allocated. Views are valid until the next append that grows.
#pragma once

#include <quoka/rows/row_store.hpp>
#include <quoka/rows/rows.hpp>
#include <quoka/runtime/executor.hpp>

#include <algorithm>
#include <span>

#if QUOKA_DEFINES
#include <quoka/kernels/inverse_norm.hpp>
#include <quoka/kernels/kernels.hpp>
#include <quoka/rows/overlap.hpp>
#include <cstdio>
#include <cstring>
#endif

namespace quoka {
inline namespace QUOKA_ABI {

// The format of a cache's keys, or of its values.
struct CacheFormat {
  // `own` must outlive the construction of the cache
  CacheFormat(const Format& as, std::span<const float> own = {})  // NOLINT
      : format(&as), scales(own) {}
  CacheFormat(const Format&& as, std::span<const float> own = {}) = delete;  // it would be gone

  const Format* format;  // not null
  // For formats that keep scales apart from their rows: [kv_heads, n], or [n] for all heads, with n
  // = format->separate_scales(dim): 1, or dim for i8_channel. Empty: all scales are 1. The largest
  // |x| that can be stored is 127 scale (e4m3: 448 scale); larger ones are saturated, and i8 turns
  // NaN into 0 (byte_formats.hpp).
  std::span<const float> scales;
};

// Sizes of one attention layer.
struct LayerShape {
  Index q_heads = 0;   // a multiple of kv_heads
  Index kv_heads = 0;  // at least 1
  Index head_dim = 0;  // channels of a query and of a key
  Index v_dim = 0;     // channels of a value; 0: head_dim
  Index batch = 1;     // sequences of equal length
  // Formats of the layer's cache, which they outlive; null: float.
  const Format *k_format = nullptr, *v_format = nullptr;
  // CacheFormat::scales of keys and values. The layer copies them.
  std::span<const float> k_scales = {}, v_scales = {};
};

class KvCache {
 public:
  // An empty cache for keys of key_dim and values of value_dim channels; scales are copied. Throws
  // std::invalid_argument for a size below 1, a format that is only read, another number of scales
  // than CacheFormat says, and a scale that is negative or not finite.
  KvCache(Index batch, Index kv_heads, Index key_dim, Index value_dim,
          const CacheFormat& k_format = float_format(),
          const CacheFormat& v_format = float_format());

  // Cached keys per (batch, KV head).
  Index len() const { return k_.rows.len(); }
  // Keys that fit without another allocation.
  Index capacity() const {
    return std::min({k_.rows.capacity(), v_.rows.capacity(), inverse_norms_.capacity()});
  }
  Index bytes() const { return bytes_of(k_, v_, inverse_norms_); }  // of memory

  // [batch, kv_heads, len, key_dim]
  Rows k() const { return k_.view(len()); }
  // [batch, kv_heads, len, value_dim]
  Rows v() const { return v_.view(len()); }
  // 1 / |k| of each key, 0 for a zero key: [batch, kv_heads, len]
  TensorView<const float, 3> inverse_norms() const { return norms(len()); }

  // Room for `capacity` keys. Throws std::invalid_argument for a negative one and for more than
  // max_keys, and std::bad_alloc; the keys are then as they were.
  void reserve(Index capacity) {
    detail::require_keys("capacity", capacity);
    k_.rows.reserve(capacity);
    v_.rows.reserve(capacity);
    inverse_norms_.reserve(capacity);
  }
  // Room for `len` keys, by doubling at least.
  void grow(Index len) {
    if (len > capacity()) reserve(std::max(len, std::min(2 * capacity(), max_keys)));
  }

  // Appends k [batch, kv_heads, n, key_dim] and v [batch, kv_heads, n, value_dim], of any formats.
  // Rows of the cache's format and scales keep their bytes. Throws std::invalid_argument when
  // shapes do not fit, for more than max_keys keys in all, and when k or v lie in this cache's
  // memory, which growth frees. The cache is then as it was.
  void append(const Rows& k, const Rows& v, ExecutorRef executor = SerialExecutor{}) {
    check(k, v);
    append_checked(k, v, executor);
  }
  // The same of what check(k, v) has passed.
  void append_checked(const Rows& k, const Rows& v, ExecutorRef executor = SerialExecutor{});

  // Back to the first `len` keys. Throws std::invalid_argument beyond the present length.
  void truncate(Index len) {
    detail::require_at_least("truncate's len", len, 0);
    detail::require_at_most("truncate's len", len, "the cache's len", this->len());
    set_len(len);
  }

  // Throws std::invalid_argument if append(k, v) would.
  void check(const Rows& k, const Rows& v) const;
  // Throws std::invalid_argument if x lies in this cache's memory; `message` says what x is.
  void require_outside(const Rows& x, std::string_view message) const;

 private:
  // The keys, or the values.
  struct Part {
    Part(const char* name, Index batch, Index kv_heads, Index channels, const CacheFormat& as);

    Index bytes() const { return rows.bytes() + scales.bytes(); }
    RowShape shape(Index head) const;
    Rows view(Index len) const;
    // Row i of (b, head) is row n of `from` now; `row` has room for dim floats.
    void put(const Rows& from, Index b, Index head, Index n, Index i, float* row);

    const Format* format;
    Index dim;
    RowStore<std::byte> rows;
    Buffer<float> scales;   // [kv_heads, scales_step]
    Index scales_step = 0;  // 0: none
  };

  TensorView<const float, 3> norms(Index count) const {
    return {
        inverse_norms_.data(), {k_.rows.batch(), k_.rows.heads(), count}, inverse_norms_.strides()};
  }
  [[gnu::noinline]] void set_len(Index len) {
    k_.rows.resize(len);
    v_.rows.resize(len);
    inverse_norms_.resize(len);
  }

  Index row_room() const { return std::max(k_.dim, v_.dim); }

  Part k_, v_;
  RowStore<float> inverse_norms_;
  Buffer<float> rows_;  // one key or value of each worker, widened
};

#if QUOKA_DEFINES
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
    if (scale >= 0.0f && scale < infinity) continue;
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

#endif  // QUOKA_DEFINES

}  // namespace QUOKA_ABI
}  // namespace quoka
