// Definitions of key_sketch.hpp.
#pragma once

#include <quoka/kernels/format_table.hpp>
#include <quoka/kernels/inverse_norm.hpp>
#include <quoka/select/sketch/key_sketch.hpp>
#include <quoka/simd/code_products.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// Lengths of vectors that codes stand for: products of two such stay far from float's ends, so that
// rounding is relative to the lengths.
inline constexpr float least_coded_length = 1e-12f, most_coded_length = 1e12f;

inline constexpr Index few_rows = 16;  // that one worker codes sooner than several

QUOKA_FUNC bool sketch_is_fast() { return simd::code_dots_beat_float; }
QUOKA_FUNC bool sketched_mass_is_fast(bool every_query) {
  return every_query ? simd::has_fast_code_products : simd::code_dots_beat_float;
}

// The scale at which the largest of x [dim] is coded as 127, whichever way quotients are rounded.
inline float code_scale(const float* x, Index dim) {
  simd::Packet most = simd::zero();
  Index c = 0;
  for (; c + simd::lanes <= dim; c += simd::lanes) {
    const simd::Packet packet = simd::load_unaligned(x + c);
    most = simd::max(most, simd::max(packet, simd::sub(simd::zero(), packet)));
  }
  float largest = simd::reduce_max(most);
  for (; c < dim; ++c) largest = simd::max(largest, std::abs(x[c]));
  return largest * ((1.0f + 0x1p-20f) / 127.0f);
}

// x [dim] as code * scale, for finite x and a scale of code_scale() or more: put(c, n, codes) is called
// with integers in [-127, 127] of the channels [c, c + n), c a multiple of code_slab, and with zeros up to
// code_slab. Returns an upper bound on the length of what is missed. Taken in units of the scale, where
// squares neither underflow nor overflow; a scale of 0 codes zeros. Each quotient is off by at most 2^-23
// of 127, and so is what is left of it.
inline constexpr Index code_slab = 64;

template <class Put>
float encode(const float* x, Index dim, float scale, Put&& put) {
  const float magic = 12582912.0f, inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
  alignas(64) float shifted[code_slab];
  std::int8_t codes[code_slab];
  simd::Packet sums = simd::zero();
  float sum = 0.0f;
  for (Index first = 0; first < dim; first += code_slab) {
    const Index n = std::min(code_slab, dim - first);
    Index c = 0;
    for (; c + simd::lanes <= n; c += simd::lanes) {
      const simd::Rounded rounded(
          simd::mul(simd::load_unaligned(x + first + c), simd::broadcast(inverse)),
          simd::broadcast(magic));
      sums = simd::fma(rounded.fraction, rounded.fraction, sums);
      simd::store(shifted + c, rounded.shifted);
    }
    for (; c < n; ++c) {
      const simd::Rounded rounded(x[first + c] * inverse, magic);
      sum = simd::fma(rounded.fraction, rounded.fraction, sum);
      shifted[c] = rounded.shifted;
    }
    std::fill_n(shifted + n, code_slab - n, 0.0f);
    for (c = 0; c < code_slab; ++c) codes[c] = static_cast<std::int8_t>(simd::bits_of(shifted[c]));
    put(first, n, codes);
  }
  const float rounding = 127.0f * 0x1p-22f * std::sqrt(static_cast<float>(dim));
  return (std::sqrt(simd::reduce_add(sums) + sum) * (1.0f + 1e-5f) + rounding) * scale;
}

// Rows of all pages. Throws std::invalid_argument for more than can be numbered.
inline Index rows_of_pool(const Rows& pool) {
  require_keys("the number of pages", pool.batch());
  require_keys("the rows of a page", pool.len());
  require_keys("the rows of all pages", pool.batch() * pool.len());
  return pool.batch() * pool.len();
}

// One key of a block of code_block keys.
struct SketchedKey {
  std::uint8_t* block;
  Index at;
  float *scale, *error, *length;  // of the block's keys

  // key [dim].
  void write(const float* key, Index dim) const {
    const auto put = [&](Index first, Index n, const std::int8_t* codes) {
      std::uint8_t stored[code_slab];
      for (Index c = 0; c < code_slab; ++c) stored[c] = simd::stored_key_code(codes[c]);
      std::uint8_t* const to = block + simd::key_code_at(at, first);
      Index c = 0;
      for (; c + simd::code_channels <= n; c += simd::code_channels)
        std::memcpy(to + c * simd::code_block, stored + c, simd::code_channels);
      for (Index i = c; i < n; ++i) to[c * simd::code_block + i - c] = stored[i];
    };
    const float inverse = inverse_norm_of_row(key, dim);
    if (inverse > 1.0f / most_coded_length && inverse < 1.0f / least_coded_length) {
      const float unit = code_scale(key, dim);
      error[at] = encode(key, dim, unit, put) * inverse * (1.0f + 1e-6f);
      scale[at] = unit * inverse;
      length[at] = 1.0f / inverse;
      return;
    }
    for (Index c = 0; c < dim; ++c) block[simd::key_code_at(at, c)] = simd::stored_key_code(0);
    const bool zero = std::all_of(key, key + dim, [](float x) { return x == 0.0f; });
    scale[at] = length[at] = 0.0f;
    error[at] = zero ? 0.0f : simd::infinity;
  }
};

}  // namespace detail

QUOKA_FUNC void KeySketch::reshape(const Rows& k, Index batch) {
  if (codes_.batch() != batch || codes_.heads() != k.heads() || dim_ != k.dim()) len_ = 0;
  dim_ = k.dim();
  codes_.reshape(batch, k.heads(), simd::code_block_bytes(k.dim()));
  scales_.reshape(batch, k.heads(), simd::code_block);
  errors_.reshape(batch, k.heads(), simd::code_block);
  lengths_.reshape(batch, k.heads(), simd::code_block);
}

// `key` becomes this row.
QUOKA_FUNC void KeySketch::write(Index b, Index head, Index row, const float* key) {
  constexpr Index width = simd::code_block;
  detail::SketchedKey{codes_.row(b, head, row / width), row % width,
                      scales_.row(b, head, row / width), errors_.row(b, head, row / width),
                      lengths_.row(b, head, row / width)}
      .write(key, dim_);
}

QUOKA_FUNC void KeySketch::append(const Rows& k, Index capacity, ExecutorRef executor) {
  const int workers = executor.workers();
  detail::require_keys("kv_len", k.len());
  reshape(k, k.batch());
  detail::require_at_most("the sketch's length", len_,
                          "the keys' (truncate() was not called)", k.len());
  floats_.reserve(workers, k);
  make_room(capacity, k.len(), true);
  // Whole blocks are one task's.
  const Index heads = k.batch() * k.heads(), first = len_ / simd::code_block,
              last = len_ < k.len() ? simd::code_blocks(k.len()) : first;
  const Index wanted = std::max<Index>(1, 2 * Index{workers} / std::max<Index>(1, heads));
  const Index blocks = std::max<Index>(1, ceil_div(last - first, wanted)),
              parts = ceil_div(last - first, blocks);
  const auto append_part = [&](Index task, int worker) {
    const Index b = task / parts / k.heads(), kv_head = task / parts % k.heads();
    const Index block = first + task % parts * blocks;
    const Index begin = std::max(block * simd::code_block, len_);
    const Index end = std::min((block + blocks) * simd::code_block, k.len());
    for (Index row = begin; row < end; ++row)
      write(b, kv_head, row, floats_[worker].read(k, b, kv_head, row));
  };
  detail::run_rows(executor, heads * (k.len() - len_), detail::few_rows, heads * parts,
                   append_part);
  len_ = k.len();
}

// Room for `len` rows, or for `capacity` if that is more; new rows are without codes. all_written: they are written
// next, whole blocks as they are.
QUOKA_FUNC void KeySketch::make_room(Index capacity, Index len, bool all_written) {
  constexpr Index width = simd::code_block;
  const Index known = simd::code_blocks(len_), blocks = simd::code_blocks(len),
              most = simd::code_blocks(capacity);
  codes_.resize(blocks, most), scales_.resize(blocks, most);
  errors_.resize(blocks, most), lengths_.resize(blocks, most);
  const bool padded = dim_ % simd::code_channels != 0;  // a row's last codes are written by nobody
  const Index first = all_written && !padded ? std::max(known, len / width) : known;
  for (Index b = 0; b < codes_.batch(); ++b)
    for (Index head = 0; head < codes_.heads(); ++head)
      for (Index block = first; block < blocks; ++block) {
        std::fill_n(codes_.row(b, head, block), codes_.dim(), simd::stored_key_code(0));
        std::fill_n(scales_.row(b, head, block), width, 0.0f);
        std::fill_n(errors_.row(b, head, block), width, simd::infinity);
        std::fill_n(lengths_.row(b, head, block), width, 0.0f);
      }
}

QUOKA_FUNC void KeySketch::update(const Rows& pool, std::span<const Position> rows,
                                  ExecutorRef executor) {
  if (pool.mapped())
    detail::fail_because("update() takes the whole pool, not rows in pages or of a list");
  const Index page_size = pool.len(), total = detail::rows_of_pool(pool);
  for (const Position row : rows) {
    detail::require_at_least("a row of the pool", row, 0);
    detail::require_at_most("a row of the pool", row, "its last", total - 1);
  }
  floats_.reserve(executor.workers(), pool);
  reshape(pool, 1);
  // Rows are counted through pages: with pages of another length they are other rows.
  if (page_size != pool_.len() && std::max(pool.batch(), pool_.batch()) > 1) len_ = 0;
  pool_ = {};  // of none, if memory runs out
  if (total > len_) make_room(0, total, false);
  len_ = std::max(len_, total);
  pool_ = pool;
  const auto run = [&](Index head, int worker) {
    for (const Position row : rows)
      write(0, head, row, floats_[worker].read(pool, row / page_size, head, row % page_size));
  };
  try {
    detail::run_rows(executor, std::ssize(rows) * pool.heads(), detail::few_rows, pool.heads(),
                     run);
  } catch (...) {
    for (const Position row : rows)
      for (Index head = 0; head < pool.heads(); ++head) forget(head, row);
    throw;
  }
}
// As a row that was never sketched.
QUOKA_FUNC void KeySketch::forget(Index head, Index row) {
  constexpr Index width = simd::code_block;
  const Index block = row / width, at = row % width;
  std::uint8_t* const codes = codes_.row(0, head, block);
  for (Index c = 0; c < dim_; ++c) codes[simd::key_code_at(at, c)] = simd::stored_key_code(0);
  scales_.row(0, head, block)[at] = lengths_.row(0, head, block)[at] = 0.0f;
  errors_.row(0, head, block)[at] = simd::infinity;
}

QUOKA_FUNC void KeySketch::update(const Rows& pool, Index begin, Index count,
                                  ExecutorRef executor) {
  const Index total = detail::rows_of_pool(pool);
  detail::require_at_least("the first row", begin, 0);
  detail::require_at_most("the first row", begin, "the pool's rows", total);
  detail::require_at_least("the number of rows", count, 0);
  detail::require_at_most("the number of rows", count, "those from the first on", total - begin);
  std::vector<Position> rows(static_cast<std::size_t>(count));
  for (Index i = 0; i < count; ++i)
    rows[static_cast<std::size_t>(i)] = static_cast<Position>(begin + i);
  update(pool, rows, executor);
}

QUOKA_FUNC KeySketch::RowMapping KeySketch::map_rows(const Rows& keys) const {
  const auto refuse = [] {
    detail::fail_because("the keys are not of the cache that was sketched");
  };
  detail::require_equal("kv_heads", keys.heads(), "the sketch's", codes_.heads());
  detail::require_equal("head_dim", keys.dim(), "the sketch's", dim_);
  detail::require_equal("the batch of keys with a sketch of their cache", keys.batch(),
                        "one sequence", 1);
  const Index step = pool_.strides()[2];
  if (keys.strides()[1] != pool_.strides()[1] || keys.strides()[2] != step) refuse();
  RowMap map = keys.map();
  if (map.pages != nullptr) {
    if (keys.data() != pool_.data() || keys.pool_sizes()[2] != pool_.len() ||
        map.page_step != pool_.strides()[0])
      refuse();
    detail::require_at_most("the number of pages", keys.pool_sizes()[0],
                            "that of the pool that was sketched", pool_.batch());
    return {map, keys.pool_begin()};
  }
  // Side by side, or a list of such: some of the cache's rows, wherever they begin.
  const Index bytes = keys.data() - pool_.data();
  const Index rows = map.cells != nullptr ? keys.pool_sizes()[2] : keys.len();
  if (pool_.batch() != 1 || step == 0 || bytes % step != 0 || bytes / step < 0 ||
      bytes / step + rows > pool_.len())
    refuse();
  if (map.cells == nullptr) return {{}, bytes / step};
  map.first_cell += bytes / step;
  return {map, keys.pool_begin()};
}

QUOKA_FUNC bool KeySketch::holds(Index b, Index head, Index row, const float* key) const {
  constexpr Index width = simd::code_block;
  constexpr Index most_bytes = 1024 * width;
  std::uint8_t block[most_bytes];
  float scale[width], error[width], length[width];
  if (codes_.dim() > most_bytes) return true;
  const Index at = row % width;
  const std::uint8_t* const kept = codes_.row(b, head, row / width);
  detail::SketchedKey{block, at, scale, error, length}.write(key, dim_);
  bool same = scale[at] == scales_.row(b, head, row / width)[at] &&
              length[at] == lengths_.row(b, head, row / width)[at];
  for (Index c = 0; c < dim_; ++c)
    same = same && block[simd::key_code_at(at, c)] == kept[simd::key_code_at(at, c)];
  return same;
}

QUOKA_FUNC void KeySketch::require_shape_of(const Rows& k) const {
  detail::require_sizes("the keys, other than those of the state,", k.sizes(),
                        {codes_.batch(), codes_.heads(), len_, dim_});
}

QUOKA_FUNC void KeySketch::require_held(const Rows& keys, const RowMapping& rows,
                                        std::uint64_t turn, RowReader& reader) const {
  if (keys.len() == 0) return;
  const detail::LookUps at(keys.len(), keys.heads(), turn);
  for (Index head = 0; head < keys.heads(); ++head)
    for (Index i = 0; i < at.count(); ++i) require_held(keys, rows, head, at(head, i), reader);
}
QUOKA_FUNC void KeySketch::require_held(const Rows& keys, const RowMapping& rows, Index head,
                                        Index key, RowReader& reader) const {
  const Index row = rows(key);
  if (errors(0, head)[row] == simd::infinity) return;  // never sketched, or not coded
  if (holds(0, head, row, reader.read(keys, 0, head, key))) return;
  detail::require_rounding_to_nearest();
  char message[256];
  std::snprintf(message, sizeof message,
                "the key at position %td of KV head %td is not the one that was sketched, of %td: "
                "its cache changed, and KeySketch::update() was not called",
                key, head, keys.len());
  detail::fail_because(message);
}

}  // namespace QUOKA_ABI
}  // namespace quoka
