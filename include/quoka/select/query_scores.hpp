// The parts that selectors are made of: loops over KV heads, query rows, and two kinds of scores of
// a head's rows.
//
//   softmax_scores      score[h][t] = mean over head h's rows m of the softmax of row m's logits,
//                       at key t
//   mean_logit_scores   score[h][t] = mean over head h's rows m of logit(m, t), which is the logit
//                       of the mean row
//
// softmax_scores is the library's one softmax mass, for MassSelector and for the methods that it is
// compared with. They differ in their rows (FillRows) and in what they pass as keys. By `codes` it
// multiplies 8-bit codes of the keys, without them floats:
//
//   softmax_scores({.rows = {group * n, k.dim(), q},
//                   .fill = fill,
//                   .keys = k,
//                   .capacity = input.capacity,
//                   .codes = state.find_codes(k, input.sketch)},  // SketchKept; by_codes()
//                  scores, state, executor);
//
// Rows with a NaN or an infinity are left out, and so are keys: their score is -infinity. The
// methods of this library are written with these functions alone. Cost and errors: float_mass.hpp
// and code_mass.hpp, whose stages MassCall, behind the declarations, runs in their order.
#pragma once

#include <quoka/base/arena.hpp>
#include <quoka/base/buffer.hpp>
#include <quoka/rows/row_reader.hpp>
#include <quoka/rows/rows.hpp>
#include <quoka/runtime/executor.hpp>
#include <quoka/select/key_sketch.hpp>
#include <quoka/select/selector.hpp>
#include <quoka/select/score.hpp>
#include <quoka/select/top_k.hpp>

#include <cmath>
#include <limits>
#include <optional>
#include <span>

namespace quoka {
inline namespace QUOKA_ABI {

// A selector's own scores [batch, heads, len], in memory of its own.
inline TensorView<float, 3> score_view(float* scores, Index batch, Index heads, Index len) {
  return {scores, {batch, heads, len}, {heads * len, len, 1}};
}

// f(b, kv_head, worker) for every KV head of every sequence.
template <class F>
void for_each_kv_head(const Rows& k, ExecutorRef executor, F&& f) {
  executor.run(k.batch() * k.heads(),
               [&](Index task, int worker) { f(task / k.heads(), task % k.heads(), worker); });
}

// 1 / |x| of x [dim]: 0 for a zero or infinite vector, NaN for one with a NaN.
float inverse_norm(const float* x, Index dim);
// sum over c of a[c] * b[c]
float dot(const float* a, const float* b, Index dim);
// sum[c] += x[c], or from nothing: sum[c] = x[c]. [dim]
void add_row(const float* x, Index dim, bool first, float* sum);
// to[c] = x[c] * factor. [dim] Is none of to NaN or infinite?
bool scale_row(const float* x, Index dim, float factor, float* to);
// Is no element of x [dim] NaN or infinite?
bool is_finite_row(const float* x, Index dim);

// Where the rows of one head are written: add(row, factor) appends a query's channels times factor,
// if they are finite.
class RowWriter {
 public:
  // `rows` has room for all of them, [max_rows, dim]; `ends`, if given, for as many.
  RowWriter(float* rows, Index dim, RowReader& reader, Index* ends = nullptr)
      : rows_(rows), ends_(ends), dim_(dim), reader_(&reader) {}

  // Row i of one head of q. It sees the first i + 1 of the chunk's keys, if there are any.
  void add(const Rows& q, Index b, Index head, Index i, float factor) {
    add(read(q, b, head, i), factor, i + 1);
  }
  // The same of a row of floats [dim], which sees the first `end` of the chunk's keys.
  void add(const float* row, float factor, Index end = 0) {
    if (scale_row(row, dim_, factor, next())) keep(end);
  }
  // Row i of a head of q as floats: good until the next.
  const float* read(const Rows& q, Index b, Index head, Index i) const {
    return reader_->read(q, b, head, i);
  }
  // The place of the next row, for those who write it themselves; it counts once kept.
  float* next() const { return rows_ + count_ * dim_; }
  // Counts next().
  void keep(Index end = 0) {
    if (ends_ != nullptr) ends_[count_] = end;
    ++count_;
  }
  // Counts next(), unless it holds a NaN or an infinity.
  void keep_if_finite(Index end = 0) {
    if (is_finite_row(next(), dim_)) keep(end);
  }
  Index count() const { return count_; }  // rows kept so far

 private:
  float* rows_;
  Index* ends_;
  Index dim_, count_ = 0;
  RowReader* reader_;
};

// Writes the rows that score for one head of the scores, times the logit scale.
using FillRows = FunctionRef<void(Index b, Index head, RowWriter& rows)>;

// The rows that score for one head.
struct QueryRows {
  Index max_rows, dim;  // rows at most, and their channels
  Rows read = {};       // fill() makes them from rows like these; empty: from floats
};

// Reused memory of softmax_scores().
struct SoftmaxScoreState : NoState {
  Arenas call, heads, workers;    // for the call, for each KV head at work, for each worker
  std::span<const float> errors;  // [batch, kv_heads], of the last call

  // By how many nats logits of head b * kv_heads + kv_head may be off, at most; infinite where it
  // was done in float.
  float logit_error(Index head) const {
    return head < std::ssize(errors) ? errors[static_cast<std::size_t>(head)]
                                     : std::numeric_limits<float>::infinity();
  }
};

// The input of softmax_scores(). The scores have as many heads as the keys, or a multiple: several
// neighbouring heads, each with rows of its own, then share a KV head's keys.
struct SoftmaxScoring {
  QueryRows rows;      // rows of each head, and their channels
  FillRows fill;       // writes them, multiplied by the logit scale
  Rows keys;           // [batch, kv_heads, kv_len, dim], that rows are multiplied with
  Index capacity = 0;  // as many keys as there may be in later calls, for scratch memory
  // The mean over a head's rows of their softmax, or its maximum.
  Aggregation over = Aggregation::mean;
  // The sum over a head's rows of e^(logit - m), m their largest logit, in place of their softmax.
  // In float.
  bool joint = false;
  float softcap = 0.0f;  // if not 0, caps the logits, as attention does
  // The keys' 8-bit codes; none: in float. A cap, and a maximum over the rows, are for float alone.
  std::optional<SketchedKeys> codes = {};
  bool all_channels = true;  // of codes; else at least half (CodedChannels of code_mass.hpp)
  // [batch, kv_heads, chunk_len, dim], keys that take part in a row's softmax and get no score
  // (RowWriter::add).
  Rows chunk_k = {};
  // [batch, heads] the sums of their shares; null: not wanted.
  float* chunk_scores = nullptr;
};
// scores [batch, heads, kv_len]; -infinity for a key with a NaN or an infinity. Throws
// std::invalid_argument unless the scores of a head lie side by side, and where codes are of a
// cache that has changed (KeySketch::require_held).
void softmax_scores(const SoftmaxScoring& scoring, TensorView<float, 3> scores,
                    SoftmaxScoreState& state, ExecutorRef executor);
// Takes the memory that softmax_scores() takes for `heads` heads of scores, of scoring.keys and of
// as many keys as scoring.capacity. For a caller that will score later; fill() is not called.
void reserve_softmax_scores(const SoftmaxScoring& scoring, Index heads, SoftmaxScoreState& state,
                            ExecutorRef executor);

// scores [batch, kv_heads, keys]; keys [batch, kv_heads, keys, dim]. means, workers: reused memory.
// Throws std::invalid_argument for scores of another shape than the keys', or other strides than
// score_view() has.
void mean_logit_scores(const QueryRows& shape, FillRows fill, const Rows& keys,
                       TensorView<float, 3> scores, Buffer<float>& means, Arenas& workers,
                       ExecutorRef executor);

// Top-k for selectors that do it themselves: top_k.hpp. TopKScratch(arena, kv_len, kernel_size) is
// one worker's memory.
using TopKScratch = detail::TopKScratch;
// Throws std::invalid_argument for a kernel_size < 1 and a negative keep_first or keep_last.
inline void check_top_k(const TopKOptions& options) { detail::check_top_k(0, options); }
// The kept.size() best of one head's scores, as ascending positions. scratch has room for
// (scores.size(), options.kernel_size).
inline void best_of_head(std::span<const float> scores, const TopKOptions& options,
                         std::span<Position> kept, const TopKScratch& scratch) {
  detail::top_k_head(scores.data(), std::ssize(scores), options, kept, scratch);
}
// Scores as top-k orders them: minus infinity for one that is not finite.
inline float ordered_score(float score) {
  return std::isfinite(score) ? score : -std::numeric_limits<float>::infinity();
}

}  // namespace QUOKA_ABI
}  // namespace quoka

#if QUOKA_DEFINES
#include <quoka/kernels/inverse_norm.hpp>
#include <quoka/kernels/code_units.hpp>
#include <quoka/kernels/kernels.hpp>
#include <quoka/runtime/head_loops.hpp>
#include <quoka/select/code_mass.hpp>
#include <quoka/select/float_mass.hpp>

#include <algorithm>
#include <atomic>
#include <memory>

namespace quoka {
inline namespace QUOKA_ABI {

QUOKA_FUNC float inverse_norm(const float* x, Index dim) {
  return detail::inverse_norm_of_row(x, dim);
}
QUOKA_FUNC float dot(const float* a, const float* b, Index dim) {
  return detail::sum_of_products(a, b, dim);
}
QUOKA_FUNC void add_row(const float* x, Index dim, bool first, float* sum) {
  if (first)
    std::copy_n(x, dim, sum);
  else
    detail::add_row(x, dim, sum);
}
QUOKA_FUNC bool scale_row(const float* x, Index dim, float factor, float* to) {
  return detail::scale_row(x, dim, factor, to);
}
QUOKA_FUNC bool is_finite_row(const float* x, Index dim) {
  return detail::is_finite_row(x, dim, detail::inverse_norm_of_row(x, dim));
}

namespace detail {

// One call of softmax_scores(), in phases (runtime/head_loops.hpp).
//
//   read_rows   FillRows writes the rows, list after list: a list is one head of the scores
//   by codes    code_mass.hpp, where there are codes and they serve: nearly the scores of float, in
//               0.3 of the time. Whether they serve is known for each head, after bound()
//   in float    float_mass.hpp, for the heads that they do not serve, and for all without codes
//   finish      what the caller gets beside the scores
//
// 2 * rows * keys * dim operations and an exponential for each row and key. Memory for each KV head
// at work: a pass of weights (tuning::mass_weight_bytes), and the rows, as they are and packed. No
// result depends on the executor, on the layout of the keys, or on earlier calls.
struct MassCall {
  // Memory that the tasks of a KV head share.
  struct Head {
    Head(Arena& arena, const MassShape& shape, const CodeKernels* kernels)
        : floats(arena, shape,
                 std::max(FloatMass::weight_bytes(shape),
                          kernels != nullptr ? CodeMass::weight_bytes(shape) : 0)) {
      if (kernels != nullptr) codes.emplace(arena, shape, floats, *kernels);
    }
    bool by_codes() const { return codes && codes->by_codes(); }

    FloatMass floats;
    std::optional<CodeMass> codes;
  };
  // Memory of one worker.
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

  const SoftmaxScoring& in;
  const TensorView<float, 3>& scores;
  const MassShape shape;
  const HeadPlan plan;
  const CodeKernels* kernels;  // null: in float alone
  const Arenas& workers;
  Head* heads;    // [plan.slots()]
  float* errors;  // [batch, kv_heads]

  Index kv_heads() const { return in.keys.heads(); }
  Head& head(Index task, int worker) const { return heads[plan.slot(task, worker)]; }
  Worker scratch(int worker) const {
    Arena arena = workers[worker];
    return Worker(arena, shape, in.rows.read.dim());
  }
  float* scores_of(Index task) const {  // of the first list
    return scores.data() + task / kv_heads() * scores.strides()[0] +
           task % kv_heads() * shape.lists * shape.score_step;
  }
};

inline MassShape mass_shape(const SoftmaxScoring& in, Index heads, Index keys, Index score_step) {
  return {.lists = heads / in.keys.heads(),
          .list_rows = std::max<Index>(CodedRows::padded(in.rows.max_rows), 2),
          .score_step = score_step,
          .dim = in.rows.dim,
          .keys = keys,
          .chunk = in.chunk_k.len(),
          .over = in.over,
          .softcap = in.softcap,
          .joint = in.joint,
          .all_channels = in.all_channels};
}

inline void read_rows(const MassCall& x, Index task, int worker) {
  MassCall::Head& head = x.head(task, worker);
  MassCall::Worker w = x.scratch(worker);
  const Index b = task / x.kv_heads(), kv_head = task % x.kv_heads(), lists = x.shape.lists;
  for (Index list = 0; list < lists; ++list) {
    const Index row = list * x.shape.list_rows;
    RowWriter rows(head.floats.rows + row * x.shape.dim, x.shape.dim, w.reader,
                   head.floats.ends + row);
    x.in.fill(b, kv_head * lists + list, rows);
    head.floats.take_rows(list, rows.count());
  }
  head.floats.pack_rows();
  if (x.shape.chunk > 0) head.floats.see_chunk(x.in.chunk_k.head(b, kv_head), w.floats);
  if (head.codes) head.codes->take_keys(*x.in.codes, b, kv_head);
}

inline void finish(const MassCall& x, Index task, int worker) {
  const MassCall::Head& head = x.head(task, worker);
  x.errors[task] = head.by_codes() ? head.codes->error() * static_cast<float>(ln_2) : infinity;
  MassCall::Worker w = x.scratch(worker);
  for (Index list = 0; list < x.shape.lists; ++list) {
    if (x.in.chunk_scores != nullptr)
      x.in.chunk_scores[task * x.shape.lists + list] = head.floats.chunk_score[list];
    if (head.by_codes())
      x.in.codes->look_up_best(task % x.kv_heads(), x.scores_of(task) + list * x.shape.score_step,
                               w.reader);
  }
}

// Heads that codes do not serve in float, and then what the caller gets beside the scores.
inline void finish_in_float(const HeadLoops& on, const MassCall& x) {
  const Index ranges = FloatMass::ranges(x.shape).count;
  const auto each = [&](Index parts, auto&& f) {
    on.each(parts, [&](Index task, Index part, int worker) {
      const MassCall::Head& head = x.head(task, worker);
      if (!head.by_codes()) f(head.floats, task, part, worker);
    });
  };
  for (Index pass = 0; pass < FloatMass::passes(x.shape); ++pass) {
    each(ranges, [&](const FloatMass& head, Index task, Index range, int worker) {
      head.weigh(pass, range, x.in.keys.head(task / x.kv_heads(), task % x.kv_heads()),
                 x.scratch(worker).floats);
    });
    each(1, [&](const FloatMass& head, Index, Index, int) { head.find_factors(pass); });
    each(ranges, [&](const FloatMass& head, Index task, Index range, int) {
      head.add(pass, range, x.scores_of(task));
    });
  }
  on.each(1, [&](Index task, Index, int worker) { finish(x, task, worker); });
}

// The phases of all heads, or of one.
inline void float_mass(const HeadLoops& on, const MassCall& x) {
  on.each(1, [&](Index task, Index, int worker) { read_rows(x, task, worker); });
  finish_in_float(on, x);
}
inline void coded_mass(const HeadLoops& on, const MassCall& x) {
  on.each(1, [&](Index task, Index, int worker) { read_rows(x, task, worker); });
  const auto codes = [&x](Index task, int worker) -> CodeMass& {
    return *x.head(task, worker).codes;
  };
  const Index ranges = CodeMass::ranges(x.shape).count;
  on.each(1 + ranges, [&](Index task, Index part, int worker) {
    MassCall::Worker w = x.scratch(worker);
    if (part == 0)
      codes(task, worker).encode_rows(w.codes);
    else
      codes(task, worker).read_keys(part - 1, w.reader);
  });
  std::atomic<bool> seeks{false};  // does some head seek its largest logits? Few do
  on.each(1, [&](Index task, Index, int worker) {
    if (codes(task, worker).bound()) seeks.store(true, std::memory_order_relaxed);
  });
  if (seeks.load(std::memory_order_relaxed)) {
    // In a sample of the keys, then in all.
    on.each(ranges, [&](Index task, Index range, int worker) {
      codes(task, worker).seek_largest(range, 16, x.scratch(worker).codes);
    });
    on.each(1, [&](Index task, Index, int worker) { codes(task, worker).judge_sample(); });
    on.each(ranges, [&](Index task, Index range, int worker) {
      codes(task, worker).seek_largest(range, 1, x.scratch(worker).codes);
    });
    on.each(1, [&](Index task, Index, int worker) { codes(task, worker).shift_to_largest(); });
  }
  for (Index pass = 0; pass < CodeMass::passes(x.shape); ++pass) {
    on.each(ranges, [&](Index task, Index range, int worker) {
      codes(task, worker).compute_weights(pass, range, x.scratch(worker).codes);
    });
    on.each(1, [&](Index task, Index, int worker) { codes(task, worker).find_factors(pass); });
    on.each(ranges, [&](Index task, Index range, int worker) {
      codes(task, worker).add(pass, range, x.scores_of(task));
    });
  }
  finish_in_float(on, x);
}

#if !defined(QUOKA_COMPILED)
struct CodedMass {
  static constexpr CodedWork work = {coded_mass, code_kernels};
};
#endif

// The phases of a call and the kernels of its codes; null where it is done in float.
inline CodedWork work_of(const SoftmaxScoring& in) {
  if (in.softcap != 0.0f || in.over != Aggregation::mean || in.joint || !in.codes)
    return {float_mass, nullptr};
  CodedWork work = in.codes->sketch().coded_work();
#if defined(QUOKA_COMPILED)
  if (work.kernels == nullptr) work = {coded_mass, code_kernels};
#endif
  return work.kernels != nullptr ? work : CodedWork{float_mass, nullptr};
}

inline const CodeKernels* kernels_of(const CodedWork& work) {
  return work.kernels != nullptr ? &work.kernels() : nullptr;
}

}  // namespace detail

QUOKA_FUNC void reserve_softmax_scores(const SoftmaxScoring& scoring, Index heads,
                                       SoftmaxScoreState& state, ExecutorRef executor) {
  using detail::MassCall;
  const Rows& k = scoring.keys;
  const detail::CodeKernels* const kernels = detail::kernels_of(detail::work_of(scoring));
  const Index kv_heads = k.batch() * k.heads(),
              slots = detail::HeadPlan(kv_heads, executor).slots();
  // A fuller cache may take fewer rows at once: whichever needs more.
  for (const Index keys : {k.len(), std::max(k.len(), scoring.capacity)}) {
    const detail::MassShape shape = detail::mass_shape(scoring, heads, keys, keys);
    state.heads.reserve(static_cast<int>(slots),
                        [&](Arena& arena) { MassCall::Head(arena, shape, kernels); });
    state.workers.reserve(executor.workers(), [&](Arena& arena) {
      MassCall::Worker(arena, shape, scoring.rows.read.dim());
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
  const detail::CodedWork work = detail::work_of(scoring);
  const Index kv_heads = scoring.keys.batch() * scoring.keys.heads();
  const detail::HeadPlan plan(kv_heads, executor);
  Arena arena = state.call[0];
  const MassCall call{
      .in = scoring,
      .scores = scores,
      .shape = detail::mass_shape(scoring, scores.heads(), scores.len(), scores.strides()[1]),
      .plan = plan,
      .kernels = detail::kernels_of(work),
      .workers = state.workers,
      .heads = arena.take<MassCall::Head>(plan.slots()),
      .errors = arena.take<float>(kv_heads)};
  for (Index slot = 0; slot < plan.slots(); ++slot) {
    Arena memory = state.heads[static_cast<int>(slot)];
    std::construct_at(call.heads + slot, memory, call.shape, call.kernels);
  }
  state.errors = {call.errors, static_cast<std::size_t>(kv_heads)};
  if (call.kernels != nullptr) {
    MassCall::Worker w = call.scratch(0);
    scoring.codes->look_up(w.reader);
  }
  plan.run(work.phases, call);
}

QUOKA_FUNC void mean_logit_scores(const QueryRows& shape, FillRows fill, const Rows& keys,
                                  TensorView<float, 3> scores, Buffer<float>& means,
                                  Arenas& workers, ExecutorRef executor) {
  detail::require_sizes("scores", scores.sizes(), {keys.batch(), keys.heads(), keys.len()});
  const auto whole = score_view(scores.data(), scores.batch(), scores.heads(), scores.len());
  for (std::size_t axis = 0; axis < 3; ++axis)
    if (scores.sizes()[axis] > 1)
      detail::require_equal("a stride of the scores", scores.strides()[axis],
                            "that of score_view()", whole.strides()[axis]);
  const auto rows_in = [&](Arena& arena) { return arena.take<float>(shape.max_rows * shape.dim); };
  float* const mean_rows = means.reserve_amortised(keys.batch() * keys.heads() * shape.dim);
  workers.reserve(executor.workers(), [&](Arena& arena) {
    RowReader(arena, shape.read.dim());
    rows_in(arena);
  });
  executor.run(keys.batch() * keys.heads(), [&](Index task, int worker) {
    Arena arena = workers[worker];
    RowReader reader(arena, shape.read.dim());
    float* const first = rows_in(arena);
    RowWriter rows(first, shape.dim, reader);
    fill(task / keys.heads(), task % keys.heads(), rows);
    float* const mean = mean_rows + task * shape.dim;
    std::fill_n(mean, shape.dim, 0.0f);
    const float share = 1.0f / static_cast<float>(std::max<Index>(rows.count(), 1));
    for (Index i = 0; i < rows.count(); ++i)
      for (Index c = 0; c < shape.dim; ++c) mean[c] += first[i * shape.dim + c] * share;
  });
  detail::multiply_all_keys(mean_rows, keys, scores.data(), workers, executor);
}

}  // namespace QUOKA_ABI
}  // namespace quoka
#endif  // QUOKA_DEFINES
