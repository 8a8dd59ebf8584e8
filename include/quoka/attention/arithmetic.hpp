// Arithmetic: the number format in which attention multiplies, by name. used_arithmetic(), at the
// end, chooses the kernels (PanelArithmetic) for a request on this machine.
#pragma once

#include <quoka/base/check.hpp>
#include <quoka/kernels/error_bounds.hpp>
#include <quoka/rows/format.hpp>

#include <limits>
#include <string>
#include <string_view>

#if QUOKA_DEFINES
#include <quoka/kernels/arithmetics.hpp>
#include <algorithm>
#endif

namespace quoka {
inline namespace QUOKA_ABI {

// With this many query rows the time of packing their keys does not matter.
inline constexpr Index many_rows = std::numeric_limits<Index>::max();

namespace detail {

// The arithmetic that is used for a request on this machine, and its kernels. cache_rounding: the
// smaller of the keys' and the values' (Format::rounding). rows: query rows of a KV head.
struct UsedArithmetic;
using UseArithmetic = UsedArithmetic (*)(float cache_rounding, Index rows);
UsedArithmetic use_automatic(float cache_rounding, Index rows);
UsedArithmetic use_float(float cache_rounding, Index rows);
UsedArithmetic use_bfloat16(float cache_rounding, Index rows);
UsedArithmetic use_int8(float cache_rounding, Index rows);

}  // namespace detail

// The arithmetic of a chunk's products Q K^T and P V. Sums and softmax are always in float. Decode
// (attend_decode.hpp), which is bound by memory, is in float as well, except for `automatic` with
// q8_0.
//
// In header-only builds an Arithmetic brings its kernels, so that a unit compiles those of the
// arithmetics that it names. With the compiled library it is a number.
class Arithmetic {
 public:
  // The fastest whose rounding is no larger than what the cache's storage has rounded already, and
  // the default. Numbers are split into parts of bfloat16, whose products are summed:
  //   keys and values of bfloat16 or of 8 bits   two products, by AMX's tiles and by bfmmla: q and
  //                                              weights are split in two. Numbers of bfloat16 are
  //                                              exact: typically off by 4e-6. Those of 8-bit rows
  //                                              are rounded to bfloat16: off by up to 4e-3
  //   others                                     three, by tiles: k and v are split as well. Off by
  //                                              up to 1e-5
  //   neither is faster                          float
  // bfloat16_error() (error_bounds.hpp) has bounds that hold for every input. In decode, if three
  // query heads or more share keys of q8_0, queries are rounded to 15 bits (token_codes.hpp has the
  // bound). The storage's own rounding of a logit is up to scale * sum over groups of 32 channels
  // of max|k| / 254 * sum |q|.
  static const Arithmetic automatic;
  // Float. The name ends in _ because `float` is a keyword; as text it is "float". float_error()
  // (error_bounds.hpp) has the bound that holds for every input.
  static const Arithmetic float_;
  // One product of bfloat16, by AMX's tiles, Armv8.6's bfmmla or, on AMD, AVX512_BF16; float
  // elsewhere. Intel's AVX512_BF16 takes longer than float. bench/README.md has the speeds. q, k,
  // weights and v are rounded to bfloat16's 8 significant bits: off by up to 6e-3 of the largest
  // output for normal numbers (16 rows over 8,192 keys).
  static const Arithmetic bf16;
  // Products of 8-bit integers with a scale for each row of q, k and v, by AVX512-VNNI, AVX-VNNI
  // and Arm's i8mm. With AMX it is bf16, which is faster there; float elsewhere. Packing keys and
  // values for int8 takes longer. So fewer than tuning::int8_rows query rows of a KV head (group *
  // q_len) are computed in bfloat16; where that is float, only those that fit one packet are. Off
  // by up to 2.5e-2 of the largest output for normal numbers, on a real model's layers by 1.5e-2 of
  // the output (root mean squares). int8_error() (error_bounds.hpp) has the bound that holds for
  // every input.
  static const Arithmetic int8;

  // 0 automatic, 1 float, 2 bf16, 3 int8.
  constexpr int number() const { return number_; }
  // The library's own; null with the compiled library.
  constexpr detail::UseArithmetic use() const { return use_; }
  friend constexpr bool operator==(const Arithmetic& a, const Arithmetic& b) {
    return a.number_ == b.number_;
  }

 private:
  constexpr Arithmetic(int which, detail::UseArithmetic here) : number_(which), use_(here) {}

  int number_;
  detail::UseArithmetic use_;
};

#if defined(QUOKA_COMPILED)
inline constexpr Arithmetic Arithmetic::automatic{0, nullptr};
inline constexpr Arithmetic Arithmetic::float_{1, nullptr};
inline constexpr Arithmetic Arithmetic::bf16{2, nullptr};
inline constexpr Arithmetic Arithmetic::int8{3, nullptr};
#else
inline constexpr Arithmetic Arithmetic::automatic{0, detail::use_automatic};
inline constexpr Arithmetic Arithmetic::float_{1, detail::use_float};
inline constexpr Arithmetic Arithmetic::bf16{2, detail::use_bfloat16};
inline constexpr Arithmetic Arithmetic::int8{3, detail::use_int8};
#endif

// "automatic", "float", "bf16" or "int8", in every interface (C++, C, Python).
constexpr const char* arithmetic_name(Arithmetic arithmetic) {
  constexpr const char* names[] = {"automatic", "float", "bf16", "int8"};
  return names[arithmetic.number()];
}

// By that name. Throws std::invalid_argument for another one.
inline Arithmetic arithmetic_named(std::string_view name) {
  for (const Arithmetic one :
       {Arithmetic::automatic, Arithmetic::float_, Arithmetic::bf16, Arithmetic::int8})
    if (name == arithmetic_name(one)) return one;
  const bool gone = name == "bfloat16_x2" || name == "bfloat16_x3";
  detail::fail_because("the arithmetic is \"" + std::string(name) + "\", " +
                       (gone                 ? "which is gone: take automatic"
                        : name == "single"   ? "which is called float"
                        : name == "bfloat16" ? "which is called bf16"
                                             : "but must be automatic, float, bf16 or int8"));
}

// The arithmetic that is used for a request on this machine, by the formats of keys and values.
// rows: query rows of a KV head, q_heads / kv_heads * q_len. Returns `automatic` where that takes
// products of bfloat16, else float_. Only int8 depends on `rows`. Throws std::invalid_argument for
// rows below 1.
Arithmetic arithmetic_used(Arithmetic asked, const Format& k = float_format(),
                           const Format& v = float_format(), Index rows = many_rows);

// Does a chunk of `rows` query rows of a KV head multiply 8-bit integers here?
// SelectorInput::in_int8. False for rows below 1.
inline bool multiplies_int8(Arithmetic asked, Index rows) {
  return asked == Arithmetic::int8 && rows > 0 &&
         arithmetic_used(asked, float_format(), float_format(), rows) == Arithmetic::int8;
}

#if QUOKA_DEFINES
namespace detail {

// Storage that has rounded as bfloat16 does, or more.
inline constexpr float bfloat16_rounding = 0x1p-8f;

struct UsedArithmetic {
  Arithmetic arithmetic;
  const PanelArithmetic* panels;
};

QUOKA_FUNC UsedArithmetic use_float(float, Index) { return {Arithmetic::float_, &float_panels()}; }

QUOKA_FUNC UsedArithmetic use_automatic(float cache_rounding, Index rows) {
  const PanelArithmetic* const panels =
      cache_rounding >= bfloat16_rounding ? bfloat16_of_here<2>() : bfloat16_of_here<3>();
  return panels != nullptr ? UsedArithmetic{Arithmetic::automatic, panels}
                           : use_float(cache_rounding, rows);
}

QUOKA_FUNC UsedArithmetic use_bfloat16(float cache_rounding, Index rows) {
  const PanelArithmetic* const panels = bfloat16_of_here<1>();
  return panels != nullptr ? UsedArithmetic{Arithmetic::bf16, panels}
                           : use_float(cache_rounding, rows);
}

QUOKA_FUNC UsedArithmetic use_int8(float cache_rounding, Index rows) {
  const PanelArithmetic* const panels = int8_of_here(rows);
  return panels != nullptr ? UsedArithmetic{Arithmetic::int8, panels}
                           : use_bfloat16(cache_rounding, rows);
}

inline UsedArithmetic used_arithmetic(Arithmetic asked, float cache_rounding, Index rows) {
#if defined(QUOKA_COMPILED)
  constexpr UseArithmetic uses[] = {use_automatic, use_float, use_bfloat16, use_int8};
  return uses[asked.number()](cache_rounding, rows);
#else
  return asked.use()(cache_rounding, rows);
#endif
}

}  // namespace detail

QUOKA_FUNC Arithmetic arithmetic_used(Arithmetic asked, const Format& k, const Format& v,
                                      Index rows) {
  detail::require_at_least("rows", rows, 1);
  return detail::used_arithmetic(asked, std::min(k.rounding, v.rounding), rows).arithmetic;
}

#endif  // QUOKA_DEFINES

}  // namespace QUOKA_ABI
}  // namespace quoka
