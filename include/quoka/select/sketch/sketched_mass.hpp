// Softmax mass by the keys' sketch: what softmax_scores() makes of rows and keys in float, from
// products of their 8-bit codes. For Domain::softmax.
//
//   y[m][t] = unit[m] scale[t] length[t] (code_q[m] . code_k[t])      the sketched logit
//   mass[t] = share * sum over m of exp(y[m][t]) / sum over t' of exp(y[m][t'])
//
// or the maximum over the rows m in place of their sum. Each row has a unit of its own, the largest
// channel / 127, or more where the ISA adds products in 16 bits (simd/code_dots.hpp). No logit is
// computed in float: this is no refinement of near candidates, and the Selection is another one than in
// float, of nearly the same mass.
//
// What is guaranteed. A row q = unit code_q + d_q with |d_q| = e and a key k = length (scale code_k + d_k)
// with |d_k| <= error differ from what stands for them by
//
//   |q.k - y| <= eps = e length + (|q| + e) length error + (2 head_dim + 32) 2^-24 |q| length
//
// the last term for rounding on either side. eps is that of the worst row, with the largest length
// and the largest length * error of all keys. So weights are off by factors within exp(+-eps), sums of a
// row's weights as well, and both by weight_error for what they are rounded to:
//
//   float's mass[t] exp(-a) <= mass[t] <= float's mass[t] exp(a),   a = 2 eps + weight_error
//
// (of masses above 1e-15; a smaller one stays below it). Let S be the best keys in float and S' as many by
// the sketch, M float's mass of a set and M' the sketch's. Then
//
//   M(S') >= exp(-a) M'(S') >= exp(-a) M'(S) >= exp(-2a) M(S)
//
// A head of which eps exceeds most_logit_error, or one with finite keys or rows that codes cannot stand
// for, is done in float. That is the worst case, all errors in one direction. Errors of single channels
// have any sign: on recorded and generated data logits are off by 1/17 to 1/30 of eps (root mean square),
// and S' holds M(S) but for 0.002 points on average and 0.03 in the worst head.
//
// Where FirstLook says so, in two looks. Each of some rows finds the largest of its shares; the keys of the
// largest ones are the candidates; and mass is that of all
// rows among these, as if there were no other keys. Of the others it is 0. The bound above is then that of
// the best of the candidates, and nothing is promised of other keys. Their codes are put together, of 16 keys
// from up to 16 blocks.
//
// 2 * rows * keys * dim 8-bit operations and rows * keys exponentials; reads dim + 12 bytes per key; holds weights of 2 bytes per row and key until the sums are known,
// tuning::mass_weight_bytes of them at a time.
#pragma once

#include <quoka/select/query_scores.hpp>
#include <quoka/select/sketch/sketched_call.hpp>
#include <quoka/select/sketch/sketched_mass_head.hpp>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <span>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// What the phases of one head share.
struct SketchedMassSlot {
  MassLook looks[2];             // the only one, or the first and that at its candidates
  Buffer<Position> candidates;   // positions, then rows of the sketch
  Buffer<float> candidate_mass;  // [candidates]

  template <class Tiles>
  void reserve(const SketchedCall& call, Index most_candidates) {
    const Index rows = call.rows, dim = call.k().dim();
    looks[0].reserve<Tiles>(rows, call.most_keys(), dim);
    if (most_candidates == 0) return;
    looks[1].reserve<Tiles>(rows, most_candidates, dim);
    candidates.reserve_amortised(2 * most_candidates);
    candidate_mass.reserve_amortised(most_candidates);
  }
  Index bytes() const { return bytes_of(looks[0], looks[1], candidates, candidate_mass); }
};

// Reused memory.
struct SketchedMassState {
  WorkerScratch<SketchedMassScratch> scratch;
  GrowingArray<SketchedMassSlot> slots;
  WorkerScratch<MassScratch>
      in_float;               // empty until the worker does a head in float, or after any did
  bool any_in_float = false;  // in a call before
  std::uint64_t turn = 0;     // of looking keys up
  Buffer<float> errors;       // [batch, kv_heads] eps in nats; infinity: the head was done in float

  Index bytes() const { return bytes_of(scratch, slots, in_float, errors); }
};

// The phases of a call. Each head's work lies in its slot's scratch memory.
template <class Tiles>
class MassStages : MassShape {
  using Method = MassLook::Method;

 public:
  MassStages(const SketchedCall& call, const HeadPlan& plan, float logit_scale,
             const FirstLook& look, const TensorView<float, 3>& scores, SketchedMassState& state)
      : call_(call),
        plan_(plan),
        logit_scale_(logit_scale),
        look_(look),
        scores_(scores),
        state_(state),
        twice_(look.candidates > 0),
        ranges_{MassShape::ranges(call.k().len(), twice_ ? std::ssize(look.rows) : call.rows),
                MassShape::ranges(look.candidates, call.rows)},
        chosen_(ranges_for(call.k().len())),
        candidates_(ranges_for(look.candidates)) {
    const Rows& k = call.k();
    const int workers = call.executor.workers();
    state.scratch.reserve(workers, call.rows, call.most_keys(), look.most_candidates, &k.format(),
                          k.dim());
    state.slots.at_least(plan.slots());
    for (SketchedMassSlot& slot : state.slots) slot.reserve<Tiles>(call, look.most_candidates);
    // Where there was a head for float, there will be others, of any worker.
    state.in_float.at_least(workers);
    for (int worker = 0; state.any_in_float && worker < workers; ++worker) reserve_in_float(worker);
  }

  void run(const HeadLoops& on) const {
    const auto step = [this](auto member) {
      return [this, member](Index task, Index part, int worker) {
        (this->*member)(task, part, worker);
      };
    };
    on.each(row_tasks() + ranges_[0].count, step(&MassStages::read));
    look(on, 0);
    if (twice_) {
      on.each(1, step(&MassStages::find_best));
      on.each(ranges_[1].count + chosen_.count, step(&MassStages::read_best));
      look(on, 1);
    }
    on.each(twice_ ? candidates_.count : 1, step(&MassStages::finish));
    if (call_.keys.mapping() != nullptr) on.each(1, step(&MassStages::look_up));
  }

 private:
  static constexpr Index together = 8;  // ranges of a task that mostly has nothing to do

  void look(const HeadLoops& on, int look) const {
    const Index ranges = ranges_[look].count;
    const auto per_head = [&](auto&& f) {
      on.each(1, [&](Index task, Index, int worker) {
        with(task, look, worker, [&](Head& head) { f(head, task, worker); });
      });
    };
    const auto per_range = [&](auto&& f) {
      on.each(ranges, [&](Index task, Index range, int worker) {
        with(task, look, worker, [&](Head& head) { f(head, task, range, worker); });
      });
    };
    const auto seek_largest = [&](Index step) {
      on.each(ceil_div(ranges, together), [&](Index task, Index part, int worker) {
        const Index first = part * together, end = std::min(first + together, ranges);
        with(task, look, worker, [&](Head& head) { head.seek_largest(first, end, step); });
      });
    };
    std::atomic<bool> seeks{false};  // mostly no head does
    per_head([&](Head& head, Index, int) {
      if (head.bound()) seeks.store(true, std::memory_order_relaxed);
    });
    if (seeks.load(std::memory_order_relaxed)) {
      seek_largest(16);  // in a sample of the keys
      per_head([](Head& head, Index, int) { head.judge_sample(); });
      seek_largest(1);  // in all of them
      per_head([](Head& head, Index, int) { head.shift_to_largest(); });
    }
    for (Index pass = 0; pass < MassShape::passes(call_.rows, ranges_[look].keys); ++pass) {
      per_range([&](Head& head, Index, Index range, int) { head.compute_weights(pass, range); });
      per_head([&](Head& head, Index task, int worker) {
        head.find_factors(pass, largest(task, look, worker)
                                    ? 1.0f
                                    : row_share(slot(task, worker).looks[look].count));
      });
      per_range([&](Head& head, Index task, Index range, int worker) {
        SketchedMassSlot& s = slot(task, worker);
        head.add(look == 0 ? mass(task) : s.candidate_mass.data(), pass, range,
                 largest(task, look, worker) ? Aggregation::max : call_.aggregation);
      });
    }
  }

  Index row_tasks() const { return twice_ ? 2 : 1; }  // tasks of read() that see to rows
  Index heads() const { return call_.k().heads(); }
  KeyRanges ranges_for(Index keys) const {
    return KeyRanges::for_workers(keys, call_.heads(), plan_.workers());
  }
  SketchedMassSlot& slot(Index task, int worker) const {
    return state_.slots[plan_.slot(task, worker)];
  }
  float* mass(Index task) const { return scores_.row(task / heads(), task % heads(), 0); }
  std::span<Position> best(Index task, int worker) const {
    return {slot(task, worker).candidates.data(), static_cast<std::size_t>(look_.candidates)};
  }
  // Does the head go on to its candidates?
  bool goes_on(Index task, int worker) const {
    const MassLook& first = slot(task, worker).looks[0];
    return twice_ && first.method == Method::sketch && !first.all_rows;
  }

  using Head = SketchedMass<Tiles>;
  using Use = FunctionRef<void(Head&)>;

  // use(head) of a look; the second at its candidates, where the head goes on to them.
  void with(Index task, int look, int worker, Use use) const {
    if (look == 0 || goes_on(task, worker)) with_any(task, look, worker, use);
  }
  [[gnu::noinline]] void with_any(Index task, int look, int worker, Use use) const {
    KeySketch::RowMapping candidate_rows;
    if (look == 1) candidate_rows.map.cells = best(task, worker).data() + look_.candidates;
    Head head(call_.keys.sketch(), look == 1 ? &candidate_rows : call_.keys.mapping(), call_.k(),
              task, ranges_[look], slot(task, worker).looks[look], state_.scratch[worker]);
    use(head);
  }

  // Those of the head's rows, or of `only` these, that are finite, times the logit scale; how many.
  Index read_rows(Index task, float* to, FloatRow& reader, std::span<const Index> only = {}) const {
    RowWriter writer(to, call_.k().dim(), reader);
    const Index count = only.empty() ? call_.rows : std::ssize(only);
    for (Index i = 0; i < count; ++i) {
      const Index m = only.empty() ? i : only[static_cast<std::size_t>(i)];
      writer.add(call_.rows_of(task) + m * call_.k().dim(), logit_scale_);
    }
    return writer.count();
  }

  // Rows of the looks to codes, and what there is of the keys.
  void read(Index task, Index part, int worker) const {
    FloatRow& reader = state_.scratch[worker].reader;
    if (part >= row_tasks())
      return with(task, 0, worker, [&](Head& head) { head.read_keys(part - row_tasks()); });
    MassLook& to = slot(task, worker).looks[part];
    to.all_rows = false, to.method = Method::nothing;
    const bool some = part == 0 && twice_;
    to.count =
        read_rows(task, to.rows.data(), reader, some ? look_.rows : std::span<const Index>{});
    if (some && to.count == 0) {
      to.all_rows = true;
      to.count = read_rows(task, to.rows.data(), reader);
    }
    if (to.count > 0)
      with_any(task, static_cast<int>(part), worker, [](Head& head) { head.encode_rows(); });
  }

  // Of a first look each row counts by itself.
  bool largest(Index task, int look, int worker) const {
    return look == 0 && twice_ && !slot(task, worker).looks[0].all_rows;
  }
  // What a row's softmax is times.
  float row_share(Index rows) const {
    return call_.aggregation == Aggregation::max
               ? 1.0f
               : 1.0f / static_cast<float>(std::max<Index>(rows, 1));
  }

  // The keys of the largest shares.
  void find_best(Index task, Index, int worker) const {
    if (goes_on(task, worker))
      top_k_head(mass(task), call_.k().len(), {}, best(task, worker), state_.scratch[worker].top_k);
  }
  // What there is of these; and the mass of all others, which is 0.
  void read_best(Index task, Index part, int worker) const {
    if (!goes_on(task, worker)) return;
    if (part < ranges_[1].count) {
      find_cells(task, part, worker);
      return with(task, 1, worker, [&](Head& head) { head.read_keys(part); });
    }
    const auto [begin, end] = chosen_.of(part - ranges_[1].count);
    float* const x = mass(task);
    for (Index t = begin; t < end; ++t) x[t] = std::isfinite(x[t]) ? 0.0f : x[t];
  }

  // Rows of the sketch where a range of candidates lies.
  void find_cells(Index task, Index range, int worker) const {
    Position* const keys = best(task, worker).data();
    Position* const cells = keys + look_.candidates;
    const KeySketch::RowMapping* const mapping = call_.keys.mapping();
    const auto [begin, end] = ranges_[1].of(range);
    for (Index i = begin; i < end; ++i)
      cells[i] = mapping != nullptr ? static_cast<Position>((*mapping)(keys[i])) : keys[i];
  }

  // The candidates' mass in its place; or all of the head in float.
  void finish(Index task, Index part, int worker) const {
    const SketchedMassSlot& s = slot(task, worker);
    const MassLook* const looks = s.looks;
    const bool second = goes_on(task, worker);
    const bool in_float =
        looks[0].method == Method::floats || (second && looks[1].method == Method::floats);
    float* const x = mass(task);
    if (part == 0) {
      float error = looks[0].method == Method::nothing ? 0.0f : looks[0].error;
      if (second) error = std::max(error, looks[1].error);
      state_.errors.data()[task] = in_float ? simd::infinity : error * static_cast<float>(ln_2);
    }
    if (in_float) {
      if (part > 0) return;
      return score_in_float(task, x, worker);
    }
    if (!second) return;
    const auto [begin, end] = candidates_.of(part);
    for (Index i = begin; i < end; ++i) x[s.candidates.data()[i]] = s.candidate_mass.data()[i];
  }
  void reserve_in_float(int worker) const {
    MassScratch& s = state_.in_float[worker];
    s.reserve(call_.rows, call_.most_keys(), call_.k().dim());
  }
  void score_in_float(Index task, float* mass, int worker) const {
    const Rows& k = call_.k();
    reserve_in_float(worker);
    MassScratch& s = state_.in_float[worker];
    const Index count = read_rows(task, s.rows.data(), s.query);
    std::fill_n(mass, k.len(), 0.0f);
    RowKeys head_keys(k.head(task / k.heads(), task % k.heads()), k.len());
    MassAccumulator(s.rows.data(), count, k.dim(), head_keys, k.len(), s)
        .add_to(mass, row_share(count), call_.aggregation);
  }
  // The key that has most is what was sketched.
  void look_up(Index task, Index, int worker) const {
    if (state_.errors.data()[task] == simd::infinity) return;
    const float* const x = mass(task);
    call_.keys.sketch().require_held(call_.k(), *call_.keys.mapping(), task % heads(),
                                     std::max_element(x, x + call_.k().len()) - x,
                                     state_.scratch[worker].reader);
  }

  const SketchedCall& call_;
  const HeadPlan& plan_;
  float logit_scale_;
  const FirstLook& look_;
  const TensorView<float, 3>& scores_;
  SketchedMassState& state_;
  bool twice_;
  KeyRanges ranges_[2], chosen_, candidates_;
};

// scores [batch, kv_heads, kv_len], side by side, of the call's rows times `logit_scale`: their mean share, or their
// largest. A row with a NaN or an infinity is left out; a key with one has no weight and ends with NaN. codes_fit()
// holds. Of keys in a cache that others keep, of each head the one that has most is looked up, too, and one that is not
// what was sketched throws std::invalid_argument. Tiles: what
// multiplies codes where tiles serve (matrix/code_units.hpp).
template <class Tiles = simd::Tiles>
void sketched_softmax_scores(const SketchedCall& call, float logit_scale, const FirstLook& look,
                             TensorView<float, 3> scores, SketchedMassState& state) {
  const Index heads = call.heads();
  float* const errors = state.errors.reserve(heads);
  const HeadPlan plan(heads, call.executor);
  const MassStages<Tiles> stages(call, plan, logit_scale, look, scores, state);
  call.keys.look_up(state.turn, state.scratch[0].reader);
  plan.run([&](const HeadLoops& on) {
    if (call.first != nullptr) (*call.first)(on);
    stages.run(on);
  });
  state.any_in_float = state.any_in_float || std::any_of(errors, errors + heads, [](float e) {
                         return e == simd::infinity;
                       });
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
