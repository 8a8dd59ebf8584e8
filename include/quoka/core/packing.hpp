// Between the caller's rows and the kernels' panels: packing, widening, transposing.
//
//   keys      tile_rows keys at a time, [slab][tile_rows][slab_channels]: copied, never transposed
//   values    row by row, [key][stride], stride a multiple of slab_channels
//   queries   panels of panel_rows rows, transposed, [channel][panel_rows], scaled
//   outputs   panels [channel][panel_rows], transposed back, normalised and rounded to storage
//
// Rows are given by pointer, so a gathered, strided or paged row costs what a contiguous one does:
// the gather is the packing. Storage is widened to float here, once per block of keys. Cost: one
// read and one write per element, against 2 * rows multiply-adds of its use.
#pragma once

#include <quoka/core/tuning.hpp>

#include <cassert>

namespace quoka::inline QUOKA_ABI {
namespace detail {

inline constexpr int slab = tuning::slab_channels;
static_assert(slab % simd::lanes == 0, "a slab holds whole packets");

// Floats of one packed tile of tile_rows keys.
constexpr Index key_tile_size(Index dim) { return round_up(dim, slab) * tuning::tile_rows; }
constexpr Index value_stride(Index dim) { return round_up(dim, slab); }

// Widens `dim` channels; what lies beyond them in the last packet's place is left unwritten.
template <class T>
QUOKA_INLINE void widen(const T* from, Index dim, float* to) {
  Index c = 0;
  for (; c + simd::lanes <= dim; c += simd::lanes)
    simd::store(to + c, simd::load_as_float(from + c));
  for (; c < dim; ++c) to[c] = static_cast<float>(from[c]);
}

// One tile: rows[0, count) are keys, the other places become zero keys. count <= tile_rows.
template <class T>
void pack_key_tile(const T* const* rows, Index count, Index dim, float* tile) {
  assert(0 <= count && count <= tuning::tile_rows && dim > 0);
  constexpr Index slab_size = Index{slab} * tuning::tile_rows;
  for (Index i = 0; i < tuning::tile_rows; ++i) {
    float* to = tile + i * slab;
    if (i >= count) {
      for (Index c = 0; c < dim; c += slab, to += slab_size) std::fill_n(to, slab, 0.0f);
      continue;
    }
    const T* from = rows[i];
    Index c = 0;
    for (; c + slab <= dim; c += slab, to += slab_size) widen(from + c, slab, to);
    if (c < dim) widen(from + c, dim - c, to);
  }
}

// rows[0, count) into tiles of keys.
template <class T>
void pack_keys(const T* const* rows, Index count, Index dim, float* tiles) {
  for (Index i = 0; i < count; i += tuning::tile_rows, tiles += key_tile_size(dim))
    pack_key_tile(rows + i, std::min<Index>(tuning::tile_rows, count - i), dim, tiles);
}

// Asks for rows that will be packed later, a few cache lines at a time between arithmetic: row
// after row, which the hardware's own prefetcher then follows. Asking for one line of each row in
// turn instead lost half of the bandwidth, and asking for all at once stalls.
template <class T>
class RowPrefetch {
 public:
  RowPrefetch() = default;
  RowPrefetch(const T* const* rows, Index count, Index dim)
      : rows_(rows), count_(count), dim_(dim) {}

  static constexpr Index line = 64 / static_cast<Index>(sizeof(T));  // elements
  Index lines() const { return count_ * ceil_div(dim_, line); }

  QUOKA_INLINE void next(Index lines) {
    for (; lines > 0 && row_ < count_; --lines) {
      simd::prefetch(rows_[row_] + channel_);
      channel_ += line;
      if (channel_ >= dim_) channel_ = 0, ++row_;
    }
  }

 private:
  const T* const* rows_ = nullptr;
  Index count_ = 0, dim_ = 0, row_ = 0, channel_ = 0;
};

// rows[0, count) side by side. Returns false if any element is NaN or infinite.
template <class T>
bool pack_values(const T* const* rows, Index count, Index dim, float* values) {
  const Index stride = value_stride(dim);
  simd::Packet poison = simd::zero();  // x * 0 is NaN for NaN and infinity
  float poison_tail = 0.0f;
  for (Index i = 0; i < count; ++i) {
    const T* from = rows[i];
    float* to = values + i * stride;
    Index c = 0;
    for (; c + simd::lanes <= dim; c += simd::lanes) {
      const simd::Packet x = simd::load_as_float(from + c);
      simd::store(to + c, x);
      poison = simd::fma(x, simd::zero(), poison);
    }
    for (; c < dim; ++c) {
      to[c] = static_cast<float>(from[c]);
      poison_tail += to[c] * 0.0f;
    }
  }
  return simd::reduce_add(poison) + poison_tail == 0.0f;
}

// One panel: rows[0, count) times `scale`, transposed; lanes beyond count become zero queries.
template <class T, int Packets>
void pack_queries(const T* const* rows, Index count, Index dim, float scale, float* panel) {
  constexpr Index width = Packets * simd::lanes;
  assert(0 <= count && count <= width);
  const simd::Packet factor = simd::broadcast(scale);
  for (Index first = 0; first < width; first += simd::lanes) {
    Index c = 0;
    for (; c + simd::lanes <= dim; c += simd::lanes) {
      simd::Square square;
      for (int i = 0; i < simd::lanes; ++i)
        square.packet[i] = first + i < count
                               ? simd::mul(simd::load_as_float(rows[first + i] + c), factor)
                               : simd::zero();
      simd::transpose(square);
      for (int i = 0; i < simd::lanes; ++i)
        simd::store(panel + (c + i) * width + first, square.packet[i]);
    }
    for (; c < dim; ++c)
      for (Index i = 0; i < simd::lanes; ++i)
        panel[c * width + first + i] =
            first + i < count ? static_cast<float>(rows[first + i][c]) * scale : 0.0f;
  }
}

// The inverse: lane `first + i` of the panel times factor[...] becomes rows[first + i].
template <class T>
void unpack_outputs(const float* panel, const simd::Packet (&factor)[tuning::tile_packets],
                    Index dim, T* const* rows, Index count) {
  constexpr Index width = tuning::panel_rows;
  for (int j = 0; j < tuning::tile_packets; ++j) {
    const Index first = j * simd::lanes;
    if (first >= count) return;
    const int valid = static_cast<int>(std::min<Index>(simd::lanes, count - first));
    alignas(64) float factors[simd::lanes];
    simd::store(factors, factor[j]);
    Index c = 0;
    for (; c + simd::lanes <= dim; c += simd::lanes) {
      simd::Square square;
      for (int i = 0; i < simd::lanes; ++i)
        square.packet[i] = simd::mul(simd::load(panel + (c + i) * width + first), factor[j]);
      simd::transpose(square);
      for (int i = 0; i < valid; ++i) simd::store_from_float(rows[first + i] + c, square.packet[i]);
    }
    for (; c < dim; ++c)
      for (int i = 0; i < valid; ++i)
        rows[first + i][c] = static_cast<T>(panel[c * width + first + i] * factors[i]);
  }
}

}  // namespace detail
}  // namespace quoka::inline QUOKA_ABI
