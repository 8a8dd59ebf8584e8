// Properties of every arithmetic of panels, by every unit that this machine compiles: against the oracle, within the
// bound that bfloat16_error() and int8_error() state for all inputs, and float's results for numbers that are too large
// or NaN.

#include "support/attention_case.hpp"
#include "kernels/every_arithmetic.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <limits>

namespace {

using namespace quoka_test;
using quoka::Arithmetic;

// ---- the bound ----------------------------------------------------------------------------------

// Every case (support/attention_case.hpp) has the oracle's numbers within its bound, the same bits by any executor, and
// NaN in its rows alone.
TEST(PanelArithmetics, OweWhatAttentionDoes) {
  const char* const asked = std::getenv("QUOKA_ATTENTION_CASES");
  const Index cases = asked != nullptr ? std::atol(asked) / 3 : 50;
  for (Index seed = 0; seed < cases; ++seed)
    for_each_arithmetic([&](const Panels& one) {
      Random random(static_cast<std::uint64_t>(seed));
      AttentionCase c(random);
      if (c.shape().q_len == 1 || ::testing::Test::HasFailure()) return;
      SCOPED_TRACE(c.describe());
      const auto by = [&](ExecutorRef executor) {
        return [&one, executor](const Rows& q, const quoka::Past& past, const quoka::Chunk& chunk,
                                const quoka::AttentionOutput& output,
                                const AttentionOptions& options) {
          attend_by(one.panels, q, past, chunk, output, options, executor);
        };
      };
      const ComputedIn by_one{one.arithmetic, one.products};
      const Output<float> output = c.attend(by(SerialExecutor{}));
      EXPECT_TRUE(c.is_as_oracle(output, by_one));
      ShuffledExecutor shuffled(random.bits(), 5);
      expect_same(c.attend(by(shuffled)), output);
      EXPECT_TRUE(c.keeps_nan_in_its_rows(output, random, by(SerialExecutor{}), by_one));
    });
}

// The largest sum over channels of |q| |k| scale, of any query and key of one head, and product of their lengths.
struct LargestLogit {
  double products = 0, lengths = 0;
};
LargestLogit largest_logit(const Inputs<float>& in) {
  const Index dim = in.q.dimension(3), group = in.q.dimension(1) / in.past_k.dimension(1);
  const double scale = 1.0 / std::sqrt(static_cast<double>(dim));
  LargestLogit most;
  for (Index b = 0; b < in.q.dimension(0); ++b)
    for (Index head = 0; head < in.q.dimension(1); ++head)
      for (Index i = 0; i < in.q.dimension(2); ++i)
        for (const Tensor4<float>* k : {&in.past_k, &in.k})
          for (Index t = 0; t < k->dimension(2); ++t) {
            double sum = 0, of_q = 0, of_k = 0;
            for (Index c = 0; c < dim; ++c) {
              const double x = static_cast<double>(in.q(b, head, i, c)),
                           y = static_cast<double>((*k)(b, head / group, t, c));
              sum += std::abs(x * y), of_q += x * x, of_k += y * y;
            }
            most.products = std::max(most.products, sum * scale);
            most.lengths = std::max(most.lengths, std::sqrt(of_q * of_k) * scale);
          }
  return most;
}

// Within what is stated for all numbers, and float's own part: of sums over the channels, and of the softmax.
void expect_as_bound(const Panels& by, const Inputs<float>& in) {
  const Output<float> output = attend_by(by.panels, in);
  const oracle::AttentionResult expected = oracle_attend(in);
  const Index dim = in.q.dimension(3);
  const LargestLogit most = largest_logit(in);
  double logit = (0x1p-23 * std::sqrt(static_cast<double>(dim)) + 0x1p-22) * most.products + 1e-6,
         value = 0;
  if (by.arithmetic == Arithmetic::int8) {
    const quoka::Int8Error error = quoka::int8_error(dim, in.past_v.dimension(3));
    logit += error.logit * most.lengths, value = error.value;
  } else if (by.arithmetic != Arithmetic::float_) {
    const quoka::Bfloat16Error error = quoka::bfloat16_error(by.products, false);
    logit += error.logit * most.products, value = error.value;
  }
  const double bound =
      (std::expm1(2 * logit) + value + 4e-6) * std::max(largest(in.past_v), largest(in.v));
  EXPECT_TRUE(elements_close(output.out, expected.out, bound));
  EXPECT_TRUE(lse_close(output.lse, expected.lse, logit + std::min(value, 2e-4) + 1e-6));
}

// The errors of include/quoka/README.md's table of arithmetics: 16 query rows over 8,192 keys of normal numbers, the
// largest difference as part of the largest output.
TEST(PanelArithmetics, ErrorsOfNormalNumbersAreAsThePageSays) {
  const auto stated = [](const Panels& by) {
    if (by.arithmetic == Arithmetic::bf16) return 6e-3;
    if (by.products == 2) return 4e-3;  // the cache is of floats
    if (by.products == 3) return 1e-5;
    return by.arithmetic == Arithmetic::int8 ? 2.5e-2 : 1e-6;
  };
  for (std::uint64_t seed = 700; seed < 704; ++seed) {
    Random random(seed);
    const auto in = random_inputs<float>(
        random,
        {.q_heads = 4, .kv_heads = 1, .head_dim = 128, .v_dim = 128, .q_len = 4, .kv_len = 8188});
    const oracle::AttentionResult expected = oracle_attend(in);
    double most = 0;
    for (const double x : expected.out.data) most = std::max(most, std::abs(x));
    for_each_arithmetic([&](const Panels& by) {
      const Output<float> output = attend_by(by.panels, in);
      EXPECT_TRUE(elements_close(output.out, expected.out, stated(by) * most));
    });
  }
}

// A row's bits do not depend on other rows of its panel, whose maxima rise at other keys.
TEST(PanelArithmetics, ARowsBitsAreItsOwn) {
  Random random(22);
  auto in = random_inputs<float>(random, {.q_heads = 1, .q_len = 31, .kv_len = 501}, false);
  for (Index t = 0; t < 501; ++t)  // logits that go up by 20 and down again
    for (Index c = 0; c < 16; ++c)
      in.past_k(0, 0, t, c) += 0.3f * static_cast<float>(t % 97) / 97.0f * 10.0f;
  auto others = in;
  for (Index i = 0; i < 31; ++i)
    for (Index c = 0; c < 16; ++c)
      if (i != 17) others.q(0, 0, i, c) *= i % 2 == 0 ? -8.0f : 8.0f;
  for_each_arithmetic([&](const Panels& by) {
    const AttentionOptions options{.q_offset = 501};
    const auto a = attend_by(by.panels, in, options), b = attend_by(by.panels, others, options);
    EXPECT_TRUE(same_row(a, b, 0, 0, 17));
    EXPECT_FALSE(same_row(a, b, 0, 0, 16));
  });
}

// Logits that rise from block to block: each maximum is above the last by less, and by more, than a reference may lag
// behind.
TEST(PanelArithmetics, RisingLogits) {
  Random random(23);
  for (const float step : {0.01f, 0.05f, 0.3f, 2.0f}) {
    SCOPED_TRACE("by " + std::to_string(step));
    auto in = random_inputs<float>(random, {.q_heads = 2, .q_len = 37, .kv_len = 301});
    in.q.setConstant(0.25f);
    for (Index t = 0; t < 301; ++t)
      for (Index c = 0; c < 16; ++c)
        in.past_k(0, 0, t, c) =
            stored<float>(0.5 * static_cast<double>(step) * static_cast<double>(t));
    for_each_arithmetic([&](const Panels& by) { expect_as_bound(by, in); });
  }
}

// ---- hostile numbers ----------------------------------------------------------------------------

// A channel of all keys far from zero, a key as large as sinks are, values of some other scale.
TEST(PanelArithmetics, OutliersAndSinks) {
  Random random(40);
  for (const float outlier : {50.0f, 100.0f, 1e4f}) {
    SCOPED_TRACE("outlier " + std::to_string(outlier));
    auto in = random_inputs<float>(
        random, {.q_heads = 3, .head_dim = 64, .v_dim = 64, .q_len = 37, .kv_len = 301});
    for (auto* k : {&in.past_k, &in.k})
      for (Index t = 0; t < k->dimension(2); ++t)
        (*k)(0, 0, t, 5) = outlier + static_cast<float>(t % 7);
    for (Index head = 0; head < 3; ++head)
      for (Index i = 0; i < 37; ++i) in.q(0, head, i, 5) /= outlier;
    for (Index c = 0; c < 64; ++c) {
      in.past_k(0, 0, 0, c) *= 4.0f;  // a sink, and what it has for a value
      in.past_v(0, 0, 0, c) *= 0.01f;
      in.past_v(0, 0, 100, c) *= outlier;
    }
    for_each_arithmetic([&](const Panels& by) {
      if (by.arithmetic == Arithmetic::int8 && outlier > 100.0f) return;  // nothing is promised
      expect_as_bound(by, in);
    });
  }
}

// Denormals are zeros; results are off by no more than they are.
TEST(PanelArithmetics, DenormalsAreNothing) {
  Random random(41);
  auto in = random_inputs<float>(random, {.q_heads = 2, .q_len = 37, .kv_len = 101});
  for (auto* x : {&in.past_k, &in.k, &in.past_v, &in.v})
    for (Index i = 0; i < x->size(); i += 3) x->data()[i] = 1e-40f;
  for_each_arithmetic([&](const Panels& by) { expect_as_bound(by, in); });
  for (auto* x : {&in.past_v, &in.v})
    for (Index i = 0; i < x->size(); ++i) x->data()[i] = 1e-39f;
  for_each_arithmetic([&](const Panels& by) {
    const auto output = attend_by(by.panels, in);
    for (Index i = 0; i < output.out.size(); ++i) {
      EXPECT_GE(output.out.data()[i], 0.0f);
      EXPECT_LE(output.out.data()[i], 1.2e-38f);
    }
  });
}

// Numbers whose parts' products would overflow, or that would overflow when rounded up, and infinite ones are computed
// in float.
TEST(PanelArithmetics, HugeAndInfiniteNumbersAreLeftToFloat) {
  Random random(42);
  auto in = random_inputs<float>(random, {.q_heads = 2, .q_len = 37, .kv_len = 101});
  for (Index i = 0; i < 37; ++i) in.q(0, 1, i, 3) = 0.0f;
  in.past_k(0, 0, 30, 3) = std::numeric_limits<float>::max();  // only head 0 sees it
  in.past_v(0, 0, 60, 7) = std::numeric_limits<float>::max();
  in.past_v(0, 0, 61, 9) = -infinity;
  const auto expected = attend(in, {.arithmetic = Arithmetic::float_});
  for_each_arithmetic([&](const Panels& by) {
    const double off = by.arithmetic == Arithmetic::int8 ? 0.1 : 0.05;
    const auto output = attend_by(by.panels, in);
    for (Index head = 0; head < 2; ++head)
      for (Index i = 0; i < 37; ++i)
        for (Index c = 0; c < 16; ++c) {
          const float x = output.out(0, head, i, c), y = expected.out(0, head, i, c);
          EXPECT_TRUE(std::isnan(x) == std::isnan(y) && std::isinf(x) == std::isinf(y)) << x << y;
          if (std::isfinite(y)) {
            EXPECT_NEAR(x, y, off * std::abs(static_cast<double>(y)) + off + 0.05);
          }
        }
  });
}

TEST(PanelArithmetics, InfinityIsALogitOfItsSignAndAValueOfItsOwn) {
  Random random(36);
  auto in = random_inputs<Element>(random, {.q_heads = 1, .q_len = 37, .kv_len = 101});
  in.past_k(0, 0, 50, 3) = stored<Element>(HUGE_VAL);
  const auto in_float = attend(in);
  auto values = random_inputs<Element>(random, {.q_heads = 2, .q_len = 37, .kv_len = 101});
  for (Index c = 0; c < 16; ++c) values.v(0, 0, 20, c) = stored<Element>(-HUGE_VAL);
  for_each_arithmetic([&](const Panels& by) {
    const auto output = attend_by(by.panels, in);
    for (Index i = 0; i < 37; ++i) {
      EXPECT_EQ(row_is_nan(output, 0, 0, i), row_is_nan(in_float, 0, 0, i)) << i;
      if (row_is_nan(output, 0, 0, i)) continue;
      EXPECT_NEAR(output.lse(0, 0, i), in_float.lse(0, 0, i), 0.1);
    }
    const auto of_values = attend_by(by.panels, values);
    for (Index head = 0; head < 2; ++head)
      for (Index i = 0; i < 37; ++i)
        for (Index c = 0; c < 16; ++c) {
          const float x = static_cast<float>(of_values.out(0, head, i, c));
          EXPECT_EQ(std::isinf(x), i >= 20) << i;
          EXPECT_EQ(i >= 20 && x > 0, false);
          EXPECT_FALSE(std::isnan(x));
        }
  });
}

// ---- masks --------------------------------------------------------------------------------------

TEST(PanelArithmetics, ABiasOfInfinityOrNaNIsAsInFloat) {
  Random random(37);
  const auto in = random_inputs<Element>(random, {.q_heads = 2, .q_len = 37, .kv_len = 101});
  auto added = random.tensor<float>(1, 1, 37, 138);
  added(0, 0, 3, 20) = infinity, added(0, 0, 5, 70) = not_a_number;
  const AttentionOptions options{.mask = added};
  const auto in_float = attend(in, options);
  for_each_arithmetic([&](const Panels& by) {
    const auto output = attend_by(by.panels, in, options);
    for (Index head = 0; head < 2; ++head)
      for (Index i = 0; i < 37; ++i)
        EXPECT_EQ(row_is_nan(output, 0, head, i), row_is_nan(in_float, 0, head, i)) << i;
  });
}

}  // namespace
