// select/worth_selecting.hpp: where selecting takes longer than attention to all keys, calls that do both attend to
// all of them, to the bits of dense attention; select() selects in any case, and so does Selecting::always.

#include <quoka/engine/masked_attention.hpp>
#include <quoka/prefill/chunked_prefill.hpp>
#include <quoka/prefill/ragged.hpp>
#include <quoka/runtime/thread_pool.hpp>
#include <quoka/select/dense.hpp>
#include <quoka/select/worth_selecting.hpp>

#include "support/attention_fixtures.hpp"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace {

using namespace quoka_test;
using quoka::Budget;
using quoka::ChunkedPrefill;
using quoka::DenseSelector;
using quoka::QuokaOptions;
using quoka::QuokaSelector;
using quoka::Selecting;
using quoka::SelectorInput;
using quoka::Sketch;

// ---- the rule -----------------------------------------------------------------------------------

struct Heads {
  Index q, kv, dim;
};
// The shapes that were measured.
constexpr Heads measured[] = {{32, 8, 128}, {32, 4, 64}, {9, 3, 64}, {16, 4, 256}, {8, 8, 128}};

// Of a cache of bfloat16.
bool pays(const Heads& of, Index queries, bool balanced, bool codes, double share) {
  const Index group = of.q / of.kv, most = balanced ? std::max<Index>(4, 64 / group) : 16,
              kept = std::min(most, queries);
  return quoka::detail::selecting_pays({.rows = group * queries,
                                        .tokens = queries,
                                        .k_dim = of.dim,
                                        .v_dim = of.dim,
                                        .k_bytes = 2 * of.dim,
                                        .v_bytes = 2 * of.dim,
                                        .scoring_rows = balanced ? group * kept : kept,
                                        .codes = codes,
                                        .softmax = balanced,
                                        .neighbours = balanced,
                                        .share = share});
}

// As measured (bench/results/pays.json), beyond 5 % on either side for every one of these shapes.
TEST(WorthSelecting, IsWhatWasMeasured) {
  for (const Heads& of : measured) {
    SCOPED_TRACE(std::to_string(of.q) + "/" + std::to_string(of.kv) + "/" + std::to_string(of.dim));
    for (const double share : {0.5, 0.25, 0.125, 0.0625}) {
      EXPECT_FALSE(pays(of, 1, true, false, share)) << "one token without codes: 1.7 to 7 times";
      EXPECT_TRUE(pays(of, 128, true, false, share));
      EXPECT_TRUE(pays(of, 128, true, true, share));
      EXPECT_TRUE(pays(of, 8, true, true, share));
    }
    EXPECT_TRUE(pays(of, 1, true, true, 0.125));
    EXPECT_TRUE(pays(of, 128, false, false, 0.5));
    EXPECT_TRUE(pays(of, 8, false, true, 0.25));
    EXPECT_FALSE(pays(of, 8, true, false, 0.5)) << "1.07 to 1.5 times";
    EXPECT_FALSE(pays(of, 1, false, false, 0.5)) << "1.05 to 3.3 times";
  }
  EXPECT_TRUE(pays({32, 8, 128}, 8, true, false, 0.125));
  EXPECT_FALSE(pays({8, 8, 128}, 8, true, false, 0.25));
  EXPECT_FALSE(pays({8, 8, 128}, 1, false, true, 0.25));
  EXPECT_TRUE(pays({32, 4, 64}, 1, false, false, 0.125));
  EXPECT_FALSE(pays({8, 8, 128}, 1, false, false, 0.25));
}

// More keys are never cheaper to attend to, and no share of all of them pays.
TEST(WorthSelecting, TurnsOnceFromSmallSharesToLarge) {
  for (const Heads& of : measured)
    for (const Index queries : {1, 2, 5, 8, 37, 128, 512})
      for (const int kind : {0, 1, 2, 3}) {
        bool before = true;
        for (double share = 0.0; share <= 1.0; share += 1.0 / 64) {
          const bool now = pays(of, queries, kind % 2 != 0, kind / 2 != 0, share);
          EXPECT_TRUE(before || !now) << share;
          before = now;
        }
        EXPECT_FALSE(before);
      }
}

// ---- the calls ----------------------------------------------------------------------------------

constexpr Index past_len = 300, q_heads = 8, kv_heads = 2, dim = 32;

struct Data {
  explicit Data(Index q_len, Index len = past_len) {
    Random random(1470);
    in = random_inputs<float>(random, {.q_heads = q_heads,
                                       .kv_heads = kv_heads,
                                       .head_dim = dim,
                                       .v_dim = dim,
                                       .q_len = q_len,
                                       .kv_len = len});
  }
  Inputs<float> in;
};

QuokaOptions options(Selecting selecting, Sketch sketch) {
  QuokaOptions of = QuokaOptions::balanced(Budget::keys(30));
  of.selecting = selecting, of.sketch = sketch;
  return of;
}

TEST(ByCost, ThePresetsButThePapersGoByIt) {
  EXPECT_EQ(QuokaOptions::recommended().selecting, Selecting::where_it_pays);
  EXPECT_EQ(QuokaOptions::balanced().selecting, Selecting::where_it_pays);
  EXPECT_EQ(QuokaOptions::paper().selecting, Selecting::always);
}

struct Layered {
  Output<float> got;
  Selection forward, select;
};
Layered by_layer(const Data& data, const QuokaOptions& how, ExecutorRef executor) {
  const quoka::LayerShape shape{.q_heads = q_heads, .kv_heads = kv_heads, .head_dim = dim};
  ChunkedPrefill<QuokaSelector> layer(shape, how);
  layer.append(data.in.past_k, data.in.past_v);
  Layered result{unwritten(data.in.q, dim), {}, {}};
  result.select = layer.select(data.in.q, executor);
  layer.forward(data.in.q, data.in.k, data.in.v, {result.got.out, result.got.lse}, executor);
  result.forward = layer.selection();
  return result;
}

TEST(ByCost, ALayerAttendsToAllWhereSelectingTakesLonger) {
  quoka::ThreadPool pool(3);
  for (const ExecutorRef executor : {ExecutorRef(SerialExecutor{}), ExecutorRef(pool)}) {
    for (const Index q_len : {1, 128}) {
      const Data data(q_len);
      const auto dense = attend(data.in);
      for (const Sketch sketch : {Sketch::off, Sketch::on}) {
        SCOPED_TRACE(q_len);
        const Layered by_cost = by_layer(data, options(Selecting::where_it_pays, sketch), executor),
                      always = by_layer(data, options(Selecting::always, sketch), executor);
        const bool selects = q_len > 1 || sketch == Sketch::on;
        EXPECT_EQ(by_cost.forward.is_all(), !selects);
        EXPECT_EQ(always.forward.max_count(), 30);
        EXPECT_EQ(by_cost.select, always.forward) << "select() selects";
        expect_same(by_cost.got, selects ? always.got : dense);
      }
    }
  }
}

// Of a budget by scores the floor counts.
TEST(ByCost, ABudgetByScoresGoesByItsFloor) {
  const Data data(128);
  QuokaOptions how = options(Selecting::where_it_pays, Sketch::off);
  how.budget = Budget::mass(0.5, 10);
  EXPECT_FALSE(by_layer(data, how, SerialExecutor{}).forward.is_all());
  how.budget = Budget::mass(0.5, 290);
  EXPECT_TRUE(by_layer(data, how, SerialExecutor{}).forward.is_all());
}

TEST(ByCost, ARaggedBatchGoesByEachSequence) {
  const Data one(1), many(128);
  for (const Selecting selecting : {Selecting::where_it_pays, Selecting::always}) {
    const QuokaSelector selector(options(selecting, Sketch::off));
    QuokaSelector::State states[2];
    auto first = unwritten(one.in.q, dim), second = unwritten(many.in.q, dim);
    const auto sequence = [](const Data& of, Output<float>& to, QuokaSelector::State& state) {
      return quoka::RaggedSequence<QuokaSelector>{.q = of.in.q,
                                                  .past_k = of.in.past_k,
                                                  .past_v = of.in.past_v,
                                                  .chunk = {of.in.k, of.in.v},
                                                  .out = {to.out, to.lse},
                                                  .state = &state};
    };
    const std::vector batch{sequence(one, first, states[0]), sequence(many, second, states[1])};
    quoka::RaggedWorkspace<QuokaSelector> workspace;
    quoka::select_and_attend<QuokaSelector>(selector, batch, {}, SerialExecutor{}, workspace);
    EXPECT_EQ(workspace.selection(0).is_all(), selecting == Selecting::where_it_pays);
    EXPECT_EQ(workspace.selection(1).max_count(), 30);
    if (selecting == Selecting::where_it_pays) expect_same(first, attend(one.in));
  }
}

TEST(ByCost, AnEnginesSingleQueriesAreExactWithoutASketch) {
  const Data data(1);
  for (const Selecting selecting : {Selecting::where_it_pays, Selecting::always}) {
    quoka::MaskedOptions masked{.selection = options(selecting, Sketch::on), .decode = true};
    quoka::MaskedAttention layer;
    auto got = unwritten(data.in.q, dim);
    Tensor4<Eigen::half> mask(1, 1, 1, past_len);
    mask.setZero();
    const quoka::MaskedReport report =
        layer.run(std::vector{quoka::MaskedStream{.q = data.in.q,
                                                  .k = data.in.past_k,
                                                  .v = data.in.past_v,
                                                  .mask = mask,
                                                  .out = got.out}},
                  masked, {}, SerialExecutor{});
    EXPECT_EQ(report.outcome, selecting == Selecting::always ? quoka::MaskedOutcome::selected
                                                             : quoka::MaskedOutcome::all_kept);
  }
}

}  // namespace
