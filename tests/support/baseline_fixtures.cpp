#include "support/baseline_fixtures.hpp"

#include <quoka/kernels/kernels.hpp>

namespace quoka_test {

std::string name_of(Domain x) { return x == Domain::softmax ? "softmax" : "logit"; }

void expect_scores(const Tensor3<float>& scores, const oracle::Scores& expected, Domain domain,
                   double tolerance) {
  ASSERT_EQ(scores.dimension(0), std::ssize(expected));
  for (Index b = 0; b < scores.dimension(0); ++b) {
    ASSERT_EQ(scores.dimension(1), std::ssize(expected[uz(b)]));
    for (Index head = 0; head < scores.dimension(1); ++head) {
      const std::vector<double>& exact = expected[uz(b)][uz(head)];
      ASSERT_EQ(scores.dimension(2), std::ssize(exact));
      double largest = 0;
      for (double x : exact)
        if (std::isfinite(x)) largest = std::max(largest, std::abs(x));
      for (Index t = 0; t < std::ssize(exact); ++t) {
        const double score = static_cast<double>(scores(b, head, t)), x = exact[uz(t)];
        if (!std::isfinite(x)) {
          ASSERT_FALSE(std::isfinite(score)) << "key " << t;
          continue;
        }
        const double most =
            domain == Domain::softmax ? tolerance * x + 1e-30 : tolerance * largest + 1e-7;
        ASSERT_NEAR(score, x, most)
            << name_of(domain) << " score of [" << b << ", " << head << ", " << t << "]";
      }
    }
  }
}

oracle::Scores comparable(oracle::Scores scores, Domain domain) {
  if (domain == Domain::logit) return scores;
  for (auto& heads : scores)
    for (auto& head : heads)
      for (double& x : head) x = std::log(x);
  return scores;
}

DrawnCall::DrawnCall(Random& random, bool finite) {
  const Index block = quoka::detail::kernel_sizes().block_keys;
  const Index batch = 1 + random.below(2), heads = 1 + random.below(2), group = 1 + random.below(3),
              dim = random.one_of(1, 3, 17, 20, 24, 40), len = random.one_of(1, 2, 7, 17, 37),
              keys =
                  random.one_of<Index>({32, 37, 127, block - 1, block, block + 1, 2 * block + 3});
  auto floats_q = random.tensor<float>(batch, heads * group, len, dim),
       floats_k = random.tensor<float>(batch, heads, keys, dim);
  if (random.seldom(4))
    for (Index i = 0; i < floats_q.size(); ++i) floats_q.data()[i] = random.below(2) ? 0.5f : -0.5f;
  const bool apart =
      random.seldom(3);  // the first head of a group looks at other channels than the others
  for (Index i = 0; i < floats_q.size() && apart; ++i) {
    const bool first_channels = i % dim < (dim + 1) / 2, first_head = i / dim / len % group == 0;
    if (first_channels != first_head)
      floats_q.data()[i] = 0.0f;
    else if (first_head)
      floats_q.data()[i] *= 8.0f;
  }
  if (random.seldom(4)) floats_q = with_row(std::move(floats_q), random.below(len), 0.0f);
  if (random.seldom(4)) floats_k = with_row(std::move(floats_k), random.below(keys), 0.0f);
  if (random.seldom(6)) floats_k.chip(0, 1).setZero();
  if (!finite && random.seldom(3)) {
    odd = random.below(keys);
    const float value = random.one_of(not_a_number, infinity, -infinity);
    const Index channel = random.below(2) == 0 ? -1 : random.below(dim);  // of all, or one
    for (Index row = odd; row < floats_k.size() / dim; row += keys)
      for (Index c = 0; c < dim; ++c)
        if (channel < 0 || channel == c) floats_k.data()[row * dim + c] = value;
  }
  const Format& format = *every_format()[uz(random.below(3))];
  q = StoredRows(floats_q, format), k = StoredRows(floats_k, format);
}

oracle::Scores DrawnCall::expected(
    const std::function<oracle::Scores(const oracle::Tensor& q, const oracle::Tensor& k)>& scores)
    const {
  if (odd < 0) return scores(exact_q(), exact_k());
  oracle::Scores all = scores(exact_q(), to_oracle(without_row(k.floats(), odd)));
  for (auto& heads : all)
    for (auto& head : heads) head.insert(head.begin() + odd, oracle::not_a_number);
  return all;
}

std::string DrawnCall::describe() const {
  std::string text = std::string(q.rows().format().name) + ", q";
  for (const Index size : q.rows().sizes()) text += " " + std::to_string(size);
  return text + ", KV heads " + std::to_string(k.rows().heads()) + ", kv_len " +
         std::to_string(kv_len()) +
         (odd < 0 ? "" : ", key " + std::to_string(odd) + " is not finite");
}

}  // namespace quoka_test
