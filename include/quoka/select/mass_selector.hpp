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
// An eighth of a head's voters are the chunk's last queries, the others are evenly spaced (Voters). Where a KV
// head has few query rows, of single tokens above all, one list serves the KV head. A list should serve no more than
// 128 queries: ChunkedPrefill cuts longer chunks, and other callers should cut them, too. SelectorInput::chunk_k gives
// the keys of the chunk; without them shares are of the attention to the past alone.
//
// With a sketch of the keys (SelectorInput::sketch, or the State's own) shares are computed from 8-bit codes
// (code_mass.hpp) in 0.3 of the time, and keys of nearly equal shares may be exchanged. If attention has a soft-cap,
// shares are under it, and computed in float.
//
// 2 * kv_heads * queries * kv_len * head_dim FLOPs per chunk, and an exponential per query and key. With a sketch the
// State keeps head_dim + 12 bytes for each key passed to appended().
#pragma once

#include <quoka/base/arena.hpp>
#include <quoka/select/key_sketch.hpp>
#include <quoka/select/query_scores.hpp>
#include <quoka/select/scored_selector.hpp>
#include <quoka/simd/tuning.hpp>

#include <algorithm>
#include <optional>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// The queries of a chunk that vote on the past's keys, and the list that they vote for. `per_head` queries of each
// query head vote: an eighth of them are the chunk's last ones, the others are evenly spaced over the rest, with other
// places in each head of a group. The last ones must be among them: a question at the end of a prompt decides where its
// answer is found.
//
// Each query head has a list of its own, which only its voters decide. If a KV head has few query rows (decode),
// attention is bound by memory, and several lists would make it read several times as much: then one list serves the KV
// head, and the voters of the whole group decide.
struct Voters {
  static constexpr Index last_share = 8;  // one in this many is among the chunk's last
  static constexpr Index least = 4;       // of a query head

  Index group, q_len;
  Index per_head;  // voters of a query head
  Index lists;     // of a KV head: one for each query head, or one

  // queries: of a KV head, all its query heads together.
  Voters(Index group_in, Index q_len_in, Index queries)
      : group(group_in),
        q_len(q_len_in),
        per_head(std::min(std::max(least, queries / group_in), q_len_in)),
        lists(group_in * q_len_in <= tuning::one_list_rows ? 1 : group_in) {}

  Index heads_of_list() const { return group / lists; }
  // Voter m of the query head that is number `member` of its group: a position in the chunk. They ascend.
  Index position(Index member, Index m) const {
    const Index last = ceil_div(per_head, last_share), spaced = per_head - last,
                rest = q_len - last;
    return m < spaced ? (m * group + member) * rest / (spaced * group) : rest + m - spaced;
  }
};

}  // namespace detail

// The defaults are recommended().
struct MassOptions {
  // Keys that a query head keeps on average, at most; exactly this many if there is no threshold.
  Budget budget = Budget::share(1.0);
  // A key's least share, times the average share of a key of the past; 0: none, by the budget alone.
  float threshold = 0.41f;
  // Keys that a query head keeps on average, at least, if the budget allows them: a short past loses nothing.
  Index least = 1024;
  // Queries of a chunk that vote, for each KV head: its query heads share them, at least 4 of each.
  Index queries = 256;
  Index kernel_size = 3;              // neighbouring keys that share their maximum; 1: none
  Index keep_first = 0;               // attention sinks, inside the budget
  Index keep_last = 0;                // most recent keys, inside the budget
  Sketch sketch = Sketch::automatic;  // 8-bit codes
  // true: all channels of the 8-bit codes are multiplied; false: at least half of them, those in which the voters'
  // logits differ most from key to key (CodedChannels): selecting takes 0.67 (AVX2) to 0.8 (VNNI) of the time.
  // Models lose a quarter to a third more; layers whose attention is flat lose some of it.
  bool all_channels = true;

  // The preset to take where answers count. A layer's call attends to all keys where selecting would take longer:
  // single tokens without 8-bit codes of the keys, above all.
  static MassOptions recommended() { return {}; }
  // The same with exactly the budget as the mean of the query heads' counts, whatever the text asks for.
  static MassOptions recommended(Budget budget) {
    return {.budget = budget, .threshold = 0.0f, .least = 0};
  }

  // Half as many queries and a threshold twice as high: .55 of recommended()'s time, and six times its loss or more,
  // .01 nat of models with real weights (bench/results/real_models.md).
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
  struct State : SketchKept {
    QueryScoreState shares;
    Arenas lists, workers;  // of the choice among shares
    Index prepared = 0;     // decide(): the capacity for which there is memory

    // For the last selection: by how many nats the sketched logits of head b * kv_heads + kv_head may be off, at most;
    // infinite where the head was done in float.
    float logit_error(Index head) const { return shares.logit_error(head); }
  };

  // Throws std::invalid_argument for queries < 1, least < 0, and a threshold that is negative or no number.
  explicit MassScorer(const Options& options = {});

  // Writes the keys to attend to.
  void decide(const SelectorInput& input, State& state, Selection& selection,
              ExecutorRef executor) const;

  // Is selecting, with attention to the selected keys, faster than attention to all keys? If not, a call that attends
  // as well (SelectorInput::attends) selects all keys.
  bool pays(const SelectorInput& input, const State& state) const;

  // Sketches the new keys. A State that has not seen all keys scores in float.
  void appended(const SelectorInput& input, State& state, ExecutorRef executor) const;

  static bool weighs_logits() { return true; }
  // In float, without the sketch.
  static bool supports_softcap() { return true; }

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

#if QUOKA_DEFINES
#include <quoka/kernels/compact.hpp>
#include <quoka/kernels/kernels.hpp>
#include <quoka/select/top_k.hpp>

#include <span>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// ---- from shares to a Selection: one comparison for all lists of a sequence ----------------------
//
//   value[list][t] = the largest share of t and its neighbours
//   selection      = {(list, t) with value[list][t] >= threshold}
//
// The threshold is given, or it is the k-th largest value of all lists and keys of a sequence. Keys that equal the k-th
// are kept until there are k: those of lower lists first, and earlier keys first in a list. A key with a NaN or an
// infinity ranks last, and does not count for its neighbours.

// The memory of a call: shares of the lists of all sequences, and counts of their keys.
struct ListMemory {
  ListMemory(Arena& arena, Index batch, Index lists, Index keys, Index pad)
      : shares(arena.take<float>(batch * lists * (keys + 2 * pad))),
        bucket(arena.take<float>(lists * (keys + compact_slack))),
        kept_shares(arena.take<float>(batch * lists)),
        counts(arena.take<ThresholdCounts>(batch * lists)) {}

  // [batch][lists][pad + keys + pad]: -infinity before the first key and behind the last, so that a key's neighbours
  // are there.
  float* shares;
  float* bucket;            // [lists][keys] of one sequence: candidates for the k-th largest value
  float* kept_shares;       // [batch][lists] of the chunk, then with the kept keys
  ThresholdCounts* counts;  // [batch][lists]
};

// Lists of batch sequences, whose shares are there, to a Selection.
class MassChoice {
 public:
  MassChoice(const MassOptions& options, Index batch, Index lists, Index kv_len,
             const ListMemory& memory, Arenas& workers, ExecutorRef executor)
      : options_(options),
        batch_(batch),
        lists_(lists),
        kv_len_(kv_len),
        m_(memory),
        workers_(workers),
        executor_(executor),
        most_(options.most_keys(kv_len)),
        first_(std::min(options.keep_first, most_)),
        last_(std::min(options.keep_last, most_ - first_)),
        keys_(kv_len - first_ - last_) {}

  void write(Index capacity, Selection& selection) const {
    for (Index b = 0; b < batch_; ++b) choose(b);
    Index most = 0;
    for (Index i = 0; i < batch_ * lists_; ++i) most = std::max(most, kept(i));
    selection.reserve(batch_ * lists_ * capacity);
    SelectionWriter writer(selection, batch_, lists_, kv_len_, most);
    executor_.run(batch_ * lists_, [&](Index i, int worker) { write_one(i, worker, writer); });
    writer.set_kept_shares({m_.kept_shares, static_cast<std::size_t>(batch_ * lists_)});
    writer.commit();
  }

 private:
  Index list_step() const { return kv_len_ + 2 * options_.kernel_size; }  // of shares
  const float* shares(Index i) const { return m_.shares + i * list_step() + options_.kernel_size; }
  PooledScores values(Index i) const {
    return PooledScores::of(shares(i) + first_, keys_, options_.kernel_size);
  }
  Index kept(Index i) const { return first_ + last_ + m_.counts[i].above + m_.counts[i].ties; }
  Index pairs(Index of_list) const { return (of_list - first_ - last_) * lists_; }

  // The threshold of a sequence, and how many of each list's keys stay.
  void choose(Index b) const {
    const Index most = pairs(most_),
                least = std::max<Index>(0, pairs(options_.least_keys(kv_len_)));
    if (!options_.by_threshold()) return cut(b, most);
    const Index reached = count(b, options_.threshold / static_cast<float>(kv_len_));
    if (reached < least || most < reached) cut(b, reached < least ? least : most);
  }
  // Counts the keys of sequence b that reach the threshold.
  Index count(Index b, float threshold) const {
    executor_.run(lists_, [&](Index list, int) {
      m_.counts[b * lists_ + list] = count_against(values(b * lists_ + list), threshold);
    });
    Index reached = 0;
    for (Index i = b * lists_; i < (b + 1) * lists_; ++i)
      reached += m_.counts[i].above + m_.counts[i].equal;
    return reached;
  }
  // Exactly `wanted` of sequence b stay.
  void cut(Index b, Index wanted) const {
    if (wanted >= keys_ * lists_ || wanted <= 0) {
      count(b, wanted <= 0 ? infinity : -infinity);
      return;
    }
    const KthLargest kth = kth_largest(b, wanted);
    count(b, kth.value);
    Index ties = wanted - kth.above;
    for (Index i = b * lists_; i < (b + 1) * lists_; ++i) {
      m_.counts[i].ties = std::min(m_.counts[i].equal, ties);
      ties -= m_.counts[i].ties;
    }
  }

  // For all values of sequence b.
  KthLargest kth_largest(Index b, Index k) const {
    const Index room = keys_ + compact_slack;
    float* const bucket = m_.bucket;
    const float pivot = pivot_of_lists(values(b * lists_), lists_, list_step(), k, bucket);
    for (const float least : {pivot, -infinity}) {
      executor_.run(lists_, [&](Index list, int) {
        m_.counts[b * lists_ + list].above =
            compact_from(values(b * lists_ + list), least, bucket + list * room);
      });
      Index count = 0;
      for (Index list = 0; list < lists_; ++list) {
        const Index some = m_.counts[b * lists_ + list].above;
        std::copy_n(bucket + list * room, some, bucket + count);
        count += some;
      }
      if (count >= k) return kth_by_bins(bucket, count, k);  // else the sample was not fair
    }
    return {-infinity, 0};
  }

  void write_one(Index i, int worker, SelectionWriter& writer) const {
    Arena arena = workers_[worker];
    Position* const positions = arena.take<Position>(kv_len_ + compact_slack);
    Position* to = positions;
    for (Index t = 0; t < first_; ++t) *to++ = static_cast<Position>(t);
    to += positions_against(values(i), m_.counts[i], static_cast<Position>(first_), to);
    for (Index t = first_ + keys_; t < kv_len_; ++t) *to++ = static_cast<Position>(t);
    writer.set_count(i / lists_, i % lists_, to - positions);
    std::copy(positions, to, writer.row(i / lists_, i % lists_).data());
    double share = static_cast<double>(m_.kept_shares[i]);  // of the chunk
    for (const Position* t = positions; t < to; ++t)
      share += static_cast<double>(std::max(shares(i)[*t], 0.0f));
    m_.kept_shares[i] = static_cast<float>(std::min(share, 1.0));
  }

  const MassOptions& options_;
  Index batch_, lists_, kv_len_;  // lists of a sequence
  const ListMemory& m_;
  Arenas& workers_;
  ExecutorRef executor_;
  Index most_;                 // keys of a list, on average
  Index first_, last_, keys_;  // forced at either end; between them
};

}  // namespace detail

QUOKA_FUNC MassScorer::MassScorer(const Options& options) : options_(options) {
  detail::require_at_least("queries", options.queries, 1);
  detail::require_at_least("least", options.least, 0);
  if (!(options.threshold >= 0.0f && options.threshold <= detail::most_option))
    detail::fail_range("threshold", static_cast<double>(options.threshold), "[0, 1e30]");
}

// Codes cannot apply a soft-cap.
QUOKA_FUNC bool MassScorer::uses_sketch(const SelectorInput& input) const {
  return input.softcap() == 0.0f && by_codes(options_.sketch);
}

// Is there a sketch of all keys, and do codes serve?
QUOKA_FUNC bool MassScorer::has_codes(const SelectorInput& input, const State& state) const {
  return uses_sketch(input) && SketchedKeys::are_sketched(input.k, state.sketch, input.sketch);
}

// By measured costs (tuning::SelectingCosts). Exact attention packs each key once for a KV head and multiplies
// it by all rows. Selecting multiplies it by the voters; attention to the selection packs and multiplies the kept
// keys, for each list anew. Without codes selecting packs every key in float as well. One token is bound by memory:
// with codes half of the keys took 0.7 to 2.2 times as long as all of them, without codes selecting alone 1.6 to 8
// times (Zen 4, five shapes of heads).
QUOKA_FUNC bool MassScorer::pays(const SelectorInput& input, const State& state) const {
  return pays_among(input.k.len(), has_codes(input, state), input);
}

QUOKA_FUNC bool MassScorer::pays_among(Index keys, bool codes, const SelectorInput& input) const {
  const Index queries = input.q.len(), rows = input.group() * queries,
              kept = options_.expected_keys(keys);
  if (queries == 1) return codes && 4 * kept <= keys;
  if ((!codes && rows < tuning::fewest_rows_without_codes) || 4 * kept > 3 * keys) return false;
  const auto real = [](Index x) { return static_cast<float>(x); };
  const detail::Voters voters(input.group(), queries, options_.queries);
  const tuning::SelectingCosts cost = tuning::selecting_costs(input.in_int8);
  const float votes = real(voters.group * voters.per_head),
              exact = cost.pack + cost.row * real(rows),
              selecting = codes ? cost.voter * votes : cost.float_pack + cost.float_voter * votes,
              of_kept = cost.pack * real(voters.lists) + cost.row * real(rows);
  return selecting + real(kept) / real(keys) * of_kept <= exact;
}

// Does a call attend to all keys now, where it will select once its cache is full? True once for each capacity: a
// selection is made then that nobody reads, so that a decode loop has the memory before it crosses the border.
QUOKA_FUNC bool MassScorer::will_select(const SelectorInput& input, State& state) const {
  if (!input.attends || input.capacity <= input.k.len() || input.capacity == state.prepared)
    return false;
  const bool codes = has_codes(input, state);
  if (pays_among(input.k.len(), codes, input) || !pays_among(input.capacity, codes, input))
    return false;
  state.prepared = input.capacity;
  return true;
}

QUOKA_FUNC void MassScorer::select(const SelectorInput& input, State& state, Selection& selection,
                                   ExecutorRef executor) const {
  const Rows &q = input.q, &k = input.k;
  const detail::Voters voters(input.group(), q.len(), options_.queries);
  const Index batch = k.batch(), lists = k.heads() * voters.lists, heads = voters.heads_of_list(),
              keys = k.len(), pad = options_.kernel_size, stride = keys + 2 * pad,
              capacity = std::max(keys, input.capacity);
  state.lists.reserve(
      1, [&](Arena& arena) { detail::ListMemory(arena, batch, lists, capacity, pad); });
  state.workers.reserve(executor.workers(), [&](Arena& arena) {
    arena.take<Position>(capacity + detail::compact_slack);
  });
  Arena arena = state.lists[0];
  const detail::ListMemory memory(arena, batch, lists, keys, pad);
  for (Index i = 0; i < batch * lists; ++i) {
    std::fill_n(memory.shares + i * stride, pad, -detail::infinity);
    std::fill_n(memory.shares + (i + 1) * stride - pad, pad, -detail::infinity);
  }
  const float logit_scale = input.logit_scale();
  const auto fill = [&](Index b, Index list, RowWriter& rows) {
    for (Index head = list * heads; head < (list + 1) * heads; ++head)
      for (Index m = 0; m < voters.per_head; ++m)
        rows.add(q, b, head, voters.position(head % voters.group, m), logit_scale);
  };
  softmax_scores({.rows = {heads * voters.per_head, k.dim(), q},
                  .fill = fill,
                  .keys = k,
                  .capacity = capacity,
                  .softcap = input.softcap(),
                  .codes = uses_sketch(input) ? SketchedKeys::find(k, state.sketch, input.sketch)
                                              : std::nullopt,
                  .all_channels = options_.all_channels,
                  .chunk_k = input.chunk_k,
                  .chunk_scores = memory.kept_shares},
                 {memory.shares + pad, {batch, lists, keys}, {lists * stride, stride, 1}},
                 state.shares, executor);
  detail::MassChoice(options_, batch, lists, keys, memory, state.workers, executor)
      .write(capacity, selection);
}

QUOKA_FUNC void MassScorer::decide(const SelectorInput& input, State& state, Selection& selection,
                                   ExecutorRef executor) const {
  const Rows& k = input.k;
  if (options_.least_keys(k.len()) == k.len())
    return selection.select_all(k.batch(), k.heads(), k.len());
  if (options_.most_keys(k.len()) == 0) return selection.select_none(k.batch(), k.heads(), k.len());
  if (will_select(input, state)) select(input, state, selection, executor);  // for its memory
  if (input.attends && !pays(input, state))
    return selection.select_all(k.batch(), k.heads(), k.len());
  select(input, state, selection, executor);
}

QUOKA_FUNC void MassScorer::appended(const SelectorInput& input, State& state,
                                     ExecutorRef executor) const {
  if (uses_sketch(input) && input.sketch == nullptr)
    state.sketch.append(input.k, input.capacity, executor);
}

}  // namespace QUOKA_ABI
}  // namespace quoka
#endif  // QUOKA_DEFINES
