// Mass kept, output error and overlap against sums in double, also for empty inputs, rows that see
// nothing and NaN.

#include <quoka/attention/diagnostics.hpp>

#include "support/attention_fixtures.hpp"

namespace {

using namespace quoka_test;
using quoka::mass_kept;
using quoka::overlap;
using quoka::RelativeError;
using quoka::RowShares;

struct RowOptions {
  double scale = 0.25, cap = 0.0;
  Index window = 0;
};

// Row by row in double, from the formula.
template <class T>
std::vector<double> exact_shares(const Tensor4<T>& queries, const Tensor4<T>& keys,
                                 const Selection& keep, const RowOptions& options = {}) {
  const oracle::Tensor q = to_oracle(queries), k = to_oracle(keys);
  std::vector<double> shares;
  for (Index b = 0; b < q.batch; ++b)
    for (Index head = 0; head < q.heads; ++head)
      for (Index i = 0; i < q.len; ++i) {
        const Index kv_head = head / (q.heads / k.heads);
        const std::vector<Position> kept = keep.positions(b, kv_head);
        double all = 0.0, of_kept = 0.0;
        for (Index t = 0; t < k.len; ++t) {
          if (options.window > 0 && k.len + i - t >= options.window) continue;
          double logit = options.scale * oracle::dot(q.row(b, head, i), k.row(b, kv_head, t));
          if (options.cap > 0.0) logit = options.cap * std::tanh(logit / options.cap);
          all += std::exp(logit);
          if (std::find(kept.begin(), kept.end(), t) != kept.end()) of_kept += std::exp(logit);
        }
        shares.push_back(all > 0.0 ? of_kept / all : 1.0);
      }
  return shares;
}

// A share has the errors of two log-sum-exps.
void expect_shares(const Tensor3<float>& shares, const std::vector<double>& expected) {
  constexpr double of_float = 1e-5, of_products = 3e-4;  // of bfloat16
  const double bound = automatic_is_float ? of_float : of_products;
  ASSERT_EQ(shares.size(), std::ssize(expected));
  for (Index i = 0; i < shares.size(); ++i)
    EXPECT_NEAR(static_cast<double>(shares.data()[i]), expected[uz(i)], bound * expected[uz(i)])
        << "row " << i;
}

TEST(MassKept, IsTheSoftmaxShareOfTheKeptKeysRowByRow) {
  for_each_storage([]<class T>() {
    Random random(901);
    const auto q = random.tensor<T>(2, 6, 7, 20), k = random.tensor<T>(2, 2, 137, 20);
    for (const Index count : {1, 37, 136}) {
      const Selection keep = random_selection(random, 2, 2, 137, count);
      expect_shares(mass_kept(q, k, keep, {.scale = 0.25f}), exact_shares(q, k, keep));
    }
  });
}

TEST(MassKept, OfAllKeysIsOneAndOfNoneIsZero) {
  Random random(902);
  const auto q = random.tensor<float>(1, 4, 3, 17), k = random.tensor<float>(1, 2, 37, 17);
  const auto all = mass_kept(q, k, Selection::all(1, 2, 37));
  const auto none = mass_kept(q, k, random_selection(random, 1, 2, 37, 0));
  for (Index i = 0; i < all.size(); ++i) {
    EXPECT_EQ(all.data()[i], 1.0f);
    EXPECT_EQ(none.data()[i], 0.0f);
  }
}

TEST(MassKept, OfComplementsAddsUpToOne) {
  Random random(903);
  const auto q = random.tensor<float>(1, 3, 5, 16, 2.0), k = random.tensor<float>(1, 3, 127, 16);
  const Selection keep = random_selection(random, 1, 3, 127, 40);
  oracle::Positions rest(1);
  for (Index head = 0; head < 3; ++head) {
    const auto kept = keep.row(0, head);
    auto& list = rest[0].emplace_back();
    for (Index t = 0; t < 127; ++t)
      if (!std::binary_search(kept.begin(), kept.end(), t)) list.push_back(t);
  }
  const auto a = mass_kept(q, k, keep), b = mass_kept(q, k, to_selection(rest, 127));
  for (Index i = 0; i < a.size(); ++i) EXPECT_NEAR(a.data()[i] + b.data()[i], 1.0f, 1e-5f);
}

TEST(MassKept, HasTheLogitsOfTheAttentionOptionsButNoSink) {
  Random random(904);
  const auto q = random.tensor<float>(1, 4, 6, 20, 3.0), k = random.tensor<float>(1, 2, 61, 20);
  const Selection keep = random_selection(random, 1, 2, 61, 13);
  const std::vector<float> sinks{3.0f, -1.0f, 0.0f, 7.0f};
  expect_shares(mass_kept(q, k, keep, {.scale = 0.5f, .softcap = 2.0f, .sinks = sinks}),
                exact_shares(q, k, keep, {.scale = 0.5, .cap = 2.0}));
}

// Row i stands at 61 + i: of the past it sees the last 20 - i - 1 keys, and from row 19 on none.
TEST(MassKept, OfARowWhoseWindowHasLeftThePastIsOne) {
  Random random(905);
  const auto q = random.tensor<float>(1, 2, 23, 20), k = random.tensor<float>(1, 1, 61, 20);
  const Selection keep = random_selection(random, 1, 1, 61, 45);
  const auto shares = mass_kept(q, k, keep, {.scale = 0.25f, .sliding_window = 20});
  expect_shares(shares, exact_shares(q, k, keep, {.window = 20}));
  EXPECT_EQ(shares(0, 1, 22), 1.0f);
}

TEST(MassKept, ComesFromALogSumExpOfTheCallersToo) {
  Random random(906);
  const auto q = random.tensor<float>(1, 4, 9, 16), k = random.tensor<float>(1, 2, 101, 16);
  const Selection keep = random_selection(random, 1, 2, 101, 31);
  for_each_executor([&](ExecutorRef executor) {
    const auto lse = quoka::past_lse(q, k, {}, executor);
    EXPECT_TRUE(same_bits(mass_kept(q, k, keep, lse, {}, executor), mass_kept(q, k, keep)));
  });
}

TEST(MassKept, OfATinyShareIsStillExact) {  // 1e-26: no difference of two sums near 1 finds it
  Tensor4<float> q(1, 1, 1, 1), k(1, 1, 2, 1);
  q.setConstant(1.0f);
  k(0, 0, 0, 0) = 60.0f, k(0, 0, 1, 0) = 0.0f;
  const auto share = mass_kept(q, k, to_selection({{{1}}}, 2), {.scale = 1.0f});
  EXPECT_NEAR(static_cast<double>(share(0, 0, 0)) / std::exp(-60.0), 1.0, 1e-5);
}

TEST(MassKept, OfAQueryThatIsNotANumberIsNaNAndNoOther) {
  Random random(907);
  auto q = random.tensor<float>(1, 2, 5, 16);
  const auto k = random.tensor<float>(1, 1, 37, 16);
  q(0, 1, 2, 7) = not_a_number;
  const auto shares = mass_kept(q, k, random_selection(random, 1, 1, 37, 9));
  for (Index head = 0; head < 2; ++head)
    for (Index i = 0; i < 5; ++i)
      EXPECT_EQ(std::isnan(shares(0, head, i)), head == 1 && i == 2) << head << ", " << i;
}

// Rows of any formats: float queries over a cache in half have the bits of the cache's floats.
TEST(MassKept, TakesQueriesAndKeysOfTwoFormats) {
  Random random(30);
  const auto k = random.tensor<Eigen::half>(1, 2, 205, 16);
  const auto q = random.tensor<float>(1, 4, 7, 16);
  Tensor4<float> floats(k.dimensions());
  for (Index i = 0; i < k.size(); ++i) floats.data()[i] = static_cast<float>(k.data()[i]);
  const Selection keep = random_selection(random, 1, 2, 205, 37);
  EXPECT_TRUE(same_bits(mass_kept(q, k, keep), mass_kept(q, floats, keep)));
}

TEST(MassKept, RefusesASelectionOfAnotherCache) {
  Random random(908);
  const auto q = random.tensor<float>(1, 2, 3, 16), k = random.tensor<float>(1, 1, 37, 16);
  expect_refused([&] { mass_kept(q, k, random_selection(random, 1, 1, 38, 9)); },
                 {"kv_len", 38, 37});
  const Tensor3<float> lse(1, 2, 4);
  expect_refused([&] { mass_kept(q, k, random_selection(random, 1, 1, 37, 9), lse); },
                 {"lse", 4, 3});
}

// ---- over many rows -----------------------------------------------------------------------------

TEST(RowShares, AreTheMeanTheWorstAndTheMeanOfTheWorst) {
  Random random(909);
  std::vector<double> expected;
  RowShares shares, others;
  for (RowShares* part : {&shares, &others}) {
    Tensor3<float> rows(2, 3, 37);
    for (Index i = 0; i < rows.size(); ++i) {
      rows.data()[i] = static_cast<float>(random.uniform());
      expected.push_back(static_cast<double>(rows.data()[i]));
    }
    part->add(rows);
  }
  shares.add(others);
  std::sort(expected.begin(), expected.end());
  const auto mean_of = [&](std::size_t count) {
    double sum = 0.0;
    for (std::size_t i = 0; i < count; ++i) sum += expected[i];
    return sum / static_cast<double>(count);
  };
  EXPECT_EQ(shares.rows(), 444);
  EXPECT_NEAR(shares.mean(), mean_of(444), 1e-12);
  EXPECT_EQ(shares.worst(), expected[0]);
  EXPECT_NEAR(shares.mean_of_worst(0.01), mean_of(5), 1e-12);  // 4.44 rows, rounded up
  EXPECT_NEAR(shares.mean_of_worst(0.5), mean_of(222), 1e-12);
}

TEST(RowShares, OfNoRowsAreOne) {
  const RowShares none;
  EXPECT_EQ(none.rows(), 0);
  EXPECT_EQ(none.mean(), 1.0);
  EXPECT_EQ(none.worst(), 1.0);
  EXPECT_EQ(none.mean_of_worst(0.01), 1.0);
}

TEST(RowShares, DoNotHideANaN) {
  Tensor3<float> rows(1, 1, 3);
  rows.setValues({{{0.5f, not_a_number, 0.25f}}});
  RowShares shares;
  shares.add(rows);
  EXPECT_TRUE(std::isnan(shares.mean()));
  EXPECT_TRUE(std::isnan(shares.worst()));
}

TEST(RowShares, RefuseAFractionThatIsNone) {
  expect_refused([] { RowShares().mean_of_worst(1.5); }, {"1.5"});
  expect_refused([] { RowShares().mean_of_worst(-0.5); }, {"-0.5"});
}

// ---- output error -------------------------------------------------------------------------------

TEST(OutputError, IsTheFrobeniusNormOfTheDifferenceRelativeToTheReference) {
  for_each_storage([]<class T>() {
    Random random(910);
    const auto out = random.tensor<T>(2, 3, 7, 5), reference = random.tensor<T>(2, 3, 7, 5);
    EXPECT_NEAR(quoka::output_error(out, reference),
                oracle::relative_error(to_oracle(out), to_oracle(reference)), 1e-12);
  });
}

TEST(OutputError, OverSeveralChunksIsThatOfAllOfThem) {
  Random random(911);
  const auto out = random.tensor<float>(1, 2, 37, 5), reference = random.tensor<float>(1, 2, 37, 5);
  RelativeError first, second;
  first.add(quoka::view_of(out).slice(0, 30), quoka::view_of(reference).slice(0, 30));
  second.add(quoka::view_of(out).slice(30, 7), quoka::view_of(reference).slice(30, 7));
  first.add(second);
  EXPECT_NEAR(first.value(), quoka::output_error(out, reference), 1e-12);
}

TEST(OutputError, OfZerosIsZeroOrInfinite) {
  Tensor4<float> zero(1, 1, 2, 3), one(1, 1, 2, 3);
  zero.setZero(), one.setConstant(1.0f);
  EXPECT_EQ(quoka::output_error(zero, zero), 0.0);
  EXPECT_EQ(quoka::output_error(one, zero), std::numeric_limits<double>::infinity());
  EXPECT_EQ(quoka::output_error(zero, one), 1.0);
}

TEST(OutputError, RefusesTensorsOfDifferentShape) {
  const Tensor4<float> out(1, 2, 3, 4), reference(1, 2, 5, 4);
  expect_refused([&] { quoka::output_error(out, reference); }, {"out", 3, 5});
}

// ---- overlap ------------------------------------------------------------------------------------

TEST(Overlap, IsTheShareOfTheOthersKeysOverAllHeads) {
  const Selection keep = to_selection({{{0, 3, 5, 9}, {1, 2, 3, 4}}}, 10);
  const Selection other = to_selection({{{0, 5, 8}, {5, 6, 7}}}, 10);
  EXPECT_DOUBLE_EQ(overlap(keep, other), 2.0 / 6.0);
  EXPECT_DOUBLE_EQ(overlap(other, keep), 2.0 / 8.0);
  EXPECT_EQ(overlap(keep, keep), 1.0);
}

TEST(Overlap, OfRandomListsIsThatOfTheirSets) {
  Random random(912);
  const Selection a = random_selection(random, 2, 3, 137, 50),
                  b = random_selection(random, 2, 3, 137, 61);
  const oracle::Positions x = to_positions(a), y = to_positions(b);
  Index common = 0;
  for (std::size_t batch = 0; batch < 2; ++batch)
    for (std::size_t head = 0; head < 3; ++head)
      for (const Index t : x[batch][head])
        common += std::count(y[batch][head].begin(), y[batch][head].end(), t);
  EXPECT_DOUBLE_EQ(overlap(a, b), static_cast<double>(common) / (6.0 * 61.0));
}

TEST(Overlap, OfKvHeadsWithQueryHeadsIsThatOfQueryHeads) {
  const Selection keep = to_selection({{{0, 3, 5, 9}, {1, 2, 3, 4}}}, 10);
  const Selection other = to_selection({{{0, 5, 8}, {5, 6, 7}, {1, 2}, {4, 5, 6, 7}}}, 10);
  EXPECT_DOUBLE_EQ(overlap(keep, other), 6.0 / 12.0);
  EXPECT_DOUBLE_EQ(overlap(other, keep), 6.0 / 16.0);
  EXPECT_DOUBLE_EQ(overlap(keep, Selection::all(1, 4, 10)), 0.4);
  EXPECT_EQ(overlap(Selection::all(1, 2, 10), other), 1.0);
  expect_refused(
      [&] {
        (void)overlap(keep, to_selection({{{0}, {1}, {2}}}, 10));
      },
      {"more heads", 3, 2});
}

TEST(Overlap, WithAllAndWithNone) {
  Random random(913);
  const Selection some = random_selection(random, 1, 2, 40, 10), all = Selection::all(1, 2, 40),
                  none = random_selection(random, 1, 2, 40, 0);
  EXPECT_EQ(overlap(all, some), 1.0);
  EXPECT_EQ(overlap(some, all), 0.25);
  EXPECT_EQ(overlap(all, all), 1.0);
  EXPECT_EQ(overlap(some, none), 1.0);
  EXPECT_EQ(overlap(none, some), 0.0);
}

TEST(Overlap, RefusesSelectionsOfDifferentCaches) {
  expect_refused([] { overlap(Selection::all(1, 2, 40), Selection::all(1, 2, 41)); },
                 {"kv_len", 40, 41});
}

}  // namespace
