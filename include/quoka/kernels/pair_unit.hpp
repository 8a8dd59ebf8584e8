// The register tile of float with pairs of bfloat16 in place of floats: twice the products.
#pragma once

#include <quoka/kernels/register_tile.hpp>
#include <quoka/kernels/unit.hpp>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// Sums: simd::DotBfloat16Sums, or simd::PlainBfloat16Sums.
template <class Sums>
struct PairUnit {
  static constexpr int tile_rows = tuning::tile_rows;
  static constexpr int depth = 32;  // a cache line of each key
  static constexpr int value_depth = 2, interleave = 2;
  static constexpr Index block_keys = tuning::usual_block_keys;
  static constexpr int between_calls = 1;
  static constexpr float product_cost = 0.55f;

  static void enter(UnitSession&) {}
  static void leave(const UnitSession&) {}

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

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
