// softmax_scores() by codes: SampleAttention, SparQ and Loki by 8-bit logits score nearly as in float, and in float
// where all scores count. selection_fuzz_test.cpp tests where else they are computed in float, and whose sketch they
// use.

#include <quoka/methods/loki.hpp>
#include <quoka/methods/sample_attention.hpp>
#include <quoka/methods/sparq.hpp>

#include "support/baseline_fixtures.hpp"

#include <cmath>

namespace {

using namespace quoka_test;
using quoka::SelectorInput;
using quoka::Sketch;

constexpr Index kv_heads = 2, q_heads = 6, dim = 40;

template <class S>
typename S::Options options_of(Sketch sketch) {
  typename S::Options options{};
  options.budget = Budget::keys(31), options.sketch = sketch;
  if constexpr (requires { options.rank; }) options.rank = 21;
  if constexpr (requires { options.n_queries; }) options.n_queries = 7;
  if constexpr (requires { options.fitted; }) options.fitted = 80;
  return options;
}

template <class S>
class SoftmaxSketch : public ::testing::Test {};
using Methods =
    ::testing::Types<quoka::SampleAttentionScorer, quoka::SparqScorer, quoka::LokiScorer>;
TYPED_TEST_SUITE(SoftmaxSketch, Methods);

// Scores by a State with the codes of all keys.
template <class S>
Tensor3<float> told(const typename S::Options& options, const SelectorInput& input) {
  typename S::State state;
  S(options).appended(input, state, SerialExecutor{});
  return scores_by<S>(options, input, state);
}

// The largest |ln(x / y)|; not finite in one, not in the other.
double farthest(const Tensor3<float>& x, const Tensor3<float>& y) {
  double most = 0.0;
  for (Index i = 0; i < x.size(); ++i) {
    if (std::isfinite(x.data()[i]) != std::isfinite(y.data()[i])) return 1e30;
    if (!std::isfinite(x.data()[i])) continue;
    if (x.data()[i] == 0.0f && y.data()[i] == 0.0f) continue;
    most = std::max(most, std::abs(std::log(static_cast<double>(x.data()[i]) /
                                            static_cast<double>(y.data()[i]))));
  }
  return most;
}

TYPED_TEST(SoftmaxSketch, ScoresNearlyAsInFloat) {
  Random random(831);
  const auto on = options_of<TypeParam>(Sketch::on), off = options_of<TypeParam>(Sketch::off);
  for (const Index q_len : {1, 5, 37})
    for (const Index kv_len : {90, 333}) {
      const auto q = random.tensor<float>(2, q_heads, q_len, dim);
      const auto k = random.tensor<float>(2, kv_heads, kv_len, dim);
      const SelectorInput input{.q = q, .k = k, .logits = LogitOptions{}};
      const auto by_codes = told<TypeParam>(on, input), in_float = told<TypeParam>(off, input);
      EXPECT_LT(farthest(by_codes, in_float), 0.06) << q_len << " queries, " << kv_len << " keys";
      EXPECT_FALSE(same_bits(by_codes, in_float));
    }
}

}  // namespace
