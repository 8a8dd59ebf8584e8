// Definitions of sketched_mass.hpp.
#pragma once

#include <quoka/kernels/compact.hpp>
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

QUOKA_FUNC void SketchedMassScratch::reserve(Index row_count, Index keys, Index most_candidates,
                                             const Rows& k, Index packed_bytes) {
  const Index stride = MassShape::padded(row_count), pairs = MassShape::pairs(keys);
  rows.reserve(row_count * k.dim());
  codes.reserve(simd::code_steps(k.dim()) * stride);
  for (auto* of_rows : {&row_units, &bounds, &shifts, &factors}) of_rows->reserve(stride);
  offsets.reserve(stride);
  rough_sums.reserve(stride);
  sums.reserve(stride * simd::lanes);
  products.reserve(MassShape::most_height * simd::code_pair);
  packed.reserve(packed_bytes);
  units.reserve_amortised(pairs * simd::code_pair);
  partial.reserve_amortised(pairs);
  gathered.reserve(2 * simd::code_block_bytes(k.dim()));
  // A shorter cache may take more rows at once: whichever needs more.
  const Index of_row = pairs * simd::code_pair / 2;
  const Index most = tuning::mass_weight_bytes / Index{sizeof(std::uint32_t)};
  weights.reserve_amortised(
      std::max(std::min(stride, MassShape::tile) * of_row, std::min(stride * of_row, most)));
  reader.reserve(k);
  if (most_candidates == 0) return;
  candidates.reserve_amortised(2 * most_candidates);
  candidate_mass.reserve_amortised(most_candidates);
  top_k.reserve(keys, 1);
}

// A key of the cache that is not what was sketched.
inline void require_sketched(const KeySketch& sketch, const KeySketch::Places& places,
                             const Rows& k, Index b, Index head, Index key, FloatRow& reader) {
  const Index row = places(key);
  if (sketch.errors(0, head)[row] == simd::infinity) return;  // never told of, or not coded
  if (!sketch.holds(0, head, row, reader.read(k, b, head, key)))
    fail("the key at position", key,
         "not the one that was sketched (its cache changed and the sketch was not told), of", "",
         k.len());
}

// What a call of sketched_softmax_scores() is about, and what it does for one KV head, a task.
template <class Tiles>
struct SketchedMassCall {
  const KeySketch& sketch;
  const KeySketch::Places* places;
  const float* q_bar;
  Index rows;
  const Rows& k;
  float logit_scale;
  Aggregation over;
  const Candidates* some;
  FirstLook look;

  Index keys() const { return some != nullptr ? some->count : k.len(); }
  HeadRows keys_of(Index task) const {
    return some != nullptr ? some->rows(k, task) : k.head(task / k.heads(), task % k.heads());
  }
  float share(Index count) const {
    return over == Aggregation::max ? 1.0f : 1.0f / static_cast<float>(count);
  }

  // Those of the head's rows, or of `only` these, that are finite, times the logit scale and log2(e); how
  // many.
  Index read_rows(Index task, float* to, FloatRow& reader, std::span<const Index> only = {}) const {
    RowWriter writer(to, k.dim(), reader);
    const Index count = only.empty() ? rows : std::ssize(only);
    for (Index i = 0; i < count; ++i) {
      const Index m = only.empty() ? i : only[static_cast<std::size_t>(i)];
      writer.add(q_bar + (task * rows + m) * k.dim(), log2_of_e * logit_scale);
    }
    return writer.count();
  }

  // mass [keys()] and the bound on the logits' error, in nats. False: this head is for float; mass holds
  // anything.
  bool by_sketch(Index task, float* mass, float& error, SketchedMassScratch& s) const {
    const KeySketch::Places listed = some != nullptr ? some->places(task) : KeySketch::Places{};
    const KeySketch::Places* const at = some != nullptr ? &listed : places;
    error = 0.0f;
    if (look.candidates > 0) {
      const Index first = read_rows(task, s.rows.data(), s.reader, look.rows);
      if (first > 0)
        return add(task, at, keys(), first, Aggregation::max, 1.0f, mass, error, s, true) &&
               look_at_best(task, at, mass, error, s);
    }
    const Index count = read_rows(task, s.rows.data(), s.reader);
    if (count > 0) return add(task, at, keys(), count, over, share(count), mass, error, s);
    std::fill_n(mass, keys(), 0.0f);
    return true;
  }

  // mass, of the first look, becomes that of all rows for the best keys, as if there were no others.
  bool look_at_best(Index task, const KeySketch::Places* at, float* mass, float& error,
                    SketchedMassScratch& s) const {
    const std::span best(s.candidates.data(), static_cast<std::size_t>(look.candidates));
    top_k_head(mass, keys(), {}, best, s.top_k);
    KeySketch::Places of_best;
    Position* cell = best.data() + best.size();
    of_best.map.cells = cell;
    for (const Position key : best)
      *cell++ = at != nullptr ? static_cast<Position>((*at)(key)) : key;
    const Index count = read_rows(task, s.rows.data(), s.reader);
    float* const found = s.candidate_mass.data();
    float theirs;
    if (!add(task, &of_best, look.candidates, count, over, share(count), found, theirs, s))
      return false;
    error = std::max(error, theirs);
    for_each_place(keys(), [&](auto place) QUOKA_INLINE_LAMBDA {
      const auto x = place.load(mass);
      place.store(mass, select_finite(x, place.broadcast(0.0f), x));
    });
    for (std::size_t i = 0; i < best.size(); ++i) mass[best[i]] = found[i];
    return true;
  }

  bool add(Index task, const KeySketch::Places* at, Index key_count, Index row_count,
           Aggregation aggregation, float of_row, float* mass, float& error, SketchedMassScratch& s,
           bool rough = false) const {
    SketchedMass<Tiles> of_head(sketch, at, keys_of(task), key_count, task / k.heads(),
                                task % k.heads(), row_count, s);
    return of_head.add_to(mass, of_row, aggregation, error, rough);
  }

  void in_float(Index task, float* mass, MassScratch& s) const {
    const Index count = read_rows(task, s.rows.data(), s.query);
    std::fill_n(mass, keys(), 0.0f);
    RowKeys of_head(keys_of(task), keys(), s.key);
    MassAccumulator(s.rows.data(), count, k.dim(), of_head, keys(), s)
        .add_to(mass, share(std::max<Index>(count, 1)), over);
  }
};

template <class Tiles>
void sketched_softmax_scores_by(const KeySketch& sketch, const KeySketch::Places* places,
                                const float* q_bar, Index rows, const Rows& k, float logit_scale,
                                Index capacity, Aggregation over, TensorView<float, 3> scores,
                                SketchedMassState& state, ExecutorRef executor,
                                const Candidates* some, FirstLook look) {
  const SketchedMassCall<Tiles> call{sketch, places, q_bar, rows, k, logit_scale, over, some, look};
  const Index heads = k.heads(), tasks = k.batch() * heads, keys = call.keys();
  const Index most_keys = std::max(keys, capacity);
  state.scratch.reserve(executor.workers(), rows, most_keys, look.most_candidates, k,
                        packed_bytes<Tiles>(MassShape::padded(rows), simd::code_steps(k.dim())));
  float* const errors = state.errors.reserve(tasks);
  executor.run(tasks, [&](Index task, int worker) {
    SketchedMassScratch& s = state.scratch[worker];
    const Index b = task / heads, head = task % heads;
    float* const mass = scores.row(b, head, 0);
    const auto require = [&](Index key) {
      require_sketched(sketch, *places, k, b, head, key, s.reader);
    };
    if (places != nullptr) require(keys - 1), require(KeySketch::somewhere(keys));
    if (!call.by_sketch(task, mass, errors[task], s))
      errors[task] = simd::infinity;
    else if (places != nullptr)
      require(std::max_element(mass, mass + keys) - mass);
  });
  if (std::all_of(errors, errors + tasks, [](float e) { return e < simd::infinity; })) return;
  state.in_float.reserve(executor.workers(), rows, most_keys, k.dim());
  for (int worker = 0; worker < executor.workers(); ++worker) state.in_float[worker].key.reserve(k);
  executor.run(tasks, [&](Index task, int worker) {
    if (errors[task] == simd::infinity)
      call.in_float(task, scores.row(task / heads, task % heads, 0), state.in_float[worker]);
  });
}

QUOKA_FUNC void sketched_softmax_scores(const KeySketch& sketch, const KeySketch::Places* places,
                                        const float* q_bar, Index rows, const Rows& k,
                                        float logit_scale, Index capacity, Aggregation over,
                                        TensorView<float, 3> scores, SketchedMassState& state,
                                        ExecutorRef executor, const Candidates* some,
                                        FirstLook look, Chains* before) {
  if (before != nullptr) executor.run_chains(*before);
  sketched_softmax_scores_by<simd::Tiles>(sketch, places, q_bar, rows, k, logit_scale, capacity,
                                          over, scores, state, executor, some, look);
}

QUOKA_FUNC void softmax_scores_by_sketch(KeySketch& own, const KeySketch* cache, const float* q_bar,
                                         Index rows, const Rows& k, float logit_scale,
                                         Index capacity, Aggregation over,
                                         TensorView<float, 3> scores, SketchedMassState& state,
                                         ExecutorRef executor, FirstLook look, Chains* before) {
  if (cache == nullptr && before == nullptr)
    own.require_made_from(k);
  else if (cache == nullptr)
    own.require_shape_of(k);  // the keys are looked up by what comes before
  const KeySketch::Places places = cache == nullptr ? KeySketch::Places{} : cache->places_of(k);
  sketched_softmax_scores(cache == nullptr ? own : *cache, cache == nullptr ? nullptr : &places,
                          q_bar, rows, k, logit_scale, capacity, over, scores, state, executor,
                          nullptr, look, before);
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
