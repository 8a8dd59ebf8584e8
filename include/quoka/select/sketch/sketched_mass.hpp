// Softmax mass by the keys' sketch: what softmax_scores() makes of rows and keys in float, from
// products of their 8-bit codes. For Domain::softmax.
//
//   y[m][t] = unit[m] scale[t] length[t] (code_q[m] . code_k[t])      the sketched logit
//   mass[t] = share * sum over m of exp(y[m][t]) / sum over t' of exp(y[m][t'])
//
// or the maximum over the rows m in place of their sum. Each row has a unit of its own, the largest
// channel / 127, or more where the ISA adds products in 16 bits (simd/code_dots.hpp). No logit is
// computed in float: this does not refine near candidates, and the Selection is another one than in
// float, of nearly the same mass.
//
// Guarantees. Sketched logits are within eps of float's (coded_weights.hpp, which says which heads are done in
// float for it). So weights are off by factors within exp(+-eps), sums of a row's weights as well, and both by
// weight_error for what they are rounded to:
//
//   float's mass[t] exp(-a) <= mass[t] <= float's mass[t] exp(a),   a = 2 eps + weight_error
//
// (of masses above 1e-15; a smaller one stays below it). Let S be the best keys in float and S' as many by
// the sketch, M float's mass of a set and M' the sketch's. Then
//
//   M(S') >= exp(-a) M'(S') >= exp(-a) M'(S) >= exp(-2a) M(S)
//
// On recorded and generated data S' holds M(S) within 0.002 points on average and 0.03 in the worst head.
#pragma once

#include <quoka/select/query_scores.hpp>
#include <quoka/select/sketch/coded_weights.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// Memory that the tasks of a KV head share.
struct MassSlot : CodeMemory {
  MassSlot(Arena& arena, Index row_count, Index keys, Index dim)
      : CodeMemory(arena, row_count, keys, dim), rows(arena.take<float>(row_count * dim)) {
    weights = arena.take<std::uint32_t>(weight_words(row_count, keys));
  }
  // A shorter cache may take more rows at once: whichever needs more.
  static Index weight_words(Index row_count, Index keys) {
    const Index row_words = MassShape::pairs(keys) * MassShape::pair / 2;
    const Index most = tuning::mass_weight_bytes / Index{sizeof(std::uint32_t)};
    return std::max(MassShape::pass_rows(row_count, keys) * row_words,
                    std::min(CodedRows::padded(row_count) * row_words, most));
  }

  float* rows;      // [rows][dim], finite ones
  Index count = 0;  // of these
};

// Reused memory.
struct SketchedMassState {
  Arenas heads, workers;
  std::vector<MassSlot> slots;
  WorkerScratch<CodedRows> coded;    // of each slot
  WorkerScratch<RowReader> readers;  // to read a key or a row
  WorkerScratch<MassScratch>
      in_float;               // empty until the worker does a head in float, or after any did
  bool any_in_float = false;  // in a call before
  std::uint64_t turn = 0;     // of looking keys up
  Buffer<float> errors;       // [batch, kv_heads] eps in nats; infinity: the head was done in float

  Index bytes() const { return bytes_of(heads, workers, coded, readers, in_float, errors); }
};

// What a row's softmax is times, of so many rows.
inline float row_share(Index rows, Aggregation over) {
  return over == Aggregation::max ? 1.0f : 1.0f / static_cast<float>(std::max<Index>(rows, 1));
}

// The mass of one KV head, from its rows' weights. Tiles: what multiplies codes where tiles serve
// (kernels/code_units.hpp).
template <class Tiles>
class SketchedMass : public CodedWeights<Tiles> {
  using Base = CodedWeights<Tiles>;
  using Base::pair, Base::keys_, Base::ranges_, Base::m_;

 public:
  SketchedMass(const SketchedKeys& keys, const KeyRanges& ranges, Index b, Index kv_head,
               MassSlot& slot, const CodeScratch& scratch)
      : Base(keys, ranges, b, kv_head, slot, scratch), slot_(slot) {}

  // Codes of all rows; from here on they are in units of log2.
  void encode_rows() const {
    const Index dim = keys_.k().dim();
    for (Index i = 0; i < slot_.count * dim; ++i) slot_.rows[i] *= simd::log2_e;
    m_.channels.take_all();
    this->encode(slot_.rows, slot_.count, MassShape::pass_rows(slot_.count, ranges_.keys));
  }
  // The factors that take each row's weights to its share of the mass.
  void find_factors(Index pass, Aggregation over) const {
    const float share = row_share(slot_.count, over);
    const auto [first, count] = this->rows_of(pass);
    for (Index m = 0; m < count; ++m) {
      float sum = 0.0f;
      for (Index r = 0; r < ranges_.count; ++r) sum += m_.range_rows[r * this->stride() + m];
      m_.factors[m] = first + m < slot_.count && sum > 0.0f ? share * share_scale / sum : 0.0f;
    }
  }
  // mass [keys] of a range. Keys that are not finite have no mass to speak of.
  void add(float* mass, Index pass, Index r, Aggregation over) const {
    const auto [begin, end] = ranges_.of(r);
    if (slot_.count == 0 && pass == 0) std::fill(mass + begin, mass + end, 0.0f);
    const auto [first, count] = this->rows_of(pass);
    if (count == 0) return;
    for (Index kv = begin; kv < end; kv += pair) {
      alignas(64) float shares[pair];
      shares_of_weights(this->weights(kv, count), m_.factors, count, over, shares);
      const Index n = std::min(pair, ranges_.keys - kv);
      if (pass == 0)
        std::copy_n(shares, n, mass + kv);
      else if (over != Aggregation::max)
        for (Index i = 0; i < n; ++i) mass[kv + i] += shares[i];
      else
        for (Index i = 0; i < n; ++i) mass[kv + i] = std::max(mass[kv + i], shares[i]);
      if (m_.partial[kv / pair] == 0) continue;
      for (Index t = kv; t < std::min(kv + pair, end); ++t)
        if (m_.units[t] < 0.0f) mass[t] = std::numeric_limits<float>::quiet_NaN();
    }
  }

 private:
  MassSlot& slot_;
};

// The stages of a call (run_by_codes()). Each head's work lies in its slot's memory.
template <class Tiles>
class MassStages {
  using Head = SketchedMass<Tiles>;

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
    const auto slots = static_cast<int>(plan.slots());
    const auto slot = [&](Arena& arena) {
      return MassSlot(arena, call.rows, call.most_keys(), k.dim());
    };
    state.heads.reserve(slots, slot);
    state.workers.reserve(workers, [&](Arena& arena) { CodeScratch(arena, call.rows, k.dim()); });
    state.readers.reserve(workers, k);
    state.coded.at_least(slots);
    for (CodedRows& coded : state.coded)
      coded.reserve<Tiles>(call.rows, k.dim(), MassShape::pass_rows(call.rows, call.most_keys()));
    state.slots.clear();
    for (int i = 0; i < slots; ++i) {
      Arena arena = state.heads[i];
      state.slots.push_back(slot(arena));
      state.slots.back().coded = &state.coded[i];
    }
    // Where there was a head for float, there will be others, of any worker.
    state.in_float.at_least(workers);
    for (int worker = 0; state.any_in_float && worker < workers; ++worker) reserve_in_float(worker);
  }

  void run(const HeadLoops& on) const {
    run_by_codes(*this, on, ranges_.count, MassShape::passes(call_.rows, ranges_.keys));
    on.each(1, [&](Index task, Index, int worker) { finish(task, worker); });
  }

  // ---- stages ----

  template <class Use>
  void with(Index task, int worker, Use&& use) const {
    Arena arena = state_.workers[worker];
    const CodeScratch scratch(arena, call_.rows, call_.k().dim());
    use(Head(call_.keys, ranges_, task / heads(), task % heads(), slot(task, worker), scratch));
  }
  void encode(Index task, int worker) const {
    MassSlot& to = slot(task, worker);
    to.by_codes = false;
    to.count = write_rows(task, to.rows, reader(worker));
    if (to.count > 0) with(task, worker, [](const Head& head) { head.encode_rows(); });
  }
  RowReader& reader(int worker) const { return state_.readers[worker]; }
  void find_factors(const Head& head, Index, Index pass) const {
    head.find_factors(pass, call_.aggregation);
  }
  void add(const Head& head, Index task, Index pass, Index range) const {
    head.add(mass(task), pass, range, call_.aggregation);
  }

 private:
  Index heads() const { return call_.k().heads(); }
  MassSlot& slot(Index task, int worker) const {
    return state_.slots[static_cast<std::size_t>(plan_.slot(task, worker))];
  }
  float* mass(Index task) const { return scores_.row(task / heads(), task % heads(), 0); }

  // Those of the head's rows that are finite, times the logit scale; how many.
  Index write_rows(Index task, float* to, RowReader& row_reader) const {
    RowWriter writer(to, call_.k().dim(), row_reader);
    for (Index m = 0; m < call_.rows; ++m)
      writer.add(call_.rows_of(task) + m * call_.k().dim(), logit_scale_);
    return writer.count();
  }

  // All of the head in float, where codes do not serve. Else the key that has most is looked up in a cache that others
  // keep.
  void finish(Index task, int worker) const {
    const MassSlot& x = slot(task, worker);
    const bool in_float = !x.by_codes && x.count > 0;
    state_.errors.data()[task] = in_float       ? simd::infinity
                                 : x.count == 0 ? 0.0f
                                                : x.error * static_cast<float>(ln_2);
    if (in_float)
      score_in_float(task, mass(task), worker);
    else
      call_.keys.look_up_best(task % heads(), mass(task), reader(worker));
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
        .add_to(mass, row_share(count, call_.aggregation), call_.aggregation);
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
// what was sketched throws std::invalid_argument. Tiles: what multiplies codes where tiles serve
// (kernels/code_units.hpp).
template <class Tiles = simd::Tiles>
void sketched_softmax_scores(const SketchedCall& call, float logit_scale,
                             TensorView<float, 3> scores, SketchedMassState& state) {
  const Index heads = call.heads();
  float* const errors = state.errors.reserve(heads);
  const HeadPlan plan(heads, call.executor);
  const MassStages<Tiles> stages(call, plan, logit_scale, scores, state);
  call.keys.look_up(state.turn, state.readers[0]);
  plan.run([&](const HeadLoops& on) { stages.run(on); });
  state.any_in_float = state.any_in_float || std::any_of(errors, errors + heads, [](float e) {
                         return e == simd::infinity;
                       });
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
