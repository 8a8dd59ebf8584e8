// attention/merge.hpp against the formula in double, row by row, for parts of any sizes, empty ones and NaN among them. That
// parts give the whole is tested in attention_suite_test.cpp.

#include <quoka/attention/merge.hpp>

#include "support/attention_fixtures.hpp"

#include <gtest/gtest.h>

#include <cmath>

namespace {

using namespace quoka_test;

enum class Row { usual, nothing, not_a_number, nan_without_weight };

// A part of attention: log-sum-exps around `level`, and rows of these kinds.
template <class T>
struct Part {
  Output<T> output;
  std::vector<Row> rows;

  Part(Random& random, Index batch, Index heads, Index q_len, Index dim, double level)
      : output{random.tensor<T>(batch, heads, q_len, dim), random.scores(batch, heads, q_len)} {
    for (Index i = 0; i < output.lse.size(); ++i) {
      const Index kind = random.below(12);
      const Row row = kind < 3 ? static_cast<Row>(1 + kind) : Row::usual;
      rows.push_back(row);
      float& lse = output.lse.data()[i];
      lse = row == Row::not_a_number ? not_a_number
            : row == Row::usual      ? lse + static_cast<float>(level)
                                     : -infinity;
      for (Index c = 0; c < dim; ++c) {
        T& x = output.out.data()[i * dim + c];
        if (row == Row::not_a_number) x = stored<T>(std::nan(""));
        if (row == Row::nothing || row == Row::nan_without_weight) x = stored<T>(0.0);
        if (row == Row::nan_without_weight && c == dim / 2) x = stored<T>(std::nan(""));
      }
    }
  }
};

template <class A, class B>
void expect_merged(const Part<A>& a, const Part<B>& b) {
  Output<A> merged = a.output;
  quoka::merge(merged.out, merged.lse, b.output.out, b.output.lse);
  const Index dim = merged.out.dimension(3);
  for (Index i = 0; i < merged.lse.size(); ++i) {
    const Row row = a.rows[uz(i)], other = b.rows[uz(i)];
    const auto la = double{a.output.lse.data()[i]}, lb = double{b.output.lse.data()[i]};
    const double top = std::max(la, lb), sum = std::exp(la - top) + std::exp(lb - top);
    const float lse = merged.lse.data()[i];
    const bool broken = row == Row::not_a_number || other == Row::not_a_number;
    const bool nothing = row != Row::usual && other != Row::usual;
    if (broken)
      ASSERT_TRUE(std::isnan(lse)) << i;
    else if (nothing)
      ASSERT_EQ(lse, -infinity) << i;
    else
      ASSERT_NEAR(double{lse}, top + std::log(sum), 2e-6 + 0x1p-22 * std::abs(top)) << i;
    for (Index c = 0; c < dim; ++c) {
      const auto value = [&](const auto& x) {
        return static_cast<double>(static_cast<float>(x.out.data()[i * dim + c]));
      };
      const double x = value(merged), p = value(a.output), q = value(b.output);
      if (broken || std::isnan(p) || std::isnan(q)) {
        ASSERT_TRUE(std::isnan(x)) << i << ", " << c;
      } else if (nothing) {
        ASSERT_EQ(x, 0.0) << i;
      } else if (std::abs(la - lb) > 200 || (la == lb && p == q)) {
        const double answer = la > lb ? p : q;  // the larger part, or either one: to the bit
        ASSERT_EQ(x, static_cast<double>(static_cast<float>(stored<A>(answer)))) << i;
      } else {
        const double exact = (std::exp(la - top) * p + std::exp(lb - top) * q) / sum;
        ASSERT_NEAR(x, exact, rounding_error<A> * std::abs(exact) + 2e-6 * 3.5 + 0x1p-25)
            << i << ", " << c;
      }
    }
  }
}

// Only the difference of two log-sum-exps counts, whatever their size; parts may come in formats of their own.
TEST(Merge, IsTheSumOfBothPartsByTheirWeights) {
  for_each_storage<AllStorageTypes>([]<class T>() {
    for_each_draw(40, [&](Random& random) {
      const Index batch = 1 + random.below(2), heads = 1 + random.below(6),
                  q_len = 1 + random.below(9), dim = 1 + random.below(70);
      const double levels[] = {0, 0, -30, 8192, 1e4, -1e4};
      const double level = levels[random.below(6)],
                   apart = random.below(3) == 0 ? 1e4 : 3 * random.normal();
      const Part<T> a(random, batch, heads, q_len, dim, level);
      expect_merged(a, Part<T>(random, batch, heads, q_len, dim, level + apart));
      expect_merged(a, Part<float>(random, batch, heads, q_len, dim, level - apart));
      expect_merged(Part<float>(random, batch, heads, q_len, dim, level), a);
      expect_merged(a, a);
    });
  });
}

}  // namespace
