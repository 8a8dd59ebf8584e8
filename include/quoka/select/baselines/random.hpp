// Random keys: a control. What a method keeps beyond this is its own.
//
//   score[t] = hash of (seed, sequence, KV head, kv_len, t)
//
// The same seed gives the same keys on every machine and for any number of threads; each chunk
// draws anew. kv_heads * kv_len hashes (splitmix64's finaliser, public domain, Steele and Vigna).
#pragma once

#include <quoka/select/scored_selector.hpp>

#include <cstdint>

namespace quoka::inline QUOKA_ABI {

struct RandomOptions {
  Budget budget = 1024;
  std::uint64_t seed = 0;
  Index window = 1;      // neighbouring keys kept together; 1: none
  Index keep_first = 0;  // attention sinks, inside the budget
  Index keep_last = 0;   // recent keys, inside the budget
};

class RandomScorer {
 public:
  using Options = RandomOptions;
  using State = NoState;

  explicit RandomScorer(const Options& options = {}) : options_(options) {}

  template <class T>
  void score(const SelectorInput<T>& input, State&, float* scores, ExecutorRef executor) const {
    const Index kv_len = input.k.len();
    executor.run(input.k.batch() * input.k.heads(), [&](Index task, int) {
      std::uint64_t stream = mix(options_.seed);
      stream = mix(stream ^ static_cast<std::uint64_t>(task));
      stream = mix(stream ^ static_cast<std::uint64_t>(kv_len));
      for (Index t = 0; t < kv_len; ++t)  // 24 bits: exact in float
        scores[task * kv_len + t] =
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
static_assert(Selector<RandomSelector>);

}  // namespace quoka::inline QUOKA_ABI
