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

// The oracle's scores of the query blocks of each KV head.
struct ScoresOfSets {
  template <class F>
  ScoresOfSets(const oracle::Tensor& k, F&& scores) : heads(k.heads) {
    for (Index b = 0; b < k.batch; ++b)
      for (Index head = 0; head < heads; ++head) all.push_back(scores(b, head));
  }
  const oracle::SetScores& of(Index b, Index head) const { return all[uz(b * heads + head)]; }

  Index heads;
  std::vector<oracle::SetScores> all;
};

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

// By each threshold, and by the budget (0).
void expect_as_oracle(FlashPrefillOptions options, const BlockCall& x,
                      std::initializer_list<double> thresholds) {
  const Index kv_len = x.kv_len(), q_len = x.q.rows().len(), block = options.block;
  SCOPED_TRACE("FlashPrefill, kv_len " + std::to_string(kv_len) + ", q_len " +
               std::to_string(q_len) + ", block " + std::to_string(block));
  const oracle::Tensor q = to_oracle(x.q.rows()), k = to_oracle(x.k.rows());
  const ScoresOfSets scores(k, [&](Index b, Index head) {
    return oracle::flash_prefill_scores(q, k, b, head, block, 0);
  });
  for (const double relative : thresholds) {
    options.relative = relative;
    FlashPrefillScorer::State state;
    const Selection selection = decided<FlashPrefillScorer>(options, x.input(false), state);
    if (!options.by_threshold() && selection.is_all()) continue;  // not scored
    const float* score = state.scores.data();
    expect_keys(selection, [&](Index b, Index head, double& margin) {
      const oracle::SetScores& exact = scores.of(b, head);
      for (const auto& of_set : exact) {
        double total = 0;
        const auto counted = [](float weight) {
          return std::max(0.0, static_cast<double>(weight));
        };
        for (std::size_t j = 0; j < of_set.size(); ++j) total += counted(score[j]);
        // Weights below 2^-100 do not count, and logits of 700 are rounded.
        for (const double expected : of_set)
          EXPECT_NEAR(counted(*score++), expected * total, (3e-4 * expected + 1e-26) * total);
      }
      if (options.by_threshold())
        return oracle::keys_of_blocks(
            oracle::flash_prefill_blocks(exact, q_len, kv_len, block, relative, 2, 4, &margin),
            block, kv_len);
      const Index own = kv_len / block;
      return oracle::best_blocks({0, own, own - 1, own - 2, own - 3, 1},
                                 oracle::parts_of_best(exact), block, kv_len,
                                 options.budget.count(kv_len), &margin);
    });
  }
}

TEST(FlashPrefill, AgreesWithTheOracle) {
  for_each_draw("METHODS", 90, [](Random& random, std::uint64_t) {
    const Index kv_len = random.one_of(2, 31, 32, 33, 127, 128, 264, 501),
                q_len = random.one_of(1, 1, 7, 37, 127, 128, 130, 300);
    const BlockCall x(random, kv_len, q_len, random.seldom(5) ? 30.0 : 4.0);
    expect_as_oracle({.budget = Budget::keys(1 + random.below(kv_len)),
                      .block = random.one_of<Index>({1, 2, 7, 16, 32, 40, 128, kv_len, 300})},
                     x, {0.06, 0.5, 0.0});
  });
}

// More rows than one pass takes: a later pass may raise the normaliser that the earlier ones used.
TEST(FlashPrefill, AgreesWithTheOracleWhereABlockOfQueriesTakesSeveralPasses) {
  Random random(644);
  const BlockCall x(random, 9007, 1500, 8.0);
  expect_as_oracle({.budget = Budget::keys(7600), .block = 1500}, x, {0.3, 0.0});
}

TEST(FlashPrefill, ThresholdsAreThoseOfThePapers) {
  EXPECT_EQ(FlashPrefillOptions::compact_attention().relative, 0.06);
  EXPECT_GT(FlashPrefillOptions::paper().relative, 0.06);
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

void expect_as_oracle(XAttentionOptions options, const BlockCall& x, bool chunk,
                      std::initializer_list<double> masses) {
  const Index kv_len = x.kv_len(), block = options.block, stride = options.stride;
  SCOPED_TRACE("XAttention, kv_len " + std::to_string(kv_len) + ", q_len " +
               std::to_string(x.q.rows().len()) + ", stride " + std::to_string(stride) +
               ", block " + std::to_string(block) + (chunk ? ", with the chunk" : ""));
  const oracle::Tensor q = to_oracle(x.q.rows()), past = to_oracle(x.k.rows()),
                       keys = chunk ? oracle::append(past, to_oracle(x.chunk.rows())) : past;
  const ScoresOfSets scores(keys, [&](Index b, Index head) {
    return oracle::xattention_scores(q, keys, kv_len, b, head, stride, block, 0);
  });
  for (const double mass : masses) {
    options.mass = mass;
    XAttentionScorer::State state;
    const Selection selection = decided<XAttentionScorer>(options, x.input(chunk), state);
    if (!options.by_threshold() && selection.is_all()) continue;  // not scored
    const float* score = state.scores.data();
    expect_keys(selection, [&](Index b, Index head, double& margin) {
      const oracle::SetScores& exact = scores.of(b, head);
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
            oracle::xattention_blocks(exact, kv_len, block, mass, &margin), block, kv_len);
      std::vector<Index> forced{0};
      if (kv_len % block != 0) forced.push_back(kv_len / block);
      return oracle::best_blocks(forced, oracle::shares_of_total(exact, kv_len, block), block,
                                 kv_len, options.budget.count(kv_len), &margin);
    });
  }
}

TEST(XAttention, AgreesWithTheOracle) {
  for_each_draw("METHODS", 90, [](Random& random, std::uint64_t) {
    const Index kv_len = random.one_of(2, 7, 8, 9, 127, 128, 129, 264, 400, 501),
                q_len = random.one_of(1, 7, 8, 9, 37, 75, 127, 128, 130, 300),
                stride = random.one_of(1, 2, 4, 8, 8, 16, 64),
                block = stride * random.one_of(1, 3, 4, 16);
    const BlockCall x(random, kv_len, q_len, 1.5);
    for (const bool chunk : {false, true})
      expect_as_oracle(
          {.budget = Budget::keys(1 + random.below(kv_len)), .stride = stride, .block = block}, x,
          chunk, {0.7, 0.9, 0.0});
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

// What lies beyond is refused: select/refusals_test.cpp.
TEST(BlockMethods, TakeBothEndsOfAThresholdsRange) {
  for (const double end : {0.0, 1.0}) {
    EXPECT_NO_THROW(FlashPrefillSelector({.relative = end}));
    EXPECT_NO_THROW(quoka::XAttentionSelector({.mass = end}));
  }
}

}  // namespace
