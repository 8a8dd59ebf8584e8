// select/key_scores.hpp and softmax_scores.hpp: refusals, and results without rows.

#include <quoka/select/key_scores.hpp>
#include <quoka/select/softmax_scores.hpp>

#include "support/fixtures.hpp"

namespace {

using namespace quoka_test;
using quoka::RowRoom;
using quoka::RowWriter;
using quoka::SoftmaxScoreState;

constexpr Index heads = 2, len = 37, dim = 16;

const auto no_rows = [](Index, Index, RowWriter&) {};

TEST(KeyScores, ScoresOfNoRowsAreZero) {
  Random random(44);
  const auto k = random.tensor<float>(1, heads, len, dim);
  SoftmaxScoreState state;
  quoka::Buffer<float> means;
  quoka::Arenas workers;
  for (const bool softmax : {false, true}) {
    Tensor3<float> scores(1, heads, len);
    scores.setConstant(7.0f);
    if (softmax)
      quoka::softmax_scores({.rows = {4, dim}, .fill = no_rows, .keys = k}, scores, state,
                            SerialExecutor{});
    else
      quoka::mean_logit_scores(RowRoom{4, dim}, no_rows, k, scores, means, workers,
                               SerialExecutor{});
    for (Index i = 0; i < scores.size(); ++i) ASSERT_EQ(scores.data()[i], 0.0f) << softmax;
  }
}

TEST(KeyScoresRefuse, ScoresThatDoNotLieSideBySide) {
  Random random(45);
  const auto k = random.tensor<float>(1, heads, len, dim);
  std::vector<float> memory(2 * heads * 2 * len);
  SoftmaxScoreState state;
  quoka::Buffer<float> means;
  quoka::Arenas workers;
  const auto mean_logits = [&](const std::array<Index, 3>& sizes,
                               const std::array<Index, 3>& steps) {
    quoka::mean_logit_scores(RowRoom{4, dim}, no_rows, k,
                             TensorView<float, 3>(memory.data(), sizes, steps), means, workers,
                             SerialExecutor{});
  };
  EXPECT_NO_THROW(mean_logits({1, heads, len}, {heads * len, len, 1}));
  EXPECT_NO_THROW(mean_logits({1, heads, len}, {5, len, 1})) << "of one sequence there is no step";
  const struct {
    std::array<Index, 3> sizes, steps;
    std::vector<Fragment> says;
  } refused[] = {
      {{1, heads, len}, {heads * len, 2 * len, 1}, {"stride of the scores", 2 * len, len}},
      {{1, heads, len}, {heads * len, len, 2}, {"stride of the scores", 2, 1}},
      {{1, heads, len - 1}, {heads * len, len, 1}, {"scores's len", len - 1, len}},
  };
  for (const auto& [sizes, steps, says] : refused)
    expect_refused([&, &of = sizes, &by = steps] { mean_logits(of, by); }, says);
  const TensorView<float, 3> apart(memory.data(), {1, heads, len}, {2 * heads * len, 2 * len, 2});
  expect_refused(
      [&] {
        quoka::softmax_scores({.rows = {4, dim}, .fill = no_rows, .keys = k}, apart, state,
                              SerialExecutor{});
      },
      {"inner stride", 2, 1});
}

}  // namespace
