// The instructions of simd/isa/tiles.hpp in plain C++, for tests on any machine and to count them.
// Tests take them as the argument of TileUnit and TileCodes. The preset `tiles` has this header in
// the place of AMX in all of the library: -DQUOKA_EMULATED_TILES='"/path/to/this/header"'.
//
// Stricter than the hardware: using a tile that was not configured, rows or bytes beyond its shape,
// and shapes that do not fit each other throw std::logic_error; a tile that was configured but not
// written holds NaN (bytes of 0xff). Each thread has its own tiles.
#pragma once

#include <quoka/simd/isa/tiles.hpp>

#include "flushed_fma.hpp"

#include <cstring>
#include <stdexcept>
#include <string>

namespace quoka {
inline namespace QUOKA_ABI {
namespace simd {

class EmulatedTiles {
 public:
  // How often each instruction ran on this thread.
  struct Counts {
    Index configure = 0, zero = 0, load = 0, store = 0, dot = 0;
  };
  static Counts& counts() { return state().counts; }

  static void configure(const TileShapes& shapes) {
    State& s = state();
    ++s.counts.configure;
    if (shapes.palette > 1) fail("palette", shapes.palette, 1);
    for (int t = 0; shapes.palette == 1 && t < tile_count; ++t) {
      if (shapes.rows[t] > tile_height) fail("rows of a tile", shapes.rows[t], tile_height);
      if (shapes.row_bytes[t] > tile_bytes)
        fail("bytes of a tile's row", shapes.row_bytes[t], tile_bytes);
    }
    s.shapes = shapes.palette == 1 ? shapes : TileShapes{};
    std::memset(s.tile, 0xff, sizeof s.tile);
  }
  static void configuration(TileShapes& shapes) { shapes = state().shapes; }
  static void release() { configure({}); }

  template <int t>
  static void zero() {
    Tile& to = used<t>();
    ++state().counts.zero;
    std::memset(to, 0, sizeof to);
  }
  template <int t>
  static void load(const void* p, Index step) {
    Tile& to = used<t>();
    ++state().counts.load;
    std::memset(to, 0, sizeof to);
    for (int i = 0; i < rows<t>(); ++i)
      std::memcpy(to[i], static_cast<const char*>(p) + i * step, row_bytes<t>());
  }
  template <int t>
  static void store(void* p, Index step) {
    const Tile& from = used<t>();
    ++state().counts.store;
    for (int i = 0; i < rows<t>(); ++i)
      std::memcpy(static_cast<char*>(p) + i * step, from[i], row_bytes<t>());
  }
  template <int c, int a, int b>
  static void dot_bfloat16() {
    check_product<c, a, b>();
    add_bfloat16_products(used<a>(), used<b>(), rows<c>(), row_bytes<c>(), rows<b>(), used<c>());
  }
  template <int c, int a, int b>
  QUOKA_TEST_VECTORIZED static void dot_signed_codes() {
    check_product<c, a, b>();
    Tile &to = used<c>(), &left = used<a>(), &right = used<b>();
    const int columns = static_cast<int>(row_bytes<c>()) / 4, depth = rows<b>();
    for (int m = 0; m < rows<c>(); ++m) {
      std::uint32_t sum[tile_bytes / 4];
      std::memcpy(sum, to[m], sizeof sum);
      for (int k = 0; k < depth; ++k)
        for (int n = 0; n < columns; ++n)
          for (int i = 0; i < 4; ++i)
            sum[n] += static_cast<std::uint32_t>(int{static_cast<std::int8_t>(left[m][4 * k + i])} *
                                                 int{right[k][4 * n + i]});
      std::memcpy(to[m], sum, sizeof sum);
    }
  }

 private:
  using Tile = std::uint8_t[tile_height][tile_bytes];
  struct State {
    TileShapes shapes;
    Tile tile[tile_count];
    Counts counts;
  };
  static State& state() {
    static thread_local State s;
    return s;
  }
  template <int t>
  static int rows() {
    return state().shapes.rows[t];
  }
  template <int t>
  static std::size_t row_bytes() {
    return state().shapes.row_bytes[t];
  }
  template <int t>
  static Tile& used() {
    static_assert(0 <= t && t < tile_count);
    if (rows<t>() == 0 || row_bytes<t>() == 0) fail("use of a tile that has no shape", t, 0);
    return state().tile[t];
  }
  template <int c, int a, int b>
  static void check_product() {
    static_assert(c != a && c != b && a != b, "the instruction wants three tiles");
    ++state().counts.dot;
    used<c>(), used<a>(), used<b>();
    if (rows<a>() != rows<c>()) fail("rows of a and of c", rows<a>(), rows<c>());
    if (row_bytes<b>() != row_bytes<c>())
      fail("bytes of b's rows and of c's", static_cast<int>(row_bytes<b>()),
           static_cast<int>(row_bytes<c>()));
    if (static_cast<int>(row_bytes<a>()) != 4 * rows<b>())
      fail("bytes of a's rows and four times b's rows", static_cast<int>(row_bytes<a>()),
           4 * rows<b>());
  }
  // The even products of each sum, and the odd ones, then c.
  QUOKA_TEST_VECTORIZED static void add_bfloat16_products(const Tile& left, const Tile& right,
                                                          int height, std::size_t bytes, int depth,
                                                          Tile& to) {
    constexpr int columns = tile_bytes / 4;
    for (int m = 0; m < height; ++m) {
      float even[columns] = {}, odd[columns] = {}, sum[columns];
      std::uint32_t by[columns], pairs[columns];
      std::memcpy(by, left[m], sizeof by);
      for (int k = 0; k < depth; ++k) {
        std::memcpy(pairs, right[k], sizeof pairs);
        const float first = float_of(by[k] << 16), second = float_of(by[k] & 0xffff0000u);
        for (int n = 0; n < columns; ++n) {
          even[n] = flushed_fma(first, float_of(pairs[n] << 16), even[n]);
          odd[n] = flushed_fma(second, float_of(pairs[n] & 0xffff0000u), odd[n]);
        }
      }
      std::memcpy(sum, to[m], sizeof sum);
      for (int n = 0; n < columns; ++n)
        sum[n] = flushed(flushed(sum[n]) + flushed(even[n] + odd[n]));
      std::memcpy(to[m], sum, bytes);
    }
  }
  [[noreturn]] static void fail(const char* what, int is, int other) {
    throw std::logic_error(std::string("quoka: tiles: ") + what + ": " + std::to_string(is) + ", " +
                           std::to_string(other));
  }
};

}  // namespace simd
}  // namespace QUOKA_ABI
}  // namespace quoka
