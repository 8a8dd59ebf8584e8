// Rows and a pair of blocks of keys (simd::code_pair keys): from products of codes to weights, from weights to shares.
//
//   weight   2^(product * unit of the key * unit of the row + shift of the row)   pairs of bfloat16, [row / 2][key][2]
//   share    over the rows the sum, or the largest, of weight * factor of the row
//
// A weight lies in 2^[least_weight, most_weight], a smaller one is raised to that; and a row's largest in 2^[least_top,
// most_weight], so that what is raised is below 2^-50 of it. Shares are added up as multiples of 2^-64. Nothing
// overflows, and nothing is denormal, which would be slow.
// A key whose unit is below 0 has no weight.
#pragma once

#include <quoka/select/options.hpp>
#include <quoka/simd/code_products.hpp>
#include <quoka/simd/isa/weight_pairs.hpp>
#include <quoka/simd/simd.hpp>

#include <cstdint>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

inline constexpr float most_weight = 60.0f, least_top = -45.0f, least_weight = -95.0f;
inline constexpr float share_scale = 0x1p64f, least_share = 0x1p-62f;

// Some rows of a look, an even number, and the sums of their weights [height, lanes].
struct WeightRows {
  Index height;
  const float *units, *shifts;
  float* sums;
};

// products [height, code_pair], key_units: the keys' units. Partial: some of them are below 0.
template <bool Partial, class Product>
void row_weights(const Product* products, const float* key_units, const WeightRows& rows,
                 std::uint32_t* to) {
  constexpr Index pair = simd::code_pair;
  for (Index m = 0; m < rows.height; m += 2, products += 2 * pair, to += pair) {
    simd::Packet unit[2], shift[2], total[2];
    simd::unroll<2>([&](auto i) QUOKA_INLINE_LAMBDA {
      unit[i] = simd::broadcast(rows.units[m + i]);
      shift[i] = simd::broadcast(rows.shifts[m + i]);
      total[i] = simd::load(rows.sums + (m + i) * simd::lanes);
    });
    simd::unroll<pair / simd::lanes>([&](auto j) QUOKA_INLINE_LAMBDA {
      const simd::Packet key_unit = simd::load(key_units + j * simd::lanes);
      simd::Packet weight[2];
      simd::unroll<2>([&](auto i) QUOKA_INLINE_LAMBDA {
        const simd::Packet product = simd::load_dots(products + i * pair + j * simd::lanes);
        const simd::Packet logit = simd::fma(simd::mul(product, key_unit), unit[i], shift[i]);
        weight[i] = simd::exp2_rough(simd::max(logit, simd::broadcast(least_weight)));
        if constexpr (Partial)
          weight[i] = simd::select_less(key_unit, simd::zero(), simd::zero(), weight[i]);
        total[i] = simd::add(total[i], weight[i]);
      });
      simd::store_weight_pairs(to + j * simd::lanes, weight[0], weight[1]);
    });
    simd::unroll<2>([&](auto i) QUOKA_INLINE_LAMBDA {
      simd::store(rows.sums + (m + i) * simd::lanes, total[i]);
    });
  }
}

// shares [code_pair] from the weights of `count` rows, by their factors, in which share_scale is one.
inline void shares_of_weights(const std::uint32_t* weights, const float* factors, Index count,
                              Aggregation over, float* shares) {
  constexpr Index pair = simd::code_pair, packets = pair / simd::lanes;
  constexpr int together = packets < 2 ? 1 : 2;
  for (Index j = 0; j < packets; j += together) {
    simd::Packet sum[together][2];
    simd::unroll<together, 2>([&](auto i, auto row)
                                  QUOKA_INLINE_LAMBDA { sum[i][row] = simd::zero(); });
    for (Index m = 0; m < count; m += 2) {
      const simd::Packet factor[2] = {simd::broadcast(factors[m]), simd::broadcast(factors[m + 1])};
      simd::unroll<together>([&](auto i) QUOKA_INLINE_LAMBDA {
        const std::uint32_t* const at = weights + m / 2 * pair + (j + i) * simd::lanes;
        const simd::Packet weight[2] = {simd::first_weights(at), simd::second_weights(at)};
        simd::unroll<2>([&](auto row) QUOKA_INLINE_LAMBDA {
          sum[i][row] = over != Aggregation::max
                            ? simd::fma(weight[row], factor[row], sum[i][row])
                            : simd::max(sum[i][row], simd::mul(weight[row], factor[row]));
        });
      });
    }
    simd::unroll<together>([&](auto i) QUOKA_INLINE_LAMBDA {
      const simd::Packet combined = over != Aggregation::max ? simd::add(sum[i][0], sum[i][1])
                                                             : simd::max(sum[i][0], sum[i][1]);
      const simd::Packet large = simd::max(combined, simd::broadcast(least_share));
      simd::store(shares + (j + i) * simd::lanes,
                  simd::mul(large, simd::broadcast(1.0f / share_scale)));
    });
  }
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
