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

// Row by row: what the kept keys have of the softmax sum, in which sinks do not count.
std::vector<double> exact_shares(const oracle::Tensor& q, const oracle::Tensor& k,
                                 const Selection& keep, const AttentionOptions& options) {
  oracle::AttentionOptions exact = to_oracle(options);
  exact.sinks = {};
  const oracle::Positions kept = to_positions(keep);
  const auto lse = [&](const oracle::Positions* lists) {
    return oracle::attention(q, k, k, lists, {}, {}, exact).lse;
  };
  std::vector<double> shares = lse(&kept), all = lse(nullptr);
  for (std::size_t i = 0; i < all.size(); ++i)
    shares[i] = all[i] == -oracle::infinity ? 1.0 : std::exp(shares[i] - all[i]);
  return shares;
}

// A share has the errors of two log-sum-exps.
void expect_shares(const Tensor3<float>& shares, const std::vector<double>& expected) {
  constexpr double of_float = 1e-5, of_products = 3e-4;  // of bfloat16
  const double bound = automatic_is_float ? of_float : of_products;
  ASSERT_EQ(shares.size(), std::ssize(expected));
  for (Index i = 0; i < shares.size(); ++i)
    if (std::isnan(expected[uz(i)]))
      EXPECT_TRUE(std::isnan(shares.data()[i])) << "row " << i;
    else
      EXPECT_NEAR(double{shares.data()[i]}, expected[uz(i)], bound * expected[uz(i)])
          << "row " << i;
}

// Drawn: shapes, a scale, a cap, sinks, which count for nothing, a window, which leaves some rows no past; and of the keys
// some, all or none. By the log-sum-exp of a caller and any executor, and over rows of any formats: the same bits.
TEST(MassKept, IsTheSoftmaxShareOfTheKeptKeysRowByRow) {
  for_each_draw(40, [&](Random& random) {
    const Index batch = 1 + random.below(2), kv_heads = 1 + random.below(2),
                q_heads = kv_heads * (1 + random.below(3)), q_len = 1 + random.below(23),
                kv_len = 30 + random.below(110), dim = 1 + random.below(30);
    auto q = random.tensor<float>(batch, q_heads, q_len, dim, 2.0);
    const auto k = random.tensor<Eigen::half>(batch, kv_heads, kv_len, dim);
    const Index counts[] = {0, 1, random.below(kv_len + 1), kv_len - 1, kv_len};
    const Index count = counts[random.below(5)];
    const Selection keep = count == kv_len
                               ? Selection::all(batch, kv_heads, kv_len)
                               : random_selection(random, batch, kv_heads, kv_len, count);
    const std::vector<float> sinks(uz(q_heads), 3.0f);
    AttentionOptions options{.scale = 0.25f, .sinks = sinks};
    if (random.below(2) == 0) options.scale = 0.5f;
    if (random.below(3) == 0) options.softcap = 2.0f;
    if (random.below(3) == 0)
      options.sliding_window = 20;
    else if (0 < count && count < kv_len && random.seldom(3))
      q.data()[random.below(q.size())] = not_a_number;  // its row's share, and no other
    const auto shares = mass_kept(q, k, keep, options);
    expect_shares(shares, exact_shares(to_oracle(q), to_oracle(k), keep, options));
    const auto floats = rows<float>(Tensor4<float>(k.cast<float>()), 0, kv_len);
    for_each_executor([&](ExecutorRef executor) {
      const auto lse = quoka::past_lse(q, floats, options, executor);
      EXPECT_TRUE(same_bits(mass_kept(q, floats, keep, lse, options, executor), shares));
    });
    if ((count == 0 || count == kv_len) && options.sliding_window == 0) {
      for (Index i = 0; i < shares.size(); ++i)
        EXPECT_EQ(shares.data()[i], count == 0 ? 0.0f : 1.0f);
    }
  });
}

TEST(MassKept, OfATinyShareIsStillExact) {  // 1e-26: no difference of two sums near 1 finds it
  Tensor4<float> q(1, 1, 1, 1), k(1, 1, 2, 1);
  q.setConstant(1.0f);
  k(0, 0, 0, 0) = 60.0f, k(0, 0, 1, 0) = 0.0f;
  const auto share = mass_kept(q, k, to_selection({{{1}}}, 2), {.scale = 1.0f});
  EXPECT_NEAR(static_cast<double>(share(0, 0, 0)) / std::exp(-60.0), 1.0, 1e-5);
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

TEST(RowShares, OfNoRowsAreOneAndOfANaNAreNaN) {
  RowShares shares;
  EXPECT_EQ(shares.rows(), 0);
  for (const double share : {shares.mean(), shares.worst(), shares.mean_of_worst(0.01)})
    EXPECT_EQ(share, 1.0);
  for (const double fraction : {1.5, -0.5})
    expect_refused([&] { shares.mean_of_worst(fraction); }, {fraction > 0 ? "1.5" : "-0.5"});
  Tensor3<float> rows(1, 1, 3);
  rows.setValues({{{0.5f, not_a_number, 0.25f}}});
  shares.add(rows);
  EXPECT_TRUE(std::isnan(shares.mean()) && std::isnan(shares.worst()));
}

// ---- output error -------------------------------------------------------------------------------

TEST(OutputError, IsTheFrobeniusNormOfTheDifferenceRelativeToTheReference) {
  for_each_storage([]<class T>() {
    Random random(910);
    const auto out = random.tensor<T>(2, 3, 7, 5), reference = random.tensor<T>(2, 3, 7, 5);
    const double exact = oracle::relative_error(to_oracle(out), to_oracle(reference));
    EXPECT_NEAR(quoka::output_error(out, reference), exact, 1e-12);
    RelativeError first, second;  // over two chunks
    first.add(quoka::view_of(out).slice(0, 5), quoka::view_of(reference).slice(0, 5));
    second.add(quoka::view_of(out).slice(5, 2), quoka::view_of(reference).slice(5, 2));
    first.add(second);
    EXPECT_NEAR(first.value(), exact, 1e-12);
  });
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

// The common keys of every head over the other's; a list of a KV head counts for each of its query heads.
TEST(Overlap, IsThatOfTheSetsOfEachHead) {
  for_each_draw(60, [&](Random& random) {
    const Index batch = 1 + random.below(2), heads = 1 + random.below(3), kv_len = 40;
    const auto any = [&](Index of_heads) {
      const Index counts[] = {0, 1, random.below(kv_len), kv_len};
      const Index count = counts[random.below(4)];
      return count == kv_len ? Selection::all(batch, of_heads, kv_len)
                             : random_selection(random, batch, of_heads, kv_len, count);
    };
    const Index group = 1 + random.below(2);
    const Selection a = any(heads), b = any(heads * group);
    const oracle::Positions x = to_positions(a), y = to_positions(b);
    Index common = 0, of_a = 0, of_b = 0;
    for (std::size_t i = 0; i < uz(batch); ++i)
      for (std::size_t head = 0; head < uz(heads * group); ++head) {
        const auto &p = x[i][head / uz(group)], &q = y[i][head];
        for (const Index t : p) common += std::count(q.begin(), q.end(), t);
        of_a += std::ssize(p), of_b += std::ssize(q);
      }
    const auto share = [&](Index of) {
      return of == 0 ? 1.0 : static_cast<double>(common) / static_cast<double>(of);
    };
    EXPECT_DOUBLE_EQ(overlap(a, b), share(of_b));
    EXPECT_DOUBLE_EQ(overlap(b, a), share(of_a));
  });
  expect_refused(
      [&] {
        (void)overlap(to_selection({{{0}, {1}}}, 10), to_selection({{{0}, {1}, {2}}}, 10));
      },
      {"more heads", 3, 2});
}

TEST(Overlap, RefusesSelectionsOfDifferentCaches) {
  expect_refused([] { overlap(Selection::all(1, 2, 40), Selection::all(1, 2, 41)); },
                 {"kv_len", 40, 41});
}

}  // namespace
