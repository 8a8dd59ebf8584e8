// What both products of attention are computed in, by name.
//
// With headers alone an Arithmetic brings its kernels, so that those a program names are compiled and
// no others. With the compiled library it is an id, which the library's instructions give a meaning.
#pragma once

#include <quoka/base/index.hpp>

#include <limits>

namespace quoka {
inline namespace QUOKA_ABI {

// Query rows beside which packing their keys does not count.
inline constexpr Index many_rows = std::numeric_limits<Index>::max();

namespace detail {

class PanelArithmetic;

enum class ArithmeticId { automatic, single, bfloat16, bfloat16_x2, bfloat16_x3, int8 };

constexpr const char* name_of(ArithmeticId id) {
  constexpr const char* names[] = {"automatic",   "single",      "bfloat16",
                                   "bfloat16_x2", "bfloat16_x3", "int8"};
  return names[static_cast<int>(id)];
}

// What of a call its arithmetic depends on.
struct ArithmeticInput {
  float cache_rounding;  // of the keys' and values' storage, the smaller one (Format::rounding)
  Index rows;            // query rows of a KV head, for which its keys are packed
};
struct UsedArithmetic;
using PanelsOf = UsedArithmetic (*)(const ArithmeticInput& input);

// What an arithmetic comes to on the machine at hand, and its kernels.
struct UsedArithmetic {
  ArithmeticId id;
  const PanelArithmetic* panels;
  // What comes to it for other calls, too, where the one that was asked for does not.
  PanelsOf own = nullptr;
};
template <ArithmeticId id>
UsedArithmetic panels_of(const ArithmeticInput& input);

#if defined(QUOKA_COMPILED)
template <ArithmeticId>
inline constexpr PanelsOf known_panels = nullptr;
#else
template <ArithmeticId id>
inline constexpr PanelsOf known_panels = panels_of<id>;
#endif

// A template, so that the kernels of an arithmetic that nobody names are not compiled.
template <class Self>
struct Arithmetics {
  // The fastest whose rounding is no larger than what the cache's storage has rounded already, and
  // the default: bfloat16_x2 for keys and values of bfloat16 or of 8 bits (by tiles and by bfmmla),
  // bfloat16_x3 for others (by tiles), single where neither is faster. For one token, whose query heads
  // in threes or more share keys of q8_0, queries are rounded to 15 bits (token_codes.hpp): a
  // logit is off by at most scale * max|q| / 32,638 * sum |k|, where the storage's rounding is up to
  // scale * sum over groups of 32 channels of max|k| / 254 * sum |q|.
  static const Self automatic;
  // Float.
  static const Self single;
  // Products of bfloat16, by AMX's tiles, Armv8.6's bfmmla or, one product on AMD, AVX512_BF16; single
  // elsewhere. Tiles make one product 3.7 times as fast as single (4.4 over a cache of bfloat16), two 3.0,
  // three 2.2; Zen 5's vdpbf16ps one 1.8 (1.9), two 1.0, three 0.67; Intel's one 0.64 (bench/README.md). One product: q, k, weights and v rounded
  // to 8 bits. Off by up to 6e-3 of the largest output for normal numbers (16 rows over 8,192 keys).
  static const Self bfloat16;
  // Two: q and weights split in two. A cache of bfloat16 is read exactly as it is: typically off by 4e-6.
  // Another one is rounded to it: by up to 4e-3.
  static const Self bfloat16_x2;
  // Three: k and v split as well. Off by up to 1e-5. bfloat16_error() (bfloat16_panels.hpp) has the
  // bounds of the three, which hold for every input.
  static const Self bfloat16_x3;
  // Products of 8-bit integers with a scale for each row of q, k and v, by AVX512-VNNI, AVX-VNNI and Arm's i8mm: on a
  // Zen 5 2.5 times as fast as single, by a Xeon's VNNI 2.7. With AMX it is bfloat16,
  // which is faster there; single elsewhere.
  // Few query rows a KV head (group * q_len) are computed in what packs keys and values sooner:
  // fewer than tuning::int8_rows in bfloat16; where that comes to single, those that fit one packet in single.
  // Off by up to 2.5e-2 of the largest output for normal numbers, on a real model's layers by 1.5e-2 of the output (root mean squares).
  // int8_error() (int8_panels.hpp) has the bound that holds for every input.
  static const Self int8;
};

}  // namespace detail

// What Q K^T and P V of a chunk are computed in: Arithmetic::automatic, single, bfloat16, bfloat16_x2,
// bfloat16_x3 or int8. Sums and softmax are always in single precision, and so is all of one
// token's attention (attend_token.hpp), which is bound by memory, but for `automatic` with q8_0.
class Arithmetic : public detail::Arithmetics<Arithmetic> {
 public:
  // The library's own: the named ones above are all there are.
  constexpr Arithmetic(detail::ArithmeticId which, detail::PanelsOf kernels)
      : id_(which), panels_(kernels) {}

  constexpr const char* name() const { return detail::name_of(id_); }  // "bfloat16_x2"
  constexpr detail::ArithmeticId id() const { return id_; }            // the library's own
  constexpr detail::PanelsOf panels() const { return panels_; }  // null with the compiled library
  friend constexpr bool operator==(const Arithmetic& a, const Arithmetic& b) {
    return a.id_ == b.id_;
  }

 private:
  detail::ArithmeticId id_;
  detail::PanelsOf panels_;
};

namespace detail {

template <class Self>
inline constexpr Self Arithmetics<Self>::automatic{ArithmeticId::automatic,
                                                   known_panels<ArithmeticId::automatic>};
template <class Self>
inline constexpr Self Arithmetics<Self>::single{ArithmeticId::single,
                                                known_panels<ArithmeticId::single>};
template <class Self>
inline constexpr Self Arithmetics<Self>::bfloat16{ArithmeticId::bfloat16,
                                                  known_panels<ArithmeticId::bfloat16>};
template <class Self>
inline constexpr Self Arithmetics<Self>::bfloat16_x2{ArithmeticId::bfloat16_x2,
                                                     known_panels<ArithmeticId::bfloat16_x2>};
template <class Self>
inline constexpr Self Arithmetics<Self>::bfloat16_x3{ArithmeticId::bfloat16_x3,
                                                     known_panels<ArithmeticId::bfloat16_x3>};
template <class Self>
inline constexpr Self Arithmetics<Self>::int8{ArithmeticId::int8, known_panels<ArithmeticId::int8>};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
