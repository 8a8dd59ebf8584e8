// What the tests of attention share: random inputs of a shape, one call of the library and the same
// call of the oracle, and the bound between the two.
//
//   Random random(7);
//   const auto in = random_inputs<T>(random, {.q_heads = 4, .kv_heads = 2, .kv_len = 501});
//   expect_close(attend(in), oracle_attend(in), in);
#pragma once

#include <quoka/attention/attention.hpp>

#include "support/fixtures.hpp"

namespace quoka_test {

using quoka::AttentionOptions;

struct Shape {
  Index batch = 1, q_heads = 2, kv_heads = 1, head_dim = 16, v_dim = 16, q_len = 7, kv_len = 37;
};

template <class T>
struct Inputs {
  Tensor4<T> q;               // [batch, q_heads, q_len, head_dim]
  Tensor4<T> past_k, past_v;  // [batch, kv_heads, kv_len, head_dim and v_dim]
  Tensor4<T> k, v;            // [batch, kv_heads, q_len or 0, head_dim and v_dim]
};

// `chunk` false: the past alone.
template <class T>
Inputs<T> random_inputs(Random& random, const Shape& s, bool chunk = true) {
  const Index chunk_len = chunk ? s.q_len : 0;
  return {random.tensor<T>(s.batch, s.q_heads, s.q_len, s.head_dim),
          random.tensor<T>(s.batch, s.kv_heads, s.kv_len, s.head_dim),
          random.tensor<T>(s.batch, s.kv_heads, s.kv_len, s.v_dim),
          random.tensor<T>(s.batch, s.kv_heads, chunk_len, s.head_dim),
          random.tensor<T>(s.batch, s.kv_heads, chunk_len, s.v_dim)};
}

// `count` random positions per (batch, KV head), ascending.
inline Selection random_selection(Random& random, Index batch, Index kv_heads, Index kv_len,
                                  Index count) {
  oracle::Positions lists = oracle::all_positions(batch, kv_heads, 0);
  for (auto& heads : lists)
    for (auto& list : heads) {
      list = random.permutation(kv_len);
      list.resize(uz(count));
      std::sort(list.begin(), list.end());
    }
  return to_selection(lists, kv_len);
}

template <class T>
struct Output {
  Tensor4<T> out;      // [batch, q_heads, q_len, v_dim]
  Tensor3<float> lse;  // [batch, q_heads, q_len]
};

// An output full of a value that no result has, so that an element left out is seen.
template <class T>
Output<T> unwritten(const Tensor4<T>& q, Index v_dim) {
  Output<T> output{Tensor4<T>(q.dimension(0), q.dimension(1), q.dimension(2), v_dim),
                   Tensor3<float>(q.dimension(0), q.dimension(1), q.dimension(2))};
  output.out.setConstant(stored<T>(-12345.0));
  output.lse.setConstant(-12345.0f);
  return output;
}

template <class T>
Output<T> attend(const Inputs<T>& in, const AttentionOptions& options = {},
                 const Selection* keep = nullptr, ExecutorRef executor = SerialExecutor{}) {
  Output<T> output = unwritten<T>(in.q, std::max(in.past_v.dimension(3), in.v.dimension(3)));
  quoka::Past past(in.past_k, in.past_v);
  past.keep = keep;
  quoka::attention(in.q, past, {in.k, in.v}, {output.out, output.lse}, options, executor);
  return output;
}

// Without the mask: the oracle has it from the test.
inline oracle::AttentionOptions to_oracle(const AttentionOptions& options) {
  oracle::AttentionOptions exact;
  exact.scale = static_cast<double>(options.scale.value_or(0.0f));
  exact.softcap = static_cast<double>(options.softcap);
  exact.sink_logits.assign(options.sink_logits.begin(), options.sink_logits.end());
  exact.window = options.sliding_window;
  exact.causal = options.causal;
  exact.query_position = options.query_position;
  exact.mask_factors.assign(options.mask_factors.begin(), options.mask_factors.end());
  exact.alibi_slopes.assign(options.alibi_slopes.begin(), options.alibi_slopes.end());
  return exact;
}

template <class T>
oracle::AttentionResult oracle_result(const Inputs<T>& in, const oracle::AttentionOptions& options,
                                      const Selection* keep = nullptr) {
  oracle::Positions lists;
  if (keep != nullptr) lists = to_positions(*keep);
  return oracle::attention(to_oracle(in.q), to_oracle(in.past_k), to_oracle(in.past_v),
                           keep != nullptr ? &lists : nullptr, to_oracle(in.k), to_oracle(in.v),
                           options);
}
template <class T>
oracle::AttentionResult oracle_attend(const Inputs<T>& in, const AttentionOptions& options = {},
                                      const Selection* keep = nullptr) {
  return oracle_result(in, to_oracle(options), keep);
}

// The bound. The oracle reads the stored values, so storage costs one rounding, that of the output.
// What remains is float arithmetic: a logit l is off by a few 2^-24 |l|, and an exponential
// by 1.5e-7; both are relative errors of a weight, and errors of the output of at most that times
// the largest |value|. For |l| up to about 10, `noise` = 4e-6 has room to spare; the norm of the
// whole, where such errors average out, is held to 2e-6.
inline constexpr double float_error = 2e-6;  // relative, Frobenius
inline constexpr double noise = 4e-6;        // of the largest |value|, each element

template <class T>
double largest(const Tensor4<T>& x) {
  double result = 0;
  for (Index i = 0; i < x.size(); ++i)
    result = std::max(result, std::abs(static_cast<double>(static_cast<float>(x.data()[i]))));
  return result;
}

// Every element of x within one rounding to T, and absolute + a denormal of half, of the reference.
template <class T>
::testing::AssertionResult elements_close(const Tensor4<T>& x, const oracle::Tensor& reference,
                                          double absolute) {
  const oracle::Tensor exact = to_oracle(x);
  if (exact.data.size() != reference.data.size())
    return ::testing::AssertionFailure() << "the shapes differ";
  const double rounding =
      std::is_same_v<T, float> ? 0.0 : rounding_error<T>;  // of float: part of `absolute`
  const double smallest = std::is_same_v<T, Eigen::half> ? 0x1p-25 : 0.0;
  for (std::size_t i = 0; i < exact.data.size(); ++i) {
    const double bound = rounding * (std::abs(reference.data[i]) + absolute) + absolute + smallest;
    if (!(std::abs(exact.data[i] - reference.data[i]) <= bound))
      return ::testing::AssertionFailure() << "element " << i << ": " << exact.data[i] << ", not "
                                           << reference.data[i] << "; the bound is " << bound;
  }
  return ::testing::AssertionSuccess();
}

// The log-sum-exp: an error of the logits, and one rounding.
inline ::testing::AssertionResult lse_close(const Tensor3<float>& lse,
                                            const std::vector<double>& reference, double absolute) {
  if (lse.size() != std::ssize(reference))
    return ::testing::AssertionFailure() << "the sizes differ";
  for (Index i = 0; i < lse.size(); ++i) {
    const double x = static_cast<double>(lse.data()[i]), expected = reference[uz(i)];
    const bool close = std::isinf(expected)
                           ? x == expected
                           : std::abs(x - expected) <= absolute + 0x1p-24 * std::abs(expected);
    if (!close)
      return ::testing::AssertionFailure() << "lse " << i << ": " << x << ", not " << expected;
  }
  return ::testing::AssertionSuccess();
}

template <class T>
void expect_close(const Output<T>& output, const oracle::AttentionResult& reference,
                  const Inputs<T>& in, double factor = 1.0) {
  const double value = std::max(largest(in.past_v), largest(in.v));
  EXPECT_TRUE(elements_close(output.out, reference.out, factor * noise * value));
  EXPECT_TRUE(lse_close(output.lse, reference.lse, factor * noise));
  if constexpr (std::is_same_v<T, float>) {
    EXPECT_LE(oracle::relative_error(to_oracle(output.out), reference.out), factor * float_error);
  }
}

// The library's answer is the oracle's.
template <class T>
void expect_as_oracle(const Inputs<T>& in, const AttentionOptions& options = {},
                      const Selection* keep = nullptr, double factor = 1.0) {
  expect_close(attend(in, options, keep), oracle_attend(in, options, keep), in, factor);
}

template <class T>
void expect_same(const Output<T>& a, const Output<T>& b) {
  EXPECT_TRUE(same_bits(a.out, b.out));
  EXPECT_TRUE(same_bits(a.lse, b.lse));
}

// Rows [b, head, i] one by one, for what must hold in some and must not in others.
template <class T>
bool row_is_nan(const Output<T>& output, Index b, Index head, Index i) {
  if (!std::isnan(output.lse(b, head, i))) return false;
  for (Index c = 0; c < output.out.dimension(3); ++c)
    if (!std::isnan(static_cast<float>(output.out(b, head, i, c)))) return false;
  return true;
}
template <class T>
bool same_row(const Output<T>& x, const Output<T>& y, Index b, Index head, Index i) {
  return std::memcmp(&x.lse(b, head, i), &y.lse(b, head, i), sizeof(float)) == 0 &&
         std::memcmp(&x.out(b, head, i, 0), &y.out(b, head, i, 0),
                     uz(x.out.dimension(3)) * sizeof(T)) == 0;
}

// Rows for which spoilt(b, head, i) are NaN, lse included; all others have the bits of `clean`.
template <class T, class F>
void expect_spoilt(const Output<T>& output, const Output<T>& clean, F&& spoilt) {
  for (Index b = 0; b < clean.out.dimension(0); ++b)
    for (Index head = 0; head < clean.out.dimension(1); ++head)
      for (Index i = 0; i < clean.out.dimension(2); ++i) {
        const char* where = spoilt(b, head, i) ? "must be NaN" : "must not change";
        EXPECT_TRUE(spoilt(b, head, i) ? row_is_nan(output, b, head, i)
                                       : same_row(output, clean, b, head, i))
            << "[" << b << ", " << head << ", " << i << "] " << where;
      }
}

}  // namespace quoka_test
