// Definitions of sketched_mass.hpp.
#pragma once

#include <quoka/select/kit_impl.hpp>
#include <quoka/select/sketch/sketched_mass.hpp>
#include <quoka/select/sketch/sketched_mass_head.hpp>

#include <algorithm>
#include <cmath>
#include <span>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

QUOKA_FUNC bool sketched_mass_is_fast(bool every_query) {
  return every_query ? simd::has_fast_code_products : simd::code_dots_beat_float;
}

QUOKA_FUNC float first_look_error() {
  return simd::has_rough_logits ? simd::rough_logit_error : 0.0f;
}

QUOKA_FUNC void MassLook::reserve(Index row_count, Index keys, Index dim, Index packed_bytes) {
  const Index stride = MassShape::padded(row_count), pairs = MassShape::pairs(keys);
  rows.reserve(row_count * dim);
  codes.reserve(simd::code_steps(dim) * stride);
  for (auto* of_rows : {&row_units, &lengths, &missed, &bounds, &shifts, &factors})
    of_rows->reserve(stride);
  offsets.reserve(stride);
  rough_sums.reserve(stride);
  packed.reserve(packed_bytes * MassShape::passes(row_count, keys));
  units.reserve_amortised(pairs * simd::code_pair);
  partial.reserve_amortised(pairs);
  // Few rows have fewer ranges, and as many as all of them lie within these.
  const Index most_ranges = MassShape::ranges(keys, 64).count;
  ranges.reserve_amortised(most_ranges);
  range_rows.reserve_amortised(most_ranges * stride);
  // A shorter cache may take more rows at once: whichever needs more.
  const Index of_row = pairs * simd::code_pair / 2;
  const Index most = tuning::mass_weight_bytes / Index{sizeof(std::uint32_t)};
  weights.reserve_amortised(
      std::max(MassShape::rows_at_once(row_count, keys) * of_row, std::min(stride * of_row, most)));
}

QUOKA_FUNC void SketchedMassScratch::reserve(Index row_count, Index keys, Index most_candidates,
                                             const Format* format, Index dim) {
  sums.reserve(MassShape::padded(row_count) * simd::lanes);
  products.reserve(MassShape::most_height * simd::code_pair);
  gathered.reserve(2 * simd::code_block_bytes(dim));
  reader.reserve(*format, dim);
  if (most_candidates > 0) top_k.reserve(keys, 1);
}

QUOKA_FUNC void SketchedMassSlot::reserve(Index row_count, Index keys, Index most_candidates,
                                          Index dim, Index packed_bytes) {
  looks[0].reserve(row_count, keys, dim, packed_bytes);
  if (most_candidates == 0) return;
  looks[1].reserve(row_count, most_candidates, dim, packed_bytes);
  candidates.reserve_amortised(2 * most_candidates);
  candidate_mass.reserve_amortised(most_candidates);
  lists.reserve(keys);
}

// What a call of sketched_softmax_scores() is about.
struct SketchedMassCall {
  const KeySketch& sketch;
  const KeySketch::Places* places;
  const float* q_bar;
  Index rows;
  const Rows& k;
  float logit_scale;
  Aggregation over;
  FirstLook look;

  Index keys() const { return k.len(); }
  HeadRows keys_of(Index task) const { return k.head(task / k.heads(), task % k.heads()); }
  float share(Index count) const {
    return over == Aggregation::max ? 1.0f : 1.0f / static_cast<float>(count);
  }

  // Those of the head's rows, or of `only` these, that are finite, times the logit scale; how many.
  Index read_rows(Index task, float* to, FloatRow& reader, std::span<const Index> only = {}) const {
    RowWriter writer(to, k.dim(), reader);
    const Index count = only.empty() ? rows : std::ssize(only);
    for (Index i = 0; i < count; ++i) {
      const Index m = only.empty() ? i : only[static_cast<std::size_t>(i)];
      writer.add(q_bar + (task * rows + m) * k.dim(), logit_scale);
    }
    return writer.count();
  }

  void in_float(Index task, float* mass, MassScratch& s) const {
    const Index count = read_rows(task, s.rows.data(), s.query);
    std::fill_n(mass, keys(), 0.0f);
    RowKeys of_head(keys_of(task), keys(), s.key);
    MassAccumulator(s.rows.data(), count, k.dim(), of_head, keys(), s)
        .add_to(mass, share(std::max<Index>(count, 1)), over);
  }
};

// The stages of a call. Each head's work lies in its slot's scratch memory.
template <class Tiles>
class MassStages : MassShape {
  using By = MassLook::By;

 public:
  MassStages(const SketchedMassCall& call, const TensorView<float, 3>& scores,
             SketchedMassState& state, Index most_keys, const Chains& chains, int workers)
      : call_(call),
        scores_(scores),
        state_(state),
        most_keys_(most_keys),
        slots_(chains.slots()),
        twice_(call.look.candidates > 0),
        ranges_{MassShape::ranges(call.keys(), twice_ ? std::ssize(call.look.rows) : call.rows),
                MassShape::ranges(call.look.candidates, call.rows)},
        chosen_(KeyRanges::for_workers(call.keys(), chains.count(), workers)),
        candidates_(KeyRanges::for_workers(call.look.candidates, chains.count(), workers)) {}

  void add_to(Chains& chains) {
    chains.add_member<&MassStages::read>(of_rows() + ranges_[0].count, *this);
    add_look<0>(chains);
    if (twice_) {
      chains.add_member<&MassStages::begin_best>(1, *this);
      chains.add_member<&MassStages::propose_best>(chosen_.count, *this);
      chains.add_member<&MassStages::find_best>(1, *this);
      chains.add_member<&MassStages::read_best>(ranges_[1].count + chosen_.count, *this);
      add_look<1>(chains);
    }
    chains.add_member<&MassStages::finish>(twice_ ? candidates_.count : 1, *this);
    if (call_.places != nullptr) chains.add_member<&MassStages::look_up>(1, *this);
  }
  void reserve_in_float(int worker) const {
    MassScratch& s = state_.in_float[worker];
    s.reserve(call_.rows, most_keys_, call_.k.dim());
    s.key.reserve(call_.k);
  }

 private:
  static constexpr Index together = 8;  // ranges of a task that mostly has nothing to do

  template <int look>
  void add_look(Chains& chains) {
    const Index ranges = ranges_[look].count, sampled = ceil_div(ranges, together);
    chains.add_member<&MassStages::bound<look>>(1, *this);
    chains.add_member<&MassStages::sample<look, 16>>(sampled, *this);
    chains.add_member<&MassStages::place_sampled<look>>(1, *this);
    chains.add_member<&MassStages::sample<look, 1>>(sampled, *this);
    chains.add_member<&MassStages::place_largest<look>>(1, *this);
    first_pass_[look] = chains.stages();
    for (Index left = MassShape::passes(call_.rows, ranges_[look].keys); left > 0; --left) {
      chains.add_member<&MassStages::weigh<look>>(ranges, *this);
      chains.add_member<&MassStages::total<look>>(1, *this);
      chains.add_member<&MassStages::add<look>>(ranges, *this);
    }
  }

  Index of_rows() const { return twice_ ? 2 : 1; }  // tasks of read() that see to rows
  Index heads() const { return call_.k.heads(); }
  SketchedMassSlot& slot(Index task) const { return state_.slots[static_cast<int>(task % slots_)]; }
  float* mass(Index task) const { return scores_.row(task / heads(), task % heads(), 0); }
  std::span<Position> best(Index task) const {
    return {slot(task).candidates.data(), static_cast<std::size_t>(call_.look.candidates)};
  }
  // Does the head go on to its candidates?
  bool goes_on(Index task) const {
    const MassLook& first = slot(task).looks[0];
    return twice_ && first.by == By::sketch && !first.whole;
  }

  // use(head) with so many rows of a look; the second at its candidates.
  template <int look, class Use>
  void with_rows(Index task, Index rows, int worker, Use&& use) const {
    KeySketch::Places of_best;
    if (look == 1) of_best.map.cells = best(task).data() + best(task).size();
    const KeySketch::Places* const places = look == 1 ? &of_best : call_.places;
    SketchedMass<Tiles> head(call_.sketch, places, call_.keys_of(task), ranges_[look],
                             task / heads(), task % heads(), rows, slot(task).looks[look],
                             state_.scratch[worker]);
    use(head);
  }
  template <int look, class Use>
  void with(Index task, int worker, Use&& use) const {
    if (look == 0 || goes_on(task))
      with_rows<look>(task, slot(task).looks[look].count, worker, use);
  }

  // Rows of the looks to codes, and what there is of the keys.
  void read(Index task, int, Index part, int worker) {
    FloatRow& reader = state_.scratch[worker].reader;
    if (part >= of_rows())
      return with_rows<0>(task, 0, worker,
                          [&](SketchedMass<Tiles>& head) { head.read_keys(part - of_rows()); });
    MassLook& to = slot(task).looks[part];
    to.whole = to.rough = false, to.by = By::nothing;
    if (part == 1) {
      to.count = call_.read_rows(task, to.rows.data(), reader);
      if (to.count > 0)
        with_rows<1>(task, to.count, worker, [](SketchedMass<Tiles>& head) { head.encode_rows(); });
      return;
    }
    to.count = call_.read_rows(task, to.rows.data(), reader,
                               twice_ ? call_.look.rows : std::span<const Index>{});
    if (twice_ && to.count == 0) {
      to.whole = true;
      to.count = call_.read_rows(task, to.rows.data(), reader);
    }
    to.rough = simd::has_rough_logits && largest<0>(task);
    if (to.count > 0)
      with_rows<0>(task, to.count, worker, [](SketchedMass<Tiles>& head) { head.encode_rows(); });
  }

  template <int look>
  void bound(Index task, int, Index, int worker) {
    with<look>(task, worker, [](SketchedMass<Tiles>& head) { head.bound(); });
  }
  template <int look, Index step>
  void sample(Index task, int, Index part, int worker) {
    const Index first = part * together;
    with<look>(task, worker, [&](SketchedMass<Tiles>& head) {
      head.sample(first, std::min(first + together, ranges_[look].count), step);
    });
  }
  template <int look>
  void place_sampled(Index task, int, Index, int worker) {
    with<look>(task, worker, [](SketchedMass<Tiles>& head) { head.place_sampled(); });
  }
  template <int look>
  void place_largest(Index task, int, Index, int worker) {
    with<look>(task, worker, [](SketchedMass<Tiles>& head) { head.place_largest(); });
  }
  template <int look>
  Index pass(int stage) const {
    return (stage - first_pass_[look]) / 3;
  }
  // Of a first look each row counts by itself.
  template <int look>
  bool largest(Index task) const {
    return look == 0 && twice_ && !slot(task).looks[0].whole;
  }
  template <int look>
  void weigh(Index task, int stage, Index range, int worker) {
    with<look>(task, worker,
               [&](SketchedMass<Tiles>& head) { head.weigh(pass<look>(stage), range); });
  }
  template <int look>
  void total(Index task, int stage, Index, int worker) {
    const Index count = std::max<Index>(slot(task).looks[look].count, 1);
    const float share = largest<look>(task) ? 1.0f : call_.share(count);
    with<look>(task, worker,
               [&](SketchedMass<Tiles>& head) { head.total(pass<look>(stage), share); });
  }
  template <int look>
  void add(Index task, int stage, Index range, int worker) {
    float* const to = look == 0 ? mass(task) : slot(task).candidate_mass.data();
    with<look>(task, worker, [&](SketchedMass<Tiles>& head) {
      head.add(to, pass<look>(stage), range, largest<look>(task) ? Aggregation::max : call_.over);
    });
  }

  // The keys of the largest shares.
  template <class Use>
  void with_top_k(Index task, int worker, Use&& use) const {
    if (!goes_on(task)) return;
    RangedTopK top_k(mass(task), plain_, call_.look.candidates, chosen_, slot(task).lists,
                     state_.scratch[worker].top_k);
    use(top_k);
  }
  void begin_best(Index task, int, Index, int worker) {
    with_top_k(task, worker, [](RangedTopK& top_k) { top_k.begin(); });
  }
  void propose_best(Index task, int, Index range, int worker) {
    with_top_k(task, worker, [&](RangedTopK& top_k) { top_k.propose(range); });
  }
  void find_best(Index task, int, Index, int worker) {
    with_top_k(task, worker, [&](RangedTopK& top_k) { top_k.finish(best(task)); });
  }
  // What there is of these; and the mass of all others, which is 0.
  void read_best(Index task, int, Index part, int worker) {
    if (!goes_on(task)) return;
    if (part < ranges_[1].count) {
      find_cells(task, part);
      return with<1>(task, worker, [&](SketchedMass<Tiles>& head) { head.read_keys(part); });
    }
    const auto [begin, end] = chosen_.of(part - ranges_[1].count);
    float* const x = mass(task);
    for (Index t = begin; t < end; ++t) x[t] = std::isfinite(x[t]) ? 0.0f : x[t];
  }

  // Rows of the sketch where a range of candidates lies.
  void find_cells(Index task, Index range) const {
    const Position* const keys = best(task).data();
    Position* const cells = best(task).data() + best(task).size();
    const auto [begin, end] = ranges_[1].of(range);
    for (Index i = begin; i < end; ++i)
      cells[i] =
          call_.places != nullptr ? static_cast<Position>((*call_.places)(keys[i])) : keys[i];
  }

  // The candidates' mass in its place; or all of the head in float.
  void finish(Index task, int, Index part, int worker) {
    const MassLook* const looks = slot(task).looks;
    const bool second = goes_on(task);
    const bool in_float = looks[0].by == By::floats || (second && looks[1].by == By::floats);
    float* const x = mass(task);
    if (part == 0) {
      float error = looks[0].by == By::nothing ? 0.0f : looks[0].error;
      if (second) error = std::max(error, looks[1].error);
      state_.errors.data()[task] = in_float ? simd::infinity : error * static_cast<float>(ln_2);
    }
    if (in_float) {
      if (part > 0) return;
      reserve_in_float(worker);
      return call_.in_float(task, x, state_.in_float[worker]);
    }
    if (!second) return;
    const auto [begin, end] = candidates_.of(part);
    for (Index i = begin; i < end; ++i)
      x[best(task)[static_cast<std::size_t>(i)]] = slot(task).candidate_mass.data()[i];
  }
  // The key that has most is what was sketched.
  void look_up(Index task, int, Index, int worker) {
    if (state_.errors.data()[task] == simd::infinity) return;
    const float* const x = mass(task);
    call_.sketch.require_held(call_.k, *call_.places, task % heads(),
                              std::max_element(x, x + call_.keys()) - x,
                              state_.scratch[worker].reader);
  }

  const SketchedMassCall& call_;
  const TensorView<float, 3>& scores_;
  SketchedMassState& state_;
  Index most_keys_;  // as the cache grows
  Index slots_;
  bool twice_;
  KeyRanges ranges_[2], chosen_, candidates_;
  int first_pass_[2] = {};
  TopKOptions plain_;
};

template <class Tiles>
void sketched_softmax_scores_by(const KeySketch& sketch, const KeySketch::Places* places,
                                const float* q_bar, Index rows, const Rows& k, float logit_scale,
                                Index capacity, Aggregation over, TensorView<float, 3> scores,
                                SketchedMassState& state, ExecutorRef executor, FirstLook look,
                                Chains* before = nullptr, const StagesRef* after = nullptr) {
  const SketchedMassCall call{sketch, places, q_bar, rows, k, logit_scale, over, look};
  const Index tasks = k.batch() * k.heads();
  const Index most_keys = std::max(call.keys(), capacity);
  Chains own(tasks, chains_at_once(executor.workers()));
  Chains& chains = before != nullptr ? *before : own;
  state.scratch.reserve(executor.workers(), rows, most_keys, look.most_candidates, &k.format(),
                        k.dim());
  state.slots.reserve(static_cast<int>(chains.slots()), rows, most_keys, look.most_candidates,
                      k.dim(),
                      packed_bytes<Tiles>(MassShape::padded(rows), simd::code_steps(k.dim())));
  state.in_float.at_least(executor.workers());
  if (places != nullptr) sketch.require_held(k, *places, state.turn++, state.scratch[0].reader);
  float* const errors = state.errors.reserve(tasks);
  MassStages<Tiles> stages(call, scores, state, most_keys, chains, executor.workers());
  stages.add_to(chains);
  if (after != nullptr) (*after)(chains);
  // Where there was a head for float, there will be others, of any worker.
  for (int worker = 0; state.any_in_float && worker < executor.workers(); ++worker)
    stages.reserve_in_float(worker);
  executor.run_chains(chains);
  state.any_in_float = state.any_in_float || std::any_of(errors, errors + tasks, [](float e) {
                         return e == simd::infinity;
                       });
}

QUOKA_FUNC void sketched_softmax_scores(const KeySketch& sketch, const KeySketch::Places* places,
                                        const float* q_bar, Index rows, const Rows& k,
                                        float logit_scale, Index capacity, Aggregation over,
                                        TensorView<float, 3> scores, SketchedMassState& state,
                                        ExecutorRef executor, FirstLook look, Chains* before,
                                        const StagesRef* after) {
  sketched_softmax_scores_by<simd::Tiles>(sketch, places, q_bar, rows, k, logit_scale, capacity,
                                          over, scores, state, executor, look, before, after);
}

QUOKA_FUNC void softmax_scores_by_sketch(const KeySketch& own, const KeySketch* cache,
                                         const float* q_bar, Index rows, const Rows& k,
                                         float logit_scale, Index capacity, Aggregation over,
                                         TensorView<float, 3> scores, SketchedMassState& state,
                                         ExecutorRef executor, FirstLook look, Chains* before,
                                         const StagesRef* after) {
  if (cache == nullptr) own.require_shape_of(k);
  const KeySketch::Places places = cache == nullptr ? KeySketch::Places{} : cache->places_of(k);
  sketched_softmax_scores(cache == nullptr ? own : *cache, cache == nullptr ? nullptr : &places,
                          q_bar, rows, k, logit_scale, capacity, over, scores, state, executor,
                          look, before, after);
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
