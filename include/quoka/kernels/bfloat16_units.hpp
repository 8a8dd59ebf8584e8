// Units that multiply bfloat16: one small trait per instruction, over which bfloat16_panels.hpp is
// written once.
//
//                 m x n x k of one instruction
//   TileUnit      16 x 16 x 32     AMX
//   PairUnit       1 x 16 x 2      AVX512_BF16's vdpbf16ps
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

#include <quoka/kernels/panel_arithmetic.hpp>
#include <quoka/kernels/register_tile.hpp>
#include <quoka/simd/isa/tiles.hpp>

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <iterator>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

using Bfloat16 = std::uint16_t;  // its bits

template <class Unit>
concept MatrixUnit = requires(const Bfloat16* const (&two)[2], float* c, simd::TileShapes& before) {
  { Unit::tile_rows } -> std::convertible_to<int>;    // keys of one call of logits()
  { Unit::depth } -> std::convertible_to<int>;        // of a, for logits
  { Unit::value_depth } -> std::convertible_to<int>;  // of a, for values: divides tile_rows
  { Unit::interleave } -> std::convertible_to<int>;   // of b
  { Unit::block_keys } -> std::convertible_to<Index>;
  { Unit::product_cost } -> std::convertible_to<float>;  // of one product, in those of float
  // Around all use by a thread: `before` has another library's tiles.
  Unit::enter(before), Unit::leave(before);
  { Unit::between_calls } -> std::convertible_to<int>;
  // c[tile_rows] = sum of a[i] b[i], of one packet; between() is called between_calls times per
  // slab and product
  Unit::template logits<2, 1>(two, two, Index{}, c, [] {});
  // c[channels] += sum of a[i] b[i], of one packet; channels is a multiple of channel_step
  Unit::template values<2, 1>(two, two, Index{}, Index{}, c);
};

// The register tile of float with pairs of bfloat16 in place of floats: twice the products.
// Sums: simd::DotBfloat16Sums.
template <class Sums>
struct PairUnit {
  static constexpr int tile_rows = tuning::tile_rows;
  static constexpr int depth = 32;  // a cache line of each key
  static constexpr int value_depth = 2, interleave = 2;
  static constexpr Index block_keys = tuning::block_keys;
  static constexpr int between_calls = 1;
  static constexpr float product_cost = 0.55f;

  static void enter(simd::TileShapes&) {}
  static void leave(const simd::TileShapes&) {}

  template <int Products, int packets = tuning::tile_packets, class Between>
  [[gnu::noinline]] static void logits(const Bfloat16* const (&a)[Products],
                                       const Bfloat16* const (&b)[Products], Index slabs, float* x,
                                       Between&& between) {
    Sums acc[tile_rows][packets];
    simd::unroll<tile_rows, packets>(
        [&](auto i, auto j) QUOKA_INLINE_LAMBDA { acc[i][j] = Sums::of(simd::zero()); });
    for (int p = 0; p < Products; ++p) {
      const Pair *keys = pairs(a[p]), *queries = pairs(b[p]);
      for (Index s = 0; s < slabs; ++s) {
        rank1_updates<tile_rows, packets, depth / 2, panel_packets>(acc, keys, 1, queries,
                                                                    depth / 2);
        keys += tile_rows * depth / 2, queries += depth / 2 * tuning::panel_rows;
      }
    }
    simd::unroll<tile_rows, packets>([&](auto i, auto j) QUOKA_INLINE_LAMBDA {
      simd::store(x + i * tuning::panel_rows + j * simd::lanes, acc[i][j].to_float());
    });
    // All registers hold sums until here; other work overlaps by the processor's own order.
    for (Index i = 0; i < Products * slabs; ++i) between();
  }

  template <int Products, int packets = tuning::tile_packets>
  static void values(const Bfloat16* const (&a)[Products], const Bfloat16* const (&b)[Products],
                     Index slabs, Index channels, float* out) {
    for_value_tiles(channels, [&](auto rows, Index c) QUOKA_INLINE_LAMBDA {
      value_tile<rows, Products, packets>(a, c, b, slabs, channels, out + c * tuning::panel_rows);
    });
  }

 private:
  using Pair = simd::Bfloat16Pair;
  static constexpr int panel_packets = tuning::tile_packets;
  static const Pair* pairs(const Bfloat16* x) { return reinterpret_cast<const Pair*>(x); }

  template <std::size_t Channels, int Products, int packets>
  [[gnu::noinline]] static void value_tile(const Bfloat16* const (&a)[Products], Index c,
                                           const Bfloat16* const (&b)[Products], Index slabs,
                                           Index channels, float* out) {
    Sums acc[Channels][packets];
    simd::unroll<Channels, packets>([&](auto i, auto j) QUOKA_INLINE_LAMBDA {
      acc[i][j] = Sums::of(simd::load(out + i * tuning::panel_rows + j * simd::lanes));
    });
    if constexpr (Products == 1)
      rank1_updates<Channels, packets, 1, panel_packets>(acc, pairs(a[0]) + c, channels,
                                                         pairs(b[0]), slabs);
    else
      for (Index s = 0; s < slabs; ++s)
        for (int p = 0; p < Products; ++p)
          rank1_updates<Channels, packets, 1, panel_packets>(
              acc, pairs(a[p]) + s * channels + c, 0, pairs(b[p]) + s * tuning::panel_rows, 1);
    simd::unroll<Channels, packets>([&](auto i, auto j) QUOKA_INLINE_LAMBDA {
      simd::store(out + i * tuning::panel_rows + j * simd::lanes, acc[i][j].to_float());
    });
  }
};

// Two by two sums of four products each: 6 x 4 squares, 12 keys or channels times a panel.
// Square, Eight: simd::Bfloat16Square and simd::Bfloat16Eight. A template, so that only an ISA that
// has them compiles it.
template <class Square, class Eight>
struct SquareUnit {
  static constexpr int high = 6;  // squares
  static constexpr int tile_rows = 2 * high;
  static constexpr int depth = 4, value_depth = 4, interleave = 4;
  static constexpr Index block_keys = 8 * tile_rows;
  static constexpr int between_calls = 1;
  static constexpr float product_cost = 0.5f;

  static void enter(simd::TileShapes&) {}
  static void leave(const simd::TileShapes&) {}

  template <int Products, int packets = tuning::tile_packets, class Between>
  static void logits(const Bfloat16* const (&a)[Products], const Bfloat16* const (&b)[Products],
                     Index slabs, float* x, Between&& between) {
    constexpr int wide = squares(packets);
    Square sums[high][wide];
    simd::unroll<high, wide>([&](auto i, auto j)
                                 QUOKA_INLINE_LAMBDA { sums[i][j] = Square::zero(); });
    for (int p = 0; p < Products; ++p)
      for (Index s = 0; s < slabs; ++s)
        multiply_slab<high>(sums, a[p] + s * tile_rows * depth, b[p] + s * b_slab);
    store(sums, x);
    for (Index i = 0; i < Products * slabs; ++i) between();
  }

  template <int Products, int packets = tuning::tile_packets>
  static void values(const Bfloat16* const (&a)[Products], const Bfloat16* const (&b)[Products],
                     Index slabs, Index channels, float* out) {
    Index c = 0;
    for (; c + tile_rows <= channels; c += tile_rows)
      value_tile<high, squares(packets)>(a, b, slabs, channels, c, out);
    for (; c < channels; c += 4) value_tile<2, squares(packets)>(a, b, slabs, channels, c, out);
  }

 private:
  static constexpr int panel = tuning::panel_rows;
  static constexpr Index b_slab = Index{value_depth} * panel;
  static_assert(channel_step % 4 == 0);
  static constexpr int squares(int packets) { return packets * simd::lanes / 2; }

  template <int High, int wide>
  QUOKA_INLINE static void multiply_slab(Square (&sums)[High][wide], const Bfloat16* a,
                                         const Bfloat16* b) {
    Eight right[wide];
    simd::unroll<wide>([&](auto j) QUOKA_INLINE_LAMBDA { right[j] = Eight::load(b + 8 * j); });
    simd::unroll<High>([&](auto i) QUOKA_INLINE_LAMBDA {
      const Eight left = Eight::load(a + 8 * i);
      simd::unroll<wide>([&](auto j) QUOKA_INLINE_LAMBDA { sums[i][j].add(left, right[j]); });
    });
  }
  template <int High, int wide>
  QUOKA_INLINE static void store(const Square (&sums)[High][wide], float* c) {
    simd::unroll<High, wide>([&](auto i, auto j) QUOKA_INLINE_LAMBDA {
      sums[i][j].store(c + 2 * i * panel + 2 * j, c + (2 * i + 1) * panel + 2 * j);
    });
  }
  template <int High, int wide, int Products>
  [[gnu::noinline]] static void value_tile(const Bfloat16* const (&a)[Products],
                                           const Bfloat16* const (&b)[Products], Index slabs,
                                           Index channels, Index first, float* out) {
    float* const c = out + first * panel;
    Square sums[High][wide];
    simd::unroll<High, wide>([&](auto i, auto j) QUOKA_INLINE_LAMBDA {
      sums[i][j] = Square::load(c + 2 * i * panel + 2 * j, c + (2 * i + 1) * panel + 2 * j);
    });
    for (Index s = 0; s < slabs; ++s)
      for (int p = 0; p < Products; ++p)
        multiply_slab<High>(sums, a[p] + (s * channels + first) * value_depth, b[p] + s * b_slab);
    store(sums, c);
  }
};

// Two by two tiles of sums: 32 keys, or channels, times 32 query rows, by four products for each
// two loads of a and two of b.
// Tiles: simd::Tiles, or what stands in for it in tests.
template <class Tiles>
struct TileUnit {
  static constexpr int height = simd::tile_height;
  static constexpr int tile_rows = 2 * height;
  static constexpr int depth = 32, value_depth = 32, interleave = 2;
  static constexpr Index block_keys = 128;
  static constexpr int between_calls = 2;
  static constexpr float product_cost = 0.15f;

  static void enter(simd::TileShapes& before) {
    Tiles::configuration(before);
    simd::TileShapes shapes;
    shapes.palette = 1;
    for (int t = 0; t < simd::tile_count; ++t) {
      const bool is_a = t == a_tile || t == a_tile + 1;
      shapes.rows[t] = height;
      shapes.row_bytes[t] = is_a ? simd::tile_bytes : 4 * width;
    }
    Tiles::configure(shapes);
  }
  // The configuration of another library, if it had one; else the tiles are released.
  static void leave(const simd::TileShapes& before) { Tiles::configure(before); }

  template <int Products, int packets = tuning::tile_packets, class Between>
  static void logits(const Bfloat16* const (&a)[Products], const Bfloat16* const (&b)[Products],
                     Index slabs, float* x, Between&& between) {
    constexpr int columns = columns_of(packets);
    zero<0, columns>(), zero<1, columns>();
    for (int p = 0; p < Products; ++p)
      for (Index s = 0; s < slabs; ++s) {
        load_b<columns>(b[p] + s * b_slab);
        multiply<0, columns>(a[p] + s * tile_rows * depth);
        between();
        multiply<1, columns>(a[p] + (s * tile_rows + height) * depth);
        between();
      }
    store<0, columns>(x), store<1, columns>(x + height * panel);
  }

  template <int Products, int packets = tuning::tile_packets>
  static void values(const Bfloat16* const (&a)[Products], const Bfloat16* const (&b)[Products],
                     Index slabs, Index channels, float* out) {
    constexpr int columns = columns_of(packets);
    Index c = 0;
    for (; c + tile_rows <= channels; c += tile_rows) {
      load<0, columns>(out + c * panel), load<1, columns>(out + (c + height) * panel);
      for (Index s = 0; s < slabs; ++s)
        for (int p = 0; p < Products; ++p) {
          const Bfloat16* const at = a[p] + (s * channels + c) * value_depth;
          load_b<columns>(b[p] + s * b_slab);
          multiply<0, columns>(at), multiply<1, columns>(at + height * value_depth);
        }
      store<0, columns>(out + c * panel), store<1, columns>(out + (c + height) * panel);
    }
    if (c == channels) return;
    load<0, columns>(out + c * panel);
    for (Index s = 0; s < slabs; ++s)
      for (int p = 0; p < Products; ++p) {
        load_b<columns>(b[p] + s * b_slab);
        multiply<0, columns>(a[p] + (s * channels + c) * value_depth);
      }
    store<0, columns>(out + c * panel);
  }

 private:
  static constexpr int panel = tuning::panel_rows;
  static constexpr int width = std::min(simd::tile_height, panel);  // n
  static_assert(panel / width <= 2 && panel % width == 0, "a panel is one tile wide, or two");
  // Tiles that hold a panel's first packets.
  static constexpr int columns_of(int packets) {
    return (packets * simd::lanes + width - 1) / width;
  }
  static constexpr int a_tile = 4, b_tile = 6;
  static constexpr Index b_slab = Index{depth} * panel, step = panel * 4;

  template <int row, int columns>
  static void zero() {
    Tiles::template zero<2 * row>();
    if constexpr (columns == 2) Tiles::template zero<2 * row + 1>();
  }
  template <int row, int columns>
  static void load(const float* c) {
    Tiles::template load<2 * row>(c, step);
    if constexpr (columns == 2) Tiles::template load<2 * row + 1>(c + width, step);
  }
  template <int row, int columns>
  static void store(float* c) {
    Tiles::template store<2 * row>(c, step);
    if constexpr (columns == 2) Tiles::template store<2 * row + 1>(c + width, step);
  }
  template <int columns>
  static void load_b(const Bfloat16* b) {
    Tiles::template load<b_tile>(b, step);
    if constexpr (columns == 2) Tiles::template load<b_tile + 1>(b + 2 * width, step);
  }
  template <int row, int columns>
  static void multiply(const Bfloat16* a) {
    Tiles::template load<a_tile + row>(a, simd::tile_bytes);
    Tiles::template dot_bfloat16<2 * row, a_tile + row, b_tile>();
    if constexpr (columns == 2)
      Tiles::template dot_bfloat16<2 * row + 1, a_tile + row, b_tile + 1>();
  }
};

// Do tiles give what a plain loop does, a product of each kind?
template <class Tiles>
bool tiles_agree() {
  using Unit = TileUnit<Tiles>;
  constexpr Index slabs = 2, depth = Unit::depth, panel = tuning::panel_rows,
                  rows = Unit::tile_rows;
  alignas(64) static Bfloat16 a[slabs * rows * depth], b[slabs * depth * panel];
  alignas(64) static float c[rows * panel];
  std::uint32_t state = 1;
  const auto fill = [&](Bfloat16* to, std::size_t count) {  // of [1, 2), with either sign
    for (std::size_t i = 0; i < count; ++i) {
      state = state * 1664525u + 1013904223u;
      to[i] = static_cast<Bfloat16>(0x3f80u | (state >> 25) | (state >> 9 & 0x8000u));
    }
  };
  fill(a, std::size(a)), fill(b, std::size(b));
  const Bfloat16* const left[1] = {a};
  const Bfloat16* const right[1] = {b};
  simd::TileShapes before;
  Unit::enter(before);
  Unit::template logits<1>(left, right, slabs, c, [] {});
  Unit::template values<1>(left, right, slabs, rows, c);
  Unit::leave(before);
  for (Index m = 0; m < rows; ++m)
    for (Index n = 0; n < panel; ++n) {
      float sum = 0.0f;
      for (Index s = 0; s < slabs; ++s)
        for (Index k = 0; k < depth; ++k)
          sum += simd::bfloat16_to_float(a[(s * rows + m) * depth + k]) *
                 simd::bfloat16_to_float(b[((s * depth + k) / 2 * panel + n) * 2 + k % 2]);
      const float off = c[m * panel + n] - 2 * sum;     // c has it once of each kind
      constexpr float most = 4.0f * slabs * depth * 2;  // of the magnitudes in one sum
      if (!(simd::max(off, -off) <= 1e-5f * most)) return false;
    }
  return true;
}

template <bool has = simd::has_tiles>
bool tiles_work() {
  if constexpr (has) {
    static const bool work = simd::tiles_pass(tiles_agree<simd::Tiles>, "floats");
    return work;
  }
  return false;
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
