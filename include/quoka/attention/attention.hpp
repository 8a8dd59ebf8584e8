// Attention of a chunk over the past (all of it, or a Selection) and the chunk itself.
//
//   logit[q][t] = scale * q . k_t,  capped if asked: cap * tanh(logit / cap)
//   out[q]      = sum over visible t of softmax(logit)[t] * v_t
//
// Query i of the chunk stands at absolute position kv_len + i. It sees the past keys that are kept and
// chunk keys 0..i; with a sliding window w only those at a distance below w. Query head h reads KV head
// h / group. Exact, FlashAttention style: one pass over the keys with an online softmax, no score
// matrix. 2 * q_heads * q_len * keys * (head_dim + v_dim) FLOPs; each KV head's keys and values are
// read once per 16 panels of query rows. Scratch per worker: one packed block of keys and values, and
// the queries and accumulators of a task, about 1.2 MiB at head_dim 128.
#pragma once

#include <quoka/attention/head_attention.hpp>
#include <quoka/core/executor.hpp>
#include <quoka/select/selection.hpp>

#include <cmath>
#include <optional>
#include <vector>

namespace quoka::inline QUOKA_ABI {

struct AttentionOptions {
  std::optional<float> scale = {};           // of the logits; absent: 1 / sqrt(head_dim)
  float softcap = 0.0f;                      // cap on |logit| (Gemma 2); 0: none
  std::span<const float> sink_logits = {};   // [q_heads] learned sink logit per head (GPT-OSS): joins
                                             // the softmax sum and has no value; empty: none
  Index sliding_window = 0;                  // a query sees keys at a distance below this; 0: no window
};

// The cached keys and values before the chunk. Any strides.
template <class T>
struct Past {
  TensorView<const T> k = {};       // [batch, kv_heads, kv_len, head_dim]
  TensorView<const T> v = {};       // [batch, kv_heads, kv_len, v_dim]
  const Selection* keep = nullptr;  // null: all

  Past() = default;
  Past(TensorView<const T> k_in, TensorView<const T> v_in) : k(k_in), v(v_in) {}
  Past(TensorView<const T> k_in, TensorView<const T> v_in, const Selection& keep_in) : k(k_in), v(v_in), keep(&keep_in) {}
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
  TensorView<float, 3> lse_nat;  // [batch, q_heads, q_len] natural log of the sum of exp(logit), sink
                                 // included; -inf for a row that sees nothing. Optional

  template <class Out>
    requires std::is_convertible_v<Out&, TensorView<T>>
  AttentionOutput(Out& out_in, TensorView<float, 3> lse_in = {}) : out(out_in), lse_nat(lse_in) {}  // NOLINT
  AttentionOutput(TensorView<T> out_in, TensorView<float, 3> lse_in = {}) : out(out_in), lse_nat(lse_in) {}  // NOLINT
};

// Scratch memory of attention(), one part per worker. Kept by the caller, it makes repeated calls free
// of allocation; not to be shared by concurrent calls.
template <class T>
class AttentionWorkspace {
 public:
  Index bytes() const {
    Index sum = 0;
    for (const auto& part : parts_) sum += part.bytes();
    return sum;
  }
  std::vector<detail::AttentionScratch<T>>& parts() { return parts_; }

 private:
  std::vector<detail::AttentionScratch<T>> parts_;
};

namespace detail {

template <class T>
AttentionCall<T> checked_call(TensorView<const T> q, const Past<T>& past, const Chunk<T>& chunk,
                              const AttentionOutput<T>& output, const AttentionOptions& options) {
  const bool has_past = past.k.len() > 0, has_chunk = chunk.k.len() > 0;
  require_at_least("q's batch", q.batch(), 1);
  require_at_least("q_len", q.len(), 1);
  require_at_least("head_dim", q.dim(), 1);
  const Index kv_heads = has_past || !has_chunk ? past.k.heads() : chunk.k.heads();
  require_multiple("q_heads", q.heads(), "kv_heads", kv_heads);
  const Index v_dim = has_past || !has_chunk ? past.v.dim() : chunk.v.dim();
  require_at_least("v's dim", v_dim, 1);
  require_equal("past v's len", past.v.len(), "past k's len", past.k.len());
  require_equal("chunk v's len", chunk.v.len(), "chunk k's len", chunk.k.len());
  const auto require_shape = [&](const TensorView<const T>& x, Index dim, std::string_view heads_name,
                                 std::string_view batch_name, std::string_view dim_name) {
    require_equal(batch_name, x.batch(), "q's batch", q.batch());
    require_equal(heads_name, x.heads(), "kv_heads", kv_heads);
    require_equal(dim_name, x.dim(), &dim == &v_dim ? "v's dim" : "q's head_dim", dim);
  };
  if (has_past) {
    require_shape(past.k, q.dim(), "past k's heads", "past k's batch", "past k's head_dim");
    require_shape(past.v, v_dim, "past v's heads", "past v's batch", "past v's dim");
  }
  if (has_chunk) {
    require_equal("chunk k's len", chunk.k.len(), "q_len", q.len());
    require_shape(chunk.k, q.dim(), "chunk k's heads", "chunk k's batch", "chunk k's head_dim");
    require_shape(chunk.v, v_dim, "chunk v's heads", "chunk v's batch", "chunk v's dim");
  }
  require_equal("out's batch", output.out.batch(), "q's batch", q.batch());
  require_equal("out's heads", output.out.heads(), "q_heads", q.heads());
  require_equal("out's len", output.out.len(), "q_len", q.len());
  require_equal("out's dim", output.out.dim(), "v's dim", v_dim);
  if (output.lse_nat.data() != nullptr) {
    require_equal("lse_nat's batch", output.lse_nat.batch(), "q's batch", q.batch());
    require_equal("lse_nat's heads", output.lse_nat.heads(), "q_heads", q.heads());
    require_equal("lse_nat's len", output.lse_nat.len(), "q_len", q.len());
  }
  if (past.keep != nullptr) {
    require_equal("the selection's kv_len", past.keep->kv_len(), "past k's len", past.k.len());
    if (has_past) {
      require_equal("the selection's batch", past.keep->batch(), "q's batch", q.batch());
      require_equal("the selection's kv_heads", past.keep->kv_heads(), "kv_heads", kv_heads);
    }
  }
  if (!options.sink_logits.empty())
    require_equal("the number of sink_logits", static_cast<Index>(options.sink_logits.size()), "q_heads", q.heads());
  require_at_least("sliding_window", options.sliding_window, 0);
  const float scale = options.scale.value_or(1.0f / std::sqrt(static_cast<float>(q.dim())));
  if (!std::isfinite(scale)) fail_range("scale", scale, "(-inf, inf)");
  if (!(options.softcap >= 0.0f) || std::isinf(options.softcap)) fail_range("softcap", options.softcap, "[0, inf)");

  return {.q = q, .past_k = past.k, .past_v = past.v, .chunk_k = chunk.k, .chunk_v = chunk.v,
          .out = output.out, .lse = output.lse_nat, .kv_heads = kv_heads,
          .group = q.heads() / kv_heads, .v_dim = v_dim,
          .query_scale = options.softcap > 0.0f ? scale / options.softcap : scale * log2_e,
          .cap_log2 = options.softcap * log2_e, .sink_logits = options.sink_logits,
          .window = options.sliding_window > 0 ? options.sliding_window : std::numeric_limits<Index>::max()};
}

// Tasks per KV head: enough of them for the workers, none too small to pay for its packing.
inline Index tasks_per_head(Index panels, Index heads, int workers) {
  const Index for_cache = ceil_div(panels, tuning::max_panels_per_task);
  if (workers == 1) return for_cache;
  const Index for_balance = ceil_div(tuning::tasks_per_worker * workers, heads);
  return std::max(for_cache, std::min(for_balance, ceil_div(panels, tuning::min_panels_per_task)));
}

}  // namespace detail

// q [batch, q_heads, q_len, head_dim]; writes output. Results do not depend on the executor.
// NaN in a query row, or in a key or value that a row sees, makes that row NaN and no other.
// Throws std::invalid_argument, before anything is written, when shapes do not fit together.
template <TensorLike Q, class E = SerialExecutor>
  requires Executor<E>
void attention(const Q& q, const Past<storage_t<Q>>& past, const Chunk<storage_t<Q>>& chunk,
               const AttentionOutput<storage_t<Q>>& output, const AttentionOptions& options, E&& executor,
               AttentionWorkspace<storage_t<Q>>& workspace) {
  using T = storage_t<Q>;
  const auto call = detail::checked_call<T>(q, past, chunk, output, options);
  const Index panels = ceil_div(call.rows(), tuning::panel_rows);
  const Index heads = call.q.batch() * call.kv_heads;
  const Index parts = detail::tasks_per_head(panels, heads, executor.workers());
  const Index panels_per_part = ceil_div(panels, parts);
  auto& scratch = workspace.parts();
  if (scratch.size() < static_cast<std::size_t>(executor.workers())) scratch.resize(static_cast<std::size_t>(executor.workers()));
  for (auto& part : scratch) part.reserve(panels_per_part, call.q.dim(), call.v_dim);

  executor.run(heads * parts, [&](Index task, int worker) {
    const Index head = task / parts, first_panel = task % parts * panels_per_part;
    const Index b = head / call.kv_heads, kv_head = head % call.kv_heads;
    const bool all = past.keep == nullptr || past.keep->is_all();
    const detail::KeySequence<T> keys{.call = call, .b = b, .kv_head = kv_head,
                                      .keep = all ? std::span<const Position>{} : past.keep->row(b, kv_head),
                                      .past_count = all ? past.k.len() : past.keep->count()};
    const Index count = std::min(panels_per_part, panels - first_panel);
    if (count > 0) detail::HeadAttention<T>(keys, first_panel, count, scratch[static_cast<std::size_t>(worker)]).run();
  });
}

// As above with scratch memory of its own, allocated in each call.
template <TensorLike Q, class E = SerialExecutor>
  requires Executor<E>
void attention(const Q& q, const Past<storage_t<Q>>& past, const Chunk<storage_t<Q>>& chunk,
               const AttentionOutput<storage_t<Q>>& output, const AttentionOptions& options = {}, E&& executor = E{}) {
  AttentionWorkspace<storage_t<Q>> workspace;
  attention(q, past, chunk, output, options, executor, workspace);
}

}  // namespace quoka::inline QUOKA_ABI
