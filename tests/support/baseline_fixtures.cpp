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
        const double size = domain == Domain::softmax ? x : largest;
        ASSERT_NEAR(score, x, tolerance * size + 1e-30)
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

Candidates candidates_of(const oracle::Eviction& before, const oracle::Eviction& after,
                         const oracle::Tensor& q, Index b, Index kv_head, Index kv_heads) {
  Candidates c{before.retained, {}};
  for (Index t = std::ssize(before.keys); t < std::ssize(after.keys); ++t) c.positions.push_back(t);
  std::vector<oracle::Row> rows;
  for (Index t : c.positions) rows.push_back(after.keys[uz(t)]);
  if (after.method == oracle::Evict::keydiff) {
    c.scores = oracle::keydiff_scores(rows);
    return c;
  }
  const Index w = std::min(after.window, q.len), group = q.heads / kv_heads;
  std::vector<std::vector<oracle::Row>> window;
  for (Index r = 0; r < group; ++r)
    window.push_back(
        oracle::group_rows(q, b, kv_head * group + r, q.heads, oracle::range(q.len - w, q.len)));
  c.scores = oracle::snapkv_scores(window, rows, after.kernel, after.scale);
  for (double& x : c.scores) x = std::log(x);  // masses have a relative error
  c.scores.resize(rows.size(), oracle::infinity);
  return c;
}

template <class T>
Tensor4<T> without_row(const Tensor4<T>& x, Index i) {
  Tensor4<T> rest(x.dimension(0), x.dimension(1), x.dimension(2) - 1, x.dimension(3));
  for (Index from = 0, to = 0; from < x.dimension(2); ++from)
    if (from != i) rest.chip(to++, 2) = x.chip(from, 2);
  return rest;
}

template <class T>
Tensor4<T> with_row(Tensor4<T> x, Index i, float value) {
  for (Index b = 0; b < x.dimension(0); ++b)
    for (Index head = 0; head < x.dimension(1); ++head)
      for (Index c = 0; c < x.dimension(3); ++c) x(b, head, i, c) = stored<T>(value);
  return x;
}

template <class T>
DrawnCall<T>::DrawnCall(Random& random, Index least_keys) {
  const Index block = quoka::detail::kernel_sizes().block_keys;
  const auto one_of = [&](std::initializer_list<Index> list) {
    return list.begin()[random.below(std::ssize(list))];
  };
  const Index batch = 1 + random.below(2), heads = 1 + random.below(2),
              dim = one_of({1, 3, 17, 20, 24, 40}),
              kv_len = std::max(least_keys,
                                one_of({32, 37, 127, block - 1, block, block + 1, 2 * block + 3}));
  q = random.tensor<T>(batch, heads * one_of({1, 2, 3}), one_of({1, 2, 7, 17, 37}), dim);
  k = random.tensor<T>(batch, heads, kv_len, dim);
  if (random.below(4) == 0)
    for (Index i = 0; i < q.size(); ++i) q.data()[i] = stored<T>(random.below(2) == 0 ? 0.5 : -0.5);
  if (random.below(4) == 0) q = with_row(std::move(q), random.below(q.dimension(2)), 0.0f);
  if (random.below(4) == 0) k = with_row(std::move(k), random.below(kv_len), 0.0f);
  if (random.below(3) != 0) return;
  const float values[] = {not_a_number, infinity, -infinity};
  odd = random.below(kv_len);
  k = with_row(std::move(k), odd, values[random.below(3)]);
}

template <class T>
std::string DrawnCall<T>::describe() const {
  std::string text = "q " + std::to_string(q.dimension(0));
  for (const Index size : {q.dimension(1), q.dimension(2), q.dimension(3)})
    text += " x " + std::to_string(size);
  return text + ", KV heads " + std::to_string(k.dimension(1)) + ", kv_len " +
         std::to_string(k.dimension(2)) +
         (odd < 0 ? "" : ", key " + std::to_string(odd) + " is not finite");
}

#define QUOKA_TEST_INSTANTIATE(T)                            \
  template Tensor4<T> without_row(const Tensor4<T>&, Index); \
  template Tensor4<T> with_row(Tensor4<T>, Index, float);    \
  template struct DrawnCall<T>;
QUOKA_TEST_INSTANTIATE(float)
QUOKA_TEST_INSTANTIATE(Eigen::half)
QUOKA_TEST_INSTANTIATE(Eigen::bfloat16)
#undef QUOKA_TEST_INSTANTIATE

}  // namespace quoka_test
