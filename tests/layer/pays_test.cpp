// MassScorer::pays(): where selecting takes longer than attention to all keys, calls that do both attend to all of
// them; select() selects in any case. That a layer and a batch do what selector and attention do is in
// prefill_suite_test.cpp and ragged_test.cpp.

#include <quoka/engine/masked_attention.hpp>
#include <quoka/layer/chunked_prefill.hpp>

#include "support/attention_fixtures.hpp"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace {

using namespace quoka_test;
using quoka::Budget;
using quoka::ChunkedPrefill;
using quoka::MassOptions;
using quoka::MassSelector;
using quoka::Sketch;

// ---- the rule -----------------------------------------------------------------------------------

// Does recommended() select, of `past` keys one in `part`?
bool pays(Index group, Index queries, bool codes, Index part, bool in_int8 = false) {
  const Index past = 240;
  Random random(7);
  const auto q = random.tensor<float>(1, group, queries, 8),
             k = random.tensor<float>(1, 1, past, 8);
  MassOptions how = MassOptions::recommended(Budget::keys(past / part));
  how.sketch = codes ? Sketch::on : Sketch::off;
  const MassSelector selector(how);
  MassSelector::State state;
  const quoka::SelectorInput input{
      .q = q, .k = k, .logits = quoka::LogitOptions{}, .attends = true, .in_int8 = in_int8};
  selector.appended(input, state, SerialExecutor{});
  Selection keep, keep_by_cosines;
  selector.select(input, state, keep, SerialExecutor{});
  EXPECT_EQ(keep.is_all(), !selector.scorer().pays(input, state.scorer));
  EXPECT_TRUE(keep.is_all() || keep.sum_of_counts() == past / part * keep.heads());
  quoka::QuokaSelector::State of_cosines;
  quoka::QuokaSelector({.budget = how.budget})
      .select(input, of_cosines, keep_by_cosines, SerialExecutor{});
  EXPECT_EQ(keep_by_cosines.max_count(), past / part) << "cosines always";
  return !keep.is_all();
}

// Shares of 8,192 keys up to which selecting and attending took less time than attention to all of them; groups of 4
// query heads of 128 channels, AVX-512 with VNNI (bench/selecting).
struct Border {
  Index queries;
  bool codes, in_int8;
  double share;
};
constexpr Border borders[] = {
    {12, true, false, 0.36},  {16, true, false, 0.42},  {32, true, false, 0.52},
    {64, true, false, 0.59},  {128, true, false, 0.76}, {12, true, true, 0.22},
    {16, true, true, 0.23},   {32, true, true, 0.21},   {64, true, true, 0.21},
    {128, true, true, 0.41},  {16, false, false, 0.15}, {32, false, false, 0.21},
    {64, false, false, 0.25}, {128, false, false, 0.57}};

TEST(WhereSelectingPays, IsWhatWasMeasured) {
  for (const Border& measured : borders)
    for (const Index part : {2, 3, 4, 5, 6, 8, 10, 16}) {
      SCOPED_TRACE(measured.queries);
      SCOPED_TRACE(part);
      const double share = 1.0 / static_cast<double>(part);
      const bool less = share<0.85 * measured.share, more = share> 1.2 * measured.share;
      if (!less && !more) continue;
      EXPECT_EQ(pays(4, measured.queries, measured.codes, part, measured.in_int8), less)
          << (measured.codes ? "codes" : "no codes") << (measured.in_int8 ? ", int8" : "");
    }
}

// An int8 chunk selected half of 8,192 keys in 52 ms, where all of them take 45.
TEST(WhereSelectingPays, ForFewerKeysInInt8) {
  EXPECT_TRUE(pays(4, 128, true, 2));
  EXPECT_FALSE(pays(4, 128, true, 2, true));
  EXPECT_TRUE(pays(4, 128, true, 4, true)) << "37 ms against 46";
  EXPECT_FALSE(pays(4, 32, true, 4, true)) << "20 ms against 17";
  EXPECT_FALSE(pays(4, 128, false, 8, true)) << "55 ms against 46";
}

// In the ranges that each line names, for groups of 1, 3, 4 and 8 query heads.
TEST(WhereSelectingPays, ForTokensAndFewRows) {
  for (const Index group : {1, 3, 4, 8})
    for (const Index part : {2, 4, 8, 16}) {
      SCOPED_TRACE(group);
      EXPECT_FALSE(pays(group, 1, false, part)) << "1.6 to 8 times the attention to all keys";
      EXPECT_EQ(pays(group, 1, true, part), part >= 4) << "0.7 to 2.2 times with half of the keys";
      EXPECT_TRUE(pays(group, 3, true, part)) << "one list: up to three quarters of the keys";
      EXPECT_FALSE(pays(group, 2, false, part)) << "selecting packs every key";
    }
}

// ---- the calls ----------------------------------------------------------------------------------

constexpr Index past_len = 300, q_heads = 8, kv_heads = 2, dim = 32;
constexpr quoka::LayerShape shape{.q_heads = q_heads, .kv_heads = kv_heads, .head_dim = dim};

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

MassOptions options(Sketch sketch) {
  MassOptions of = MassOptions::balanced(Budget::keys(30));
  of.sketch = sketch;
  return of;
}

// If nearly all keys would be selected, all are; without codes from fewer on.
TEST(WhereSelectingPays, NotForNearlyAllKeys) {
  for (const bool codes : {false, true}) {
    const quoka::Budget most = Budget::share(codes ? 0.75f : 0.5f),
                        more = Budget::share(codes ? 0.76f : 0.65f);
    for (const auto& [budget, selects] : {std::pair{most, true}, std::pair{more, false}}) {
      MassOptions how = MassOptions::recommended(budget);
      how.sketch = codes ? Sketch::on : Sketch::off;
      const Data data(128);
      ChunkedPrefill<MassSelector> layer(shape, how);
      layer.append(data.in.past_k, data.in.past_v);
      auto got = unwritten(data.in.q, dim);
      layer.forward(data.in.q, data.in.k, data.in.v, {got.out, got.lse});
      EXPECT_EQ(layer.selection().is_all(), !selects) << codes;
      EXPECT_EQ(layer.select(data.in.q).is_all(), false) << "select() selects in any case";
    }
  }
}

// An engine's calls go by the arithmetic they are asked for, where the machine has products of 8 bits.
TEST(WhereSelectingPays, AnEnginesCallsGoByTheirArithmetic) {
  const Data data(128);
  MassOptions how = MassOptions::recommended(Budget::share(0.5));
  how.sketch = Sketch::on;
  for (const quoka::Arithmetic asked : {quoka::Arithmetic::float_, quoka::Arithmetic::int8}) {
    const bool int8 = quoka::arithmetic_used(asked) == quoka::Arithmetic::int8;
    SCOPED_TRACE(int8);
    auto got = unwritten(data.in.q, dim);
    Random random(3);
    const auto k = random.tensor<float>(1, kv_heads, past_len + 128, dim),
               v = random.tensor<float>(1, kv_heads, past_len + 128, dim);
    Tensor4<Eigen::half> mask(1, 1, 128, past_len + 128);
    for (Index i = 0; i < 128; ++i)
      for (Index t = 0; t < past_len + 128; ++t)
        mask(0, 0, i, t) = Eigen::half(t <= past_len + i ? 0.0f : -quoka::simd::infinity);
    quoka::MaskedAttention engine;
    const quoka::MaskedReport report =
        engine.run(std::vector{quoka::MaskedStream{
                       .q = data.in.q, .k = k, .v = v, .mask = mask, .out = got.out}},
                   {.selection = how}, {.arithmetic = asked}, SerialExecutor{});
    EXPECT_EQ(report.outcome,
              int8 ? quoka::MaskedOutcome::all_kept : quoka::MaskedOutcome::selected);
  }
}

TEST(ByCost, AnEnginesSingleQueriesAreExactWithoutASketch) {
  const Data data(1);
  quoka::MaskedOptions masked{.selection = options(Sketch::on), .decode = true};
  quoka::MaskedAttention layer;
  auto got = unwritten(data.in.q, dim);
  Tensor4<Eigen::half> mask(1, 1, 1, past_len);
  mask.setZero();
  const quoka::MaskedReport report = layer.run(
      std::vector{quoka::MaskedStream{
          .q = data.in.q, .k = data.in.past_k, .v = data.in.past_v, .mask = mask, .out = got.out}},
      masked, {}, SerialExecutor{});
  EXPECT_EQ(report.outcome, quoka::MaskedOutcome::all_kept);
}

}  // namespace
