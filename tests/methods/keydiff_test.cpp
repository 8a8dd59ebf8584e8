// KeyDiff against the oracle, key by key and over whole sequences; and truncate() inside a chunk. Forced keys, and what
// truncate() to the end of a chunk brings back: selection_fuzz_test.cpp.

#include <quoka/methods/keydiff.hpp>

#include "support/baseline_fixtures.hpp"

namespace {

using namespace quoka_test;
using quoka::KeyDiffEviction;
using quoka::KeyDiffOptions;
using quoka::KeyDiffSelector;

// KeyDiff ranks by keys alone: the queries of these tests are the keys.
template <class T>
using Layer = EvictingLayer<KeyDiffSelector, T>;
template <class T>
Layer<T> layer_of(const KeyDiffOptions& options, Index batch = 1, Index kv_heads = 2,
                  Index dim = 20) {
  return Layer<T>(options, {.budget = options.budget.count(1000000)}, batch, kv_heads, dim);
}
template <class T>
void append(Layer<T>& layer, const Tensor4<T>& keys, Index begin, Index end) {
  const auto chunk = quoka::view_of(keys).slice(begin, end - begin);
  layer.append(chunk, chunk);
}
template <class T>
void append_and_compare(Layer<T>& layer, const Tensor4<T>& keys, Index begin, Index end) {
  const auto chunk = quoka::view_of(keys).slice(begin, end - begin);
  layer.append_and_compare(chunk, chunk);
}

// Scores of these positions of [1, 1, len, dim].
template <class T>
std::vector<float> scores_of(const Tensor4<T>& k, const std::vector<Index>& positions) {
  const std::vector<Position> candidates(positions.begin(), positions.end());
  const SelectorInput input{{}, k, LogitOptions{}};
  KeyDiffEviction::Scratch scratch;
  std::vector<float> scores(positions.size(), -12345.0f);
  EXPECT_EQ(KeyDiffEviction().score(input, 0, 0, candidates, scores, scratch),
            0);  // none is forced
  return scores;
}
template <class T>
std::vector<double> exact_scores_of(const Tensor4<T>& k, const std::vector<Index>& positions) {
  const oracle::Tensor exact = to_oracle(k);
  std::vector<oracle::Row> rows;
  for (Index t : positions) rows.push_back(exact.row(0, 0, t));
  return oracle::keydiff_scores(rows);
}

// ---- scores -------------------------------------------------------------------------------------

// A zero key scores 0 and adds nothing to the average; one that is not finite is left out of it, to the bit.
TEST(KeyDiff, ScoresAreMinusTheCosineWithTheAverageDirection) {
  for_each_storage([]<class T>() {
    Random random(571);
    for (Index dim : {1, 3, 17, 64, 100}) {
      const auto k = with_row(random.tensor<T>(1, 1, 137, dim), 20, 0.0f);
      for (const auto& positions : {std::vector<Index>{5}, {3, 4, 9, 136}, oracle::range(0, 137)}) {
        const auto scores = scores_of(k, positions);
        const auto expected = exact_scores_of(k, positions);
        for (std::size_t i = 0; i < positions.size(); ++i)
          EXPECT_NEAR(static_cast<double>(scores[i]), expected[i], 2e-6) << "dim " << dim;
      }
      auto expected = scores_of(without_row(k, 30), oracle::range(0, 136));
      EXPECT_EQ(expected[20], 0.0f);
      for (float odd : {not_a_number, infinity, -infinity}) {
        auto spoilt = k;
        spoilt(0, 0, 30, random.below(dim)) = stored<T>(odd);
        auto scores = scores_of(spoilt, oracle::range(0, 137));
        EXPECT_FALSE(std::isfinite(scores[30]));
        scores.erase(scores.begin() + 30);
        EXPECT_EQ(scores, expected) << odd;
      }
    }
  });
}

// ---- whole sequences ----------------------------------------------------------------------------

TEST(KeyDiff, RetainsWhatTheOracleDoesChunkAfterChunk) {
  for_each_storage([]<class T>() {
    for (std::uint64_t seed = 0; seed < 8; ++seed) {
      Random random(seed);
      const Index len = 200, chunk = 1 + random.below(70),
                  budgets[] = {0, 1, 31, chunk - 1, chunk, chunk + 1, len - 1, len};
      const Budget budget = Budget::keys(budgets[random.below(8)]);
      SCOPED_TRACE(std::to_string(budget.count(len)) + ", chunks of " + std::to_string(chunk));
      const auto k = random.tensor<T>(2, 2, len, 20);
      auto layer = layer_of<T>({.budget = budget}, 2);
      for (Index begin = 0; begin < len; begin += chunk)
        append_and_compare(layer, k, begin, std::min(begin + chunk, len));
    }
  });
}

// ---- eviction -----------------------------------------------------------------------------------

TEST(KeyDiffTruncate, InsideAChunkIsAsBeforeItPlusItsPart) {
  Random random(583);
  const auto k = random.tensor<float>(1, 2, 170, 20);
  auto layer = layer_of<float>({.budget = Budget::keys(31)});
  for (Index begin = 0; begin < 136; begin += 17) append(layer, k, begin, begin + 17);
  auto expected = layer.retained();
  append(layer, k, 136, 153);
  append(layer, k, 153, 170);
  layer.truncate(146);
  for (auto& list : expected[0])
    for (Index t = 136; t < 146; ++t) list.push_back(t);
  EXPECT_EQ(layer.retained(), expected);
  append(layer, k, 146, 163);  // and on
  for (std::size_t head = 0; head < 2; ++head) {
    const auto kept = layer.retained()[0][head];
    EXPECT_EQ(kept.size(), 31u);
    for (Index t = 146; t < 163; ++t) expected[0][head].push_back(t);
    EXPECT_TRUE(std::includes(expected[0][head].begin(), expected[0][head].end(), kept.begin(),
                              kept.end()));
  }
}

TEST(KeyDiffSelects, WhatItWasNotToldOfAsOneChunk) {  // a caller that never calls appended()
  Random random(586);
  const auto k = random.tensor<float>(1, 2, 127, 20);
  auto told = layer_of<float>({.budget = Budget::keys(31)});
  append(told, k, 0, 127);
  KeyDiffSelector::State state;
  Selection keep;
  KeyDiffSelector({.budget = Budget::keys(31)})
      .select(SelectorInput{k, k, LogitOptions{}}, state, keep, quoka::SerialExecutor{});
  EXPECT_EQ(to_positions(keep), told.retained());
}

TEST(KeyDiffState, CountsTwoPositionsPerKey) {
  Random random(587);
  const auto k = random.tensor<float>(1, 2, 1000, 20);
  auto layer = layer_of<float>({.budget = Budget::keys(1000)});
  append(layer, k, 0, 1000);
  EXPECT_GE(layer.state.kept_bytes(), 2 * 2 * 1000 * Index{sizeof(Position)});
}

}  // namespace
