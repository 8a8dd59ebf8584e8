// MassOptions::cascade: a first look by some rows chooses candidates, all rows choose among these. Against the
// same done step by step, and where it must do nothing.

#include <quoka/prefill/chunked_prefill.hpp>
#include <quoka/runtime/thread_pool.hpp>
#include <quoka/select/mass_selector.hpp>
#include <quoka/select/sketch/sketched_mass.hpp>
#include <quoka/select/stages.hpp>

#include "support/capture.hpp"
#include "support/real_layers.hpp"
#include "support/selector_fixtures.hpp"
#include "support/sketched_call.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace {

using namespace quoka_test;
using quoka::KeySketch;
using quoka::MassSelector;
using quoka::SelectorInput;
using quoka::Sketch;
namespace detail = quoka::detail;

KeySketch sketch_of(const Rows& k) {
  KeySketch sketch;
  sketch.append(k, k.len(), SerialExecutor{});
  return sketch;
}

// Scores of q_bar [batch, kv_heads, rows, dim] by all of k.
Tensor3<float> masses(const Tensor4<float>& q_bar, const Rows& k, Aggregation over,
                      detail::FirstLook look = {}) {
  Tensor3<float> scores(k.batch(), k.heads(), k.len());
  scores.setConstant(-7.0f);
  detail::SketchedMassState state;
  look.most_candidates = look.candidates;
  const KeySketch sketch = sketch_of(k);
  const SketchedCallOf of(k, sketch, nullptr, q_bar, over);
  detail::sketched_softmax_scores(of.call, 0.3f, look, scores, state);
  return scores;
}

// Some rows of q_bar.
Tensor4<float> rows_of(const Tensor4<float>& q_bar, const std::vector<Index>& rows) {
  Tensor4<float> some(q_bar.dimension(0), q_bar.dimension(1), std::ssize(rows), q_bar.dimension(3));
  for (Index i = 0; i < std::ssize(rows); ++i) some.chip(i, 2) = q_bar.chip(rows[uz(i)], 2);
  return some;
}

// The candidates are those of the largest shares by the first rows; their scores those of all rows over these keys
// alone; all others have 0.
void expect_cascaded(const Tensor3<float>& scores, const Tensor4<float>& q_bar,
                     const Tensor4<float>& k, Aggregation over, const std::vector<Index>& first,
                     Index candidates) {
  const Tensor3<float> shares = masses(rows_of(q_bar, first), k, Aggregation::max);
  for (Index b = 0; b < k.dimension(0); ++b)
    for (Index h = 0; h < k.dimension(1); ++h) {
      std::vector<Index> best;
      double least = 1.0, missed = 0.0;
      for (Index t = 0; t < k.dimension(2); ++t) {
        const auto share = static_cast<double>(shares(b, h, t));
        if (scores(b, h, t) > 0.0f) {
          best.push_back(t);
          least = std::min(least, share);
        } else {
          ASSERT_EQ(scores(b, h, t), 0.0f);
          missed = std::max(missed, share);
        }
      }
      ASSERT_EQ(std::ssize(best), candidates);
      ASSERT_GE(least, missed);
      Tensor4<float> few(1, 1, candidates, k.dimension(3)),
          row(1, 1, q_bar.dimension(2), k.dimension(3));
      row.chip(0, 0).chip(0, 0) = q_bar.chip(b, 0).chip(h, 0);
      for (Index i = 0; i < candidates; ++i)
        few.chip(0, 0).chip(0, 0).chip(i, 0) = k.chip(b, 0).chip(h, 0).chip(best[uz(i)], 0);
      const Tensor3<float> theirs = masses(row, few, over);
      for (Index i = 0; i < candidates;
           ++i) {  // weights below 2^-100 are zeros, to either reference
        const float mass = theirs(0, 0, i);
        ASSERT_NEAR(scores(b, h, best[uz(i)]), mass, 4.8e-7f * mass + 0x1p-96f) << i;
      }
    }
}

TEST(CascadedMass, IsThatOfAllRowsAmongTheBestOfTheFirst) {
  Random random(800);
  for (const Index dim : {24, 128})
    for (const Index keys : {65, 700}) {
      const auto q_bar = random.tensor<float>(2, 2, 21, dim),
                 k = random.tensor<float>(2, 2, keys, dim);
      const std::vector<Index> first{1, 5, 20};
      for (const Aggregation over : {Aggregation::mean, Aggregation::max})
        for (const Index candidates : {Index{1}, Index{17}, keys / 2})
          expect_cascaded(masses(q_bar, k, over, {first, candidates}), q_bar, k, over, first,
                          candidates);
    }
}

// A row with a NaN is left out, in either look; where all of the first ones are, the others look at once.
TEST(CascadedMass, LeavesOutRowsAndKeysThatAreNotFinite) {
  Random random(801);
  auto q_bar = random.tensor<float>(1, 2, 12, 32), k = random.tensor<float>(1, 2, 300, 32);
  const std::vector<Index> first{2, 7, 11};
  k(0, 1, 40, 3) = not_a_number, k(0, 0, 299, 0) = std::numeric_limits<float>::infinity();
  q_bar(0, 0, 7, 1) = not_a_number;
  const Tensor3<float> some = masses(q_bar, k, Aggregation::mean, {first, 50});
  EXPECT_TRUE(std::isnan(some(0, 1, 40)) && std::isnan(some(0, 0, 299)));
  EXPECT_EQ(std::count_if(some.data(), some.data() + 300, [](float x) { return x > 0.0f; }), 50);
  float sum = 0.0f;
  for (Index t = 0; t < 299; ++t) sum += some(0, 0, t);
  EXPECT_NEAR(sum, 1.0f, 0.02f);

  for (const Index m : first) q_bar(0, 0, m, 1) = not_a_number;
  const Tensor3<float> none = masses(q_bar, k, Aggregation::mean, {first, 50}),
                       all = masses(q_bar, k, Aggregation::mean);
  for (Index t = 0; t < 299; ++t) ASSERT_EQ(none(0, 0, t), all(0, 0, t));
}

// ---- the selector -------------------------------------------------------------------------------

MassOptions options(Index budget, Index cascade = 4) {
  MassOptions o = MassOptions::balanced(Budget::keys(budget));
  o.sketch = Sketch::on;
  o.cascade = cascade;
  return o;
}

struct Selected {
  Selection keep;
  MassSelector::State state;
};
Selected select(const MassOptions& o, const SelectorInput& input,
                ExecutorRef executor = SerialExecutor{}) {
  Selected result;
  const MassSelector selector(o);
  if (input.sketch == nullptr) selector.appended(input, result.state, executor);
  selector.select(input, result.state, result.keep, executor);
  return result;
}

TEST(Cascade, TheLastQueryOfEachHeadAndEachFourthOfTheOthersLookFirst) {
  Random random(802);
  const auto q = random.tensor<float>(1, 8, 40, 32), k = random.tensor<float>(1, 2, 500, 32);
  Selected got = select(options(30), {q, k, LogitOptions{}});
  const std::vector<Index> expected{0,  4,  8,  12, 15, 17, 21, 25, 29, 31,
                                    34, 38, 42, 46, 47, 51, 55, 59, 63};
  const auto* const first = got.state.scorer.first_rows.data();
  EXPECT_EQ(std::vector<Index>(first, first + expected.size()), expected);

  // The same, step by step from the rows that score.
  const float* const rows = got.state.scorer.queries.q_bar.data();
  Tensor4<float> q_bar(1, 2, 64, 32);
  std::copy_n(rows, q_bar.size(), q_bar.data());
  Tensor3<float> scores(1, 2, 500);
  detail::SketchedMassState state;
  const Rows keys(k);
  const KeySketch sketch = sketch_of(keys);
  const SketchedCallOf of(keys, sketch, nullptr, q_bar, Aggregation::mean);
  detail::sketched_softmax_scores(of.call, 1.0f / std::sqrt(32.0f), {expected, 120, 120}, scores,
                                  state);
  EXPECT_EQ(got.keep, quoka::top_k(scores, 30, {.window = 3}));
  EXPECT_NE(got.keep, select(options(30, 0), {q, k, LogitOptions{}}).keep);
  quoka::ThreadPool pool(3);
  EXPECT_EQ(select(options(30), {q, k, LogitOptions{}}, pool).keep, got.keep);
}

TEST(Cascade, BeginsWhereThePastIsLongerThanTwiceTheCandidates) {
  Random random(803);
  const auto q = random.tensor<float>(1, 4, 40, 32), k = random.tensor<float>(1, 2, 241, 32);
  const TensorView<const float> keys(k);
  const auto differs = [&](Index len, const MassOptions& o) {
    MassOptions plain = o;
    plain.cascade = 0;
    const SelectorInput input{q, keys.slice(0, len), LogitOptions{}};
    return select(o, input).keep != select(plain, input).keep;
  };
  EXPECT_FALSE(differs(240, options(30)));
  EXPECT_TRUE(differs(241, options(30)));
  EXPECT_TRUE(differs(181, options(30, 3)));
  EXPECT_FALSE(differs(180, options(30, 3)));
  EXPECT_FALSE(differs(241, options(1, 1 << 20)));
  MassOptions half = options(30);  // no more than half of the queries look first
  half.queries = 8;
  EXPECT_TRUE(differs(241, half));
}

// Single tokens are all of them a head's last; float has no cascade. Nothing is reserved for it there.
TEST(Cascade, DoesNothingElsewhere) {
  Random random(804);
  const auto q = random.tensor<float>(1, 4, 40, 32), one = random.tensor<float>(1, 4, 1, 32),
             k = random.tensor<float>(1, 2, 400, 32);
  const auto expect_same = [&](const auto& vary, const Rows& queries) {
    MassOptions with = options(20), without = options(20, 0);
    vary(with), vary(without);
    const Selected a = select(with, {queries, k, LogitOptions{}}),
                   b = select(without, {queries, k, LogitOptions{}});
    EXPECT_EQ(a.keep, b.keep);
    EXPECT_EQ(a.state.bytes(), b.state.bytes());
  };
  EXPECT_NE(select(options(20), {q, k, LogitOptions{}}).keep,
            select(options(20, 0), {q, k, LogitOptions{}}).keep);
  expect_same([](MassOptions&) {}, one);
  expect_same([](MassOptions& o) { o.sketch = Sketch::off; }, q);
}

// An eighth of 63 keys is 7, and has a cascade; an eighth of the 64 that there is room for is 8, and has none.
TEST(Cascade, HasMemoryWhereAFullCacheHasNone) {
  Random random(808);
  const auto q = random.tensor<float>(1, 4, 40, 32), k = random.tensor<float>(1, 2, 63, 32);
  MassOptions o = options(1);
  o.budget = Budget::share(0.125);
  Selected with_room = select(o, {.q = q, .k = k, .logits = LogitOptions{}, .capacity = 64});
  EXPECT_EQ(with_room.keep, select(o, {q, k, LogitOptions{}}).keep);
  EXPECT_GE(with_room.state.scorer.sketched->slots[0].candidates.bytes(), 2 * 28 * 4);
}

TEST(Cascade, MemoryIsTakenOnceForACacheThatGrows) {
  Random random(807);
  const auto q = random.tensor<float>(1, 4, 40, 24), k = random.tensor<float>(1, 2, 900, 24);
  const TensorView<const float> keys(k);
  for (const Budget budget : {Budget::keys(30), Budget::share(0.1)}) {
    MassOptions o = options(30);
    o.budget = budget;
    const MassSelector selector(o);
    MassSelector::State state;
    Selection keep;
    Index bytes = 0;
    for (Index len = 100; len <= 900; len += 100) {
      const SelectorInput input{
          .q = q, .k = keys.slice(0, len), .logits = LogitOptions{}, .capacity = 900};
      selector.appended(input, state, SerialExecutor{});
      selector.select(input, state, keep, SerialExecutor{});
      if (len == 100) bytes = state.bytes();
      EXPECT_EQ(state.bytes(), bytes) << len;
    }
  }
}

// Of the mass that the selection without a cascade holds, by float's scores; the mean over heads.
double mass_kept(const Rows& q, const Rows& k, Index budget) {
  MassOptions o = options(budget);
  const SelectorInput input{q, k, LogitOptions{}};
  const Selection with = select(o, input).keep;
  o.cascade = 0;
  const Selection without = select(o, input).keep;
  o.sketch = Sketch::off;
  quoka::MassScorer::State state;
  Tensor3<float> scores(1, k.heads(), k.len());
  quoka::MassScorer(o).score(input, state, scores, SerialExecutor{});
  double kept = 0.0;
  for (Index head = 0; head < k.heads(); ++head) {
    double mass[2] = {};
    for (const Position t : with.positions(0, head))
      mass[0] += static_cast<double>(scores(0, head, t));
    for (const Position t : without.positions(0, head))
      mass[1] += static_cast<double>(scores(0, head, t));
    kept += mass[0] / mass[1] / static_cast<double>(k.heads());
  }
  return kept;
}

TEST(Cascade, KeepsTheMassOfRealLayers) {
  double least = 1.0;
  for_each_real_layer([&](const quoka_examples::LayerCapture& layer) {
    const TensorView<const float> q = layer.q, k = layer.k;
    for (const Index begin : {Index{1280}, q.len() - 128})
      for (const Index budget : {begin / 32, begin / 16})
        least = std::min(least, mass_kept(q.slice(begin, 128), k.slice(0, begin), budget));
  });
  EXPECT_GE(least, 0.97);
  RecordProperty("least_kept", std::to_string(least));
}

}  // namespace
