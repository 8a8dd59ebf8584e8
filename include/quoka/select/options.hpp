// The options that selectors share: how many past keys each KV head attends to, and how they are
// found. Defaults here and in QuokaOptions are the paper's; MassOptions has its own.
#pragma once

#include <quoka/base/check.hpp>

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <limits>
#include <type_traits>

namespace quoka {
inline namespace QUOKA_ABI {

namespace detail {

// A fraction in (0, 1] of a length, in whole numbers: floor(numerator / denominator * length),
// exactly.
//
// A decimal fraction is rounded when it becomes a number: 0.7f is 0.699999988. If a decimal of at
// most 9 digits, 5 for a float, rounds to this number, that decimal is meant. Otherwise, as for 1.0
// / 3, the largest number that rounds to it is meant: a third of 3000 is 1000. With so few digits a
// ratio of whole numbers below 10^6 (150 for a float) is never mistaken for a decimal that it does
// not equal.
class ExactFraction {
 public:
  constexpr ExactFraction() = default;  // 0
  // float or double.
  template <std::floating_point F>
  explicit constexpr ExactFraction(F fraction) {
    using Limits = std::numeric_limits<F>;
    constexpr bool is_float = std::same_as<F, float>;
    constexpr F most = is_float ? F(1e5) : F(1e9);
    F power = 1;  // up to 10^10 or 10^22: exact
    for (int places = 0; places <= (is_float ? 10 : 22); ++places) {
      numerator_ = static_cast<std::uint64_t>(fraction * power + F(0.5));
      const F digits = static_cast<F>(numerator_);
      if (digits >= most) break;
      if (digits / power == fraction) return;
      power *= 10, denominator_ *= 10;
    }
    numerator_ = 0, denominator_ = 1;
    if (fraction < F(0x1p-63)) return;  // of any length less than 1
    while (fraction < F(Wide{1} << (Limits::digits - 1))) fraction *= 2, denominator_ *= 2;
    numerator_ = 2 * static_cast<std::uint64_t>(fraction) + 1, denominator_ *= 2;
  }

  constexpr Index of(Index length) const {
    return static_cast<Index>(Wide{numerator_} * static_cast<std::uint64_t>(length) / denominator_);
  }

 private:
  __extension__ using Wide = unsigned __int128;

  std::uint64_t numerator_ = 0;  // below 2^54
  Wide denominator_ = 1;
};

// Any integer type but bool.
template <class T>
concept WholeNumber = std::integral<T> && !std::same_as<T, bool>;
// Any number type.
template <class T>
concept BareNumber = std::is_arithmetic_v<T>;

}  // namespace detail

// Past keys attended per KV head (B_SA); of MassSelector, per list and on average over the lists.
//
//   Budget::keys(1024)      1024 keys; all of a shorter past; keys(0): none, the chunk alone
//   Budget::share(0.25)     a quarter of the past, rounded down, at least one key; share(0.7f) of
//                           10 is 7
//
// A share is the decimal fraction that was written, and exact (detail::ExactFraction):
// share(0.999) of 11,001 keys is 10,989, and share(1.0 / 3) of 3,000 is 1,000.
class Budget {
 public:
  // Throws std::invalid_argument for a negative count, or one that no Index holds.
  template <detail::WholeNumber T>
  static constexpr Budget keys(T count) {
    Budget budget;
    budget.count_ = static_cast<Index>(count);  // beyond Index: negative
    if (budget.count_ < 0) detail::require_at_least("budget", budget.count_, 0);
    return budget;
  }
  template <class T>
  static Budget keys(T) = delete;  // a count is whole; a part of the past is share(0.125)

  // Throws std::invalid_argument for a fraction outside (0, 1].
  template <std::floating_point F>
  static constexpr Budget share(F fraction) {
    if (!(fraction > F(0) && fraction <= F(1)))
      detail::fail_range("budget, as a share of the past,", static_cast<double>(fraction),
                         "(0, 1]");
    Budget budget;
    if constexpr (std::same_as<F, float>)
      budget.share_ = detail::ExactFraction(fraction);
    else
      budget.share_ = detail::ExactFraction(static_cast<double>(fraction));
    budget.is_share_ = true;
    return budget;
  }
  template <class T>
  static Budget share(T) = delete;  // a share has a point, share(1.0); a count is keys(1)

  // A bare number does not say which.
  template <detail::BareNumber T>
  Budget(T) = delete;  // Budget::keys(1024) or Budget::share(0.125)

  // How many of kv_len >= 0 past keys.
  constexpr Index count(Index kv_len) const {
    const Index wanted = is_share_ ? std::max<Index>(share_.of(kv_len), 1) : count_;
    return std::min(wanted, kv_len);
  }

 private:
  constexpr Budget() = default;

  detail::ExactFraction share_ = {};
  Index count_ = 0;
  bool is_share_ = false;
};

// How one key's scores over the kept queries become one.
enum class Aggregation {
  max,   // paper
  mean,  // ablation
};

// Whether keys are scored by their 8-bit sketch.
//
//   cosines (QuoKA)   first, and in float near the threshold: the Selection is the same, bit for
//                     bit
//   softmax           by codes alone, so the Selection may differ. It keeps at least exp(-2a) of
//                     the scored mass that float's Selection keeps, a = 2 eps + 0.0115, eps <= 4
//                     nats the bound on the error of a head's logits; a head beyond that is scored
//                     in float. That is the worst case, if neighbours do not count
//                     (MassOptions::kernel_size 1). Measured on recorded layers: 0.002 points lost
//                     on average, 0.03 by the worst head (code_mass.hpp)
enum class Sketch {
  automatic,  // if that is faster on this ISA
  on,         // even if float is faster
  off,        // scores in float alone
};

// From a score per key to the best keys: top_k.hpp says in which order.
struct TopKOptions {
  Index kernel_size = 1;  // neighbouring keys that share their maximum; 1: none (paper)
  Index keep_first = 0;   // attention sinks, inside the budget; 0: paper
  Index keep_last = 0;    // most recent keys, inside the budget; 0: paper
};

}  // namespace QUOKA_ABI
}  // namespace quoka
