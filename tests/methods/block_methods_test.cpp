// Methods that choose blocks of keys against their oracles, over drawn calls: FlashPrefill and XAttention; scores of blocks, the
// threshold's counts, the budget's ranks, chunks and pasts that end within a block or with one, rows that are not finite.
// Mean keys that grow, are cut and grow again with the keys: selection_fuzz_test.cpp.

#include <quoka/methods/flash_prefill.hpp>
#include <quoka/methods/xattention.hpp>

#include "support/baseline_fixtures.hpp"
#include "support/block_oracle.hpp"

namespace {

using namespace quoka_test;
using quoka::FlashPrefillOptions;
using quoka::FlashPrefillScorer;
using quoka::FlashPrefillSelector;
using quoka::XAttentionOptions;
using quoka::XAttentionScorer;

// Queries, past keys and the chunk's own, of two KV heads; at times a number of each is not finite.
struct BlockCall {
  StoredRows q, k, chunk;

  BlockCall(Random& random, Index kv_len, Index q_len, double loud) {
    const Index batch = 1 + random.below(2), group = 1 + random.below(3),
                dim = random.one_of(8, 17, 24);
    Tensor4<float> floats[] = {random.tensor<float>(batch, 2 * group, q_len, dim, loud),
                               random.tensor<float>(batch, 2, kv_len, dim, 1.5),
                               random.tensor<float>(batch, 2, q_len, dim, 1.5)};
    if (random.seldom(3))
      for (Tensor4<float>& x : floats)
        x.data()[random.below(x.size())] = random.one_of(not_a_number, infinity, -infinity);
    const Format& format = *every_format()[uz(random.below(3))];
    q = StoredRows(floats[0], format), k = StoredRows(floats[1], format);
    chunk = StoredRows(floats[2], format);
  }
  Index kv_len() const { return k.rows().len(); }
  SelectorInput input(bool with_chunk) const {
    SelectorInput input{q.rows(), k.rows(), LogitOptions{}};
    if (with_chunk) input.chunk_k = chunk.rows();
    return input;
  }
};

// The Selection, and the State with the scores behind it.
template <class Scorer>
Selection decided(const typename Scorer::Options& options, const SelectorInput& input,
                  typename Scorer::State& state) {
  Selection selection;
  Scorer(options).decide(input, state, selection, SerialExecutor{});
  return selection;
}

// expected(b, kv_head, margin): the keys; float may choose either of two that are nearly equal.
void expect_keys(const Selection& selection,
                 const std::function<std::vector<Index>(Index, Index, double&)>& expected) {
  const oracle::Positions keep = to_positions(selection);
  for (Index b = 0; b < selection.batch(); ++b)
    for (Index head = 0; head < selection.heads(); ++head) {
      double margin = 1;
      const std::vector<Index> keys = expected(b, head, margin);
      if (margin < 1e-6) continue;
      EXPECT_EQ(keep[uz(b)][uz(head)], keys) << "[" << b << ", " << head << "]";
    }
}

// ---- FlashPrefill -------------------------------------------------------------------------------

void expect_as_oracle(const FlashPrefillOptions& options, const BlockCall& x) {
  const Index kv_len = x.kv_len(), q_len = x.q.rows().len(), block = options.block;
  SCOPED_TRACE("FlashPrefill, kv_len " + std::to_string(kv_len) + ", q_len " +
               std::to_string(q_len) + ", block " + std::to_string(block));
  FlashPrefillScorer::State state;
  const Selection selection = decided<FlashPrefillScorer>(options, x.input(false), state);
  if (!options.by_threshold() && selection.is_all()) return;  // not scored
  const oracle::Tensor q = to_oracle(x.q.rows()), k = to_oracle(x.k.rows());
  const float* score = state.scores.data();
  expect_keys(selection, [&](Index b, Index head, double& margin) {
    const oracle::SetScores exact = oracle::flash_prefill_scores(q, k, b, head, block, 0);
    for (const auto& of_set : exact) {
      double total = 0;
      const auto counted = [](float weight) { return std::max(0.0, static_cast<double>(weight)); };
      for (std::size_t j = 0; j < of_set.size(); ++j) total += counted(score[j]);
      // Weights below 2^-100 do not count, and logits of 700 are rounded.
      for (const double expected : of_set)
        EXPECT_NEAR(counted(*score++), expected * total, (3e-4 * expected + 1e-26) * total);
    }
    if (options.by_threshold())
      return oracle::keys_of_blocks(oracle::flash_prefill_blocks(exact, q_len, kv_len, block,
                                                                 options.relative, 2, 4, &margin),
                                    block, kv_len);
    const Index own = kv_len / block;
    return oracle::best_blocks({0, own, own - 1, own - 2, own - 3, 1}, oracle::parts_of_best(exact),
                               block, kv_len, options.budget.count(kv_len), &margin);
  });
}

TEST(FlashPrefill, AgreesWithTheOracle) {
  for_each_draw("METHODS", 90, [](Random& random, std::uint64_t) {
    const Index kv_len = random.one_of(2, 31, 32, 33, 127, 128, 264, 501),
                q_len = random.one_of(1, 7, 37, 127, 128, 130, 300);
    const BlockCall x(random, kv_len, q_len, random.seldom(5) ? 30.0 : 4.0);
    for (const double relative : {0.06, 0.5, 0.0})
      expect_as_oracle({.budget = Budget::keys(1 + random.below(kv_len)),
                        .block = random.one_of<Index>({1, 2, 7, 16, 32, 40, 128, kv_len, 300}),
                        .relative = relative},
                       x);
  });
}

// More rows than one pass takes: a later pass may raise the normaliser that the earlier ones used.
TEST(FlashPrefill, AgreesWithTheOracleWhereABlockOfQueriesTakesSeveralPasses) {
  Random random(644);
  const BlockCall x(random, 9007, 1500, 8.0);
  for (const double relative : {0.3, 0.0})
    expect_as_oracle({.budget = Budget::keys(7600), .block = 1500, .relative = relative}, x);
}

TEST(FlashPrefill, SelectsMoreByCompactAttentionsAlpha) {
  EXPECT_EQ(FlashPrefillOptions::compact_attention().relative, 0.06);
  Random random(640);
  const auto q = random.tensor<float>(1, 4, 64, 16, 9.0),
             k = random.tensor<float>(1, 2, 5120, 16, 4.0);
  const auto count_of = [&](const FlashPrefillOptions& options) {
    return FlashPrefillSelector(options).select(q, k, {}).sum_of_counts();
  };
  EXPECT_GT(count_of(FlashPrefillOptions::compact_attention()),
            count_of(FlashPrefillOptions::paper()));
}

// A head without a finite query chooses nothing, and neither does its set of blocks.
TEST(FlashPrefill, AHeadWithoutAQueryHasNoSay) {
  Random random(391);
  Tensor4<float> q = random.tensor<float>(1, 2, 16, 24), one(1, 1, 16, 24);
  const auto k = random.tensor<float>(1, 1, 640, 24);
  one.chip(0, 1) = q.chip(1, 1);
  q.chip(0, 1).setConstant(not_a_number);
  for (const double relative : {0.0, 0.9}) {
    const FlashPrefillSelector selector(
        {.budget = Budget::keys(200), .block = 16, .relative = relative});
    EXPECT_EQ(selector.select(q, k, {}), selector.select(one, k, {}));
  }
}

TEST(FlashPrefill, ReadsTheKeysOfAWholeBlockOnceAndKeepsAMeanOfEach) {
  Random random(645);
  const auto q = random.tensor<float>(1, 4, 7, 20);
  auto k = random.tensor<float>(1, 2, 100, 20);
  const FlashPrefillOptions options{.budget = Budget::keys(60), .block = 16};
  const auto scores_of = [&](Index kv_len, FlashPrefillScorer::State& state) {
    (void)decided<FlashPrefillScorer>(options, {q, Rows(k).slice(0, kv_len), LogitOptions{}},
                                      state);
    return std::vector<float>(state.scores.data(), state.scores.data() + 4 * 7);
  };
  FlashPrefillScorer::State state, fresh;
  const auto scores = scores_of(100, fresh);
  (void)scores_of(89, state);
  for (Index t = 0; t < 80; ++t) k = with_row(std::move(k), t, 1000.0f);
  EXPECT_EQ(scores_of(100, state), scores);
  const auto many = random.tensor<float>(1, 2, 2048, 20);
  FlashPrefillSelector::State of_many;
  Selection keep;
  FlashPrefillSelector().select({q, many, LogitOptions{}}, of_many, keep, SerialExecutor{});
  EXPECT_EQ(of_many.kept_bytes(), 2 * (2048 / 128) * 20 * 4);
}

// ---- XAttention ---------------------------------------------------------------------------------

void expect_as_oracle(const XAttentionOptions& options, const BlockCall& x, bool chunk) {
  const Index kv_len = x.kv_len(), block = options.block, stride = options.stride;
  SCOPED_TRACE("XAttention, kv_len " + std::to_string(kv_len) + ", q_len " +
               std::to_string(x.q.rows().len()) + ", stride " + std::to_string(stride) +
               ", block " + std::to_string(block) + (chunk ? ", with the chunk" : ""));
  XAttentionScorer::State state;
  const Selection selection = decided<XAttentionScorer>(options, x.input(chunk), state);
  if (!options.by_threshold() && selection.is_all()) return;  // not scored
  const oracle::Tensor q = to_oracle(x.q.rows()), past = to_oracle(x.k.rows()),
                       keys = chunk ? oracle::append(past, to_oracle(x.chunk.rows())) : past;
  const float* score = state.scores.data();
  expect_keys(selection, [&](Index b, Index head, double& margin) {
    const oracle::SetScores exact =
        oracle::xattention_scores(q, keys, kv_len, b, head, stride, block, 0);
    for (const auto& of_set : exact) {
      double total =
          0;  // of whole blocks of the past: the scores of their key rows add up to theirs
      for (const double expected : of_set) total += expected;
      for (Index j = 0; j < kv_len / block; ++j) {
        double sum = 0;
        for (Index row = 0; row < block / stride; ++row)
          sum += std::max(0.0, static_cast<double>(score[j * (block / stride) + row]));
        const double expected = total > 0 ? of_set[uz(j)] / total : 0.0;
        EXPECT_NEAR(sum, expected, 2e-5 * expected + 1e-26);
      }
      score += kv_len / stride;
    }
    if (options.by_threshold())
      return oracle::keys_of_blocks(
          oracle::xattention_blocks(exact, kv_len, block, options.mass, &margin), block, kv_len);
    std::vector<Index> forced{0};
    if (kv_len % block != 0) forced.push_back(kv_len / block);
    return oracle::best_blocks(forced, oracle::shares_of_total(exact, kv_len, block), block, kv_len,
                               options.budget.count(kv_len), &margin);
  });
}

TEST(XAttention, AgreesWithTheOracle) {
  for_each_draw("METHODS", 90, [](Random& random, std::uint64_t) {
    const Index kv_len = random.one_of(2, 7, 8, 9, 127, 128, 129, 264, 400, 501),
                q_len = random.one_of(1, 7, 8, 9, 37, 75, 127, 128, 130, 300),
                stride = random.one_of(1, 2, 4, 8, 8, 16, 64),
                block = stride * random.one_of(1, 3, 4, 16);
    const BlockCall x(random, kv_len, q_len, 1.5);
    for (const bool chunk : {false, true})
      for (const double mass : {0.7, 0.9, 0.0})
        expect_as_oracle({.budget = Budget::keys(1 + random.below(kv_len)),
                          .stride = stride,
                          .block = block,
                          .mass = mass},
                         x, chunk);
  });
}

TEST(XAttention, SelectsNoBlockMoreThanTheSumAsksFor) {  // four blocks alike: two are half
  Tensor4<float> q(1, 2, 16, 16), k(1, 2, 64, 16);
  q.setZero(), k.setZero();
  XAttentionScorer::State state;
  const Selection keep =
      decided<XAttentionScorer>({.block = 16, .mass = 0.5}, {q, k, LogitOptions{}}, state);
  EXPECT_EQ(keep.count(0, 0), 32);
}

}  // namespace
