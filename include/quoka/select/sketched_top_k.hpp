// The best keys by cosine, by way of the keys' sketch: the same Selection as from float scores, for
// a fraction of the work.
//
// A kept query q, as code * s with an error of length e, and a key of direction k = scale * code
// with an error of length `error` satisfy
//
//   q . k - s scale (code_q . code_k) = (q - s code_q) . k + s code_q . (k - scale code_k)
//
// and so differ by at most e + (|q| + e) * error, plus what rounding adds to either side. With Q
// the longest kept query and e the largest error among them,
//
//   bound[t] = e + (Q + e) error[t] + (head_dim + rows + 16) 2^-23 Q
//
// holds for the maximum over the queries, and for their mean. The keys fall into four sorts, by the
// n-th best sketched score and a level a little above it:
//
//   sure    sketch - bound above the level: kept, never looked at again
//   near    the others among the n best by the sketch: scored in float; the least of these scores
//           (or the level) is a floor, which n keys reach and so does the n-th best
//   far     the rest of those with sketch + bound at the floor or above: scored in float
//   out     all others
//
// The best of near and far fill what `sure` leaves. Should so many of them reach the level that a
// sure one might have to go, the sure ones are scored too, and the best of all are taken. Float
// scores come from the same kernel in the same order as without the sketch: bit for bit the same
// numbers decide. With a window, a score is its neighbours' maximum: none is sure, and top_k.hpp
// looks at the float scores of near and far, the others being lowest.
//
// 2 * kv_heads * rows * kv_len * head_dim 8-bit operations, and float scores of some 1.3 n keys;
// reads head_dim + 8 bytes per key.
#pragma once

#include <quoka/cache/key_sketch.hpp>
#include <quoka/select/score_keys.hpp>
#include <quoka/select/top_k.hpp>

#include <cassert>

namespace quoka::inline QUOKA_ABI {
namespace detail {

// The kept queries of all KV heads as codes; those of one head share a scale.
struct SketchedQueries {
  Buffer<std::int32_t> codes;   // [batch * kv_heads][steps][rows]: 4 channels of one row
  Buffer<std::int32_t> offset;  // [batch * kv_heads][rows] -128 * sum of codes
  Buffer<float> scale;          // [batch * kv_heads]
  Buffer<float> error, length;  // [batch * kv_heads] the largest; infinity where codes cannot stand
                                // for a query

  void reserve(Index tasks, Index rows, Index dim) {
    codes.reserve(tasks * KeySketch::steps(dim) * rows);
    offset.reserve(tasks * rows);
    scale.reserve(tasks);
    error.reserve(tasks);
    length.reserve(tasks);
  }
  Index bytes() const {
    return codes.bytes() + offset.bytes() + scale.bytes() + error.bytes() + length.bytes();
  }

  // q_bar [rows, dim] of one KV head.
  void encode_head(const float* q_bar, Index task, Index rows, Index dim) {
    std::int32_t* const head = codes.data() + task * KeySketch::steps(dim) * rows;
    std::fill_n(head, KeySketch::steps(dim) * rows, 0);
    std::fill_n(offset.data() + task * rows, rows, 0);
    float longest = 0.0f, most_missed = 0.0f;
    for (Index m = 0; m < rows; ++m) {
      const float of_row = std::sqrt(sum_of_squares(q_bar + m * dim, dim));
      longest = std::isfinite(of_row) ? std::max(longest, of_row) : simd::infinity;
    }
    const float of_codes = code_scale(q_bar, rows * dim);
    if (longest < simd::infinity) {
      auto* const bytes = reinterpret_cast<std::int8_t*>(head);
      for (Index m = 0; m < rows; ++m) {
        std::int32_t sum = 0;
        const auto put = [&](Index c, int code) {
          bytes[(c / code_channels * rows + m) * code_channels + c % code_channels] =
              static_cast<std::int8_t>(code);
          sum += code;
        };
        most_missed = std::max(most_missed, encode(q_bar + m * dim, dim, of_codes, put));
        offset.data()[task * rows + m] = -128 * sum;
      }
    }
    scale.data()[task] = longest < simd::infinity ? of_codes : 0.0f;
    error.data()[task] = longest < simd::infinity ? most_missed : simd::infinity;
    length.data()[task] = longest * (1.0f + 1e-5f);
  }
};

// Scratch of one worker.
struct SketchScratch {
  Buffer<Position> sure, members, ties;  // [kv_len] at most, as the next ones
  Buffer<float> exact, ordered;

  void reserve(Index kv_len) {
    for (auto* positions : {&sure, &members, &ties})
      positions->reserve_amortised(kv_len + compact_slack);
    for (auto* scores : {&exact, &ordered}) scores->reserve_amortised(kv_len + compact_slack);
  }
  Index bytes() const {
    return sure.bytes() + members.bytes() + ties.bytes() + exact.bytes() + ordered.bytes();
  }
};

struct SketchState {
  KeySketch keys;
  SketchedQueries queries;
  Buffer<float> scores;  // [batch, kv_heads, kv_len], by the sketch
  WorkerScratch<SketchScratch> scratch;
  WorkerScratch<TopKScratch> top_k;

  Index bytes() const {
    return keys.bytes() + queries.bytes() + scores.bytes() + scratch.bytes() + top_k.bytes();
  }
};

// scores[begin, end) of one KV head, as the sketch has them; begin and end at blocks, or end at the
// end.
template <CodeScores Over>
void sketch_range(const KeySketch& keys, const SketchedQueries& queries, Index task, Index heads,
                  Index rows, Index dim, Index begin, Index end, float* scores) {
  constexpr Index pair = 2 * code_block;
  const Index steps = KeySketch::steps(dim), b = task / heads, head = task % heads;
  const Index later = tuning::sketch_prefetch_pairs * pair * steps * code_channels;
  const std::int32_t* const codes = queries.codes.data() + task * steps * rows;
  const std::int32_t* const offset = queries.offset.data() + task * rows;
  const float* const of_key = keys.scales(b, head);
  const float scale = queries.scale.data()[task] *
                      (Over == CodeScores::sum ? 1.0f / static_cast<float>(rows) : 1.0f);
  for (Index kv = begin; kv < end; kv += pair) {
    const Index block = kv / code_block, count = std::min(pair, end - kv);
    const std::uint8_t* const of_keys[2] = {
        keys.codes(b, head, block), keys.codes(b, head, block + (count > code_block ? 1 : 0))};
    alignas(64) std::int32_t best[pair];
    std::fill_n(best, pair, Over == CodeScores::sum ? 0 : std::numeric_limits<std::int32_t>::min());
    int8_dots<Over>(of_keys, codes, rows, steps, offset, best, of_keys[0] + later);
    for (Index i = 0; i < count; ++i)
      scores[kv + i] = static_cast<float>(best[i]) * (of_key[kv + i] * scale);
  }
}

// One KV head: sketched scores to its best keys.
template <class T>
class SketchedHead {
 public:
  SketchedHead(const TensorView<const T>& k, const TensorView<const float, 3>& inverse_norms,
               Index task, Index rows, TileScorer& scorer, SketchState& state, int worker)
      : k_(k),
        inverse_norms_(inverse_norms),
        b_(task / k.heads()),
        head_(task % k.heads()),
        scorer_(scorer),
        sketched_(state.scores.data() + task * k.len()),
        errors_(state.keys.errors(b_, head_)),
        s_(state.scratch[worker]),
        top_k_(state.top_k[worker]) {
    const float e = state.queries.error.data()[task], longest = state.queries.length.data()[task];
    slope_ = longest + e;
    constant_ = e + static_cast<float>(k.dim() + rows + 16) * 0x1p-23f * longest;
    // Sketches are off by an eighth of their bound at most, nearly always.
    slack_ = 0.25f * e;
  }

  void select(const TopKOptions& options, std::span<Position> kept) {
    const Index wanted = std::ssize(kept), kv_len = k_.len();
    const Index first = std::min(options.keep_first, wanted);
    const Index last = std::min(options.keep_last, wanted - first);
    const Index free = wanted - first - last, candidates = kv_len - first - last;
    Position* out = kept.data();
    if (options.window > 1 && free > 0) return select_windows(options, first, candidates, kept);
    for (Index i = 0; i < first; ++i) *out++ = static_cast<Position>(i);
    if (free > 0) out = select_best(first, candidates, free, out);
    for (Index i = kv_len - last; i < kv_len; ++i) *out++ = static_cast<Position>(i);
  }

 private:
  // The n-th best sketched score; minus infinity where a query is beyond codes and all keys count.
  float nth_best(const float* sketched, Index n, Index wanted) const {
    if (!std::isfinite(slope_)) return -simd::infinity;
    return kth_largest(sketched, n, wanted, top_k_.bucket.data()).value;
  }

  // The `wanted` best of the keys [first, first + n), ascending, to out; returns their end.
  Position* select_best(Index first, Index n, Index wanted, Position* out) {
    const float nth = nth_best(sketched_ + first, n, wanted), level = nth + slack_;
    Position *const members = s_.members.data(), *const sure_at = s_.sure.data();
    auto [sure, near] = sort_proposed(first, n, nth, level);
    const float floor = std::min(score(0, near), level);
    Index count = near + add_far(first, n, nth, floor, members + near);
    score(near, count);
    const float* const exact = s_.exact.data();
    if (sure > 0 && std::count_if(exact, exact + count, [&](float x) {
                      return ordered_score(x) >= level;
                    }) > wanted - sure) {
      std::copy_n(sure_at, sure, members + count);
      score(count, count + sure);
      count += std::exchange(sure, 0);
    }
    keep_best(wanted - sure, count);
    // What is kept has a sketch above the level now: the sure, and what keep_best took.
    const float least = sure > 0 ? level : simd::infinity;
    return std::copy_n(sure_at, propose(first, n, least, sure_at), out);
  }

  // Sets the sketch of the `wanted` best members by their exact scores to infinity, and that of the
  // other members to minus infinity.
  void keep_best(Index wanted, Index count) {
    const Position* const members = s_.members.data();
    float *const exact = s_.exact.data(), *const bucket = s_.ordered.data();
    for (Index i = 0; i < count; ++i) bucket[i] = exact[i] = ordered_score(exact[i]);
    const auto [least, above] =
        wanted > 0 ? kth_by_bins(bucket, count, wanted) : KthLargest{simd::infinity, 0};
    Index equal = 0;
    for (Index i = 0; i < count; ++i) {
      sketched_[members[i]] = exact[i] > least ? simd::infinity : -simd::infinity;
      s_.ties.data()[equal] = members[i];
      equal += exact[i] == least ? 1 : 0;
    }
    // Of equal ones the earliest; near and far members are two ascending lists.
    Position* const ties = s_.ties.data();
    if (equal > wanted - above) std::sort(ties, ties + equal);
    for (Index i = 0; i < wanted - above; ++i) sketched_[ties[i]] = simd::infinity;
  }

  void select_windows(const TopKOptions& options, Index first, Index candidates,
                      std::span<Position> kept) {
    const Index kv_len = k_.len();
    const Index last = kv_len - first - candidates;
    float* const pooled = pool_window(sketched_, kv_len, options.window, top_k_.pooled.data());
    for (Index kv = 0; kv < kv_len; ++kv)  // a key without codes may be one without a score
      pooled[kv] = errors_[kv] < simd::infinity ? pooled[kv] : -simd::infinity;
    const float nth = nth_best(pooled + first, candidates, std::ssize(kept) - first - last);
    Position* const members = s_.members.data();
    const Index near = propose(0, kv_len, nth, members);
    const float floor = score(0, near);
    const Index count = near + add_far(0, kv_len, nth, floor, members + near);
    score(near, count);
    std::fill_n(sketched_, kv_len, std::numeric_limits<float>::lowest());
    for (Index i = 0; i < count; ++i) sketched_[members[i]] = s_.exact.data()[i];
    top_k_head(sketched_, kv_len, options, kept, top_k_);
  }

  // Keys of [first, first + n) whose sketch reaches nth: the sure ones to s_.sure, the others, near
  // the threshold, to s_.members; their numbers.
  std::pair<Index, Index> sort_proposed(Index first, Index n, float nth, float level) const {
    const float *const x = sketched_ + first, *const errors = errors_ + first;
    PositionList sure{s_.sure.data()}, near{s_.members.data()};
    walk(n, [&](auto at) QUOKA_INLINE_LAMBDA {
      const auto sketched = at.load(x);
      const auto least = simd::sub(
          sketched, simd::fma(at.broadcast(slope_), at.load(errors), at.broadcast(constant_)));
      const unsigned proposed = simd::not_less(sketched, at.broadcast(nth));
      const unsigned above = proposed & simd::less(at.broadcast(level), least);
      sure.add(at, above, static_cast<Position>(first));
      near.add(at, proposed & ~above, static_cast<Position>(first));
    });
    return {sure.count, near.count};
  }

  // Keys of [first, first + n) whose sketch reaches nth, to out.
  Index propose(Index first, Index n, float nth, Position* out) const {
    const float* const x = sketched_ + first;
    return positions_where(n, static_cast<Position>(first), out, [&](auto at) QUOKA_INLINE_LAMBDA {
      return simd::not_less(at.load(x), at.broadcast(nth));
    });
  }

  // The others whose sketch, with its bound, reaches `floor`.
  Index add_far(Index first, Index n, float nth, float floor, Position* out) const {
    const float *const x = sketched_ + first, *const errors = errors_ + first;
    return positions_where(n, static_cast<Position>(first), out, [&](auto at) QUOKA_INLINE_LAMBDA {
      const auto sketched = at.load(x);
      const auto most = simd::add(
          sketched, simd::fma(at.broadcast(slope_), at.load(errors), at.broadcast(constant_)));
      return simd::less(sketched, at.broadcast(nth)) & simd::not_less(most, at.broadcast(floor));
    });
  }

  // Scores members [begin, end) in float; returns the least score, minus infinity if one is not
  // finite.
  float score(Index begin, Index end) {
    const Position* const members = s_.members.data() + begin;
    float* const exact = s_.exact.data() + begin;
    score_positions(k_, inverse_norms_, b_, head_, end - begin, ListedKeys{members}, scorer_,
                    Scoring::cosine, exact);
    float least = simd::infinity;
    for (Index i = 0; i < end - begin; ++i) least = std::min(least, ordered_score(exact[i]));
    return least;
  }

  const TensorView<const T>& k_;
  const TensorView<const float, 3>& inverse_norms_;
  Index b_, head_;
  TileScorer& scorer_;
  float* sketched_;
  const float* errors_;
  SketchScratch& s_;
  TopKScratch& top_k_;
  float slope_, constant_, slack_;
};

// Whether dot products of codes, and their sums over the rows where a mean is wanted, fit 32 bits.
inline bool codes_fit(Index rows, Index dim, Aggregation aggregation) {
  const Index most = dim * 255 * 127 * (aggregation == Aggregation::mean ? rows : 1);
  return most <= std::numeric_limits<std::int32_t>::max();
}

// The Selection that top_k makes of score_all_keys' scores. s.keys has seen all of k; 0 < wanted <
// kv_len keys are selected; codes_fit().
template <class T>
void sketched_top_k(const float* q_bar, Index rows, const TensorView<const T>& k,
                    const TensorView<const float, 3>& inverse_norms, Aggregation aggregation,
                    Index wanted, Index capacity, const TopKOptions& options, Selection& selection,
                    SketchState& s, WorkerScratch<ScoreScratch>& score, ExecutorRef executor) {
  const Index tasks = k.batch() * k.heads(), dim = k.dim(), kv_len = k.len();
  assert(s.keys.len() == kv_len && 0 < wanted && wanted < kv_len);
  const Index parts = ceil_div(kv_len, tuning::sketch_task_keys);
  s.scores.reserve_amortised(tasks * std::max(kv_len, capacity));
  s.queries.reserve(tasks, rows, dim);
  for (Index task = 0; task < tasks; ++task)
    s.queries.encode_head(q_bar + task * rows * dim, task, rows, dim);
  executor.run(tasks * parts, [&](Index part, int) {
    const Index task = part / parts, begin = part % parts * tuning::sketch_task_keys;
    const Index end = std::min(begin + tuning::sketch_task_keys, kv_len);
    const auto scan = aggregation == Aggregation::mean ? sketch_range<CodeScores::sum>
                                                       : sketch_range<CodeScores::max>;
    scan(s.keys, s.queries, task, k.heads(), rows, dim, begin, end,
         s.scores.data() + task * kv_len);
  });
  s.scratch.reserve(executor.workers(), std::max(kv_len, capacity));
  s.top_k.reserve(executor.workers(), std::max(kv_len, capacity), options.window);
  score.reserve(executor.workers(), rows, dim);
  selection.resize(k.batch(), k.heads(), kv_len, wanted);
  executor.run(tasks, [&](Index task, int worker) {
    TileScorer scorer(q_bar + task * rows * dim, rows, dim, aggregation, score[worker]);
    SketchedHead<T>(k, inverse_norms, task, rows, scorer, s, worker)
        .select(options, selection.mutable_row(task / k.heads(), task % k.heads()));
  });
}

}  // namespace detail
}  // namespace quoka::inline QUOKA_ABI
