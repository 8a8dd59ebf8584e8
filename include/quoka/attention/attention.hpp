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
//   a chunk      panels of query rows over packed keys, many keys in parts, bound by arithmetic:
//                attend_panels.hpp
//   decode       keys and values read once where they lie, bound by memory: attend_decode.hpp
//
// Items of work for the workers, and how keys are cut into parts: plan.hpp.
//
// Numbers. Logits are natural, and every finite one counts: q * scale, then times k, added up in float.
// What overflows there is infinite, as in IEEE arithmetic: a logit of -infinity is a key that is not
// seen, one of infinity or NaN makes its row NaN. A key more than `negligible_below` below the row's
// largest logit, its sink included, may count as nothing: its weight is below 5e-28 of the largest,
// and to keep those down to float's denormals would make attention up to three times slower. Values
// are weighted, added up and then divided: their sum is finite where each is below 3.4e38 / keys.
//
// Each KV head's keys and values are read once per max_panels_per_task panels of query rows. Scratch
// per worker: one packed block of keys and values, and the queries and accumulators of an item, 0.9 MiB
// for 16 panels at head_dim 128; one token needs 0.3 MiB in all with 32/8 heads of 128. With few KV
// heads for the workers besides, for each head: 2 MiB of packed keys, or its output for each of up to
// 20 parts.
#pragma once

#include <quoka/attention/attention_options.hpp>

namespace quoka {
inline namespace QUOKA_ABI {

// Weights of e^-negligible_below of a row's largest, and smaller ones, may be no part of its sums. All
// larger ones are.
inline constexpr float negligible_below = 63.0f;

// Attention of q [batch, q_heads, q_len, head_dim] to past and chunk, written to output. Results do
// not depend on the executor, nor a sequence's on the others of its batch. NaN in a query row, or
// in a key that a row sees, makes that row NaN; NaN in a value makes its channel NaN in the rows
// that see it; nothing else. Throws std::invalid_argument, before anything is written, when shapes do
// not fit together; for more than max_keys keys and positions beyond max_position; when the output
// shares memory with an input; when the chunk's keys or values lie in the past's: they would count twice;
// and for several queries over a past without a chunk, unless q_offset or causal = false says
// that all of the past lies before them.
void attention(const Rows& q, const Past& past, const Chunk& chunk, const AttentionOutput& output,
               const AttentionOptions& options, ExecutorRef executor,
               AttentionWorkspace& workspace);

// As above with scratch memory of its own, allocated in each call.
inline void attention(const Rows& q, const Past& past, const Chunk& chunk,
                      const AttentionOutput& output, const AttentionOptions& options = {},
                      ExecutorRef executor = SerialExecutor{}) {
  AttentionWorkspace workspace;
  attention(q, past, chunk, output, options, executor, workspace);
}

// One sequence of a batch whose sequences have shapes of their own.
struct AttentionSequence {
  Rows q = {};                         // as above, q's batch 1 in most engines
  Past past = {};                      // [batch, kv_heads, kv_len, ...]
  Chunk chunk = {};                    // [batch, kv_heads, q_len, ...]
  AttentionOutput out;                 // [batch, q_heads, q_len, v_dim]
  Mask mask = {};                      // in place of the options'
  std::optional<Index> q_offset = {};  // likewise
  IndexLists lists = {};               // likewise
};

// Sequences of different kv_len and q_len in one call: prefill chunks and decode steps mixed, as
// continuous batching has them. Each is computed as by a call of its own, to the last bit; work is
// balanced over the workers by what it costs. Throws as above, before anything is written, with the number of
// the sequence, and when one sequence's output shares memory with an input or output of another.
void attention(std::span<const AttentionSequence> batch, const AttentionOptions& options,
               ExecutorRef executor, AttentionWorkspace& workspace);
// As above with scratch memory of its own, allocated in each call.
inline void attention(std::span<const AttentionSequence> batch,
                      const AttentionOptions& options = {},
                      ExecutorRef executor = SerialExecutor{}) {
  AttentionWorkspace workspace;
  attention(batch, options, executor, workspace);
}

namespace detail {

// Throws std::invalid_argument where attention() would.
void check_attention(const Rows& q, const Past& past, const Chunk& chunk,
                     const AttentionOutput& output, const AttentionOptions& options);
void check_options(const AttentionOptions& options, Index q_heads);
// attention() of what was checked.
void attend(const Rows& q, const Past& past, const Chunk& chunk, const AttentionOutput& output,
            const AttentionOptions& options, ExecutorRef executor, AttentionWorkspace& workspace);
// The same of a batch, in two steps: between them lists of the past may become shorter.
void check_attention(std::span<const AttentionSequence> batch, const AttentionOptions& options,
                     AttentionWorkspace& workspace);
void attend(std::span<const AttentionSequence> batch, const AttentionOptions& options,
            ExecutorRef executor, AttentionWorkspace& workspace);

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka

#if !defined(QUOKA_COMPILED)
#include <quoka/attention/attention_impl.hpp>
#endif
