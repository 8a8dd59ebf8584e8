#include "support/attention_fixtures.hpp"

namespace quoka_test {

const bool automatic_is_float =
    quoka::arithmetic_used(quoka::Arithmetic::automatic, quoka::format_of<Eigen::bfloat16>(),
                           quoka::format_of<Eigen::bfloat16>()) == quoka::Arithmetic::float_;
bool automatic_splits_floats() {
  return quoka::arithmetic_used(quoka::Arithmetic::automatic) != quoka::Arithmetic::float_;
}
const double float_error = automatic_is_float ? 2e-6 : 2e-5;
const double noise = automatic_is_float ? 4e-6 : 1e-4;

Selection random_selection(Random& random, Index batch, Index kv_heads, Index kv_len, Index count) {
  oracle::Positions lists = oracle::all_positions(batch, kv_heads, 0);
  for (auto& heads : lists)
    for (auto& list : heads) list = random.some_of(kv_len, count);
  return to_selection(lists, kv_len);
}

oracle::AttentionOptions to_oracle(const AttentionOptions& options) {
  oracle::AttentionOptions exact;
  exact.scale = static_cast<double>(options.scale.value_or(0.0f));
  exact.softcap = static_cast<double>(options.softcap);
  exact.sinks.assign(options.sinks.begin(), options.sinks.end());
  exact.window = options.sliding_window;
  exact.causal = options.causal;
  exact.q_offset = options.q_offset;
  exact.mask_factors.assign(options.mask_factors.begin(), options.mask_factors.end());
  exact.alibi_slopes.assign(options.alibi_slopes.begin(), options.alibi_slopes.end());
  return exact;
}

::testing::AssertionResult lse_close(const Tensor3<float>& lse,
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
Inputs<T> random_inputs(Random& random, const Shape& s, bool chunk) {
  const Index chunk_len = chunk ? s.q_len : 0;
  return {random.tensor<T>(s.batch, s.q_heads, s.q_len, s.head_dim),
          random.tensor<T>(s.batch, s.kv_heads, s.kv_len, s.head_dim),
          random.tensor<T>(s.batch, s.kv_heads, s.kv_len, s.v_dim),
          random.tensor<T>(s.batch, s.kv_heads, chunk_len, s.head_dim),
          random.tensor<T>(s.batch, s.kv_heads, chunk_len, s.v_dim)};
}

template <class T>
Output<T> unwritten(const Tensor4<T>& q, Index v_dim) {
  Output<T> output{Tensor4<T>(q.dimension(0), q.dimension(1), q.dimension(2), v_dim),
                   Tensor3<float>(q.dimension(0), q.dimension(1), q.dimension(2))};
  output.out.setConstant(stored<T>(-12345.0));
  output.lse.setConstant(-12345.0f);
  return output;
}

template <class T>
Output<T> attend(const Inputs<T>& in, const AttentionOptions& options, const Selection* keep,
                 ExecutorRef executor) {
  Output<T> output = unwritten<T>(in.q, std::max(in.past_v.dimension(3), in.v.dimension(3)));
  quoka::Past past(in.past_k, in.past_v);
  past.selection = keep;
  AttentionOptions placed = options;  // without a chunk: the past lies before the queries
  if (in.k.size() == 0 && !options.q_offset) placed.q_offset = past.k.len();
  quoka::attention(in.q, past, {in.k, in.v}, {output.out, output.lse}, placed, executor);
  return output;
}

template <class T>
oracle::AttentionResult oracle_result(const Inputs<T>& in, const oracle::AttentionOptions& options,
                                      const Selection* keep) {
  oracle::Positions lists;
  if (keep != nullptr) lists = to_positions(*keep);
  return oracle::attention(to_oracle(in.q), to_oracle(in.past_k), to_oracle(in.past_v),
                           keep != nullptr ? &lists : nullptr, to_oracle(in.k), to_oracle(in.v),
                           options);
}

template <class T>
oracle::AttentionResult oracle_attend(const Inputs<T>& in, const AttentionOptions& options,
                                      const Selection* keep) {
  return oracle_result(in, to_oracle(options), keep);
}

template <class T>
double largest(const Tensor4<T>& x) {
  double result = 0;
  for (Index i = 0; i < x.size(); ++i)
    result = std::max(result, std::abs(static_cast<double>(static_cast<float>(x.data()[i]))));
  return result;
}

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

template <class T>
void expect_close(const Output<T>& output, const oracle::AttentionResult& reference,
                  const Inputs<T>& in, double factor) {
  const double value = std::max(largest(in.past_v), largest(in.v));
  EXPECT_TRUE(elements_close(output.out, reference.out, factor * noise * value));
  EXPECT_TRUE(lse_close(output.lse, reference.lse, factor * noise));
  if constexpr (std::is_same_v<T, float>) {
    EXPECT_LE(oracle::relative_error(to_oracle(output.out), reference.out), factor * float_error);
  }
}

template <class T>
void expect_same(const Output<T>& a, const Output<T>& b) {
  EXPECT_TRUE(same_bits(a.out, b.out));
  EXPECT_TRUE(same_bits(a.lse, b.lse));
}

bool same_row(const Output<float>& x, const Output<float>& y, Index b, Index head, Index i) {
  return std::memcmp(&x.lse(b, head, i), &y.lse(b, head, i), sizeof(float)) == 0 &&
         std::memcmp(&x.out(b, head, i, 0), &y.out(b, head, i, 0),
                     uz(x.out.dimension(3)) * sizeof(float)) == 0;
}

#define QUOKA_TEST_INSTANTIATE(T)                                                                \
  template Inputs<T> random_inputs(Random&, const Shape&, bool);                                 \
  template Output<T> unwritten(const Tensor4<T>&, Index);                                        \
  template Output<T> attend(const Inputs<T>&, const AttentionOptions&, const Selection*,         \
                            ExecutorRef);                                                        \
  template oracle::AttentionResult oracle_result(                                                \
      const Inputs<T>&, const oracle::AttentionOptions&, const Selection*);                      \
  template oracle::AttentionResult oracle_attend(const Inputs<T>&, const AttentionOptions&,      \
                                                 const Selection*);                              \
  template double largest(const Tensor4<T>&);                                                    \
  template ::testing::AssertionResult elements_close(const Tensor4<T>&, const oracle::Tensor&,   \
                                                     double);                                    \
  template void expect_close(const Output<T>&, const oracle::AttentionResult&, const Inputs<T>&, \
                             double);                                                            \
  template void expect_same(const Output<T>&, const Output<T>&);
QUOKA_TEST_INSTANTIATE(float)
QUOKA_TEST_INSTANTIATE(Eigen::half)
QUOKA_TEST_INSTANTIATE(Eigen::bfloat16)
#undef QUOKA_TEST_INSTANTIATE

}  // namespace quoka_test
