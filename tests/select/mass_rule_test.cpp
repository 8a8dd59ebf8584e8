// MassSelector's rule against its oracle in double (support/mass_oracle.hpp), drawn: lists of query heads by one
// threshold or by exact counts, in float and by 8-bit codes, beside rows that are not finite. Workers, layouts, formats,
// history, forced keys, and budgets of no key and of all: selection_fuzz_test.cpp.

#include <quoka/kernels/byte_formats.hpp>
#include <quoka/select/mass_selector.hpp>

#include "support/attention_case.hpp"
#include "support/mass_oracle.hpp"
#include "support/rounding_modes.hpp"
#include "support/selector_fixtures.hpp"

namespace {

using namespace quoka_test;
using quoka::MassOptions;
using quoka::MassSelector;
using quoka::SelectorInput;
using quoka::Sketch;

struct MassCase {
  Index batch = 1, q_heads = 4, kv_heads = 2, q_len = 128, kv_len = 500, dim = 32;
  bool chunk = true;
  double loud = 2.0;
  float softcap = 0.0f;
};

struct MassData {
  Tensor4<float> q, k, chunk;
  MassCase of;

  MassData(const MassCase& shape, Random& random) : of(shape) {
    q = random.tensor<float>(shape.batch, shape.q_heads, shape.q_len, shape.dim, shape.loud);
    k = random.tensor<float>(shape.batch, shape.kv_heads, shape.kv_len, shape.dim);
    chunk =
        random.tensor<float>(shape.batch, shape.kv_heads, shape.chunk ? shape.q_len : 0, shape.dim);
  }
  SelectorInput input() const {
    SelectorInput input{
        .q = q, .k = k, .logits = LogitOptions{.softcap = of.softcap}, .capacity = of.kv_len};
    if (of.chunk) input.chunk_k = chunk;
    return input;
  }
  oracle::MassShares expected(const MassOptions& options) const {
    return oracle::mass_shares(to_oracle(q), to_oracle(k), to_oracle(chunk),
                               {.queries = options.queries,
                                .kernel_size = options.kernel_size,
                                .scale = 1.0 / std::sqrt(static_cast<double>(of.dim)),
                                .softcap = static_cast<double>(of.softcap)});
  }
};

Selection select(const MassOptions& options, const SelectorInput& input) {
  const MassSelector selector(options);
  MassSelector::State state;
  if (options.sketch == Sketch::on) selector.appended(input, state, SerialExecutor{});
  Selection selection;
  selector.select(input, state, selection, SerialExecutor{});
  return selection;
}

// The relative error of a share: in float, and by codes.
double room_of(const MassOptions& options) { return options.sketch == Sketch::on ? 0.15 : 1e-4; }

// Every kept pair reaches the threshold, and no other does, except values within the error of the
// threshold.
void expect_as_oracle(const Selection& keep, const oracle::MassShares& expected, Index b,
                      double threshold, double room) {
  const auto& values = expected.values[uz(b)];
  ASSERT_EQ(keep.heads(), std::ssize(values));
  for (Index list = 0; list < keep.heads(); ++list) {
    const auto kept = keep.positions(b, list);
    for (Index t = 0; t < keep.kv_len(); ++t) {
      const bool is_kept = std::binary_search(kept.begin(), kept.end(), static_cast<Position>(t));
      const double value = values[uz(list)][uz(t)];
      if (is_kept)
        ASSERT_GE(value, threshold * (1.0 - room)) << "list " << list << ", key " << t;
      else
        ASSERT_LE(value, threshold * (1.0 + room)) << "list " << list << ", key " << t;
    }
  }
}

// The share of attention that the lists' voters keep.
double kept_share(const Selection& keep, const oracle::MassShares& expected, Index b, Index list) {
  double sum = expected.chunk_share[uz(b)][uz(list)];
  for (const Position t : keep.positions(b, list))
    sum += std::max(expected.shares[uz(b)][uz(list)][uz(t)], 0.0);
  return sum;
}

void expect_rule(const MassData& data, MassOptions options, const oracle::MassShares& expected) {
  const Index lists = std::ssize(expected.values[0]);
  const Index kv_len = data.of.kv_len, most = options.budget.count(kv_len) * lists,
              least = std::min(options.least_keys(kv_len) * lists, most);
  const double given = static_cast<double>(options.threshold) / static_cast<double>(kv_len);
  const Selection keep = select(options, data.input());
  ASSERT_FALSE(keep.is_all());
  for (Index b = 0; b < data.of.batch; ++b) {
    Index count = 0;
    for (Index list = 0; list < lists; ++list) count += keep.count(b, list);
    ASSERT_TRUE(least <= count && count <= most) << count;
    // By the threshold, unless fewer than the least reach it or more than the budget.
    const double threshold =
        std::clamp(given, oracle::kth_value(expected, b, most),
                   least > 0 ? oracle::kth_value(expected, b, least) : oracle::infinity);
    ASSERT_NO_FATAL_FAILURE(expect_as_oracle(keep, expected, b, threshold, room_of(options)));
    for (Index list = 0; list < lists; ++list)
      EXPECT_NEAR(keep.kept_shares()[uz(b * lists + list)], kept_share(keep, expected, b, list),
                  options.sketch == Sketch::on ? 2e-2 : 1e-4);
  }
}
void expect_rule(const MassData& data, const MassOptions& options) {
  expect_rule(data, options, data.expected(options));
}

// ---- the rule -------------------------------------------------------------------------------------

MassCase drawn_case(Random& random) {
  MassCase x;
  x.batch = random.one_of(1, 1, 3), x.kv_heads = 1 + random.below(3);
  x.q_heads = x.kv_heads * random.one_of(1, 2, 3, 5, 8);
  // A token, and few rows, have lists of KV heads; of many queries some do not vote.
  x.q_len = random.one_of(1, 3, 7, 10, 40, 100, 128, 300);
  x.kv_len = random.one_of(97, 333, 400, 700, x.batch == 1 ? 2500 : 500);  // several ranges
  x.dim = random.one_of(17, 32, 64);
  x.chunk = random.below(4) > 0, x.loud = random.below(4) == 0 ? 4.0 : 2.0;
  x.softcap = random.below(4) == 0 ? 3.0f : 0.0f;
  while (x.batch * x.q_heads * x.q_len * x.kv_len * x.dim > 12'000'000) x.kv_len = x.kv_len * 2 / 3;
  return x;
}

// Heads without a finite query have share zero.
TEST(MassRule, IsTheOraclesForDrawnCases) {
  for_each_draw("FUZZ", 80, [](Random& random, std::uint64_t) {
    const MassCase x = drawn_case(random);
    MassData data(x, random);
    SCOPED_TRACE(::testing::Message() << x.batch << "/" << x.q_heads << "/" << x.kv_heads << "/"
                                      << x.q_len << "/" << x.kv_len << "/" << x.dim);
    if (random.seldom(3)) {  // some numbers are not finite
      for (Tensor4<float>* const rows : {&data.q, &data.k, &data.k, &data.chunk})
        if (rows->size() > 0)
          rows->data()[random.below(rows->size())] =
              random.one_of(not_a_number, infinity, -infinity);
      if (random.seldom(2)) data.q.chip(random.below(x.q_heads), 1).setConstant(not_a_number);
    }
    MassOptions options =
        random.seldom(2) ? MassOptions::recommended(Budget::share(random.one_of(0.03, 0.125, 0.5)))
                         : MassOptions{.threshold = random.one_of(0.41f, 1.0f, 3.0f), .least = 0};
    if (options.by_threshold() && random.seldom(3)) options.least = random.below(x.kv_len);
    if (options.by_threshold() && random.seldom(3))
      options.budget = Budget::keys(1 + random.below(x.kv_len - 1));
    options.kernel_size = 1 + random.below(5);
    if (random.seldom(2)) options.queries = 1 + random.below(1000);
    const oracle::MassShares expected = data.expected(options);
    for (const Sketch sketch : {Sketch::off, Sketch::on}) {
      if (sketch == Sketch::on && x.softcap != 0.0f) continue;
      options.sketch = sketch;
      ASSERT_NO_FATAL_FAILURE(expect_rule(data, options, expected));
    }
  });
}

// Every eighth key has a large share: in a sample at even steps fewer shares reach the k-th largest than among all.
TEST(MassSelection, KeepsItsBudgetWhereASampleOfSharesMisleads) {
  Random random(713);
  MassData data(
      {.q_heads = 1, .kv_heads = 1, .q_len = 1, .kv_len = 8192, .chunk = false, .loud = 1}, random);
  for (Index t = 0; t < 8192; t += 8) data.k.chip(t, 2) = data.q.chip(0, 2);
  MassOptions options = MassOptions::recommended(Budget::keys(2000));
  options.kernel_size = 1, options.sketch = Sketch::off;
  expect_rule(data, options);
}

// Equal keys have equal shares: of those at the threshold the lower heads' stay, and of a head's the earlier ones.
TEST(MassSelection, TiesGoToLowerHeadsAndEarlierKeys) {
  MassCase shape{.q_heads = 4, .kv_heads = 2, .q_len = 64, .kv_len = 200};
  Random random(712);
  MassData data(shape, random);
  data.k.setZero();
  for (const Sketch sketch : {Sketch::off, Sketch::on}) {
    data.q.setConstant(1.0f), data.chunk.setZero();
    MassOptions options = MassOptions::recommended(Budget::keys(60));
    options.sketch = sketch;
    const Selection keep = select(options, data.input());
    ASSERT_EQ(keep.heads(), 4);
    EXPECT_EQ(keep.count(0, 0), 200);
    EXPECT_EQ(keep.count(0, 1), 40);
    EXPECT_EQ(keep.count(0, 2) + keep.count(0, 3), 0);
    EXPECT_EQ(keep.positions(0, 1).back(), 39);
  }
}

// A key that codes cannot stand for makes its KV head one in float; logits beyond what weights hold are those of the
// row's largest.
TEST(MassSelection, ByCodesServesAnyKeysAndQueries) {
  Random random(722);
  for (const double loud : {0.0, 1e-3, 30.0, 1000.0}) {
    MassData data({.kv_len = 300, .loud = loud}, random);
    MassOptions options = MassOptions::recommended(Budget::keys(30));
    options.sketch = Sketch::on;
    const oracle::MassShares expected = data.expected(options);
    const Selection keep = select(options, data.input());
    EXPECT_EQ(keep.sum_of_counts(), 30 * keep.heads());
    for (Index list = 0; list < keep.heads(); ++list)
      EXPECT_NEAR(keep.kept_shares()[uz(list)], kept_share(keep, expected, 0, list), 0.05);
  }
  MassData data({.kv_len = 300}, random);
  for (Index c = 0; c < data.of.dim; ++c) data.k(0, 1, 77, c) *= 1e-20f;
  MassOptions options = MassOptions::recommended(Budget::keys(30));
  options.sketch = Sketch::on;
  ASSERT_NO_FATAL_FAILURE(expect_rule(data, options));
}

// Heads share the budget.
TEST(MassSelection, ByCodesInAnyRoundingModeIsNearlyThatToNearest) {
  Random random(61);
  MassData data({.q_len = 16, .kv_len = 3000, .dim = 64, .chunk = false, .loud = 1.0}, random);
  for (Index t = 0; t < 3000; ++t)  // of many lengths
    for (Index c = 0; c < 64; ++c) data.k(0, 0, t, c) *= static_cast<float>(1 + t % 97) / 7.0f;
  const MassOptions options{
      .budget = Budget::keys(200), .queries = 64, .kernel_size = 1, .sketch = Sketch::on};
  const Selection to_nearest = select(options, data.input());
  for (const RoundingMode& mode : rounding_modes) {
    SCOPED_TRACE(mode.name);
    const Selection kept = in(mode, [&] { return select(options, data.input()); });
    for (Index head = 0; head < kept.heads(); ++head) {
      const auto a = kept.positions(0, head), b = to_nearest.positions(0, head);
      std::vector<Position> both;
      std::set_intersection(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(both));
      EXPECT_GE(10 * std::ssize(both), 9 * std::ssize(b));
    }
  }
}

// Without a State: the call for a caller's own cache has the chunk's keys, too.
TEST(MassSelection, OfOneCallCountsTheChunksAttention) {
  Random random(745);
  const MassData data({.q_len = 60, .kv_len = 300}, random);
  MassOptions options = MassOptions::recommended(Budget::keys(31));
  options.sketch = Sketch::off;
  const MassSelector selector(options);
  const Selection with_chunk = selector.select(data.q, data.k, data.chunk, LogitOptions{});
  EXPECT_EQ(with_chunk, select(options, data.input()));
  const Selection of_past = selector.select(data.q, data.k, {});
  // The same attention is a smaller share of all of it.
  for (std::size_t list = 0; list < with_chunk.kept_shares().size(); ++list)
    EXPECT_LT(of_past.kept_shares()[list], with_chunk.kept_shares()[list]);
}

}  // namespace
