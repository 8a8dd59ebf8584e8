// SnapKV against the oracle over whole sequences, the window that stays, pooling, keys and queries
// that are not finite, and keys that come without queries.

#include <quoka/methods/snapkv.hpp>

#include "support/baseline_fixtures.hpp"

namespace {

using namespace quoka_test;
using quoka::SnapKvEviction;
using quoka::SnapKvOptions;
using quoka::SnapKvSelector;

oracle::Eviction simulated_by(const SnapKvOptions& options, double scale = 0) {
  return {.budget = options.budget.count(1000000),
          .method = oracle::Evict::snapkv,
          .window = options.window_size,
          .kernel = options.kernel_size,
          .scale = scale};
}
std::string name_of(const SnapKvOptions& options) {
  return "window_size " + std::to_string(options.window_size) + ", kernel_size " +
         std::to_string(options.kernel_size);
}

template <class T>
using Layer = EvictingLayer<SnapKvSelector, T>;

// A sequence of `len` tokens, in chunks, each of them compared. scale: attention's; absent: its default.
template <class T>
void expect_agrees_with_oracle(Random& random, const SnapKvOptions& options, Index len, Index chunk,
                               Index group, std::optional<float> scale) {
  SCOPED_TRACE(name_of(options) + ", chunks of " + std::to_string(chunk));
  const auto q = random.tensor<T>(1, 2 * group, len, 20);
  const auto k = random.tensor<T>(1, 2, len, 20);
  Layer<T> layer(options, simulated_by(options, static_cast<double>(scale.value_or(0.0f))), 1, 2,
                 20);
  layer.logits.scale = scale;
  for (Index begin = 0; begin < len; begin += chunk) {
    const Index n = std::min(chunk, len - begin);
    layer.append_and_compare(quoka::view_of(q).slice(begin, n), quoka::view_of(k).slice(begin, n));
  }
}

// Scores of these positions of k [1, 1, len, dim] by the chunk q [1, group, q_len, dim]; how many
// of the last ones stay.
struct Scores {
  std::vector<float> of;
  Index forced;
};
template <class T>
Scores scores_of(const SnapKvOptions& options, const Tensor4<T>& q, const Tensor4<T>& k,
                 const std::vector<Index>& positions) {
  const std::vector<Position> candidates(positions.begin(), positions.end());
  const SelectorInput input{q, k, LogitOptions{}};
  SnapKvEviction::Scratch scratch;
  Scores scores{std::vector<float>(positions.size(), -12345.0f), 0};
  scores.forced = SnapKvEviction(options).score(input, 0, 0, candidates, scores.of, scratch);
  return scores;
}
// Those before the window.
template <class T>
std::vector<double> exact_scores_of(const SnapKvOptions& options, const Tensor4<T>& q,
                                    const Tensor4<T>& k, const std::vector<Index>& positions) {
  const oracle::Tensor q_exact = to_oracle(q), k_exact = to_oracle(k);
  const Index w = std::min(options.window_size, q_exact.len);
  std::vector<std::vector<oracle::Row>> window;
  for (Index h = 0; h < q_exact.heads; ++h)
    window.push_back(oracle::group_rows(q_exact, 0, h, q_exact.heads,
                                        oracle::range(q_exact.len - w, q_exact.len)));
  std::vector<oracle::Row> rows;
  for (Index t : positions) rows.push_back(k_exact.row(0, 0, t));
  auto scores = oracle::snapkv_scores(window, rows, options.kernel_size, 0);
  for (double& x : scores) x *= static_cast<double>(w);  // a sum over the window here
  return scores;
}

// ---- scores -------------------------------------------------------------------------------------

TEST(SnapKv, ScoresAreTheWindowsPooledAttention) {
  for_each_storage([]<class T>() {
    Random random(591);
    const auto q = random.tensor<T>(1, 3, 40, 20);
    const auto k = random.tensor<T>(1, 1, 237, 20);
    std::vector<Index> some = {0, 3, 4, 50, 51, 52, 53, 54, 100};  // retained, and the chunk's
    for (Index t = 197; t < 237; ++t) some.push_back(t);
    for (Index window_size : {1, 7, 32, 40, 1000})
      for (Index kernel_size : {1, 3, 5, 51})
        for (const auto& positions : {some, oracle::range(0, 237)}) {
          const SnapKvOptions options{.window_size = window_size, .kernel_size = kernel_size};
          SCOPED_TRACE(name_of(options));
          const Scores scores = scores_of(options, q, k, positions);
          EXPECT_EQ(scores.forced, std::min<Index>(window_size, 40));
          const auto expected = exact_scores_of(options, q, k, positions);
          for (std::size_t i = 0; i < expected.size(); ++i)
            ASSERT_NEAR(static_cast<double>(scores.of[i]), expected[i], 1e-5 * expected[i])
                << "key " << positions[i];
        }
  });
}

// ---- whole sequences ----------------------------------------------------------------------------

// Budgets below the window, too: its last keys.
TEST(SnapKv, RetainsWhatTheOracleDoesChunkAfterChunk) {
  for_each_storage([]<class T>() {
    for (std::uint64_t seed = 0; seed < 12; ++seed) {
      Random random(seed);
      const Index windows[] = {1, 8, 16, 32, 64}, window = windows[random.below(5)],
                  budgets[] = {0, 1, window - 1, window, window + 1, 64, 119, 120, 121};
      expect_agrees_with_oracle<T>(random,
                                   {.budget = Budget::keys(budgets[random.below(9)]),
                                    .window_size = window,
                                    .kernel_size = 1 + 2 * random.below(4)},
                                   120, 1 + random.below(64), 1 + random.below(3),
                                   seed % 3 == 0 ? std::optional<float>(0.6f) : std::nullopt);
    }
  });
}

TEST(SnapKvRetains, TheFirstKeysWhereAskedToBesideTheWindow) {
  Random random(606);
  const auto q = random.tensor<float>(1, 2, 200, 20), k = random.tensor<float>(1, 1, 200, 20);
  const SnapKvOptions options{.budget = Budget::keys(20), .window_size = 8, .keep_first = 4};
  Layer<float> layer(options, simulated_by(options), 1, 1, 20);
  for (Index begin = 0; begin < 200; begin += 40) {
    layer.append(quoka::view_of(q).slice(begin, 40), quoka::view_of(k).slice(begin, 40));
    const auto kept = layer.retained()[0][0];
    ASSERT_EQ(std::ssize(kept), 20);
    EXPECT_EQ(std::vector<Index>(kept.begin(), kept.begin() + 4), oracle::range(0, 4));
    EXPECT_EQ(std::vector<Index>(kept.end() - 8, kept.end()),
              oracle::range(begin + 32, begin + 40));
  }
}

// ---- eviction -----------------------------------------------------------------------------------

TEST(SnapKvRetains, TheLastOfKeysThatCameWithoutQueries) {  // a saved prefix: judged by age
  Random random(601);
  const auto k = random.tensor<float>(1, 2, 127, 20), q = random.tensor<float>(1, 4, 17, 20);
  const SnapKvOptions options{.budget = Budget::keys(31)};
  Layer<float> layer(options, simulated_by(options), 1, 2, 20);
  layer.append({}, k);
  EXPECT_EQ(layer.retained()[0][1], oracle::range(96, 127));
  SnapKvSelector::State state;  // nor were they appended
  Selection keep;
  layer.selector.select(SelectorInput{q, k, LogitOptions{}}, state, keep, quoka::SerialExecutor{});
  EXPECT_EQ(to_positions(keep)[0][1], oracle::range(96, 127));
}

// ---- NaN and infinity ---------------------------------------------------------------------------

TEST(SnapKv, AKeyThatIsNotFiniteSpoilsItsOwnScoreOnly) {  // its neighbours kernel_size a mass of 0
  Random random(602);
  const auto q = random.tensor<Element>(1, 2, 17, 20);
  const auto finite = random.tensor<Element>(1, 1, 137, 20);
  for (float odd : {not_a_number, infinity, -infinity})
    for (Index kernel_size : {1, 5})
      for (Index t : {0, 60, 119}) {
        auto k = finite;
        k(0, 0, t, 3) = stored<Element>(odd);
        const SnapKvOptions options{.window_size = 17, .kernel_size = kernel_size};
        SCOPED_TRACE(name_of(options) + ", key " + std::to_string(t));
        auto raw = exact_scores_of({.window_size = 17, .kernel_size = 1}, q, without_row(finite, t),
                                   oracle::range(0, 136));
        raw.insert(raw.begin() + t, 0.0);
        const auto expected = oracle::pool(raw, kernel_size);
        const auto scores = scores_of(options, q, k, oracle::range(0, 137)).of;
        for (Index i = 0; i < 120; ++i) {
          if (i == t)
            EXPECT_FALSE(std::isfinite(scores[uz(i)]));
          else
            EXPECT_NEAR(static_cast<double>(scores[uz(i)]), expected[uz(i)],
                        1e-5 * expected[uz(i)] + 1e-12)
                << "key " << i;
        }
      }
}

TEST(SnapKv, AQueryThatIsNotFiniteIsLeftOut) {  // those that are left see what they saw
  Random random(603);
  const auto q = random.tensor<Element>(1, 1, 17, 20);
  const auto k = random.tensor<Element>(1, 1, 137, 20);
  const SnapKvOptions options{.window_size = 8, .kernel_size = 1};
  const auto all = oracle::range(0, 137);
  const auto expected = [&](Index left_out) {  // the sum over the others of each one's attention
    const oracle::Tensor q_exact = to_oracle(q), k_exact = to_oracle(k);
    std::vector<double> sum(129, 0.0);
    for (Index j = 0; j < 8; ++j) {
      if (j == left_out) continue;
      auto keys = oracle::rows_of(k_exact, 0, 0);
      keys.resize(uz(129 + j + 1));
      const auto p = oracle::softmax(oracle::scaled_dots({q_exact.row(0, 0, 9 + j)}, keys, 0)[0]);
      for (std::size_t t = 0; t < 129; ++t) sum[t] += p[t];
    }
    return sum;
  };
  for (float odd : {not_a_number, infinity, -infinity})
    for (Index j : {0, 3, 7}) {
      const auto scores = scores_of(options, with_row(q, 9 + j, odd), k, all).of;
      const auto exact = expected(j);
      for (std::size_t t = 0; t < 129; ++t)
        ASSERT_NEAR(static_cast<double>(scores[t]), exact[t], 1e-5 * exact[t]) << "query " << j;
    }
}

}  // namespace
