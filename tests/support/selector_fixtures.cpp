#include "support/selector_fixtures.hpp"

namespace quoka_test {

oracle::Aggregation to_oracle(Aggregation x) {
  return x == Aggregation::max ? oracle::Aggregation::max : oracle::Aggregation::mean;
}

oracle::QuokaOptions to_oracle(const QuokaOptions& x, Index kv_len) {
  return {x.budget.count(kv_len), x.n_queries, x.keep_first, x.keep_last};
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

void expect_same_keys(const oracle::Positions& keep, const oracle::Scores& scores,
                      const oracle::QuokaOptions& options) {
  const oracle::Positions expected =
      oracle::top_k(scores, options.budget, options.keep_first, options.keep_last);
  ASSERT_EQ(keep.size(), expected.size());
  for (std::size_t b = 0; b < keep.size(); ++b) {
    ASSERT_EQ(keep[b].size(), expected[b].size());
    for (std::size_t head = 0; head < keep[b].size(); ++head) {
      const auto &list = keep[b][head], &wanted = expected[b][head];
      ASSERT_EQ(list.size(), wanted.size());
      std::vector<Index> swapped;
      std::set_symmetric_difference(list.begin(), list.end(), wanted.begin(), wanted.end(),
                                    std::back_inserter(swapped));
      if (swapped.empty()) continue;

      const auto& score = scores[b][head];
      double least = oracle::infinity, largest = -oracle::infinity, threshold = oracle::infinity;
      for (double x : score)
        if (std::isfinite(x)) least = std::min(least, x), largest = std::max(largest, x);
      const Index len = std::ssize(score), first = std::min(options.keep_first, options.budget);
      const Index last = std::min(options.keep_last, options.budget - first);
      for (Index t : wanted)
        if (t >= first && t < len - last) threshold = std::min(threshold, score[uz(t)]);
      // The second part is for scores that are all alike, as with one channel.
      const double tolerance =
          1e-5 * (largest - least) + 1e-6 * std::max(std::abs(largest), std::abs(least));
      for (Index t : swapped) {
        EXPECT_TRUE(t >= first && t < len - last)
            << "forced key " << t << " of batch " << b << ", head " << head;
        EXPECT_LE(std::abs(score[uz(t)] - threshold), tolerance)  // false for NaN
            << "key " << t << " of batch " << b << ", head " << head;
      }
    }
  }
}

}  // namespace quoka_test
