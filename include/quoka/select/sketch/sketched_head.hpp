// One KV head's keys by their sketched scores: sure, likely, possible or out (sketched_top_k.hpp), in ranges.
//
// Stages, each of one task or of one per range: sample, with the scores; begin, propose (ranges), threshold,
// likely (ranges), possible (ranges), decide, write (ranges). The Selection does not depend on the ranges.
#pragma once

#include <quoka/kernels/compact.hpp>
#include <quoka/base/sort.hpp>
#include <quoka/select/sketch/coded_rows.hpp>
#include <quoka/select/sketch/sketched_call.hpp>
#include <quoka/select/steps/tile_scorer.hpp>
#include <quoka/select/steps/top_k_impl.hpp>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <span>
#include <utility>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// Of a range of a head's keys.
struct RangeCounts {
  Index sure = 0, members = 0, possible = 0;  // members: the likely ones, then those
  float least = 0.0f;                         // score of a likely one
  Index ties = 0;                             // kept of those with the least kept score
  bool all_ties = false;                      // all that there are?
  Index before = 0;                           // kept keys of the ranges before
};

// What the phases of one head leave for each other. Lists are of ranges of keys.
struct SketchedTopKSlot {
  CodedRows queries;      // of one unit
  float longest, missed;  // of the queries, the largest; infinite where codes cannot stand for one
  Buffer<float> scores;   // [keys] by the sketch
  Buffer<float> errors;   // [keys] of the sketch, where its order is another one
  TopKLists proposed;     // by their sketched scores
  Buffer<Position> sure, members, ties;
  Buffer<float> exact;         // scores of the members
  Buffer<float> sample;        // of the sketched scores
  Buffer<std::uint64_t> kept;  // a bit for each key
  Buffer<RangeCounts> ranges;
  float nth, level, least;  // scores

  // reorders: keys do not lie in the sketch's order.
  void reserve(Index kv_len, Index range_count, Index reorders) {
    scores.reserve_amortised(kv_len);
    if (reorders != 0) errors.reserve_amortised(kv_len);
    const Index room = kv_len + range_count * compact_slack;
    proposed.reserve(kv_len);
    for (auto* positions : {&sure, &members, &ties}) positions->reserve_amortised(room);
    exact.reserve_amortised(room);
    sample.reserve(tuning::top_k_samples);
    kept.reserve_amortised(ceil_div(kv_len, 64));
    ranges.reserve(range_count);
  }
  Index bytes() const {
    return bytes_of(queries, scores, errors, proposed, sure, members, ties, exact, sample, kept,
                    ranges);
  }
};

// What the stages of all heads have in common.
struct SketchedHeads {
  const SketchedCall& call;
  Index kv_len, wanted;
  const TopKOptions& options;
  KeyRanges ranges;
};

// One KV head: sketched scores to its best keys.
class SketchedHead {
 public:
  // head: b * kv_heads + kv_head. errors: what the codes of each key miss of its direction. top_k, score: the worker's.
  SketchedHead(const SketchedHeads& heads, const HeadKeys& keys, Index head, const float* errors,
               SketchedTopKSlot& slot, TopKScratch& top_k, ScoreScratch& score)
      : heads_(heads),
        keys_(keys),
        q_bar_(heads.call.rows_of(head)),
        sketched_(slot.scores.data()),
        errors_(errors),
        c_(slot),
        top_k_(top_k),
        score_(score),
        bucket_(top_k.bucket.data()) {
    slope_ = slot.longest + slot.missed;
    constant_ =
        slot.missed + static_cast<float>(keys.dim + heads.call.rows + 16) * 0x1p-23f * slot.longest;
    // Heuristic; changes speed, never the result. Measured: sketches are off by less than missed / 8, so
    // missed / 4 leaves room.
    slack_ = 0.25f * slot.missed;
    first_ = std::min(heads.options.keep_first, heads.wanted);
    last_ = std::min(heads.options.keep_last, heads.wanted - first_);
    free_ = heads.wanted - first_ - last_;
  }

  // Of keys [begin, end), whose scores are there, those in the sample: other workers' caches hold them later.
  void sample(Index begin, Index end) {
    const Index step = sample_step(candidates());
    if (step == 0) return;
    const Index last =
        std::min(ceil_div(std::max<Index>(end - first_, 0), step), tuning::top_k_samples);
    for (Index i = ceil_div(std::max<Index>(begin - first_, 0), step); i < last; ++i)
      c_.sample.data()[i] = sketched_[first_ + i * step];
  }

  // A score that some more than the wanted keys reach.
  void begin() {
    c_.proposed.pivot = -simd::infinity;
    // Where a query is beyond codes all keys count.
    if (free_ > 0 && std::isfinite(slope_))
      c_.proposed.pivot = sampled_pivot(candidates(), free_, c_.sample.data());
  }

  // The keys of range r that reach it.
  void propose(Index r) {
    const auto [begin, end] = range(r);
    c_.proposed.propose(heads_.ranges, r, begin, end, sketched_ + begin);
    counts(r) = {};
  }

  // The n-th best sketched score; minus infinity where a query is beyond codes.
  void threshold() {
    c_.nth = -simd::infinity;
    if (free_ > 0 && std::isfinite(slope_)) {
      Index count = c_.proposed.gather(heads_.ranges, bucket_);
      if (count < free_) {  // the sample was not fair
        c_.proposed.pivot = -simd::infinity;
        for (Index r = 0; r < heads_.ranges.count; ++r) propose(r);
        count = candidates();
        std::copy_n(sketched_ + first_, count, bucket_);
      }
      c_.nth = kth_by_bins(bucket_, count, free_).value;
    }
    c_.level = std::isfinite(slope_) ? c_.nth + slack_ : -simd::infinity;
  }

  // Of the proposed keys of range r that reach the n-th best: the sure ones, and the others, near the
  // threshold, which are scored.
  void likely(Index r) {
    if (free_ == 0) return;
    const Position* const proposed = c_.proposed.positions.data() + heads_.ranges.room(r);
    const float* const values = c_.proposed.values.data() + heads_.ranges.room(r);
    Position *const sure = c_.sure.data() + heads_.ranges.room(r), *const members =
                                                                       this->members(r);
    RangeCounts& n = counts(r);
    for (Index i = 0, count = c_.proposed.counts.data()[r]; i < count; ++i) {
      const Position key = proposed[i];
      sure[n.sure] = members[n.members] = key;
      const bool reaches = !(values[i] < c_.nth);
      const bool above = reaches && c_.level < values[i] - bound(key);
      n.sure += above ? 1 : 0;
      n.members += reaches && !above ? 1 : 0;
    }
    n.least = score(r, 0, n.members);
  }

  // The others whose sketch, with its bound, reaches the least score of the likely ones.
  void possible(Index r) {
    if (free_ == 0) return;
    float floor = c_.level;
    for (Index i = 0; i < heads_.ranges.count; ++i) floor = std::min(floor, counts(i).least);
    const auto [begin, end] = range(r);
    RangeCounts& n = counts(r);
    n.possible = may_reach(floor, begin, end, c_.nth, members(r) + n.members);
    score(r, n.members, n.members + n.possible);
  }

  // How many of each range are kept, and from which score on. Writes the forced ones.
  void decide(std::span<Position> kept) {
    for (Index i = 0; i < first_; ++i) kept[static_cast<std::size_t>(i)] = static_cast<Position>(i);
    Position* const last = kept.data() + first_ + free_;
    for (Index i = 0; i < last_; ++i) last[i] = static_cast<Position>(heads_.kv_len - last_ + i);
    if (free_ > 0) count_best();
  }

  // The kept ones of range r, ascending, where they belong.
  void write(Index r, std::span<Position> kept) {
    if (free_ == 0) return;
    const RangeCounts& n = counts(r);
    const float* const exact = c_.exact.data() + heads_.ranges.room(r);
    const auto [begin, end] = heads_.ranges.of(r);
    // A bit for each key: ranges begin at words.
    std::uint64_t* const bits = c_.kept.data();
    std::fill(bits + begin / 64, bits + ceil_div(end, 64), std::uint64_t{0});
    const auto keep = [bits](Position key,
                             bool is_kept = true) {  // without a branch that nobody foresees
      bits[key / 64] |= static_cast<std::uint64_t>(is_kept) << (key % 64);
    };
    for (Index i = 0; i < n.sure; ++i) keep(c_.sure.data()[heads_.ranges.room(r) + i]);
    for (Index i = 0; i < n.members + n.possible; ++i) {
      const float value = ordered_score(exact[i]);
      keep(members(r)[i], value > c_.least || (n.all_ties && value == c_.least));
    }
    if (!n.all_ties) keep_earliest_ties(r, keep);
    Position* out = kept.data() + first_ + n.before;
    for (Index word = begin / 64; word < ceil_div(end, 64); ++word)
      for (std::uint64_t left = bits[word]; left != 0; left &= left - 1)
        *out++ = static_cast<Position>(word * 64 + std::countr_zero(left));
  }

  // With a window all of it at once: a score is its neighbours' maximum.
  void select_windows(std::span<Position> kept) {
    const Index kv_len = heads_.kv_len, candidates = this->candidates();
    if (free_ > 0) {
      float* const pooled =
          pool_window(sketched_, kv_len, heads_.options.window, top_k_.pooled.data());
      for (Index kv = 0; kv < kv_len; ++kv)  // a key without codes may be one without a score
        pooled[kv] = errors_[kv] < simd::infinity ? pooled[kv] : -simd::infinity;
      const float nth = std::isfinite(slope_)
                            ? kth_largest(pooled + first_, candidates, free_, bucket_).value
                            : -simd::infinity;
      RangeCounts& n = counts(0) = {};
      n.members = positions_where(kv_len, 0, members(0), [&](auto at) QUOKA_INLINE_LAMBDA {
        return simd::not_less(at.load(sketched_), at.broadcast(nth));
      });
      const float floor = score(0, 0, n.members);
      n.possible = may_reach(floor, 0, kv_len, nth, members(0) + n.members);
      score(0, n.members, n.members + n.possible);
      std::fill_n(sketched_, kv_len, std::numeric_limits<float>::lowest());
      for (Index i = 0; i < n.members + n.possible; ++i)
        sketched_[members(0)[i]] = c_.exact.data()[i];
    }
    top_k_head(sketched_, kv_len, heads_.options, kept, top_k_);
  }

 private:
  Index candidates() const { return heads_.kv_len - first_ - last_; }
  std::pair<Index, Index> range(Index r) const {
    const auto [begin, end] = heads_.ranges.of(r);
    const Index from = std::clamp(begin, first_, heads_.kv_len - last_);
    return {from, std::clamp(end, from, heads_.kv_len - last_)};
  }
  RangeCounts& counts(Index r) const { return c_.ranges.data()[r]; }
  Position* members(Index r) const { return c_.members.data() + heads_.ranges.room(r); }
  float bound(Index key) const { return simd::fma(slope_, errors_[key], constant_); }

  // Those of keys [begin, end) whose sketch is below `nth`, and with its bound not below `floor`.
  Index may_reach(float floor, Index begin, Index end, float nth, Position* to) const {
    const float *const x = sketched_ + begin, *const errors = errors_ + begin;
    return positions_where(
        end - begin, static_cast<Position>(begin), to, [&](auto at) QUOKA_INLINE_LAMBDA {
          const auto sketched = at.load(x);
          const auto most = simd::add(
              sketched, simd::fma(at.broadcast(slope_), at.load(errors), at.broadcast(constant_)));
          return simd::less(sketched, at.broadcast(nth)) &
                 simd::not_less(most, at.broadcast(floor));
        });
  }

  void count_best() {
    const KeyRanges& ranges = heads_.ranges;
    Index sure = 0, count = 0, above_level = 0;
    for (Index r = 0; r < ranges.count; ++r) {
      const float* const exact = c_.exact.data() + ranges.room(r);
      sure += counts(r).sure;
      for (Index i = 0; i < counts(r).members + counts(r).possible; ++i) {
        bucket_[count++] = ordered_score(exact[i]);
        above_level += bucket_[count - 1] >= c_.level ? 1 : 0;
      }
    }
    if (sure > 0 &&
        above_level > free_ - sure) {  // a sure one might have to go: they are scored, too
      for (Index r = 0; r < ranges.count; ++r) {
        RangeCounts& n = counts(r);
        const Index end = n.members + n.possible;
        std::copy_n(c_.sure.data() + ranges.room(r), n.sure, members(r) + end);
        score(r, end, end + n.sure);
        for (Index i = end; i < end + n.sure; ++i)
          bucket_[count++] = ordered_score(c_.exact.data()[ranges.room(r) + i]);
        n.possible += n.sure, n.sure = 0;
      }
      sure = 0;
    }
    const Index wanted = free_ - sure;
    const auto [least, above] =
        wanted > 0 ? kth_by_bins(bucket_, count, wanted) : KthLargest{simd::infinity, 0};
    c_.least = least;
    Index ties = wanted - above, before = 0;  // of equal ones the earliest
    for (Index r = 0; r < ranges.count; ++r) {
      RangeCounts& n = counts(r);
      const float* const exact = c_.exact.data() + ranges.room(r);
      Index larger = 0, equal = 0;
      for (Index i = 0; i < n.members + n.possible; ++i) {
        const float value = ordered_score(exact[i]);
        larger += value > least ? 1 : 0, equal += value == least ? 1 : 0;
      }
      n.ties = std::min(equal, ties), n.all_ties = n.ties == equal;
      n.before = before;
      ties -= n.ties, before += n.sure + larger + n.ties;
    }
  }

  // The first ones by position: the possible ones of a range lie behind the likely ones.
  template <class Keep>
  void keep_earliest_ties(Index r, Keep&& keep) {
    const RangeCounts& n = counts(r);
    const float* const exact = c_.exact.data() + heads_.ranges.room(r);
    Position* const ties = c_.ties.data() + heads_.ranges.room(r);
    Index equal = 0;
    for (Index i = 0; i < n.members + n.possible; ++i)
      if (ordered_score(exact[i]) == c_.least) ties[equal++] = members(r)[i];
    sort(ties, equal, [](Position x, Position y) { return x < y; });
    for (Index i = 0; i < n.ties; ++i) keep(ties[i]);
  }

  // Scores members [begin, end) of range r in float; returns the least score, minus infinity if one is
  // not finite.
  float score(Index r, Index begin, Index end) {
    float least = simd::infinity;
    if (begin == end) return least;
    const Position* const keys = members(r) + begin;
    float* const exact = c_.exact.data() + heads_.ranges.room(r) + begin;
    TileScorer scorer(q_bar_, heads_.call.rows, keys_.dim, heads_.call.aggregation, score_);
    score_keys_of_head(keys_, {0, keys}, end - begin, scorer, exact);
    for (Index i = 0; i < end - begin; ++i) {
      least = std::min(least, ordered_score(exact[i]));
      require_within_bound(keys[i], exact[i]);
    }
    return least;
  }
  // A float score beyond the bound of its sketch is one of another key.
  void require_within_bound(Index kv, float exact) const {
    if (std::abs(exact - sketched_[kv]) > bound(kv)) [[unlikely]]
      fail_other_key(
          kv,
          "not the one that was sketched (its cache changed and the sketch was not told, "
          "or its inverse norm is not its own), of",
          heads_.kv_len);
  }

  const SketchedHeads& heads_;
  HeadKeys keys_;
  const float* q_bar_;
  float* sketched_;
  const float* errors_;
  SketchedTopKSlot& c_;
  TopKScratch& top_k_;
  ScoreScratch& score_;
  float* bucket_;
  float slope_, constant_, slack_;
  Index first_, last_, free_;
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
