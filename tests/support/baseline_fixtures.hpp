// Common code of the baselines' tests: a scorer run on its own, a layer that evicts beside the
// oracle's simulation of it, and comparisons that allow float rounding and nothing else.
#pragma once

#include "support/baseline_oracle.hpp"
#include "support/selector_fixtures.hpp"

#include <quoka/layer/kv_cache.hpp>
#include <quoka/methods/layer_shared.hpp>
#include <quoka/select/selector.hpp>

#include <cmath>
#include <iterator>
#include <memory>
#include <optional>
#include <vector>

namespace quoka_test {

using oracle::Domain;
using quoka::SelectorInput;

inline constexpr std::array domains = {Domain::softmax, Domain::logit};

std::string name_of(Domain x);

// ---- scores -------------------------------------------------------------------------------------

// The scores that a scorer writes. [batch, kv_heads, kv_len]
template <class S>
Tensor3<float> scores_by(const typename S::Options& options, const SelectorInput& input,
                         typename S::State& state) {
  Tensor3<float> scores(input.k.batch(), input.k.heads(), input.k.len());
  scores.setConstant(-12345.0f);  // no score: an element left out is seen
  quoka::SerialExecutor serial;
  S(options).score(input, state, scores, serial);
  return scores;
}
template <class S>
Tensor3<float> scores_by(const typename S::Options& options, const SelectorInput& input) {
  typename S::State state;
  return scores_by<S>(options, input, state);
}

// Masses within `tolerance` of themselves, logits within `tolerance` of the largest; not finite
// where the oracle's is not.
void expect_scores(const Tensor3<float>& scores, const oracle::Scores& expected, Domain domain,
                   double tolerance = 1e-5);

// Masses have a relative error, so they are compared by their logarithm.
oracle::Scores comparable(oracle::Scores scores, Domain domain);

// The best keys by these scores, near ties aside. Options have a budget, keep_first and keep_last.
template <class Options>
void expect_keeps_best(const Selection& keep, const oracle::Scores& scores, Domain domain,
                       const Options& options) {
  expect_same_keys(to_positions(keep), comparable(scores, domain),
                   {.budget = options.budget.count(keep.kv_len()),
                    .keep_first = options.keep_first,
                    .keep_last = options.keep_last});
}

// Scores and keys of ScoredSelector<S> are those that the oracle expects.
template <class S, class T>
void expect_scores_and_keys(const typename S::Options& options, const Tensor4<T>& q,
                            const Tensor4<T>& k, const oracle::Scores& expected, Domain domain,
                            double tolerance = 1e-5) {
  expect_scores(scores_by<S>(options, SelectorInput{q, k, LogitOptions{}}), expected, domain,
                tolerance);
  expect_keeps_best(quoka::ScoredSelector<S>(options).select(q, k, {}), expected, domain, options);
}

// x without row i.
template <class T>
Tensor4<T> without_row(const Tensor4<T>& x, Index i);
// x with row i of every head set to this value.
template <class T>
Tensor4<T> with_row(Tensor4<T> x, Index i, float value);

// ---- drawn calls --------------------------------------------------------------------------------

// Queries and keys of a call of odd sizes: at times with queries of few values, so that sums are
// equal, with rows of zeros, and with one key that is not finite in any head.
template <class T>
struct DrawnCall {
  explicit DrawnCall(Random& random, Index least_keys = 32);

  std::string describe() const;
  // The oracle's scores of the finite keys, and NaN for the other one.
  template <class F>
  oracle::Scores expected(F&& scores) const {
    if (odd < 0) return scores(to_oracle(q), to_oracle(k));
    oracle::Scores all = scores(to_oracle(q), to_oracle(without_row(k, odd)));
    for (auto& heads : all)
      for (auto& head : heads) head.insert(head.begin() + odd, oracle::not_a_number);
    return all;
  }

  Tensor4<T> q, k;
  Index odd = -1;  // the key that is not finite
};

// f(random, call) for some calls of each storage type.
template <class F>
void for_each_drawn_call(std::uint64_t count, F&& f, Index least_keys = 32) {
  for_each_storage([&]<class T>() {
    for (std::uint64_t seed = 0; seed < count; ++seed) {
      Random random(seed);
      const DrawnCall<T> call(random, least_keys);
      SCOPED_TRACE(call.describe());
      f(random, call);
      if (::testing::Test::HasFatalFailure()) return;
    }
  });
}

// ---- layers that share a choice -----------------------------------------------------------------

// Layers [0, layers) of a LayerSharedSelector, and the one choice of their states.
template <class S>
struct Stack {
  Stack(typename S::Options options, Index layers) {
    options.plan.layer_count = layers;
    for (Index layer = 0; layer < layers; ++layer) {
      options.plan.layer = layer;
      selectors.emplace_back(options);
      states.emplace_back().shared = shared;
    }
  }
  template <class T>
  Selection select(Index layer, const Tensor4<T>& q, const Tensor4<T>& k) {
    Selection keep;
    quoka::SerialExecutor serial;
    selectors[uz(layer)].select(SelectorInput{q, k, LogitOptions{}}, states[uz(layer)], keep,
                                serial);
    return keep;
  }
  void truncate(Index len) {
    for (auto& state : states) state.truncate(len);
  }

  std::shared_ptr<quoka::SharedChoice> shared = std::make_shared<quoka::SharedChoice>();
  std::vector<S> selectors;
  std::vector<typename S::State> states;
};

// ---- eviction -----------------------------------------------------------------------------------

// The candidates of an append to `before` and their scores, infinity for forced ones. [candidate]
struct Candidates {
  std::vector<Index> positions;
  std::vector<double> scores;
};
Candidates candidates_of(const oracle::Eviction& before, const oracle::Eviction& after,
                         const oracle::Tensor& q, Index b, Index kv_head, Index kv_heads);

// One layer of EvictingSelector S, and the oracle's simulation of each of its heads.
template <class S, class T>
class EvictingLayer {
 public:
  EvictingLayer(const typename S::Options& options, const oracle::Eviction& simulated, Index batch,
                Index kv_heads, Index dim)
      : selector(options),
        cache(batch, kv_heads, dim, dim, quoka::format_of<T>(), quoka::format_of<T>()),
        heads(uz(batch), std::vector<oracle::Eviction>(uz(kv_heads), simulated)) {}

  // The layer alone.
  void append(const TensorView<const T>& q, const TensorView<const T>& k) {
    cache.append(k, k);
    selector.appended(SelectorInput{q, cache.k(), logits}, state, serial);
  }
  void truncate(Index len) {
    cache.truncate(len);
    state.truncate(len);
  }
  // [batch][kv_head]
  oracle::Positions retained() {
    Selection keep;
    const Tensor4<T> any(cache.k().batch(), cache.k().heads(), 1, cache.k().dim());
    selector.select(SelectorInput{any, cache.k(), logits}, state, keep, serial);
    return to_positions(keep);
  }

  // The layer retains the keys that the oracle retains, given those that the layer retained before,
  // except keys that score as the last kept one to within 1e-5.
  void append_and_compare(const TensorView<const T>& q, const TensorView<const T>& k) {
    append(q, k);
    const oracle::Tensor q_exact = to_oracle(q), k_exact = to_oracle(k);
    const oracle::Positions list = retained();
    for (Index b = 0; b < k_exact.batch; ++b)
      for (Index head = 0; head < k_exact.heads; ++head) {
        oracle::Eviction& simulated = heads[uz(b)][uz(head)];
        const oracle::Eviction before = simulated;
        simulated.append(q_exact, k_exact, b, head);
        const std::vector<Index>& kept = list[uz(b)][uz(head)];
        if (kept == simulated.retained) continue;
        ASSERT_EQ(kept.size(), simulated.retained.size());

        const Candidates c =
            candidates_of(before, simulated, q_exact, b, head, std::ssize(heads[uz(b)]));
        double threshold = oracle::infinity;
        std::vector<Index> swapped;
        for (std::size_t i = 0; i < c.positions.size(); ++i) {
          const auto is_in = [&](const std::vector<Index>& positions) {
            return std::binary_search(positions.begin(), positions.end(), c.positions[i]);
          };
          if (is_in(simulated.retained)) threshold = std::min(threshold, c.scores[i]);
          if (is_in(simulated.retained) != is_in(kept)) swapped.push_back(static_cast<Index>(i));
        }
        EXPECT_TRUE(std::includes(c.positions.begin(), c.positions.end(), kept.begin(), kept.end()))
            << "what was evicted is back";
        for (Index i : swapped)
          EXPECT_LE(std::abs(c.scores[uz(i)] - threshold), 1e-5)  // false for infinity
              << "key " << c.positions[uz(i)] << " of batch " << b << ", head " << head;
        simulated.retained = kept;
      }
  }

  S selector;
  LogitOptions logits;  // attention's
  typename S::State state;
  quoka::KvCache cache;
  std::vector<std::vector<oracle::Eviction>> heads;  // [batch][kv_head]
  quoka::SerialExecutor serial;
};

}  // namespace quoka_test
