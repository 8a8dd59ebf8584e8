// kernels/softmax_state.hpp: the running {max, sum} as a value, for one row and for a packet of
// rows, against the softmax in double.

#include <quoka/kernels/softmax_state.hpp>

#include "support/fixtures.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float nan = std::numeric_limits<float>::quiet_NaN();
constexpr double epsilon = 0x1p-24;  // half an ulp of 1

// The relative error of simd::exp at -x.
double exp_error(float x) {
  return static_cast<double>(quoka::simd::exp_max_error + x * quoka::simd::exp_error_per_x);
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
      if (block == 1) {
        state.update(Kind::packed(logits[first]));
        continue;
      }
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

TYPED_TEST(SoftmaxState, IdentityHasNoMaximumAndNoSumAndAReferenceIsTheMaximumOnceThereIsOne) {
  using R = Rows<TypeParam>;
  for (const float max : {-last, -7.5f, 0.0f, 3.0f, last})
    TestFixture::expect_all(TypeParam{R::packed(max), R::packed(1.0f)}.reference(), max);
  const TypeParam state = TypeParam::identity();
  TestFixture::expect_all(state.max, -infinity);
  TestFixture::expect_all(state.sum, 0.0f);
  TestFixture::expect_all(state.reference(), 0.0f);
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

// A weight, and the factor of a raise, are the exponential of a distance.
TYPED_TEST(SoftmaxState, WeightsAndFactorsAreExponentials) {
  using R = Rows<TypeParam>;
  for (float below = 0.0f; below < 69.0f; below += 0.37f) {
    TypeParam state{R::packed(4.0f), R::packed(3.0f)};
    const double weight = std::exp(static_cast<double>(4.0f - below) - 4.0),
                 factor = std::exp(4.0 - static_cast<double>(4.0f + below));
    for (const float x : R::values(state.weight(R::packed(4.0f - below))))
      EXPECT_NEAR(x / weight, 1.0, exp_error(below)) << below;
    for (const float x : R::values(state.raise(R::packed(4.0f + below))))
      EXPECT_NEAR(x / factor, 1.0, exp_error(below)) << below;
    for (const float sum : R::values(state.sum))
      EXPECT_NEAR(sum / (3.0 * factor), 1.0, exp_error(below) + 2 * epsilon);
    TestFixture::expect_all(state.max, 4.0f + below);
  }
}

// Rows of logits of any size, masked ones and a NaN among them, in blocks of any length, by parts that are merged in any
// order: the maximum is exact, each of n weights is off by exp_max_error and an addition by epsilon, relative to the
// running sum, and a raise or a merge multiplies once more by a factor as exact as a weight. Rows do not touch each other.
TYPED_TEST(SoftmaxState, IsThatOfAllLogitsInBlocksAndPartsOfAnySize) {
  using R = Rows<TypeParam>;
  quoka_test::for_each_draw("DRAW", 150, [](quoka_test::Random& random, std::uint64_t) {
    const auto below = [&](std::size_t n) {
      return static_cast<std::size_t>(random.below(static_cast<std::ptrdiff_t>(n)));
    };
    const std::size_t count = 1 + below(below(3) == 0 ? 600 : 40);
    const double spread = random.one_of(5.0, 20.0);
    std::vector<typename R::Values> logits(count);
    for (auto& values : logits)
      for (float& value : values) value = static_cast<float>(spread * random.normal());
    for (std::size_t row = 0; row < R::count; ++row) {
      const auto kind = below(10);
      for (auto& values : logits)
        if (kind == 0 || (kind < 4 && below(3) == 0)) values[row] = -infinity;
      if (kind == 4) logits[below(count)][row] = nan;
      if (kind == 5) logits[below(count)][row] = last;
    }
    const std::size_t cuts[] = {0, below(count + 1), count};
    TypeParam parts[2];
    for (int i : {0, 1}) {
      const auto begin = logits.begin();
      parts[i] = TestFixture::update({begin + static_cast<std::ptrdiff_t>(cuts[i]),
                                      begin + static_cast<std::ptrdiff_t>(cuts[i + 1])},
                                     below(3) == 0 ? 1 : 1 + below(100));
    }
    TypeParam state = parts[0];
    state.merge(parts[1]);
    for (std::size_t row = 0; row < R::count; ++row) {
      double max = -HUGE_VAL, sum = 0;
      for (const auto& values : logits)
        if (values[row] > max) max = static_cast<double>(values[row]);
      for (const auto& values : logits)
        sum += values[row] == -infinity ? 0 : std::exp(static_cast<double>(values[row]) - max);
      const float of_sum = R::values(state.sum)[row], inverse = R::values(state.inverse_sum())[row];
      if (std::isnan(sum)) {
        EXPECT_TRUE(std::isnan(inverse)) << "row " << row;
        continue;
      }
      EXPECT_EQ(R::values(state.max)[row], static_cast<float>(max)) << "row " << row;
      if (max == -HUGE_VAL) {
        EXPECT_EQ(of_sum, 0.0f);
        EXPECT_EQ(inverse, 0.0f);
      } else {
        EXPECT_NEAR(of_sum / sum, 1.0, 4e-6) << "row " << row;
        EXPECT_NEAR(inverse * static_cast<double>(of_sum), 1.0, 1e-7);
      }
    }
  });
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
