// A format: how a row of channels is stored, as a table of functions.
//
// Above this line tensors have types; below it a row is an address. Kernels work on packed floats
// (or on packed 16-bit integers) and never see how a row is stored: they call its format once per
// block of rows. So attention, selection and the driver are compiled once, and queries, keys, values
// and outputs may each have a format of their own.
//
//   packing      rows to panels: keys in tiles, values row by row, both also in fixed point
//   one row      to floats and back
//   one token    products straight from memory, for work that is bound by it
//
// The formats of float, half and bfloat16 are in formats/element_formats.hpp. A new format is one
// type with a few functions, turned into a table by format_table() (formats/format_table.hpp).
// `rows` are addresses of whole rows; `dim` counts channels.
#pragma once

#include <quoka/views/row_finder.hpp>

#include <cstddef>
#include <cstdint>

namespace quoka {
inline namespace QUOKA_ABI {

namespace simd {
struct Int16Pair;
}

struct Format {
  const char* name;
  bool is_float;  // a row is `dim` floats: it can be read in place

  Index (*row_bytes)(Index dim);

  // One row to floats, and back: rounded to nearest even.
  void (*widen)(ConstRow row, Index dim, float* to);
  void (*narrow)(const float* from, Index dim, std::byte* row);

  // Packed panels: kernels/packing.hpp, kernels/fixed_packing.hpp. pack_values and the fixed ones
  // return false where something is not finite, or beyond the integers.
  void (*pack_key_tile)(const ConstRow* rows, Index count, Index dim, float* tile);
  bool (*pack_values)(const ConstRow* rows, Index count, Index dim, float* values);
  bool (*pack_fixed_keys)(const ConstRow* rows, Index count, Index dim, simd::Int16Pair* tiles,
                          float* factors);
  bool (*pack_fixed_values)(const ConstRow* rows, Index count, Index dim, simd::Int16Pair* values,
                            float* units, float* apart);

  // One token: kernels/token_kernels.hpp. Rows hold whole packets of channels.
  void (*token_logits)(Index tile_rows, const RowFinder& keys, Index count, Index width,
                       const float* queries, float* x, RowWalk* ask);
  void (*token_values)(const RowFinder& values, Index count, Index width,
                       const float* const (&weight)[2], Index step, bool two_rows, float* out);
};

// The format of an element type: float, Eigen::half or Eigen::bfloat16 (element_formats.hpp).
template <class T>
const Format& format_of();

inline const Format& float_format() { return format_of<float>(); }

}  // namespace QUOKA_ABI
}  // namespace quoka
