// FlashPrefill against the oracle: scores of blocks, the threshold's counts, the budget's ranks, and
// mean keys that grow, are cut and grow again with the keys.

#include <quoka/methods/flash_prefill.hpp>

#include "support/baseline_fixtures.hpp"
#include "support/block_oracle.hpp"

namespace {

using namespace quoka_test;
using quoka::Budget;
using quoka::FlashPrefillOptions;
using quoka::FlashPrefillScorer;
using quoka::FlashPrefillSelector;

Selection select(const FlashPrefillOptions& options, const Rows& q, const Rows& k) {
  return FlashPrefillSelector(options).select(q, k, {});
}

// In the order in which a budget takes them.
std::vector<Index> forced_blocks(const FlashPrefillOptions& options, Index kv_len) {
  const Index own = kv_len / options.block;
  return {0, own, own - 1, own - 2, own - 3, 1};
}

// Every score of a block, up to the set's factor, and the keys, by threshold or by budget.
template <class T>
void expect_agrees_with_oracle(const FlashPrefillOptions& options, const Tensor4<T>& q,
                               const Tensor4<T>& k) {
  const Index kv_len = k.dimension(2), q_len = q.dimension(2), block = options.block;
  SCOPED_TRACE("kv_len " + std::to_string(kv_len) + ", q_len " + std::to_string(q_len) +
               ", block " + std::to_string(block));
  SelectorInput input{q, k, LogitOptions{}};
  FlashPrefillScorer::State state;
  Selection selection;
  FlashPrefillScorer(options).decide(input, state, selection, quoka::SerialExecutor{});
  if (!options.by_threshold() && selection.is_all()) return;  // not scored
  const oracle::Positions keep = to_positions(selection);
  const float* score = state.scores.data();
  for (Index b = 0; b < k.dimension(0); ++b)
    for (Index g = 0; g < k.dimension(1); ++g) {
      const oracle::SetScores exact =
          oracle::flash_prefill_scores(to_oracle(q), to_oracle(k), b, g, block, 0);
      for (const auto& of_set : exact) {
        double total = 0;
        const auto counted = [](float x) { return std::max(0.0, static_cast<double>(x)); };
        for (std::size_t j = 0; j < of_set.size(); ++j) total += counted(score[j]);
        // Weights below 2^-100 do not count, and logits of 700 are rounded.
        for (const double expected : of_set)
          ASSERT_NEAR(counted(*score++), expected * total, (3e-4 * expected + 1e-26) * total);
      }
      double margin = 1;
      const std::vector<Index> expected =
          options.by_threshold()
              ? oracle::keys_of_blocks(
                    oracle::flash_prefill_blocks(exact, q_len, kv_len, block, options.relative, 2,
                                                 4, &margin),
                    block, kv_len)
              : oracle::best_blocks(forced_blocks(options, kv_len), oracle::parts_of_best(exact),
                                    block, kv_len, options.budget.count(kv_len), &margin);
      if (margin < 1e-6) continue;  // float may choose either of two that are nearly equal
      EXPECT_EQ(keep[uz(b)][uz(g)], expected) << "batch " << b << ", head " << g;
    }
}

// ---- against the oracle -------------------------------------------------------------------------

// Chunks and pasts that end within a block, or with one; logits that are far apart; queries and blocks that are not
// finite are left out.
TEST(FlashPrefill, AgreesWithTheOracle) {
  for_each_storage([]<class T>() {
    for (std::uint64_t seed = 0; seed < 40; ++seed) {
      Random random(seed);
      const auto one_of = [&](std::initializer_list<Index> list) {
        return list.begin()[random.below(std::ssize(list))];
      };
      const Index batch = 1 + random.below(2), kv_len = one_of({2, 31, 32, 33, 127, 128, 264, 501}),
                  q_len = one_of({1, 7, 37, 127, 128, 130, 300}), dim = one_of({8, 17, 24});
      auto q = random.tensor<T>(batch, 2 * (1 + random.below(3)), q_len, dim,
                                random.below(5) == 0 ? 30.0 : 4.0),
           k = random.tensor<T>(batch, 2, kv_len, dim, 2.0);
      if (random.below(3) == 0) {
        const float values[] = {not_a_number, infinity, -infinity};
        for (Tensor4<T>* const rows : {&q, &k})
          rows->data()[random.below(rows->size())] = stored<T>(values[random.below(3)]);
      }
      for (const double relative : {0.06, 0.5, 0.0})
        expect_agrees_with_oracle({.budget = Budget::keys(1 + random.below(kv_len)),
                                   .block = one_of({1, 2, 7, 16, 32, 40, 128, kv_len, 300}),
                                   .relative = relative},
                                  q, k);
    }
  });
}

// More rows than one pass takes: a later pass may raise the normaliser that the earlier ones used.
TEST(FlashPrefillSelects, AsTheOracleWhereABlockOfQueriesTakesSeveralPasses) {
  Random random(644);
  auto q = random.tensor<float>(1, 2, 1500, 8, 8.0);
  const auto k = random.tensor<float>(1, 1, 9007, 8);
  for (Index head = 0; head < 2; ++head)
    for (Index i = 1400; i < 1500; ++i)
      for (Index c = 0; c < 8; ++c) q(0, head, i, c) *= 1.5f;
  for (const double relative : {0.3, 0.0})
    expect_agrees_with_oracle({.budget = Budget::keys(7600), .block = 1500, .relative = relative},
                              q, k);
}

// ---- how many -----------------------------------------------------------------------------------

TEST(FlashPrefillSelects, ByCompactAttentionsAlphaMore) {
  EXPECT_EQ(FlashPrefillOptions::compact_attention().relative, 0.06);
  Random random(640);
  const auto q = random.tensor<float>(1, 4, 64, 16, 9.0),
             k = random.tensor<float>(1, 2, 5120, 16, 4.0);
  EXPECT_GT(select(FlashPrefillOptions::compact_attention(), q, k).sum_of_counts(),
            select(FlashPrefillOptions::paper(), q, k).sum_of_counts());
}

// A head without a finite query chooses nothing, and neither does its set of blocks.
TEST(FlashPrefill, AHeadWithoutAQueryHasNoSay) {
  Random random(391);
  Tensor4<float> q = random.tensor<float>(1, 2, 16, 24), one(1, 1, 16, 24);
  const auto k = random.tensor<float>(1, 1, 640, 24);
  for (Index i = 0; i < 16; ++i)
    for (Index c = 0; c < 24; ++c) {
      one(0, 0, i, c) = q(0, 1, i, c);
      q(0, 0, i, c) = not_a_number;
    }
  for (const double relative : {0.0, 0.9}) {
    const quoka::FlashPrefillSelector selector(
        {.budget = Budget::keys(200), .block = 16, .relative = relative});
    EXPECT_EQ(selector.select(q, k, {}), selector.select(one, k, {}));
  }
}

TEST(FlashPrefill, ReadsTheKeysOfAWholeBlockOnce) {
  Random random(645);
  const auto q = random.tensor<Element>(1, 4, 7, 20);
  auto k = random.tensor<Element>(1, 2, 100, 20);
  const auto scores_of = [&](Index kv_len, FlashPrefillScorer::State& state) {
    Selection keep;
    FlashPrefillScorer({.budget = Budget::keys(60), .block = 16})
        .decide({q, Rows(k).slice(0, kv_len), LogitOptions{}}, state, keep, SerialExecutor{});
    const float* const scores = state.scores.data();
    return std::vector<float>(scores, scores + 4 * 7);
  };
  FlashPrefillScorer::State state, fresh;
  const auto scores = scores_of(100, fresh);
  (void)scores_of(89, state);
  for (Index t = 0; t < 80; ++t) k = with_row(std::move(k), t, 1000.0f);
  EXPECT_EQ(scores_of(100, state), scores);
}

TEST(FlashPrefillsState, KeepsAMeanKeyForEachBlock) {
  Random random(648);
  const auto q = random.tensor<float>(1, 4, 7, 20), k = random.tensor<float>(1, 2, 2048, 20);
  FlashPrefillSelector::State state;
  Selection keep;
  FlashPrefillSelector().select({q, k, LogitOptions{}}, state, keep, quoka::SerialExecutor{});
  EXPECT_EQ(state.kept_bytes(), 2 * (2048 / 128) * 20 * 4);
}

}  // namespace
