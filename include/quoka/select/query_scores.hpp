// The parts that selectors are made of: loops over KV heads, query rows, and scores of several rows per head in either
// of two ways.
//
//   softmax_scores      score[h][t] = mean over head h's rows m of the softmax of their logits, at key t
//   mean_logit_scores   score[h][t] = mean over head h's rows m of logit(m, t) = logit of the mean row
//
// softmax_scores is the library's one softmax mass, for MassSelector as for the methods it is compared with: they
// differ in which rows there are (FillRows) and in what lies in place of the keys. By `codes` it multiplies 8-bit codes
// of the keys, without them floats:
//
//   softmax_scores({.rows = {group * n, k.dim(), q},
//                   .fill = fill,
//                   .keys = k,
//                   .capacity = input.capacity,
//                   .codes = SketchedKeys::find(k, state.sketch, input.sketch)},  // by_codes()
//                  scores, state, executor);
//
// Rows with a NaN or an infinity are left out, and so are keys: their score is -infinity. The methods of this library
// are written with these functions alone. Cost and errors: float_mass.hpp and
// code_mass.hpp.
#pragma once

#include <quoka/base/arena.hpp>
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

// Where the rows of one head are written: add(row, factor) appends a query's channels times factor, if they are finite.
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

// Reused memory of the functions below.
struct QueryScoreState : NoState {
  Arenas call, heads, workers;    // for the call, for each KV head at work, for each worker
  std::uint64_t turn = 0;         // of looking keys up
  std::span<const float> errors;  // [batch, kv_heads], of the last softmax_scores()

  // By how many nats logits of head b * kv_heads + kv_head may be off, at most; infinite where it was done in float.
  float logit_error(Index head) const {
    return head < std::ssize(errors) ? errors[static_cast<std::size_t>(head)]
                                     : std::numeric_limits<float>::infinity();
  }
};

// The input of softmax_scores(). The heads of the scores are the keys' KV heads, or a multiple of them: then a KV
// head's keys serve as many neighbouring heads, each with rows of its own.
struct SoftmaxScoring {
  QueryRows rows;      // rows of each head, and their channels
  FillRows fill;       // writes them, multiplied by the logit scale
  Rows keys;           // [batch, kv_heads, kv_len, dim], that rows are multiplied with
  Index capacity = 0;  // as many keys as there may be in later calls, for scratch memory
  // The mean over a head's rows of their softmax, or its maximum.
  Aggregation over = Aggregation::mean;
  // The sum over a head's rows of e^(logit - m), m their largest logit, in place of their softmax. In float.
  bool joint = false;
  float softcap = 0.0f;  // if not 0, caps the logits, as attention does
  // The keys' 8-bit codes; none: in float. A cap, and a maximum over the rows, are for float alone.
  std::optional<SketchedKeys> codes = {};
  bool all_channels = true;  // of codes; else at least half (CodedChannels of code_mass.hpp)
  // [batch, kv_heads, chunk_len, dim], keys that take part in a row's softmax and get no score (RowWriter::add).
  Rows chunk_k = {};
  // [batch, heads] the sums of their shares; null: not wanted.
  float* chunk_scores = nullptr;
};
// scores [batch, heads, kv_len]; -infinity for a key with a NaN or an infinity. Throws std::invalid_argument unless the
// scores of a head lie side by side, and where codes are of a cache that has changed (KeySketch::require_held).
void softmax_scores(const SoftmaxScoring& scoring, TensorView<float, 3> scores,
                    QueryScoreState& state, ExecutorRef executor);

// scores [batch, kv_heads, keys]; keys [batch, kv_heads, keys, dim]. Throws std::invalid_argument
// for scores of another shape than the keys', or other strides than score_view() has.
void mean_logit_scores(const QueryRows& shape, FillRows fill, const Rows& keys,
                       TensorView<float, 3> scores, QueryScoreState& state, ExecutorRef executor);

// Top-k for selectors that do it themselves: top_k.hpp. TopKScratch(arena, kv_len, kernel_size) is one worker's memory.
using TopKScratch = detail::TopKScratch;
// Throws std::invalid_argument for a kernel_size < 1 and a negative keep_first or keep_last.
inline void check_top_k(const TopKOptions& options) { detail::check_top_k(0, options); }
// The kept.size() best of one head's scores, as ascending positions. scratch has room for
// (scores.size(), options.kernel_size).
inline void best_of_head(std::span<const float> scores, const TopKOptions& options,
                         std::span<Position> kept, const TopKScratch& scratch) {
  detail::top_k_head(scores.data(), std::ssize(scores), options, kept, scratch);
}
// The `budget` best of scores [batch, kv_heads, kv_len], which lie as score_view() has them. workers: reused memory.
inline void best_keys(const TensorView<float, 3>& scores, Index budget, const TopKOptions& options,
                      Arenas& workers, Selection& selection, ExecutorRef executor) {
  detail::select_top_k({scores.data(), scores.batch(), scores.heads(), scores.len()}, budget,
                       options, selection, workers, executor);
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

// softmax_scores() over all heads of a call. MassSelector calls it for shares, and the methods that weigh attention
// (methods/rows_scorer.hpp) for scores.
//
//   rows       FillRows writes them, set after set: a set is the rows of one head of the scores
//   by codes   code_mass.hpp, where there are codes and they serve: nearly the scores of float, in 0.3 of the time
//   in float   float_mass.hpp, for all other heads
//
// 2 * rows * keys * dim operations and an exponential for each row and key. Memory for each KV head at work: a pass of
// weights (tuning::mass_weight_bytes), and the rows, as they are and packed. No result depends on the executor, on the
// layout of the keys, or on earlier calls.
class SoftmaxMass {
 public:
  SoftmaxMass(const SoftmaxScoring& call, const TensorView<float, 3>& scores,
              QueryScoreState& state, ExecutorRef executor, const CodeKernels* kernels = nullptr)
      : kernels_(kernels),
        call_(call),
        scores_(scores),
        state_(state),
        codes_(call.softcap == 0.0f && call.over == Aggregation::mean && !call.joint && call.codes
                   ? &*call.codes
                   : nullptr),
        shape_{.sets = scores.heads() / call.keys.heads(),
               .set_rows = std::max<Index>(CodedRows::padded(call.rows.max_rows), 2),
               .dim = call.rows.dim,
               .keys = scores.len(),
               .chunk = call.chunk_k.len(),
               .over = call.over,
               .softcap = call.softcap,
               .joint = call.joint,
               .all_channels = call.all_channels},
        plan_(scores.batch() * kv_heads(), executor) {
    if (codes_ != nullptr && kernels_ == nullptr) kernels_ = kernels_of(*codes_);
    if (kernels_ == nullptr) codes_ = nullptr;  // a sketch that nothing was written to
    const int slots = static_cast<int>(plan_.slots()), workers = executor.workers();
    // A fuller cache may take fewer rows at once: whichever needs more.
    for (const Index keys : {shape_.keys, std::max(shape_.keys, call.capacity)}) {
      MassShape of = shape_;
      of.keys = keys;
      state.heads.reserve(slots, [&](Arena& arena) { Slot(arena, of, kernels_); });
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
      std::construct_at(slots_ + slot, memory, shape_, kernels_);
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
    if (codes_ != nullptr) work_of(*codes_).stages(this, on);
    in_float(on);
    on.each(1, [&](Index task, Index, int worker) { finish(task, worker); });
  }

 private:
  friend struct CodedMass;

  static CodedWork work_of([[maybe_unused]] const SketchedKeys& codes) {
#if defined(QUOKA_COMPILED)
    return {by_codes, code_kernels};
#else
    return codes.sketch().coded_work();
#endif
  }
  static const CodeKernels* kernels_of(const SketchedKeys& codes) {
    const CodedWork work = work_of(codes);
    return work.kernels != nullptr ? &work.kernels() : nullptr;
  }

  // A KV head at work, and one worker.
  struct Slot {
    Slot(Arena& arena, const MassShape& shape, const CodeKernels* kernels)
        : head(arena, shape,
               std::max(FloatMass::weight_bytes(shape),
                        kernels != nullptr ? CodeMass::weight_bytes(shape) : 0)),
          codes(CodeMemory::with(arena, shape, head.weights, kernels)) {}
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
  CodeMass codes(Index task, int worker) const {
    Slot& s = slot(task, worker);
    return CodeMass(shape_, *codes_, task / kv_heads(), task % kv_heads(), s.head, s.codes,
                    scratch(worker).codes, *kernels_);
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

  // mass: a SoftmaxMass.
  static void by_codes(const void* mass, const HeadLoops& on) {
    const auto& x = *static_cast<const SoftmaxMass*>(mass);
    const Index ranges = CodeMass::ranges(x.shape_).count;
    on.each(1 + ranges, [&](Index task, Index part, int worker) {
      Worker w = x.scratch(worker);
      if (part == 0)
        x.codes(task, worker).encode_rows();
      else
        x.codes(task, worker).read_keys(part - 1, w.reader);
    });
    std::atomic<bool> seeks{false};  // set by few heads
    on.each(1, [&](Index task, Index, int worker) {
      if (x.codes(task, worker).bound()) seeks.store(true, std::memory_order_relaxed);
    });
    if (seeks.load(std::memory_order_relaxed)) {
      // In a sample of the keys, then in all.
      on.each(ranges, [&](Index task, Index range, int worker) {
        x.codes(task, worker).seek_largest(range, 16);
      });
      on.each(1, [&](Index task, Index, int worker) { x.codes(task, worker).judge_sample(); });
      on.each(ranges, [&](Index task, Index range, int worker) {
        x.codes(task, worker).seek_largest(range, 1);
      });
      on.each(1, [&](Index task, Index, int worker) { x.codes(task, worker).shift_to_largest(); });
    }
    for (Index pass = 0; pass < CodeMass::passes(x.shape_); ++pass) {
      on.each(ranges, [&](Index task, Index range, int worker) {
        x.codes(task, worker).compute_weights(pass, range);
      });
      on.each(1, [&](Index task, Index, int worker) { x.codes(task, worker).find_factors(pass); });
      on.each(ranges, [&](Index task, Index range, int worker) {
        x.codes(task, worker).add(pass, range, x.scores(task));
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
    errors_[task] = coded ? s.codes.error * static_cast<float>(ln_2) : infinity;
    for (Index set = 0; set < shape_.sets; ++set) {
      if (call_.chunk_scores != nullptr)
        call_.chunk_scores[task * shape_.sets + set] = s.head.chunk_score[set];
      if (coded) codes_->look_up_best(task % kv_heads(), scores(task)[set], w.reader);
    }
  }

  const CodeKernels* kernels_;  // null: there are no codes
  const SoftmaxScoring& call_;
  const TensorView<float, 3>& scores_;
  QueryScoreState& state_;
  const SketchedKeys* codes_;
  MassShape shape_;
  HeadPlan plan_;
  Slot* slots_ = nullptr;
  float* errors_ = nullptr;  // [batch, kv_heads]
};

#if !defined(QUOKA_COMPILED)
struct CodedMass {
  static constexpr CodedWork work = {SoftmaxMass::by_codes, code_kernels};
};
#endif

}  // namespace detail

QUOKA_FUNC void softmax_scores(const SoftmaxScoring& scoring, TensorView<float, 3> scores,
                               QueryScoreState& state, ExecutorRef executor) {
  if (scores.len() > 0)
    detail::require_equal("the scores' inner stride", scores.strides()[2], "that of an array", 1);
  detail::SoftmaxMass(scoring, scores, state, executor).run();
}

QUOKA_FUNC void mean_logit_scores(const QueryRows& shape, FillRows fill, const Rows& keys,
                                  TensorView<float, 3> scores, QueryScoreState& state,
                                  ExecutorRef executor) {
  detail::require_sizes("scores", scores.sizes(), {keys.batch(), keys.heads(), keys.len()});
  const auto whole = score_view(scores.data(), scores.batch(), scores.heads(), scores.len());
  for (std::size_t axis = 0; axis < 3; ++axis)
    if (scores.sizes()[axis] > 1)
      detail::require_equal("a stride of the scores", scores.strides()[axis],
                            "that of score_view()", whole.strides()[axis]);
  const auto means_in = [&](Arena& arena) {
    return arena.take<float>(keys.batch() * keys.heads() * shape.dim);
  };
  const auto rows_in = [&](Arena& arena) { return arena.take<float>(shape.max_rows * shape.dim); };
  state.call.reserve(1, means_in);
  state.workers.reserve(executor.workers(), [&](Arena& arena) {
    RowReader(arena, shape.read.dim());
    rows_in(arena);
  });
  Arena of_call = state.call[0];
  float* const means = means_in(of_call);
  executor.run(keys.batch() * keys.heads(), [&](Index task, int worker) {
    Arena arena = state.workers[worker];
    RowReader reader(arena, shape.read.dim());
    float* const first = rows_in(arena);
    RowWriter rows(first, shape.dim, reader);
    fill(task / keys.heads(), task % keys.heads(), rows);
    float* const mean = means + task * shape.dim;
    std::fill_n(mean, shape.dim, 0.0f);
    const float share = 1.0f / static_cast<float>(std::max<Index>(rows.count(), 1));
    for (Index i = 0; i < rows.count(); ++i)
      for (Index c = 0; c < shape.dim; ++c) mean[c] += first[i * shape.dim + c] * share;
  });
  detail::multiply_all_keys(means, keys, scores.data(), state.workers, executor);
}

}  // namespace QUOKA_ABI
}  // namespace quoka
#endif  // QUOKA_DEFINES
