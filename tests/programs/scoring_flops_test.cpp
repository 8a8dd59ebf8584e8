// FLOPs of selecting by formula: the known share of dense attention for each method, and small cases counted by hand.

#include "support/scoring_flops.hpp"

#include "support/fixtures.hpp"

namespace {

using namespace quoka_test;
using namespace quoka;
using quoka_examples::ChunkShape;
using quoka_examples::scoring_flops;

// Qwen3-4B's layer, a chunk of 128, and a past that is long enough for terms without it not to count.
constexpr ChunkShape long_past{
    .q_heads = 32, .kv_heads = 8, .head_dim = 128, .q_len = 128, .kv_len = 1 << 20};

template <class Options>
double share_of_dense(const Options& options) {
  return scoring_flops(options, long_past) / (4.0 * 32 * 128 * 128 * (1 << 20));
}

TEST(ScoringFlops, OfALongPastAreTheKnownSharesOfDenseAttention) {
  EXPECT_NEAR(share_of_dense(QuokaOptions{}), 1.0 / 64, 1e-5);
  EXPECT_NEAR(share_of_dense(MassOptions{}), 1.0 / 4, 2e-5);  // and the chunk's own keys
  EXPECT_NEAR(share_of_dense(SampleAttentionOptions{}), 1.0 / 16, 1e-5);
  EXPECT_NEAR(share_of_dense(SparqOptions{}), 1.0 / 4, 1e-5);
  EXPECT_NEAR(share_of_dense(LokiOptions{}), 1.0 / 4, 1e-4);
  EXPECT_NEAR(share_of_dense(XAttentionOptions{}), 1.0 / 16, 1e-4);
  EXPECT_NEAR(share_of_dense(FlashPrefillOptions{}), 1.0 / 256, 1e-5);
  EXPECT_NEAR(share_of_dense(OracleOptions{}), 1.0 / 2, 1e-5);
  // Logits of one query per KV head, of group * q_len rows: 1/512.
  EXPECT_NEAR(share_of_dense(QuestOptions{}), 1.0 / 512 / 16, 1e-5);
}

constexpr ChunkShape small{.q_heads = 4, .kv_heads = 2, .head_dim = 3, .q_len = 7, .kv_len = 50};

TEST(ScoringFlops, OfQuokaCountRankingOnlyWhereQueriesAreRanked) {
  QuokaOptions options{.budget = Budget::keys(10), .n_queries = 5};
  const double keys = 2 * 2 * 5 * 50 * 3, aggregate = 4 * 4 * 5 * 3, rank = 5 * 4 * 7 * 3;
  EXPECT_EQ(scoring_flops(options, small), keys + aggregate + rank);
  options = {.budget = Budget::keys(10), .n_queries = 16};  // all 7 score
  EXPECT_EQ(scoring_flops(options, small), 2 * 2 * 7 * 50 * 3 + 4 * 4 * 7 * 3);
  // 5 of each of 4 heads, with 50 keys and half of the chunk's 7.
  EXPECT_EQ(scoring_flops(MassOptions{.budget = Budget::keys(10), .queries = 10}, small),
            4 * 5 * (2 * 50 + 7) * 3);
}

TEST(ScoringFlops,
     OfBlocksRoundUp) {  // 7 queries and 57 keys in rows of 4, 50 keys in blocks of 16
  EXPECT_EQ(scoring_flops(XAttentionOptions{.budget = Budget::keys(10), .stride = 4}, small),
            2 * 4 * 2 * 15 * 4 * 3);
  EXPECT_EQ(scoring_flops(FlashPrefillOptions{.budget = Budget::keys(10), .block = 16}, small),
            2 * 4 * 7 * 4 * 3 + 2 * 7 * 3);
  EXPECT_EQ(scoring_flops(XAttentionOptions{.stride = 4, .mass = 0.9}, small),
            2 * 4 * 2 * 15 * 4 * 3);
  EXPECT_EQ(scoring_flops(XAttentionOptions{.budget = Budget::keys(50)}, small), 0.0);
}

TEST(ScoringFlops, OfEvictionDoNotGrowWithThePast) {
  EXPECT_EQ(scoring_flops(KeyDiffOptions{.budget = Budget::keys(10)}, small), 4 * 2 * 17 * 3);
  EXPECT_EQ(scoring_flops(SnapKvOptions{.budget = Budget::keys(10), .window_size = 5}, small),
            2 * 4 * 5 * 17 * 3);
}

TEST(ScoringFlops, OfASharedChoiceAreSpentWhereItIsMade) {
  TidalDecodeOptions options{.budget = Budget::keys(10), .plan = {.layer = 2, .layer_count = 32}};
  EXPECT_EQ(scoring_flops(options, small), 2 * 4 * 7 * 50 * 3);
  options.plan.layer = 3;
  EXPECT_EQ(scoring_flops(options, small), 0.0);
  options.plan.layer = 13;  // 0.4 of 32
  EXPECT_EQ(scoring_flops(options, small), 2 * 4 * 7 * 50 * 3);
}

TEST(ScoringFlops, AreNoneWhereNothingIsScored) {
  EXPECT_EQ(scoring_flops(QuokaOptions{.budget = Budget::keys(50)}, small), 0.0);
  EXPECT_EQ(scoring_flops(QuokaOptions{.budget = Budget::keys(0)}, small), 0.0);
  EXPECT_EQ(scoring_flops(RandomOptions{.budget = Budget::keys(10)}, small), 0.0);
  EXPECT_EQ(scoring_flops(FirstRecentOptions{.budget = Budget::keys(10)}, small), 0.0);
  EXPECT_EQ(scoring_flops(DenseSelector::Options{}, small), 0.0);
}

}  // namespace
