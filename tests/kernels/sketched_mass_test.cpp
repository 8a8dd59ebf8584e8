// select/code_mass.hpp: softmax_scores() by 8-bit codes. For any keys they lie within the stated bound of an oracle in
// double. The bound is tight, and it decides between codes and float.

#include <quoka/select/code_mass.hpp>
#include <quoka/select/query_scores.hpp>
#include <quoka/simd/code_dots.hpp>

#include "support/emulated_tiles.hpp"
#include "support/selector_fixtures.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace {

using namespace quoka_test;
using quoka::KeySketch;
namespace detail = quoka::detail;
namespace simd = quoka::simd;

// Masses below this only have to stay below it.
constexpr double least_mass = 1e-15;

// ---- weights in pairs, a rough exponential ------------------------------------------------------

TEST(WeightPairs, AreReadBackWithinTheirError) {
  Random random(701);
  alignas(64) float a[simd::lanes], b[simd::lanes], x[simd::lanes], y[simd::lanes];
  alignas(64) std::uint32_t pairs[simd::lanes];
  float worst = 0.0f;
  for (int turn = 0; turn < 500; ++turn) {
    for (int i = 0; i < simd::lanes; ++i) {
      a[i] = static_cast<float>(std::exp2(180.0 * random.uniform() - 95.0));
      b[i] = static_cast<float>(std::exp2(180.0 * random.uniform() - 95.0));
    }
    simd::store_weight_pairs(pairs, simd::load(a), simd::load(b));
    simd::store(x, simd::first_weights(pairs)), simd::store(y, simd::second_weights(pairs));
    for (int i = 0; i < simd::lanes; ++i)
      worst = std::max({worst, std::abs(x[i] / a[i] - 1.0f), std::abs(y[i] / b[i] - 1.0f)});
  }
  EXPECT_LE(worst, simd::weight_pair_max_error);
  EXPECT_GT(worst, 0.9f * simd::weight_pair_max_error);
}

TEST(RoughExp2, IsWithinItsError) {
  double worst = 0.0;
  for (double at = -126.0; at <= 126.0; at += 0.00917) {
    const float x = static_cast<float>(at);
    const double exact = std::exp2(static_cast<double>(x));
    worst = std::max(worst, std::abs(static_cast<double>(simd::exp2_rough(x)) / exact - 1.0));
    alignas(64) float lanes[simd::lanes];
    simd::store(lanes, simd::exp2_rough(simd::broadcast(x)));
    for (const float y : lanes)
      worst = std::max(worst, std::abs(static_cast<double>(y) / exact - 1.0));
  }
  EXPECT_LE(worst, static_cast<double>(simd::exp2_rough_max_error));
  EXPECT_GT(worst, 0.9 * static_cast<double>(simd::exp2_rough_max_error));
}

// ---- masses by the sketch -----------------------------------------------------------------------

struct Masses {
  Tensor3<float> scores;      // [batch, kv_heads, kv_len]
  std::vector<double> error;  // eps of each head in nats; infinity: in float
};

// The masses of rows q_bar [batch, kv_heads, rows, dim]. Emulated tiles give the same bits.
Masses masses(const Tensor4<float>& q_bar, const Rows& k, float scale = 1.0f) {
  KeySketch sketch;
  sketch.append(k, k.len(), SerialExecutor{});
  const auto fill = [&](Index b, Index head, quoka::RowWriter& rows) {
    for (Index m = 0; m < q_bar.dimension(2); ++m) rows.add(&q_bar(b, head, m, 0), scale);
  };
  const quoka::SoftmaxScoring scoring{.rows = {q_bar.dimension(2), k.dim()},
                                      .fill = fill,
                                      .keys = k,
                                      .codes = quoka::SketchedKeys(k, sketch, nullptr)};
  Masses result{Tensor3<float>(k.batch(), k.heads(), k.len()), {}};
  result.scores.setConstant(-7.0f);
  quoka::QueryScoreState state;
  quoka::softmax_scores(scoring, result.scores, state, SerialExecutor{});
  result.error.assign(state.errors.begin(), state.errors.end());
  Tensor3<float> by_tiles(k.batch(), k.heads(), k.len());
  const TensorView<float, 3> to = by_tiles;
  detail::SoftmaxMass(scoring, to, state, SerialExecutor{},
                      &detail::code_kernels_of<simd::EmulatedTiles>)
      .run();
  EXPECT_EQ(std::memcmp(by_tiles.data(), result.scores.data(), uz(by_tiles.size()) * sizeof(float)),
            0);
  return result;
}

// Each mass is within exp(+-a) of the oracle's.
void expect_within_bound(const Masses& got, const oracle::Scores& expected) {
  for (Index b = 0; b < got.scores.dimension(0); ++b)
    for (Index head = 0; head < got.scores.dimension(1); ++head) {
      const double eps = got.error[uz(b * got.scores.dimension(1) + head)];
      const bool in_float = std::isinf(eps);
      const double a = in_float ? 1e-3 : 2.0 * eps + static_cast<double>(detail::weight_error);
      const std::vector<double>& exact = expected[uz(b)][uz(head)];
      for (Index t = 0; t < got.scores.dimension(2); ++t) {
        const auto mass = static_cast<double>(got.scores(b, head, t));
        if (std::isnan(exact[uz(t)]))
          ASSERT_EQ(mass, -infinity) << "key " << t << " of head " << head;
        else if (exact[uz(t)] > least_mass)
          ASSERT_LE(std::abs(std::log(mass / exact[uz(t)])), a)
              << "key " << t << " of head " << head << ": " << mass << " for " << exact[uz(t)]
              << ", eps " << eps;
        else
          ASSERT_LE(mass, least_mass * std::exp(a)) << "key " << t << " of head " << head;
      }
    }
}

template <class T>
void expect_as_oracle(const Tensor4<float>& q_bar, const Tensor4<T>& k, float scale = 1.0f) {
  expect_within_bound(
      masses(q_bar, quoka::view_of(k), scale),
      oracle::softmax_scores(to_oracle(q_bar), to_oracle(k), static_cast<double>(scale),
                             oracle::Aggregation::mean));
}
bool by_codes(const Masses& x) {
  return std::all_of(x.error.begin(), x.error.end(), [](double e) { return std::isfinite(e); });
}
template <class T>
bool by_codes(const Tensor4<float>& q_bar, const Tensor4<T>& k, float scale = 1.0f) {
  return by_codes(masses(q_bar, quoka::view_of(k), scale));
}

TEST(SketchedMass, IsTheOraclesForAnySize) {
  for_each_storage([]<class T>() {
    Random random(702);
    for (Index dim : {1, 3, 16, 37, 128})
      for (Index kv_len : {1, 15, 16, 17, 31, 32, 33, 127, 501})
        for (Index rows : {1, 2, 3, 6, 7, 8, 13, 33}) {
          const auto q_bar = random.tensor<float>(1, 1, rows, dim);
          const auto k = random.tensor<T>(1, 1, kv_len, dim);
          const float scale = 2.0f / std::sqrt(static_cast<float>(dim));
          SCOPED_TRACE(std::to_string(dim) + " channels, " + std::to_string(kv_len) + " keys, " +
                       std::to_string(rows) + " rows");
          ASSERT_NO_FATAL_FAILURE(expect_as_oracle(q_bar, k, scale));
          ASSERT_TRUE(by_codes(q_bar, k, scale));
        }
  });
}

TEST(SketchedMass, IsTheOraclesOfManyHeadsAndSequences) {
  Random random(703);
  const auto q_bar = random.tensor<float>(2, 3, 5, 24);
  expect_as_oracle(q_bar, random.tensor<Element>(2, 3, 77, 24), 0.3f);
}

TEST(SketchedMass, HoldsWithOutlierChannelsSinksAndSharedOffsets) {
  Random random(704);
  const Index dim = 64, len = 301;
  const auto q_bar = random.tensor<float>(1, 1, 12, dim);
  auto outlier = random.tensor<Element>(1, 1, len, dim), sink = outlier, offset = outlier;
  for (Index t = 0; t < len; ++t)
    outlier(0, 0, t, 5) = stored<Element>(40.0 + 3.0 * random.normal());
  for (Index c = 0; c < dim; ++c) {  // logits some 10 nats above the others
    sink(0, 0, 0, c) = stored<Element>(1.3 * static_cast<double>(q_bar(0, 0, 0, c)));
    for (Index t = 0; t < len; ++t)
      offset(0, 0, t, c) = stored<Element>(static_cast<double>(offset(0, 0, t, c)) + 2.0);
  }
  for (const auto* k : {&outlier, &sink, &offset}) {
    expect_as_oracle(q_bar, *k, 0.125f);
    EXPECT_TRUE(by_codes(q_bar, *k, 0.125f));
  }
}

TEST(SketchedMass, EqualKeysHaveTheSame) {
  Random random(705);
  const auto q_bar = random.tensor<float>(1, 1, 9, 20);
  auto k = random.tensor<Element>(1, 1, 130, 20);
  for (Index t = 40; t < 110; ++t)
    for (Index c = 0; c < 20; ++c) k(0, 0, t, c) = k(0, 0, 3, c);
  expect_as_oracle(q_bar, k);
  const Masses got = masses(q_bar, quoka::view_of(k));
  for (Index t = 40; t < 110; ++t) EXPECT_EQ(got.scores(0, 0, t), got.scores(0, 0, 3));
}

TEST(SketchedMass, ZeroKeysAndZeroRowsShareEvenly) {
  Random random(706);
  auto q_bar = random.tensor<float>(1, 1, 3, 20);
  auto k = random.tensor<Element>(1, 1, 50, 20);
  for (Index t = 0; t < 50; t += 3)
    for (Index c = 0; c < 20; ++c) k(0, 0, t, c) = stored<Element>(0.0);
  expect_as_oracle(q_bar, k);
  for (Index c = 0; c < 20; ++c) q_bar(0, 0, 1, c) = 0.0f;
  expect_as_oracle(q_bar, k);
  k.setZero();
  expect_as_oracle(q_bar, k);
  EXPECT_TRUE(by_codes(q_bar, k));
}

TEST(SketchedMass, LeavesOutKeysAndRowsThatAreNotFinite) {
  Random random(707);
  for (float odd : {not_a_number, infinity, -infinity}) {
    const auto q_bar = random.tensor<float>(1, 1, 7, 20);
    auto k = random.tensor<Element>(1, 1, 130, 20);
    for (Index t = 1; t < 130; t += 3) k(0, 0, t, t % 20) = stored<Element>(odd);
    for (Index t = 64; t < 96; ++t) k(0, 0, t, 0) = stored<Element>(odd);  // two blocks of nothing
    expect_as_oracle(q_bar, k);
    EXPECT_TRUE(by_codes(q_bar, k));
    // Rows: as if they were not there.
    auto more = random.tensor<float>(1, 1, 9, 20);
    for (Index m = 0; m < 9; ++m)
      for (Index c = 0; c < 20; ++c)
        more(0, 0, m, c) = m == 0 || m == 5 ? odd : q_bar(0, 0, m < 5 ? m - 1 : m - 2, c);
    EXPECT_TRUE(
        same_bits(masses(more, quoka::view_of(k)).scores, masses(q_bar, quoka::view_of(k)).scores));
    // No rows at all, and no keys.
    more.setConstant(odd);
    const Masses none = masses(more, quoka::view_of(k));
    for (Index t = 0; t < 130; ++t) EXPECT_LT(none.scores(0, 0, t), 1e-30f);
    k.setConstant(stored<Element>(odd));
    expect_as_oracle(q_bar, k);
  }
}

// ---- what codes cannot stand for ----------------------------------------------------------------

TEST(SketchedMassExtremes, LengthsBeyondCodesAreForFloat) {
  Random random(708);
  const auto q_bar = random.tensor<float>(1, 1, 7, 20);
  for (double size : {1e-45, 1e-38, 1e-20, 1e20, 1e30}) {
    auto k = random.tensor<float>(1, 1, 50, 20);
    for (Index c = 0; c < 20; ++c)
      k(0, 0, 37, c) = static_cast<float>(static_cast<double>(k(0, 0, 37, c)) * size);
    if (size > 1.0)  // whatever the row, this key's logit is far below the others
      for (Index c = 0; c < 20; ++c) k(0, 0, 37, c) = c == 0 ? static_cast<float>(size) : 0.0f;
    auto rows = q_bar;
    for (Index m = 0; m < 7; ++m) rows(0, 0, m, 0) = -1.0f;
    bool zero = true;
    for (Index c = 0; c < 20; ++c) zero = zero && k(0, 0, 37, c) == 0.0f;
    expect_as_oracle(rows, k);
    EXPECT_EQ(by_codes(rows, k), zero) << size;
  }
  for (double size : {1e-38, 1e-20, 1e20}) {  // rows, and keys that bring their products back
    auto rows = q_bar;
    auto k = random.tensor<float>(1, 1, 50, 20, 1.0);
    for (Index i = 0; i < rows.size(); ++i)
      rows.data()[i] = static_cast<float>(static_cast<double>(rows.data()[i]) * size);
    for (Index i = 0; i < k.size(); ++i)
      k.data()[i] = static_cast<float>(static_cast<double>(k.data()[i]) * 1e-11);
    EXPECT_FALSE(by_codes(rows, k)) << size;
    if (size < 1.0) expect_as_oracle(rows, k);
  }
}

TEST(SketchedMassExtremes, ShortAndLongVectorsWhoseProductsAreOrdinary) {
  Random random(709);
  for (double size : {1e-9, 1e-5, 1e5, 1e9}) {
    auto rows = random.tensor<float>(1, 1, 7, 20, size),
         k = random.tensor<float>(1, 1, 50, 20, 0.5 / size);
    expect_as_oracle(rows, k);
    EXPECT_TRUE(by_codes(rows, k)) << size;
  }
}

// Rows and keys with exact codes, whose lengths allow logits of +-`longest` nats, and whose logits lie
// within 5 nats of `at`: weights must be taken against the largest logit that occurs. The bound depends on lengths
// alone and is 0 here, except for rounding.
struct FarLogits {
  FarLogits(Random& random, Index len, double longest, double at) : q(1, 1, 3, 4), k(1, 1, len, 4) {
    q.setZero(), k.setZero();
    const double unit = std::sqrt(longest) / 127.0;
    for (Index m = 0; m < 3; ++m) {
      q(0, 0, m, 0) = static_cast<float>(127.0 * unit);
      q(0, 0, m, 1) = static_cast<float>(static_cast<double>(m + 1) * unit);
    }
    const double step = 127.0 * unit * unit;  // of a logit
    for (Index t = 0; t < len; ++t) {
      k(0, 0, t, 2) = static_cast<float>(127.0 * unit);
      const double logit = std::round((at + 10.0 * random.uniform() - 5.0) / step);
      k(0, 0, t, 0) = static_cast<float>(std::clamp(logit, -127.0, 127.0) * unit);
    }
  }
  Tensor4<float> q, k;
};

TEST(SketchedMassExtremes, LogitsMayLieFarBelowWhatLengthsAllow) {
  Random random(710);
  for (double longest : {30.0, 60.0, 90.0, 200.0, 500.0})
    for (double at : {-1.0, -0.6, -0.2, 0.0, 0.4, 0.95})
      for (Index len : {3, 100, 700}) {
        SCOPED_TRACE(std::to_string(longest) + " nats by lengths, at " + std::to_string(at));
        const FarLogits x(random, len, longest, at * longest);
        expect_as_oracle(x.q, x.k);
        EXPECT_TRUE(by_codes(x.q, x.k));
      }
}

// One key decides, wherever it lies: in a pair of blocks that is looked at first, or in another one; in the
// first range of keys, or in another one.
TEST(SketchedMassExtremes, OneKeyFarAboveAllOthers) {
  Random random(711);
  for (Index best : {0, 31, 40, 511, 512, 530, 699, 2047, 2080, 4999}) {
    FarLogits x(random, best < 700 ? 700 : 5000, 300.0, -280.0);
    x.k(0, 0, best, 0) = -x.k(0, 0, best, 0);
    expect_as_oracle(x.q, x.k);
    EXPECT_TRUE(by_codes(x.q, x.k));
  }
}

// ---- the bound ----------------------------------------------------------------------------------

// eps is the formula's.
TEST(SketchedMass, SaysHowFarItsLogitsMayBeOff) {
  Random random(712);
  for (Index dim : {3, 37, 128}) {
    const auto q_bar = random.tensor<float>(1, 1, 6, dim, 0.4);
    const auto k = random.tensor<Element>(1, 1, 90, dim);
    const oracle::Tensor rows = to_oracle(q_bar), keys = to_oracle(k);
    const auto missed = [](oracle::Row x, float least_unit) {
      double largest = 0.0, sum = 0.0;
      for (const double c : x) largest = std::max(largest, std::abs(c));
      const double unit = std::max(largest / 127.0, static_cast<double>(least_unit));
      for (const double c : x) sum += std::pow(c - unit * std::nearbyint(c / unit), 2);
      return std::sqrt(sum);
    };
    double longest = 0.0, most_missed = 0.0, eps = 0.0;
    for (Index t = 0; t < 90; ++t) {
      longest = std::max(longest, oracle::norm(keys.row(0, 0, t)));
      most_missed = std::max(most_missed, missed(keys.row(0, 0, t), 0.0f));
    }
    for (Index m = 0; m < 6; ++m) {
      const double length = oracle::norm(rows.row(0, 0, m)),
                   e = missed(rows.row(0, 0, m), simd::run_scale(&q_bar(0, 0, m, 0), dim));
      eps = std::max(eps, e * longest + (length + e) * most_missed +
                              static_cast<double>(2 * dim + 32) * 0x1p-24 * length * longest);
    }
    const double said = masses(q_bar, quoka::view_of(k)).error[0];
    EXPECT_GE(said, 0.9999 * eps);
    EXPECT_LE(said, 1.002 * eps);
  }
}

// Vectors for which eps is tight: the part that codes miss is parallel to the other side, whose codes are exact. As
// keys, coarse(+-1): 127 in channel 0, +-0.499 sign[c] elsewhere; as the row, sign[c] in channels 1 and up. By the
// codes all logits are 0, in truth they are +-eps. And the other way round.
struct WholeBound {
  static constexpr Index dim = 128;

  explicit WholeBound(Random& random) {
    for (double& s : sign) s = random.below(2) == 0 ? -1.0 : 1.0;
  }
  void coarse(double side, double size, float* x) const {
    x[0] = static_cast<float>(127.0 * size);
    for (Index c = 1; c < dim; ++c) x[c] = static_cast<float>(0.499 * side * size * sign[uz(c)]);
  }
  void signs(double size, float* x) const {
    x[0] = 0.0f;
    for (Index c = 1; c < dim; ++c) x[c] = static_cast<float>(size * sign[uz(c)]);
  }
  std::array<double, 128> sign;
};

// One key `eps` nats below 0, the others as much above. Its mass is exp(-2 eps) of theirs; by the codes it
// is as large.
struct OneAgainstMany {
  Tensor4<float> q{1, 1, 1, WholeBound::dim}, k{1, 1, 400, WholeBound::dim};

  // Coarse keys.
  OneAgainstMany(const WholeBound& x, double eps, Index odd) {
    const double size = std::sqrt(eps / (127.0 * 0.499));
    x.signs(size, q.data());
    for (Index t = 0; t < 400; ++t) x.coarse(t == odd ? -1.0 : 1.0, size, &k(0, 0, t, 0));
  }
};

// If products are added in 16 bits, rows have a larger unit, and these rows have no exact codes.
constexpr bool rows_have_exact_codes = simd::code_run == 0;

TEST(SketchedMassBound, IsUsedUp) {
  if (!rows_have_exact_codes) GTEST_SKIP() << "rows have a larger unit on this ISA";
  Random random(713);
  const WholeBound x(random);
  for (double eps : {0.1, 0.5, 1.0, 2.0, 3.9}) {
    const OneAgainstMany one(x, eps, 200);
    expect_as_oracle(one.q, one.k);
    const Masses got = masses(one.q, one.k);
    ASSERT_TRUE(by_codes(got)) << eps;
    const auto expected =
        oracle::softmax_scores(to_oracle(one.q), to_oracle(one.k), 1.0, oracle::Aggregation::mean);
    const double off = std::log(static_cast<double>(got.scores(0, 0, 200)) / expected[0][0][200]);
    const double a = 2.0 * got.error[0] + static_cast<double>(detail::weight_error);
    EXPECT_LE(off, a);
    EXPECT_GE(off, 0.99 * 2.0 * got.error[0] - 0.01) << "the bound is wider than it need be";
  }
}

// The row's codes miss a part: keys are +-signs, the row is coarse. By the codes all logits are 0.
TEST(SketchedMassBound, IsUsedUpByWhatTheRowMisses) {
  Random random(714);
  const WholeBound x(random);
  for (double eps : {0.5, 2.0}) {
    const double size = std::sqrt(eps / (127.0 * 0.499));
    Tensor4<float> q(1, 1, 1, x.dim), k(1, 1, 400, x.dim);
    x.coarse(1.0, size, q.data());
    for (Index t = 0; t < 400; ++t) x.signs(t == 200 ? -size : size, &k(0, 0, t, 0));
    expect_as_oracle(q, k);
    const Masses got = masses(q, k);
    ASSERT_TRUE(by_codes(got));
    const auto expected =
        oracle::softmax_scores(to_oracle(q), to_oracle(k), 1.0, oracle::Aggregation::mean);
    const double off = std::log(static_cast<double>(got.scores(0, 0, 200)) / expected[0][0][200]);
    EXPECT_GE(off, 0.99 * 2.0 * got.error[0] - 0.01);
  }
}

// Beyond most_logit_error a head is done in float: as exact as the oracle, where codes are off by
// exp(8).
TEST(SketchedMassBound, DecidesBetweenCodesAndFloat) {
  if (!rows_have_exact_codes) GTEST_SKIP() << "rows have a larger unit on this ISA";
  Random random(715);
  const WholeBound x(random);
  const auto limit = static_cast<double>(detail::most_logit_error);
  const OneAgainstMany within(x, 0.98 * limit, 50), beyond(x, 1.01 * limit, 50);
  const Masses codes = masses(within.q, within.k), in_float = masses(beyond.q, beyond.k);
  EXPECT_TRUE(by_codes(codes));
  EXPECT_FALSE(by_codes(in_float));
  expect_within_bound(in_float, oracle::softmax_scores(to_oracle(beyond.q), to_oracle(beyond.k),
                                                       1.0, oracle::Aggregation::mean));
  EXPECT_LT(in_float.scores(0, 0, 50), 1e-3f * in_float.scores(0, 0, 51));
  EXPECT_GT(codes.scores(0, 0, 50), 0.9f * codes.scores(0, 0, 51));
}

// One head of several: the others are done by codes all the same.
TEST(SketchedMassBound, IsOfEachHead) {
  Random random(716);
  auto q = random.tensor<float>(1, 3, 5, 32), k = random.tensor<float>(1, 3, 90, 32);
  for (Index m = 0; m < 5; ++m)
    for (Index c = 0; c < 32; ++c) q(0, 1, m, c) *= 300.0f;
  const Masses got = masses(q, k);
  EXPECT_TRUE(std::isfinite(got.error[0]));
  EXPECT_TRUE(std::isinf(got.error[1]));
  EXPECT_TRUE(std::isfinite(got.error[2]));
  expect_as_oracle(q, k);
}

// ---- memory, threads, layouts -------------------------------------------------------------------

// More weights than are held at once: rows in several groups.
TEST(SketchedMassGroups, ManyRowsAndKeys) {
  Random random(718);
  const Index kv_len = 70'000;
  const Index rows = quoka::tuning::mass_weight_bytes / (2 * kv_len) + 9;  // a group, and some more
  const auto q = random.tensor<float>(1, 1, rows, 3);
  const auto k = random.tensor<float>(1, 1, kv_len, 3);
  ASSERT_LT(detail::CodeGroups::pass_rows(rows, kv_len), rows);
  expect_as_oracle(q, k);
}

// The same where weights must be taken against each row's largest logit, and rows of the last group have theirs at the
// other end of what lengths allow.
TEST(SketchedMassGroups, ManyRowsWithLogitsFarApart) {
  Random random(729);
  const Index kv_len = 70'000;
  const Index rows = quoka::tuning::mass_weight_bytes / (2 * kv_len) + 9;
  const Index at_once = detail::CodeGroups::pass_rows(rows, kv_len);
  ASSERT_LT(at_once, rows);
  const FarLogits far(random, kv_len, 300.0, -270.0);
  Tensor4<float> q(1, 1, rows, 4);
  for (Index m = 0; m < rows; ++m)
    for (Index c = 0; c < 4; ++c)
      q(0, 0, m, c) = (m < at_once ? 1.0f : -1.0f) * far.q(0, 0, m % 3, c);
  expect_as_oracle(q, far.k);
  EXPECT_TRUE(by_codes(q, far.k));
}

}  // namespace
