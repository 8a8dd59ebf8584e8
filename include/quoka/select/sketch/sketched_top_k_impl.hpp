// Definitions of sketched_top_k.hpp.
#pragma once

#include <quoka/select/sketch/code_blocks.hpp>
#include <quoka/select/sketch/sketched_head.hpp>
#include <quoka/select/sketch/sketched_top_k.hpp>

#include <algorithm>
#include <cassert>
#include <limits>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

QUOKA_FUNC bool sketch_is_fast() { return simd::code_dots_beat_float; }

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
    Index bytes() const {
      return top_k.bytes() + score.bytes() + gathered.bytes() + reader.bytes();
    }
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
  slot.queries.with_unit<Tiles>(0, [&](auto& multiplier) {
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
  });
}

// The stages of a call; each head's work lies in its slot.
template <class Tiles>
class SketchedTopKStages {
 public:
  SketchedTopKStages(const SketchedCall& call, const TensorView<const float, 3>& inverse_norms,
                     Index wanted, const TopKOptions& options, SelectionWriter& writer,
                     SketchedTopKState& state)
      : call_(call),
        inverse_norms_(inverse_norms),
        writer_(writer),
        state_(state),
        windows_(options.window > 1),
        scanned_(KeyRanges::of_size(
            call.k().len(), std::min(tuning::sketch_task_keys, ranges_for(call.k().len()).size))),
        heads_{call, call.k().len(), wanted, options,
               windows_ ? KeyRanges::of_size(call.k().len(), call.k().len())
                        : ranges_for(call.k().len())} {
    const Rows& k = call.k();
    const Index most = call.most_keys(),
                most_ranges = std::max(heads_.ranges.count, ranges_for(most).count);
    state.workers.reserve(call.executor.workers(), most, options.window, &k.format(), k.dim(),
                          call.rows);
    state.slots.at_least(call.chains.slots());
    for (SketchedTopKSlot& slot : state.slots) {
      slot.reserve(most, most_ranges, call.keys.mapping() != nullptr);
      slot.queries.template reserve<Tiles>(call.rows, k.dim(), CodedRows::padded(call.rows));
    }
  }

  void add_to(Chains& chains) {
    using Self = SketchedTopKStages;
    chains.add_member<&Self::encode>(1, *this);
    chains.add_member<&Self::score>(scanned_.count, *this);
    if (windows_) {
      chains.add_member<&Self::select_windows>(1, *this);
      return;
    }
    const Index ranges = heads_.ranges.count;
    chains.add_member<&Self::begin>(1, *this);
    chains.add_member<&Self::propose>(ranges, *this);
    chains.add_member<&Self::threshold>(1, *this);
    chains.add_member<&Self::likely>(ranges, *this);
    chains.add_member<&Self::possible>(ranges, *this);
    chains.add_member<&Self::decide>(1, *this);
    chains.add_member<&Self::write>(ranges, *this);
  }

 private:
  KeyRanges ranges_for(Index keys) const {
    return KeyRanges::for_workers(keys, call_.heads(), call_.executor.workers());
  }
  SketchedTopKSlot& slot(Index head) const { return state_.slots[head % call_.chains.slots()]; }
  std::span<Position> kept(Index head) const {
    return writer_.row(head / call_.k().heads(), head % call_.k().heads());
  }
  SketchedHead of(Index head, int worker) const {
    const Index b = head / call_.k().heads(), kv_head = head % call_.k().heads();
    const float* const errors = call_.keys.mapping() == nullptr
                                    ? call_.keys.sketch().errors(b, kv_head)
                                    : slot(head).errors.data();
    SketchedTopKState::Worker& scratch = state_.workers[worker];
    return {heads_,       HeadKeys(call_.k(), &inverse_norms_, b, kv_head),
            head,         errors,
            slot(head),   scratch.top_k,
            scratch.score};
  }

  void encode(Index head, int, Index, int) {
    SketchedTopKSlot& s = slot(head);
    const Index rows = call_.rows, dim = call_.k().dim();
    s.longest = s.missed = simd::infinity;
    if (!s.queries.template encode<Tiles>(call_.rows_of(head), rows, dim, CodedRows::padded(rows),
                                          RowUnits::shared))
      return;
    s.longest = *std::max_element(s.queries.lengths(), s.queries.lengths() + rows);
    s.missed = *std::max_element(s.queries.missed(), s.queries.missed() + rows);
  }
  void score(Index head, int, Index part, int worker) {
    const auto [begin, end] = scanned_.of(part);
    SketchedTopKSlot& s = slot(head);
    if (s.longest < simd::infinity) {
      score_by_codes<Tiles>(call_, head, begin, end, s, state_.workers[worker].gathered.data());
    } else {  // all keys are scored in float
      std::fill(s.scores.data() + begin, s.scores.data() + end, 0.0f);
      if (call_.keys.mapping() != nullptr)
        std::fill(s.errors.data() + begin, s.errors.data() + end, 0.0f);
    }
    if (!windows_) of(head, worker).sample(begin, end);
  }
  void begin(Index head, int, Index, int worker) { of(head, worker).begin(); }
  void propose(Index head, int, Index range, int worker) { of(head, worker).propose(range); }
  void threshold(Index head, int, Index, int worker) { of(head, worker).threshold(); }
  void likely(Index head, int, Index range, int worker) { of(head, worker).likely(range); }
  void possible(Index head, int, Index range, int worker) { of(head, worker).possible(range); }
  void decide(Index head, int, Index, int worker) { of(head, worker).decide(kept(head)); }
  void write(Index head, int, Index range, int worker) {
    of(head, worker).write(range, kept(head));
  }
  void select_windows(Index head, int, Index, int worker) {
    of(head, worker).select_windows(kept(head));
  }

  const SketchedCall& call_;
  const TensorView<const float, 3>& inverse_norms_;
  SelectionWriter& writer_;
  SketchedTopKState& state_;
  bool windows_;
  KeyRanges scanned_;
  SketchedHeads heads_;
};

// Tiles: what multiplies codes where tiles serve (matrix/code_units.hpp).
template <class Tiles>
void sketched_top_k_by(const SketchedCall& call, const TensorView<const float, 3>& inverse_norms,
                       Index wanted, const TopKOptions& options, Selection& selection,
                       SketchedTopKState& state, AfterSelection* after = nullptr) {
  const Rows& k = call.k();
  assert(0 < wanted && wanted < k.len());
  SelectionWriter writer(selection, k.batch(), k.heads(), k.len(), wanted);
  SketchedTopKStages<Tiles> stages(call, inverse_norms, wanted, options, writer, state);
  call.keys.look_up(state.turn, state.workers[0].reader);
  stages.add_to(call.chains);
  AfterWriting rest(writer, after);
  rest.add_to(call.chains, call.executor.workers());
  call.executor.run_chains(call.chains);
  writer.commit();
}

QUOKA_FUNC void sketched_top_k(const SketchedCall& call,
                               const TensorView<const float, 3>& inverse_norms, Index wanted,
                               const TopKOptions& options, Selection& selection,
                               SketchedTopKState& state, AfterSelection* after) {
  sketched_top_k_by<simd::Tiles>(call, inverse_norms, wanted, options, selection, state, after);
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
