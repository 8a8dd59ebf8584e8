// MassScorer::pays(): where selecting takes longer than attention to all keys, calls that do both attend to all of
// them; select() selects in any case. That a layer and a batch do what selector and attention do is in
// prefill_suite_test.cpp and ragged_test.cpp; that an engine's call does, in masked_attention_test.cpp.

#include <quoka/select/mass_selector.hpp>
#include <quoka/select/quoka.hpp>

#include "support/fixtures.hpp"

#include <gtest/gtest.h>

#include <vector>

namespace {

using namespace quoka_test;
using quoka::Budget;
using quoka::MassOptions;
using quoka::MassSelector;
using quoka::Sketch;

// ---- the rule -----------------------------------------------------------------------------------

// Does recommended() select, of 240 past keys these?
bool pays(Index group, Index queries, bool codes, const Budget& budget, bool in_int8 = false) {
  const Index past = 240;
  Random random(7);
  const auto q = random.tensor<float>(1, group, queries, 8),
             k = random.tensor<float>(1, 1, past, 8);
  MassOptions how = MassOptions::recommended(budget);
  how.sketch = codes ? Sketch::on : Sketch::off;
  const MassSelector selector(how);
  MassSelector::State state;
  quoka::SelectorInput input{
      .q = q, .k = k, .logits = quoka::LogitOptions{}, .attends = true, .in_int8 = in_int8};
  selector.appended(input, state, SerialExecutor{});
  Selection keep, keep_by_cosines, in_any_case;
  selector.select(input, state, keep, SerialExecutor{});
  EXPECT_EQ(keep.is_all(), !selector.scorer().pays(input, state.scorer));
  quoka::QuokaSelector::State of_cosines;
  quoka::QuokaSelector({.budget = budget})
      .select(input, of_cosines, keep_by_cosines, SerialExecutor{});
  EXPECT_EQ(keep_by_cosines.max_count(), budget.count(past)) << "cosines always";
  input.attends = false;
  selector.select(input, state, in_any_case, SerialExecutor{});
  EXPECT_EQ(in_any_case.sum_of_counts(), budget.count(past) * in_any_case.heads());
  EXPECT_TRUE(keep.is_all() || keep == in_any_case);
  return !keep.is_all();
}
bool pays(Index group, Index queries, bool codes, Index part, bool in_int8 = false) {
  return pays(group, queries, codes, Budget::keys(240 / part), in_int8);
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

// Measured too, in int8: milliseconds of selection and attention, against attention to all keys.
TEST(WhereSelectingPays, NotForSmallGainsInInt8) {
  EXPECT_FALSE(pays(4, 32, true, 4, true)) << "20 against 17";
  EXPECT_FALSE(pays(4, 128, false, 8, true)) << "55 against 46";
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

// If nearly all keys would be selected, all are; without codes from fewer on.
TEST(WhereSelectingPays, NotForNearlyAllKeys) {
  for (const bool codes : {false, true}) {
    EXPECT_TRUE(pays(4, 128, codes, Budget::share(codes ? 0.75 : 0.5)));
    EXPECT_FALSE(pays(4, 128, codes, Budget::share(codes ? 0.76 : 0.65)));
  }
}

}  // namespace
