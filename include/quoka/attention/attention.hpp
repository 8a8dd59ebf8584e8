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

#include <quoka/attention/attention_tasks.hpp>
#include <quoka/core/executor.hpp>
#include <quoka/select/selection.hpp>

#include <cmath>
#include <optional>

namespace quoka::inline QUOKA_ABI {

// What Q K^T and P V of a chunk are computed in. Softmax is always in single precision, and so is
// all of one token's attention (token_attention.hpp), which is bound by memory.
enum class Arithmetic {
  single,   // float
  fixed16,  // 16-bit fixed point with exact 32-bit sums, where the ISA has one instruction for it:
            // 1.55 to 1.76 times as fast, off by at most 1e-3 of the call's largest output on
            // normal and on recorded data (bench/README.md); a huge value costs the others of its
            // block of keys precision, and bits depend on the chunk size
};

// What a request comes to on the ISA this is compiled for: fixed16 needs AVX512-VNNI or AVX-VNNI,
// and is float elsewhere, to the last bit.
constexpr Arithmetic arithmetic_used(Arithmetic asked) {
  return simd::has_pair_sums ? asked : Arithmetic::single;
}

struct AttentionOptions {
  std::optional<float> scale = {};          // of the logits; absent: 1 / sqrt(head_dim)
  float softcap = 0.0f;                     // cap on |logit| (Gemma 2); 0: none
  std::span<const float> sink_logits = {};  // [q_heads] learned sink logit per head (GPT-OSS):
                                            // joins the softmax sum and has no value; empty: none
  Index sliding_window = 0;  // a query sees keys at a distance below this; 0: no window
  Arithmetic arithmetic = Arithmetic::single;  // asked for; arithmetic_used() says what it comes to
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

}  // namespace detail

// q [batch, q_heads, q_len, head_dim]; writes output. Results do not depend on the executor, nor a
// sequence's on the others of its batch.
// NaN in a query row, or in a key or value that a row sees, makes that row NaN and no other.
// Throws std::invalid_argument, before anything is written, when shapes do not fit together.
template <TensorLike Q>
void attention(const Q& q, const Past<storage_t<Q>>& past, const Chunk<storage_t<Q>>& chunk,
               const AttentionOutput<storage_t<Q>>& output, const AttentionOptions& options,
               ExecutorRef executor, AttentionWorkspace<storage_t<Q>>& workspace) {
  using T = storage_t<Q>;
  const auto call = detail::checked_call<T>(q, past, chunk, output, options);
  detail::AttentionTasks<T> tasks(call, past.keep, workspace);
  if constexpr (simd::has_pair_sums) {
    if (options.arithmetic == Arithmetic::fixed16)
      return tasks.template run<detail::FixedPanels<simd::PairSums>>(executor);
  }
  tasks.template run<detail::SinglePanels>(executor);
}

// As above with scratch memory of its own, allocated in each call.
template <TensorLike Q>
void attention(const Q& q, const Past<storage_t<Q>>& past, const Chunk<storage_t<Q>>& chunk,
               const AttentionOutput<storage_t<Q>>& output, const AttentionOptions& options = {},
               ExecutorRef executor = SerialExecutor{}) {
  AttentionWorkspace<storage_t<Q>> workspace;
  attention(q, past, chunk, output, options, executor, workspace);
}

}  // namespace quoka::inline QUOKA_ABI
