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
// negative number. While max is -inf, differences are taken against 0: so weights and factors are
// exact zeros, and an empty row ends as zeros with log-sum-exp -inf. The accumulated output stays
// with its owner, who applies the factors. Source: Milakov and Gimelshein, 2018; the merge is that
// of FlashAttention's split keys.
#pragma once

#include <quoka/simd/simd.hpp>

#include <cmath>

namespace quoka {
inline namespace QUOKA_ABI {

inline constexpr double ln_2 = 0.693147180559945309;

template <class P>  // float, or simd::Packet: one row per lane
struct SoftmaxState {
  P max;
  P sum;

  QUOKA_INLINE static SoftmaxState identity() {
    return {simd::broadcast<P>(-simd::infinity), simd::zero<P>()};
  }

  // `max`, or 0 where no logit has been seen.
  QUOKA_INLINE P reference() const {
    return simd::select_less(simd::broadcast<P>(-simd::infinity), max, max, simd::zero<P>());
  }

  QUOKA_INLINE P weight(const P& logit) const { return simd::exp(simd::sub(logit, reference())); }

  QUOKA_INLINE P raise(const P& logit_max) {
    const P before = max;
    max = simd::max(max, logit_max);
    const P factor = simd::exp(simd::sub(before, reference()));
    sum = simd::mul(sum, factor);
    return factor;
  }

  // Drops raise()'s factor: only for logits that come before any value was accumulated, such as a
  // sink.
  QUOKA_INLINE P update(const P& logit) {
    raise(logit);
    const P own = weight(logit);
    sum = simd::add(sum, own);
    return own;
  }

  struct Factors {
    P self, other;
  };
  QUOKA_INLINE Factors merge(const SoftmaxState& other) {
    const P before = max;
    max = simd::max(max, other.max);
    const Factors factors{simd::exp(simd::sub(before, reference())),
                          simd::exp(simd::sub(other.max, reference()))};
    // An explicit fma: a compiler may contract a product and a sum in one inlined copy and not in another.
    sum = simd::fma(other.sum, factors.other, simd::mul(sum, factors.self));
    return factors;
  }

  // 1 / sum; 0 for an empty row, NaN for a row that met a NaN. Nothing is divided by an empty row's sum: programs may
  // trap divisions by zero, and a lane without a row must not stop the call.
  QUOKA_INLINE P inverse_sum() const {
    const P zero = simd::zero<P>(), one = simd::broadcast<P>(1.0f);
    // A row that has seen a key has a sum of about 1 or more. A maximum, which no compiler takes for the choice below
    // and leaves out.
    const P divisor = simd::max(sum, simd::broadcast<P>(0x1p-100f));
    return simd::select_less(zero, sum, simd::div(one, divisor), simd::mul(sum, zero));
  }
};

// One state per query row of a packet.
QUOKA_PACKET_ARGUMENTS_BEGIN
using PacketState = SoftmaxState<simd::Packet>;
QUOKA_PACKET_ARGUMENTS_END

// Natural logarithm of the sum of exp(logit) of one finished row.
inline float lse_nat(float max, float sum) {
  return sum == 0.0f
             ? -simd::infinity
             : static_cast<float>(static_cast<double>(max) + std::log(static_cast<double>(sum)));
}

}  // namespace QUOKA_ABI
}  // namespace quoka
