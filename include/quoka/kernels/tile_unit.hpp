// Two by two tiles of sums: 32 keys, or channels, times 32 query rows, by four products for each two
// loads of a and two of b.
#pragma once

#include <quoka/kernels/unit.hpp>

#include <algorithm>
#include <iterator>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// Tiles: simd::Tiles, or what stands in for it in tests.
template <class Tiles>
struct TileUnit {
  static constexpr int height = simd::tile_height;
  static constexpr int tile_rows = 2 * height;
  static constexpr int depth = 32, value_depth = 32, interleave = 2;
  static constexpr Index block_keys = 128;
  static constexpr int between_calls = 2;
  static constexpr float product_cost = 0.15f;

  static void enter(UnitSession& session) {
    Tiles::configuration(session.before);
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
  static void leave(const UnitSession& session) { Tiles::configure(session.before); }

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
  UnitSession session;
  Unit::enter(session);
  Unit::template logits<1>(left, right, slabs, c, [] {});
  Unit::template values<1>(left, right, slabs, rows, c);
  Unit::leave(session);
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
    static const bool work = tiles_pass(tiles_agree<simd::Tiles>, "floats");
    return work;
  }
  return false;
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
