// Two by two sums of four products each: 6 x 4 squares, 12 keys or channels times a panel.
#pragma once

#include <quoka/kernels/unit.hpp>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// Square, Eight: simd::Bfloat16Square and simd::Bfloat16Eight. A template, so that only an ISA that has
// them compiles it.
template <class Square, class Eight>
struct SquareUnit {
  static constexpr int high = 6;  // squares
  static constexpr int tile_rows = 2 * high;
  static constexpr int depth = 4, value_depth = 4, interleave = 4;
  static constexpr Index block_keys = 8 * tile_rows;
  static constexpr int between_calls = 1;
  static constexpr float product_cost = 0.5f;

  static void enter(UnitSession&) {}
  static void leave(const UnitSession&) {}

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

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
