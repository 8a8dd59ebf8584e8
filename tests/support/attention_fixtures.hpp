// Common code of attention's tests: random inputs of a shape, one call of the library and the same
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
Inputs<T> random_inputs(Random& random, const Shape& s, bool chunk = true);

// `count` random positions per (batch, KV head), ascending.
Selection random_selection(Random& random, Index batch, Index kv_heads, Index kv_len, Index count);

template <class T>
struct Output {
  Tensor4<T> out;      // [batch, q_heads, q_len, v_dim]
  Tensor3<float> lse;  // [batch, q_heads, q_len]
};

// An output full of a value that no result has, so that an element left out is seen.
template <class T>
Output<T> unwritten(const Tensor4<T>& q, Index v_dim);

template <class T>
Output<T> attend(const Inputs<T>& in, const AttentionOptions& options = {},
                 const Selection* keep = nullptr, ExecutorRef executor = SerialExecutor{});

// Without the mask: the oracle has it from the test.
oracle::AttentionOptions to_oracle(const AttentionOptions& options);

template <class T>
oracle::AttentionResult oracle_result(const Inputs<T>& in, const oracle::AttentionOptions& options,
                                      const Selection* keep = nullptr);
template <class T>
oracle::AttentionResult oracle_attend(const Inputs<T>& in, const AttentionOptions& options = {},
                                      const Selection* keep = nullptr);

// The bound. The oracle reads the stored values, so storage costs one rounding, that of the output.
// The rest is float arithmetic: a logit l is off by a few 2^-24 |l|, and an exponential
// by 1.5e-7; both are relative errors of a weight, and errors of the output of at most that times
// the largest |value|. For |l| up to about 10, `noise` = 4e-6 has room to spare; the norm of the
// whole, where such errors average out, is held to 2e-6. Where Arithmetic::automatic takes products
// of bfloat16, a logit l = sum of x is off by some 2^-16 of sum |x|, and so is a mean of values.
// Defined in attention_fixtures.cpp, or each unit that looks inside would compile the kernels of every arithmetic for them.
extern const bool automatic_is_float;
// Does it split floats of a float cache into parts of bfloat16? AMX's tiles alone do.
bool automatic_splits_floats();
extern const double float_error;  // 2e-6 or 2e-5: relative, Frobenius
extern const double noise;        // 4e-6 or 1e-4: of the largest |value|, each element

template <class T>
double largest(const Tensor4<T>& x);

// Every element of x within one rounding to T, and absolute + a denormal of half, of the reference.
template <class T>
::testing::AssertionResult elements_close(const Tensor4<T>& x, const oracle::Tensor& reference,
                                          double absolute);

// The log-sum-exp: an error of the logits, and one rounding.
::testing::AssertionResult lse_close(const Tensor3<float>& lse,
                                     const std::vector<double>& reference, double absolute);

template <class T>
void expect_close(const Output<T>& output, const oracle::AttentionResult& reference,
                  const Inputs<T>& in, double factor = 1.0);

template <class T>
void expect_same(const Output<T>& a, const Output<T>& b);

// Do both have the same bits in row [b, head, i]?
bool same_row(const Output<float>& x, const Output<float>& y, Index b, Index head, Index i);

}  // namespace quoka_test
