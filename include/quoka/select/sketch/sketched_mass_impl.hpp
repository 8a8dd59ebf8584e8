// Definitions of sketched_mass.hpp.
#pragma once

#include <quoka/select/kit_impl.hpp>
#include <quoka/select/sketch/sketched_mass.hpp>
#include <quoka/select/sketch/sketched_mass_head.hpp>

#include <algorithm>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

QUOKA_FUNC bool sketched_mass_is_fast() { return simd::has_fast_code_products; }

QUOKA_FUNC void SketchedMassScratch::reserve(Index row_count, Index keys, const Rows& k) {
  const Index stride = SketchedMass::padded(row_count), pairs = SketchedMass::pairs(keys);
  rows.reserve(row_count * k.dim());
  codes.reserve(simd::code_steps(k.dim()) * stride);
  for (auto* of_rows : {&row_units, &bounds, &shifts, &factors}) of_rows->reserve(stride);
  offsets.reserve(stride);
  sums.reserve(stride * simd::lanes);
  products.reserve(SketchedMass::tile * simd::code_pair);
  units.reserve_amortised(pairs * simd::code_pair);
  partial.reserve_amortised(pairs);
  gathered.reserve(2 * simd::code_block_bytes(k.dim()));
  // A shorter cache may take more rows at once: whichever needs more.
  const Index of_row = pairs * simd::code_pair / 2;
  const Index most = tuning::mass_weight_bytes / Index{sizeof(std::uint32_t)};
  weights.reserve_amortised(
      std::max(std::min(stride, SketchedMass::tile) * of_row, std::min(stride * of_row, most)));
  reader.reserve(k);
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

QUOKA_FUNC void sketched_softmax_scores(const KeySketch& sketch, const KeySketch::Places* places,
                                        const float* q_bar, Index rows, const Rows& k,
                                        float logit_scale, Index capacity, Aggregation over,
                                        TensorView<float, 3> scores, SketchedMassState& state,
                                        ExecutorRef executor, const Candidates* some) {
  const Index heads = k.heads(), dim = k.dim(), tasks = k.batch() * heads;
  const Index keys = some != nullptr ? some->count : k.len();
  const auto rows_of = [&](Index task) {
    return some != nullptr ? some->rows(k, task) : k.head(task / heads, task % heads);
  };
  const Index most_keys = std::max(keys, capacity);
  state.scratch.reserve(executor.workers(), rows, most_keys, k);
  float* const errors = state.errors.reserve(tasks);
  const auto fill = [&](Index task, float* to, FloatRow& reader) {
    RowWriter writer(to, dim, reader);
    for (Index m = 0; m < rows; ++m)
      writer.add(q_bar + (task * rows + m) * dim, log2_of_e * logit_scale);
    return writer.count();
  };
  const auto share_of = [&](Index count) {
    return over == Aggregation::max ? 1.0f : 1.0f / static_cast<float>(std::max<Index>(count, 1));
  };
  executor.run(tasks, [&](Index task, int worker) {
    SketchedMassScratch& s = state.scratch[worker];
    const Index b = task / heads, head = task % heads, count = fill(task, s.rows.data(), s.reader);
    float* const mass = scores.row(task / heads, task % heads, 0);
    errors[task] = 0.0f;
    if (count == 0) return void(std::fill_n(mass, keys, 0.0f));
    if (places != nullptr)
      for (const Index key : {keys - 1, KeySketch::somewhere(keys)})
        require_sketched(sketch, *places, k, b, head, key, s.reader);
    const KeySketch::Places listed = some != nullptr ? some->places(task) : KeySketch::Places{};
    SketchedMass of_head(sketch, some != nullptr ? &listed : places, rows_of(task), keys, b, head,
                         count, s);
    if (!of_head.add_to(mass, share_of(count), over, errors[task])) {
      errors[task] = simd::infinity;
    } else if (places != nullptr) {
      const auto best = std::max_element(mass, mass + keys) - mass;
      require_sketched(sketch, *places, k, b, head, best, s.reader);
    }
  });
  if (std::all_of(errors, errors + tasks, [](float e) { return e < simd::infinity; })) return;
  state.in_float.reserve(executor.workers(), rows, most_keys, dim);
  for (int worker = 0; worker < executor.workers(); ++worker) state.in_float[worker].key.reserve(k);
  executor.run(tasks, [&](Index task, int worker) {
    if (errors[task] < simd::infinity) return;
    MassScratch& s = state.in_float[worker];
    const Index count = fill(task, s.rows.data(), s.query);
    float* const mass = scores.row(task / heads, task % heads, 0);
    std::fill_n(mass, keys, 0.0f);
    RowKeys of_head(rows_of(task), keys, s.key);
    MassAccumulator(s.rows.data(), count, dim, of_head, keys, s)
        .add_to(mass, share_of(count), over);
  });
}

QUOKA_FUNC void softmax_scores_by_sketch(KeySketch& own, const KeySketch* cache, const float* q_bar,
                                         Index rows, const Rows& k, float logit_scale,
                                         Index capacity, Aggregation over,
                                         TensorView<float, 3> scores, SketchedMassState& state,
                                         ExecutorRef executor) {
  if (cache == nullptr) own.require_made_from(k);
  const KeySketch::Places places = cache == nullptr ? KeySketch::Places{} : cache->places_of(k);
  sketched_softmax_scores(cache == nullptr ? own : *cache, cache == nullptr ? nullptr : &places,
                          q_bar, rows, k, logit_scale, capacity, over, scores, state, executor);
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
