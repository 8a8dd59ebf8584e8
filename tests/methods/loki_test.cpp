// Loki against the oracle; principal directions against the oracle's; and when a basis is fitted to the first keys. That
// it is of the keys, whichever calls saw them, is in selection_fuzz_test.cpp.

#include <quoka/methods/loki.hpp>

#include "support/baseline_fixtures.hpp"
#include "support/world.hpp"

namespace {

using namespace quoka_test;
using quoka::LokiBasis;
using quoka::LokiOptions;
using quoka::LokiScorer;

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

  Tensor4<float> keys(Random& random, Index batch, Index len) const {
    const Index heads = std::ssize(directions);
    Tensor4<float> k(batch, heads, len, dim);
    for (Index b = 0; b < batch; ++b)
      for (Index head = 0; head < heads; ++head)
        for (Index t = 0; t < len; ++t) {
          std::vector<double> key(uz(dim), means[uz(head)]);
          for (Index i = 0; i < dim; ++i) {
            const double size = 2.0 * std::pow(0.7, 0.5 * static_cast<double>(i)) * random.normal();
            for (std::size_t c = 0; c < key.size(); ++c)
              key[c] += size * directions[uz(head)][uz(i)][c];
          }
          for (Index c = 0; c < dim; ++c) k(b, head, t, c) = static_cast<float>(key[uz(c)]);
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

// Of the finite keys, over several blocks of a fit, wherever they lie; and a key on the first of them.
TEST(Loki, FitsTheOraclesDirections) {
  for_each_draw("METHODS", 24, [](Random& random, std::uint64_t) {
    const Index dim = random.one_of(1, 3, 17, 20), len = random.one_of(137, 601);
    auto floats = Spectrum(random, 2, dim).keys(random, 2, len);
    if (random.chance(0.75))
      for (Index head = 0; head < 2; ++head) {
        const float odd = random.one_of(not_a_number, infinity, -infinity);
        const Index channel = random.below(dim), t = random.below(len);
        floats(0, head, t, channel) = odd;
      }
    const StoredRows keys(floats, *every_format()[uz(random.below(3))]);
    const LokiBasis fitted(keys.rows());
    const auto exact = bases_of(to_oracle(keys.rows()), dim);
    expect_directions(fitted, exact);
    const Index head = random.below(2), t = random.below(len), rank = 1 + random.below(dim);
    std::vector<float> y(uz(rank) + 1, -12345.0f);
    fitted.project(head, &keys.floats()(1, head, t, 0), 3.0f, rank, y.data());
    const auto all = oracle::project(exact[uz(head)], to_oracle(keys.floats()).row(1, head, t));
    for (Index i = 0; i < rank; ++i)
      EXPECT_NEAR(static_cast<double>(y[uz(i)]), 3.0 * all[uz(i)], 1e-5);
    EXPECT_EQ(y.back(), -12345.0f);
    expect_same(LokiBasis(StoredRows(keys, StoredRows::Layout::tokens, random).rows()), fitted, 2);
  });
}

// ---- scores -------------------------------------------------------------------------------------

// A key that is not finite spoils its own score only, whether it is of those that were fitted or not.
TEST(Loki, AgreesWithTheOracle) {
  for_each_draw("METHODS", 48, [](Random& random, std::uint64_t) {
    const Index rank = random.one_of(1, 3, 16, 19, 20, 1000), odd = random.one_of(-1, 20, 120);
    SCOPED_TRACE("rank " + std::to_string(rank) + ", odd key " + std::to_string(odd));
    const Format& format = *every_format()[uz(random.below(3))];
    const StoredRows q(random.tensor<float>(2, 2 + 4 * random.below(2), 17, 20), format);
    auto floats = Spectrum(random, 2, 20).keys(random, 2, 127);
    if (odd >= 0) floats = with_row(std::move(floats), odd, infinity);
    const StoredRows k(floats, format);
    const auto bases = bases_of(to_oracle(k.rows(100)), rank);
    auto expected = oracle::loki_scores(
        to_oracle(q.rows()), to_oracle(odd < 0 ? k.floats() : without_row(k.floats(), odd)), bases,
        Domain::softmax, 0);
    for (auto& heads : expected)
      for (auto& head : heads)
        if (odd >= 0) head.insert(head.begin() + odd, oracle::not_a_number);
    expect_scores_and_keys<LokiScorer>({.budget = Budget::keys(31), .rank = rank, .fitted = 100},
                                       q.rows(), k.rows(), expected, Domain::softmax, tolerance);
  });
}

TEST(Loki, IsExactUntilThereAreKeysToFit) {  // those of `fitted`, and twice as many as channels
  Random random(478);
  for (const auto& [dim, fits] : {std::pair<Index, Index>{20, 512}, {260, 520}}) {
    const auto q = random.tensor<Element>(1, 2, 3, dim),
               k = random.tensor<Element>(1, 1, fits, dim);
    LokiScorer::State state;
    for (const Index kv_len : {Index{1}, Index{37}, fits - 1}) {
      const SelectorInput input{q, quoka::view_of(k).slice(0, kv_len), LogitOptions{}};
      expect_scores(scores_by<LokiScorer>({.rank = 7}, input, state),
                    oracle::exact_scores(to_oracle(q), to_oracle(input.k), Domain::softmax, 0),
                    Domain::softmax);
      EXPECT_EQ(state.method.basis, nullptr);
    }
    (void)scores_by<LokiScorer>({.rank = 7}, SelectorInput{q, k, LogitOptions{}}, state);
    EXPECT_NE(state.method.basis, nullptr);
    state.truncate(fits - 1);
    EXPECT_EQ(state.method.basis, nullptr);
  }
}

}  // namespace
