// Definitions of sketched_top_k.hpp.
#pragma once

#include <quoka/cache/key_sketch_impl.hpp>
#include <quoka/select/sketch/sketched_head.hpp>
#include <quoka/select/sketch/sketched_top_k.hpp>
#include <quoka/simd/code_dots.hpp>

#include <algorithm>
#include <cassert>
#include <cmath>
#include <limits>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

QUOKA_FUNC bool sketch_is_fast() { return simd::has_fast_code_dots; }

QUOKA_FUNC void SketchedQueries::encode_head(const float* q_bar, Index task, Index rows,
                                             Index dim) {
  std::int32_t* const head = codes.data() + task * simd::code_steps(dim) * rows;
  std::fill_n(head, simd::code_steps(dim) * rows, 0);
  std::fill_n(offset.data() + task * rows, rows, 0);
  float longest = 0.0f, most_missed = 0.0f;
  for (Index m = 0; m < rows; ++m) {
    const float of_row = std::sqrt(sum_of_squares(q_bar + m * dim, dim));
    longest = std::isfinite(of_row) ? std::max(longest, of_row) : simd::infinity;
  }
  const float of_codes = code_scale(q_bar, rows * dim);
  // All zeros are coded; shorter queries than codes stand for are not.
  if (longest > most_coded_length || (of_codes > 0.0f && longest < least_coded_length))
    longest = simd::infinity;
  if (longest < simd::infinity) {
    auto* const bytes = reinterpret_cast<std::int8_t*>(head);
    for (Index m = 0; m < rows; ++m) {
      std::int32_t sum = 0;
      const auto put = [&](Index c, int code) {
        bytes[simd::query_code_at(rows, m, c)] = static_cast<std::int8_t>(code);
        sum += code;
      };
      most_missed = std::max(most_missed, encode(q_bar + m * dim, dim, of_codes, put));
      offset.data()[task * rows + m] = simd::code_offset(sum);
    }
  }
  scale.data()[task] = longest < simd::infinity ? of_codes : 0.0f;
  error.data()[task] = longest < simd::infinity ? most_missed : simd::infinity;
  length.data()[task] = longest * (1.0f + 1e-5f);
}

// scores[begin, end) of one KV head, as the sketch has them; begin and end at blocks, or end at the
// end.
template <simd::CodeScores Over>
void sketch_range(const KeySketch& keys, const SketchedQueries& queries, Index task, Index heads,
                  Index rows, Index dim, Index begin, Index end, float* scores) {
  constexpr Index pair = 2 * simd::code_block;
  const Index steps = simd::code_steps(dim), b = task / heads, head = task % heads;
  const Index later = tuning::sketch_prefetch_pairs * pair * steps * simd::code_channels;
  const std::int32_t* const codes = queries.codes.data() + task * steps * rows;
  const std::int32_t* const offset = queries.offset.data() + task * rows;
  const float* const of_key = keys.scales(b, head);
  const float scale = queries.scale.data()[task] *
                      (Over == simd::CodeScores::sum ? 1.0f / static_cast<float>(rows) : 1.0f);
  for (Index kv = begin; kv < end; kv += pair) {
    const Index block = kv / simd::code_block, count = std::min(pair, end - kv);
    const std::uint8_t* const of_keys[2] = {
        keys.codes(b, head, block),
        keys.codes(b, head, block + (count > simd::code_block ? 1 : 0))};
    alignas(64) std::int32_t best[pair];
    std::fill_n(best, pair,
                Over == simd::CodeScores::sum ? 0 : std::numeric_limits<std::int32_t>::min());
    simd::code_dots<Over>(of_keys, codes, rows, steps, offset, best, of_keys[0] + later);
    for (Index i = 0; i < count; ++i)
      scores[kv + i] = static_cast<float>(best[i]) * (of_key[kv + i] * scale);
  }
}

QUOKA_FUNC bool codes_fit(Index rows, Index dim, Aggregation aggregation) {
  const Index most = dim * 255 * 127 * (aggregation == Aggregation::mean ? rows : 1);
  return most <= std::numeric_limits<std::int32_t>::max();
}

QUOKA_FUNC void sketched_top_k(const float* q_bar, Index rows, const Rows& k,
                               const TensorView<const float, 3>& inverse_norms,
                               Aggregation aggregation, Index wanted, Index capacity,
                               const TopKOptions& options, Selection& selection, SketchState& s,
                               WorkerScratch<ScoreScratch>& score, ExecutorRef executor) {
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
    const auto scan = aggregation == Aggregation::mean ? sketch_range<simd::CodeScores::sum>
                                                       : sketch_range<simd::CodeScores::max>;
    scan(s.keys, s.queries, task, k.heads(), rows, dim, begin, end,
         s.scores.data() + task * kv_len);
  });
  s.scratch.reserve(executor.workers(), std::max(kv_len, capacity));
  s.top_k.reserve(executor.workers(), std::max(kv_len, capacity), options.window);
  score.reserve(executor.workers(), &k.format(), rows, dim);
  SelectionWriter writer(selection, k.batch(), k.heads(), kv_len, wanted);
  executor.run(tasks, [&](Index task, int worker) {
    TileScorer scorer(k.format(), q_bar + task * rows * dim, rows, dim, aggregation, score[worker]);
    SketchedHead(k, inverse_norms, task, rows, scorer, s, worker)
        .select(options, writer.row(task / k.heads(), task % k.heads()));
  });
  writer.commit();
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
