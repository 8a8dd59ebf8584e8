// 1 / |x| in select/query_rows.hpp (kernels/inverse_norm.hpp): within 1e-6 of the exact one for rows of any size that are
// not shorter than the least normal float; 0 for shorter ones and for those with an infinity, NaN for those with a NaN.

#include <quoka/select/query_rows.hpp>

#include "support/fixtures.hpp"

namespace {

using namespace quoka_test;

// The floats of a stored row, as every selector widens them, between numbers that would count if they were read.
template <class T>
struct StoredRow {
  explicit StoredRow(const std::vector<T>& x) : dim(std::ssize(x)), memory(x.size() + 2, 1e9f) {
    quoka::format_of<T>().widen(reinterpret_cast<quoka::ConstRow>(x.data()), {dim},
                                memory.data() + 1);
  }
  const float* data() const { return memory.data() + 1; }
  std::span<const float> values() const { return {data(), uz(dim)}; }

  Index dim;
  std::vector<float> memory;
};

// Rows of one size or of many, with zeros, infinities and NaN, up to the ends of the format.
template <class T>
std::vector<T> any_row(Random& random) {
  constexpr Index dims[] = {1, 3, 15, 16, 17, 37, 64, 80, 100, 128, 501};
  std::vector<T> x(uz(dims[random.below(11)]));
  const int widest = std::is_same_v<T, Eigen::half> ? 6 : 120;
  const bool one_size = random.below(4) != 0;
  const double of_all = std::exp2(widest * (2 * random.uniform() - 1));
  for (T& value : x) {
    const double size = one_size ? of_all : std::exp2(widest * (2 * random.uniform() - 1));
    value = stored<T>(size * (random.normal() + 0.01));
  }
  const auto put = [&](double odd) { x[uz(random.below(std::ssize(x)))] = stored<T>(odd); };
  switch (random.below(12)) {
    case 0:
      put(HUGE_VAL);
      break;
    case 1:
      put(-HUGE_VAL);
      break;
    case 2:
      put(HUGE_VAL), put(std::nan(""));
      break;
    case 3:
      std::fill(x.begin(), x.end(), stored<T>(random.below(2) == 0 ? 0.0 : -0.0));
      break;
    case 4:
      std::fill(x.begin(), x.end(), std::numeric_limits<T>::max());
      break;
    case 5:  // denormal elements, in a row that may be long enough
      std::fill(x.begin(), x.end(), stored<T>(0x1p-127));
      break;
    case 6:  // the shortest row that has a length, and one that has none
      std::fill(x.begin(), x.end(), stored<T>(0.0));
      put(random.below(2) == 0 ? 0x1p-126 : 0x1p-127);
      break;
    default:
      break;
  }
  return x;
}

TEST(InverseNorm, IsExactOrWhatTheRowSays) {
  for_each_storage([]<class T>() {
    for_each_draw(6000, [&](Random& random) {
      const StoredRow<T> row(any_row<T>(random));
      double sum = 0;
      bool nan = false, infinite = false;
      for (const float x : row.values()) {
        sum += double{x} * double{x};
        nan = nan || std::isnan(x), infinite = infinite || std::isinf(x);
      }
      const float inverse = quoka::inverse_norm(row.data(), row.dim);
      const double least = double{std::numeric_limits<float>::min()}, exact = 1.0 / std::sqrt(sum);
      EXPECT_EQ(quoka::is_finite_row(row.data(), row.dim), !nan && !infinite);
      if (nan)
        ASSERT_TRUE(std::isnan(inverse)) << row.dim;
      else if (infinite || std::sqrt(sum) < least)
        ASSERT_EQ(inverse, 0.0f) << row.dim;
      else
        ASSERT_NEAR(double{inverse}, exact, 1e-6 * exact + 0x1p-149) << row.dim;
    });
  });
}

}  // namespace
