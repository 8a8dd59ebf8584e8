// Generated keys and values as engines keep them: in formats of theirs, in pages, in any order.
#pragma once

#include "data.hpp"

#include <quoka/packing/byte_formats.hpp>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

namespace quoka_bench {

using quoka::Rows;

// How tokens lie: one after the other, in pages of 16, in slots in any order, and in pages whose keys
// are [dim, token] (half).
enum class Layout { contiguous, pages, slots, transposed };
inline constexpr const char* layout_names[] = {"contiguous", "pages", "slots", "transposed"};

// The keys and values of past_of() in a format, [kv_heads, len, dim] or [page, kv_heads, page_len, dim] in
// shuffled order, of Qwen3-4B's shape. k and v look into it.
class EngineCache {
 public:
  static constexpr LayerShape shape = qwen3_4b;

  explicit EngineCache(const quoka::Format& format, Index len, Layout layout = Layout::contiguous)
      : row_bytes(format.row_bytes({shape.head_dim})),
        page_len_(layout == Layout::slots ? 1 : 16),
        table_(static_cast<std::size_t>(quoka::ceil_div(len, page_len_))),
        scales_(static_cast<std::size_t>(format.scales_apart(shape.head_dim)), 6.0f / 127.0f) {
    std::iota(table_.begin(), table_.end(), quoka::Position{0});
    std::shuffle(table_.begin(), table_.end(), std::mt19937(7));
    const auto past = past_of<float>(shape, len);
    k = stored(format, past.k, layout, memory_[0]);
    v = stored(format, past.v, layout, memory_[1]);
    if (layout == Layout::transposed) transpose_keys(len);
  }
  EngineCache(const EngineCache&) = delete;
  EngineCache& operator=(const EngineCache&) = delete;

  double bytes() const {  // of keys and values
    return 2.0 * static_cast<double>(shape.kv_heads * k.len() * row_bytes);
  }

  Rows k, v;
  Index row_bytes;

 private:
  Rows stored(const quoka::Format& format, const TensorView<const float>& from, Layout layout,
              quoka::Buffer<std::byte>& memory) {
    const Index pages = std::ssize(table_), heads = shape.kv_heads, len = from.len();
    std::byte* const data = memory.reserve(pages * page_len_ * heads * row_bytes);
    const Rows pool(data, format, {pages, heads, page_len_, shape.head_dim},
                    {heads * page_len_ * row_bytes, page_len_ * row_bytes, row_bytes});
    const Rows flat(data, format, {1, heads, len, shape.head_dim}, {0, len * row_bytes, row_bytes});
    Rows rows = layout == Layout::contiguous ? flat : quoka::paged(pool, table_, len);
    if (!scales_.empty()) rows = rows.with_scales(scales_.data(), 0);
    for (Index head = 0; head < heads; ++head)
      for (Index i = 0; i < len; ++i)
        format.narrow(from.row(0, head, i), rows.shape(head),
                      const_cast<std::byte*>(rows.row(0, head, i)));
    return rows;
  }
  // Elements of two bytes: each page's keys [page_len, dim] become [dim, page_len].
  void transpose_keys(Index len) {
    const Index pages = std::ssize(table_), page_bytes = page_len_ * row_bytes;
    auto* data = memory_[0].data();
    std::vector<std::byte> page(static_cast<std::size_t>(page_bytes));
    for (Index block = 0; block < pages * shape.kv_heads; ++block, data += page_bytes) {
      std::copy_n(data, page_bytes, page.data());
      for (Index i = 0; i < page_len_; ++i)
        for (Index c = 0; c < shape.head_dim; ++c)
          std::copy_n(page.data() + (i * shape.head_dim + c) * 2, 2,
                      data + (c * page_len_ + i) * 2);
    }
    const Rows pool(memory_[0].data(), quoka::channel_major_format<Eigen::half>(),
                    {pages, shape.kv_heads, page_len_, shape.head_dim},
                    {shape.kv_heads * page_bytes, page_bytes, 2}, page_len_ * 2);
    k = quoka::paged(pool, table_, len);
  }

  Index page_len_;
  std::vector<quoka::Position> table_;
  std::vector<float> scales_;  // of one head, the same for all
  quoka::Buffer<std::byte> memory_[2];
};

}  // namespace quoka_bench
