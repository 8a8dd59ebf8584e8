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
// 2 * rows * keys * dim 8-bit operations and rows * keys exponentials; reads dim + 12 bytes per key; holds weights of 2 bytes per row and key until the sums are known,
// tuning::mass_weight_bytes of them at a time.
#pragma once

#include <quoka/runtime/head_loops.hpp>
#include <quoka/select/query_scores.hpp>
#include <quoka/select/sketch/sketched_call.hpp>
#include <quoka/select/sketch/sketched_mass_head.hpp>

#include <algorithm>
#include <atomic>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// Reused memory.
struct SketchedMassState {
  WorkerScratch<SketchedMassScratch> scratch;
  GrowingArray<MassLook> slots;  // what the phases of one head share
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
             const TensorView<float, 3>& scores, SketchedMassState& state)
      : call_(call),
        plan_(plan),
        logit_scale_(logit_scale),
        scores_(scores),
        state_(state),
        ranges_(MassShape::ranges(call.k().len(), call.rows)) {
    const Rows& k = call.k();
    const int workers = call.executor.workers();
    state.scratch.reserve(workers, call.rows, &k.format(), k.dim());
    state.slots.at_least(plan.slots());
    for (MassLook& look : state.slots) look.reserve<Tiles>(call.rows, call.most_keys(), k.dim());
    // Where there was a head for float, there will be others, of any worker.
    state.in_float.at_least(workers);
    for (int worker = 0; state.any_in_float && worker < workers; ++worker) reserve_in_float(worker);
  }

  void run(const HeadLoops& on) const {
    const auto per_head = [&](auto&& f) {
      on.each(1, [&](Index task, Index, int worker) {
        with(task, worker, [&](Head& head) { f(head, task, worker); });
      });
    };
    const auto per_range = [&](auto&& f) {
      on.each(ranges_.count, [&](Index task, Index range, int worker) {
        with(task, worker, [&](Head& head) { f(head, task, range, worker); });
      });
    };
    on.each(1 + ranges_.count, [&](Index task, Index part, int worker) {
      if (part == 0) return read_rows(task, worker);
      with(task, worker, [&](Head& head) { head.read_keys(part - 1); });
    });
    const auto seek_largest = [&](Index step) {
      on.each(ceil_div(ranges_.count, together), [&](Index task, Index part, int worker) {
        const Index first = part * together, end = std::min(first + together, ranges_.count);
        with(task, worker, [&](Head& head) { head.seek_largest(first, end, step); });
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
    for (Index pass = 0; pass < MassShape::passes(call_.rows, ranges_.keys); ++pass) {
      per_range([&](Head& head, Index, Index range, int) { head.compute_weights(pass, range); });
      per_head([&](Head& head, Index task, int worker) {
        head.find_factors(pass, row_share(look(task, worker).count));
      });
      per_range([&](Head& head, Index task, Index range, int) {
        head.add(mass(task), pass, range, call_.aggregation);
      });
    }
    on.each(1, [&](Index task, Index, int worker) {
      finish(task, worker);
      if (call_.keys.mapping() != nullptr) look_up(task, worker);
    });
  }

 private:
  static constexpr Index together = 8;  // ranges of a task that mostly has nothing to do

  Index heads() const { return call_.k().heads(); }
  MassLook& look(Index task, int worker) const { return state_.slots[plan_.slot(task, worker)]; }
  float* mass(Index task) const { return scores_.row(task / heads(), task % heads(), 0); }

  using Head = SketchedMass<Tiles>;
  using Use = FunctionRef<void(Head&)>;

  [[gnu::noinline]] void with(Index task, int worker, Use use) const {
    Head head(call_.keys.sketch(), call_.keys.mapping(), call_.k(), task, ranges_,
              look(task, worker), state_.scratch[worker]);
    use(head);
  }

  // Those of the head's rows that are finite, times the logit scale; how many.
  Index write_rows(Index task, float* to, FloatRow& reader) const {
    RowWriter writer(to, call_.k().dim(), reader);
    for (Index m = 0; m < call_.rows; ++m)
      writer.add(call_.rows_of(task) + m * call_.k().dim(), logit_scale_);
    return writer.count();
  }
  // Rows to codes.
  void read_rows(Index task, int worker) const {
    MassLook& to = look(task, worker);
    to.method = Method::nothing;
    to.count = write_rows(task, to.rows.data(), state_.scratch[worker].reader);
    if (to.count > 0) with(task, worker, [](Head& head) { head.encode_rows(); });
  }

  // What a row's softmax is times.
  float row_share(Index rows) const {
    return call_.aggregation == Aggregation::max
               ? 1.0f
               : 1.0f / static_cast<float>(std::max<Index>(rows, 1));
  }

  // All of the head in float, where codes do not serve.
  void finish(Index task, int worker) const {
    const MassLook& x = look(task, worker);
    const bool in_float = x.method == Method::floats;
    state_.errors.data()[task] = in_float                      ? simd::infinity
                                 : x.method == Method::nothing ? 0.0f
                                                               : x.error * static_cast<float>(ln_2);
    if (in_float) score_in_float(task, mass(task), worker);
  }
  void reserve_in_float(int worker) const {
    MassScratch& s = state_.in_float[worker];
    s.reserve(call_.rows, call_.most_keys(), call_.k().dim());
  }
  void score_in_float(Index task, float* mass, int worker) const {
    const Rows& k = call_.k();
    reserve_in_float(worker);
    MassScratch& s = state_.in_float[worker];
    const Index count = write_rows(task, s.rows.data(), s.query);
    std::fill_n(mass, k.len(), 0.0f);
    RowKeys head_keys(k.head(task / k.heads(), task % k.heads()), k.len());
    MassAccumulator(s.rows.data(), count, k.dim(), head_keys, k.len(), s)
        .add_to(mass, row_share(count), call_.aggregation);
  }
  // The key that has most is what was sketched.
  void look_up(Index task, int worker) const {
    if (state_.errors.data()[task] == simd::infinity) return;
    const float* const x = mass(task);
    call_.keys.sketch().require_held(call_.k(), *call_.keys.mapping(), task % heads(),
                                     std::max_element(x, x + call_.k().len()) - x,
                                     state_.scratch[worker].reader);
  }

  const SketchedCall& call_;
  const HeadPlan& plan_;
  float logit_scale_;
  const TensorView<float, 3>& scores_;
  SketchedMassState& state_;
  KeyRanges ranges_;
};

// scores [batch, kv_heads, kv_len], side by side, of the call's rows times `logit_scale`: their mean share, or their
// largest. A row with a NaN or an infinity is left out; a key with one has no weight and ends with NaN. codes_fit()
// holds. Of keys in a cache that others keep, of each head the one that has most is looked up, too, and one that is not
// what was sketched throws std::invalid_argument. Tiles: what multiplies codes where tiles serve (matrix/code_units.hpp).
template <class Tiles = simd::Tiles>
void sketched_softmax_scores(const SketchedCall& call, float logit_scale,
                             TensorView<float, 3> scores, SketchedMassState& state) {
  const Index heads = call.heads();
  float* const errors = state.errors.reserve(heads);
  const HeadPlan plan(heads, call.executor);
  const MassStages<Tiles> stages(call, plan, logit_scale, scores, state);
  call.keys.look_up(state.turn, state.scratch[0].reader);
  plan.run([&](const HeadLoops& on) { stages.run(on); });
  state.any_in_float = state.any_in_float || std::any_of(errors, errors + heads, [](float e) {
                         return e == simd::infinity;
                       });
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
