// Common code of the selection stages' tests: QuoKA's options in the oracle's words, and
// comparisons that allow float rounding and nothing else.
#pragma once

#include "support/fixtures.hpp"

#include <quoka/select/any_selector.hpp>
#include <quoka/select/options.hpp>
#include <quoka/select/stages.hpp>

#include <algorithm>
#include <array>
#include <functional>
#include <set>
#include <vector>

namespace quoka_test {

using quoka::Aggregation;
using quoka::MassOptions;
using quoka::QuokaOptions;

inline constexpr std::array aggregations = {Aggregation::max, Aggregation::mean};

oracle::Aggregation to_oracle(Aggregation x);

// The balanced preset without neighbours.
MassOptions balanced_without_neighbours(const Budget& budget);

std::string name_of(const QuokaOptions& x);
std::string name_of(const MassOptions& x);

// ---- keys ---------------------------------------------------------------------------------------

// The keys that are wanted, except swaps of keys that score as the last one of these does, within a tolerance of that
// score. Keys that are not `free` are kept whatever they score.
void expect_near_ties(const std::vector<Index>& keep, const std::vector<Index>& wanted,
                      const std::function<double(Index key)>& score,
                      const std::function<double(double threshold)>& tolerance,
                      const std::function<bool(Index key)>& free);
// The oracle's keys, within 1e-5 of the range of the scores.
void expect_same_keys(const oracle::Positions& keep, const oracle::Scores& scores,
                      const oracle::QuokaOptions& options);

}  // namespace quoka_test
