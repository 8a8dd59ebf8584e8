// kernels/softmax_state.hpp: the running {max, sum} as a value, for one row and for a packet of
// rows.

#include <quoka/kernels/softmax_state.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float nan = std::numeric_limits<float>::quiet_NaN();
constexpr double epsilon = 0x1p-24;  // half an ulp of 1

// The relative error of simd::exp at -x.
double exp_error(float x) {
  return static_cast<double>(quoka::simd::exp2_max_error + x * quoka::simd::exp_error_per_x);
}

// A state of either kind as arrays of its rows.
template <class State>
struct Rows {
  using P = decltype(State::max);
  static constexpr std::size_t count = sizeof(P) / sizeof(float);
  using Values = std::array<float, count>;

  static P packed(const Values& values) {
    P packet;
    std::memcpy(&packet, values.data(), sizeof(packet));
    return packet;
  }
  static P packed(float value) {
    Values values;
    values.fill(value);
    return packed(values);
  }
  static Values values(const P& packet) {
    Values values;
    std::memcpy(values.data(), &packet, sizeof(packet));
    return values;
  }
};

template <class State>
class SoftmaxState : public ::testing::Test {
 protected:
  using Kind = Rows<State>;
  using Values = typename Kind::Values;

  // A row of logits and its state, updated in blocks of `block` keys as attention does.
  static State update(const std::vector<Values>& logits, std::size_t block) {
    State state = State::identity();
    for (std::size_t first = 0; first < logits.size(); first += block) {
      const std::size_t end = std::min(first + block, logits.size());
      Values top;
      top.fill(-infinity);
      for (std::size_t t = first; t < end; ++t)
        for (std::size_t row = 0; row < Kind::count; ++row)
          top[row] = std::max(top[row], logits[t][row]);
      state.raise(Kind::packed(top));
      for (std::size_t t = first; t < end; ++t) {
        Values sum = Kind::values(state.sum);
        const Values weight = Kind::values(state.weight(Kind::packed(logits[t])));
        for (std::size_t row = 0; row < Kind::count; ++row) sum[row] += weight[row];
        state.sum = Kind::packed(sum);
      }
    }
    return state;
  }

  static std::vector<Values> random_logits(std::size_t count, unsigned seed, float spread = 5.0f) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal(0.0f, spread);
    std::vector<Values> logits(count);
    for (Values& values : logits)
      for (float& value : values) value = normal(random);
    return logits;
  }

  static void expect_all(const typename Kind::P& packet, float value) {
    for (const float x : Kind::values(packet)) EXPECT_EQ(x, value);
  }
  static void expect_nan(const typename Kind::P& packet) {
    for (const float x : Kind::values(packet)) EXPECT_TRUE(std::isnan(x)) << x;
  }
};

class Kinds {
 public:
  template <class State>
  static std::string GetName(int kind) {
    return kind == 0 ? "one_row" : "packet";
  }
};
using StateTypes = ::testing::Types<quoka::SoftmaxState<float>, quoka::PacketState>;
TYPED_TEST_SUITE(SoftmaxState, StateTypes, Kinds);

constexpr float last = std::numeric_limits<float>::max();

TYPED_TEST(SoftmaxState, IdentityHasNoMaximumAndNoSum) {
  const TypeParam state = TypeParam::identity();
  TestFixture::expect_all(state.max, -infinity);
  TestFixture::expect_all(state.sum, 0.0f);
  TestFixture::expect_all(state.reference(), 0.0f);
}

TYPED_TEST(SoftmaxState, ReferenceIsTheMaximumOnceThereIsOne) {
  using R = Rows<TypeParam>;
  for (const float max : {-last, -7.5f, 0.0f, 3.0f, last}) {
    const TypeParam state{R::packed(max), R::packed(1.0f)};
    TestFixture::expect_all(state.reference(), max);
  }
}

// The weight of a logit below a maximum.
TYPED_TEST(SoftmaxState, WeightsThatAreExact) {
  using R = Rows<TypeParam>;
  const struct {
    float max, logit, weight;
  } all[] = {
      {-1e30f, -1e30f, 1},       {-7.3f, -7.3f, 1},  {0, 0, 1},
      {1e-40f, 1e-40f, 1},       {11.1f, 11.1f, 1},  {1e30f, 1e30f, 1},  // at the maximum
      {-infinity, -infinity, 0}, {-3, -infinity, 0},                     // masked
      {last, -last, 0},          {last, 0, 0},                           // far below
      {-infinity, nan, nan},     {2, nan, nan},
  };
  for (const auto& [max, logit, weight] : all) {
    SCOPED_TRACE(std::to_string(logit) + " beside " + std::to_string(max));
    const auto weights = TypeParam{R::packed(max), R::packed(1.0f)}.weight(R::packed(logit));
    if (std::isnan(weight))
      TestFixture::expect_nan(weights);
    else
      TestFixture::expect_all(weights, weight);
  }
}

TYPED_TEST(SoftmaxState, WeightIsTheExponentialOfTheDistanceFromTheMaximum) {
  using R = Rows<TypeParam>;
  const TypeParam state{R::packed(4.0f), R::packed(1.0f)};
  for (float below = 0.0f; below < 69.0f; below += 0.37f) {
    const double expected = std::exp(static_cast<double>(4.0f - below) - 4.0);
    for (const float weight : R::values(state.weight(R::packed(4.0f - below))))
      EXPECT_NEAR(weight / expected, 1.0, exp_error(below)) << below;
  }
}

// From nothing, to a lower maximum, to the same one: no bit of a sum changes.
TYPED_TEST(SoftmaxState, RaisesThatAreExact) {
  using R = Rows<TypeParam>;
  const struct {
    float max, sum, to, factor, new_max;
  } all[] = {
      {-infinity, 0, -9.25f, 0, -9.25f}, {-infinity, 0, -infinity, 0, -infinity},
      {2.7f, 1.3f, 2.7f, 1, 2.7f},       {2.7f, 1.3f, 2.6f, 1, 2.7f},
      {2.7f, 1.3f, -1e30f, 1, 2.7f},     {2.7f, 1.3f, -infinity, 1, 2.7f},
  };
  for (const auto& [max, sum, to, factor, new_max] : all) {
    SCOPED_TRACE(std::to_string(max) + " to " + std::to_string(to));
    TypeParam state{R::packed(max), R::packed(sum)};
    TestFixture::expect_all(state.raise(R::packed(to)), factor);
    TestFixture::expect_all(state.max, new_max);
    TestFixture::expect_all(state.sum, sum);
  }
}

TYPED_TEST(SoftmaxState, RaiseRescalesTheSum) {
  using R = Rows<TypeParam>;
  for (const float step : {0.1f, 1.0f, 7.7f, 60.0f}) {
    TypeParam state{R::packed(1.0f), R::packed(3.0f)};
    const double expected = std::exp(1.0 - static_cast<double>(1.0f + step));
    for (const float factor : R::values(state.raise(R::packed(1.0f + step))))
      EXPECT_NEAR(factor / expected, 1.0, exp_error(step));
    for (const float sum : R::values(state.sum))
      EXPECT_NEAR(sum / (3.0 * expected), 1.0, exp_error(step) + 2 * epsilon);
    TestFixture::expect_all(state.max, 1.0f + step);
  }
}

// Each of n weights is off by exp2_max_error and an addition by epsilon, relative to the running
// sum; a raise multiplies once more by a factor as exact as a weight.
TYPED_TEST(SoftmaxState, SumOverBlocksIsTheSumOverAll) {
  using R = Rows<TypeParam>;
  for (const std::size_t count : {1u, 3u, 7u, 37u, 127u, 501u}) {
    const auto logits = TestFixture::random_logits(count, 11);
    for (const std::size_t block : {std::size_t{1}, std::size_t{7}, std::size_t{37}, count}) {
      const TypeParam state = TestFixture::update(logits, block);
      for (std::size_t row = 0; row < R::count; ++row) {
        double max = -HUGE_VAL, sum = 0;
        for (const auto& values : logits) max = std::max(max, static_cast<double>(values[row]));
        for (const auto& values : logits) sum += std::exp(static_cast<double>(values[row]) - max);
        EXPECT_EQ(R::values(state.max)[row], static_cast<float>(max));
        EXPECT_NEAR(R::values(state.sum)[row] / sum, 1.0, 3e-6)
            << count << " in blocks of " << block;
      }
    }
  }
}

TYPED_TEST(SoftmaxState, MergeOfHalvesIsTheWhole) {
  using R = Rows<TypeParam>;
  const auto logits = TestFixture::random_logits(501, 12);
  const auto middle = logits.begin() + 200;
  const TypeParam whole = TestFixture::update(logits, 64);
  TypeParam merged = TestFixture::update({logits.begin(), middle}, 64);
  merged.merge(TestFixture::update({middle, logits.end()}, 64));
  for (std::size_t row = 0; row < R::count; ++row) {
    EXPECT_EQ(R::values(merged.max)[row], R::values(whole.max)[row]);
    EXPECT_NEAR(R::values(merged.sum)[row] / R::values(whole.sum)[row], 1.0, 3e-6);
  }
}

TYPED_TEST(SoftmaxState, MergeReturnsTheFactorOfEachPart) {
  using R = Rows<TypeParam>;
  TypeParam state{R::packed(1.0f), R::packed(3.0f)};
  const auto [mine, other] = state.merge({R::packed(3.0f), R::packed(5.0f)});
  TestFixture::expect_all(state.max, 3.0f);
  TestFixture::expect_all(other, 1.0f);
  for (const float factor : R::values(mine)) EXPECT_NEAR(factor, std::exp(-2.0), 1e-7);
  for (const float sum : R::values(state.sum)) EXPECT_NEAR(sum, 3.0 * std::exp(-2.0) + 5, 1e-6);
}

TYPED_TEST(SoftmaxState, MergeWithIdentityIsExactOnEitherSide) {
  using R = Rows<TypeParam>;
  const TypeParam none = TypeParam::identity(), some{R::packed(-2.3f), R::packed(1.7f)};
  const struct {
    TypeParam a, b;
    float factor_a, factor_b;
    TypeParam merged;
  } all[] = {{some, none, 1, 0, some}, {none, some, 0, 1, some}, {none, none, 0, 0, none}};
  for (const auto& one : all) {
    TypeParam state = one.a;
    const auto [mine, other] = state.merge(one.b);
    TestFixture::expect_all(mine, one.factor_a);
    TestFixture::expect_all(other, one.factor_b);
    EXPECT_EQ(R::values(state.max), R::values(one.merged.max));
    EXPECT_EQ(R::values(state.sum), R::values(one.merged.sum));
  }
}

// Two merges: two factors, two products and two additions on either side.
TYPED_TEST(SoftmaxState, MergeIsAssociativeUpToRounding) {
  using R = Rows<TypeParam>;
  const double bound = 4 * exp_error(20.0f) + 8 * epsilon;
  for (unsigned seed = 0; seed < 20; ++seed) {
    const TypeParam a = TestFixture::update(TestFixture::random_logits(3, 100 + seed, 20.0f), 1);
    const TypeParam b = TestFixture::update(TestFixture::random_logits(7, 200 + seed, 20.0f), 1);
    const TypeParam c = TestFixture::update(TestFixture::random_logits(1, 300 + seed, 20.0f), 1);
    TypeParam ab_c = a, bc = b, a_bc = a;
    ab_c.merge(b), ab_c.merge(c);
    bc.merge(c), a_bc.merge(bc);
    EXPECT_EQ(R::values(ab_c.max), R::values(a_bc.max));
    for (std::size_t row = 0; row < R::count; ++row)
      EXPECT_NEAR(R::values(ab_c.sum)[row] / R::values(a_bc.sum)[row], 1.0, bound)
          << "seed " << seed;
  }
}

TYPED_TEST(SoftmaxState, InverseSumIsOneOverTheSum) {
  using R = Rows<TypeParam>;
  for (const float sum : {1.0f, 3.0f, 32768.0f, 1e-30f}) {
    const TypeParam state{R::packed(0.0f), R::packed(sum)};
    for (const float inverse : R::values(state.inverse_sum()))
      EXPECT_NEAR(inverse * static_cast<double>(sum), 1.0, 1e-7);
  }
}

TYPED_TEST(SoftmaxState, InverseSumOfAnEmptyRowIsZeroAndOfOneThatMetNaNNaN) {
  using R = Rows<TypeParam>;
  TestFixture::expect_all(TypeParam::identity().inverse_sum(), 0.0f);
  TestFixture::expect_nan(TypeParam{R::packed(1.0f), R::packed(nan)}.inverse_sum());
  TestFixture::expect_nan(TypeParam{R::packed(-infinity), R::packed(nan)}.inverse_sum());
}

TYPED_TEST(SoftmaxState, MergeWithAStateThatMetNaNIsNaN) {
  using R = Rows<TypeParam>;
  const TypeParam sound{R::packed(2.0f), R::packed(1.0f)}, broken{R::packed(1.0f), R::packed(nan)};
  TypeParam a = sound, b = broken;
  a.merge(broken);
  b.merge(sound);
  TestFixture::expect_nan(a.inverse_sum());
  TestFixture::expect_nan(b.inverse_sum());
}

TEST(SoftmaxStatePacket, LanesDoNotTouchEachOther) {
  using R = Rows<quoka::PacketState>;
  for (std::size_t odd = 0; odd < R::count; ++odd) {
    auto max = R::values(quoka::PacketState::identity().max), top = max;
    max.fill(1.0f);
    top.fill(3.0f);
    max[odd] = -infinity;
    top[odd] = -infinity;
    auto sum = max;
    sum.fill(2.0f);
    sum[odd] = 0.0f;
    quoka::PacketState state{R::packed(max), R::packed(sum)};
    const auto factor = R::values(state.raise(R::packed(top)));
    const auto inverse = R::values(state.inverse_sum());
    for (std::size_t row = 0; row < R::count; ++row) {
      EXPECT_NEAR(factor[row], row == odd ? 0.0f : std::exp(-2.0f), 1e-7f);
      EXPECT_NEAR(inverse[row], row == odd ? 0.0f : std::exp(2.0f) / 2.0f, 1e-6f);
    }
  }
}

TEST(LseNat, IsTheNaturalLogarithmOfTheSum) {
  for (const double logit : {-80.0, -1.25, 0.0, 0.5, 31.0, 1e4}) {
    for (const double sum : {1.0, 1.5, 501.0, 32768.0}) {
      const auto max = static_cast<float>(logit);
      const double expected = static_cast<double>(max) + std::log(sum);
      EXPECT_NEAR(quoka::lse_nat(max, static_cast<float>(sum)), expected,
                  2 * epsilon * std::abs(expected) + 1e-300);
    }
  }
}

TEST(LseNat, OfAnEmptyRowIsMinusInfinityAndOfOneThatMetNaNNaN) {
  EXPECT_EQ(quoka::lse_nat(-infinity, 0.0f), -infinity);
  EXPECT_TRUE(std::isnan(quoka::lse_nat(1.0f, nan)));
  EXPECT_TRUE(std::isnan(quoka::lse_nat(-infinity, nan)));
}

TEST(Constants, AreWhatTheyAreCalled) {
  EXPECT_EQ(quoka::simd::log2_e, static_cast<float>(std::log2(std::exp(1.0))));
  EXPECT_DOUBLE_EQ(quoka::ln_2, std::log(2.0));
}

}  // namespace
