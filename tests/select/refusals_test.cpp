// Refusals of selection, in one table: std::invalid_argument that names the thing and both numbers. Refusals of a State
// are in selector_suite_test, those of a cache's sketch in cache_sketch_test.

#include <quoka/attention/attention_options.hpp>
#include <quoka/methods/all.hpp>
#include <quoka/select/any_selector.hpp>
#include <quoka/select/key_scores.hpp>
#include <quoka/select/softmax_scores.hpp>
#include <quoka/select/stages.hpp>
#include <quoka/select/visible.hpp>

#include "support/selector_fixtures.hpp"

#include <functional>

namespace {

using namespace quoka_test;
using namespace quoka;

struct Refusal {
  std::function<void()> call;
  std::initializer_list<Fragment> says;
  int line = __builtin_LINE();
};
void expect_all(std::initializer_list<Refusal> table) {
  for (const Refusal& one : table) expect_refused(one.call, one.says, __FILE__, one.line);
}

// Options with one member set.
template <class S, class F>
void with(F&& set) {
  typename S::Options options{};
  set(options);
  S{options};
}

TEST(SelectionRefuses, OptionsOutOfRange) {
  for_each_selector([]<class S>(const char* name) {
    SCOPED_TRACE(name);
    using O = typename S::Options;
    if constexpr (requires(O o) { o.kernel_size; })
      expect_all({{[] { with<S>([](O& o) { o.kernel_size = 0; }); }, {"kernel_size", 0, 1}}});
    if constexpr (requires(O o) { o.keep_first; })
      expect_all({{[] { with<S>([](O& o) { o.keep_first = -3; }); }, {"keep_first", -3, 0}}});
    if constexpr (requires(O o) { o.keep_last; })
      expect_all({{[] { with<S>([](O& o) { o.keep_last = -4; }); }, {"keep_last", -4, 0}}});
    if constexpr (requires(O o) { o.plan; }) {
      const auto planned = [](LayerPlan plan) {
        return [plan] { with<S>([&](O& o) { o.plan = plan; }); };
      };
      expect_all({{planned({.layer = -1}), {"layer", -1, 0}},
                  {planned({.layer = 32}), {"layer", 32, 31}},
                  {planned({.layer = 4, .layer_count = 4}), {"layer", 4, 3}},
                  {planned({.first_sparse = -2}), {"first_sparse", -2, 0}}});
    }
  });
  expect_all({
      {[] { Budget::keys(-5); }, {"budget", -5, 0}},
      {[] { QuokaSelector({.n_queries = 0}); }, {"n_queries", 0, 1}},
      {[] { MassSelector({.queries = 0}); }, {"queries", 0, 1}},
      {[] { MassSelector({.least = -1}); }, {"least", -1, 0}},
      {[] { MassSelector({.kernel_size = 1025}); }, {"kernel_size", 1025, 1024}},
      {[] { MassSelector({.kernel_size = Index{1} << 60}); },
       {"kernel_size", Index{1} << 60, 1024}},
      {[] { MassSelector({.threshold = -0.5f}); }, {"threshold", "-0.5", "[0, 1e30]"}},
      {[] { MassSelector({.threshold = not_a_number}); }, {"threshold", "nan"}},
      {[] { selection_preset("fastest"); },
       {"preset", "fastest", "paper", "balanced", "recommended"}},
      {[] { selection_preset("Paper"); }, {"Paper", "recommended"}},
      {[] { AnySelector(QuokaOptions{.n_queries = 0}); }, {"n_queries", 0, 1}},
      {[] { SampleAttentionSelector({.n_queries = 0}); }, {"n_queries", 0, 1}},
      {[] { SparqSelector({.rank = 0}); }, {"rank", 0, 1}},
      {[] { LokiSelector({.rank = 0}); }, {"rank", 0, 1}},
      {[] { LokiSelector({.fitted = 0}); }, {"fitted", 0, 1}},
      {[] { QuestSelector({.page = 0}); }, {"page", 0, 1}},
      {[] { SnapKvSelector({.window_size = 0}); }, {"window_size", 0, 1}},
      {[] { SnapKvSelector({.kernel_size = 0}); }, {"kernel_size", 0, 1}},
      {[] { SnapKvSelector({.kernel_size = -1}); }, {"kernel_size", -1, 1}},
      {[] { SnapKvSelector({.kernel_size = 4}); }, {"kernel_size", "odd", 0, 1}},
      {[] { XAttentionSelector({.stride = 0}); }, {"stride", 0, 1}},
      {[] { XAttentionSelector({.stride = 8, .block = 100}); }, {"block", 100, 8}},
      {[] { FlashPrefillSelector({.block = 0}); }, {"block", 0, 1}},
      {[] { XAttentionSelector({.mass = 1.5}); }, {"mass", "1.5", "[0, 1]"}},
      {[] { XAttentionSelector({.mass = std::nan("")}); }, {"mass", "nan"}},
      {[] { FlashPrefillSelector({.relative = -0.5}); }, {"relative", "-0.5", "[0, 1]"}},
  });
}

// An option that scores ignore would be selected for as if it were absent.
TEST(SelectionRefuses, LogitsThatItDoesNotKnow) {
  Random random(201);
  const auto q = random.tensor<float>(1, 4, 37, 16), k = random.tensor<float>(1, 2, 127, 16);
  const MassSelector weighs(MassOptions::balanced(Budget::keys(31)));
  const QuokaSelector cosines({.budget = Budget::keys(31)});
  const std::vector<float> slopes{0.5f, 0.25f, 0.125f, 0.0625f};
  const AttentionOptions alibi{.alibi_slopes = slopes}, window{.sliding_window = 50};
  Tensor4<float> biases(1, 1, 37, 127 + 37);
  biases.setZero();
  const AttentionOptions masked{.mask = biases};
  MassSelector::State state;
  QuokaSelector::State of_cosines;
  Selection keep;
  const Rows few = Rows(k).slice(0, 7);  // within the budget, and refused at once
  const auto unsaid = [&](const Rows& keys) {
    return [&, keys] { weighs.select({.q = q, .k = keys}, state, keep, SerialExecutor{}); };
  };
  expect_all({
      {unsaid(k), {"SelectorInput::logits"}},
      {unsaid(few), {"SelectorInput::logits"}},
      {[&] { (void)weighs.select(q, k, alibi); }, {4, "alibi_slopes"}},
      {[&] { (void)weighs.select(q, k, window); }, {"sliding_window", 50}},
      {[&] { (void)cosines.select(q, k, window); }, {"sliding_window", 50}},
      {[&] { (void)cosines.select(q, k, masked); }, {"mask", "select_visible()"}},
  });
  EXPECT_NO_THROW(cosines.select({.q = q, .k = k}, of_cosines, keep, SerialExecutor{}));
  EXPECT_EQ(cosines.select(q, k, alibi), cosines.select(q, k, {}));
}

TEST(SelectionRefuses, StagesOfOtherShapes) {
  const Tensor4<float> q(1, 4, 7, 3), empty(1, 4, 0, 3), hollow(1, 4, 7, 0), seven(1, 7, 3, 5);
  const Tensor4<float> q_bar(2, 3, 7, 17), no_rows(2, 3, 0, 17), keys(2, 3, 37, 17),
      no_channels(1, 1, 16, 0);
  const auto keys_of = [&](Index batch, Index heads, Index dim) {
    return
        [&, batch, heads, dim] { (void)score_keys(q_bar, Tensor4<float>(batch, heads, 37, dim)); };
  };
  const auto norms_of = [&](Index batch, Index heads, Index len) {
    return [&, norms = Tensor3<float>(batch, heads, len)] {
      (void)score_keys(q_bar, keys, {}, norms);
    };
  };
  const Tensor3<float> scores(1, 1, 7);
  expect_all({
      {[&] { (void)subselect_queries(q, 0); }, {"n_queries", 0, 1}},
      {[&] { (void)subselect_query_positions(q, -3); }, {"n_queries", -3, 1}},
      {[&] { (void)subselect_queries(empty, 16); }, {"q_len", 0, 1}},
      {[&] { (void)subselect_queries(hollow, 16); }, {"dim", 0, 1}},
      {[&] { (void)pre_aggregate(seven, 2); }, {"q_heads", 7, 2}},
      {[&] { (void)pre_aggregate(seven, 14); }, {"q_heads", 7, 14}},
      {[&] { (void)pre_aggregate(seven, 0); }, {"q_heads", 7, 0}},
      {[&] { (void)pre_aggregate(seven, -3); }, {"q_heads", 7, -3}},
      {keys_of(1, 3, 17), {"batch", 1, 2}},
      {keys_of(2, 4, 17), {"heads", 4, 3}},
      {keys_of(2, 3, 16), {"dim", 16, 17}},
      {norms_of(1, 3, 37), {"batch", 1, 2}},
      {norms_of(2, 4, 37), {"heads", 4, 3}},
      {norms_of(2, 3, 36), {"len", 36, 37}},
      {[&] { (void)score_keys(no_rows, keys); }, {"rows", 0, 1}},
      {[&] { (void)score_keys(no_channels, no_channels); }, {"head_dim", 0, 1}},
      {[&] { (void)top_k(scores, -1); }, {"k", -1, 0}},
      {[&] { (void)top_k(scores, 3, {.keep_first = -2}); }, {"keep_first", -2, 0}},
      {[&] { (void)top_k(scores, 3, {.keep_last = -5}); }, {"keep_last", -5, 0}},
      {[&] { (void)top_k(scores, 3, {.kernel_size = 0}); }, {"kernel_size", 0, 1}},
  });
}

TEST(SelectionRefuses, ScoresThatDoNotLieSideBySide) {
  constexpr Index heads = 2, len = 37, dim = 16;
  const Tensor4<float> k(1, heads, len, dim);
  std::vector<float> memory(2 * heads * 2 * len);
  SoftmaxScoreState state;
  Buffer<float> means;
  Arenas workers;
  const auto no_rows = [](Index, Index, RowWriter&) {};
  using Three = std::array<Index, 3>;
  const auto mean_logits = [&](const Three& sizes, const Three& steps) {
    return [&, scores = TensorView<float, 3>(memory.data(), sizes, steps)] {
      mean_logit_scores(RowRoom{4, dim}, no_rows, k, scores, means, workers, SerialExecutor{});
    };
  };
  const TensorView<float, 3> apart(memory.data(), {1, heads, len}, {2 * heads * len, 2 * len, 2});
  const SoftmaxScoring softmax{.rows = {4, dim}, .fill = no_rows, .keys = k};
  EXPECT_NO_THROW(mean_logits({1, heads, len}, {5, len, 1})()) << "of one sequence no step";
  expect_all({
      {mean_logits({1, heads, len}, {heads * len, 2 * len, 1}),
       {"stride of the scores", 2 * len, len}},
      {mean_logits({1, heads, len}, {heads * len, len, 2}), {"stride of the scores", 2, 1}},
      {mean_logits({1, heads, len - 1}, {heads * len, len, 1}), {"scores's len", len - 1, len}},
      {[&] { softmax_scores(softmax, apart, state, SerialExecutor{}); }, {"inner stride", 2, 1}},
  });
}

TEST(SelectionRefuses, WhatOneMethodDoes) {
  Random random(485);
  const auto q = random.tensor<float>(1, 4, 7, 20), k = random.tensor<float>(1, 2, 37, 20);
  const Tensor4<float> chunk(1, 2, 8, 20);
  XAttentionSelector::State state;
  Selection keep;
  expect_all({
      {[&] {
         XAttentionSelector().select({.q = q, .k = k, .logits = LogitOptions{}, .chunk_k = chunk},
                                     state, keep, SerialExecutor{});
       },
       {"chunk_k", 8, 7}},
  });
}

TEST(SelectionRefuses, VisibleCellsThatThereAreNot) {
  Random random(41);
  const auto q = random.tensor<float>(2, 4, 5, 16), k = random.tensor<float>(2, 2, 40, 16);
  const auto mask = random.tensor<float>(1, 1, 5, 45);
  const auto first = [](const Tensor4<float>& x, Index batch) {
    const Rows rows(x);
    return Rows(rows.data(), rows.format(), {batch, rows.heads(), rows.len(), rows.dim()},
                rows.strides());
  };
  const auto select = [&](Index batch, bool of_all) {
    return [&, batch, of_all] {
      VisibleCells cells(mask, 40);
      if (batch == 1) (of_all ? cells.to_all : cells.to_some).push_back(40);
      QuokaSelector::State state;
      Selection keep;
      select_visible(QuokaSelector(), {.q = first(q, batch), .k = first(k, batch)}, cells, state,
                     keep);
    };
  };
  expect_all({{select(1, true), {"visible cell", 40, 39}},
              {select(1, false), {"visible cell", 40, 39}},
              {select(2, true), {"batch", 2, 1}}});
}

}  // namespace
