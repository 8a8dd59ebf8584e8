// Between the caller's rows and the kernels' panels: packing, widening, transposing.
//
//   keys      tile_rows keys at a time, [slab][tile_rows][slab_channels]: copied, never transposed
//   values    row by row, [key][stride], stride a multiple of slab_channels
//   queries   panels of panel_rows rows, transposed, [channel][panel_rows], scaled
//   outputs   panels [channel][panel_rows], transposed back
//
// Rows are given by address, so a gathered, strided or paged row costs what a contiguous one does:
// the gather is the packing. Keys and values are widened to float here, once per block of keys.
// Queries and outputs are float rows: a format widens and narrows them row by row. Cost: one read
// and one write per element, against 2 * rows multiply-adds of its use.
#pragma once

#include <quoka/kernels/kernels.hpp>
#include <quoka/rows/format.hpp>

#if QUOKA_DEFINES_KERNELS
#include <algorithm>
#include <cassert>
#endif

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

inline constexpr int slab = tuning::slab_channels;

// Floats of one packed tile of tile_rows keys.
inline Index key_tile_size(Index dim) { return round_up(dim, slab) * kernel_sizes().tile_rows; }

// rows[0, count) into tiles of keys.
QUOKA_FUNC void pack_keys(const Format& format, const ConstRow* rows, Index count,
                          const RowShape& shape, float* tiles);

// Prefetches rows that will be packed later, a few cache lines at a time between arithmetic. It
// goes row after row, so the hardware's own prefetcher follows. Prefetching one line of each row in
// turn instead lost half of the bandwidth, and prefetching all at once stalls.
class RowPrefetch {
 public:
  RowPrefetch() = default;
  RowPrefetch(const ConstRow* rows, Index count, Index row_bytes)
      : rows_(rows), count_(count), row_bytes_(row_bytes) {}

  Index lines() const { return count_ * ceil_div(row_bytes_, 64); }

  // Returns how many of `lines` it did not need.
  QUOKA_INLINE Index prefetch(Index lines) {
    for (; lines > 0 && row_ < count_; --lines) {
      detail::prefetch(rows_[row_] + at_);
      at_ += 64;
      if (at_ >= row_bytes_) at_ = 0, ++row_;
    }
    return lines;
  }

 private:
  const ConstRow* rows_ = nullptr;
  Index count_ = 0, row_bytes_ = 0, row_ = 0, at_ = 0;
};

// One panel of `width` lanes, whole packets: rows[0, count) times `scale`, transposed; lanes beyond
// count become zero queries.
QUOKA_FUNC void pack_queries(const float* const* rows, Index count, Index dim, float scale,
                             Index width, float* panel);

// The inverse: lane i of the panel becomes rows[i], for i < count.
QUOKA_FUNC void unpack_outputs(const float* panel, Index dim, float* const* rows, Index count);

#if QUOKA_DEFINES_KERNELS

static_assert(slab % simd::lanes == 0, "a slab holds whole packets");

constexpr Index value_stride(Index dim) { return round_up(dim, slab); }

// Channels [c, c + count) of a row; what lies beyond them in the last packet's place stays
// unwritten.
template <class Row>
QUOKA_INLINE void widen(ConstRow row, Index c, Index count, const RowShape& shape, float* to) {
  Index i = 0;
  for (; i + simd::lanes <= count; i += simd::lanes)
    simd::store(to + i, Row::load(row, c + i, shape));
  for (; i < count; ++i) to[i] = Row::at(row, c + i, shape);
}

template <class Row>
void widen_row(ConstRow row, const RowShape& shape, float* to) {
  Index c = 0;
  for (; c + simd::lanes <= shape.dim; c += simd::lanes)
    simd::store_unaligned(to + c, Row::load(row, c, shape));
  for (; c < shape.dim; ++c) to[c] = Row::at(row, c, shape);
}

// One tile: rows[0, count) are keys, the other places become zero keys. count <= tile_rows.
template <class Row>
void pack_key_tile(const ConstRow* rows, Index count, const RowShape& shape, float* tile) {
  const Index dim = shape.dim;
  assert(0 <= count && count <= tuning::tile_rows && dim > 0);
  constexpr Index slab_size = Index{slab} * tuning::tile_rows;
  for (Index i = 0; i < tuning::tile_rows; ++i) {
    float* to = tile + i * slab;
    if (i >= count) {
      for (Index c = 0; c < dim; c += slab, to += slab_size) std::fill_n(to, slab, 0.0f);
      continue;
    }
    Index c = 0;
    for (; c + slab <= dim; c += slab, to += slab_size) widen<Row>(rows[i], c, slab, shape, to);
    if (c < dim) widen<Row>(rows[i], c, dim - c, shape, to);
  }
}

QUOKA_FUNC void pack_keys(const Format& format, const ConstRow* rows, Index count,
                          const RowShape& shape, float* tiles) {
  for (Index i = 0; i < count; i += tuning::tile_rows, tiles += key_tile_size(shape.dim))
    format.pack_key_tile(rows + i, std::min<Index>(tuning::tile_rows, count - i), shape, tiles);
}

// rows[0, count) side by side. Returns false if any element is NaN or infinite.
template <class Row>
bool pack_values(const ConstRow* rows, Index count, const RowShape& shape, float* values) {
  const Index dim = shape.dim, stride = value_stride(dim);
  simd::Packet poison = simd::zero();  // x * 0 is NaN for NaN and infinity
  float poison_tail = 0.0f;
  for (Index i = 0; i < count; ++i) {
    float* to = values + i * stride;
    Index c = 0;
    for (; c + simd::lanes <= dim; c += simd::lanes) {
      const simd::Packet x = Row::load(rows[i], c, shape);
      simd::store(to + c, x);
      poison = simd::fma(x, simd::zero(), poison);
    }
    for (; c < dim; ++c) {
      to[c] = Row::at(rows[i], c, shape);
      poison_tail += to[c] * 0.0f;
    }
  }
  return simd::reduce_add(poison) + poison_tail == 0.0f;
}

QUOKA_FUNC void pack_queries(const float* const* rows, Index count, Index dim, float scale,
                             Index width, float* panel) {
  assert(0 <= count && count <= width);
  const simd::Packet factor = simd::broadcast(scale);
  for (Index first = 0; first < width; first += simd::lanes) {
    Index c = 0;
    for (; c + simd::lanes <= dim; c += simd::lanes) {
      simd::Square square;
      for (int i = 0; i < simd::lanes; ++i)
        square.packet[i] = first + i < count
                               ? simd::mul(simd::load_unaligned(rows[first + i] + c), factor)
                               : simd::zero();
      simd::transpose(square);
      for (int i = 0; i < simd::lanes; ++i)
        simd::store(panel + (c + i) * width + first, square.packet[i]);
    }
    for (; c < dim; ++c)
      for (Index i = 0; i < simd::lanes; ++i)
        panel[c * width + first + i] = first + i < count ? rows[first + i][c] * scale : 0.0f;
  }
}

QUOKA_FUNC void unpack_outputs(const float* panel, Index dim, float* const* rows, Index count) {
  constexpr Index width = tuning::panel_rows;
  for (Index first = 0; first < count; first += simd::lanes) {
    const int valid = static_cast<int>(std::min<Index>(simd::lanes, count - first));
    Index c = 0;
    for (; c + simd::lanes <= dim; c += simd::lanes) {
      simd::Square square;
      for (int i = 0; i < simd::lanes; ++i)
        square.packet[i] = simd::load(panel + (c + i) * width + first);
      simd::transpose(square);
      for (int i = 0; i < valid; ++i) simd::store_unaligned(rows[first + i] + c, square.packet[i]);
    }
    for (; c < dim; ++c)
      for (int i = 0; i < valid; ++i) rows[first + i][c] = panel[c * width + first + i];
  }
}

#endif  // QUOKA_DEFINES_KERNELS

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
