#include "support/selector_fixtures.hpp"

namespace quoka_test {

oracle::Aggregation to_oracle(Aggregation x) {
  return x == Aggregation::max ? oracle::Aggregation::max : oracle::Aggregation::mean;
}

MassOptions balanced_without_neighbours(const Budget& budget) {
  MassOptions options = MassOptions::balanced(budget);
  options.kernel_size = 1;
  return options;
}

std::string name_of(const QuokaOptions& x) {
  return "quoka, n_queries " + std::to_string(x.n_queries) + ", keep_first " +
         std::to_string(x.keep_first) + ", keep_last " + std::to_string(x.keep_last);
}
std::string name_of(const MassOptions& x) {
  return "mass, queries " + std::to_string(x.queries) + ", kernel_size " +
         std::to_string(x.kernel_size) + ", threshold " + std::to_string(x.threshold) + ", least " +
         std::to_string(x.least) + ", keep_first " + std::to_string(x.keep_first) + ", keep_last " +
         std::to_string(x.keep_last);
}

void expect_near_ties(const std::vector<Index>& keep, const std::vector<Index>& wanted,
                      const std::function<double(Index key)>& score,
                      const std::function<double(double threshold)>& tolerance,
                      const std::function<bool(Index key)>& free) {
  ASSERT_EQ(keep.size(), wanted.size());
  std::vector<Index> swapped;
  std::set_symmetric_difference(keep.begin(), keep.end(), wanted.begin(), wanted.end(),
                                std::back_inserter(swapped));
  double threshold = oracle::infinity;
  for (const Index t : wanted)
    if (free(t)) threshold = std::min(threshold, score(t));
  for (const Index t : swapped) {
    EXPECT_TRUE(free(t)) << "key " << t << " is kept in any case";
    EXPECT_LE(std::abs(score(t) - threshold), tolerance(threshold)) << "key " << t;  // no NaN is
  }
}

void expect_same_keys(const oracle::Positions& keep, const oracle::Scores& scores,
                      const oracle::QuokaOptions& options) {
  const oracle::Positions expected =
      oracle::top_k(scores, options.budget, options.keep_first, options.keep_last);
  ASSERT_EQ(keep.size(), expected.size());
  for (std::size_t b = 0; b < keep.size(); ++b) {
    ASSERT_EQ(keep[b].size(), expected[b].size());
    for (std::size_t head = 0; head < keep[b].size(); ++head) {
      SCOPED_TRACE("batch " + std::to_string(b) + ", head " + std::to_string(head));
      const auto& score = scores[b][head];
      double least = oracle::infinity, largest = -oracle::infinity;
      for (double x : score)
        if (std::isfinite(x)) least = std::min(least, x), largest = std::max(largest, x);
      const Index len = std::ssize(score), first = std::min(options.keep_first, options.budget),
                  last = std::min(options.keep_last, options.budget - first);
      // The second part is for scores that are all alike, as with one channel.
      const double tolerance =
          1e-5 * (largest - least) + 1e-6 * std::max(std::abs(largest), std::abs(least));
      expect_near_ties(
          keep[b][head], expected[b][head], [&](Index t) { return score[uz(t)]; },
          [&](double) { return tolerance; }, [&](Index t) { return t >= first && t < len - last; });
    }
  }
}

}  // namespace quoka_test
