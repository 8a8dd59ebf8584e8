// Rows of 8 bits per channel, as engines keep them in their caches, and rows whose channels do not
// lie side by side.
//
//   format                  bytes of a row        x[c]                                as in
//   q8_0_format()           34 * ceil(dim / 32)   d * q[c], a half d per 32 channels  ggml
//   u8_format()             8 + dim               (code[c] - zero_point) * scale      OpenVINO
//   i8_format()             dim                   scale * code[c]                     a scale per
//                                                                                     tensor
//   i8_channel_format()     dim                   scales[c] * code[c]                 ONNX Runtime
//   e4m3_format()           dim                   scale * fp8[c]                      vLLM
//   channel_major_format()  channel_step apart    x[c], only read                     vLLM's keys
//
// i8_format and e4m3_format have one scale per head, i8_channel_format one per channel [dim]. They
// lie apart from the rows, in RowShape::scales, and are given by Rows::with_scales, to a cache of
// the library's by CacheFormat. Without any they are 1.
// All formats take any dim and any address; channel_major_format needs its elements aligned.
//
// Written (rounded to nearest, ties to even):
//   q8_0        d = max|x| / 127, rounded to half; codes round(x * (1 / d)) with d before that
//               rounding, as in ggml. Channels of a last block beyond dim are 0. A block with a
//               value that is not finite, or with d beyond half, becomes NaN.
//               |error| <= 0.50002 d + |code| * max(d * 2^-11, 2^-25)
//   u8          scale = (max - min) / 255, zero_point = -min / scale; a row of one value has scale
//               1 and code 0. A row with a value that is not finite, or whose max - min is not,
//               becomes NaN. |error| <= scale / 2 + 2^-21 * max|x|, and 1e-43
//   i8          saturated at -127 and 127, infinity too: -128 is never written. NaN becomes 0,
//               because integers have none. |error| <= scale / 2 + 2^-23 |x| up to there
//   e4m3        saturated at 448, infinity too; NaN stays NaN. With q = x / scale:
//               |error| <= scale * max(2^-4 |q|, 2^-10) up to there, and 1e-45
//
// In decode over keys of q8_0 by Arithmetic::automatic, queries are rounded to 15 bits
// (kernels/token_codes.hpp has the bound). That needs three query heads or more a KV head, and fast
// products of 8-bit codes.
#pragma once

#include <quoka/rows/format.hpp>

#if QUOKA_DEFINES_KERNELS
#include <quoka/kernels/format_table.hpp>
#include <quoka/rows/byte_rows.hpp>
#endif

namespace quoka {
inline namespace QUOKA_ABI {

// Blocks of {half d; int8 q[32]}, 34 bytes: a row is aligned to 2 bytes at most.
const Format& q8_0_format();
// {float scale; float zero_point; uint8 codes[dim]}
const Format& u8_format();
// int8 codes[dim]
const Format& i8_format();
// int8 codes[dim], a scale per channel.
const Format& i8_channel_format();
// fp8 of the kind e4m3fn, [dim]
const Format& e4m3_format();

// T: float, Eigen::half or Eigen::bfloat16. Channel c lies c * RowShape::channel_step bytes after
// channel 0: keys in blocks [dim, token]. Rows takes the step as its last argument. A step of 0:
// side by side.
template <class T>
const Format& channel_major_format();

#if QUOKA_DEFINES_KERNELS
namespace detail {

template <class Row>
const Format& format_of_row() {
  static constexpr Format format = format_table<Row>();
  return format;
}

}  // namespace detail

QUOKA_FUNC const Format& q8_0_format() { return detail::format_of_row<formats::Q8_0Row>(); }
QUOKA_FUNC const Format& u8_format() { return detail::format_of_row<formats::U8Row>(); }
QUOKA_FUNC const Format& i8_format() { return detail::format_of_row<formats::I8Row>(); }
QUOKA_FUNC const Format& i8_channel_format() {
  return detail::format_of_row<formats::I8ChannelRow>();
}
QUOKA_FUNC const Format& e4m3_format() { return detail::format_of_row<formats::E4m3Row>(); }

template <class T>
const Format& channel_major_format() {
  return detail::format_of_row<formats::ChannelMajorRow<formats::RowOf<T>>>();
}

#endif  // QUOKA_DEFINES_KERNELS

}  // namespace QUOKA_ABI
}  // namespace quoka
