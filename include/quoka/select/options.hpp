// The choices QuoKA leaves open, by name, and the budget. Defaults everywhere are the paper's.
#pragma once

#include <quoka/base/check.hpp>

#include <algorithm>
#include <concepts>
#include <limits>
#include <string>
#include <string_view>

namespace quoka {
inline namespace QUOKA_ABI {

// How a kept query and a key meet.
enum class Scoring {
  cosine,  // paper: both normalised
  dot,     // ablation: neither
};

// How one key's scores over the kept queries become one.
enum class Aggregation {
  max,   // paper
  mean,  // ablation
};

// How the queries of one group, the query heads that share a KV head, are combined.
enum class GroupMode {
  rank,      // paper: each head keeps its own queries; slot m of every head is averaged
  shared,    // one set of tokens for the group, ranked by the sum of the heads' cosines; averaged
  per_head,  // no average: group * n_queries rows score, each for itself; group times the cost
};

// Which queries of the chunk score.
enum class QueryChoice {
  dissimilar,           // paper: the lowest cosines with the chunk's mean query
  uniform,              // evenly spaced, the chunk's last token among them
  last,                 // the end of the chunk
  dissimilar_and_last,  // the last n / 2 tokens, and of the others the most dissimilar
  mixed,  // a quarter is the chunk's end, a quarter the most dissimilar, the others evenly spaced,
          // each head of a group at positions of its own: steps/subselect.hpp
};

// In which domain several queries' logits become one score: by their mean, unless the selector has
// an Aggregation. Logits are linear in the query: their mean is the logit of the mean query,
// whatever the queries were.
enum class Domain {
  softmax,  // each query's softmax over the past: its share of attention
  logit,    // the logits themselves
};

// Whether keys are scored by their 8-bit sketch.
//
//   Domain::logit     first, and in float near the threshold: the Selection is the same, bit for bit
//   Domain::softmax   alone: another Selection. It keeps at least exp(-2a) of the scored mass that float's
//                     Selection keeps, a = 2 eps + 0.01, eps <= 4 nats the bound on the error of a head's
//                     logits; a head beyond that is scored in float. That is the worst case. Measured on
//                     recorded layers: 0.002 points lost on average, 0.03 by the worst head (sketch/sketched_mass.hpp)
enum class Sketch {
  automatic,  // where this ISA scores faster so
  on,         // even where float is faster
  off,        // scores in float alone
};

// Past keys attended per KV head (B_SA): a count, a fraction of the past, or as many as their scores
// say, each KV head its own number.
//
//   Budget(1024)            1024 keys; all of a shorter past
//   Budget(0.25)            a quarter of the past, rounded down, at least one key; 0.7f of 10 is 7
//   Budget::mass(0.95)      the fewest keys, best first, that hold 0.95 of the scored mass
//   Budget::relative(0.1)   keys that score at least 0.1 times the best
//
// The last two have a floor and a ceiling in keys: the best keys fill up to the one, and the worst go
// beyond the other. Forced keys (TopKOptions) come first, and their mass counts. Mass needs scores that
// are shares of attention: Domain::softmax. A best score below zero counts as best - (1 - alpha) |best|.
// A method without such scores refuses: those that evict, that share a choice, Quest, random.
class Budget {
 public:
  // Throws std::invalid_argument for a negative count.
  constexpr Budget(std::integral auto count) : count_(static_cast<Index>(count)) {
    detail::require_at_least("budget", count_, 0);
  }
  // Throws std::invalid_argument for a fraction outside (0, 1].
  constexpr Budget(std::floating_point auto fraction) : fraction_(static_cast<double>(fraction)) {
    if (!(fraction_ > 0.0 && fraction_ <= 1.0))
      detail::fail_range("budget, as a fraction of the past,", fraction_, "(0, 1]");
  }

  // By a count or a fraction; by mass(); by relative().
  enum class Rule { size, mass, relative };
  // As many keys as it takes.
  static constexpr Index no_ceiling = std::numeric_limits<Index>::max();

  // Throws std::invalid_argument for a share outside (0, 1], a floor below 1, and a ceiling below it.
  static Budget mass(double share, Index floor = 1, Index ceiling = no_ceiling) {
    return {Rule::mass, "budget, as a share of the mass,", share, floor, ceiling};
  }
  // Throws std::invalid_argument for alpha outside (0, 1], a floor below 1, and a ceiling below it.
  static Budget relative(double alpha, Index floor = 1, Index ceiling = no_ceiling) {
    return {Rule::relative, "budget, as a part of the best score,", alpha, floor, ceiling};
  }

  Rule rule() const { return rule_; }  // how it is given
  // Does the number of keys depend on their scores?
  bool by_scores() const { return rule_ != Rule::size; }
  // The share or alpha of a budget by scores.
  double threshold() const { return threshold_; }
  // The fewest of kv_len >= 0 past keys; as many as keys() unless by_scores().
  Index least(Index kv_len) const { return by_scores() ? std::min(floor_, kv_len) : keys(kv_len); }
  // How many of kv_len >= 0 past keys; by_scores(): at most.
  Index keys(Index kv_len) const {
    if (fraction_ == 0.0) return std::min(count_, kv_len);
    const double share = fraction_ * (1.0 + 1e-7);  // decimal fractions, in float even, are rounded
    const auto part = static_cast<Index>(share * static_cast<double>(kv_len));
    return std::min(std::max<Index>(part, 1), kv_len);
  }

 private:
  Budget(Rule rule, const char* name, double threshold, Index floor, Index ceiling)
      : count_(ceiling), rule_(rule), threshold_(threshold), floor_(floor) {
    if (!(threshold > 0.0 && threshold <= 1.0)) detail::fail_range(name, threshold, "(0, 1]");
    detail::require_at_least("the budget's floor", floor, 1);
    detail::require_at_most("the budget's floor", floor, "its ceiling", ceiling);
  }

  Index count_ = 0;  // the ceiling of a budget by scores
  double fraction_ = 0.0;
  Rule rule_ = Rule::size;
  double threshold_ = 0.0;
  Index floor_ = 0;
};

namespace detail {

// Throws std::invalid_argument for a budget by scores.
inline void require_sized(const Budget& budget, std::string_view method) {
  if (budget.by_scores())
    fail_because(std::string(method) + " needs a count or a fraction as its budget: it has no " +
                 (budget.rule() == Budget::Rule::mass ? "mass" : "best score"));
}

}  // namespace detail

// From a score per key to the best keys: steps/top_k.hpp says in which order.
struct TopKOptions {
  Index window = 1;      // neighbouring keys that share their maximum; 1: none (paper)
  Index keep_first = 0;  // attention sinks, inside the budget; 0: paper
  Index keep_last = 0;   // most recent keys, inside the budget; 0: paper
};

}  // namespace QUOKA_ABI
}  // namespace quoka
