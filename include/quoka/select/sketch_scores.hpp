// Cosine scores by way of the keys' sketch: the same Selection as from float scores, for a fraction
// of the work.
//
// A kept query q, as code * s_q with an error of length e, and a key of direction k = scale * code
// with an error of length `error` satisfy
//
//   q . k - s_q scale (code_q . code_k) = (q - s_q code_q) . k + s_q code_q . (k - scale code_k)
//
// and so differ by at most e + (|q| + e) * error, plus what rounding adds to either side. With Q
// the longest kept query and e the largest error among them,
//
//   bound[t] = e + (Q + e) error[t] + (head_dim + rows + 16) 2^-23 Q
//
// holds for the maximum over the queries, and for their mean. The n best keys by the sketch are
// scored in float; the least of these scores is a floor for the n-th best. Whoever has sketch +
// bound below it is out; all others, about as many again, are scored in float too, by the same
// kernel and in the same order as without the sketch: bit for bit the same scores decide. The rest
// get the lowest float. Windows and forced keys enter as they do in top_k.hpp. 2 * kv_heads * rows
// * kv_len * head_dim 8-bit operations, a quarter of the time with VNNI; reads head_dim + 8 bytes
// per key.
#pragma once

#include <quoka/cache/key_sketch.hpp>
#include <quoka/select/score_keys.hpp>
#include <quoka/select/top_k.hpp>

#include <cassert>

namespace quoka::inline QUOKA_ABI {
namespace detail {

// The kept queries of all KV heads as codes.
struct SketchedQueries {
  Buffer<std::int32_t> codes;   // [batch * kv_heads][steps][rows]: 4 channels of one row
  Buffer<std::int32_t> offset;  // [batch * kv_heads][rows] -128 * sum of codes
  Buffer<float> scales;         // [batch * kv_heads][rows]
  Buffer<float> error, length;  // [batch * kv_heads] the largest

  void reserve(Index tasks, Index rows, Index dim) {
    codes.reserve(tasks * KeySketch::steps(dim) * rows);
    offset.reserve(tasks * rows);
    scales.reserve(tasks * rows);
    error.reserve(tasks);
    length.reserve(tasks);
  }
  Index bytes() const {
    return codes.bytes() + offset.bytes() + scales.bytes() + error.bytes() + length.bytes();
  }

  // q_bar [rows, dim] of one KV head.
  void encode_head(const float* q_bar, Index task, Index rows, Index dim) {
    const Index steps = KeySketch::steps(dim);
    std::int32_t* const head = codes.data() + task * steps * rows;
    std::fill_n(head, steps * rows, 0);
    float most_missed = 0.0f, longest = 0.0f;
    for (Index m = 0; m < rows; ++m) {
      const float* q = q_bar + m * dim;
      std::int32_t sum = 0;
      float missed = 0.0f;
      auto* const bytes = reinterpret_cast<std::int8_t*>(head);
      scales.data()[task * rows + m] = encode(q, dim, missed, [&](Index c, int code) {
        bytes[(c / code_channels * rows + m) * code_channels + c % code_channels] =
            static_cast<std::int8_t>(code);
        sum += code;
      });
      offset.data()[task * rows + m] = -128 * sum;
      most_missed = std::max(most_missed, missed);
      longest = std::max(longest, std::sqrt(sum_of_squares(q, dim)));
    }
    error.data()[task] = most_missed;
    length.data()[task] = longest * (1.0f + 1e-5f);
  }
};

// Scratch of one worker.
struct SketchScratch {
  Buffer<float> sketched;    // [kv_len]
  Buffer<Position> members;  // [kv_len] at most: keys to score in float

  void reserve(Index kv_len) {
    sketched.reserve_amortised(kv_len);
    members.reserve_amortised(kv_len);
  }
  Index bytes() const { return sketched.bytes() + members.bytes(); }
};

struct SketchState {
  KeySketch keys;
  SketchedQueries queries;
  WorkerScratch<SketchScratch> scratch;
  WorkerScratch<TopKScratch> top_k;

  Index bytes() const { return keys.bytes() + queries.bytes() + scratch.bytes() + top_k.bytes(); }
};

// scores[begin, end) of one KV head, as the sketch has them; begin and end at blocks, or end at the
// end.
template <CodeScores Over>
void sketch_range(const KeySketch& keys, const SketchedQueries& queries, Index task, Index heads,
                  Index rows, Index dim, Index begin, Index end, float* scores) {
  constexpr Index tile = 16;
  const Index steps = KeySketch::steps(dim), b = task / heads, head = task % heads;
  const std::int32_t* const codes = queries.codes.data() + task * steps * rows;
  const std::int32_t* const offset = queries.offset.data() + task * rows;
  const float* const scales = queries.scales.data() + task * rows;
  const float* const of_key = keys.scales(b, head);
  const float share = Over == CodeScores::sum ? 1.0f / static_cast<float>(rows) : 1.0f;
  for (Index kv = begin; kv < end; kv += code_block) {
    const Index block = kv / code_block;
    const std::uint8_t* const of_keys = keys.codes(b, head, block);
    alignas(64) float best[code_block];
    std::fill_n(best, code_block, Over == CodeScores::sum ? 0.0f : -simd::infinity);
    Index m = 0;
    for (; m + tile <= rows; m += tile)
      int8_scores<tile, Over>(of_keys, codes + m, rows, steps, offset + m, scales + m, best);
    for (; m < rows; ++m)
      int8_scores<1, Over>(of_keys, codes + m, rows, steps, offset + m, scales + m, best);
    const Index count = std::min(code_block, end - kv);
    for (Index i = 0; i < count; ++i) scores[kv + i] = best[i] * (of_key[kv + i] * share);
  }
}

// Of one KV head: sketched scores in, out come the float scores of those keys that may be among the
// n best, and the lowest float for all others.
template <class T>
class Rescorer {
 public:
  Rescorer(const TensorView<const T>& k, const TensorView<const float, 3>& inverse_norms,
           Index task, TileScorer& scorer, float* scores, SketchScratch& scratch)
      : k_(k),
        inverse_norms_(inverse_norms),
        b_(task / k.heads()),
        head_(task % k.heads()),
        scorer_(scorer),
        scores_(scores),
        sketched_(scratch.sketched.data()),
        members_(scratch.members.data()) {
    std::copy_n(scores, k.len(), sketched_);
    std::fill_n(scores, k.len(), std::numeric_limits<float>::lowest());
  }

  // Scores in float the keys for which wanted(kv) holds; returns the least of these scores.
  template <class Wanted>
  float score(Wanted&& wanted) {
    Index count = 0;
    for (Index kv = 0; kv < k_.len(); ++kv) {
      members_[count] = static_cast<Position>(kv);
      count += wanted(kv) ? 1 : 0;
    }
    float least = simd::infinity;
    constexpr Index tile = tuning::tile_rows, ahead = tuning::score_prefetch_tiles * tile;
    const T *row[tile], *later[tile];
    float result[tile];
    for (Index i = 0; i < count; i += tile) {
      const Index n = std::min(tile, count - i);
      for (Index j = 0; j < n; ++j) row[j] = k_.row(b_, head_, members_[i + j]);
      const Index later_n = std::clamp<Index>(count - i - ahead, 0, tile);
      for (Index j = 0; j < later_n; ++j) later[j] = k_.row(b_, head_, members_[i + ahead + j]);
      scorer_.score(row, n, result, RowPrefetch<T>(later, later_n, k_.dim()));
      for (Index j = 0; j < n; ++j) {
        const Index kv = members_[i + j];
        const float inverse = inverse_norms_.absent() ? inverse_norm(row[j], k_.dim())
                                                      : inverse_norms_.at(b_, head_, kv);
        scores_[kv] = result[j] * inverse;
        if (!(scores_[kv] >= least))
          least = std::isfinite(scores_[kv]) ? scores_[kv] : -simd::infinity;
      }
    }
    return least;
  }
  const float* sketched() const { return sketched_; }

 private:
  const TensorView<const T>& k_;
  const TensorView<const float, 3>& inverse_norms_;
  Index b_, head_;
  TileScorer& scorer_;
  float* scores_;
  float* sketched_;
  Position* members_;
};

template <class T>
void rescore_head(const TensorView<const T>& k, const TensorView<const float, 3>& inverse_norms,
                  Index task, TileScorer& scorer, Index rows, Index wanted,
                  const TopKOptions& options, const SketchState& s, float* scores,
                  SketchScratch& scratch, TopKScratch& top_k) {
  const Index kv_len = k.len();
  const float e = s.queries.error.data()[task], longest = s.queries.length.data()[task];
  const float rounding = static_cast<float>(k.dim() + rows + 16) * 0x1p-23f * longest + e;
  const float *const errors = s.keys.errors(task / k.heads(), task % k.heads()),
                     slope = longest + e;

  // The n best by the sketch. A NaN, which no code stands for, is never below anything.
  const float* pooled = scores;
  if (options.window > 1) pooled = pool_window(scores, kv_len, options.window, top_k.pooled.data());
  const Index first = std::min(options.keep_first, wanted);
  const Index last = std::min(options.keep_last, wanted - first);
  const float nth = nth_score(pooled + first, kv_len - first - last, wanted - first - last,
                              top_k.ranks.data(), top_k.bucket.data());
  Rescorer<T> rescorer(k, inverse_norms, task, scorer, scores, scratch);
  const float* const sketched = rescorer.sketched();
  const float floor = rescorer.score([&](Index kv) { return !(sketched[kv] < nth); });
  if (floor == simd::infinity) return;  // none is wanted
  rescorer.score([&](Index kv) {
    return sketched[kv] < nth && !(sketched[kv] + (rounding + slope * errors[kv]) < floor);
  });
}

// scores [batch, kv_heads, kv_len] from which top_k makes the Selection that it would make of
// score_all_keys' ones. s.keys has seen all of k; wanted < kv_len keys are selected.
template <class T, class E>
void sketched_scores(const float* q_bar, Index rows, const TensorView<const T>& k,
                     const TensorView<const float, 3>& inverse_norms, Aggregation aggregation,
                     Index wanted, Index capacity, const TopKOptions& options, float* scores,
                     SketchState& s, WorkerScratch<ScoreScratch>& score, E&& executor) {
  const Index tasks = k.batch() * k.heads(), dim = k.dim(), kv_len = k.len();
  assert(s.keys.len() == kv_len && wanted < kv_len);
  const Index parts = ceil_div(kv_len, tuning::sketch_task_keys);
  s.queries.reserve(tasks, rows, dim);
  for (Index task = 0; task < tasks; ++task)
    s.queries.encode_head(q_bar + task * rows * dim, task, rows, dim);
  executor.run(tasks * parts, [&](Index part, int) {
    const Index task = part / parts, begin = part % parts * tuning::sketch_task_keys;
    const Index end = std::min(begin + tuning::sketch_task_keys, kv_len);
    const auto scan = aggregation == Aggregation::mean ? sketch_range<CodeScores::sum>
                                                       : sketch_range<CodeScores::max>;
    scan(s.keys, s.queries, task, k.heads(), rows, dim, begin, end, scores + task * kv_len);
  });
  s.scratch.reserve(executor.workers(), std::max(kv_len, capacity));
  s.top_k.reserve(executor.workers(), std::max(kv_len, capacity), options.window);
  score.reserve(executor.workers(), rows, dim);
  executor.run(tasks, [&](Index task, int worker) {
    TileScorer scorer(q_bar + task * rows * dim, rows, dim, aggregation, score[worker]);
    rescore_head(k, inverse_norms, task, scorer, rows, wanted, options, s, scores + task * kv_len,
                 s.scratch[worker], s.top_k[worker]);
  });
}

}  // namespace detail
}  // namespace quoka::inline QUOKA_ABI
