// The library's one softmax mass: of MassSelector, and of the methods it is compared with.
//
//   score[list][t] = mean over the list's rows m of the softmax of row m's logits, at key t
//
// Callers differ in their rows (FillRows) and in what they pass as keys. By `codes` it multiplies
// 8-bit codes of the keys, without them floats:
//
//   softmax_scores({.rows = {group * n, k.dim(), q.dim()},
//                   .fill = fill,
//                   .keys = k,
//                   .capacity = input.capacity,
//                   .codes = state.find_codes(k, input.sketch)},  // sketched_keys.hpp
//                  scores, state, executor);
//
// Rows with a NaN or an infinity are left out, and so are keys: their score is -infinity.
//
// The phases of a call are softmax_mass(), behind the declarations. A KV head has its rows
// (MassRows) and two ways to multiply them with a range of its keys: FloatMass (float_mass.hpp) and
// CodeMass (code_mass.hpp), which have the same members. Costs and errors are
// there.
#pragma once

#include <quoka/base/arena.hpp>
#include <quoka/rows/rows.hpp>
#include <quoka/runtime/executor.hpp>
#include <quoka/select/options.hpp>
#include <quoka/select/query_rows.hpp>
#include <quoka/select/selector.hpp>
#include <quoka/select/sketched_keys.hpp>

#include <limits>
#include <optional>
#include <span>

#if QUOKA_DEFINES
#include <quoka/kernels/code_units.hpp>
#include <quoka/runtime/head_loops.hpp>
#include <quoka/select/code_mass.hpp>
#include <quoka/select/float_mass.hpp>

#include <algorithm>
#include <atomic>
#include <memory>
#include <type_traits>
#endif

namespace quoka {
inline namespace QUOKA_ABI {

// Reused memory of softmax_scores().
struct SoftmaxScoreState : NoState {
  Arenas call, heads, workers;    // for the call, for each KV head at work, for each worker
  std::span<const float> errors;  // [batch, kv_heads], of the last call

  // The most by which logits of head b * kv_heads + kv_head may be off, in nats; infinite if the
  // head was done in float.
  float logit_error(Index head) const {
    return head < std::ssize(errors) ? errors[static_cast<std::size_t>(head)]
                                     : std::numeric_limits<float>::infinity();
  }
};

// The input of softmax_scores(). A list has rows of its own, and a score for each key. There are as
// many lists as KV heads, or a multiple: then several neighbouring lists share a KV head's keys.
struct SoftmaxScoring {
  RowRoom rows;           // rows of each list, and their channels
  FillRows fill;          // (b, list, rows) writes them, multiplied by the logit scale
  Rows keys;              // [batch, kv_heads, kv_len, dim], that rows are multiplied with
  Index capacity = 0;     // as many keys as there may be in later calls, for scratch memory
  SoftmaxRule rule = {};  // from a list's rows to its scores
  std::optional<SketchedKeys> codes = {};  // the keys' 8-bit codes; none: in float
  // [batch, kv_heads, chunk_len, dim], keys that take part in a row's softmax and get no score
  // (RowWriter::add).
  Rows chunk_k = {};
  // [batch, lists] the sums of their shares; null: not wanted.
  float* chunk_scores = nullptr;
};
// scores [batch, lists, kv_len]; -infinity for a key with a NaN or an infinity. Throws
// std::invalid_argument unless the scores of a list lie side by side, and where codes are of a
// cache that has changed (KeySketch::require_held).
void softmax_scores(const SoftmaxScoring& scoring, TensorView<float, 3> scores,
                    SoftmaxScoreState& state, ExecutorRef executor);
// Takes the memory that softmax_scores() takes for `lists` lists of a sequence, of scoring.keys and
// of as many keys as scoring.capacity. For a caller that will score later; fill() is not called.
void reserve_softmax_scores(const SoftmaxScoring& scoring, Index lists, SoftmaxScoreState& state,
                            ExecutorRef executor);

#if QUOKA_DEFINES
namespace detail {

// One call of softmax_scores(). A task is one KV head, or a part of it (runtime/head_loops.hpp).
// Memory for each KV head at work: a pass of weights (tuning::mass_weight_bytes), and the rows, as
// they are and packed. No result depends on the executor, on the layout of the keys, or on earlier
// calls.
struct MassCall {
  // Memory that the tasks of a KV head share.
  struct Head {
    Head(Arena& arena, const MassShape& shape, bool coded)
        : rows(arena, shape),
          weights(arena.take<std::byte>(
              std::max(FloatMass::weight_bytes(shape), coded ? CodeMass::weight_bytes(shape) : 0))),
          floats(arena, shape, rows, weights) {
      if (coded) codes.emplace(arena, shape, rows, weights);
    }
    bool by_codes() const { return codes && codes->serves(); }
    // f(the way in which this head is done). coded: of a call with codes.
    template <bool coded, class F>
    void with(F&& f) {
      if constexpr (coded)
        if (by_codes()) return f(*codes);
      f(floats);
    }

    MassRows rows;
    std::byte* weights;  // of a pass: the head is done by codes or in float
    FloatMass floats;
    std::optional<CodeMass> codes;
  };

  const SoftmaxScoring& in;
  const TensorView<float, 3>& scores;
  const MassShape shape;
  const HeadPlan plan;
  const Arenas& workers;
  Head* heads;    // [plan.slots()]
  float* errors;  // [batch, kv_heads]

  Index kv_heads() const { return in.keys.heads(); }
  Head& head(Index task, int worker) const { return heads[plan.slot(task, worker)]; }
  MassScratch scratch(int worker) const {
    Arena arena = workers[worker];
    return MassScratch(arena, shape, in.rows.query_dim);
  }
  float* scores_of(Index task) const {  // of the first list
    return scores.data() + task / kv_heads() * scores.strides()[0] +
           task % kv_heads() * shape.lists * shape.score_step;
  }
};

// lists: of a sequence.
inline MassShape mass_shape(const SoftmaxScoring& in, Index lists, Index keys, Index score_step) {
  return {.lists = lists / in.keys.heads(),
          .list_rows = std::max<Index>(CodedRows::padded(in.rows.max_rows), 2),
          .score_step = score_step,
          .dim = in.rows.dim,
          .keys = keys,
          .chunk = in.chunk_k.len(),
          .rule = in.rule};
}

// FillRows writes the rows, list after list. Then the chunk's keys are folded into each row's
// softmax.
inline void read_rows(const MassCall& x, Index task, int worker) {
  MassCall::Head& head = x.head(task, worker);
  MassScratch scratch = x.scratch(worker);
  const Index b = task / x.kv_heads(), kv_head = task % x.kv_heads(), lists = x.shape.lists;
  for (Index list = 0; list < lists; ++list) {
    const Index row = list * x.shape.list_rows;
    RowWriter rows(head.rows.data + row * x.shape.dim, x.shape.dim, scratch.reader,
                   head.rows.ends + row);
    x.in.fill(b, kv_head * lists + list, rows);
    head.rows.take_rows(list, rows.count());
  }
  head.rows.pack();
  if (x.shape.chunk > 0) head.rows.see_chunk(x.in.chunk_k.head(b, kv_head), scratch);
  head.floats.take_keys(x.in.keys.head(b, kv_head));
}

// Codes of the rows and bounds on their logits, by which each head knows whether codes serve it.
inline void encode_heads(const HeadLoops& on, const MassCall& x) {
  const auto codes = [&x](Index task, int worker) -> CodeMass& {
    return *x.head(task, worker).codes;
  };
  const Index ranges = CodeMass::ranges(x.shape).count;
  on.each(1 + ranges, [&](Index task, Index part, int worker) {
    if (part == 0) return codes(task, worker).encode_rows();
    MassScratch scratch = x.scratch(worker);
    codes(task, worker).read_keys(part - 1, scratch.reader);
  });
  std::atomic<bool> seeks{false};  // does some head seek its largest logits? Few do
  on.each(1, [&](Index task, Index, int worker) {
    if (codes(task, worker).bound()) seeks.store(true, std::memory_order_relaxed);
  });
  if (!seeks.load(std::memory_order_relaxed)) return;
  // In a sample of the keys, then in all.
  on.each(ranges, [&](Index task, Index range, int worker) {
    codes(task, worker).seek_largest(range, 16, x.scratch(worker));
  });
  on.each(1, [&](Index task, Index, int worker) { codes(task, worker).judge_sample(); });
  on.each(ranges, [&](Index task, Index range, int worker) {
    codes(task, worker).seek_largest(range, 1, x.scratch(worker));
  });
  on.each(1, [&](Index task, Index, int worker) { codes(task, worker).shift_to_largest(); });
}

// Results beside the scores.
inline void finish(const MassCall& x, Index task, int worker) {
  const MassCall::Head& head = x.head(task, worker);
  x.errors[task] = head.by_codes() ? head.codes->error() * static_cast<float>(ln_2) : infinity;
  MassScratch scratch = x.scratch(worker);
  for (Index list = 0; list < x.shape.lists; ++list) {
    if (x.in.chunk_scores != nullptr)
      x.in.chunk_scores[task * x.shape.lists + list] =
          static_cast<float>(head.rows.chunk_score[list]);
    if (head.by_codes())
      x.in.codes->look_up_best(task % x.kv_heads(), x.scores_of(task) + list * x.shape.score_step,
                               scratch.reader);
  }
}

// The phases of all heads, or of one. A pass takes as many rows as the weight buffer holds.
// It computes weights, then their sums, then what they add to the scores. Each head is done by
// codes or in float; passes and ranges that a head does not need are empty. kernels: the function
// with those of the codes; nullptr: all heads are done in float. Their type says which, since GCC's
// sanitizers take no comparison of a function's address for a constant.
template <auto kernels>
inline void softmax_mass(const HeadLoops& on, const MassCall& x) {
  constexpr bool codes = !std::is_null_pointer_v<decltype(kernels)>;
  on.each(1, [&](Index task, Index, int worker) {
    read_rows(x, task, worker);
    if constexpr (codes)
      x.head(task, worker)
          .codes->take_keys(*x.in.codes, task / x.kv_heads(), task % x.kv_heads(), kernels());
  });
  Index passes = FloatMass::passes(x.shape), ranges = FloatMass::ranges(x.shape).count;
  if constexpr (codes) {
    encode_heads(on, x);
    passes = std::max(passes, CodeMass::passes(x.shape));
    ranges = std::max(ranges, CodeMass::ranges(x.shape).count);
  }
  for (Index pass = 0; pass < passes; ++pass) {
    on.each(ranges, [&](Index task, Index range, int worker) {
      const MassScratch scratch = x.scratch(worker);
      x.head(task, worker).with<codes>([&](auto& mass) { mass.weigh(pass, range, scratch); });
    });
    on.each(1, [&](Index task, Index, int worker) {
      x.head(task, worker).with<codes>([&](auto& mass) { mass.find_factors(pass); });
    });
    on.each(ranges, [&](Index task, Index range, int worker) {
      x.head(task, worker).with<codes>([&](auto& mass) {
        mass.add(pass, range, x.scores_of(task));
      });
    });
  }
  on.each(1, [&](Index task, Index, int worker) { finish(x, task, worker); });
}

// Null: the call is done in float.
inline MassPhases coded_phases_of(const SoftmaxScoring& in) {
  return in.codes && !in.rule.is_for_float() ? in.codes->sketch().coded_phases : nullptr;
}

QUOKA_FUNC MassPhases coded_softmax_scores() { return softmax_mass<code_kernels>; }

}  // namespace detail

QUOKA_FUNC void reserve_softmax_scores(const SoftmaxScoring& scoring, Index lists,
                                       SoftmaxScoreState& state, ExecutorRef executor) {
  using detail::MassCall;
  const Rows& k = scoring.keys;
  const bool coded = detail::coded_phases_of(scoring) != nullptr;
  const Index kv_heads = k.batch() * k.heads(),
              slots = detail::HeadPlan(kv_heads, executor).slots();
  // A fuller cache may take fewer rows at once: whichever needs more.
  for (const Index keys : {k.len(), std::max(k.len(), scoring.capacity)}) {
    const detail::MassShape shape = detail::mass_shape(scoring, lists, keys, keys);
    state.heads.reserve(static_cast<int>(slots),
                        [&](Arena& arena) { MassCall::Head(arena, shape, coded); });
    state.workers.reserve(executor.workers(), [&](Arena& arena) {
      detail::MassScratch(arena, shape, scoring.rows.query_dim);
    });
  }
  state.errors = {};  // they lie in that memory
  state.call.reserve(
      1, [&](Arena& arena) { arena.take<MassCall::Head>(slots), arena.take<float>(kv_heads); });
}

QUOKA_FUNC void softmax_scores(const SoftmaxScoring& scoring, TensorView<float, 3> scores,
                               SoftmaxScoreState& state, ExecutorRef executor) {
  using detail::MassCall;
  if (scores.len() > 0)
    detail::require_equal("the scores' inner stride", scores.strides()[2], "that of an array", 1);
  reserve_softmax_scores(scoring, scores.heads(), state, executor);
  const detail::MassPhases coded = detail::coded_phases_of(scoring);
  const Index kv_heads = scoring.keys.batch() * scoring.keys.heads();
  const detail::HeadPlan plan(kv_heads, executor);
  Arena arena = state.call[0];
  const MassCall call{
      .in = scoring,
      .scores = scores,
      .shape = detail::mass_shape(scoring, scores.heads(), scores.len(), scores.strides()[1]),
      .plan = plan,
      .workers = state.workers,
      .heads = arena.take<MassCall::Head>(plan.slots()),
      .errors = arena.take<float>(kv_heads)};
  for (Index slot = 0; slot < plan.slots(); ++slot) {
    Arena memory = state.heads[static_cast<int>(slot)];
    std::construct_at(call.heads + slot, memory, call.shape, coded != nullptr);
  }
  if (coded != nullptr) {
    detail::MassScratch scratch = call.scratch(0);
    scoring.codes->look_up(scratch.reader);
  }
  plan.run(coded != nullptr ? coded : detail::softmax_mass<nullptr>, call);
  // Last: a call that throws leaves none.
  state.errors = {call.errors, static_cast<std::size_t>(kv_heads)};
}

#endif  // QUOKA_DEFINES

}  // namespace QUOKA_ABI
}  // namespace quoka
