// AMX: eight registers of 16 rows of 64 bytes, and products of two of them added to a third.
//
//   configure   sets all shapes (TileShapes) and zeroes the tiles; its thread alone has them
//   release     gives the tiles back, so that the system need not keep them for this thread
//   load store  rows of memory, `step` bytes apart
//   dot_bfloat16, dot_signed_codes   c += a b: rows of a times columns of b, whose rows hold 2
//               bfloat16, or 4 bytes, of each column. Codes are signed in a and unsigned in b, and
//               their sums have 32 bits
//
// A sum of bfloat16 is one of the even and one of the odd products, added to c at the end;
// denormals are zeros. Tiles are named by constants, hence the template arguments; written in
// assembler, since GCC's intrinsics are macros that need literals. tests/support/emulated_tiles.hpp
// is the same in plain C++: tests on machines without AMX define QUOKA_EMULATED_TILES as its name,
// in quotes.
#pragma once

#include <quoka/base/version.hpp>
#include <quoka/base/index.hpp>

#include <cstdint>
#include <cstdio>

namespace quoka {
inline namespace QUOKA_ABI {
namespace simd {

inline constexpr int tile_count = 8;
inline constexpr int tile_height = 16;  // rows
inline constexpr int tile_bytes = 64;   // of a row

// As the instruction reads it from memory.
struct alignas(64) TileShapes {
  std::uint8_t palette = 0, start_row = 0, reserved[14] = {};
  std::uint16_t row_bytes[16] = {};
  std::uint8_t rows[16] = {};
};
static_assert(sizeof(TileShapes) == 64);

#if QUOKA_ISA_AMX
inline constexpr bool has_tiles = true;

// May this process use tiles? Asks the system, once. Threads that begin afterwards may, too, and on
// Linux so may those that are there.
bool tiles_allowed();

class Tiles {
 public:
  QUOKA_INLINE static void configure(const TileShapes& shapes) {
    asm volatile("ldtilecfg\t%0" ::"m"(shapes));
  }
  // All zeros where there is none.
  QUOKA_INLINE static void configuration(TileShapes& shapes) {
    asm volatile("sttilecfg\t%0" : "=m"(shapes));
  }
  QUOKA_INLINE static void release() { asm volatile("tilerelease"); }

  template <int t>
  QUOKA_INLINE static void zero() {
    asm volatile("tilezero\t%%tmm%c0" ::"i"(t));
  }
  template <int t>
  QUOKA_INLINE static void load(const void* p, Index step) {
    asm volatile("tileloadd\t(%0,%1,1), %%tmm%c2" ::"r"(p), "r"(step), "i"(t) : "memory");
  }
  template <int t>
  QUOKA_INLINE static void store(void* p, Index step) {
    asm volatile("tilestored\t%%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(step), "i"(t) : "memory");
  }
  template <int c, int a, int b>
  QUOKA_INLINE static void dot_bfloat16() {
    asm volatile("tdpbf16ps\t%%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(c), "i"(a), "i"(b));
  }
  template <int c, int a, int b>
  QUOKA_INLINE static void dot_signed_codes() {
    asm volatile("tdpbsud\t%%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(c), "i"(a), "i"(b));
  }
};
#elif defined(QUOKA_EMULATED_TILES)
inline constexpr bool has_tiles = true;
inline bool tiles_allowed() { return true; }
class EmulatedTiles;
using Tiles = EmulatedTiles;
#else
inline constexpr bool has_tiles = false;
inline bool tiles_allowed() { return false; }
class Tiles;
#endif

// May AMX tiles be used, and do they compute? Some virtual machines are said to lose their
// contents. The system must allow them, and agree() must find that they give the results of plain
// code. Otherwise one line says so, and `instead` is used. Each unit asks once.
inline bool tiles_pass(bool (*agree)(), const char* instead) {
  if (!tiles_allowed()) return false;
  if (agree()) return true;
  std::fprintf(stderr, "quoka: this machine's AMX tiles give wrong products: using %s\n", instead);
  return false;
}

}  // namespace simd
}  // namespace QUOKA_ABI
}  // namespace quoka

#if defined(QUOKA_EMULATED_TILES)
#include QUOKA_EMULATED_TILES
#elif QUOKA_ISA_AMX

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace quoka {
inline namespace QUOKA_ABI {
namespace simd {

inline bool tiles_allowed() {
#if defined(__linux__)
  // arch_prctl: ARCH_REQ_XCOMP_PERM for XFEATURE_XTILEDATA.
  static const bool allowed = syscall(SYS_arch_prctl, 0x1023, 18) == 0;
  return allowed;
#else
  return false;  // other systems are not supported here
#endif
}

}  // namespace simd
}  // namespace QUOKA_ABI
}  // namespace quoka
#endif
