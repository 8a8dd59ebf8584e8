// Arguments of an attention call: options, the past, the chunk, where results go, and scratch
// memory.
#pragma once

#include <quoka/attention/arithmetic.hpp>
#include <quoka/rows/index_lists.hpp>
#include <quoka/rows/logit_options.hpp>
#include <quoka/rows/mask.hpp>
#include <quoka/rows/rows.hpp>
#include <quoka/rows/selection.hpp>
#include <quoka/runtime/executor.hpp>

#include <cmath>
#include <memory>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

namespace quoka {
inline namespace QUOKA_ABI {

// Options of attention(). The defaults are plain causal attention. Numbers that are not finite, or
// beyond the ranges in brackets, are refused with index and value. select() gets the same object
// (rows/logit_options.hpp). Spans and the mask are the caller's, and are read in the call; an
// object that keeps options has an OwnedAttentionOptions.
struct AttentionOptions {
  std::optional<float> scale = {};    // of the logits, times q before any product; absent:
                                      // 1 / sqrt(head_dim) [-1e30, 1e30]
  float softcap = 0.0f;               // cap on |logit| (Gemma 2) [1e-30, 1e30]; 0: none
  std::span<const float> sinks = {};  // [q_heads] learned sink logit per head (GPT-OSS):
                                      // joins the softmax sum and has no value; -infinity:
                                      // no sink for this head; empty: no sinks
  Index sliding_window = 0;  // a query sees no key this far before it, or further; 0: no window
  // The arithmetic that is asked for; arithmetic_used() returns the one that runs.
  Arithmetic arithmetic = Arithmetic::automatic;
  // Position of the first query; no query's may exceed max_position. Absent: where the past ends.
  std::optional<Index> q_offset = {};
  // Query i sees the chunk's keys 0..i; false: all. Several queries without a chunk need false, or
  // q_offset.
  bool causal = true;
  Mask mask = {};                            // of past and chunk: mask.hpp
  std::span<const float> mask_factors = {};  // [q_heads] times the mask's biases, as ggml has
                                             // ALiBi [-1e30, 1e30]; empty: 1
  std::span<const float> alibi_slopes = {};  // [q_heads] logit -= slope * (the query's position
                                             // - the key's) [-1e30, 1e30]; empty: none
  IndexLists lists = {};  // of past and chunk, a separate key list per query: index_lists.hpp. Not
                          // together with a Selection, which all queries share

  // The part that selectors use.
  operator LogitOptions() const {
    return {.scale = scale,
            .softcap = softcap,
            .sliding_window = sliding_window,
            .alibi_slopes = alibi_slopes,
            .masked = !mask.absent() || !lists.absent()};
  }
};

// ALiBi's slopes, for models that do not bring them. One per query head, for
// AttentionOptions::alibi_slopes, or for mask_factors if a mask holds the distances. 2^(-max_bias i
// / n) for i = 1..n, where n is the largest power of two up to q_heads; further heads have those
// halfway between. max_bias 8 is the paper's. Throws std::invalid_argument for q_heads below 1, and
// for a max_bias that is negative, NaN or above 1e30. Source: Press et al., "Train Short, Test
// Long", ICLR 2022, arXiv 2108.12409.
inline std::vector<float> alibi_slopes(Index q_heads, float max_bias = 8.0f) {
  detail::require_at_least("q_heads", q_heads, 1);
  if (!(max_bias >= 0.0f && max_bias <= detail::most_option))
    detail::fail_range("max_bias", static_cast<double>(max_bias), "[0, 1e30]");
  const double whole = std::exp2(std::floor(std::log2(static_cast<double>(q_heads))));
  std::vector<float> slopes;
  for (double h = 0; h < static_cast<double>(q_heads); ++h) {
    const double power = h < whole ? h + 1 : h - whole + 0.5;
    slopes.push_back(static_cast<float>(std::exp2(-static_cast<double>(max_bias) * power / whole)));
  }
  return slopes;
}

// Options for objects that keep them: it owns the numbers that AttentionOptions' spans refer to,
// and so does each copy.
class OwnedAttentionOptions {
 public:
  OwnedAttentionOptions() = default;  // the defaults
  // Copies what spans refer to. Throws std::invalid_argument for options of a single call: a mask,
  // which has a column for each of its keys, lists of keys, and a q_offset.
  explicit OwnedAttentionOptions(const AttentionOptions& options);

  // Valid as long as this object lives and is not assigned to.
  AttentionOptions view() const {
    AttentionOptions options = numbers_;
    options.sinks = sinks_;
    options.mask_factors = mask_factors_;
    options.alibi_slopes = alibi_slopes_;
    return options;
  }

 private:
  AttentionOptions numbers_;  // without spans
  std::vector<float> sinks_, mask_factors_, alibi_slopes_;
};

// The cached keys and values before the chunk. Any strides, any formats.
struct Past {
  Rows k = {};                           // [batch, kv_heads, kv_len, head_dim]
  Rows v = {};                           // [batch, kv_heads, kv_len, v_dim]
  const Selection* selection = nullptr;  // null: all; must outlive the call
  Index first_position = 0;  // of key 0, up to max_position with the others: a shard of a
                             // cache says where it begins

  Past() = default;
  // All of these keys.
  Past(Rows k_in, Rows v_in) : k(k_in), v(v_in) {}
  // Those that `selection_in` names.
  Past(Rows k_in, Rows v_in, const Selection& selection_in)
      : k(k_in), v(v_in), selection(&selection_in) {}
  // A temporary Selection would be gone before the call: give it a name.
  Past(Rows k_in, Rows v_in, const Selection&& selection_in) = delete;
};

// The keys and values of the chunk's own tokens; without any, attention covers the past alone.
struct Chunk {
  Rows k = {};  // [batch, kv_heads, q_len, head_dim]
  Rows v = {};  // [batch, kv_heads, q_len, v_dim]
};

// A past and a chunk that lie in one cache.
struct CachedChunk {
  Past past;    // [batch, kv_heads, len - q_len, dim]
  Chunk chunk;  // [batch, kv_heads, q_len, dim]
};

// For engines that write the chunk's keys and values into their cache before they attend. The last
// q_len rows of k and v [batch, kv_heads, len, dim] are the chunk, and the rows before them the
// past. A chunk elsewhere in a cache is {rows.gathered(cells), ...}, and a mask says who sees it.
// Throws std::invalid_argument for a q_len beyond len.
inline CachedChunk chunk_in_cache(const Rows& k, const Rows& v, Index q_len) {
  detail::require_equal("the values' len", v.len(), "the keys' len", k.len());
  detail::require_at_most("q_len", q_len, "the cache's len", k.len());
  const Index past = k.len() - q_len;
  return {{k.slice(0, past), v.slice(0, past)}, {k.slice(past, q_len), v.slice(past, q_len)}};
}

// Where results go: `out` alone, or {out, lse}.
struct AttentionOutput {
  OutputRows out;                // [batch, q_heads, q_len, v_dim]
  TensorView<float, 3> lse_nat;  // [batch, q_heads, q_len] natural log of the sum of exp(logit),
                                 // sink included; -inf for a row that sees nothing. Optional

  // From whatever OutputRows can be made of: an Eigen tensor, a view, rows of any format.
  template <class Out>
  requires(std::is_convertible_v<Out, OutputRows>)
      AttentionOutput(Out&& out_in, TensorView<float, 3> lse_in = {})
      : out(std::forward<Out>(out_in)), lse_nat(lse_in) {}
  // From rows of any format.
  AttentionOutput(OutputRows out_in, TensorView<float, 3> lse_in = {})
      : out(out_in), lse_nat(lse_in) {}
};

// One sequence of a batch whose sequences have shapes of their own.
struct AttentionSequence {
  Rows q = {};                         // [batch, q_heads, q_len, head_dim], batch often 1
  Past past = {};                      // [batch, kv_heads, kv_len, ...]
  Chunk chunk = {};                    // [batch, kv_heads, q_len, ...]
  AttentionOutput out;                 // [batch, q_heads, q_len, v_dim]
  Mask mask = {};                      // in place of the options'
  std::optional<Index> q_offset = {};  // in place of the options'
  IndexLists lists = {};               // in place of the options'
};

// Scratch memory of attention(). Kept by the caller, it makes repeated calls free of allocation.
// One call at a time. A moved-from object may be used again.
class AttentionWorkspace {
 public:
  // Empty; it grows with the calls.
  AttentionWorkspace();
  ~AttentionWorkspace();
  // Takes the memory over.
  AttentionWorkspace(AttentionWorkspace&&) noexcept;
  // Takes the memory over.
  AttentionWorkspace& operator=(AttentionWorkspace&&) noexcept;

  Index bytes() const;  // of memory that it holds

  struct State;
  State& state();  // the library's own

 private:
  std::unique_ptr<State> state_;
};

}  // namespace QUOKA_ABI
}  // namespace quoka
