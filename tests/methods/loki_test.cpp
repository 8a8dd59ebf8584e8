// Loki against the oracle; principal directions against the oracle's; and the life of a basis that is fitted to the
// first keys.

#include <quoka/methods/loki.hpp>
#include <quoka/methods/oracle.hpp>

#include "support/baseline_fixtures.hpp"

namespace {

using namespace quoka_test;
using quoka::LokiBasis;
using quoka::LokiOptions;
using quoka::LokiScorer;
using quoka::LokiSelector;

constexpr double tolerance = 3e-5;  // a float rotation before the float logits

// Keys whose covariance has eigenvalues well apart, each 0.7 of the one before, around a mean; in
// each head other directions. Tensors made by one Spectrum have the same ones.
struct Spectrum {
  Spectrum(Random& random, Index heads, Index dim_in) : dim(dim_in) {
    for (Index head = 0; head < heads; ++head) {
      std::vector<std::vector<double>> axes;
      for (Index i = 0; i < dim; ++i) {
        std::vector<double> axis(uz(dim));
        for (double& x : axis) x = random.normal();
        for (const auto& other : axes) {
          const double overlap = oracle::dot(axis, other);
          for (std::size_t c = 0; c < axis.size(); ++c) axis[c] -= overlap * other[c];
        }
        const double length = oracle::norm(axis);
        for (double& x : axis) x /= length;
        axes.push_back(axis);
      }
      directions.push_back(axes);
      means.push_back(random.normal());
    }
  }

  template <class T>
  Tensor4<T> keys(Random& random, Index batch, Index len) const {
    const Index heads = std::ssize(directions);
    Tensor4<T> k(batch, heads, len, dim);
    for (Index b = 0; b < batch; ++b)
      for (Index head = 0; head < heads; ++head)
        for (Index t = 0; t < len; ++t) {
          std::vector<double> key(uz(dim), means[uz(head)]);
          for (Index i = 0; i < dim; ++i) {
            const double size = 2.0 * std::pow(0.7, 0.5 * static_cast<double>(i)) * random.normal();
            for (std::size_t c = 0; c < key.size(); ++c)
              key[c] += size * directions[uz(head)][uz(i)][c];
          }
          for (Index c = 0; c < dim; ++c) k(b, head, t, c) = stored<T>(key[uz(c)]);
        }
    return k;
  }

  Index dim;
  std::vector<std::vector<std::vector<double>>> directions;  // [head][i][c]
  std::vector<double> means;                                 // [head], of every channel
};

// The r leading directions of each KV head's finite keys [t < kv_len], all sequences together.
std::vector<oracle::Basis> bases_of(const oracle::Tensor& k, Index r) {
  std::vector<oracle::Basis> bases;
  for (Index head = 0; head < k.heads; ++head) {
    std::vector<oracle::Row> rows;
    for (Index b = 0; b < k.batch; ++b)
      for (oracle::Row row : oracle::rows_of(k, b, head))
        if (oracle::is_finite(row)) rows.push_back(row);
    bases.push_back(oracle::pca(rows, r));
  }
  return bases;
}

// The same of the first n keys.
template <class T>
std::vector<oracle::Basis> bases_of_first(const Tensor4<T>& k, Index n, Index r) {
  return bases_of(to_oracle(quoka::view_of(k).slice(0, n)), r);
}

template <class T>
LokiBasis fitted_to(const Tensor4<T>& keys) {
  return LokiBasis(quoka::view_of(keys));
}

void expect_directions(const LokiBasis& basis, const std::vector<oracle::Basis>& expected,
                       double error = 1e-6) {
  for (Index head = 0; head < std::ssize(expected); ++head) {
    const oracle::Basis& exact = expected[uz(head)];
    ASSERT_EQ(basis.directions(head).rows(), exact.d);
    for (Index i = 0; i < exact.r; ++i)
      for (Index c = 0; c < exact.d; ++c)
        ASSERT_NEAR(static_cast<double>(basis.directions(head)(c, i)), exact.component(i)[uz(c)],
                    error)
            << "direction " << i << " of head " << head;
  }
}

void expect_same(const LokiBasis& a, const LokiBasis& b, Index heads) {
  for (Index head = 0; head < heads; ++head)
    EXPECT_EQ(a.directions(head), b.directions(head)) << "head " << head;
}

// ---- directions ---------------------------------------------------------------------------------

TEST(Loki, FitsTheOraclesDirections) {
  for_each_storage([]<class T>() {
    Random random(461);
    for (Index dim : {1, 3, 17, 20}) {
      const Spectrum spectrum(random, 2, dim);
      const auto keys = spectrum.keys<T>(random, 2, 137);
      expect_directions(fitted_to(keys), bases_of(to_oracle(keys), dim));
    }
  });
}

TEST(LokisDirections, AreOrthonormalAndPointAlongTheirLargestComponent) {
  Random random(462);
  const auto fitted = fitted_to(Spectrum(random, 2, 20).keys<float>(random, 1, 501));
  for (Index head = 0; head < 2; ++head) {
    const Eigen::MatrixXf& p = fitted.directions(head);
    for (Index i = 0; i < 20; ++i) {
      double largest = 0;
      for (Index j = 0; j <= i; ++j) {
        double product = 0;
        for (Index c = 0; c < 20; ++c) product += static_cast<double>(p(c, i) * p(c, j));
        EXPECT_NEAR(product, i == j ? 1.0 : 0.0, 1e-6);
      }
      for (Index c = 0; c < 20; ++c)
        if (std::abs(p(c, i)) > std::abs(largest)) largest = static_cast<double>(p(c, i));
      EXPECT_GT(largest, 0.0);
    }
  }
}

TEST(LokisDirections,
     AreOfTheKeysWhereverTheyLie) {  // over blocks of a fit, in any order of memory
  Random random(463);
  const Spectrum spectrum(random, 2, 17);
  const auto keys = spectrum.keys<float>(random, 2, 601);
  expect_directions(fitted_to(keys), bases_of(to_oracle(keys), 17));
  const Strided<float> strided(keys);
  expect_same(LokiBasis(strided.view()), fitted_to(keys), 2);
}

TEST(Loki, LeavesKeysThatAreNotFiniteOutOfTheFit) {
  Random random(465);
  const auto keys = Spectrum(random, 2, 17).keys<Element>(random, 1, 37);
  for (float odd : {not_a_number, infinity, -infinity}) {
    auto spoilt = keys;
    for (Index head = 0; head < 2; ++head) spoilt(0, head, 20, 16) = stored<Element>(odd);
    expect_same(fitted_to(spoilt), fitted_to(without_row(keys, 20)), 2);
  }
}

TEST(LokisDirections, ProjectOnTheFirstOnes) {
  Random random(466);
  const auto keys = Spectrum(random, 1, 17).keys<float>(random, 1, 137);
  const LokiBasis fitted = fitted_to(keys);
  for (Index rank : {1, 7, 17}) {
    const auto basis = bases_of(to_oracle(keys), rank)[0];
    std::vector<float> y(uz(rank) + 1, -12345.0f);
    fitted.project(0, &keys(0, 0, 20, 0), 3.0f, rank, y.data());
    const auto exact = oracle::project(basis, to_oracle(keys).row(0, 0, 20));
    for (Index i = 0; i < rank; ++i)
      EXPECT_NEAR(static_cast<double>(y[uz(i)]), 3.0 * exact[uz(i)], 1e-5);
    EXPECT_EQ(y.back(), -12345.0f);
  }
}

// ---- scores -------------------------------------------------------------------------------------

TEST(Loki, AgreesWithTheOracle) {
  for_each_storage([]<class T>() {
    Random random(470);
    for (Index group : {1, 3}) {
      const Spectrum spectrum(random, 2, 20);
      const auto q = random.tensor<T>(2, 2 * group, 17, 20);
      const auto k = spectrum.keys<T>(random, 2, 127);
      for (Index rank : {1, 3, 16, 19, 20, 1000}) {
        SCOPED_TRACE("rank " + std::to_string(rank));
        const auto expected = oracle::loki_scores(
            to_oracle(q), to_oracle(k), bases_of_first(k, 100, rank), oracle::Domain::softmax, 0);
        expect_scores_and_keys<LokiScorer>(
            {.budget = Budget::keys(31), .rank = rank, .fitted = 100}, q, k, expected,
            Domain::softmax, tolerance);
      }
    }
  });
}

TEST(Loki, AKeyThatIsNotFiniteSpoilsItsOwnScoreOnly) {
  Random random(475);
  const Spectrum spectrum(random, 1, 20);
  const auto q = random.tensor<Element>(1, 2, 17, 20);
  const auto finite = spectrum.keys<Element>(random, 1, 127);
  for (float odd : {not_a_number, infinity, -infinity}) {
    auto k = finite;
    k(0, 0, 120, 3) = stored<Element>(odd);
    auto expected = oracle::loki_scores(to_oracle(q), to_oracle(without_row(finite, 120)),
                                        bases_of_first(finite, 100, 7), oracle::Domain::softmax, 0);
    expected[0][0].insert(expected[0][0].begin() + 120, oracle::not_a_number);
    expect_scores_and_keys<LokiScorer>({.budget = Budget::keys(31), .rank = 7, .fitted = 100}, q, k,
                                       expected, Domain::softmax, tolerance);
  }
}

// ---- projected keys -----------------------------------------------------------------------------

template <class T>
Tensor3<float> scores_of_prefix(const LokiOptions& options, const Tensor4<T>& q,
                                const Tensor4<T>& k, Index kv_len, LokiScorer::State& state) {
  return scores_by<LokiScorer>(
      options, SelectorInput{q, TensorView<const T>(k).slice(0, kv_len), LogitOptions{}}, state);
}
template <class T>
Tensor3<float> scores_of_prefix(const LokiOptions& options, const Tensor4<T>& q,
                                const Tensor4<T>& k, Index kv_len) {
  LokiScorer::State fresh;
  return scores_of_prefix(options, q, k, kv_len, fresh);
}

// ---- the basis -------------------------------------------------------------------------

TEST(Loki, IsExactUntilThereAreKeysToFit) {
  Random random(478);
  const auto q = random.tensor<Element>(1, 4, 7, 20);
  const auto k = Spectrum(random, 2, 20).keys<Element>(random, 1, 512);
  const LokiOptions options{.rank = 7};
  LokiScorer::State state;
  for (Index kv_len : {1, 37, 511}) {
    const SelectorInput input{q, quoka::view_of(k).slice(0, kv_len), LogitOptions{}};
    const auto scores = scores_by<LokiScorer>(options, input, state);
    expect_scores(
        scores, oracle::exact_scores(to_oracle(q), to_oracle(input.k), oracle::Domain::softmax, 0),
        Domain::softmax);
    EXPECT_EQ(state.method.basis, nullptr);
  }
  const auto scores = scores_by<LokiScorer>(options, SelectorInput{q, k, LogitOptions{}}, state);
  ASSERT_NE(state.method.basis, nullptr);
  expect_directions(*state.method.basis, bases_of(to_oracle(k), 20));
  expect_scores(scores,
                oracle::loki_scores(to_oracle(q), to_oracle(k), bases_of(to_oracle(k), 7),
                                    oracle::Domain::softmax, 0),
                Domain::softmax, tolerance);
}

TEST(LokisBasis, WaitsForTwiceAsManyKeysAsChannels) {  // exact before, to the bit
  Random random(479);
  const auto q = random.tensor<float>(1, 1, 1, 260), k = random.tensor<float>(1, 1, 520, 260);
  LokiScorer::State state;
  EXPECT_TRUE(
      same_bits(scores_of_prefix({}, q, k, 519, state),
                scores_by<quoka::OracleScorer>(
                    {}, SelectorInput{q, quoka::view_of(k).slice(0, 519), LogitOptions{}})));
  EXPECT_EQ(state.method.basis, nullptr);
  (void)scores_of_prefix({}, q, k, 520, state);
  EXPECT_NE(state.method.basis, nullptr);
}

TEST(LokisBasis, IsForgottenWithAnyKeyItIsOfAndFittedAnew) {
  Random random(482);
  const auto q = random.tensor<float>(1, 2, 7, 20);
  const auto k = Spectrum(random, 1, 20).keys<float>(random, 1, 701),
             other = Spectrum(random, 1, 20).keys<float>(random, 1, 701);
  for (Index cut : {0, 511, 512, 599}) {
    LokiScorer::State state, fresh;
    (void)scores_of_prefix({.rank = 7}, q, other, 600, state);
    state.truncate(cut);
    EXPECT_EQ(state.method.basis == nullptr, cut < 512);
    const auto mixed = joined(other, cut, k);
    for (Index kv_len : {511, 513, 701}) {  // exact, fitted, kept
      if (kv_len <= cut) continue;
      EXPECT_TRUE(same_bits(scores_of_prefix({.rank = 7}, q, mixed, kv_len, state),
                            scores_of_prefix({.rank = 7}, q, mixed, kv_len, fresh)))
          << "cut at " << cut << ", grown to " << kv_len;
    }
  }
}

// Whichever calls saw the keys, the basis is that of the first ones, once they are there.
TEST(LokisBasis, IsOfTheKeysAndNotOfTheCalls) {
  Random random(484);
  const auto q = random.tensor<float>(1, 2, 7, 20);
  const auto k = Spectrum(random, 1, 20).keys<float>(random, 1, 701);
  const LokiOptions options{.rank = 7, .sketch = quoka::Sketch::off};
  const auto expected = scores_of_prefix(options, q, k, 701);
  LokiScorer::State looked, told;
  for (const Index kv_len : {100, 600, 650}) (void)scores_of_prefix(options, q, k, kv_len, looked);
  for (const Index kv_len : {500, 530, 701})
    LokiScorer(options).appended({{}, quoka::view_of(k).slice(0, kv_len)}, told,
                                 quoka::SerialExecutor{});
  for (LokiScorer::State* const state : {&looked, &told})
    for (const Index cut : {701, 600, 512, 511, 700}) {
      state->truncate(cut);
      EXPECT_TRUE(same_bits(scores_of_prefix(options, q, k, 701, *state), expected)) << cut;
    }
}

TEST(LokisBasis, IsNotThatOfKeysThatAreNotFinite) {
  Random random(483);
  const auto q = random.tensor<float>(1, 2, 7, 20);
  auto k = Spectrum(random, 1, 20).keys<float>(random, 1, 512);
  k(0, 0, 20, 3) = infinity;
  LokiScorer::State state;
  const auto scores = scores_of_prefix({.rank = 7}, q, k, 512, state);
  expect_directions(*state.method.basis, bases_of(to_oracle(k), 20));
  auto expected = oracle::loki_scores(to_oracle(q), to_oracle(without_row(k, 20)),
                                      bases_of(to_oracle(k), 7), oracle::Domain::softmax, 0);
  expected[0][0].insert(expected[0][0].begin() + 20, oracle::not_a_number);
  expect_scores(scores, expected, Domain::softmax, tolerance);
}

}  // namespace
