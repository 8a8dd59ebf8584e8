// KeyDiff against the oracle, key by key and over whole sequences; and properties of evicting
// selectors: a budget that holds, keys that never return, and a truncate() that restores the
// earlier state.

#include <quoka/layer/chunked_prefill.hpp>
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

TEST(KeyDiff, ScoresAreMinusTheCosineWithTheAverageDirection) {
  for_each_storage([]<class T>() {
    Random random(571);
    for (Index dim : {1, 3, 17, 64, 100}) {
      const auto k = random.tensor<T>(1, 1, 137, dim);
      for (const auto& positions : {std::vector<Index>{5}, {3, 4, 9, 136}, oracle::range(0, 137)}) {
        const auto scores = scores_of(k, positions);
        const auto expected = exact_scores_of(k, positions);
        for (std::size_t i = 0; i < positions.size(); ++i)
          EXPECT_NEAR(static_cast<double>(scores[i]), expected[i], 2e-6) << "dim " << dim;
      }
    }
  });
}

TEST(KeyDiff, AZeroKeyScoresZeroAndAddsNothing) {
  Random random(573);
  const auto k = with_row(random.tensor<Element>(1, 1, 37, 17), 20, 0.0f);
  const auto scores = scores_of(k, oracle::range(0, 37));
  const auto expected = exact_scores_of(k, oracle::range(0, 37));
  EXPECT_EQ(scores[20], 0.0f);
  for (std::size_t t = 0; t < 37; ++t)
    EXPECT_NEAR(static_cast<double>(scores[t]), expected[t], 2e-6);
}

TEST(KeyDiff, AKeyThatIsNotFiniteIsLeftOutOfTheAverage) {
  Random random(574);
  const auto finite = random.tensor<Element>(1, 1, 37, 17);
  const auto rest = without_row(finite, 20);
  const auto expected = scores_of(rest, oracle::range(0, 36));
  for (float odd : {not_a_number, infinity, -infinity})
    for (Index c : {0, 15, 16}) {
      auto k = finite;
      k(0, 0, 20, c) = stored<Element>(odd);
      auto scores = scores_of(k, oracle::range(0, 37));
      EXPECT_FALSE(std::isfinite(scores[20]));
      scores.erase(scores.begin() + 20);
      EXPECT_EQ(scores, expected) << odd;  // to the bit
    }
}

// ---- whole sequences ----------------------------------------------------------------------------

TEST(KeyDiff, RetainsWhatTheOracleDoesChunkAfterChunk) {
  for_each_storage([]<class T>() {
    Random random(575);
    for (Index chunk : {1, 7, 16, 37, 64}) {
      SCOPED_TRACE("chunks of " + std::to_string(chunk));
      const auto k = random.tensor<T>(2, 2, 256, 20);
      auto layer = layer_of<T>({.budget = Budget::keys(31)}, 2);
      for (Index begin = 0; begin < 256; begin += chunk)
        append_and_compare(layer, k, begin, std::min<Index>(begin + chunk, 256));
    }
  });
  Random random(576);
  const auto k = random.tensor<float>(1, 2, 200, 17);
  for (Index budget : {0, 1, 2, 36, 37, 38, 127, 199, 200}) {
    SCOPED_TRACE("budget " + std::to_string(budget));
    auto layer = layer_of<float>({.budget = Budget::keys(budget)}, 1, 2, 17);
    for (Index begin = 0; begin < 200; begin += 40) append_and_compare(layer, k, begin, begin + 40);
  }
}

TEST(KeyDiffRetains, NoKeyThatIsNotFiniteWhileThereAreOthers) {
  Random random(578);
  auto k = random.tensor<float>(1, 1, 120, 20);
  for (Index t = 0; t < 120; t += 9) k(0, 0, t, t % 20) = t % 2 == 0 ? not_a_number : infinity;
  auto layer = layer_of<float>({.budget = Budget::keys(31)}, 1, 1);
  for (Index begin = 0; begin < 120; begin += 40) append(layer, k, begin, begin + 40);
  const auto kept = layer.retained()[0][0];
  for (Index t : kept) EXPECT_NE(t % 9, 0) << t;
}

TEST(KeyDiffRetains, TheFirstKeysWhereAskedTo) {  // alike, so that they would go first
  Random random(586);
  auto k = random.tensor<float>(1, 2, 200, 20);
  for (Index head = 0; head < 2; ++head)
    for (Index t = 0; t < 6; ++t)
      for (Index c = 0; c < 20; ++c) k(0, head, t, c) = 1.0f;
  for (Index t = 0; t < 200; ++t) k(0, 0, t, 0) = k(0, 1, t, 0) = 3.0f;
  auto without = layer_of<float>({.budget = Budget::keys(31)}, 1),
       with = layer_of<float>({.budget = Budget::keys(31), .keep_first = 4}, 1);
  for (Index begin = 0; begin < 200; begin += 40) {
    append(without, k, begin, begin + 40);
    append(with, k, begin, begin + 40);
    const auto retained = with.retained();
    for (const auto& kept : retained[0]) {
      ASSERT_EQ(std::ssize(kept), 31);
      EXPECT_EQ(std::vector<Index>(kept.begin(), kept.begin() + 4), oracle::range(0, 4));
    }
  }
  EXPECT_GT(without.retained()[0][0][0], 3);
}

// ---- eviction -----------------------------------------------------------------------------------

TEST(KeyDiff, TruncateToTheEndOfAnyChunkBringsBackWhatWasRetainedThen) {
  Random random(581);
  const auto k = random.tensor<Element>(2, 2, 20 * 17, 20);
  auto layer = layer_of<Element>({.budget = Budget::keys(31)}, 2);
  std::vector<oracle::Positions> history;
  for (Index chunk = 0; chunk < 20; ++chunk) {
    append(layer, k, 17 * chunk, 17 * (chunk + 1));
    history.push_back(layer.retained());
  }
  for (Index chunk = 19; chunk >= 0; --chunk) {  // one by one, back to the start
    layer.truncate(17 * (chunk + 1));
    EXPECT_EQ(layer.retained(), history[uz(chunk)]) << "chunk " << chunk;
  }
  for (Index back : {18, 12, 1, 0}) {  // at once, and on with the same keys
    for (Index chunk = std::max<Index>(1, layer.cache.len() / 17); chunk < 20; ++chunk)
      append(layer, k, 17 * chunk, 17 * (chunk + 1));
    EXPECT_EQ(layer.retained(), history[19]);
    layer.truncate(17 * (back + 1));
    EXPECT_EQ(layer.retained(), history[uz(back)]);
  }
}

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
  EXPECT_GE(layer.state.bytes(), 2 * 2 * 1000 * Index{sizeof(Position)});
}

// ---- through prefill ----------------------------------------------------------------------------

TEST(KeyDiffPrefill, AttendsToWhatIsRetainedAndToTheChunk) {
  expect_attention_to_what_is_retained<KeyDiffSelector>({.budget = Budget::keys(31)},
                                                        {.budget = 31}, Random(588));
}

}  // namespace
