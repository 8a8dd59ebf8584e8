// The generated geometries are as their names say: which queries retrieve, whether they are like
// the mean, whether the heads of a group agree, how long the keys are.

#include "support/fixtures.hpp"
#include "support/generators.hpp"

namespace {

using namespace quoka_test;
using quoka_examples::LayerCapture;

constexpr Index kv_heads = 2, group = 3, len = 600, dim = 64;

LayerCapture layer_of(const std::string& name, unsigned seed = 7) {
  return quoka_examples::Generator(quoka_examples::geometry_named(name), dim, seed)
      .layer(kv_heads, group, len);
}

// Mean cosine with the head's mean query, of the queries that retrieve and of the others.
struct LikeTheMean {
  double retrieving = 0.0, others = 0.0;
};
LikeTheMean like_the_mean(const LayerCapture& layer) {
  const oracle::Scores cosines = oracle::query_cosines(to_oracle(layer.q));
  LikeTheMean sums;
  double retrieving = 0.0, others = 0.0;
  for (Index head = 0; head < kv_heads * group; ++head)
    for (Index i = 0; i < len; ++i) {
      const bool retrieves = layer.targets(0, head, i) >= 0;
      (retrieves ? sums.retrieving : sums.others) += cosines[0][uz(head)][uz(i)];
      (retrieves ? retrieving : others) += 1.0;
    }
  return {sums.retrieving / retrieving, sums.others / others};
}

double share_that_retrieves(const LayerCapture& layer) {
  double count = 0.0;
  for (Index i = 0; i < layer.targets.size(); ++i)
    count += layer.targets.data()[i] >= 0 ? 1.0 : 0.0;
  return count / static_cast<double>(layer.targets.size());
}

// The share of queries that retrieve beyond the first keys and have fewer than `rank` better keys in their past.
double share_that_finds(const LayerCapture& layer, Index rank) {
  const oracle::Tensor q = to_oracle(layer.q), k = to_oracle(layer.k);
  double found = 0.0, all = 0.0;
  for (Index head = 0; head < kv_heads * group; ++head)
    for (Index i = 10; i < len; ++i) {
      const Index target = layer.targets(0, head, i);
      if (target < 1) continue;
      const auto logit = [&](Index t) {
        return oracle::dot(q.row(0, head, i), k.row(0, head / group, t));
      };
      Index better = 0;
      for (Index t = 0; t < i; ++t) better += logit(t) > logit(target) ? 1 : 0;
      found += better < rank ? 1.0 : 0.0;
      all += 1.0;
    }
  return found / all;
}

// Standard deviation of the logarithm of the keys' norms, the sink aside.
double spread_of_norms(const LayerCapture& layer) {
  const oracle::Tensor k = to_oracle(layer.k);
  double sum = 0.0, squares = 0.0;
  for (Index head = 0; head < kv_heads; ++head)
    for (Index t = 1; t < len; ++t) {
      const double x = std::log(oracle::norm(k.row(0, head, t)));
      sum += x, squares += x * x;
    }
  const double n = kv_heads * (len - 1), mean = sum / n;
  return std::sqrt(squares / n - mean * mean);
}

TEST(Generators, QueriesRetrieveTheirTargets) {
  for (const char* name : {"paper", "heads", "outliers"})
    EXPECT_GT(share_that_finds(layer_of(name), 1), 0.95) << name;
  EXPECT_GT(share_that_finds(layer_of("adverse"), 10), 0.8);  // 63 % are the best
}

TEST(Generators, QueriesThatRetrieveAreUnlikeTheMeanUnlessAdverse) {
  for (const char* name : {"paper", "heads", "norms"}) {
    const LikeTheMean cosines = like_the_mean(layer_of(name));
    EXPECT_LT(cosines.retrieving, 0.4) << name;
    EXPECT_GT(cosines.others, 0.7) << name;
  }
  const LikeTheMean adverse = like_the_mean(layer_of("adverse"));
  EXPECT_NEAR(adverse.retrieving, adverse.others, 0.05);
}

TEST(Generators, HeadsOfAGroupAgreeUnlessTheyAreMadeToDisagree) {
  const auto agreeing = [](const LayerCapture& layer) {
    double same = 0.0, all = 0.0;
    for (Index g = 0; g < kv_heads; ++g)
      for (Index i = 0; i < len; ++i) {
        if (layer.targets(0, g * group, i) < 0) continue;
        all += 1.0;
        same += layer.targets(0, g * group, i) == layer.targets(0, g * group + 2, i) ? 1.0 : 0.0;
      }
    return same / all;
  };
  EXPECT_EQ(agreeing(layer_of("paper")), 1.0);
  EXPECT_LT(agreeing(layer_of("heads")), 0.1);
}

TEST(Generators, SomeQueriesRetrieveManyOrNone) {
  EXPECT_NEAR(share_that_retrieves(layer_of("paper")), 8.0 / 128, 0.03);
  EXPECT_NEAR(share_that_retrieves(layer_of("outliers")), 32.0 / 128, 0.05);
  EXPECT_EQ(share_that_retrieves(layer_of("isotropic")), 0.0);
}

TEST(Generators, KeysAreAboutEquallyLongUnlessNormsAreWide) {
  EXPECT_LT(spread_of_norms(layer_of("paper")), 0.25);
  EXPECT_NEAR(spread_of_norms(layer_of("isotropic")), 0.25, 0.03);
  EXPECT_GT(spread_of_norms(layer_of("norms")), 0.05 + spread_of_norms(layer_of("paper")));
}

TEST(Generators, TheSameSeedIsTheSameLayerAndAnotherIsNot) {
  EXPECT_TRUE(same_bits(layer_of("paper").q, layer_of("paper").q));
  EXPECT_FALSE(same_bits(layer_of("paper").q, layer_of("paper", 8).q));
}

TEST(Generators, AnUnknownGeometryIsRefusedWithThoseThatAreKnown) {
  expect_refused([] { quoka_examples::geometry_named("papper"); },
                 {"papper", "paper heads isotropic adverse norms outliers"});
}

}  // namespace
