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
// holds for the maximum over the queries, and for their mean (sketched_head.hpp). The keys fall into four sorts, by the
// n-th best sketched score and a level a little above it:
//
//   sure    sketch - bound above the level: kept, never looked at again
//   likely  the others among the n best by the sketch: scored in float; the least of these scores
//           (or the level) is a floor, which n keys reach and so does the n-th best
//   possible  the rest of those with sketch + bound at the floor or above: scored in float
//   out     all others
//
// The best of the likely and the possible ones fill what `sure` leaves. Should so many of them reach the level that a
// sure one might have to go, the sure ones are scored too, and the best of all are taken. Float
// scores come from the same kernel in the same order as without the sketch: bit for bit the same
// numbers decide. With a window, a score is its neighbours' maximum: none is sure, and top_k.hpp
// looks at the float scores of these two sorts, the others being lowest.
//
// Each float score is compared with its sketch: one beyond the bound is of a key that changed behind
// the sketch's back, and throws.
//
// 2 * kv_heads * rows * kv_len * head_dim 8-bit operations, and float scores of some 1.3 n keys;
// reads head_dim + 8 bytes per key.
#pragma once

#include <quoka/select/sketch/code_blocks.hpp>
#include <quoka/select/sketch/sketched_call.hpp>
#include <quoka/select/sketch/sketched_head.hpp>
#include <quoka/views/selection.hpp>

#include <algorithm>
#include <cassert>
#include <limits>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// Reused memory.
struct SketchedTopKState {
  // Scratch of one worker.
  struct Worker {
    TopKScratch top_k;
    ScoreScratch score;
    Buffer<std::uint8_t> gathered;  // two blocks of codes
    FloatRow reader;

    void reserve(Index keys, Index window, const Format* format, Index dim, Index rows) {
      top_k.reserve(keys, window);
      score.reserve(format, dim, rows);
      gathered.reserve(2 * simd::code_block_bytes(dim));
      reader.reserve(*format, dim);
    }
    Index bytes() const { return bytes_of(top_k, score, gathered, reader); }
  };

  WorkerScratch<Worker> workers;
  GrowingArray<SketchedTopKSlot> slots;  // of chains
  std::uint64_t turn = 0;                // of looking keys up

  Index bytes() const { return workers.bytes() + slots.bytes(); }
};

// scores[i] of keys [begin, end): the maximum, or the mean, over the queries of what codes say of the cosine. Where the
// sketch has another order than the keys, errors[i] too.
template <class Tiles>
void score_by_codes(const SketchedCall& call, Index head, Index begin, Index end,
                    SketchedTopKSlot& slot, std::uint8_t* gathered) {
  constexpr Index pair = CodeBlocks::pair;
  const Index b = head / call.k().heads(), kv_head = head % call.k().heads();
  const KeySketch& sketch = call.keys.sketch();
  const CodeBlocks blocks(sketch, call.keys.mapping(), call.k().len(), b, kv_head, call.k().dim(),
                          gathered);
  const float *const scales = sketch.scales(b, kv_head), *const errors = sketch.errors(b, kv_head);
  const bool mean = call.aggregation == Aggregation::mean;
  const float unit = slot.queries.units()[0] * (mean ? 1.0f / static_cast<float>(call.rows) : 1.0f);
  const auto multiply = [&](auto& multiplier) {
    blocks.for_each_pair(
        begin, end, 1, [&](Index kv, Index count, CodePair codes, const simd::LaterBlocks& ahead) {
          alignas(64) std::int32_t best[pair];
          std::fill_n(best, pair, mean ? 0 : std::numeric_limits<std::int32_t>::min());
          multiplier.dots(mean ? simd::CodeScores::sum : simd::CodeScores::max, codes, best, ahead);
          alignas(64) float room[pair];
          if (!blocks.in_order())
            std::copy_n(blocks.numbers(errors, kv, count, room), count, slot.errors.data() + kv);
          const float* const scale = blocks.numbers(scales, kv, count, room);
          float* const scores = slot.scores.data() + kv;
          if (count < pair) {
            for (Index i = 0; i < count; ++i)
              scores[i] = static_cast<float>(best[i]) * (scale[i] * unit);
            return;
          }
          for (Index i = 0; i < pair; i += simd::lanes)
            simd::store_unaligned(scores + i, simd::mul(simd::load_dots(best + i),
                                                        simd::mul(simd::load_unaligned(scale + i),
                                                                  simd::broadcast(unit))));
        });
  };
  with_code_unit<Tiles>(slot.queries.codes(0), slot.queries.packed(0), multiply);
}

// The phases of a call; each head's work lies in its slot.
template <class Tiles>
class SketchedTopKStages {
 public:
  SketchedTopKStages(const SketchedCall& call, const HeadPlan& plan,
                     const TensorView<const float, 3>& inverse_norms, Index wanted,
                     const TopKOptions& options, SelectionWriter& writer, SketchedTopKState& state)
      : call_(call),
        plan_(plan),
        inverse_norms_(inverse_norms),
        writer_(writer),
        state_(state),
        windows_(options.window > 1),
        scanned_(KeyRanges::by_size(
            call.k().len(), std::min(tuning::sketch_task_keys, ranges_for(call.k().len()).size))),
        heads_{call, call.k().len(), wanted, options,
               windows_ ? KeyRanges::by_size(call.k().len(), call.k().len())
                        : ranges_for(call.k().len())} {
    const Rows& k = call.k();
    const Index most = call.most_keys(),
                most_ranges = std::max(heads_.ranges.count, ranges_for(most).count);
    state.workers.reserve(call.executor.workers(), most, options.window, &k.format(), k.dim(),
                          call.rows);
    state.slots.at_least(plan.slots());
    for (SketchedTopKSlot& slot : state.slots) {
      slot.reserve(most, most_ranges, call.keys.mapping() != nullptr);
      slot.queries.template reserve<Tiles>(call.rows, k.dim(), CodedRows::padded(call.rows));
    }
  }

  void run(const HeadLoops& on) const {
    const auto per_head = [&](auto&& f) {
      on.each(1, [&](Index head, Index, int worker) { f(of(head, worker), head); });
    };
    const auto per_range = [&](auto&& f) {
      on.each(heads_.ranges.count,
              [&](Index head, Index range, int worker) { f(of(head, worker), head, range); });
    };
    on.each(1, [&](Index head, Index, int worker) { encode(head, worker); });
    on.each(scanned_.count, [&](Index head, Index part, int worker) { score(head, part, worker); });
    if (windows_)
      return per_head([&](SketchedHead x, Index head) { x.select_windows(kept(head)); });
    per_head([](SketchedHead x, Index) { x.begin(); });
    per_range([](SketchedHead x, Index, Index range) { x.propose(range); });
    per_head([](SketchedHead x, Index) { x.threshold(); });
    per_range([](SketchedHead x, Index, Index range) { x.likely(range); });
    per_range([](SketchedHead x, Index, Index range) { x.possible(range); });
    per_head([&](SketchedHead x, Index head) { x.decide(kept(head)); });
    per_range([&](SketchedHead x, Index head, Index range) { x.write(range, kept(head)); });
  }

 private:
  KeyRanges ranges_for(Index keys) const {
    return KeyRanges::for_workers(keys, call_.heads(), plan_.workers());
  }
  SketchedTopKSlot& slot(Index head, int worker) const {
    return state_.slots[plan_.slot(head, worker)];
  }
  std::span<Position> kept(Index head) const {
    return writer_.row(head / call_.k().heads(), head % call_.k().heads());
  }
  SketchedHead of(Index head, int worker) const {
    const Index b = head / call_.k().heads(), kv_head = head % call_.k().heads();
    const float* const errors = call_.keys.mapping() == nullptr
                                    ? call_.keys.sketch().errors(b, kv_head)
                                    : slot(head, worker).errors.data();
    SketchedTopKState::Worker& scratch = state_.workers[worker];
    return {heads_,
            HeadKeys(call_.k(), &inverse_norms_, b, kv_head),
            head,
            errors,
            slot(head, worker),
            scratch.top_k,
            scratch.score};
  }

  void encode(Index head, int worker) const {
    SketchedTopKSlot& s = slot(head, worker);
    const Index rows = call_.rows, dim = call_.k().dim();
    s.longest = s.missed = simd::infinity;
    if (!s.queries.template encode<Tiles>(call_.rows_of(head), rows, dim, CodedRows::padded(rows),
                                          RowUnits::shared))
      return;
    s.longest = *std::max_element(s.queries.lengths(), s.queries.lengths() + rows);
    s.missed = *std::max_element(s.queries.missed(), s.queries.missed() + rows);
  }
  void score(Index head, Index part, int worker) const {
    const auto [begin, end] = scanned_.of(part);
    SketchedTopKSlot& s = slot(head, worker);
    if (s.longest < simd::infinity) {
      score_by_codes<Tiles>(call_, head, begin, end, s, state_.workers[worker].gathered.data());
    } else {  // all keys are scored in float
      std::fill(s.scores.data() + begin, s.scores.data() + end, 0.0f);
      if (call_.keys.mapping() != nullptr)
        std::fill(s.errors.data() + begin, s.errors.data() + end, 0.0f);
    }
    if (!windows_) of(head, worker).sample(begin, end);
  }
  const SketchedCall& call_;
  const HeadPlan& plan_;
  const TensorView<const float, 3>& inverse_norms_;
  SelectionWriter& writer_;
  SketchedTopKState& state_;
  bool windows_;
  KeyRanges scanned_;
  SketchedHeads heads_;
};

// The Selection that top_k makes of score_all_keys' scores. 0 < wanted < kv_len keys are selected; codes_fit() holds.
// inverse_norms [batch, kv_heads, kv_len] of the keys, or absent. Tiles: what
// multiplies codes where tiles serve (matrix/code_units.hpp).
template <class Tiles = simd::Tiles>
void sketched_top_k(const SketchedCall& call, const TensorView<const float, 3>& inverse_norms,
                    Index wanted, const TopKOptions& options, Selection& selection,
                    SketchedTopKState& state) {
  const Rows& k = call.k();
  assert(0 < wanted && wanted < k.len());
  SelectionWriter writer(selection, k.batch(), k.heads(), k.len(), wanted);
  const HeadPlan plan(call.heads(), call.executor);
  const SketchedTopKStages<Tiles> stages(call, plan, inverse_norms, wanted, options, writer, state);
  call.keys.look_up(state.turn, state.workers[0].reader);
  plan.run([&](const HeadLoops& on) {
    if (call.first != nullptr) (*call.first)(on);
    stages.run(on);
  });
  writer.commit();
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
