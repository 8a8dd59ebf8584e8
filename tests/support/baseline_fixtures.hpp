// What the tests of the baselines share: a scorer run on its own, a layer that evicts beside the
// oracle's simulation of it, and comparisons that forgive what float rounding may do, and nothing
// else.
#pragma once

#include "support/baseline_oracle.hpp"
#include "support/selector_fixtures.hpp"

#include <quoka/cache/kv_cache.hpp>
#include <quoka/select/selector.hpp>
#include <quoka/select/layer_shared.hpp>

#include <cmath>
#include <iterator>
#include <memory>
#include <vector>

namespace quoka_test {

using quoka::Domain;
using quoka::SelectorInput;

inline constexpr std::array domains = {Domain::softmax, Domain::logit};

inline oracle::Domain to_oracle(Domain x) {
  return x == Domain::softmax ? oracle::Domain::softmax : oracle::Domain::logit;
}
inline std::string name_of(Domain x) { return x == Domain::softmax ? "softmax" : "logit"; }

// ---- scores -------------------------------------------------------------------------------------

// What a scorer writes. [batch, kv_heads, kv_len]
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
inline void expect_scores(const Tensor3<float>& scores, const oracle::Scores& expected,
                          Domain domain, double tolerance = 1e-5) {
  ASSERT_EQ(scores.dimension(0), std::ssize(expected));
  for (Index b = 0; b < scores.dimension(0); ++b) {
    ASSERT_EQ(scores.dimension(1), std::ssize(expected[uz(b)]));
    for (Index head = 0; head < scores.dimension(1); ++head) {
      const std::vector<double>& exact = expected[uz(b)][uz(head)];
      ASSERT_EQ(scores.dimension(2), std::ssize(exact));
      double largest = 0;
      for (double x : exact)
        if (std::isfinite(x)) largest = std::max(largest, std::abs(x));
      for (Index t = 0; t < std::ssize(exact); ++t) {
        const double score = static_cast<double>(scores(b, head, t)), x = exact[uz(t)];
        if (!std::isfinite(x)) {
          ASSERT_FALSE(std::isfinite(score)) << "key " << t;
          continue;
        }
        const double size = domain == Domain::softmax ? x : largest;
        ASSERT_NEAR(score, x, tolerance * size + 1e-30)
            << name_of(domain) << " score of [" << b << ", " << head << ", " << t << "]";
      }
    }
  }
}

// Masses have a relative error, so they are compared by their logarithm.
inline oracle::Scores comparable(oracle::Scores scores, Domain domain) {
  if (domain == Domain::logit) return scores;
  for (auto& heads : scores)
    for (auto& head : heads)
      for (double& x : head) x = std::log(x);
  return scores;
}

// The best keys by these scores, near ties aside. Options have a budget and top_k.
template <class Options>
void expect_keeps_best(const Selection& keep, const oracle::Scores& scores, Domain domain,
                       const Options& options) {
  expect_same_keys(to_positions(keep),
                   oracle::window_max(comparable(scores, domain), options.top_k.window),
                   {.budget = options.budget.keys(keep.kv_len()),
                    .keep_first = options.top_k.keep_first,
                    .keep_last = options.top_k.keep_last});
}

// Scores and keys of ScoredSelector<S> are those that the oracle expects.
template <class S, class T>
void expect_scores_and_keys(const typename S::Options& options, const Tensor4<T>& q,
                            const Tensor4<T>& k, const oracle::Scores& expected, Domain domain,
                            double tolerance = 1e-5) {
  expect_scores(scores_by<S>(options, SelectorInput{q, k}), expected, domain, tolerance);
  expect_keeps_best(quoka::ScoredSelector<S>(options).select(q, k), expected, domain, options);
}

// Row i of every head of `to` becomes row j of `from`.
template <class T>
void copy_row(const Tensor4<T>& from, Index j, Tensor4<T>& to, Index i) {
  for (Index b = 0; b < to.dimension(0); ++b)
    for (Index head = 0; head < to.dimension(1); ++head)
      std::copy_n(&from(b, head, j, 0), to.dimension(3), &to(b, head, i, 0));
}
// The first `cut` rows of one, the others of the other.
template <class T>
Tensor4<T> joined(const Tensor4<T>& first, Index cut, Tensor4<T> then) {
  for (Index i = 0; i < cut; ++i) copy_row(first, i, then, i);
  return then;
}
// x without row i.
template <class T>
Tensor4<T> without_row(const Tensor4<T>& x, Index i) {
  Tensor4<T> rest(x.dimension(0), x.dimension(1), x.dimension(2) - 1, x.dimension(3));
  for (Index from = 0, to = 0; from < x.dimension(2); ++from)
    if (from != i) copy_row(x, from, rest, to++);
  return rest;
}
// x with row i of every head set to this value.
template <class T>
Tensor4<T> with_row(Tensor4<T> x, Index i, float value) {
  for (Index b = 0; b < x.dimension(0); ++b)
    for (Index head = 0; head < x.dimension(1); ++head)
      for (Index c = 0; c < x.dimension(3); ++c) x(b, head, i, c) = stored<T>(value);
  return x;
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
    selectors[uz(layer)].select(SelectorInput{q, k}, states[uz(layer)], keep, serial);
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

// What the candidates of an append to `before` were and scored; forced ones infinity. [candidate]
struct Candidates {
  std::vector<Index> positions;
  std::vector<double> scores;
};
inline Candidates candidates_of(const oracle::Eviction& before, const oracle::Eviction& after,
                                const oracle::Tensor& q, Index b, Index kv_head, Index kv_heads) {
  Candidates c{before.retained, {}};
  for (Index t = std::ssize(before.keys); t < std::ssize(after.keys); ++t) c.positions.push_back(t);
  std::vector<oracle::Row> rows;
  for (Index t : c.positions) rows.push_back(after.keys[uz(t)]);
  if (after.method == oracle::Evict::keydiff) {
    c.scores = oracle::keydiff_scores(rows);
    return c;
  }
  const Index w = std::min(after.window, q.len), group = q.heads / kv_heads;
  std::vector<std::vector<oracle::Row>> window;
  for (Index r = 0; r < group; ++r)
    window.push_back(
        oracle::group_rows(q, b, kv_head * group + r, q.heads, oracle::range(q.len - w, q.len)));
  c.scores = oracle::snapkv_scores(window, rows, after.kernel, after.scale);
  for (double& x : c.scores) x = std::log(x);  // masses have a relative error
  c.scores.resize(rows.size(), oracle::infinity);
  return c;
}

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
    selector.appended(SelectorInput{q, cache.k()}, state, serial);
  }
  void truncate(Index len) {
    cache.truncate(len);
    state.truncate(len);
  }
  // [batch][kv_head]
  oracle::Positions retained() {
    Selection keep;
    const Tensor4<T> any(cache.k().batch(), cache.k().heads(), 1, cache.k().dim());
    selector.select(SelectorInput{any, cache.k()}, state, keep, serial);
    return to_positions(keep);
  }

  // The layer retains what the oracle does, given what the layer retained before, but for keys that
  // score as the last one kept does, to within 1e-5.
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
  typename S::State state;
  quoka::KvCache cache;
  std::vector<std::vector<oracle::Eviction>> heads;  // [batch][kv_head]
  quoka::SerialExecutor serial;
};

}  // namespace quoka_test
