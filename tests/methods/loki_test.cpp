// Loki against the oracle; principal directions against the oracle's, saved and loaded; and the
// life of a basis that is fitted to the cached keys themselves.

#include <quoka/methods/loki.hpp>
#include <quoka/methods/oracle.hpp>

#include "support/baseline_fixtures.hpp"

#include <sstream>

namespace {

using namespace quoka_test;
using quoka::LokiCalibration;
using quoka::LokiFit;
using quoka::LokiOptions;
using quoka::LokiScorer;
using quoka::LokiSelector;

constexpr double tolerance = 3e-5;  // a float rotation before the float logits

// Keys whose covariance has eigenvalues well apart, each 0.7 of the one before, around a mean; in
// each head other directions. Of tensors made by one Spectrum they are the same.
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

template <class T>
LokiCalibration fitted_to(const Tensor4<T>& keys) {
  LokiFit fit(keys.dimension(1), keys.dimension(3));
  fit.add(quoka::view_of(keys));
  return fit.finish();
}
template <class T>
std::shared_ptr<const LokiCalibration> calibrated_by(const Tensor4<T>& keys) {
  return std::make_shared<const LokiCalibration>(fitted_to(keys));
}

void expect_directions(const LokiCalibration& calibration,
                       const std::vector<oracle::Basis>& expected, double error = 1e-6) {
  ASSERT_EQ(calibration.kv_heads(), std::ssize(expected));
  for (Index head = 0; head < calibration.kv_heads(); ++head) {
    const oracle::Basis& basis = expected[uz(head)];
    ASSERT_EQ(calibration.head_dim(), basis.d);
    for (Index i = 0; i < basis.r; ++i)
      for (Index c = 0; c < basis.d; ++c)
        ASSERT_NEAR(static_cast<double>(calibration.directions(head)(c, i)),
                    basis.component(i)[uz(c)], error)
            << "direction " << i << " of head " << head;
  }
}

void expect_same(const LokiCalibration& a, const LokiCalibration& b) {
  ASSERT_EQ(a.kv_heads(), b.kv_heads());
  ASSERT_EQ(a.head_dim(), b.head_dim());
  for (Index head = 0; head < a.kv_heads(); ++head)
    EXPECT_TRUE(std::equal(a.directions(head).data(),
                           a.directions(head).data() + a.directions(head).size(),
                           b.directions(head).data()))
        << "head " << head;
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
  const auto calibration = fitted_to(Spectrum(random, 2, 20).keys<float>(random, 1, 501));
  for (Index head = 0; head < 2; ++head) {
    const Eigen::MatrixXf& p = calibration.directions(head);
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

TEST(LokisDirections, AreOfTheKeysHoweverTheyCome) {  // in parts, of any size, of any storage order
  Random random(463);
  const Spectrum spectrum(random, 2, 17);
  const auto keys = spectrum.keys<float>(random, 2, 601);
  const auto bases = bases_of(to_oracle(keys), 17);
  for (Index part : {1, 37, 256, 257, 601}) {
    LokiFit fit(2, 17);
    for (Index t = 0; t < 601; t += part)
      fit.add(quoka::view_of(keys).slice(t, std::min<Index>(part, 601 - t)));
    expect_directions(fit.finish(), bases);
  }
  const Strided<float> strided(keys);
  LokiFit fit(2, 17);
  fit.add(strided.view());
  expect_same(fit.finish(), fitted_to(keys));
}

TEST(Loki, LeavesKeysThatAreNotFiniteOutOfTheFit) {
  Random random(465);
  const auto keys = Spectrum(random, 2, 17).keys<Element>(random, 1, 37);
  for (float odd : {not_a_number, infinity, -infinity}) {
    auto spoilt = keys;
    for (Index head = 0; head < 2; ++head) spoilt(0, head, 20, 16) = stored<Element>(odd);
    expect_same(fitted_to(spoilt), fitted_to(without_row(keys, 20)));
  }
}

TEST(LokisDirections, ProjectOnTheFirstOnes) {
  Random random(466);
  const auto keys = Spectrum(random, 1, 17).keys<float>(random, 1, 137);
  const LokiCalibration calibration = fitted_to(keys);
  for (Index rank : {1, 7, 17}) {
    const auto basis = bases_of(to_oracle(keys), rank)[0];
    std::vector<float> y(uz(rank) + 1, -12345.0f);
    calibration.project(0, &keys(0, 0, 20, 0), 3.0f, rank, y.data());
    const auto exact = oracle::project(basis, to_oracle(keys).row(0, 0, 20));
    for (Index i = 0; i < rank; ++i)
      EXPECT_NEAR(static_cast<double>(y[uz(i)]), 3.0 * exact[uz(i)], 1e-5);
    EXPECT_EQ(y.back(), -12345.0f);
  }
}

// ---- saved and loaded ---------------------------------------------------------------------------

TEST(LokisFile, HoldsTheSameDirections) {  // one after another, as the layers of a model
  Random random(467);
  const LokiCalibration first = fitted_to(Spectrum(random, 2, 17).keys<float>(random, 1, 37)),
                        second = fitted_to(Spectrum(random, 3, 20).keys<float>(random, 1, 37));
  std::stringstream file;
  first.save(file);
  second.save(file);
  expect_same(LokiCalibration::load(file), first);
  expect_same(LokiCalibration::load(file), second);
  EXPECT_THROW((void)LokiCalibration::load(file), std::runtime_error);
}

// Throws std::runtime_error, and its message contains this.
void expect_no_calibration(const std::string& bytes, const std::string& message) {
  std::istringstream file(bytes);
  try {
    (void)LokiCalibration::load(file);
    ADD_FAILURE() << "loaded: " << bytes.substr(0, 40);
  } catch (const std::runtime_error& error) {
    EXPECT_NE(std::string(error.what()).find(message), std::string::npos)
        << error.what() << " for " << bytes.substr(0, 40);
  }
}

TEST(LokisFile, CutShortIsRefused) {
  Random random(468);
  std::ostringstream file;
  fitted_to(Spectrum(random, 2, 5).keys<float>(random, 1, 37)).save(file);
  const std::string bytes = file.str();
  const std::size_t header = bytes.find('\n') + 1, of_head = 5 * 5 * sizeof(float);
  ASSERT_EQ(bytes.size(), header + 2 * of_head);
  for (std::size_t size = 0; size < header; ++size)
    expect_no_calibration(bytes.substr(0, size), "not a Loki calibration");
  for (std::size_t size : {header, header + 1, header + of_head - 1})
    expect_no_calibration(bytes.substr(0, size), "ends in KV head 0 of 2");
  for (std::size_t size : {header + of_head, bytes.size() - 1})
    expect_no_calibration(bytes.substr(0, size), "ends in KV head 1 of 2");
}

TEST(LokisFile, OfAnotherKindIsRefused) {
  const std::string data(3 * 3 * sizeof(float), '\0');
  for (const char* header :
       {"hello", "PK\x03\x04", "quoka-loki-2 1 3\n", "quoka-loki 1 3\n", "quoka-loki-1 1 three\n",
        "quoka-loki-1 one 3\n", "quoka-loki-1 1 3 ", "quoka-loki-1 99999999999999999999 3\n"})
    expect_no_calibration(header + data, "not a Loki calibration");
}

TEST(LokisFile, OfImpossibleSizesIsRefusedWithThem) {
  const std::string data(3 * 3 * sizeof(float), '\0');
  expect_no_calibration("quoka-loki-1 0 3\n" + data, "0 KV heads of 3 channels");
  expect_no_calibration("quoka-loki-1 -1 3\n" + data, "-1 KV heads of 3 channels");
  expect_no_calibration("quoka-loki-1 1 0\n" + data, "1 KV heads of 0 channels");
  expect_no_calibration("quoka-loki-1 70000 3\n" + data, "70000 KV heads of 3 channels");
  // Before there is memory for them: a header is soon forged.
  expect_no_calibration("quoka-loki-1 1 65536\n", "1 KV heads of 65536 channels");
  expect_no_calibration("quoka-loki-1 65536 4096\n", "ends in KV head 0 of 65536");
}

TEST(LokisFile, ThatCannotBeWrittenIsAnError) {
  Random random(469);
  const LokiCalibration calibration = fitted_to(random.tensor<float>(1, 1, 37, 5));
  std::ostringstream file;
  file.setstate(std::ios::badbit);
  EXPECT_THROW(calibration.save(file), std::runtime_error);
}

// ---- scores -------------------------------------------------------------------------------------

TEST(Loki, AgreesWithTheOracle) {
  for_each_storage([]<class T>() {
    Random random(470);
    for (Index group : {1, 3}) {
      const Spectrum spectrum(random, 2, 20);
      const auto text = spectrum.keys<float>(random, 1, 137);  // of which the basis is
      const auto q = random.tensor<T>(2, 2 * group, 17, 20);
      const auto k = spectrum.keys<T>(random, 2, 127);
      const auto calibration = calibrated_by(text);
      for (Domain domain : domains)
        for (Index rank : {1, 3, 16, 19, 20, 1000}) {
          SCOPED_TRACE(name_of(domain) + ", rank " + std::to_string(rank));
          const auto expected = oracle::loki_scores(
              to_oracle(q), to_oracle(k), bases_of(to_oracle(text), rank), to_oracle(domain), 0);
          expect_scores_and_keys<LokiScorer>({.budget = Budget::keys(31),
                                              .rank = rank,
                                              .domain = domain,
                                              .calibration = calibration},
                                             q, k, expected, domain, tolerance);
        }
    }
  });
}

TEST(Loki, AKeyThatIsNotFiniteSpoilsItsOwnScoreOnly) {
  Random random(475);
  const Spectrum spectrum(random, 1, 20);
  const auto q = random.tensor<Element>(1, 2, 17, 20);
  const auto finite = spectrum.keys<Element>(random, 1, 127);
  const auto text = spectrum.keys<float>(random, 1, 137);
  for (float odd : {not_a_number, infinity, -infinity})
    for (Domain domain : domains) {
      auto k = finite;
      k(0, 0, 20, 3) = stored<Element>(odd);
      auto expected = oracle::loki_scores(to_oracle(q), to_oracle(without_row(finite, 20)),
                                          bases_of(to_oracle(text), 7), to_oracle(domain), 0);
      expected[0][0].insert(expected[0][0].begin() + 20, oracle::not_a_number);
      expect_scores_and_keys<LokiScorer>({.budget = Budget::keys(31),
                                          .rank = 7,
                                          .domain = domain,
                                          .calibration = calibrated_by(text)},
                                         q, k, expected, domain, tolerance);
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

// ---- a basis of its own -------------------------------------------------------------------------

TEST(Loki, WithoutACalibrationIsExactUntilThereAreKeysToFit) {
  Random random(478);
  const auto q = random.tensor<Element>(1, 4, 7, 20);
  const auto k = Spectrum(random, 2, 20).keys<Element>(random, 1, 512);
  for (Domain domain : domains) {
    const LokiOptions options{.rank = 7, .domain = domain};
    LokiScorer::State state;
    for (Index kv_len : {1, 37, 511}) {
      const SelectorInput input{q, quoka::view_of(k).slice(0, kv_len), LogitOptions{}};
      const auto scores = scores_by<LokiScorer>(options, input, state);
      expect_scores(scores,
                    oracle::exact_scores(to_oracle(q), to_oracle(input.k), to_oracle(domain), 0),
                    domain);
      EXPECT_EQ(state.own, nullptr);
    }
    const auto scores = scores_by<LokiScorer>(options, SelectorInput{q, k, LogitOptions{}}, state);
    ASSERT_NE(state.own, nullptr);
    EXPECT_EQ(LokiScorer::fitted(20), 512);
    expect_directions(*state.own, bases_of(to_oracle(k), 20));
    expect_scores(scores,
                  oracle::loki_scores(to_oracle(q), to_oracle(k), bases_of(to_oracle(k), 7),
                                      to_oracle(domain), 0),
                  domain, tolerance);
  }
}

TEST(LokisOwnBasis, WaitsForTwiceAsManyKeysAsChannels) {  // exact before, to the bit
  Random random(479);
  const auto q = random.tensor<float>(1, 1, 1, 260), k = random.tensor<float>(1, 1, 520, 260);
  LokiScorer::State state;
  EXPECT_TRUE(
      same_bits(scores_of_prefix({}, q, k, 519, state),
                scores_by<quoka::OracleScorer>(
                    {}, SelectorInput{q, quoka::view_of(k).slice(0, 519), LogitOptions{}})));
  EXPECT_EQ(state.own, nullptr);
  (void)scores_of_prefix({}, q, k, 520, state);
  EXPECT_NE(state.own, nullptr);
  EXPECT_EQ(LokiScorer::fitted(260), 520);
}

TEST(LokisOwnBasis, IsForgottenWithAnyKeyItIsOfAndFittedAnew) {
  Random random(482);
  const auto q = random.tensor<float>(1, 2, 7, 20);
  const auto k = Spectrum(random, 1, 20).keys<float>(random, 1, 701),
             other = Spectrum(random, 1, 20).keys<float>(random, 1, 701);
  for (Index cut : {0, 511, 512, 599}) {
    LokiScorer::State state, fresh;
    (void)scores_of_prefix({.rank = 7}, q, other, 600, state);
    state.truncate(cut);
    EXPECT_EQ(state.own == nullptr, cut < 512);
    const auto mixed = joined(other, cut, k);
    for (Index kv_len : {511, 513, 701}) {  // exact, fitted, kept
      if (kv_len <= cut) continue;
      EXPECT_TRUE(same_bits(scores_of_prefix({.rank = 7}, q, mixed, kv_len, state),
                            scores_of_prefix({.rank = 7}, q, mixed, kv_len, fresh)))
          << "cut at " << cut << ", grown to " << kv_len;
    }
  }
}

// Whatever calls saw the keys: the basis is that of the first ones, from when they are there.
TEST(LokisOwnBasis, IsOfTheKeysAndNotOfTheCalls) {
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

TEST(LokisOwnBasis, IsNotThatOfKeysThatAreNotFinite) {
  Random random(483);
  const auto q = random.tensor<float>(1, 2, 7, 20);
  auto k = Spectrum(random, 1, 20).keys<float>(random, 1, 512);
  k(0, 0, 20, 3) = infinity;
  LokiScorer::State state;
  const auto scores = scores_of_prefix({.rank = 7}, q, k, 512, state);
  expect_directions(*state.own, bases_of(to_oracle(k), 20));
  auto expected = oracle::loki_scores(to_oracle(q), to_oracle(without_row(k, 20)),
                                      bases_of(to_oracle(k), 7), oracle::Domain::softmax, 0);
  expected[0][0].insert(expected[0][0].begin() + 20, oracle::not_a_number);
  expect_scores(scores, expected, Domain::softmax, tolerance);
}

TEST(LokisOwnBasis, IsNotMadeWhereACalibrationIsGiven) {
  Random random(484);
  const auto q = random.tensor<float>(1, 2, 7, 20), k = random.tensor<float>(1, 1, 512, 20);
  LokiScorer::State state;
  (void)scores_of_prefix({.rank = 7, .calibration = calibrated_by(k)}, q, k, 512, state);
  EXPECT_EQ(state.own, nullptr);
}

}  // namespace
