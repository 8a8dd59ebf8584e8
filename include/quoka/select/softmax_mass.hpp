// The library's one softmax mass: softmax_scores() of query_scores.hpp, over all heads of a call. MassSelector calls it
// for shares, and the methods that weigh attention (methods/rows_scorer.hpp) for scores.
//
//   rows       FillRows writes them, set after set: a set is the rows of one head of the scores
//   by codes   code_mass.hpp, where there are codes and they serve: nearly the scores of float, in 0.3 of the time
//   in float   float_mass.hpp, for all other heads
//
// 2 * rows * keys * dim operations and an exponential for each row and key. Memory for each KV head at work: a pass of
// weights (tuning::mass_weight_bytes), and the rows, as they are and packed. No result depends on the executor, on the
// layout of the keys, or on earlier calls.
#pragma once

#include <quoka/runtime/head_loops.hpp>
#include <quoka/select/code_mass.hpp>
#include <quoka/select/float_mass.hpp>
#include <quoka/select/query_scores.hpp>

#include <algorithm>
#include <atomic>
#include <memory>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// Tiles: what multiplies codes where tiles serve (kernels/code_units.hpp).
template <class Tiles = simd::Tiles>
class SoftmaxMass {
  using Codes = CodeMass<Tiles>;

 public:
  SoftmaxMass(const SoftmaxScoring& call, const TensorView<float, 3>& scores,
              QueryScoreState& state, ExecutorRef executor)
      : call_(call),
        scores_(scores),
        state_(state),
        codes_(call.softcap == 0.0f && call.over == Aggregation::mean && call.codes ? &*call.codes
                                                                                    : nullptr),
        shape_{.sets = scores.heads() / call.keys.heads(),
               .set_rows = std::max<Index>(CodedRows::padded(call.rows.max_rows), 2),
               .dim = call.rows.dim,
               .keys = scores.len(),
               .chunk = call.chunk_k.len(),
               .over = call.over,
               .softcap = call.softcap,
               .all_channels = call.all_channels},
        plan_(scores.batch() * kv_heads(), executor) {
    const int slots = static_cast<int>(plan_.slots()), workers = executor.workers();
    // A fuller cache may take fewer rows at once: whichever needs more.
    for (const Index keys : {shape_.keys, std::max(shape_.keys, call.capacity)}) {
      MassShape of = shape_;
      of.keys = keys;
      state.heads.reserve(slots, [&](Arena& arena) { Slot(arena, of, codes_ != nullptr); });
      state.workers.reserve(workers,
                            [&](Arena& arena) { Worker(arena, of, call.rows.read.dim()); });
    }
    const auto of_call = [&](Arena& arena) {
      slots_ = arena.take<Slot>(slots);
      errors_ = arena.take<float>(scores.batch() * kv_heads());
    };
    state.call.reserve(1, of_call);
    Arena arena = state.call[0];
    of_call(arena);
    for (int slot = 0; slot < slots; ++slot) {
      Arena memory = state.heads[slot];
      std::construct_at(slots_ + slot, memory, shape_, codes_ != nullptr);
    }
    state.errors = {errors_, static_cast<std::size_t>(scores.batch() * kv_heads())};
  }

  void run() const {
    if (codes_ != nullptr) {
      Worker w = scratch(0);
      codes_->look_up(state_.turn, w.reader);
    }
    plan_.run(*this);
  }
  // All stages, of all heads or of one.
  void operator()(const HeadLoops& on) const {
    on.each(1, [&](Index task, Index, int worker) { read_rows(task, worker); });
    if (codes_ != nullptr) by_codes(on);
    in_float(on);
    on.each(1, [&](Index task, Index, int worker) { finish(task, worker); });
  }

 private:
  // A KV head at work, and one worker.
  struct Slot {
    Slot(Arena& arena, const MassShape& shape, bool coded)
        : head(arena, shape,
               std::max(FloatMass::weight_bytes(shape), coded ? Codes::weight_bytes(shape) : 0)),
          codes(CodeMemory::with<Tiles>(arena, shape, head.weights)) {}
    HeadMass head;
    CodeMemory codes;
  };
  struct Worker {
    // query_dim: of rows from which those of the mass are made.
    Worker(Arena& arena, const MassShape& shape, Index query_dim)
        : floats(arena, shape.dim),
          codes(arena, shape.rows(), shape.dim),
          reader(arena, std::max(shape.dim, query_dim)) {}
    FloatScratch floats;
    CodeScratch codes;
    RowReader reader;
  };

  Index kv_heads() const { return call_.keys.heads(); }
  Slot& slot(Index task, int worker) const { return slots_[plan_.slot(task, worker)]; }
  Worker scratch(int worker) const {
    Arena arena = state_.workers[worker];
    return Worker(arena, shape_, call_.rows.read.dim());
  }
  HeadRows keys(Index task) const { return call_.keys.head(task / kv_heads(), task % kv_heads()); }
  SetScores scores(Index task) const {
    return {scores_.data() + task / kv_heads() * scores_.strides()[0] +
                task % kv_heads() * shape_.sets * scores_.strides()[1],
            scores_.strides()[1]};
  }
  Codes codes(Index task, int worker) const {
    Slot& s = slot(task, worker);
    return Codes(shape_, *codes_, task / kv_heads(), task % kv_heads(), s.head, s.codes,
                 scratch(worker).codes);
  }

  // ---- stages ----

  void read_rows(Index task, int worker) const {
    Slot& s = slot(task, worker);
    const FloatMass head(shape_, s.head);
    Worker w = scratch(worker);
    const Index b = task / kv_heads(), first = task % kv_heads() * shape_.sets;
    for (Index set = 0; set < shape_.sets; ++set) {
      const Index row = set * shape_.set_rows;
      RowWriter rows(s.head.rows + row * shape_.dim, shape_.dim, w.reader, s.head.ends + row);
      call_.fill(b, first + set, rows);
      head.take_set(set, rows.count());
    }
    head.pack_rows();
    if (shape_.chunk > 0) head.see_chunk(call_.chunk_k.head(b, task % kv_heads()), w.floats);
    s.codes.by_codes = false;
  }

  void by_codes(const HeadLoops& on) const {
    const Index ranges = Codes::ranges(shape_).count;
    on.each(1 + ranges, [&](Index task, Index part, int worker) {
      Worker w = scratch(worker);
      if (part == 0)
        codes(task, worker).encode_rows();
      else
        codes(task, worker).read_keys(part - 1, w.reader);
    });
    std::atomic<bool> seeks{false};  // set by few heads
    on.each(1, [&](Index task, Index, int worker) {
      if (codes(task, worker).bound()) seeks.store(true, std::memory_order_relaxed);
    });
    if (seeks.load(std::memory_order_relaxed)) {
      // In a sample of the keys, then in all.
      on.each(ranges, [&](Index task, Index range, int worker) {
        codes(task, worker).seek_largest(range, 16);
      });
      on.each(1, [&](Index task, Index, int worker) { codes(task, worker).judge_sample(); });
      on.each(ranges, [&](Index task, Index range, int worker) {
        codes(task, worker).seek_largest(range, 1);
      });
      on.each(1, [&](Index task, Index, int worker) { codes(task, worker).shift_to_largest(); });
    }
    for (Index pass = 0; pass < Codes::passes(shape_); ++pass) {
      on.each(ranges, [&](Index task, Index range, int worker) {
        codes(task, worker).compute_weights(pass, range);
      });
      on.each(1, [&](Index task, Index, int worker) { codes(task, worker).find_factors(pass); });
      on.each(ranges, [&](Index task, Index range, int worker) {
        codes(task, worker).add(pass, range, scores(task));
      });
    }
  }

  // Heads that codes do not serve.
  void in_float(const HeadLoops& on) const {
    const Index ranges = FloatMass::ranges(shape_).count;
    const auto each = [&](Index parts, auto&& f) {
      on.each(parts, [&](Index task, Index part, int worker) {
        const Slot& s = slot(task, worker);
        if (!s.codes.by_codes) f(FloatMass(shape_, s.head), task, part, worker);
      });
    };
    for (Index pass = 0; pass < FloatMass::passes(shape_); ++pass) {
      each(ranges, [&](const FloatMass& head, Index task, Index range, int worker) {
        head.weigh(pass, range, keys(task), scratch(worker).floats);
      });
      each(1, [&](const FloatMass& head, Index, Index, int) { head.find_factors(pass); });
      each(ranges, [&](const FloatMass& head, Index task, Index range, int) {
        head.add(pass, range, scores(task));
      });
    }
  }

  void finish(Index task, int worker) const {
    const Slot& s = slot(task, worker);
    const bool coded = s.codes.by_codes;
    Worker w = scratch(worker);
    errors_[task] = coded ? s.codes.error * static_cast<float>(ln_2) : simd::infinity;
    for (Index set = 0; set < shape_.sets; ++set) {
      if (call_.chunk_scores != nullptr)
        call_.chunk_scores[task * shape_.sets + set] = s.head.chunk_score[set];
      if (coded) codes_->look_up_best(task % kv_heads(), scores(task)[set], w.reader);
    }
  }

  const SoftmaxScoring& call_;
  const TensorView<float, 3>& scores_;
  QueryScoreState& state_;
  const SketchedKeys* codes_;
  MassShape shape_;
  HeadPlan plan_;
  Slot* slots_ = nullptr;
  float* errors_ = nullptr;  // [batch, kv_heads]
};

}  // namespace detail

QUOKA_FUNC void softmax_scores(const SoftmaxScoring& scoring, TensorView<float, 3> scores,
                               QueryScoreState& state, ExecutorRef executor) {
  if (scores.len() > 0)
    detail::require_equal("the scores' inner stride", scores.strides()[2], "that of an array", 1);
  detail::SoftmaxMass<>(scoring, scores, state, executor).run();
}

}  // namespace QUOKA_ABI
}  // namespace quoka
