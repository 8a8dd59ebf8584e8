// XAttention against the oracle: scores of blocks, the threshold's counts, the budget's ranks, rows
// that are cut, the chunk's own keys.

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
  const float* score = state.scores.data();
  const oracle::Tensor q = to_oracle(x.q), keys = x.keys(chunk);
  for (Index b = 0; b < x.k.dimension(0); ++b)
    for (Index g = 0; g < 2; ++g) {
      const oracle::SetScores exact =
          oracle::xattention_scores(q, keys, kv_len, b, g, options.stride, block, 0);
      for (const auto& of_set : exact) {
        double total =
            0;  // of whole blocks of the past: the scores of their key rows add up to theirs
        for (const double expected : of_set) total += expected;
        for (Index j = 0; j < kv_len / block; ++j) {
          double sum = 0;
          for (Index row = 0; row < block / options.stride; ++row)
            sum += std::max(0.0, static_cast<double>(score[j * (block / options.stride) + row]));
          const double expected = total > 0 ? of_set[uz(j)] / total : 0.0;
          ASSERT_NEAR(sum, expected, 2e-5 * expected + 1e-26);
        }
        score += kv_len / options.stride;
      }
      double margin = 1;
      std::vector<Index> expected;
      if (options.by_threshold()) {
        expected = oracle::keys_of_blocks(
            oracle::xattention_blocks(exact, kv_len, block, options.mass, &margin), block, kv_len);
      } else {
        std::vector<Index> forced{0};
        if (kv_len % block != 0) forced.push_back(kv_len / block);
        expected = oracle::best_blocks(forced, oracle::shares_of_total(exact, kv_len, block), block,
                                       kv_len, options.budget.count(kv_len), &margin);
      }
      if (margin < 1e-6) continue;  // float may choose either of two that are nearly equal
      EXPECT_EQ(keep[uz(b)][uz(g)], expected) << "batch " << b << ", head " << g;
    }
}

// ---- against the oracle -------------------------------------------------------------------------

// Chunks and pasts that end within a row, within a block, or with one; rows of queries, past keys and chunk keys that
// are not finite are left out.
TEST(XAttention, AgreesWithTheOracle) {
  for_each_storage([]<class T>() {
    for (std::uint64_t seed = 0; seed < 40; ++seed) {
      Random random(seed);
      const auto one_of = [&](std::initializer_list<Index> list) {
        return list.begin()[random.below(std::ssize(list))];
      };
      const Index kv_len = one_of({2, 7, 8, 9, 127, 128, 129, 264, 400, 501}),
                  q_len = one_of({1, 7, 8, 9, 37, 75, 127, 128, 130, 300}),
                  stride = one_of({1, 2, 4, 8, 8, 16, 64}), block = stride * one_of({1, 3, 4, 16});
      Case<T> x(random, 1 + random.below(2), 1 + random.below(3), kv_len, q_len,
                one_of({8, 17, 24}));
      if (random.below(3) == 0) {
        const float values[] = {not_a_number, infinity, -infinity};
        for (Tensor4<T>* const rows : {&x.q, &x.k, &x.chunk})
          rows->data()[random.below(rows->size())] = stored<T>(values[random.below(3)]);
      }
      for (const bool chunk : {false, true})
        for (const double mass : {0.7, 0.9, 0.0})
          expect_agrees_with_oracle({.budget = Budget::keys(1 + random.below(kv_len)),
                                     .stride = stride,
                                     .block = block,
                                     .mass = mass},
                                    x, chunk);
    }
  });
}

// ---- how many -----------------------------------------------------------------------------------

TEST(XAttentionSelects, NoBlockMoreThanTheSumAsksFor) {  // four blocks alike: two are half
  Random random(611);
  Case<float> x(random, 1, 1, 64, 16, 16, 0.0);
  EXPECT_EQ(select({.block = 16, .mass = 0.5}, x.input(false)).count(0, 0), 32);
}

}  // namespace
