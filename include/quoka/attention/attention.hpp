// Attention of a chunk over the past (all of it, or a Selection) and the chunk itself.
//
//   logit[q][t] = scale * q . k_t,  capped if asked: cap * tanh(logit / cap)
//   out[q]      = sum over visible t of softmax(logit)[t] * v_t
//
// Query i of the chunk stands at absolute position kv_len + i. It sees the past keys that are kept
// and chunk keys 0..i; with a sliding window w only those at a distance below w. Query head h reads
// KV head h / group. Exact, FlashAttention style: one pass over the keys with an online softmax, no
// score matrix. 2 * q_heads * q_len * keys * (head_dim + v_dim) FLOPs. The shape says how:
//
//   a chunk      panels of query rows over packed keys, bound by arithmetic: head_attention.hpp
//   few rows     the same, cut over the keys and merged: partial_rows.hpp
//   one token    keys and values read once where they lie, bound by memory: token_attention.hpp
//
// Each KV head's keys and values are read once per 16 panels of query rows. Scratch per worker: one
// packed block of keys and values, and the queries and accumulators of a task, 0.7 MiB at head_dim
// 128; one token needs 0.3 MiB in all with 32/8 heads of 128.
#pragma once

#include <quoka/attention/head_attention.hpp>
#include <quoka/attention/token_attention.hpp>
#include <quoka/core/executor.hpp>
#include <quoka/core/worker_scratch.hpp>
#include <quoka/select/selection.hpp>

#include <cmath>
#include <optional>

namespace quoka::inline QUOKA_ABI {

struct AttentionOptions {
  std::optional<float> scale = {};          // of the logits; absent: 1 / sqrt(head_dim)
  float softcap = 0.0f;                     // cap on |logit| (Gemma 2); 0: none
  std::span<const float> sink_logits = {};  // [q_heads] learned sink logit per head (GPT-OSS):
                                            // joins the softmax sum and has no value; empty: none
  Index sliding_window = 0;  // a query sees keys at a distance below this; 0: no window
};

// The cached keys and values before the chunk. Any strides.
template <class T>
struct Past {
  TensorView<const T> k = {};       // [batch, kv_heads, kv_len, head_dim]
  TensorView<const T> v = {};       // [batch, kv_heads, kv_len, v_dim]
  const Selection* keep = nullptr;  // null: all; must outlive the call

  Past() = default;
  Past(TensorView<const T> k_in, TensorView<const T> v_in) : k(k_in), v(v_in) {}
  Past(TensorView<const T> k_in, TensorView<const T> v_in, const Selection& keep_in)
      : k(k_in), v(v_in), keep(&keep_in) {}
};

// The keys and values of the chunk's own tokens; without any, attention covers the past alone.
template <class T>
struct Chunk {
  TensorView<const T> k = {};  // [batch, kv_heads, q_len, head_dim]
  TensorView<const T> v = {};  // [batch, kv_heads, q_len, v_dim]
};

// Where results go: `out` alone, or {out, lse}.
template <class T>
struct AttentionOutput {
  TensorView<T> out;             // [batch, q_heads, q_len, v_dim]
  TensorView<float, 3> lse_nat;  // [batch, q_heads, q_len] natural log of the sum of exp(logit),
                                 // sink included; -inf for a row that sees nothing. Optional

  template <detail::ViewableAs<T> Out>
  AttentionOutput(Out& out_in, TensorView<float, 3> lse_in = {}) : out(out_in), lse_nat(lse_in) {}
  AttentionOutput(TensorView<T> out_in, TensorView<float, 3> lse_in = {})
      : out(out_in), lse_nat(lse_in) {}
};

// Scratch memory of attention(). Kept by the caller, it makes repeated calls free of allocation.
template <class T>
struct AttentionWorkspace {
  WorkerScratch<detail::AttentionScratch<T>> panels;
  WorkerScratch<detail::TokenScratch<T>> token;
  detail::Partials partials;

  Index bytes() const { return panels.bytes() + token.bytes() + partials.bytes(); }
};

namespace detail {

// Throws unless keys and values [batch, kv_heads, len, head_dim | v_dim] fit q and each other.
template <class T>
void check_keys_and_values(const TensorView<const T>& q, const TensorView<const T>& k,
                           const TensorView<const T>& v, Index kv_heads, Index v_dim,
                           std::string_view k_name, std::string_view v_name) {
  if (k.len() == 0 && v.len() == 0) return;
  require_sizes(k_name, k.sizes(), {q.batch(), kv_heads, k.len(), q.dim()});
  require_sizes(v_name, v.sizes(), {q.batch(), kv_heads, k.len(), v_dim});
}

inline void check_options(const AttentionOptions& options, Index q_heads) {
  if (!options.sink_logits.empty())
    require_equal("the number of sink_logits", std::ssize(options.sink_logits), "q_heads", q_heads);
  require_at_least("sliding_window", options.sliding_window, 0);
  const float scale = options.scale.value_or(1.0f);
  if (!(std::abs(scale) <= 1e30f)) fail_range("scale", static_cast<double>(scale), "[-1e30, 1e30]");
  if (!(options.softcap >= 0.0f && options.softcap <= 1e30f))
    fail_range("softcap", static_cast<double>(options.softcap), "[0, 1e30]");
}

template <class T>
AttentionCall<T> checked_call(const TensorView<const T>& q, const Past<T>& past,
                              const Chunk<T>& chunk, const AttentionOutput<T>& output,
                              const AttentionOptions& options) {
  require_at_least("q's batch", q.batch(), 1);
  require_at_least("q_len", q.len(), 1);
  require_at_least("head_dim", q.dim(), 1);
  const bool by_past =
      past.k.len() > 0 || chunk.k.len() == 0;  // an empty part may leave its shape open
  const Index kv_heads = by_past ? past.k.heads() : chunk.k.heads();
  const Index v_dim = by_past ? past.v.dim() : chunk.v.dim();
  require_multiple("q_heads", q.heads(), "kv_heads", kv_heads);
  require_at_least("v's dim", v_dim, 1);
  check_keys_and_values(q, past.k, past.v, kv_heads, v_dim, "past k", "past v");
  check_keys_and_values(q, chunk.k, chunk.v, kv_heads, v_dim, "chunk k", "chunk v");
  if (chunk.k.len() > 0) require_equal("chunk k's len", chunk.k.len(), "q_len", q.len());
  require_sizes("out", output.out.sizes(), {q.batch(), q.heads(), q.len(), v_dim});
  if (!output.lse_nat.absent())
    require_sizes("lse_nat", output.lse_nat.sizes(), {q.batch(), q.heads(), q.len()});
  if (past.keep != nullptr && past.k.len() > 0)
    past.keep->require_shape(q.batch(), kv_heads, past.k.len());
  else if (past.keep != nullptr)
    require_equal("the selection's kv_len", past.keep->kv_len(), "the keys' kv_len", 0);
  const float scale = options.scale.value_or(1.0f / std::sqrt(static_cast<float>(q.dim())));
  check_options(options, q.heads());

  return {.q = q,
          .past_k = past.k,
          .past_v = past.v,
          .chunk_k = chunk.k,
          .chunk_v = chunk.v,
          .out = output.out,
          .lse = output.lse_nat,
          .kv_heads = kv_heads,
          .group = q.heads() / kv_heads,
          .v_dim = v_dim,
          .query_scale = options.softcap > 0.0f ? scale / options.softcap : scale * log2_e,
          .cap_log2 = options.softcap * log2_e,
          .sink_logits = options.sink_logits,
          .window = options.sliding_window > 0 ? options.sliding_window
                                               : std::numeric_limits<Index>::max()};
}

// Tasks per KV head: enough of them for the workers, none too small to pay for its packing unless
// workers would stand idle.
inline Index tasks_per_head(Index panels, Index heads, int workers) {
  const Index for_cache = ceil_div(panels, tuning::max_panels_per_task);
  if (workers == 1) return for_cache;
  const Index for_balance = ceil_div(tuning::tasks_per_worker * workers, heads);
  const Index paying = std::max(ceil_div(panels, tuning::min_panels_per_task),
                                std::min(panels, ceil_div(Index{workers}, heads)));
  return std::max(for_cache, std::min(for_balance, paying));
}

// A call's tasks, cut in one of the three ways.
template <class T>
class AttentionRun {
 public:
  AttentionRun(const AttentionCall<T>& call, const Selection* keep,
               AttentionWorkspace<T>& workspace)
      : call_(call), keep_(keep == nullptr || keep->is_all() ? nullptr : keep), s_(workspace) {}

  template <class E>
  void operator()(E&& executor) {
    const Index panels = ceil_div(call_.rows(), tuning::panel_rows);
    if (call_.q.len() == 1 && call_.group <= tuning::token_rows)
      run_tokens(executor);
    else if (panels < tuning::min_panels_per_task && parts() > 1)
      run_parts(panels, executor);
    else
      run_panels(panels, executor);
  }

 private:
  Index heads() const { return call_.q.batch() * call_.kv_heads; }
  KeySequence<T> keys_of(Index head) const {
    const Index b = head / call_.kv_heads, kv_head = head % call_.kv_heads;
    return {.call = call_,
            .b = b,
            .kv_head = kv_head,
            .keep = keep_ == nullptr ? std::span<const Position>{} : keep_->row(b, kv_head),
            .past_count = keep_ == nullptr ? call_.past_k.len() : keep_->count()};
  }

  // The most keys that are in sight of a head's queries, and the parts they are cut into.
  Index most_keys() const {
    const Index all =
        (keep_ == nullptr ? call_.past_k.len() : keep_->count()) + call_.chunk_k.len();
    if (call_.window >= all) return all;
    return std::min(all, call_.window + call_.q.len() + tuning::block_keys);
  }
  Index parts() const { return std::max<Index>(1, ceil_div(most_keys(), part_keys(most_keys()))); }

  // A task: some panels of a head, over all keys.
  template <class E>
  void run_panels(Index panels, E& executor) {
    const Index tasks = tasks_per_head(panels, heads(), executor.workers());
    const Index per_task = ceil_div(panels, tasks);
    s_.panels.reserve(executor.workers(), per_task, call_.q.dim(), call_.v_dim);
    executor.run(heads() * tasks, [&](Index task, int worker) {
      const KeySequence<T> keys = keys_of(task / tasks);
      const Index first = task % tasks * per_task, count = std::min(per_task, panels - first);
      if (count > 0) HeadAttention<T>(keys, first, count, s_.panels[worker]).run();
    });
  }

  // A task: all panels of a head, over a part of its keys.
  template <class E>
  void run_parts(Index panels, E& executor) {
    s_.panels.reserve(executor.workers(), panels, call_.q.dim(), call_.v_dim);
    merge_parts(executor, [&](const KeySequence<T>& keys, const KeyRange& range, bool first,
                              const PartialRows& to, int worker) {
      HeadAttention<T>(keys, 0, panels, s_.panels[worker])
          .run_part(range.begin, range.end, first, to);
    });
  }

  // A task: a token's rows of a head, over a part of its keys.
  template <class E>
  void run_tokens(E& executor) {
    s_.token.reserve(executor.workers(), call_.group, call_.q.dim(), call_.v_dim);
    merge_parts(executor, [&](const KeySequence<T>& keys, const KeyRange& range, bool first,
                              const PartialRows& to, int worker) {
      const Index begin = std::min(std::max(range.begin, keys.begin_for(0)), range.end);
      TokenAttention<T>(keys, s_.token[worker]).run(begin, range.end, first, to);
    });
  }

  // attend(keys, range, first, to, worker) for every part of every head, then their merging.
  template <class E, class Attend>
  void merge_parts(E& executor, Attend&& attend) {
    const Index parts = this->parts(), size = part_keys(most_keys());
    s_.partials.reserve(heads(), parts, call_.rows(), call_.v_dim);
    executor.run(heads() * parts, [&](Index task, int worker) {
      const KeySequence<T> keys = keys_of(task / parts);
      const Index part = task % parts;
      const KeyRange all = keys.in_sight(0, call_.q.len() - 1);
      const Index begin = std::min(all.begin + part * size, all.end);
      const Index end = part + 1 == parts ? all.end : std::min(begin + size, all.end);
      attend(keys, KeyRange{begin, end}, part == 0, s_.partials.part(task / parts, part), worker);
    });
    executor.run(heads(), [&](Index head, int) { write(head, s_.partials.merged(head)); });
  }

  void write(Index head, const PartialRows& rows) const {
    const Index b = head / call_.kv_heads, first = head % call_.kv_heads * call_.group;
    for (Index row = 0; row < call_.rows(); ++row) {
      const Index q_head = first + row % call_.group, query = row / call_.group;
      const float share = rows.state[row].inverse_sum();
      T* const to = call_.out.row(b, q_head, query);
      const float* const from = rows.out + row * call_.v_dim;
      for (Index c = 0; c < call_.v_dim; ++c) to[c] = static_cast<T>(from[c] * share);
      if (!call_.lse.absent())
        call_.lse.at(b, q_head, query) = lse_nat(rows.state[row].max, rows.state[row].sum);
    }
  }

  const AttentionCall<T>& call_;
  const Selection* keep_;
  AttentionWorkspace<T>& s_;
};

}  // namespace detail

// q [batch, q_heads, q_len, head_dim]; writes output. Results do not depend on the executor, nor a
// sequence's on the others of its batch.
// NaN in a query row, or in a key or value that a row sees, makes that row NaN and no other.
// Throws std::invalid_argument, before anything is written, when shapes do not fit together.
template <TensorLike Q, Executor E = SerialExecutor>
void attention(const Q& q, const Past<storage_t<Q>>& past, const Chunk<storage_t<Q>>& chunk,
               const AttentionOutput<storage_t<Q>>& output, const AttentionOptions& options,
               E&& executor, AttentionWorkspace<storage_t<Q>>& workspace) {
  using T = storage_t<Q>;
  const auto call = detail::checked_call<T>(q, past, chunk, output, options);
  detail::AttentionRun<T>(call, past.keep, workspace)(executor);
}

// As above with scratch memory of its own, allocated in each call.
template <TensorLike Q, Executor E = SerialExecutor>
void attention(const Q& q, const Past<storage_t<Q>>& past, const Chunk<storage_t<Q>>& chunk,
               const AttentionOutput<storage_t<Q>>& output, const AttentionOptions& options = {},
               E&& executor = E{}) {
  AttentionWorkspace<storage_t<Q>> workspace;
  attention(q, past, chunk, output, options, executor, workspace);
}

}  // namespace quoka::inline QUOKA_ABI
