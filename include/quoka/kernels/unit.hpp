// Units that multiply bfloat16: one small trait per instruction, over which
// kernels/bfloat16_panels.hpp is written once.
//
//                 m x n x k of one instruction
//   TileUnit      16 x 16 x 32     AMX
//   PairUnit       1 x 16 x 2      AVX512_BF16's vdpbf16ps, or the same in plain C++
//   SquareUnit     2 x  2 x 4      Armv8.6's bfmmla
//
// Query rows lie along n, as they lie across lanes in float. m: keys for the logits, channels for
// the values. k, which is summed over: channels for the logits, keys for the values.
//
//   a   [slab of k][m, padded][depth]          depth elements of one m lie side by side
//   b   [k / interleave][panel_rows][interleave]
//   c   [m][panel_rows] floats
//
// A unit multiplies `Products` pairs of a and b into one c, because a number that is split into
// bfloat16 parts is the sum of its products. Each element of c is one chain in the order of k. Only
// the first `packets` of a panel hold rows; the rest of c is not used. Sources: Intel's SDM for
// TDPBF16PS and VDPBF16PS, Arm's ARM for BFMMLA.
#pragma once

#include <quoka/simd/isa/tiles.hpp>

#include <cstdio>
#include <concepts>
#include <cstdint>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// Room that a task gives a unit for what it must keep, see Unit::Session.
struct alignas(64) UnitSession {
  simd::TileShapes before;  // another library's tiles of this thread
};

using Bfloat16 = std::uint16_t;  // its bits

template <class Unit>
concept MatrixUnit = requires(const Bfloat16* const (&two)[2], float* c, UnitSession& session) {
  { Unit::tile_rows } -> std::convertible_to<int>;    // keys of one call of logits()
  { Unit::depth } -> std::convertible_to<int>;        // of a, for logits
  { Unit::value_depth } -> std::convertible_to<int>;  // of a, for values: divides tile_rows
  { Unit::interleave } -> std::convertible_to<int>;   // of b
  { Unit::block_keys } -> std::convertible_to<Index>;
  { Unit::product_cost } -> std::convertible_to<float>;  // of one product, in those of float
  Unit::enter(session), Unit::leave(session);            // around all use by a thread
  { Unit::between_calls } -> std::convertible_to<int>;
  // c[tile_rows] = sum of a[i] b[i], of one packet; between() is called between_calls times per
  // slab and product
  Unit::template logits<2, 1>(two, two, Index{}, c, [] {});
  // c[channels] += sum of a[i] b[i], of one packet; channels is a multiple of channel_step
  Unit::template values<2, 1>(two, two, Index{}, Index{}, c);
};

// Channels of values and of their sums are padded to this: one tile of AMX.
inline constexpr Index channel_step = simd::tile_height;
constexpr Index padded_channels(Index v_dim) { return round_up(v_dim, channel_step); }

// May AMX tiles be used, and do they compute? Some virtual machines are said to lose their
// contents. The system must allow them, and agree() must find that they give the results of plain
// code. Otherwise one line says so, and `instead` is used. Each unit asks once.
inline bool tiles_pass(bool (*agree)(), const char* instead) {
  if (!simd::tiles_allowed()) return false;
  if (agree()) return true;
  std::fprintf(stderr, "quoka: this machine's AMX tiles give wrong products: using %s\n", instead);
  return false;
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
