// The parts that selectors are made of: loops over KV heads, query rows, and scores of
// several queries per KV head in either domain.
//
//   softmax   score[t] = mean over rows of softmax(logits of the row)[t]
//   logit     score[t] = mean over rows of logit[t] = logit of the mean row
//
// A method says how a KV head's rows come about (FillRows) and what lies in place of the keys
// (KeySource). Rows with a NaN or an infinity are left out. softmax: 2 * rows * keys * dim FLOPs per
// KV head and a weight per row and key, tuning::mass_weight_bytes of them at a time; logit: 2 * keys *
// dim. The methods of this library are written with these functions alone.
#pragma once

#include <quoka/base/buffer.hpp>
#include <quoka/rows/rows.hpp>
#include <quoka/runtime/worker_scratch.hpp>
#include <quoka/select/selector.hpp>
#include <quoka/select/steps/mass_scratch.hpp>
#include <quoka/select/steps/score.hpp>
#include <quoka/select/steps/top_k.hpp>

#include <cmath>
#include <limits>
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

// Where rows are written: add(row, factor) appends a query's channels times factor, if they are
// finite.
class RowWriter {
 public:
  // `rows` has room for all of them, [max_rows, dim].
  RowWriter(float* rows, Index dim, RowReader& reader) : rows_(rows), dim_(dim), reader_(&reader) {}

  // Row i of one head of q.
  void add(const Rows& q, Index b, Index head, Index i, float factor) {
    add(read(q, b, head, i), factor);
  }
  // The same of a row of floats [dim].
  void add(const float* row, float factor) {
    if (scale_row(row, dim_, factor, next())) ++count_;
  }
  // Row i of a head of q as floats: good until the next.
  const float* read(const Rows& q, Index b, Index head, Index i) const {
    return reader_->read(q, b, head, i);
  }
  // The place of the next row, for those who write it themselves; it counts once kept.
  float* next() const { return rows_ + count_ * dim_; }
  void keep() { ++count_; }  // next() counts
  // Counts next(), unless it holds a NaN or an infinity.
  void keep_if_finite() {
    const float* const row = next();
    float poison = 0.0f;  // x * 0 is NaN for NaN and infinity
    for (Index c = 0; c < dim_; ++c) poison += row[c] * 0.0f;
    if (poison == 0.0f) ++count_;
  }
  Index count() const { return count_; }  // rows kept so far

 private:
  float* rows_;
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
  WorkerScratch<detail::MassScratch> mass;    // of softmax_scores()
  WorkerScratch<detail::ScoreScratch> score;  // of mean_logit_scores()
  Buffer<float> mean;                         // [batch, kv_heads, 1, dim]

  Index bytes() const { return bytes_of(mass, score, mean); }
};

namespace detail {
class MassKeys;
}

// The keys, or other rows in their place, that the rows are multiplied with for each head of scores.
class KeySource {
 public:
  // use(keys) with what stands for the keys of one of `heads` heads of scores.
  virtual void with_keys(Index b, Index head, Index heads,
                         FunctionRef<void(detail::MassKeys&)> use) const = 0;

 protected:
  ~KeySource() = default;
};

// The rows of k [batch, kv_heads, len, dim].
class RowSource final : public KeySource {
 public:
  explicit RowSource(const Rows& k) : rows_(k) {}  // k: read, not copied
  void with_keys(Index b, Index head, Index heads,
                 FunctionRef<void(detail::MassKeys&)> use) const override;

 private:
  Rows rows_;
};

// The input of softmax_scores().
struct SoftmaxScoring {
  QueryRows rows;         // how many of each head, of how many channels
  FillRows fill;          // writes them, times the logit scale
  const KeySource& keys;  // what they are multiplied with
  Index capacity;         // as many keys as there may be in later calls, for scratch memory
  Aggregation over;       // the mean over a head's rows of their softmax, or its maximum
  float softcap = 0.0f;   // if not 0, caps the logits, as attention does
};
// scores [batch, heads, keys], heads a multiple of the keys' KV heads. Throws std::invalid_argument unless the
// scores of a head lie side by side.
void softmax_scores(const SoftmaxScoring& scoring, TensorView<float, 3> scores,
                    QueryScoreState& state, ExecutorRef executor);

// scores [batch, kv_heads, keys]; keys [batch, kv_heads, keys, dim]. Throws std::invalid_argument
// for scores of another shape than the keys', or other strides than score_view() has.
void mean_logit_scores(const QueryRows& shape, FillRows fill, const Rows& keys,
                       TensorView<float, 3> scores, QueryScoreState& state, ExecutorRef executor);

// scores [batch, kv_heads, kv_len] by exact logits of the queries at position_of(m), m < n, of every
// head of the group.
void exact_scores(const SelectorInput& input, Index n, FunctionRef<Index(Index m)> position_of,
                  Domain domain, Aggregation over, TensorView<float, 3> scores,
                  QueryScoreState& state, ExecutorRef executor);

// Scratch of add_causal_mass, of one worker: `rows` [rows, dim] is for the queries.
using CausalMassScratch = detail::MassScratch;

// Attention of some query rows to listed keys, each row to those before its end: mass[0, key_count)
// = share * the sum of the rows' softmax. scratch.rows [rows, dim] hold the queries times the logit
// scale; ends [rows]; scratch is reserved for (rows, key_count, dim).
void add_causal_mass(Index rows, const Index* ends, const HeadRows& keys, Index key_count,
                     Index dim, float share, float* mass, CausalMassScratch& scratch);

// Top-k for selectors that do it themselves: steps/top_k.hpp.
using TopKScratch = detail::TopKScratch;
// Throws std::invalid_argument for a kernel_size < 1 and a negative keep_first or keep_last.
inline void check_top_k(const TopKOptions& options) { detail::check_top_k(0, options); }
// The kept.size() best of one head's scores, as ascending positions. scratch is reserved for
// (scores.size(), options.kernel_size).
inline void best_of_head(std::span<const float> scores, const TopKOptions& options,
                         std::span<Position> kept, TopKScratch& scratch) {
  detail::top_k_head(scores.data(), std::ssize(scores), options, kept, scratch);
}
// The `budget` best of scores [batch, kv_heads, kv_len], as score_view() has them. scratch likewise.
inline void best_keys(const TensorView<float, 3>& scores, Index budget, const TopKOptions& options,
                      WorkerScratch<TopKScratch>& scratch, Selection& selection,
                      ExecutorRef executor) {
  detail::select_top_k({scores.data(), scores.batch(), scores.heads(), scores.len()}, budget,
                       options, selection, scratch, executor);
}
// Scores as top-k orders them: minus infinity for one that is not finite.
inline float ordered_score(float score) {
  return std::isfinite(score) ? score : -std::numeric_limits<float>::infinity();
}

}  // namespace QUOKA_ABI
}  // namespace quoka

#if QUOKA_DEFINES
#include <quoka/kernels/format_table.hpp>
#include <quoka/kernels/inverse_norm.hpp>
#include <quoka/select/steps/softmax_mass.hpp>

#include <algorithm>

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
  simd::Packet poison = simd::zero();  // x * 0 is NaN for NaN and infinity
  float tail = 0.0f;
  Index c = 0;
  for (; c + simd::lanes <= dim; c += simd::lanes) {
    const simd::Packet scaled = simd::mul(simd::load_unaligned(x + c), simd::broadcast(factor));
    simd::store_unaligned(to + c, scaled);
    poison = simd::fma(scaled, simd::zero(), poison);
  }
  for (; c < dim; ++c) {
    to[c] = x[c] * factor;
    tail += to[c] * 0.0f;
  }
  return simd::reduce_add(poison) + tail == 0.0f;
}
QUOKA_FUNC bool is_finite_row(const float* x, Index dim) {
  return detail::is_finite_row(x, dim, detail::inverse_norm_of_row(x, dim));
}

namespace detail {

QUOKA_FUNC void MassScratch::reserve(Index row_count, Index keys, Index dim) {
  // A shorter cache may take more panels at once: whichever needs more.
  const Index panels =
      std::min(ceil_div(row_count, tuning::panel_rows), tuning::max_panels_per_task);
  const Index blocks = ceil_div(keys, tuning::block_keys), panel = keys * tuning::panel_rows;
  rows.reserve(row_count * dim);
  tiles.reserve(ceil_div(tuning::block_keys, tuning::tile_rows) * key_tile_size(dim));
  queries.reserve(panels * dim * tuning::panel_rows);
  const Index most = tuning::mass_weight_bytes / Index{sizeof(float)};
  weights.reserve_amortised(std::max(panel, std::min(panels * panel, most)));
  block_max.reserve_amortised(panels * blocks * tuning::panel_rows);
  block_sum.reserve_amortised(panels * blocks * tuning::panel_rows);
  row_max.reserve(panels * tuning::panel_rows);
  row_sum.reserve(panels * tuning::panel_rows);
}
}  // namespace detail

QUOKA_FUNC void RowSource::with_keys(Index b, Index head, Index heads,
                                     FunctionRef<void(detail::MassKeys&)> use) const {
  detail::RowKeys keys(rows_.head(b, head / (heads / rows_.heads())), rows_.len());
  use(keys);
}

QUOKA_FUNC void softmax_scores(const SoftmaxScoring& scoring, TensorView<float, 3> scores,
                               QueryScoreState& state, ExecutorRef executor) {
  const Index max_rows = scoring.rows.max_rows, dim = scoring.rows.dim;
  const Index heads = scores.heads(), key_count = scores.len();
  if (key_count > 0)
    detail::require_equal("the scores' inner stride", scores.strides()[2], "that of an array", 1);
  state.mass.reserve(executor.workers(), max_rows, std::max(key_count, scoring.capacity), dim);
  for (int worker = 0; worker < executor.workers(); ++worker)  // so that no task allocates
    state.mass[worker].query.reserve(scoring.rows.read);
  executor.run(scores.batch() * heads, [&](Index task, int worker) {
    const Index b = task / heads, head = task % heads;
    detail::MassScratch& s = state.mass[worker];
    RowWriter rows(s.rows.data(), dim, s.query);
    scoring.fill(b, head, rows);
    float* const mass = key_count > 0 ? scores.row(b, head, 0) : nullptr;
    std::fill_n(mass, key_count, 0.0f);
    const float share = scoring.over == Aggregation::max
                            ? 1.0f
                            : 1.0f / static_cast<float>(std::max<Index>(rows.count(), 1));
    const auto add = [&](detail::MassKeys& head_keys) {
      detail::MassAccumulator(s.rows.data(), rows.count(), dim, head_keys, key_count, s, nullptr,
                              detail::LogitRule{.softcap = scoring.softcap})
          .add_to(mass, share, scoring.over);
    };
    scoring.keys.with_keys(b, head, heads, add);
  });
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
  state.mass.reserve(executor.workers(), shape.max_rows, 0, shape.dim);
  for (int worker = 0; worker < executor.workers(); ++worker)
    state.mass[worker].query.reserve(shape.read);
  float* const means = state.mean.reserve(keys.batch() * keys.heads() * shape.dim);
  executor.run(keys.batch() * keys.heads(), [&](Index task, int worker) {
    detail::MassScratch& s = state.mass[worker];
    float* const first = s.rows.data();
    RowWriter rows(first, shape.dim, s.query);
    fill(task / keys.heads(), task % keys.heads(), rows);
    float* const mean = means + task * shape.dim;
    std::fill_n(mean, shape.dim, 0.0f);
    const float share = 1.0f / static_cast<float>(std::max<Index>(rows.count(), 1));
    for (Index i = 0; i < rows.count(); ++i)
      for (Index c = 0; c < shape.dim; ++c) mean[c] += first[i * shape.dim + c] * share;
  });
  detail::multiply_all_keys(means, keys, scores.data(), state.score, executor);
}

QUOKA_FUNC void exact_scores(const SelectorInput& input, Index n,
                             FunctionRef<Index(Index m)> position_of, Domain domain,
                             Aggregation over, TensorView<float, 3> scores, QueryScoreState& state,
                             ExecutorRef executor) {
  const Rows &q = input.q, &k = input.k;
  const Index group = input.group();
  const float logit_scale = input.logit_scale();
  const auto fill = [&](Index b, Index kv_head, RowWriter& rows) {
    for (Index r = 0; r < group; ++r)
      for (Index m = 0; m < n; ++m)
        rows.add(q, b, kv_head * group + r, position_of(m), logit_scale);
  };
  const QueryRows shape{group * n, k.dim(), q};
  if (domain == Domain::logit) return mean_logit_scores(shape, fill, k, scores, state, executor);
  softmax_scores({shape, fill, RowSource(k), input.capacity, over, input.softcap()}, scores, state,
                 executor);
}

QUOKA_FUNC void add_causal_mass(Index rows, const Index* ends, const HeadRows& keys,
                                Index key_count, Index dim, float share, float* mass,
                                CausalMassScratch& scratch) {
  std::fill_n(mass, key_count, 0.0f);
  detail::RowKeys head_keys(keys, key_count);
  detail::MassAccumulator(scratch.rows.data(), rows, dim, head_keys, key_count, scratch, ends)
      .add_to(mass, share, Aggregation::mean);
}

}  // namespace QUOKA_ABI
}  // namespace quoka
#endif  // QUOKA_DEFINES
