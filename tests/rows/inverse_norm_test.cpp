// 1 / |x| in select/query_scores.hpp (kernels/inverse_norm.hpp): right for ordinary rows, and as documented
// for zero, huge, tiny, infinite and NaN ones.

#include <quoka/select/query_scores.hpp>

#include "support/fixtures.hpp"

namespace {

using namespace quoka_test;

constexpr Index dims[] = {1, 3, 15, 16, 17, 37, 64, 80, 100, 128, 501};

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

TEST(InverseNorm, OfOrdinaryRows) {
  for_each_storage([]<class T>() {
    Random random(41);
    for (Index dim : dims)
      for (double scale : {0.01, 1.0, 100.0}) expect_exact(random_row<T>(random, dim, scale), 1e-6);
  });
}

TEST(InverseNorm, ReadsNothingBesideTheRow) {
  for_each_storage([]<class T>() {
    Random random(42);
    for (Index dim : dims) {
      const Strided<T> rows(random.tensor<T>(1, 1, 3, dim));
      EXPECT_TRUE(std::isfinite(inverse_norm(rows.view().row(0, 0, 1), dim))) << dim;
    }
  });
}

TEST(InverseNorm, OfAZeroRowIsZero) {
  for_each_storage([]<class T>() {
    for (Index dim : dims) {
      EXPECT_EQ(inverse_norm(std::vector<T>(uz(dim), stored<T>(0.0)).data(), dim), 0.0f);
      EXPECT_EQ(inverse_norm(std::vector<T>(uz(dim), stored<T>(-0.0)).data(), dim), 0.0f);
    }
  });
}

TEST(InverseNorm, OfARowWithAnInfinityIsZero) {
  for_each_storage([]<class T>() {
    Random random(43);
    for (Index dim : dims)
      for (float odd : {infinity, -infinity})
        for (Index c : {Index{0}, dim / 2, dim - 1}) {
          auto x = random_row<T>(random, dim, 1.0);
          x[uz(c)] = stored<T>(odd);
          EXPECT_EQ(inverse_norm(x.data(), dim), 0.0f) << dim << ", channel " << c;
        }
  });
}

TEST(InverseNorm, OfARowWithANanIsNan) {
  for_each_storage([]<class T>() {
    Random random(44);
    for (Index dim : dims)
      for (Index c : {Index{0}, dim / 2, dim - 1}) {
        auto x = random_row<T>(random, dim, 1.0);
        x[uz(c)] = stored<T>(std::nan(""));
        EXPECT_TRUE(std::isnan(inverse_norm(x.data(), dim))) << dim << ", channel " << c;
        if (dim > 1) {  // beside an infinity too
          x[uz((c + 1) % dim)] = stored<T>(infinity);
          EXPECT_TRUE(std::isnan(inverse_norm(x.data(), dim))) << dim << ", channel " << c;
        }
      }
  });
}

TEST(InverseNorm, OfTheLargestNumbersIsNotZero) {
  for_each_storage([]<class T>() {
    for (Index dim : dims) {
      const std::vector<T> x(uz(dim), std::numeric_limits<T>::max());
      EXPECT_GT(inverse_norm(x.data(), dim), 0.0f) << dim;
      EXPECT_TRUE(std::isfinite(inverse_norm(x.data(), dim))) << dim;
    }
  });
}

// Values that only float can hold: half stores neither.
using WideTypes = ::testing::Types<float, Eigen::bfloat16>;

// Whose sums of squares overflow and underflow.
TEST(InverseNormOfWideRange, OfHugeAndTinyRows) {
  for_each_storage<WideTypes>([]<class T>() {
    Random random(45);
    for (Index dim : dims)
      for (double scale : {1e14, 1e15, 1e20, 1e30, 1e36, 1e-14, 1e-15, 1e-20, 1e-30, 1e-36})
        expect_exact(random_row<T>(random, dim, scale), 1e-6);
  });
}

TEST(InverseNormOfWideRange, OneHugeElementAmongTinyOnes) {
  for_each_storage<WideTypes>([]<class T>() {
    for (Index dim : dims) {
      std::vector<T> x(uz(dim), stored<T>(1e-30));
      x[uz(dim / 2)] = stored<T>(1e30);
      expect_exact(x, 1e-6);
    }
  });
}

TEST(InverseNormOfWideRange, RowsShorterThanTheLeastNormalFloatAreZero) {
  for_each_storage<WideTypes>([]<class T>() {
    const double least = static_cast<double>(std::numeric_limits<float>::min());
    std::vector<T> x(37, stored<T>(0.0));
    x[5] = stored<T>(least / 2);  // denormal
    EXPECT_EQ(inverse_norm(x.data(), 37), 0.0f);
    x[5] = stored<T>(least);
    EXPECT_EQ(inverse_norm(x.data(), 37), static_cast<float>(1.0 / least));
  });
}

TEST(InverseNormOfWideRange, DenormalElementsCountInALongerRow) {
  for_each_storage<WideTypes>([]<class T>() {
    const double part = static_cast<double>(std::numeric_limits<float>::min()) / 2;
    const std::vector<T> x(64,
                           stored<T>(part));  // length 4 times the least normal float
    expect_exact(x, 1e-6);
  });
}

// Whether float or double summed must not show: neighbours on both sides of the limits agree.
TEST(InverseNormOfWideRange, ScalingByPowersOfTwoScalesIt) {
  for_each_storage<WideTypes>([]<class T>() {
    Random random(47);
    const auto x = random_row<T>(random, 37, 1.0);
    const double exact = exact_inverse_norm(x);
    for (int power = -110; power <= 110; ++power) {
      auto scaled = x;
      for (T& value : scaled)
        value = stored<T>(std::ldexp(static_cast<double>(static_cast<float>(value)), power));
      EXPECT_NEAR(std::ldexp(static_cast<double>(inverse_norm(scaled.data(), 37)), power), exact,
                  exact * 1e-6)
          << power;
    }
  });
}

// ---- is_finite_row ------------------------------------------------------------------------------

TEST(InverseNorm, IsFiniteRowSeesEveryChannel) {
  for_each_storage([]<class T>() {
    Random random(48);
    for (Index dim : dims) {
      auto x = random_row<T>(random, dim, 1.0);
      const auto is_finite = [&] {
        return quoka::is_finite_row(widened(x.data(), dim).data(), dim);
      };
      EXPECT_TRUE(is_finite());
      for (float odd : {not_a_number, infinity, -infinity})
        for (Index c = 0; c < dim; ++c) {
          const T before = std::exchange(x[uz(c)], stored<T>(odd));
          ASSERT_FALSE(is_finite()) << dim << ", channel " << c;
          x[uz(c)] = before;
        }
    }
  });
}

TEST(InverseNorm, IsFiniteRowOfZeroIsTrue) {
  const std::vector<Element> x(37, stored<Element>(0.0));
  EXPECT_TRUE(quoka::is_finite_row(widened(x.data(), 37).data(), 37));
}

}  // namespace
