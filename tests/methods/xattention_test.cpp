// XAttention against the oracle: scores of blocks, the threshold's counts, the budget's ranks, rows
// that are cut, the chunk's own keys.

#include <quoka/kernels/byte_formats.hpp>
#include <quoka/layer/chunked_prefill.hpp>
#include <quoka/layer/ragged.hpp>
#include <quoka/methods/xattention.hpp>

#include "support/baseline_fixtures.hpp"
#include "support/block_oracle.hpp"

namespace {

using namespace quoka_test;
using quoka::Budget;
using quoka::XAttentionOptions;
using quoka::XAttentionScorer;
using quoka::XAttentionSelector;

// Queries, past keys, and the chunk's own.
template <class T>
struct Case {
  Case(Random& random, Index batch, Index group, Index kv_len, Index q_len, Index dim,
       double scale = 1.5)
      : q(random.tensor<T>(batch, 2 * group, q_len, dim, scale)),
        k(random.tensor<T>(batch, 2, kv_len, dim, scale)),
        chunk(random.tensor<T>(batch, 2, q_len, dim, scale)) {}

  SelectorInput input(bool with_chunk) const {
    SelectorInput input{q, k, LogitOptions{}};
    if (with_chunk) input.chunk_k = chunk;
    return input;
  }
  oracle::Tensor keys(bool with_chunk) const {
    return with_chunk ? oracle::append(to_oracle(k), to_oracle(chunk)) : to_oracle(k);
  }

  Tensor4<T> q, k, chunk;
};

Selection select(const XAttentionOptions& options, const SelectorInput& input) {
  XAttentionSelector::State state;
  Selection keep;
  XAttentionSelector(options).select(input, state, keep, quoka::SerialExecutor{});
  return keep;
}

// Every score of a block, and the keys, by threshold or by budget.
template <class T>
void expect_agrees_with_oracle(const XAttentionOptions& options, const Case<T>& x, bool chunk) {
  const Index kv_len = x.k.dimension(2), q_len = x.q.dimension(2), block = options.block;
  SCOPED_TRACE("kv_len " + std::to_string(kv_len) + ", q_len " + std::to_string(q_len) +
               ", stride " + std::to_string(options.stride) + ", block " + std::to_string(block) +
               (chunk ? ", with the chunk" : ""));
  SelectorInput input = x.input(chunk);
  XAttentionScorer::State state;
  Selection selection;
  XAttentionScorer(options).decide(input, state, selection, quoka::SerialExecutor{});
  if (!options.by_threshold() && selection.is_all()) return;  // not scored
  const oracle::Positions keep = to_positions(selection);
  const float* score = state.blocks.scores.data();
  const oracle::Tensor q = to_oracle(x.q), keys = x.keys(chunk);
  for (Index b = 0; b < x.k.dimension(0); ++b)
    for (Index g = 0; g < 2; ++g) {
      const oracle::SetScores exact =
          oracle::xattention_scores(q, keys, kv_len, b, g, options.stride, block, 0);
      for (const auto& of_set : exact)
        for (const double expected : of_set)
          ASSERT_NEAR(static_cast<double>(*score++), expected, 2e-5 * expected + 1e-30);
      double margin = 1;
      std::vector<Index> expected;
      if (options.by_threshold()) {
        expected = oracle::keys_of_blocks(
            oracle::xattention_blocks(exact, q_len, kv_len, block, options.mass, &margin), block,
            kv_len);
      } else {
        std::vector<Index> forced{0};
        if (kv_len % block != 0) forced.push_back(kv_len / block);
        expected = oracle::best_blocks(forced, oracle::shares_of_total(exact, kv_len, block), block,
                                       kv_len, options.budget.count(kv_len), &margin);
      }
      ASSERT_GT(margin, 1e-6) << "another seed";
      EXPECT_EQ(keep[uz(b)][uz(g)], expected) << "batch " << b << ", head " << g;
    }
}

// ---- against the oracle -------------------------------------------------------------------------

TEST(XAttention, AgreesWithTheOracle) {
  for_each_storage([]<class T>() {
    Random random(601);
    for (const Index group : {1, 3})
      for (const Index kv_len : {130, 256, 501}) {
        const Case<T> x(random, 2, group, kv_len, 37, 24);
        for (const bool chunk : {false, true})
          for (const double mass : {0.7, 0.9, 0.0}) {
            expect_agrees_with_oracle({.budget = Budget::keys(129), .mass = mass}, x, chunk);
            expect_agrees_with_oracle(
                {.budget = Budget::keys(129), .stride = 4, .block = 16, .mass = mass}, x, chunk);
          }
      }
  });
}

TEST(XAttentionSelects, AsTheOracleForEveryStrideAndBlock) {
  Random random(602);
  const Case<float> x(random, 1, 2, 269, 75, 20);
  for (const bool chunk : {false, true})
    for (const auto& [stride, block] : {std::array<Index, 2>{1, 1},
                                        {1, 16},
                                        {1, 128},
                                        {2, 6},
                                        {8, 8},
                                        {8, 128},
                                        {16, 16},
                                        {16, 128},
                                        {16, 256},
                                        {64, 64}})
      for (const double mass : {0.8, 0.0})
        expect_agrees_with_oracle(
            {.budget = Budget::keys(100), .stride = stride, .block = block, .mass = mass}, x,
            chunk);
}

// Chunks and pasts that end within a row, within a block, or with one.
TEST(XAttentionSelects, AsTheOracleForEveryLength) {
  Random random(603);
  for (const Index kv_len : {2, 7, 8, 9, 127, 128, 129, 264, 400})
    for (const Index q_len : {1, 7, 8, 9, 127, 128, 130, 300}) {
      const Case<float> x(random, 1, 2, kv_len, q_len, 17);
      for (const bool chunk : {false, true}) {
        expect_agrees_with_oracle({.mass = 0.85}, x, chunk);
        expect_agrees_with_oracle({.block = 32, .mass = 0.85}, x, chunk);
        expect_agrees_with_oracle({.budget = Budget::keys(1 + kv_len / 2), .block = 32}, x, chunk);
      }
    }
}

// ---- how many -----------------------------------------------------------------------------------

TEST(XAttentionSelects, NoBlockMoreThanTheSumAsksFor) {  // four blocks alike: two are half
  Random random(611);
  Case<float> x(random, 1, 1, 64, 16, 16, 0.0);
  EXPECT_EQ(select({.block = 16, .mass = 0.5}, x.input(false)).count(0, 0), 32);
}

// ---- the chunk's own keys -----------------------------------------------------------------------

TEST(XAttentionSelects, ByTheChunksKeysWhereverItIsDriven) {
  Random random(611);
  const Case<float> x(random, 1, 2, 300, 64, 16);
  const XAttentionOptions options{.block = 16, .mass = 0.6};
  const Selection expected = select(options, x.input(true));
  ASSERT_FALSE(expected == select(options, x.input(false)));

  const quoka::LayerShape shape{.q_heads = 4, .kv_heads = 2, .head_dim = 16};
  quoka::ChunkedPrefill<XAttentionSelector> layer(shape, options);
  layer.append(x.k, x.k);
  EXPECT_EQ(layer.select(x.q, x.chunk), expected);
  Tensor4<float> out(1, 4, 64, 16);
  layer.forward(x.q, x.chunk, x.chunk, out);
  EXPECT_EQ(layer.selection(), expected);

  XAttentionSelector::State state;
  quoka::RaggedWorkspace<XAttentionSelector> workspace;
  const std::array batch{quoka::RaggedSequence<XAttentionSelector>{.q = x.q,
                                                                   .past_k = x.k,
                                                                   .past_v = x.k,
                                                                   .chunk = {x.chunk, x.chunk},
                                                                   .out = out,
                                                                   .state = &state}};
  quoka::select_and_attend(XAttentionSelector(options), batch, {}, quoka::SerialExecutor{},
                           workspace);
  EXPECT_EQ(workspace.selection(0), expected);
}

// ---- NaN and infinity ---------------------------------------------------------------------------

TEST(XAttention, LeavesRowsThatAreNotFiniteOut) {  // of queries, past keys and chunk keys
  Random random(615);
  for (const float odd : {not_a_number, infinity, -infinity}) {
    Case<Element> x(random, 1, 2, 300, 37, 24);
    x.q(0, 1, 5, 19) = stored<Element>(odd);
    x.q(0, 2, 36, 0) = stored<Element>(odd);
    x.k(0, 0, 100, 3) = x.k(0, 1, 299, 23) = stored<Element>(odd);
    x.chunk(0, 1, 3, 7) = stored<Element>(odd);
    for (const bool chunk : {false, true})
      for (const double mass : {0.7, 0.0})
        expect_agrees_with_oracle({.budget = Budget::keys(100), .block = 16, .mass = mass}, x,
                                  chunk);
  }
}

}  // namespace
