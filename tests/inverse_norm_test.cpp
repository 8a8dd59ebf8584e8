// 1 / |x| in select/kit.hpp (kernels/inverse_norm.hpp): right for ordinary rows, and as documented
// for zero, huge, tiny, infinite and NaN ones.

#include <quoka/select/kit.hpp>

#include "support/fixtures.hpp"

namespace {

using namespace quoka_test;

constexpr Index dims[] = {1, 3, 15, 16, 17, 37, 64, 80, 100, 128, 501};

template <class T>
class InverseNorm : public ::testing::Test {};
TYPED_TEST_SUITE(InverseNorm, StorageTypes, StorageNames);

// The inverse norm of a stored row: of its floats, as every selector widens them.
template <class T>
std::vector<float> widened(const T* x, Index dim) {
  std::vector<float> row(uz(dim));
  quoka::format_of<T>().widen(reinterpret_cast<quoka::ConstRow>(x), {dim}, row.data());
  return row;
}
template <class T>
float inverse_norm(const T* x, Index dim) {
  if constexpr (std::is_same_v<T, float>) return quoka::inverse_norm(x, dim);
  return quoka::inverse_norm(widened(x, dim).data(), dim);
}

template <class T>
double exact_inverse_norm(const std::vector<T>& x) {
  double sum = 0;
  for (T value : x)
    sum += static_cast<double>(static_cast<float>(value)) *
           static_cast<double>(static_cast<float>(value));
  return 1.0 / std::sqrt(sum);
}

template <class T>
std::vector<T> random_row(Random& random, Index dim, double scale) {
  std::vector<T> x(uz(dim));
  for (T& value : x) value = stored<T>(scale * (random.normal() + 0.01));
  return x;
}

template <class T>
void expect_exact(const std::vector<T>& x, double tolerance) {
  const double exact = exact_inverse_norm(x);
  EXPECT_NEAR(static_cast<double>(inverse_norm(x.data(), std::ssize(x))), exact, exact * tolerance)
      << x.size();
}

TYPED_TEST(InverseNorm, OfOrdinaryRows) {
  Random random(41);
  for (Index dim : dims)
    for (double scale : {0.01, 1.0, 100.0})
      expect_exact(random_row<TypeParam>(random, dim, scale), 1e-6);
}

TYPED_TEST(InverseNorm, ReadsNothingBesideTheRow) {
  Random random(42);
  for (Index dim : dims) {
    const Strided<TypeParam> rows(random.tensor<TypeParam>(1, 1, 3, dim));
    EXPECT_TRUE(std::isfinite(inverse_norm(rows.view().row(0, 0, 1), dim))) << dim;
  }
}

TYPED_TEST(InverseNorm, OfAZeroRowIsZero) {
  for (Index dim : dims) {
    EXPECT_EQ(inverse_norm(std::vector<TypeParam>(uz(dim), stored<TypeParam>(0.0)).data(), dim),
              0.0f);
    EXPECT_EQ(inverse_norm(std::vector<TypeParam>(uz(dim), stored<TypeParam>(-0.0)).data(), dim),
              0.0f);
  }
}

TYPED_TEST(InverseNorm, OfARowWithAnInfinityIsZero) {
  Random random(43);
  for (Index dim : dims)
    for (float odd : {infinity, -infinity})
      for (Index c : {Index{0}, dim / 2, dim - 1}) {
        auto x = random_row<TypeParam>(random, dim, 1.0);
        x[uz(c)] = stored<TypeParam>(odd);
        EXPECT_EQ(inverse_norm(x.data(), dim), 0.0f) << dim << ", channel " << c;
      }
}

TYPED_TEST(InverseNorm, OfARowWithANanIsNan) {
  Random random(44);
  for (Index dim : dims)
    for (Index c : {Index{0}, dim / 2, dim - 1}) {
      auto x = random_row<TypeParam>(random, dim, 1.0);
      x[uz(c)] = stored<TypeParam>(std::nan(""));
      EXPECT_TRUE(std::isnan(inverse_norm(x.data(), dim))) << dim << ", channel " << c;
      if (dim > 1) {  // beside an infinity too
        x[uz((c + 1) % dim)] = stored<TypeParam>(infinity);
        EXPECT_TRUE(std::isnan(inverse_norm(x.data(), dim))) << dim << ", channel " << c;
      }
    }
}

TYPED_TEST(InverseNorm, OfTheLargestNumbersIsNotZero) {
  for (Index dim : dims) {
    const std::vector<TypeParam> x(uz(dim), std::numeric_limits<TypeParam>::max());
    EXPECT_GT(inverse_norm(x.data(), dim), 0.0f) << dim;
    EXPECT_TRUE(std::isfinite(inverse_norm(x.data(), dim))) << dim;
  }
}

// What float's range alone can hold: half stores neither.
template <class T>
class InverseNormOfWideRange : public ::testing::Test {};
using WideTypes = ::testing::Types<float, Eigen::bfloat16>;
TYPED_TEST_SUITE(InverseNormOfWideRange, WideTypes, StorageNames);

TYPED_TEST(InverseNormOfWideRange, HugeRowsWhoseSumOfSquaresOverflows) {
  Random random(45);
  for (Index dim : dims)
    for (double scale : {1e14, 1e15, 1e20, 1e30, 1e36})
      expect_exact(random_row<TypeParam>(random, dim, scale), 1e-6);
}

TYPED_TEST(InverseNormOfWideRange, TinyRowsWhoseSumOfSquaresUnderflows) {
  Random random(46);
  for (Index dim : dims)
    for (double scale : {1e-14, 1e-15, 1e-20, 1e-30, 1e-36})
      expect_exact(random_row<TypeParam>(random, dim, scale), 1e-6);
}

TYPED_TEST(InverseNormOfWideRange, OneHugeElementAmongTinyOnes) {
  for (Index dim : dims) {
    std::vector<TypeParam> x(uz(dim), stored<TypeParam>(1e-30));
    x[uz(dim / 2)] = stored<TypeParam>(1e30);
    expect_exact(x, 1e-6);
  }
}

TYPED_TEST(InverseNormOfWideRange, RowsShorterThanTheLeastNormalFloatAreZero) {
  const double least = static_cast<double>(std::numeric_limits<float>::min());
  std::vector<TypeParam> x(37, stored<TypeParam>(0.0));
  x[5] = stored<TypeParam>(least / 2);  // denormal
  EXPECT_EQ(inverse_norm(x.data(), 37), 0.0f);
  x[5] = stored<TypeParam>(least);
  EXPECT_EQ(inverse_norm(x.data(), 37), static_cast<float>(1.0 / least));
}

TYPED_TEST(InverseNormOfWideRange, DenormalElementsCountInALongerRow) {
  const double part = static_cast<double>(std::numeric_limits<float>::min()) / 2;
  const std::vector<TypeParam> x(64,
                                 stored<TypeParam>(part));  // length 4 times the least normal float
  expect_exact(x, 1e-6);
}

// Whether float or double summed must not show: neighbours on both sides of the limits agree.
TYPED_TEST(InverseNormOfWideRange, ScalingByPowersOfTwoScalesIt) {
  Random random(47);
  const auto x = random_row<TypeParam>(random, 37, 1.0);
  const double exact = exact_inverse_norm(x);
  for (int power = -110; power <= 110; ++power) {
    auto scaled = x;
    for (TypeParam& value : scaled)
      value = stored<TypeParam>(std::ldexp(static_cast<double>(static_cast<float>(value)), power));
    EXPECT_NEAR(std::ldexp(static_cast<double>(inverse_norm(scaled.data(), 37)), power), exact,
                exact * 1e-6)
        << power;
  }
}

// ---- is_finite_row ------------------------------------------------------------------------------

TYPED_TEST(InverseNorm, IsFiniteRowSeesEveryChannel) {
  Random random(48);
  for (Index dim : dims) {
    auto x = random_row<TypeParam>(random, dim, 1.0);
    const auto is_finite = [&] { return quoka::is_finite_row(widened(x.data(), dim).data(), dim); };
    EXPECT_TRUE(is_finite());
    for (float odd : {not_a_number, infinity, -infinity})
      for (Index c = 0; c < dim; ++c) {
        const TypeParam before = std::exchange(x[uz(c)], stored<TypeParam>(odd));
        ASSERT_FALSE(is_finite()) << dim << ", channel " << c;
        x[uz(c)] = before;
      }
  }
}

TYPED_TEST(InverseNorm, IsFiniteRowOfZeroIsTrue) {
  const std::vector<TypeParam> x(37, stored<TypeParam>(0.0));
  EXPECT_TRUE(quoka::is_finite_row(widened(x.data(), 37).data(), 37));
}

}  // namespace
