// Selection by attention, for each query head, against one threshold.
//
//   share[h][t] = mean over the voting queries of head h of the key's share of all the query's attention, to the past
//                 and to its own chunk
//   selection   = {(h, t): the largest share of t and its neighbours >= threshold}
//
// Each query head has a list of its own, of any length: one that looks at few keys leaves the others to heads that look
// at many. Only attention below the threshold is dropped, over all heads of the layer; no other choice of as many pairs
// drops less of the attention that the voters have. Selection::kept_shares() has how much they keep.
//
//   MassOptions{}                                  the number of keys follows the text: a key stays whose share is
//                                                  `threshold` times the average one, 1 / kv_len
//   MassOptions::recommended(Budget::share(0.125)) exactly that share of the keys, on average over the query heads
//
// An eighth of a head's voters are the chunk's last queries, the others are evenly spaced (mass/voters.hpp). Where a KV
// head has few query rows, of single tokens above all, one list serves the KV head. A list should serve no more than
// 128 queries: ChunkedPrefill cuts longer chunks, other callers hand them in in parts. SelectorInput::chunk_k gives the
// keys of the chunk; without them shares are of the attention to the past alone.
//
// With a sketch of the keys (SelectorInput, or one that the State keeps) shares are made of 8-bit logits
// (mass/code_votes.hpp), in 0.3 of the time: keys of nearly equal shares may be exchanged. Under attention's soft-cap,
// if it has one: in float then, without the sketch.
//
// 2 * kv_heads * queries * kv_len * head_dim FLOPs per chunk, and an exponential per query and key. With a sketch the
// State keeps head_dim + 12 bytes for each key passed to appended().
#pragma once

#include <quoka/select/mass/select_by_mass.hpp>
#include <quoka/select/mass/voters.hpp>
#include <quoka/select/scored_selector.hpp>
#include <quoka/select/sketch/sketched_call.hpp>

#include <algorithm>
#include <memory>

namespace quoka {
inline namespace QUOKA_ABI {

// The defaults are recommended().
struct MassOptions {
  // Keys that a query head keeps on average, at most; exactly as many where there is no threshold.
  Budget budget = Budget::share(1.0);
  // A key's least share, times the average share of a key of the past; 0: none, by the budget alone.
  float threshold = 0.41f;
  Index least =
      1024;  // keys that a query head keeps on average, at least, of a budget that is not smaller: a short
             // past loses nothing
  Index queries = 256;    // of a chunk that vote, for each KV head: its query heads share them, at
                          // least 4 of each
  Index kernel_size = 3;  // neighbouring keys that share their maximum; 1: none
  Index keep_first = 0;   // attention sinks, inside the budget
  Index keep_last = 0;    // most recent keys, inside the budget
  Sketch sketch = Sketch::automatic;  // 8-bit codes
  // true: all channels of the 8-bit codes are multiplied; false: at least half of them, those in which the voters'
  // logits differ most from key to key (sketch/coded_channels.hpp): selecting takes 0.67 (AVX2) to 0.8 (VNNI) of the
  // time. Flat layers lose attention by it.
  bool all_channels = true;

  // The preset to take where answers count. A layer's call attends to all keys where selecting would take longer:
  // single tokens without 8-bit codes of the keys, above all.
  static MassOptions recommended() { return {}; }
  // The same with exactly the budget as the mean of the query heads' counts, whatever the text asks for.
  static MassOptions recommended(Budget budget) {
    return {.budget = budget, .threshold = 0.0f, .least = 0};
  }

  // Half as many queries and a threshold twice as high: sooner done, and loses two to three times as much.
  static MassOptions balanced() { return {.threshold = 0.82f, .least = 512, .queries = 128}; }
  // The same with exactly the budget as the mean of the query heads' counts, whatever the text asks for.
  static MassOptions balanced(Budget budget) {
    return {.budget = budget, .threshold = 0.0f, .least = 0, .queries = 128};
  }

  // Queries of each of the `group` >= 1 query heads that share a KV head.
  Index queries_per_head(Index group) const {
    return std::max<Index>(detail::Voters::least, queries / group);
  }
  constexpr bool by_threshold() const { return threshold > 0.0f; }
  // Keys of a list on average, of kv_len past ones: at most,
  constexpr Index most_keys(Index kv_len) const { return budget.count(kv_len); }
  // at least,
  constexpr Index least_keys(Index kv_len) const {
    return by_threshold() ? std::min(least, most_keys(kv_len)) : most_keys(kv_len);
  }
  // and about how many there will be.
  constexpr Index expected_keys(Index kv_len) const {
    return std::clamp(kv_len / 4, least_keys(kv_len), most_keys(kv_len));
  }
};

// The implementation of MassSelector.
class MassScorer {
 public:
  using Options = MassOptions;
  // With one list for 512 queries models lose twice as much as with one for each 128.
  static constexpr Index most_queries = 128;

  // Reused memory, and the sketch of the keys.
  struct State : detail::SketchKept {
    std::unique_ptr<detail::MassMemory> memory;
    Index prepared = 0;  // decide(): the capacity for which there is memory

    // Out of line: a caller that keeps a State does not compile what becomes of all its memory.
    State();
    State(State&&) noexcept;
    State& operator=(State&&) noexcept;
    ~State();

    Index bytes() const;
    // For the last selection: by how many nats the sketched logits of head b * kv_heads + kv_head may be off, at most;
    // infinite where the head was done in float.
    float logit_error(Index head) const;
  };

  // Throws std::invalid_argument for queries < 1, least < 0, and a threshold that is negative or no number.
  explicit MassScorer(const Options& options = {});

  // Writes the keys to attend to.
  void decide(const SelectorInput& input, State& state, Selection& selection,
              ExecutorRef executor) const;

  // Does selecting and attending to what was chosen take less than attention to all keys? A call that attends as well
  // (SelectorInput::attends) chooses all keys where it does not.
  bool pays(const SelectorInput& input, const State& state) const;

  // Sketches the new keys. A State that has not seen all keys scores in float.
  void appended(const SelectorInput& input, State& state, ExecutorRef executor) const;

  static bool weighs_logits() { return true; }
  // In float, without the sketch.
  static bool knows_softcap() { return true; }

 private:
  void select(const SelectorInput& input, State& state, Selection& selection,
              ExecutorRef executor) const;
  bool will_select(const SelectorInput& input, State& state) const;
  bool has_codes(const SelectorInput& input, const State& state) const;
  bool pays_among(Index keys, bool codes, const SelectorInput& input) const;
  bool uses_sketch(const SelectorInput& input) const;
  Options options_;
};

using MassSelector = ScoredSelector<MassScorer>;
static_assert(Selector<MassSelector>);

// In the library.
#if defined(QUOKA_COMPILED) && !defined(QUOKA_COMPILING)
extern template void MassSelector::select(const SelectorInput&, State&, Selection&,
                                          ExecutorRef) const;
extern template void MassSelector::appended(const SelectorInput&, State&, ExecutorRef) const;
#endif

}  // namespace QUOKA_ABI
}  // namespace quoka

#if !defined(QUOKA_COMPILED)
#include <quoka/select/mass_selector_impl.hpp>
#endif
