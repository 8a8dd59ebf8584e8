// How many past keys each KV head attends to: a count, a share of the past, or as many as scores say.
#pragma once

#include <quoka/base/check.hpp>

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <type_traits>

namespace quoka {
inline namespace QUOKA_ABI {

namespace detail {

// A fraction in (0, 1] of a length, in whole numbers: floor(numerator / denominator * length), exactly.
//
// A decimal fraction is rounded when it becomes a number: 0.7f is 0.699999988. If a decimal of at most 9 digits, 5
// for a float, becomes this number, the decimal is taken. Any other number, such as 1.0 / 3, stands for all that
// become it, and the largest of these is taken: a third of 3000 is 1000. So few digits that a ratio of whole numbers
// below 10^6, 150 for a float, is never taken for a decimal that it does not equal.
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

// A number that counts: bool does not.
template <class T>
concept WholeNumber = std::integral<T> && !std::same_as<T, bool>;
// Any that the language has.
template <class T>
concept BareNumber = std::is_arithmetic_v<T>;

}  // namespace detail

// Past keys attended per KV head (B_SA).
//
//   Budget::keys(1024)      1024 keys; all of a shorter past; keys(0): none, the chunk alone
//   Budget::share(0.25)     a quarter of the past, rounded down, at least one key; share(0.7f) of 10 is 7
//   Budget::mass(0.95)      the fewest keys, best first, that hold 0.95 of the scored mass
//   Budget::relative(0.1)   keys that score at least 0.1 times the best
//
// A share is the decimal fraction that was written, and exact: share(0.999) of 11,001 keys is 10,989. A number that
// is no decimal of at most 9 digits (of a float 5), such as 1.0 / 3, counts as the largest of those that it is the
// rounded form of: share(1.0 / 3) of 3,000 keys is 1,000.
//
// The last two have a floor and a ceiling in keys: the best keys fill up to the one, and the worst go
// beyond the other. Forced keys (TopKOptions) come first, and their mass counts. Mass needs scores that
// are shares of attention: Domain::softmax. A best score below zero counts as best - (1 - alpha) |best|.
// A method without such scores refuses: those that evict, that share a choice, Quest, random.
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

  // By a count or a share; by mass(); by relative().
  enum class Rule { size, mass, relative };
  // As many keys as it takes.
  static constexpr Index no_ceiling = std::numeric_limits<Index>::max();

  // Throws std::invalid_argument for a part outside (0, 1], a floor below 1, and a ceiling below it.
  static Budget mass(double part, Index floor = 1, Index ceiling = no_ceiling) {
    return {Rule::mass, "budget, as a share of the mass,", part, floor, ceiling};
  }
  // Throws std::invalid_argument for alpha outside (0, 1], a floor below 1, and a ceiling below it.
  static Budget relative(double alpha, Index floor = 1, Index ceiling = no_ceiling) {
    return {Rule::relative, "budget, as a part of the best score,", alpha, floor, ceiling};
  }

  Rule rule() const { return rule_; }  // how it is given
  // Does the number of keys depend on their scores?
  bool by_scores() const { return rule_ != Rule::size; }
  // The part or alpha of a budget by scores.
  double threshold() const { return threshold_; }
  // The fewest of kv_len >= 0 past keys; as many as count() unless by_scores().
  Index least(Index kv_len) const { return by_scores() ? std::min(floor_, kv_len) : count(kv_len); }
  // How many of kv_len >= 0 past keys; by_scores(): at most.
  constexpr Index count(Index kv_len) const {
    const Index wanted = is_share_ ? std::max<Index>(share_.of(kv_len), 1) : count_;
    return std::min(wanted, kv_len);
  }

 private:
  constexpr Budget() = default;
  Budget(Rule rule, const char* name, double threshold, Index floor, Index ceiling)
      : count_(ceiling), rule_(rule), threshold_(threshold), floor_(floor) {
    if (!(threshold > 0.0 && threshold <= 1.0)) detail::fail_range(name, threshold, "(0, 1]");
    detail::require_at_least("the budget's floor", floor, 1);
    detail::require_at_most("the budget's floor", floor, "its ceiling", ceiling);
  }

  detail::ExactFraction share_ = {};
  Index count_ = 0;  // the ceiling of a budget by scores
  bool is_share_ = false;
  Rule rule_ = Rule::size;
  double threshold_ = 0.0;
  Index floor_ = 0;
};

namespace detail {

// Throws std::invalid_argument for a budget by scores.
inline void require_sized(const Budget& budget, std::string_view method) {
  if (budget.by_scores())
    fail_because(std::string(method) + " needs a count or a share as its budget: it has no " +
                 (budget.rule() == Budget::Rule::mass ? "mass" : "best score"));
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
