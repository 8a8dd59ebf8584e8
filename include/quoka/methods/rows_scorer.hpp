// Scores by rows of the queries: the common part of SampleAttention, SparQ and Loki. They differ in
// the rows, and in the keys that these are multiplied with.
//
//   score[t] = mean over the rows of a KV head of softmax over t of row . key[t]
//
// 2 * kv_heads * rows * kv_len * dim FLOPs. With a sketch of the keys by 8-bit logits, nearly the
// same (select/softmax_scores.hpp).
//
//   struct MyRows {
//     struct Options { Budget budget; Sketch sketch; ... };
//     using State = NoState;  // or what is kept: truncate(), kept_len(), kept_bytes()
//     static constexpr bool every_query = true;  // all queries of the chunk are rows, not some
//     explicit MyRows(const Options&);
//     // called before the rows of a call: the keys that they are multiplied with
//     ScoredKeys keys(const SelectorInput&, State&, ExecutorRef) const;
//     // the most rows of a KV head
//     Index max_rows(const SelectorInput&) const;
//     // writes those of one, times the logit scale
//     void fill(const SelectorInput&, State&, Index b, Index kv_head, RowWriter&) const;
//   };
#pragma once

#include <quoka/select/scored_selector.hpp>
#include <quoka/select/sketched_keys.hpp>
#include <quoka/select/softmax_scores.hpp>

#include <algorithm>
#include <optional>

namespace quoka {
inline namespace QUOKA_ABI {

// The keys, or projected keys, that rows are multiplied with.
struct ScoredKeys {
  Rows rows;               // [batch, kv_heads, kv_len, dim]
  const KeySketch* cache;  // the sketch of a cache that they lie in; null: there is none
  bool sketched = true;    // false: score in float even if a sketch exists
};

template <class Method>
class RowsScorer : public ScorerDefaults {
 public:
  using Options = typename Method::Options;

  struct State {
    typename Method::State method;
    StateSketch codes;  // of what rows are multiplied with
    SoftmaxScoreState scores;

    void truncate(Index kv_len) {
      method.truncate(kv_len);
      if constexpr (requires { method.kept_len(); }) kv_len = std::min(kv_len, method.kept_len());
      codes.truncate(kv_len);  // codes of rows that the method has dropped serve nothing
    }
    Index kept_len() const {
      Index len = codes.kept_len();
      if constexpr (requires { method.kept_len(); }) len = std::max(len, method.kept_len());
      return len;
    }
    Index kept_bytes() const { return kept_bytes_of(method) + codes.kept_bytes(); }
  };

  // Throws what the method refuses.
  explicit RowsScorer(const Options& options = {}) : options_(options), method_(options) {}

  // Attention's, by its scale.
  static bool weighs_logits() { return true; }

  void score(const SelectorInput& input, State& state, TensorView<float, 3> scores,
             ExecutorRef executor) const {
    const ScoredKeys keys = method_.keys(input, state.method, executor);
    const auto fill = [&](Index b, Index kv_head, RowWriter& rows) {
      method_.fill(input, state.method, b, kv_head, rows);
    };
    softmax_scores(
        {.rows = {method_.max_rows(input), keys.rows.dim(), input.q.dim()},
         .fill = fill,
         .keys = keys.rows,
         .capacity = input.capacity,
         .codes = uses_sketch(keys) ? state.codes.find_codes(keys.rows, keys.cache) : std::nullopt},
        scores, state.scores, executor);
  }

  // Keeps what the method keeps of the keys, and their sketch.
  void appended(const SelectorInput& input, State& state, ExecutorRef executor) const {
    const ScoredKeys keys = method_.keys(input, state.method, executor);
    if (uses_sketch(keys) && keys.cache == nullptr)
      state.codes.append(keys.rows, input.capacity, executor);
  }

 private:
  bool uses_sketch(const ScoredKeys& keys) const {
    return keys.sketched && by_codes(options_.sketch, Method::every_query);
  }

  Options options_;
  Method method_;
};

}  // namespace QUOKA_ABI
}  // namespace quoka
