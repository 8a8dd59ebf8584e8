// A format: how a row of channels is stored, as a table of functions.
//
// A caller's tensors have element types; to a kernel a row is an address and a format. Kernels work
// on packed floats (or packed 16-bit integers) and do not depend on how a row is stored. They call
// its format once per block of rows. So attention, selection and the driver are compiled once, and
// queries, keys, values and outputs may each have a format of their own.
//
//   packing      rows to panels: keys in tiles, values row by row
//   one row      to floats and back
//   decode       products straight from memory, for work that is bound by it
//
// The formats of float, half and bfloat16 are in rows/element_rows.hpp, those of 8 bits in
// kernels/byte_formats.hpp. A new format is one type with a few functions, turned into a table by
// format_table() (kernels/format_table.hpp). `rows` are addresses of whole rows.
#pragma once

#include <quoka/base/index.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace quoka {
inline namespace QUOKA_ABI {

// The first byte of a row.
using ConstRow = const std::byte*;

// Properties of one head's rows beside their addresses.
struct RowShape {
  Index dim = 0;                  // channels
  Index channel_step = 0;         // bytes between channels, where they are not side by side
  const float* scales = nullptr;  // of this head, where a format keeps them apart from its rows
};

// Some rows, as a kernel that is bound by memory takes them. Addresses of rows in a regular order
// are computed where they are used. An array of addresses, written before the rows are read, keeps
// the processor from reading ahead and costs half of the bandwidth.
struct RowRun {
  ConstRow first = nullptr;        // row 0, or what a list counts from
  Index step = 0;                  // bytes from one row to the next
  const Position* list = nullptr;  // which rows; null: all of them in order
  const ConstRow* rows = nullptr;  // the rows themselves, in place of all above

  // The address of row i.
  ConstRow operator[](Index i) const {
    if (rows != nullptr) [[unlikely]]
      return rows[i];
    return first + (list != nullptr ? list[i] : i) * step;
  }
};

// The next rows of a walk (row_walk.hpp), to be prefetched one by one while others are used.
struct RowsAhead {
  static constexpr Index most = 16;  // rows at a time

  ConstRow rows[most];  // null past the end
  Index row_bytes;      // of each
};

// Weights of some query rows, in tiles: of row r and key i
// first[r / tile_rows * tile_step + i * tile_rows + r % tile_rows].
struct TileWeights {
  const float* first;  // those of the first tile
  Index tile_rows;     // query rows of a tile
  Index tile_step;     // floats from a tile to the next one
  Index rows;          // query rows
};

struct Format {
  const char* name;  // for messages
  bool is_float;     // a row is `dim` floats: it can be read in place
  bool is_bfloat16;  // a row is `dim` numbers of bfloat16, side by side
  bool is_half;      // a row is `dim` numbers of half, side by side
  bool writes;       // narrow() can be called
  // The error of storing a number, relative to it or to the largest that shares
  // its scale: 2^-8 for bfloat16. 0: float, or unknown.
  float rounding;
  // Bytes of a channel, 2 or 4, where a row is its channels side by side and nothing else; 0 for
  // other rows.
  Index element_bytes;

  // From a row's first byte to its last.
  Index (*row_bytes)(const RowShape& shape);
  // Scales of one head, in RowShape::scales; 0 where a row holds all that it needs.
  Index (*separate_scales)(Index dim);

  // One row to floats, and back: rounded to nearest even.
  void (*widen)(ConstRow row, const RowShape& shape, float* to);
  // Rounds `from` [dim] to a row, to nearest even.
  void (*narrow)(const float* from, const RowShape& shape, std::byte* row);

  // Packed panels: kernels/panel_packing.hpp. pack_values returns false where something is not
  // finite.
  void (*pack_key_tile)(const ConstRow* rows, Index count, const RowShape& shape, float* tile);
  // Values to rows of floats.
  bool (*pack_values)(const ConstRow* rows, Index count, const RowShape& shape, float* values);

  // Decode: kernels/token_kernels.hpp. Rows hold whole packets of channels: shape.dim is a multiple
  // of the lanes.
  void (*token_logits)(Index tile_rows, const RowRun& keys, Index count, const RowShape& shape,
                       const float* queries, float* x, const RowsAhead* upcoming);
  // Sums of weighted values to `out`.
  void (*token_values)(const RowRun& values, Index count, const RowShape& shape,
                       const float* const* weight, Index step, Index rows, float* out,
                       const RowsAhead* upcoming);
  Index value_rows;  // the most rows of out that token_values takes at once

  // The same by products of 8-bit codes, for tiles of four queries that are coded once; null where
  // that is not faster: kernels/token_codes.hpp.
  void (*token_code_logits)(const RowRun& keys, Index count, const RowShape& shape,
                            const std::byte* queries, float* x, const RowsAhead* upcoming);

  // Lists: the same two of rows that lie anywhere, as kernels/list_kernels.hpp has them; null for
  // float, half and bfloat16, whose kernels lists bring along.
  void (*gather_logits)(Index tile_rows, const ConstRow* rows, Index count, const RowShape& shape,
                        const float* queries, float* x, bool prefetches);
  // Sums of weighted values to `out`.
  void (*gather_values)(const ConstRow* rows, Index count, const RowShape& shape,
                        const TileWeights& weights, const float* factors, float* out);
};

// Bytes of a row that lie side by side; 0 where its channels do not.
inline Index bytes_together(const Format& format, const RowShape& shape) {
  return shape.channel_step == 0 ? format.row_bytes(shape) : 0;
}

// A row as floats, with zeros behind its channels up to `padded`.
inline void widen_padded(const Format& format, ConstRow row, const RowShape& shape, Index padded,
                         float* to) {
  format.widen(row, shape, to);
  std::fill(to + shape.dim, to + padded, 0.0f);
}
// The same in place where that can be, or in `room` [padded].
inline const float* padded_row(const Format& format, ConstRow row, const RowShape& shape,
                               Index padded, float* room) {
  if (format.is_float && shape.channel_step == 0 && shape.dim == padded)
    return reinterpret_cast<const float*>(row);
  widen_padded(format, row, shape, padded, room);
  return room;
}

// The format of an element type: float, Eigen::half or Eigen::bfloat16 (element_rows.hpp).
template <class T>
const Format& format_of();

// The format of float: format_of<float>().
inline const Format& float_format() { return format_of<float>(); }

}  // namespace QUOKA_ABI
}  // namespace quoka
