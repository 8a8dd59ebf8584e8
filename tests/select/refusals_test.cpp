// Refusals of selection, in tables: std::invalid_argument that names the thing and both numbers. Keys of another
// sequence are refused in selection_fuzz_test, those of another cache's sketch in cache_sketch_test.

#include <quoka/attention/attention_options.hpp>
#include <quoka/methods/all.hpp>
#include <quoka/select/any_selector.hpp>
#include <quoka/select/key_scores.hpp>
#include <quoka/select/softmax_scores.hpp>
#include <quoka/select/stages.hpp>
#include <quoka/select/visible.hpp>

#include "support/refused_calls.hpp"
#include "support/selector_fixtures.hpp"

namespace {

using namespace quoka_test;
using namespace quoka;

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
      expect_all_refused(
          {{[] { with<S>([](O& o) { o.kernel_size = 0; }); }, {"kernel_size", 0, 1}}});
    if constexpr (requires(O o) { o.keep_first; })
      expect_all_refused(
          {{[] { with<S>([](O& o) { o.keep_first = -3; }); }, {"keep_first", -3, 0}}});
    if constexpr (requires(O o) { o.keep_last; })
      expect_all_refused({{[] { with<S>([](O& o) { o.keep_last = -4; }); }, {"keep_last", -4, 0}}});
    if constexpr (requires(O o) { o.plan; }) {
      const auto planned = [](LayerPlan plan) {
        return [plan] { with<S>([&](O& o) { o.plan = plan; }); };
      };
      expect_all_refused({{planned({.layer = -1}), {"layer", -1, 0}},
                          {planned({.layer = 32}), {"layer", 32, 31}},
                          {planned({.layer = 4, .layer_count = 4}), {"layer", 4, 3}},
                          {planned({.first_sparse = -2}), {"first_sparse", -2, 0}}});
    }
  });
  expect_all_refused({
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
      {[] { QuestSelector({.page = quoka::max_keys + 1}); }, {"page", quoka::max_keys + 1}},
      {[] { SnapKvSelector({.window_size = 0}); }, {"window_size", 0, 1}},
      {[] { SnapKvSelector({.kernel_size = 0}); }, {"kernel_size", 0, 1}},
      {[] { SnapKvSelector({.kernel_size = -1}); }, {"kernel_size", -1, 1}},
      {[] { SnapKvSelector({.kernel_size = 4}); }, {"kernel_size", "odd", 0, 1}},
      {[] { XAttentionSelector({.stride = 0}); }, {"stride", 0, 1}},
      {[] { XAttentionSelector({.stride = 8, .block = 100}); }, {"block", 100, 8}},
      {[] { XAttentionSelector({.block = Index{1} << 40}); }, {"block", Index{1} << 40}},
      {[] { FlashPrefillSelector({.block = 0}); }, {"block", 0, 1}},
      {[] { FlashPrefillSelector({.block = Index{1} << 62}); }, {"block", Index{1} << 62}},
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
  const std::vector<Position> entries(37, 0);
  const AttentionOptions masked{.mask = biases},
      listed{.lists = quoka::IndexLists({entries.data(), {1, 1, 37, 1}})};
  MassSelector::State state;
  QuokaSelector::State of_cosines;
  Selection keep;
  expect_all_refused({
      {[&] { weighs.select({.q = q, .k = k}, state, keep, SerialExecutor{}); },
       {"SelectorInput::logits"}},
      {[&] { (void)weighs.select(q, k, alibi); }, {4, "alibi_slopes"}},
      {[&] { (void)weighs.select(q, k, window); }, {"sliding_window", 50}},
      {[&] { (void)cosines.select(q, k, window); }, {"sliding_window", 50}},
      {[&] { (void)cosines.select(q, k, masked); }, {"mask", "select_visible()"}},
      {[&] {
         cosines.select({.q = q, .k = k, .logits = masked}, of_cosines, keep, SerialExecutor{});
       },
       {"mask", "select_visible()"}},
      {[&] {
         select_visible(weighs, {.q = q, .k = k, .logits = listed}, quoka::Mask(), state, keep);
       },
       {"lists of each query's keys"}},
  });
  EXPECT_NO_THROW(cosines.select({.q = q, .k = k}, of_cosines, keep, SerialExecutor{}));
  EXPECT_EQ(cosines.select(q, k, alibi), cosines.select(q, k, {}));
}

// By a new selector, with a budget of 31 keys if it takes one.
template <class S>
void select_by(const SelectorInput& input, Selection& keep) {
  typename S::State state;
  typename S::Options options{};
  if constexpr (requires { options.budget; }) options.budget = Budget::keys(31);
  S(options).select(input, state, keep, SerialExecutor{});
}

// Missing logit options are refused even if the budget covers all keys. A soft-cap is supported or refused.
TEST(SelectionRefuses, MissingLogitOptionsAndUnsupportedSoftCaps) {
  Random random(202);
  const auto q = random.tensor<float>(1, 4, 37, 16), k = random.tensor<float>(1, 2, 127, 16);
  for_each_selector([&]<class S>(const char* name) {
    SCOPED_TRACE(name);
    const auto refuses = [&](const Rows& keys, std::optional<LogitOptions> logits,
                             const char* what) {
      Selection keep;
      try {
        select_by<S>({.q = q, .k = keys, .logits = logits}, keep);
      } catch (const std::invalid_argument& error) {
        return std::string_view(error.what()).find(what) != std::string_view::npos;
      }
      return false;
    };
    const bool weighs = refuses(k, {}, "SelectorInput::logits"),
               caps = std::is_same_v<S, MassSelector> || std::is_same_v<S, OracleSelector> ||
                      std::is_same_v<S, TidalDecodeSelector>;  // which selects by the oracle
    EXPECT_EQ(refuses(Rows(k).slice(0, 7), {}, "SelectorInput::logits"), weighs);
    EXPECT_EQ(refuses(k, LogitOptions{.softcap = 5.0f}, "softcap is 5"), weighs && !caps);
  });
}

// By any selector of a budget. Nothing is selected then.
template <class S>
void expect_selector_refuses(const SelectorInput& input, const std::vector<Fragment>& says) {
  const Selection before = to_selection({{{1, 3}}}, 7);
  Selection keep = before;
  expect_refused([&] { select_by<S>(input, keep); }, says);
  EXPECT_EQ(keep, before);
}

TEST(SelectionRefuses, ShapesThatDoNotFitWhicheverTheSelector) {
  using Sizes = std::array<Index, 4>;
  const Sizes q{2, 6, 37, 20}, k{2, 2, 127, 20};
  const struct {
    Sizes q, k;
    std::vector<Fragment> says;
    std::array<Index, 3> norms = {0, 0, 0};
  } all[] = {
      {q, {3, 2, 127, 20}, {"batch", 3, 2}},
      {{2, 7, 37, 20}, k, {"q_heads", 7, 2}},
      {{2, 2, 37, 20}, {2, 6, 127, 20}, {"q_heads", 2, 6}},
      {q, {2, 0, 127, 20}, {"q_heads", 6, 0}},
      {q, {2, 2, 127, 24}, {"dim", 24, 20}},
      {{2, 6, 0, 20}, k, {"q_len", 0, 1}},
      {{0, 6, 37, 20}, {0, 2, 127, 20}, {"batch", 0, 1}},
      {{2, 6, 37, 0}, {2, 2, 127, 0}, {"dim", 0, 1}},
      {q, k, {"inverse_norms", 3, 2}, {3, 2, 127}},
      {q, k, {"inverse_norms", 6, 2}, {2, 6, 127}},
      {q, k, {"inverse_norms", 126, 127}, {2, 2, 126}},
  };
  const auto zeros = [](const Sizes& s) {
    Tensor4<float> x(s[0], s[1], s[2], s[3]);
    x.setZero();
    return x;
  };
  for (const auto& one : all) {
    const Tensor4<float> q_of = zeros(one.q), k_of = zeros(one.k);
    const Tensor3<float> norms(one.norms[0], one.norms[1], one.norms[2]);
    SelectorInput input{q_of, k_of, LogitOptions{}};
    if (norms.size() > 0) input.inverse_norms = norms;
    for_each_selector([&]<class S>(const char* name) {
      SCOPED_TRACE(name);
      expect_selector_refuses<S>(input, one.says);
    });
  }
  const Tensor4<float> q_of = zeros(q), k_of = zeros(k), chunk = zeros({2, 2, 38, 20});
  expect_selector_refuses<XAttentionSelector>(
      {.q = q_of, .k = k_of, .logits = LogitOptions{}, .chunk_k = chunk}, {"chunk_k", 38, 37});
}

// The keys that a window hides would take the budget of those that are seen. A scale that is none would make all logits
// NaN, or infinite, and so rank by position.
TEST(SelectionRefuses, LogitsThatNoSelectorCanWeigh) {
  Random random(210);
  const auto q = random.tensor<float>(2, 6, 37, 20), k = random.tensor<float>(2, 2, 127, 20);
  SelectorInput windowed{q, k, LogitOptions{.sliding_window = 50}}, scaled = windowed;
  scaled.logits->sliding_window = 0;
  for_each_selector([&]<class S>(const char* name) {
    SCOPED_TRACE(name);
    if constexpr (requires(typename S::Options options) { options.budget; }) {
      expect_selector_refuses<S>(windowed, {"sliding_window", 50});
    } else {  // it keeps all
      Selection keep;
      EXPECT_NO_THROW(select_by<S>(windowed, keep));
    }
    for (const float scale : {not_a_number, infinity, -infinity, 1.1e30f}) {
      scaled.logits->scale = scale;
      expect_selector_refuses<S>(scaled, {"scale", "[-1e30, 1e30]"});
    }
  });
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
  expect_all_refused({
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
  expect_all_refused({
      {mean_logits({1, heads, len}, {heads * len, 2 * len, 1}),
       {"stride of the scores", 2 * len, len}},
      {mean_logits({1, heads, len}, {heads * len, len, 2}), {"stride of the scores", 2, 1}},
      {mean_logits({1, heads, len - 1}, {heads * len, len, 1}), {"scores's len", len - 1, len}},
      {[&] { softmax_scores(softmax, apart, state, SerialExecutor{}); }, {"inner stride", 2, 1}},
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
  expect_all_refused({{select(1, true), {"visible cell", 40, 39}},
                      {select(1, false), {"visible cell", 40, 39}},
                      {select(2, true), {"batch", 2, 1}}});
}

}  // namespace
