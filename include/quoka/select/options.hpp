// The choices QuoKA leaves open, by name; budget.hpp has the budget. Defaults everywhere are the paper's.
#pragma once

#include <quoka/base/index.hpp>
#include <quoka/select/budget.hpp>

namespace quoka {
inline namespace QUOKA_ABI {

// How one key's scores over the kept queries become one.
enum class Aggregation {
  max,   // paper
  mean,  // ablation
};

// How the queries of one group, the query heads that share a KV head, are combined.
enum class GroupMode {
  mean,      // paper: slot m of every head is averaged
  per_head,  // no average: group * n_queries rows score, each for itself; group times the cost
};

// Which queries of the chunk score.
enum class QueryChoice {
  dissimilar,  // paper: the lowest cosines with the chunk's mean query
  mixed,  // a quarter is the chunk's end, a quarter the most dissimilar, the others evenly spaced,
          // each head of a group at positions of its own: steps/subselect.hpp
};

// In which domain several queries' logits become one score: by their mean, unless the selector has
// an Aggregation. Logits are linear in the query: their mean is the logit of the mean query,
// whatever the queries were.
enum class Domain {
  softmax,  // each query's softmax over the past: its share of attention
  logit,    // the logits themselves
};

// Whether keys are scored by their 8-bit sketch.
//
//   Domain::logit     first, and in float near the threshold: the Selection is the same, bit for bit
//   Domain::softmax   alone: another Selection. It keeps at least exp(-2a) of the scored mass that float's
//                     Selection keeps, a = 2 eps + 0.01, eps <= 4 nats the bound on the error of a head's
//                     logits; a head beyond that is scored in float. That is the worst case. Measured on
//                     recorded layers: 0.002 points lost on average, 0.03 by the worst head (sketch/sketched_mass.hpp)
enum class Sketch {
  automatic,  // where this ISA scores faster so
  on,         // even where float is faster
  off,        // scores in float alone
};

// From a score per key to the best keys: steps/top_k.hpp says in which order.
struct TopKOptions {
  Index kernel_size = 1;  // neighbouring keys that share their maximum; 1: none (paper)
  Index keep_first = 0;   // attention sinks, inside the budget; 0: paper
  Index keep_last = 0;    // most recent keys, inside the budget; 0: paper
};

}  // namespace QUOKA_ABI
}  // namespace quoka
