// Definitions of sketched_top_k.hpp.
#pragma once

#include <quoka/cache/key_sketch_impl.hpp>
#include <quoka/matrix/code_units.hpp>
#include <quoka/select/sketch/code_blocks.hpp>
#include <quoka/select/sketch/sketched_head.hpp>
#include <quoka/select/sketch/sketched_top_k.hpp>
#include <quoka/simd/code_rows.hpp>

#include <algorithm>
#include <cassert>
#include <cmath>
#include <limits>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

QUOKA_FUNC bool sketch_is_fast() { return simd::code_dots_beat_float; }
QUOKA_FUNC bool code_rows_are_fast(Index rows) { return rows >= simd::code_rows_least_queries; }

QUOKA_FUNC void SketchedQueries::encode_head(const float* q_bar, Index task, Index rows,
                                             Index dim) {
  const Index groups = ceil_div(dim, code_group);
  std::int32_t* const head = codes.data() + task * steps(dim) * rows;
  std::int32_t* const of_groups = group_offset.data() + task * groups * rows;
  std::fill_n(head, steps(dim) * rows, 0);
  std::fill_n(offset.data() + task * rows, rows, 0);
  std::fill_n(of_groups, groups * rows, 0);
  float longest = 0.0f, most_missed = 0.0f;
  for (Index m = 0; m < rows; ++m) {
    const float of_row = std::sqrt(sum_of_squares(q_bar + m * dim, dim));
    longest = std::isfinite(of_row) ? std::max(longest, of_row) : simd::infinity;
  }
  float of_codes = code_scale(q_bar, rows * dim);
  for (Index m = 0; m < rows; ++m)
    of_codes = std::max(of_codes, simd::run_scale(q_bar + m * dim, dim));
  // All zeros are coded; shorter queries than codes stand for are not.
  const bool zero = std::all_of(q_bar, q_bar + rows * dim, [](float x) { return x == 0.0f; });
  if (longest > most_coded_length || (!zero && longest < least_coded_length))
    longest = simd::infinity;
  if (longest < simd::infinity) {
    for (Index m = 0; m < rows; ++m) {
      std::int32_t sum = 0;
      const auto put = [&](Index first, Index n, const std::int8_t* of_row) {
        simd::store_query_codes(of_row, n, rows, m, first, head);
        for (Index c = 0; c < n; c += code_group) {
          const std::int32_t of_group = simd::sum_of_codes<code_group>(of_row + c);
          of_groups[(first + c) / code_group * rows + m] = simd::code_offset(of_group);
          sum += of_group;
        }
      };
      most_missed = std::max(most_missed, encode(q_bar + m * dim, dim, of_codes, put));
      offset.data()[task * rows + m] = simd::code_offset(sum);
    }
  }
  scale.data()[task] = longest < simd::infinity ? of_codes : 0.0f;
  error.data()[task] = longest < simd::infinity ? most_missed : simd::infinity;
  length.data()[task] = longest * (1.0f + 1e-5f);
}

static_assert(code_group == simd::code_row_group && code_slab % code_group == 0);

// Of KV head `task`.
inline QueryCodes query_codes(const SketchedQueries& queries, Index task, Index rows, Index dim) {
  return {queries.codes.data() + task * SketchedQueries::steps(dim) * rows,
          queries.offset.data() + task * rows, rows, rows, simd::code_steps(dim)};
}

// One KV head's keys and queries as codes, and where scores and errors go.
class SketchScan {
 public:
  SketchScan(const SketchedQueries& queries, Index task, Index heads, Index rows, Index dim,
             Aggregation aggregation, float* scores, float* errors)
      : b_(task / heads),
        head_(task % heads),
        rows_(rows),
        dim_(dim),
        codes_(queries.codes.data() + task * SketchedQueries::steps(dim) * rows),
        group_offset_(queries.group_offset.data() + task * ceil_div(dim, code_group) * rows),
        mean_(aggregation == Aggregation::mean),
        scale_(queries.scale.data()[task] * (mean_ ? 1.0f / static_cast<float>(rows) : 1.0f)),
        scores_(scores),
        errors_(errors) {}

  // Keys [begin, end) in the order of their sketch; begin and end at blocks, or end at the end. unit:
  // holds the queries.
  template <class Unit>
  void in_order(Unit& unit, const KeySketch& keys, Index begin, Index end) const {
    const Index block_bytes = simd::code_block_bytes(dim_);
    const Index later = 2 * tuning::sketch_prefetch_pairs * block_bytes;
    const float* const of_key = keys.scales(b_, head_);
    for (Index kv = begin; kv < end; kv += pair) {
      const Index block = kv / simd::code_block, count = std::min(pair, end - kv);
      const std::uint8_t* const of_keys[2] = {
          keys.codes(b_, head_, block),
          keys.codes(b_, head_, block + (count > simd::code_block ? 1 : 0))};
      score_pair(unit, of_keys, {of_keys[0] + later, of_keys[0] + later + block_bytes}, of_key + kv,
                 kv, count);
    }
  }

  // Keys [begin, end), key i at place places(i) of the sketch. Blocks that lie there as they are
  // wanted are read in place, others are put together.
  template <class Unit>
  void at_places(Unit& unit, const KeySketch& keys, const KeySketch::Places& places, Index begin,
                 Index end) const {
    const CodeBlocks blocks(keys, &places, end, b_, head_, dim_, gathered_);
    const float *const scales = keys.scales(b_, head_), *const errors = keys.errors(b_, head_);
    alignas(64) float of_key[pair];
    for (Index kv = begin; kv < end; kv += pair) {
      const Index count = std::min(pair, end - kv);
      const std::uint8_t* of_keys[2] = {};
      for (Index half = 0; half < 2; ++half) {
        const Index first = kv + half * simd::code_block;
        const Index n = std::clamp<Index>(end - first, 0, simd::code_block);
        if (n == 0) {
          of_keys[half] = of_keys[0];
          continue;
        }
        of_keys[half] = blocks.block(first, n, half);
        Index rows[simd::code_block];
        blocks.rows(first, n, rows);
        for (Index i = 0; i < n; ++i) {
          of_key[half * simd::code_block + i] = scales[rows[i]];
          errors_[first + i] = errors[rows[i]];
        }
      }
      const Index ahead = kv + tuning::sketch_prefetch_pairs * pair;
      simd::LaterBlocks later;
      if (ahead + pair <= end) {
        const Index first = places(ahead), second = places(ahead + simd::code_block);
        later = {keys.codes(b_, head_, first / simd::code_block),
                 keys.codes(b_, head_, second / simd::code_block)};
        for (const float* const of_rows : {scales, errors})
          simd::prefetch(of_rows + first), simd::prefetch(of_rows + second);
      }
      score_pair(unit, of_keys, later, of_key, kv, count);
    }
  }

  // Keys [begin, end) of rows that are codes.
  void of_codes(const HeadRows& keys, const TensorView<const float, 3>& inverse_norms,
                FloatRow& reader, Index begin, Index end) const {
    const Index groups = ceil_div(dim_, code_group), row_bytes = keys.row_bytes();
    const simd::CodeQueries queries{codes_, group_offset_, rows_};
    for (Index kv = begin; kv < end; kv += simd::code_block) {
      const Index count = std::min<Index>(simd::code_block, end - kv);
      ConstRow rows[simd::code_block];
      keys.at.find(kv, count, rows);
      const Index ahead = kv + tuning::code_row_prefetch_keys;
      for (Index i = ahead; i < std::min(ahead + simd::code_block, end); ++i) {
        const ConstRow later = keys[i];
        for (Index at = 0; at < row_bytes; at += 64) simd::prefetch(later + at);
      }
      keys.format->read_codes(rows, count, keys.shape, gathered_, group_scales_);
      for (Index i = count; i < simd::code_block; ++i)
        std::fill_n(group_scales_ + i * groups, groups, 0.0f);
      alignas(64) float best[simd::code_block];
      const simd::CodeRows of_keys{gathered_, group_scales_, groups};
      keys.format->score_codes(of_keys, queries, mean_, best);
      alignas(64) float norms[simd::code_block];
      if (inverse_norms.absent()) {
        keys.format->square_codes(of_keys, norms);
        for (Index i = 0; i < simd::code_block; i += simd::lanes) {
          const simd::Packet x = simd::load(norms + i);
          const simd::Packet inverse = simd::div(simd::broadcast(1.0f), simd::sqrt(x));
          simd::store(norms + i, simd::select_less(simd::zero(), x, inverse, x));
        }
      } else {
        const float* const from = &inverse_norms.at(b_, head_, kv);
        const Index step = inverse_norms.strides()[2];
        for (Index i = 0; i < count; ++i) norms[i] = from[i * step];
      }
      if (count == simd::code_block && score_block(best, norms, kv)) continue;
      for (Index i = 0; i < count; ++i) {
        const float norm = norms[i];
        // Codes that do not give the row, and lengths at float's ends, are for float.
        const bool coded =
            norm == 0.0f ? is_zero(keys, reader, kv + i)
                         : norm > 1.0f / most_coded_length && norm < 1.0f / least_coded_length &&
                               group_scales_[i * groups] == group_scales_[i * groups];
        scores_[kv + i] = coded ? best[i] * scale_ * norm : 0.0f;
        errors_[kv + i] = coded ? 0.0f : simd::infinity;
      }
    }
  }

  // Can gathered blocks, and rows of codes, be held?
  static bool fits(Index dim) { return dim <= most_dim; }

 private:
  static constexpr Index pair = 2 * simd::code_block;
  static constexpr Index most_dim = 1024, most_bytes = most_dim * simd::code_block;

  template <class Unit>
  void score_pair(Unit& unit, CodePair of_keys, const simd::LaterBlocks& later, const float* of_key,
                  Index kv, Index count) const {
    alignas(64) std::int32_t best[pair];
    std::fill_n(best, pair, mean_ ? 0 : std::numeric_limits<std::int32_t>::min());
    if (mean_)
      unit.template dots<simd::CodeScores::sum>(of_keys, best, later);
    else
      unit.template dots<simd::CodeScores::max>(of_keys, best, later);
    if (count < pair) {
      for (Index i = 0; i < count; ++i)
        scores_[kv + i] = static_cast<float>(best[i]) * (of_key[i] * scale_);
      return;
    }
    const simd::Packet scale = simd::broadcast(scale_);
    for (Index i = 0; i < pair; i += simd::lanes)
      simd::store_unaligned(
          scores_ + kv + i,
          simd::mul(simd::load_dots(best + i), simd::mul(simd::load_unaligned(of_key + i), scale)));
  }

  // Scores of a block of rows of codes. False, and nothing written, if any row is for float: most are
  // nothing special. A row that codes cannot give has a best score of NaN.
  bool score_block(const float* best, const float* norms, Index kv) const {
    const simd::Packet shortest = simd::broadcast(1.0f / most_coded_length),
                       longest = simd::broadcast(1.0f / least_coded_length),
                       one = simd::broadcast(1.0f), scale = simd::broadcast(scale_);
    simd::Packet special = simd::zero();
    for (Index i = 0; i < simd::code_block; i += simd::lanes) {
      const simd::Packet norm = simd::load(norms + i), score = simd::load(best + i);
      const simd::Packet inside = simd::select_less(norm, longest, simd::zero(), one);
      special = simd::add(special, simd::select_less(shortest, norm, inside, one));
      special = simd::add(special, simd::sub(score, score));  // NaN where it is not finite
    }
    if (simd::reduce_add(special) != 0.0f) return false;
    for (Index i = 0; i < simd::code_block; i += simd::lanes) {
      simd::store_unaligned(scores_ + kv + i, simd::mul(simd::mul(simd::load(best + i), scale),
                                                        simd::load(norms + i)));
      simd::store_unaligned(errors_ + kv + i, simd::zero());
    }
    return true;
  }

  bool is_zero(const HeadRows& keys, FloatRow& reader, Index i) const {
    const float* const x = reader.read(keys, i);
    return std::all_of(x, x + dim_, [](float c) { return c == 0.0f; });
  }

  Index b_, head_, rows_, dim_;
  const std::int32_t *codes_, *group_offset_;
  bool mean_;
  float scale_;
  float *scores_, *errors_;
  alignas(64) mutable std::uint8_t gathered_[2 * most_bytes];
  mutable float group_scales_[simd::code_block * (most_dim / code_group)];
};

QUOKA_FUNC bool codes_fit(Index rows, Index dim, Aggregation aggregation) {
  const Index most = dim * 255 * 127 * (aggregation == Aggregation::mean ? rows : 1);
  return most <= std::numeric_limits<std::int32_t>::max() && SketchScan::fits(dim);
}

// Tiles: what multiplies codes where tiles serve (matrix/code_units.hpp).
template <class Tiles>
void sketched_top_k_by(const KeySketch* sketch, SketchOf what, const float* q_bar, Index rows,
                       const Rows& k, const TensorView<const float, 3>& inverse_norms,
                       Aggregation aggregation, Index wanted, Index capacity,
                       const TopKOptions& options, Selection& selection, SketchState& s,
                       WorkerScratch<ScoreScratch>& score, ExecutorRef executor,
                       Chains* before = nullptr, AfterSelection* after = nullptr) {
  const Index tasks = k.batch() * k.heads(), dim = k.dim();
  const Index kv_len = k.len();
  const int workers = executor.workers();
  assert(0 < wanted && wanted < kv_len);
  const KeySketch::Places places =
      what == SketchOf::cache ? sketch->places_of(k) : KeySketch::Places{};
  const Index most = std::max(kv_len, capacity);
  const bool in_order = what == SketchOf::keys;
  const bool windows = options.window > 1;
  Chains own(tasks, chains_at_once(workers));
  Chains& chains = before != nullptr ? *before : own;
  const KeyRanges scanned = KeyRanges::of_size(
      kv_len,
      std::min(tuning::sketch_task_keys, KeyRanges::for_workers(kv_len, tasks, workers).size));
  const KeyRanges ranges =
      windows ? KeyRanges::of_size(kv_len, kv_len) : KeyRanges::for_workers(kv_len, tasks, workers);
  s.scores.reserve_amortised(tasks * most);
  if (!in_order) s.errors.reserve_amortised(tasks * most);
  s.queries.reserve(tasks, rows, dim);
  score.reserve(workers, &k.format(), dim, rows);
  s.top_k.reserve(workers, most, options.window);
  s.choices.at_least(chains.slots());
  const Index most_ranges =
      std::max(ranges.count, KeyRanges::for_workers(most, tasks, workers).count);
  for (SketchedChoice& choice : s.choices) choice.reserve(most, most_ranges);
  const Index packed = packed_bytes<Tiles>(rows, simd::code_steps(dim));
  s.queries.packed.reserve(tasks * packed);
  SelectionWriter writer(selection, k.batch(), k.heads(), k.len(), wanted);

  auto encode = [&](Index task, Index, int) {
    s.queries.encode_head(q_bar + task * rows * dim, task, rows, dim);
    if (what != SketchOf::codes)
      pack_codes<Tiles>(query_codes(s.queries, task, rows, dim),
                        s.queries.packed.data() + task * packed);
  };
  const SketchedHeads heads{q_bar, rows, aggregation, kv_len, wanted, options, ranges, s, score};
  const auto with_head = [&](Index task, int worker, auto&& step) {
    const Index b = task / k.heads(), head = task % k.heads();
    SketchedChoice& choice = s.choices[task % chains.slots()];
    const float* const errors =
        in_order ? sketch->errors(b, head) : s.errors.data() + task * kv_len;
    SketchedHead of_head(heads, HeadKeys(k, inverse_norms, b, head), task, errors, choice, worker);
    step(of_head);
  };
  auto scan = [&](Index task, Index part, int worker) {
    const auto [begin, end] = scanned.of(part);
    const SketchScan of_keys(s.queries, task, k.heads(), rows, dim, aggregation,
                             s.scores.data() + task * kv_len, s.errors.data() + task * kv_len);
    if (what == SketchOf::codes)
      of_keys.of_codes(k.head(task / k.heads(), task % k.heads()), inverse_norms, score[worker].row,
                       begin, end);
    else
      with_code_unit<Tiles>(query_codes(s.queries, task, rows, dim),
                            s.queries.packed.data() + task * packed,
                            [&, from = begin, to = end](auto& unit) {
                              if (in_order)
                                of_keys.in_order(unit, *sketch, from, to);
                              else
                                of_keys.at_places(unit, *sketch, places, from, to);
                            });
    if (!windows)
      with_head(task, worker,
                [from = begin, to = end](SketchedHead& head) { head.sample(from, to); });
  };
  auto begin = [&](Index task, Index, int worker) {
    if (!windows) with_head(task, worker, [](SketchedHead& head) { head.begin(); });
  };
  auto propose = [&](Index task, Index r, int worker) {
    with_head(task, worker, [r](SketchedHead& head) { head.propose(r); });
  };
  auto threshold = [&](Index task, Index, int worker) {
    with_head(task, worker, [](SketchedHead& head) { head.threshold(); });
  };
  auto near = [&](Index task, Index r, int worker) {
    with_head(task, worker, [r](SketchedHead& head) { head.near(r); });
  };
  auto far = [&](Index task, Index r, int worker) {
    with_head(task, worker, [r](SketchedHead& head) { head.far(r); });
  };
  const auto kept_of = [&](Index task) { return writer.row(task / k.heads(), task % k.heads()); };
  auto decide = [&](Index task, Index, int worker) {
    with_head(task, worker, [&](SketchedHead& head) { head.decide(kept_of(task)); });
  };
  auto write = [&](Index task, Index r, int worker) {
    with_head(task, worker, [&](SketchedHead& head) { head.write(r, kept_of(task)); });
  };
  auto select_windows = [&](Index task, Index, int worker) {
    with_head(task, worker, [&](SketchedHead& head) { head.select_windows(kept_of(task)); });
  };
  chains.add(1, encode);
  chains.add(scanned.count, scan);
  chains.add(1, begin);
  if (windows) {
    chains.add(1, select_windows);
  } else {
    chains.add(ranges.count, propose);
    chains.add(1, threshold);
    chains.add(ranges.count, near);
    chains.add(ranges.count, far);
    chains.add(1, decide);
    chains.add(ranges.count, write);
  }
  AfterWriting rest(writer, after);
  rest.add_to(chains, workers);
  executor.run_chains(chains);
  writer.commit();
}

QUOKA_FUNC void sketched_top_k(const KeySketch* sketch, SketchOf what, const float* q_bar,
                               Index rows, const Rows& k,
                               const TensorView<const float, 3>& inverse_norms,
                               Aggregation aggregation, Index wanted, Index capacity,
                               const TopKOptions& options, Selection& selection, SketchState& s,
                               WorkerScratch<ScoreScratch>& score, ExecutorRef executor,
                               Chains* before, AfterSelection* after) {
  sketched_top_k_by<simd::Tiles>(sketch, what, q_bar, rows, k, inverse_norms, aggregation, wanted,
                                 capacity, options, selection, s, score, executor, before, after);
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
