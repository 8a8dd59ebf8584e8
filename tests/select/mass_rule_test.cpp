// MassSelector's rule against its oracle in double (support/mass_oracle.hpp): lists of query heads by one threshold, by
// exact counts, in float and by 8-bit codes; and that results do not depend on the rest of a batch, or on other keys
// that are not finite. Workers, layouts, formats and history: selection_fuzz_test.cpp.

#include <quoka/kernels/byte_formats.hpp>
#include <quoka/select/mass_selector.hpp>

#include "support/attention_case.hpp"
#include "support/mass_oracle.hpp"
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
    SelectorInput input{.q = q, .k = k, .logits = LogitOptions{}, .capacity = of.kv_len};
    if (of.chunk) input.chunk_k = chunk;
    return input;
  }
  oracle::MassShares expected(const MassOptions& options, double softcap = 0.0) const {
    return oracle::mass_shares(to_oracle(q), to_oracle(k), to_oracle(chunk),
                               {.queries = options.queries,
                                .kernel_size = options.kernel_size,
                                .scale = 1.0 / std::sqrt(static_cast<double>(of.dim)),
                                .softcap = softcap});
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

// By codes of all channels, because in random keys no channel matters more than others.
void expect_rule(const MassData& data, MassOptions options) {
  options.all_channels = true;
  const oracle::MassShares expected = data.expected(options);
  const Index lists = std::ssize(expected.values[0]);
  const Index most = options.budget.count(data.of.kv_len) * lists;
  const double given = static_cast<double>(options.threshold) / static_cast<double>(data.of.kv_len);
  const Selection keep = select(options, data.input());
  ASSERT_FALSE(keep.is_all());
  for (Index b = 0; b < data.of.batch; ++b) {
    Index count = 0;
    for (Index list = 0; list < lists; ++list) count += keep.count(b, list);
    EXPECT_TRUE(options.by_threshold() || count == most) << count << " and " << most;
    const double threshold = options.by_threshold() ? given : oracle::kth_value(expected, b, most);
    ASSERT_NO_FATAL_FAILURE(expect_as_oracle(keep, expected, b, threshold, room_of(options)));
    for (Index list = 0; list < lists; ++list)
      EXPECT_NEAR(keep.kept_shares()[uz(b * lists + list)], kept_share(keep, expected, b, list),
                  options.sketch == Sketch::on ? 2e-2 : 1e-4);
  }
}

// ---- the rule -------------------------------------------------------------------------------------

const MassCase cases[] = {
    {},
    {.q_heads = 2, .kv_heads = 2},                              // group 1
    {.q_heads = 9, .kv_heads = 3, .q_len = 100, .dim = 64},     // group 3
    {.q_heads = 8, .kv_heads = 1, .q_len = 40, .kv_len = 700},  // group 8
    {.q_heads = 5, .kv_heads = 1, .q_len = 7, .kv_len = 333},   // an odd number of voters
    {.batch = 3, .q_len = 33, .kv_len = 97, .dim = 17},         // a batch
    {.q_len = 300, .kv_len = 1000},                             // some queries do not vote
    {.q_heads = 8, .kv_heads = 2, .q_len = 1, .kv_len = 400},   // a token: lists of KV heads
    {.q_heads = 6, .kv_heads = 2, .q_len = 10, .kv_len = 400},  // few rows
    {.chunk = false},                                           // shares of the past alone
    {.kv_len = 2500, .loud = 4.0},                              // several ranges
};

class MassRule : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Shapes, MassRule, ::testing::Range(0, static_cast<int>(std::size(cases))));

TEST_P(MassRule, KeepsTheLargestOfAllHeads) {
  Random random(500 + static_cast<std::uint64_t>(GetParam()));
  const MassData data(cases[GetParam()], random);
  for (const Sketch sketch : {Sketch::off, Sketch::on})
    for (const double share : {0.03, 0.125, 0.5}) {
      MassOptions options = MassOptions::recommended(Budget::share(share));
      options.sketch = sketch;
      ASSERT_NO_FATAL_FAILURE(expect_rule(data, options));
    }
}

TEST_P(MassRule, KeepsWhatReachesAThreshold) {
  Random random(600 + static_cast<std::uint64_t>(GetParam()));
  const MassData data(cases[GetParam()], random);
  for (const Sketch sketch : {Sketch::off, Sketch::on})
    for (const float threshold : {0.41f, 1.0f, 3.0f})
      ASSERT_NO_FATAL_FAILURE(
          expect_rule(data, {.threshold = threshold, .least = 0, .sketch = sketch}));
}

TEST_P(MassRule, HasVotersAndNeighboursByItsOptions) {
  Random random(700 + static_cast<std::uint64_t>(GetParam()));
  const MassData data(cases[GetParam()], random);
  for (const Index kernel_size : {1, 2, 5})
    for (const Index queries : {1, 50, 1000}) {
      MassOptions options = MassOptions::recommended(Budget::keys(20));
      options.sketch = Sketch::off, options.kernel_size = kernel_size, options.queries = queries;
      ASSERT_NO_FATAL_FAILURE(expect_rule(data, options));
    }
}

TEST(MassSelection, IsWithinItsBudgetsHoweverTheThresholdIs) {
  Random random(710);
  const MassData data({.kv_len = 800}, random);
  const auto mean_of = [&](const MassOptions& options) {
    const Selection keep = select(options, data.input());
    return static_cast<double>(keep.sum_of_counts()) / static_cast<double>(keep.heads());
  };
  const MassOptions free{.threshold = 1.0f, .least = 0};
  const double count = mean_of(free);
  ASSERT_GT(count, 60.0);
  ASSERT_LT(count, 700.0);
  EXPECT_EQ(mean_of({.budget = Budget::keys(50), .threshold = 1.0f, .least = 0}), 50.0);
  EXPECT_EQ(mean_of({.budget = Budget::keys(799), .threshold = 1.0f, .least = 0}), count);
  EXPECT_EQ(mean_of({.threshold = 1.0f, .least = 750}), 750.0);
  EXPECT_EQ(mean_of({.threshold = 1.0f, .least = 20}), count);
  // The budget is the smaller one.
  EXPECT_EQ(mean_of({.budget = Budget::keys(50), .threshold = 1.0f, .least = 750}), 50.0);
}

TEST(MassSelection, OfAllKeysIsAllAndOfNoneIsNone) {
  Random random(711);
  const MassData data({.kv_len = 90}, random);
  EXPECT_TRUE(select(MassOptions(), data.input()).is_all());  // below `least`
  EXPECT_TRUE(select(MassOptions::recommended(Budget::keys(90)), data.input()).is_all());
  const Selection none = select(MassOptions::recommended(Budget::keys(0)), data.input());
  EXPECT_EQ(none.sum_of_counts(), 0);
  EXPECT_EQ(none.kv_len(), 90);
  const Selection barely = select({.threshold = 1e30f, .least = 0}, data.input());
  EXPECT_EQ(barely.sum_of_counts(), 0);
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

TEST(MassSelection, ForcedKeysAreInEveryListAndInsideTheBudget) {
  Random random(713);
  const MassData data({.kv_len = 300}, random);
  for (const auto& [first, last] : {std::pair<Index, Index>{3, 5}, {0, 17}, {30, 30}}) {
    MassOptions options = MassOptions::recommended(Budget::keys(40));
    options.keep_first = first, options.keep_last = last;
    const Selection keep = select(options, data.input());
    EXPECT_EQ(keep.sum_of_counts(), 40 * keep.heads());
    for (Index list = 0; list < keep.heads(); ++list) {
      const auto kept = keep.positions(0, list);
      for (Index t = 0; t < std::min<Index>(first, 40); ++t)
        EXPECT_TRUE(std::binary_search(kept.begin(), kept.end(), static_cast<Position>(t)));
      for (Index t = 0; t < std::min<Index>(last, 40 - first); ++t)
        EXPECT_TRUE(std::binary_search(kept.begin(), kept.end(), static_cast<Position>(299 - t)));
    }
  }
}

TEST(MassSelection, CapsLogitsAsAttentionDoes) {
  Random random(714);
  const MassData data({.loud = 8.0}, random);
  MassOptions options = MassOptions::recommended(Budget::keys(60));
  const oracle::MassShares expected = data.expected(options, 3.0);
  SelectorInput input = data.input();
  input.logits->softcap = 3.0f;
  const Selection keep = select(options, input);
  ASSERT_NO_FATAL_FAILURE(
      expect_as_oracle(keep, expected, 0, oracle::kth_value(expected, 0, 60 * keep.heads()), 1e-4));
}

// ---- what is not finite ---------------------------------------------------------------------------

TEST(MassSelection, LeavesOutWhatIsNotFinite) {
  Random random(720);
  MassData data({.q_heads = 4, .kv_heads = 2, .kv_len = 400}, random);
  data.k(0, 0, 17, 3) = not_a_number;
  data.k(0, 0, 18, 3) = infinity;
  data.k(0, 1, 399, 0) = -infinity;
  data.chunk(0, 1, 60, 5) = not_a_number;
  data.q(0, 1, 127, 2) = not_a_number;  // the last query of head 1
  data.q(0, 3, 0, 2) = infinity;
  for (const Sketch sketch : {Sketch::off, Sketch::on}) {
    for (const Index keys : {50, 390}) {
      MassOptions options = MassOptions::recommended(Budget::keys(keys));
      options.sketch = sketch;
      ASSERT_NO_FATAL_FAILURE(expect_rule(data, options));
      const Selection keep = select(options, data.input());
      for (const Index list : {0, 1}) {
        const auto kept = keep.positions(0, list);
        EXPECT_FALSE(std::binary_search(kept.begin(), kept.end(), Position{17}));
        EXPECT_FALSE(std::binary_search(kept.begin(), kept.end(), Position{18}));
      }
    }
  }
}

TEST(MassSelection, HeadsWithoutAFiniteQueryHaveShareZero) {
  Random random(721);
  MassData data({.q_heads = 4, .kv_heads = 2, .kv_len = 400}, random);
  for (Index i = 0; i < data.of.q_len; ++i) data.q(0, 2, i, 0) = not_a_number;
  for (const Sketch sketch : {Sketch::off, Sketch::on}) {
    MassOptions options = MassOptions::recommended(Budget::keys(50));
    options.sketch = sketch;
    const Selection keep = select(options, data.input());
    EXPECT_EQ(keep.count(0, 2), 0);
    EXPECT_EQ(keep.sum_of_counts(), 200);
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

// ---- what it does not depend on -------------------------------------------------------------------

TEST(MassSelection, OfASequenceIsThatOfTheSequenceAlone) {
  Random random(740);
  const MassData data({.batch = 3, .q_len = 60, .kv_len = 300}, random);
  for (const Sketch sketch : {Sketch::off, Sketch::on}) {
    MassOptions options = MassOptions::recommended(Budget::keys(31));
    options.sketch = sketch;
    const Selection all = select(options, data.input());
    for (Index b = 0; b < 3; ++b) {
      SelectorInput one = data.input();
      const StoredRows q(data.q, quoka::float_format()), k(data.k, quoka::float_format()),
          chunk(data.chunk, quoka::float_format());
      one.q = q.sequence(b), one.k = k.sequence(b), one.chunk_k = chunk.sequence(b);
      const Selection alone = select(options, one);
      for (Index list = 0; list < all.heads(); ++list)
        EXPECT_EQ(alone.positions(0, list), all.positions(b, list));
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

// ---- with attention -------------------------------------------------------------------------------

// The fewer keys are kept, the smaller are kept_shares(); they predict the error of attention.
TEST(MassSelection, TellsWhatItKeeps) {
  Random random(770);
  const MassData data({.kv_len = 600, .loud = 3.0}, random);
  double before = 0.0;
  for (const Index keys : {10, 60, 200, 590}) {
    const Selection keep = select(MassOptions::recommended(Budget::keys(keys)), data.input());
    double sum = 0.0;
    for (const float share : keep.kept_shares()) {
      EXPECT_GT(share, 0.0f);
      EXPECT_LE(share, 1.0f);
      sum += static_cast<double>(share);
    }
    EXPECT_GT(sum, before);
    before = sum;
  }
  EXPECT_GT(before, 0.99 * 4.0);
}

TEST(MassSelection, RefusesOptionsOutOfRange) {
  expect_refused([] { MassSelector({.queries = 0}); }, {"queries", 0, 1});
  expect_refused([] { MassSelector({.least = -1}); }, {"least", -1, 0});
  expect_refused([] { MassSelector({.threshold = -0.5f}); }, {"threshold", "-0.5", "[0, 1e30]"});
  expect_refused([] { MassSelector({.threshold = not_a_number}); }, {"threshold", "nan"});
}

}  // namespace
