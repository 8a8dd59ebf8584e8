// KeyDiff and SnapKV against the oracle over drawn sequences: chunks of any length, with queries and without, rows that are
// not finite or zero, forced keys, any budget, and cuts in the middle of a chunk. Executors, layouts, formats and failures:
// selection_fuzz_test.cpp.

#include <quoka/layer/kv_cache.hpp>
#include <quoka/methods/keydiff.hpp>
#include <quoka/methods/snapkv.hpp>

#include "support/baseline_oracle.hpp"
#include "support/float_bounds.hpp"
#include "support/selector_fixtures.hpp"
#include "support/world.hpp"

namespace {

using namespace quoka_test;
using quoka::SelectorInput;

constexpr Index kv_heads = 2;

// A method, its options, the oracle of them, and a score's largest error, given all candidates' scores, the heads of a
// group and scale |q| |k| at most.
struct KeyDiff {
  using Eviction = quoka::KeyDiffEviction;
  // The shorter the average of unit keys, the more rounding turns it. Its length is the mean cosine with it.
  static double error(const quoka::KeyDiffOptions&, const std::vector<double>& scores, double,
                      Index, double) {
    double cosines = 0;
    for (const double x : scores)
      if (std::isfinite(x)) cosines -= x;
    return 4e-7 * static_cast<double>(scores.size()) / std::abs(cosines);
  }
  static quoka::KeyDiffOptions options(Random&) { return {}; }
  static oracle::Eviction oracle_of(const quoka::KeyDiffOptions&) { return {}; }
};
struct SnapKv {
  using Eviction = quoka::SnapKvEviction;
  // The mean over heads and neighbours of sums over a window of queries.
  static double error(const quoka::SnapKvOptions& options, const std::vector<double>& scores,
                      double score, Index group, double size) {
    if (!(score > 0)) return 1e-12;
    const Index keys = std::ssize(scores), window = std::min(options.window_size, keys);
    const double of_row = score / static_cast<double>(window);
    return drawn_mass_error(keys, group * window, size, of_row) * score + 1e-12;
  }
  static quoka::SnapKvOptions options(Random& random) {
    return {.window_size = random.one_of(1, 8, 16, 32, 64, 1000),
            .kernel_size = 1 + 2 * random.below(4)};
  }
  static oracle::Eviction oracle_of(const quoka::SnapKvOptions& options) {
    return {.method = oracle::Evict::snapkv,
            .window = options.window_size,
            .kernel = options.kernel_size};
  }
};

// The largest error of a score, given those of all candidates.
using ScoreError = std::function<double(const std::vector<double>& scores, double score)>;

// The oracle's keys, except swaps of keys that score as the last kept one.
void expect_retained(const std::vector<Index>& kept, const oracle::Eviction& simulated,
                     const oracle::Candidates& c, const ScoreError& error) {
  if (kept == simulated.retained) return;
  ASSERT_TRUE(std::includes(c.positions.begin(), c.positions.end(), kept.begin(), kept.end()))
      << "what was evicted is back";
  const auto at = [&](Index t) {
    return std::lower_bound(c.positions.begin(), c.positions.end(), t) - c.positions.begin();
  };
  const Index end = std::ssize(c.positions) - c.forced;
  expect_near_ties(
      kept, simulated.retained, [&](Index t) { return c.scores[uz(at(t))]; },
      [&](double threshold) { return 4 * error(c.scores, threshold); },
      [&](Index t) { return simulated.keep_first <= at(t) && at(t) < end; });
}

// The scores of all candidates of an append, before it.
template <class Method>
void expect_scores(const typename Method::Eviction::Options& options, const SelectorInput& input,
                   Index b, Index head, const oracle::Candidates& c, const ScoreError& error) {
  const std::vector<Position> candidates(c.positions.begin(), c.positions.end());
  typename Method::Eviction::Scratch scratch;
  std::vector<float> scores(candidates.size(), -12345.0f);
  const Index forced =
      typename Method::Eviction(options).score(input, b, head, candidates, scores, scratch);
  // Without queries keys are dropped by age: the last ones stay, as many as there is room for.
  if (input.q.len() == 0 && forced == std::ssize(scores)) return;
  ASSERT_EQ(forced, c.forced);
  for (std::size_t i = 0; i < scores.size() - uz(forced); ++i) {
    const double exact = c.scores[i];
    if (std::isfinite(exact))
      ASSERT_NEAR(double{scores[i]}, exact, error(c.scores, exact)) << i;
    else
      ASSERT_FALSE(std::isfinite(scores[i])) << i;
  }
}

template <class Method>
void expect_as_oracle(Random& random) {
  using Selector = quoka::EvictingSelector<typename Method::Eviction>;
  auto options = Method::options(random);
  const Index batch = 1 + random.below(2), group = 1 + random.below(3),
              dim = random.one_of(20, 1, 3, 17, 64, 100), len = 40 + random.below(160),
              longest = 1 + random.below(70);
  options.budget = Budget::keys(random.one_of(Index{31}, Index{0}, Index{1}, Index{7}, Index{8},
                                              Index{9}, Index{64}, len - 1, len));
  if (random.seldom(3)) options.keep_first = 1 + random.below(6);
  const Format& format = *every_format()[uz(random.below(3))];
  auto floats_q = random.tensor<float>(batch, kv_heads * group, len, dim),
       floats_k = random.tensor<float>(batch, kv_heads, len, dim);
  for (Tensor4<float>* const x : {&floats_q, &floats_k})
    for (Index odd = random.seldom(2) ? 1 + random.below(4) : 0; odd > 0; --odd)
      x->data()[random.below(x->size())] = random.one_of(not_a_number, infinity, -infinity);
  if (random.seldom(3)) floats_k.chip(random.below(len), 2).setZero();
  const StoredRows q(floats_q, format), k(floats_k, format);
  LogitOptions logits;
  if (random.seldom(3)) logits.scale = 0.6f;

  const auto longest_row = [](const StoredRows& rows) {
    const oracle::Tensor x = to_oracle(rows.rows());
    double most = 0;
    for (Index b = 0; b < x.batch; ++b)
      for (Index head = 0; head < x.heads; ++head)
        for (Index i = 0; i < x.len; ++i)
          if (oracle::is_finite(x.row(b, head, i)))
            most = std::max(most, oracle::norm(x.row(b, head, i)));
    return most;
  };
  const double size = double{logits.scale_of(dim)} * longest_row(q) * longest_row(k);
  const ScoreError error = [&](const std::vector<double>& scores, double score) {
    return Method::error(options, scores, score, group, size);
  };

  const Selector selector(options);
  typename Selector::State state;
  quoka::KvCache cache(batch, kv_heads, dim, dim, format, format);
  const SerialExecutor serial;
  oracle::Eviction first = Method::oracle_of(options);
  first.budget = options.budget.count(len), first.keep_first = options.keep_first;
  if (logits.scale) first.scale = double{*logits.scale};
  std::vector<oracle::Eviction> heads(uz(batch * kv_heads), first);
  const auto retained_by = [&](typename Selector::State& of) {
    Selection keep;
    selector.select({q.rows(1), cache.k(), logits}, of, keep, serial);
    return to_positions(keep);
  };
  const auto append = [&](Index begin, Index n, bool asks) {
    SCOPED_TRACE(std::to_string(n) + " keys from " + std::to_string(begin) + " on");
    const Rows chunk = k.rows().slice(begin, n),
               queries = asks ? q.rows().slice(begin, n) : q.rows().slice(0, 0);
    const oracle::Tensor exact_q = to_oracle(queries), exact_k = to_oracle(chunk);
    cache.append(chunk, chunk);
    const SelectorInput input{queries, cache.k(), logits};
    selector.appended(input, state, serial);
    const oracle::Positions kept = retained_by(state);
    for (Index b = 0; b < batch; ++b)
      for (Index head = 0; head < kv_heads; ++head) {
        oracle::Eviction& simulated = heads[uz(b * kv_heads + head)];
        const oracle::Candidates c = simulated.append(exact_q, exact_k, b, head);
        expect_scores<Method>(options, input, b, head, c, error);
        expect_retained(kept[uz(b)][uz(head)], simulated, c, error);
        simulated.retained = kept[uz(b)][uz(head)];
      }
  };
  Index cuts = 3;
  for (Index begin = 0, n = 0; begin < len && !has_failed(); begin += n) {
    const std::vector<oracle::Eviction> before = heads;
    n = std::min(1 + random.below(longest), len - begin);
    append(begin, n, !random.seldom(6));
    EXPECT_GE(state.kept_bytes(), batch * kv_heads * Index{sizeof(Position)} *
                                      (cache.len() + std::ssize(heads[0].retained)));
    if (begin == 0 && cuts == 3)  // a position for each key, and one for each candidate
      EXPECT_EQ(state.kept_bytes(), batch * kv_heads * Index{sizeof(Position)} * 2 * n);
    if (cuts == 0 || !random.seldom(4)) continue;
    // Inside the chunk: as before it, plus its part.
    --cuts, n = random.below(n);
    cache.truncate(begin + n), state.truncate(begin + n);
    for (std::size_t i = 0; i < heads.size(); ++i) {
      heads[i].retained = before[i].retained;
      for (Index t = begin; t < begin + n; ++t) heads[i].retained.push_back(t);
      heads[i].keys.resize(uz(begin + n));
      EXPECT_EQ(retained_by(state)[i / uz(kv_heads)][i % uz(kv_heads)], heads[i].retained);
    }
  }
  // A State without appended keys takes all keys as one chunk without queries.
  typename Selector::State untold;
  const oracle::Positions kept = retained_by(untold);
  for (Index b = 0; b < batch; ++b)
    for (Index head = 0; head < kv_heads; ++head) {
      oracle::Eviction simulated = first;
      const oracle::Candidates c =
          simulated.append(oracle::Tensor(batch, kv_heads, 0, dim), to_oracle(cache.k()), b, head);
      expect_retained(kept[uz(b)][uz(head)], simulated, c, error);
    }
}

TEST(KeyDiff, RetainsWhatTheOracleDoes) {
  for_each_draw("METHODS", 50,
                [](Random& random, std::uint64_t) { expect_as_oracle<KeyDiff>(random); });
}
TEST(SnapKv, RetainsWhatTheOracleDoes) {
  for_each_draw("METHODS", 50,
                [](Random& random, std::uint64_t) { expect_as_oracle<SnapKv>(random); });
}

}  // namespace
