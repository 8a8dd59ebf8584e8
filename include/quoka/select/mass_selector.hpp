// Selection by attention, for each query head, against one threshold.
//
//   share[h][t]  the part of a query's attention, to the past and to its own chunk, that key t
//                gets: the mean over the voting queries of head h
//   value[h][t]  the largest share of t and its neighbours (MassOptions::kernel_size)
//   selection    {(h, t): value[h][t] >= threshold}, for all heads h of a sequence
//
// The flow is MassScorer::decide(): softmax_scores() (softmax_scores.hpp) writes the shares, from
// floats or from 8-bit codes; select_lists(), below, finds the threshold and writes the lists.
//
// Each query head has a list of its own, of any length: a head with concentrated attention keeps
// few keys, and others may keep more. No pair (h, t) is dropped whose share is above the threshold.
// With a kernel_size of 1 and no forced keys, no other choice of as many pairs drops less of the
// voters' attention. Selection::kept_shares() has how much of it they keep.
//
//   MassOptions{}              the number of keys follows the text: the threshold is
//                              MassOptions::threshold times an even share, 1 / kv_len
//   recommended(Budget::share(0.125))
//                              exactly that share of the keys, on average over the lists: the
//                              threshold is the least value that stays
//
// An eighth of a head's voters are the chunk's last queries, the others are evenly spaced (Voters).
// If a KV head has few query rows, above all in decode, one list serves the KV head. A list should
// serve no more than 128 queries: ChunkedPrefill cuts longer chunks, and other callers should cut
// them, too. SelectorInput::chunk_k gives the keys of the chunk; without them shares are of the
// attention to the past alone.
//
// With a sketch of the keys (SelectorInput::sketch, or the State's own) shares are computed from
// 8-bit codes (code_mass.hpp) in 0.3 of the time. Keys of nearly equal shares may then be
// exchanged. If attention has a soft-cap, shares are under it, and computed in float.
//
// 2 * kv_heads * queries * kv_len * head_dim FLOPs per chunk, and an exponential per query and key.
// A State that makes a sketch of its own keeps head_dim + 12 bytes for each key of each KV head.
#pragma once

#include <quoka/base/arena.hpp>
#include <quoka/select/scored_selector.hpp>
#include <quoka/select/sketched_keys.hpp>
#include <quoka/select/softmax_scores.hpp>

#include <algorithm>

#if QUOKA_DEFINES
#include <quoka/kernels/compact.hpp>
#include <quoka/kernels/kernels.hpp>
#include <quoka/simd/tuning.hpp>
#endif

namespace quoka {
inline namespace QUOKA_ABI {

// The defaults are recommended().
struct MassOptions {
  // Keys that a query head keeps on average, at most; exactly this many if there is no threshold.
  Budget budget = Budget::share(1.0);
  // A key's least value, as a multiple of an even share, 1 / kv_len; 0: none, the budget alone
  // decides. Where the chunk takes part of the attention, the average share is below an even one.
  float threshold = 0.41f;
  // Keys that a query head keeps on average, at least, if the budget allows them: a short past
  // loses nothing.
  Index least = 1024;
  // Queries of a chunk that vote, for each KV head: its query heads share them (queries_per_head).
  Index queries = 256;
  Index kernel_size = 3;  // neighbouring keys that share their maximum; 1: none; at most 1,024
  Index keep_first = 0;   // attention sinks, inside the budget
  Index keep_last = 0;    // most recent keys, inside the budget
  Sketch sketch = Sketch::automatic;  // 8-bit codes

  // The preset to take where answers count. A layer's call attends to all keys if selecting would
  // take longer, above all in decode without 8-bit codes of the keys.
  static MassOptions recommended() { return {}; }
  // The same, but the query heads keep exactly the budget on average.
  static MassOptions recommended(Budget budget) {
    return {.budget = budget, .threshold = 0.0f, .least = 0};
  }

  // Half as many queries and a threshold twice as high: .55 of recommended()'s time, and at least
  // six times its loss, .01 nat on models with real weights (bench/results/real_models.md).
  static MassOptions balanced() { return {.threshold = 0.82f, .least = 512, .queries = 128}; }
  // The same, but the query heads keep exactly the budget on average.
  static MassOptions balanced(Budget budget) {
    return {.budget = budget, .threshold = 0.0f, .least = 0, .queries = 128};
  }

  static constexpr Index most_kernel_size = 1024;  // the largest kernel_size

  // Voters of each of the `group` >= 1 query heads that share a KV head, if the chunk has enough
  // queries: at least 4.
  constexpr Index queries_per_head(Index group) const {
    return std::max<Index>(4, queries / group);
  }
  constexpr bool by_threshold() const { return threshold > 0.0f; }
  // The least that a list keeps on average, of kv_len past keys; the most is budget.count().
  constexpr Index least_keys(Index kv_len) const {
    const Index most = budget.count(kv_len);
    return by_threshold() ? std::min(least, most) : most;
  }
  // An estimate, for pays(): a quarter is an assumption.
  constexpr Index expected_keys(Index kv_len) const {
    return std::clamp(kv_len / 4, least_keys(kv_len), budget.count(kv_len));
  }
};

// The implementation of MassSelector.
class MassScorer : public ScorerDefaults {
 public:
  using Options = MassOptions;
  // With one list for 512 queries models lose twice as much as with one for each 128.
  static constexpr Index most_queries = 128;

  // Reused memory, and the sketch of the keys.
  struct State : StateSketch {
    SoftmaxScoreState mass;
    Arenas call, workers;  // of the choice among shares

    // The most by which sketched logits of head b * kv_heads + kv_head may have been off in the
    // last selection, in nats; infinite if the head was done in float.
    float logit_error(Index head) const { return mass.logit_error(head); }
  };

  // Throws std::invalid_argument for queries < 1, least < 0, a kernel_size beyond
  // most_kernel_size, and a threshold that is negative or no number.
  explicit MassScorer(const Options& options = {});

  // Writes the keys to attend to.
  void decide(const SelectorInput& input, State& state, Selection& selection,
              ExecutorRef executor) const;

  // Are selecting and attention to the selected keys faster than attention to all keys? If not, a
  // call that also attends (SelectorInput::attends) selects all keys.
  bool pays(const SelectorInput& input, const State& state) const {
    return pays_among(input.k.len(), has_codes(input, state), input);
  }

  // Sketches the new keys. A State that has not seen all keys scores in float.
  void appended(const SelectorInput& input, State& state, ExecutorRef executor) const;

  static bool weighs_logits() { return true; }
  // In float, without the sketch.
  static bool supports_softcap() { return true; }

 private:
  bool has_codes(const SelectorInput& input, const State& state) const;
  bool pays_among(Index keys, bool codes, const SelectorInput& input) const;
  bool uses_sketch(const SelectorInput& input) const;
  Options options_;
};

using MassSelector = ScoredSelector<MassScorer>;

// In the library.
#if defined(QUOKA_COMPILED) && !defined(QUOKA_COMPILING)
extern template void MassSelector::select(const SelectorInput&, State&, Selection&,
                                          ExecutorRef) const;
extern template void MassSelector::appended(const SelectorInput&, State&, ExecutorRef) const;
#endif

#if QUOKA_DEFINES
namespace detail {

// The queries of a chunk that vote on the past's keys, and the list that they vote for. An eighth
// of a query head's voters are the chunk's last queries; the others are evenly spaced over the
// rest, at different positions in each head of a group. The last ones must be among them: a
// question at the end of a prompt decides where its answer is found.
//
// Each query head has a list of its own, which only its voters decide. If a KV head has few query
// rows (decode), attention is bound by memory, and several lists would make it read several times
// as much. Then one list serves the KV head, and the voters of the whole group decide.
struct Voters {
  static constexpr Index last_share = 8;  // one in this many is among the chunk's last

  Index group, q_len;
  Index per_head;   // voters of a query head
  bool share_list;  // do the query heads of a group have one list?

  Voters(const SelectorInput& input, const MassOptions& options)
      : group(input.group()),
        q_len(input.q.len()),
        per_head(std::min(options.queries_per_head(group), q_len)),
        share_list(group * q_len <= tuning::one_list_rows) {}

  Index heads_of_list() const { return share_list ? group : 1; }
  Index lists_of_kv_head() const { return share_list ? 1 : group; }
  // Voter m of the query head that is number `member` of its group: a position in the chunk. They
  // ascend.
  Index position(Index member, Index m) const {
    const Index last = ceil_div(per_head, last_share), spaced = per_head - last,
                rest = q_len - last;
    return m < spaced ? (m * group + member) * rest / (spaced * group) : rest + m - spaced;
  }
};

// The shares of all lists of a call, and memory for the choice among them. A list is numbered
// through all sequences.
struct ListShares {
  ListShares(Arena& arena, const MassOptions& options, Index batch_in, Index lists_in,
             Index keys_in)
      : batch(batch_in),
        lists(lists_in),
        keys(keys_in),
        forced(options, options.budget.count(keys)),
        kernel_size(options.kernel_size),
        shares(arena.take<float>(batch * lists * step())),
        kept(arena.take<float>(batch * lists)),
        counts(arena.take<ThresholdCounts>(batch * lists)),
        bucket(arena.take<float>(lists * (keys + compact_slack))),
        found(arena.take<Index>(lists)) {}

  Index step() const { return keys + 2 * kernel_size; }
  float* of(Index list) const { return shares + list * step() + kernel_size; }
  TensorView<float, 3> view() const {
    return {of(0), {batch, lists, keys}, {lists * step(), step(), 1}};
  }
  // Minus infinity before the first key and behind the last, so that a key's neighbours are there.
  void fill_ends() const {
    for (Index list = 0; list < batch * lists; ++list) {
      std::fill_n(of(list) - kernel_size, kernel_size, -infinity);
      std::fill_n(of(list) + keys, kernel_size, -infinity);
    }
  }
  // Keys to choose among: those that are not forced.
  Index candidates() const { return keys - forced.first - forced.last; }
  PooledScores values(Index list) const {
    return PooledScores::of(of(list) + forced.first, candidates(), kernel_size);
  }

  Index batch, lists, keys;  // sequences, lists of each, and keys of the past
  ForcedKeys forced;         // of a list
  Index kernel_size;
  float* shares;            // [batch][lists][kernel_size + keys + kernel_size]
  float* kept;              // [batch][lists] from softmax_scores() the chunk's share; after
                            // select_lists() the chunk's and the kept keys' together
  ThresholdCounts* counts;  // [batch][lists]
  float* bucket;            // [lists][keys] of one sequence: values around the threshold,
  Index* found;             // [lists] and how many of each list
};

// ---- lists with one threshold -------------------------------------------------------------------
//
//   value[list][t] = the largest share of t and its neighbours (PooledScores)
//   kept           = {(list, t): value[list][t] >= threshold}, for all lists of a sequence
//
// count_lists() counts against a given threshold. cut_lists() finds the threshold that keeps k
// pairs of a list and a key: the k-th largest value of all lists together, found as in top-k. Then
// keys that equal it are kept until there are k: those of the first lists first, and earlier keys
// first in a list.

// Counts in lists [begin, begin + x.lists). Returns how many pairs reach the threshold.
inline Index count_lists(const ListShares& x, Index begin, float threshold, ExecutorRef executor) {
  ThresholdCounts* const counts = x.counts + begin;
  executor.run(x.lists, [&](Index list, int) {
    counts[list] = count_against(x.values(begin + list), threshold);
  });
  Index reached = 0;
  for (Index list = 0; list < x.lists; ++list) reached += counts[list].above + counts[list].equal;
  return reached;
}

// The k-th largest value of these lists, 0 < k.
inline KthLargest kth_of_lists(const ListShares& x, Index begin, Index k, ExecutorRef executor) {
  const Index room = x.keys + compact_slack;
  const float pivot = pivot_of_lists(x.values(begin), x.lists, x.step(), k, x.bucket);
  for (const float least : {pivot, -infinity}) {
    executor.run(x.lists, [&](Index list, int) {
      x.found[list] = compact_from(x.values(begin + list), least, x.bucket + list * room);
    });
    Index count = 0;
    for (Index list = 0; list < x.lists; ++list) {
      std::copy_n(x.bucket + list * room, x.found[list], x.bucket + count);
      count += x.found[list];
    }
    if (count >= k) return kth_by_bins(x.bucket, count, k);  // else the sample was not fair
  }
  return {-infinity, 0};
}

// Exactly k pairs stay, of at least as many.
inline void cut_lists(const ListShares& x, Index begin, Index k, ExecutorRef executor) {
  if (k == 0) {
    count_lists(x, begin, infinity, executor);
    return;
  }
  const KthLargest kth = kth_of_lists(x, begin, k, executor);
  count_lists(x, begin, kth.value, executor);
  Index left = k - kth.above;
  for (Index list = begin; list < begin + x.lists; ++list) {
    x.counts[list].ties = std::min(x.counts[list].equal, left);
    left -= x.counts[list].ties;
  }
}

// From the shares of all sequences to a Selection. Each sequence has a threshold of its own. It is
// options.threshold / kv_len, if `least` and the budget allow as many pairs as reach it. Otherwise,
// and if the budget alone decides, it is the one that keeps the nearest number of pairs that is
// allowed.
//
// Then each list gets the forced first keys, the keys that reach the threshold, and the forced last
// keys. A key with a NaN or an infinity ranks last, and does not count for its neighbours.
inline void select_lists(const MassOptions& options, const ListShares& x, Arenas& workers,
                         Selection& selection, ExecutorRef executor) {
  // The pairs of a list and a key to choose, where a list keeps `count` keys on average.
  const auto pairs = [&](Index count) {
    return std::max<Index>(0, count - x.forced.first - x.forced.last) * x.lists;
  };
  for (Index begin = 0; begin < x.batch * x.lists; begin += x.lists) {
    Index wanted = pairs(options.budget.count(x.keys));
    if (options.by_threshold()) {
      const float threshold = options.threshold / static_cast<float>(x.keys);
      const Index reached = count_lists(x, begin, threshold, executor);
      wanted = std::clamp(reached, pairs(options.least_keys(x.keys)), wanted);
      if (wanted == reached) continue;
    }
    cut_lists(x, begin, wanted, executor);
  }
  const ForcedKeys& forced = x.forced;
  Index longest = 0;
  for (Index list = 0; list < x.batch * x.lists; ++list)
    longest =
        std::max(longest, forced.first + x.counts[list].above + x.counts[list].ties + forced.last);
  SelectionWriter writer(selection, x.batch, x.lists, x.keys, longest);
  executor.run(x.batch * x.lists, [&](Index list, int worker) {
    const Index b = list / x.lists, of_sequence = list % x.lists;
    Arena arena = workers[worker];
    Position* const positions = arena.take<Position>(x.keys + compact_slack);
    Position* to = positions;
    for (Index t = 0; t < forced.first; ++t) *to++ = static_cast<Position>(t);
    to +=
        positions_against(x.values(list), x.counts[list], static_cast<Position>(forced.first), to);
    for (Index t = x.keys - forced.last; t < x.keys; ++t) *to++ = static_cast<Position>(t);
    writer.set_count(b, of_sequence, to - positions);
    std::copy(positions, to, writer.row(b, of_sequence).data());
    double share = static_cast<double>(x.kept[list]);  // of the chunk
    for (const Position* t = positions; t < to; ++t)
      share += static_cast<double>(std::max(x.of(list)[*t], 0.0f));
    x.kept[list] = static_cast<float>(std::min(share, 1.0));
  });
  writer.set_kept_shares({x.kept, static_cast<std::size_t>(x.batch * x.lists)});
  writer.commit();
}

}  // namespace detail

QUOKA_FUNC MassScorer::MassScorer(const Options& options) : options_(options) {
  detail::require_at_least("queries", options.queries, 1);
  detail::require_at_least("least", options.least, 0);
  detail::require_at_most("kernel_size", options.kernel_size, "its limit",
                          MassOptions::most_kernel_size);
  if (!(options.threshold >= 0.0f && options.threshold <= detail::most_option))
    detail::fail_range("threshold", static_cast<double>(options.threshold), "[0, 1e30]");
}

// Codes cannot apply a soft-cap.
QUOKA_FUNC bool MassScorer::uses_sketch(const SelectorInput& input) const {
  return input.softcap() == 0.0f && by_codes(options_.sketch);
}

// Is there a sketch of all keys, and do codes serve?
QUOKA_FUNC bool MassScorer::has_codes(const SelectorInput& input, const State& state) const {
  return uses_sketch(input) && state.has_codes(input.k, input.sketch);
}

// By measured costs (tuning::SelectingCosts). Exact attention packs each key once for a KV head and
// multiplies it by all rows. Selecting multiplies it by the voters; attention to the selection
// packs and multiplies the kept keys of each list. Without codes selecting packs every key in float
// as well. Decode is bound by memory. With codes half of the keys took 0.7 to 2.2 times as long as
// all of them. Without codes selecting alone took 1.6 to 8 times as long (Zen 4, five shapes of
// heads).
QUOKA_FUNC bool MassScorer::pays_among(Index keys, bool codes, const SelectorInput& input) const {
  const Index queries = input.q.len(), rows = input.group() * queries,
              kept = options_.expected_keys(keys);
  if (queries == 1) return codes && 4 * kept <= keys;
  if ((!codes && rows < tuning::fewest_rows_without_codes) || 4 * kept > 3 * keys) return false;
  const auto real = [](Index x) { return static_cast<float>(x); };
  const detail::Voters voters(input, options_);
  const tuning::SelectingCosts cost = tuning::selecting_costs(input.in_int8);
  const float votes = real(voters.group * voters.per_head),
              exact = cost.pack + cost.row * real(rows),
              selecting = codes ? cost.voter * votes : cost.float_pack + cost.float_voter * votes,
              of_kept = cost.pack * real(voters.lists_of_kv_head()) + cost.row * real(rows);
  return selecting + real(kept) / real(keys) * of_kept <= exact;
}

QUOKA_FUNC void MassScorer::decide(const SelectorInput& input, State& state, Selection& selection,
                                   ExecutorRef executor) const {
  const Rows &q = input.q, &k = input.k;
  const Index batch = k.batch(), keys = k.len(), capacity = std::max(keys, input.capacity);
  if (options_.least_keys(keys) == keys) return selection.select_all(batch, k.heads(), keys);
  if (options_.budget.count(keys) == 0) return selection.select_none(batch, k.heads(), keys);
  const bool codes = has_codes(input, state),
             selects = !input.attends || pays_among(keys, codes, input);
  // Calls that attend to all keys take the memory, too, if they will select once the cache is full.
  // So a decode loop does not allocate where selecting begins to pay.
  if (!selects && !pays_among(capacity, codes, input))
    return selection.select_all(batch, k.heads(), keys);

  const detail::Voters voters(input, options_);
  const Index lists = k.heads() * voters.lists_of_kv_head(), heads = voters.heads_of_list();
  const auto shares_of = [&](Arena& arena, Index of_keys) {
    return detail::ListShares(arena, options_, batch, lists, of_keys);
  };
  state.call.reserve(1, [&](Arena& arena) { shares_of(arena, capacity); });
  state.workers.reserve(executor.workers(), [&](Arena& arena) {
    arena.take<Position>(capacity + detail::compact_slack);
  });
  selection.reserve(batch * lists, batch * lists * capacity);
  Arena arena = state.call[0];
  const detail::ListShares shares = shares_of(arena, keys);
  const float logit_scale = input.logit_scale();
  const auto fill = [&](Index b, Index list, RowWriter& rows) {
    for (Index head = list * heads; head < (list + 1) * heads; ++head)
      for (Index m = 0; m < voters.per_head; ++m)
        rows.add(q, b, head, voters.position(head % voters.group, m), logit_scale);
  };
  const SoftmaxScoring scoring{.rows = {heads * voters.per_head, k.dim(), q.dim()},
                               .fill = fill,
                               .keys = k,
                               .capacity = capacity,
                               .rule = {.softcap = input.softcap()},
                               .codes = codes ? state.find_codes(k, input.sketch) : std::nullopt,
                               .chunk_k = input.chunk_k,
                               .chunk_scores = shares.kept};
  if (!selects) {
    reserve_softmax_scores(scoring, lists, state.mass, executor);
    return selection.select_all(batch, k.heads(), keys);
  }
  shares.fill_ends();
  softmax_scores(scoring, shares.view(), state.mass, executor);
  detail::select_lists(options_, shares, state.workers, selection, executor);
}

QUOKA_FUNC void MassScorer::appended(const SelectorInput& input, State& state,
                                     ExecutorRef executor) const {
  if (uses_sketch(input) && input.sketch == nullptr)
    state.append(input.k, input.capacity, executor);
}

#endif  // QUOKA_DEFINES

}  // namespace QUOKA_ABI
}  // namespace quoka
