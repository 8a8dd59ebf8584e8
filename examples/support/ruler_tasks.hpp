// RULER's retrieval tasks (Hsieh et al. 2024, scripts/synthetic.yaml) on token ids, for the small
// models of data/trained: the distributions of its tasks.py, which lists the deviations from RULER.
//
// A sample is a prompt of exactly `length` tokens, the positions whose logits are the answers, and
// for each of them the set of right tokens. There are 512 ids:
//
//   1 BOS   3 MARK   4 ASK   5 SET   6 TRACE   7 COMMON   8 FREQUENT
//   16..207 keys, also the variables of vt   208..335 values   336..511 noise, 336..399 also words
//
//   task         context between BOS and question           question             right
//   single       1 needle MARK k v                          ASK k                at k: v
//   multi_key    4 needles, 4 keys                          ASK k                at k: v
//   haystack     nothing but needles                        ASK k                at k: v
//   multi_value  4 needles of one key                       ASK k                at k: its 4 values
//   multi_query  4 needles, 4 keys                          ASK k1 .. ASK k4     at each k: its v
//   vt           2 chains SET x1 u, SET x2 x1, .., SET x5 x4  TRACE u x1 x2 x3 x4  at u: x1, at x1:
//                                                                                  x2, ..
//   cwe          10 words, each 10 times as often as 40 others   COMMON          the 10
//   fwe          50 words, the r-th in proportion to 1 / r^2     FREQUENT        the first 3
//
// Noise is Zipf: id 336 + r in proportion to 1 / (r + 1). Every placement of needles or statements
// without overlap is equally likely, but the asked one (the first of several) may be put at a
// depth.
#pragma once

#include "support/small_model.hpp"
#include "support/draws.hpp"

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace quoka_examples {

enum class Task { single, multi_key, haystack, multi_value, multi_query, vt, cwe, fwe };

inline constexpr std::array all_tasks{Task::single,      Task::multi_key,   Task::haystack,
                                      Task::multi_value, Task::multi_query, Task::vt,
                                      Task::cwe,         Task::fwe};

std::string name_of(Task task);
// Throws std::invalid_argument, with all names, for an unknown one.
Task task_named(const std::string& name);

namespace task_tokens {
inline constexpr Token bos = 1, mark = 3, ask = 4, set = 5, trace = 6, common = 7, frequent = 8;
inline constexpr Token keys = 16, values = 208, noise = 336, end = 512;  // where each range begins
inline constexpr Index words = 64;                                       // the first of the noise
}  // namespace task_tokens

struct TaskSample {
  std::vector<Token> tokens;                // [length]
  std::vector<Index> positions;             // [answers], ascending
  std::vector<std::vector<Token>> answers;  // [answers][size of the set]
};

// depth: where the asked needle stands, from 0 to 1; uniform without it. vt, cwe and fwe have none.
// Throws std::invalid_argument, with both numbers, for a length that does not hold the task and for
// a depth outside of [0, 1].
TaskSample make_sample(Task task, Index length, std::optional<double> depth, Draws& draws);

// Sample i of an evaluation, its own whatever else is drawn; depths are (i mod 40) / 39.
TaskSample evaluation_sample(Task task, Index length, Index i, std::uint32_t seed);

// How many of the answers' tokens are right: an answer of s tokens is the s largest logits, the
// first of equal ones.
struct TaskScore {
  Index right = 0, of = 0;
  bool exact() const { return right == of; }
};

// logits [answers, vocabulary]. Throws std::invalid_argument for another number of logits, and
// where they hold a NaN.
TaskScore score(const TaskSample& sample, std::span<const float> logits, Index vocabulary);

}  // namespace quoka_examples
