// Online softmax as a value: the running {max, sum} of one row of logits, or of one row per lane.
//
//   identity       max = -inf, sum = 0
//   raise(m)       raises max to m; returns the factor for all that was accumulated so far
//   weight(x)      e^(x - max): what a logit x <= max adds to sum and, times its value, to out
//   update(x)      adds a logit; returns its weight, which a caller with a value multiplies it by
//   merge(other)   the state of both key sets; returns the factors for the two outs
//   inverse_sum    finishes: out / sum; lse_nat gives the log-sum-exp
//
// Logits are natural, not multiplied by log2(e), so that all finite ones count. A difference of
// logits may overflow to -inf, which is a weight of 0. A masked logit is -inf itself, not a large
// negative number. While max is -inf, differences are taken against 0. So weights and factors are
// exact zeros, and an empty row ends as zeros with log-sum-exp -inf. The accumulated output stays
// with its owner, who applies the factors. Source: Milakov and Gimelshein, 2018; the merge is that
// of FlashAttention's split keys.
#pragma once

#include <quoka/base/index.hpp>

#include <cmath>

namespace quoka {
inline namespace QUOKA_ABI {

inline constexpr double ln_2 = 0.693147180559945309;

template <class P>  // float, or simd::Packet: one row per lane
struct SoftmaxState {
  P max;
  P sum;

  static SoftmaxState identity();

  // `max`, or 0 where no logit has been seen.
  P reference() const;

  P weight(const P& logit) const;

  P raise(const P& logit_max);

  // Drops raise()'s factor: only for logits that come before any value was accumulated, such as a
  // sink.
  P update(const P& logit);

  struct Factors {
    P self, other;
  };
  Factors merge(const SoftmaxState& other);

  // 1 / sum; 0 for an empty row, NaN for a row that met a NaN. Nothing is divided by an empty row's
  // sum: programs may trap divisions by zero, and a lane without a row must not stop the call.
  P inverse_sum() const;
};

// SoftmaxState<float>::identity(), for drivers.
inline constexpr SoftmaxState<float> empty_row{-detail::infinity, 0.0f};

// Natural logarithm of the sum of exp(logit) of one finished row.
inline float lse_nat(float max, float sum) {
  return sum == 0.0f
             ? -detail::infinity
             : static_cast<float>(static_cast<double>(max) + std::log(static_cast<double>(sum)));
}

}  // namespace QUOKA_ABI
}  // namespace quoka

#if QUOKA_DEFINES_KERNELS
#include <quoka/simd/simd.hpp>

QUOKA_PACKET_ARGUMENTS_BEGIN
namespace quoka {
inline namespace QUOKA_ABI {

// One state per query row of a packet.
using PacketState = SoftmaxState<simd::Packet>;

template <class P>
QUOKA_INLINE SoftmaxState<P> SoftmaxState<P>::identity() {
  return {simd::broadcast<P>(-simd::infinity), simd::zero<P>()};
}

template <class P>
QUOKA_INLINE P SoftmaxState<P>::reference() const {
  return simd::select_less(simd::broadcast<P>(-simd::infinity), max, max, simd::zero<P>());
}

template <class P>
QUOKA_INLINE P SoftmaxState<P>::weight(const P& logit) const {
  return simd::exp(simd::sub(logit, reference()));
}

template <class P>
QUOKA_INLINE P SoftmaxState<P>::raise(const P& logit_max) {
  const P before = max;
  max = simd::max(max, logit_max);
  const P factor = simd::exp(simd::sub(before, reference()));
  sum = simd::mul(sum, factor);
  return factor;
}

template <class P>
QUOKA_INLINE P SoftmaxState<P>::update(const P& logit) {
  raise(logit);
  const P own = weight(logit);
  sum = simd::add(sum, own);
  return own;
}

template <class P>
QUOKA_INLINE auto SoftmaxState<P>::merge(const SoftmaxState& other) -> Factors {
  const P before = max;
  max = simd::max(max, other.max);
  const Factors factors{simd::exp(simd::sub(before, reference())),
                        simd::exp(simd::sub(other.max, reference()))};
  // An explicit fma: a compiler may contract a product and a sum in one inlined copy and not in
  // another.
  sum = simd::fma(other.sum, factors.other, simd::mul(sum, factors.self));
  return factors;
}

template <class P>
QUOKA_INLINE P SoftmaxState<P>::inverse_sum() const {
  const P zero = simd::zero<P>(), one = simd::broadcast<P>(1.0f);
  // A row that has seen a key has a sum of about 1 or more. A maximum, which no compiler takes for
  // the choice below and leaves out.
  const P divisor = simd::max(sum, simd::broadcast<P>(0x1p-100f));
  return simd::select_less(zero, sum, simd::div(one, divisor), simd::mul(sum, zero));
}

}  // namespace QUOKA_ABI
}  // namespace quoka
QUOKA_PACKET_ARGUMENTS_END
#endif  // QUOKA_DEFINES_KERNELS
