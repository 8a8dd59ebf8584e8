// Selection by query head against one threshold, in double, from the rule alone:
//
//   share[h][t] = mean over the voters m of head h of softmax over past and own chunk, causal, of
//   scale * q[m] . k[t]
//   value[h][t] = the largest share of the neighbours (kernel_size - 1) / 2 before t ...
//   kernel_size / 2 behind it
//   keep        = the pairs of the largest values, or those of at least a threshold
//
// Voters of head h, number r of its group of g: n = min(max(4, queries / g), len) queries of the
// chunk; the last ceil(n / 8), and of the `rest` before them those at floor((m g + r) rest / (c
// g)), m < c = n - ceil(n / 8). Where the group has up to 32 query rows, there is one list for all
// of it, whose share is the mean over its heads. A query with a NaN or an infinity does not vote; a
// key with one has no weight and ranks last.
#pragma once

#include "support/baseline_oracle.hpp"

#include <functional>
#include <vector>

namespace oracle {

struct MassRule {
  Index queries = 256, kernel_size = 3;
  double scale = 1.0, softcap = 0.0;
};

// The shares of each list's voters: [batch][list][key], -infinity for a key that is not finite.
// chunk_share [batch][list].
struct MassShares {
  Scores shares, values;
  std::vector<std::vector<double>> chunk_share;
};
MassShares mass_shares(const Tensor& q, const Tensor& past_k, const Tensor& chunk_k,
                       const MassRule& rule);

// The k-th largest of all lists' values of sequence b.
double kth_value(const MassShares& of, Index b, Index k);

}  // namespace oracle
