// Random keys: a control. A method must keep more attention than this.
//
//   score[t] = hash of (seed, sequence, KV head, kv_len, t)
//
// The same seed gives the same keys on every machine and for any number of threads; each chunk
// draws again. kv_heads * kv_len hashes (splitmix64's finaliser, public domain, Steele and Vigna).
#pragma once

#include <quoka/select/query_rows.hpp>
#include <quoka/select/scored_selector.hpp>

#include <cstdint>

namespace quoka {
inline namespace QUOKA_ABI {

// Options of RandomSelector.
struct RandomOptions {
  Budget budget = Budget::keys(1024);  // keys per KV head
  std::uint64_t seed = 0;              // equal seeds: equal scores
  Index keep_first = 0;                // attention sinks, inside the budget
  Index keep_last = 0;                 // most recent keys, inside the budget
};

// The scores behind RandomSelector.
class RandomScorer : public ScorerDefaults {
 public:
  using Options = RandomOptions;
  using State = NoState;

  // Refuses none of the options.
  explicit RandomScorer(const Options& options = {}) : options_(options) {}

  void score(const SelectorInput& input, State&, TensorView<float, 3> scores,
             ExecutorRef executor) const {
    const Index kv_len = input.k.len();
    for_each_kv_head(input.k, executor, [&](Index b, Index kv_head, int) {
      std::uint64_t stream = mix(options_.seed);
      stream = mix(stream ^ static_cast<std::uint64_t>(b * input.k.heads() + kv_head));
      stream = mix(stream ^ static_cast<std::uint64_t>(kv_len));
      for (Index t = 0; t < input.k.len(); ++t)  // 24 bits: exact in float
        scores.at(b, kv_head, t) =
            static_cast<float>(mix(stream + static_cast<std::uint64_t>(t)) >> 40);
    });
  }

 private:
  static std::uint64_t mix(std::uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
  }

  Options options_;
};

using RandomSelector = ScoredSelector<RandomScorer>;

}  // namespace QUOKA_ABI
}  // namespace quoka
