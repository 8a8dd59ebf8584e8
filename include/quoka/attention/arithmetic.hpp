// What both products of attention are computed in, by name.
#pragma once

#include <quoka/base/check.hpp>

#include <limits>
#include <string>
#include <string_view>

namespace quoka {
inline namespace QUOKA_ABI {

// Query rows beside which packing their keys does not count.
inline constexpr Index many_rows = std::numeric_limits<Index>::max();

// What Q K^T and P V of a chunk are computed in. Sums and softmax are always in single precision, and so is all of one
// token's attention (attend_decode.hpp), which is bound by memory, but for `automatic` with q8_0.
enum class Arithmetic {
  // The fastest whose rounding is no larger than what the cache's storage has rounded already, and the default.
  // Numbers are split into parts of bfloat16, whose products are summed:
  //   keys and values of bfloat16 or of 8 bits   two products, by AMX's tiles and by bfmmla: the cache is read exactly as
  //                                              it is, q and weights are split in two. Typically off by 4e-6
  //   others                                     three, by tiles: k and v are split as well. Off by up to 1e-5
  //   neither is faster                          float
  // bfloat16_error() (bfloat16_panels.hpp) has bounds that hold for every input. For one token, whose query heads
  // in threes or more share keys of q8_0, queries are rounded to 15 bits (token_codes.hpp): a
  // logit is off by at most scale * max|q| / 32,638 * sum |k|, where the storage's rounding is up to
  // scale * sum over groups of 32 channels of max|k| / 254 * sum |q|.
  automatic,
  // Float.
  fp32,
  // One product of bfloat16, by AMX's tiles, Armv8.6's bfmmla or, on AMD, AVX512_BF16; float elsewhere. Tiles make it
  // 3.7 times as fast as float (4.4 over a cache of bfloat16; two products 3.0, three 2.2), Zen 5's vdpbf16ps 1.8 times
  // (1.9); Intel's takes longer than float (bench/README.md). q, k, weights and v are rounded to 8 bits: off by up to 6e-3 of the largest output for normal
  // numbers (16 rows over 8,192 keys).
  bfloat16,
  // Products of 8-bit integers with a scale for each row of q, k and v, by AVX512-VNNI, AVX-VNNI and Arm's i8mm: on a
  // Zen 5 2.5 times as fast as float, by a Xeon's VNNI 2.7. With AMX it is bfloat16,
  // which is faster there; float elsewhere.
  // Few query rows a KV head (group * q_len) are computed in what packs keys and values sooner:
  // fewer than tuning::int8_rows in bfloat16; where that comes to float, those that fit one packet in float.
  // Off by up to 2.5e-2 of the largest output for normal numbers, on a real model's layers by 1.5e-2 of the output (root mean squares).
  // int8_error() (int8_panels.hpp) has the bound that holds for every input.
  int8
};

// "automatic", "float", "bf16" or "int8", at every door.
constexpr const char* arithmetic_name(Arithmetic arithmetic) {
  constexpr const char* names[] = {"automatic", "float", "bf16", "int8"};
  return names[static_cast<int>(arithmetic)];
}

// By that name. Throws std::invalid_argument for another one.
inline Arithmetic arithmetic_named(std::string_view name) {
  for (const Arithmetic one :
       {Arithmetic::automatic, Arithmetic::fp32, Arithmetic::bfloat16, Arithmetic::int8})
    if (name == arithmetic_name(one)) return one;
  const bool gone = name == "bfloat16_x2" || name == "bfloat16_x3";
  detail::fail_because("the arithmetic is \"" + std::string(name) + "\", " +
                       (gone                 ? "which is gone: take automatic"
                        : name == "single"   ? "which is called float"
                        : name == "bfloat16" ? "which is called bf16"
                                             : "but must be automatic, float, bf16 or int8"));
}

}  // namespace QUOKA_ABI
}  // namespace quoka
