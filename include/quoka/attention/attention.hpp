// Attention of a chunk over the past (all of it, or a Selection) and the chunk itself.
//
//   logit[q][t] = scale * q . k_t,  capped if asked: cap * tanh(logit / cap)
//   out[q]      = sum over visible t of softmax(logit)[t] * v_t
//
// Query i of the chunk stands at absolute position kv_len + i. It sees the past keys that are kept
// and chunk keys 0..i; with a sliding window w only those at a distance below w. Query head h reads
// KV head h / group. It is exact, in FlashAttention's way: one pass over the keys with an online softmax, and no score
// matrix. 2 * q_heads * q_len * keys * (head_dim + v_dim) FLOPs. The shape decides how:
//
//   a chunk      panels of query rows over packed keys, many keys in parts, bound by arithmetic:
//                attend_panels.hpp
//   decode       keys and values read once where they lie, bound by memory: attend_decode.hpp
//   lists        keys of each query's own, by rows or by tiles: attend_lists.hpp
//
// plan.hpp cuts a call into items of work for the workers, and keys into parts; join_rows.hpp joins the parts.
//
// Numbers. Logits are natural, and every finite one counts: q * scale, then times k, added up in float.
// Overflow gives infinity, as in IEEE arithmetic: a logit of -infinity is a key that is not
// seen, one of infinity or NaN makes its row NaN. A key more than `negligible_below` below the row's
// largest logit, its sink included, may count as nothing: its weight is below 5e-28 of the largest,
// and to keep those down to float's denormals would make attention up to three times slower. Values
// are weighted, added up and then divided: their sum is finite where each is below 3.4e38 / keys.
//
// Each KV head's keys and values are read once per max_panels_per_task panels of query rows. Scratch
// per worker: one packed block of keys and values, and the queries and accumulators of an item, 0.9 MiB
// for 16 panels at head_dim 128; one token needs 0.3 MiB in all with 32/8 heads of 128. If there are fewer KV heads
// than workers, each head also takes 2 MiB of packed keys, or its output for each of up to 20 parts.
#pragma once

#include <quoka/attention/attention_options.hpp>

namespace quoka {
inline namespace QUOKA_ABI {

// A weight of at most e^-negligible_below of its row's largest may be left out of the sums. A larger one never is.
inline constexpr float negligible_below = 63.0f;

// Attention of q [batch, q_heads, q_len, head_dim] to past and chunk, written to output. Results do
// not depend on the executor, nor a sequence's on the others of its batch. NaN in a query row, or
// in a key that a row sees, makes that row NaN; NaN in a value makes its channel NaN in the rows
// that see it; nothing else. Throws std::invalid_argument, before anything is written, when shapes do not fit together,
// for more than max_keys keys and positions beyond max_position, and when the output shares memory with an input.
// Throws also when the chunk's keys or values lie in the past's, because they would count twice; and for several
// queries over a past without a chunk, unless q_offset or causal = false says that all of the past lies before them.
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
  std::optional<Index> q_offset = {};  // in place of the options'
  IndexLists lists = {};               // in place of the options'
};

// Sequences of different kv_len and q_len in one call: prefill chunks and decode steps mixed, as
// continuous batching has them. Each is computed as by a call of its own, to the last bit; work is balanced over the
// workers by its cost. Throws as above, before anything is written, with the number of the sequence, and when one
// sequence's output shares memory with an input or output of another.
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
// attention() of a call that was checked.
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

#if QUOKA_DEFINES
#include <quoka/attention/check_call.hpp>
#include <quoka/attention/plan.hpp>
#include <quoka/kernels/format_table.hpp>

#include <algorithm>
#include <memory>
#include <vector>

namespace quoka {
inline namespace QUOKA_ABI {

// Everything that calls reuse, and how they are run.
struct AttentionWorkspace::State {
  Arenas workers;  // scratch of each
  // Memory that the items of a call share: some is found before they are planned, some after.
  Arenas masks, shared;
  std::vector<detail::AttentionCall> calls;
  std::vector<detail::VisiblePast> visible;  // of calls with a mask
  std::vector<detail::OutputMemory> outputs;
  detail::Plan plan;

  void begin(std::size_t sequences) {
    calls.clear();
    calls.reserve(sequences);
  }
  // With one call, whose arithmetic is to be set.
  detail::AttentionCall& begin_one(const detail::AttentionCall& call) {
    begin(1);
    return calls.emplace_back(call);
  }
  Index bytes() const { return bytes_of(workers, masks, shared); }

  // All calls, each in its own arithmetic. The order of items only decides which worker does what, and when.
  void run(ExecutorRef executor) {
    find_visible(executor);
    plan.make(calls, executor.workers());
    take_memory(executor.workers());
    for (const detail::Plan::Phase phase : detail::Plan::phases) {
      const std::span<const detail::Item> items = plan.items(phase);
      if (!items.empty()) executor.run(std::ssize(items), detail::RunItems{items, phase, workers});
    }
  }

 private:
  // The cells that masks leave.
  void find_visible(ExecutorRef executor) {
    const auto reads_mask = [](const detail::AttentionCall& call) {
      return call.logits.mask != nullptr && !call.own_keys();
    };
    const auto take = [&](Arena& arena) {
      visible.clear();
      for (const detail::AttentionCall& call : calls)
        if (reads_mask(call))
          visible.emplace_back(arena, *call.logits.mask, call.selection, call.q.batch(),
                               call.kv_heads, call.past_k.len());
    };
    masks.reserve(1, take);
    Arena arena = masks[0];
    take(arena);
    std::size_t next = 0;
    for (detail::AttentionCall& call : calls) {
      if (reads_mask(call)) {
        call.visible = &visible[next++];
        visible[next - 1].find(*call.logits.mask, call.selection, executor);
      }
    }
  }

  // A single call has room for what it needs when the cache has grown, since a decode loop must not allocate.
  void take_memory(int worker_count) {
    const bool alone = calls.size() == 1;
    Index most = 0;
    for (const detail::CallPlan& x : plan.calls) {
      Arena arena;
      x.take_scratch(arena, alone);
      most = std::max(most, arena.used());
    }
    workers.reserve(worker_count, [&](Arena& arena) { arena.take<std::byte>(most); });
    shared.reserve(1, [&](Arena& arena) {
      for (detail::CallPlan& x : plan.calls) x.take(arena, alone ? x.most_parts : x.parts);
    });
    Arena arena = shared[0];
    for (detail::CallPlan& x : plan.calls) x.take(arena, x.parts);
  }
};

namespace detail {

QUOKA_FUNC void check_options(const AttentionOptions& options, Index q_heads) {
  check_call_options(options, q_heads);
}

QUOKA_FUNC void check_attention(const Rows& q, const Past& past, const Chunk& chunk,
                                const AttentionOutput& output, const AttentionOptions& options) {
  checked_call(q, past, chunk, output, options, sequence_options(options));
}

inline float cache_rounding(const AttentionCall& call) {
  float least = infinity;
  for (const Rows* const x : {&call.past_k, &call.past_v, &call.chunk_k, &call.chunk_v})
    if (!x->empty()) least = std::min(least, x->format().rounding);
  return least;
}

// Resolves checked calls and runs them.
inline void prepare(AttentionCall& call, Arithmetic asked) {
  call.part_groups();
  call.arithmetic = used_arithmetic(asked, cache_rounding(call), call.rows()).panels;
}

QUOKA_FUNC void attend(const Rows& q, const Past& past, const Chunk& chunk,
                       const AttentionOutput& output, const AttentionOptions& options,
                       ExecutorRef executor, AttentionWorkspace& workspace) {
  AttentionWorkspace::State& state = workspace.state();
  AttentionCall& call =
      state.begin_one(resolved_call(q, past, chunk, output, options, sequence_options(options)));
  prepare(call, options.arithmetic);
  state.run(executor);
}

inline SequenceOptions sequence_options(const AttentionSequence& x,
                                        const AttentionOptions& options) {
  return {x.mask.absent() ? options.mask : x.mask, x.lists.absent() ? options.lists : x.lists,
          x.q_offset ? x.q_offset : options.q_offset};
}
// The workspace's calls, which were checked.
inline void run_batch(AttentionWorkspace::State& state, const AttentionOptions& options,
                      ExecutorRef executor) {
  for (AttentionCall& call : state.calls) prepare(call, options.arithmetic);
  state.run(executor);
}

QUOKA_FUNC void check_attention(std::span<const AttentionSequence> batch,
                                const AttentionOptions& options, AttentionWorkspace& workspace) {
  AttentionWorkspace::State& state = workspace.state();
  state.begin(batch.size());
  for (const AttentionSequence& x : batch)
    name_part("sequence", &x - batch.data(), [&] {
      state.calls.push_back(
          checked_call(x.q, x.past, x.chunk, x.out, options, sequence_options(x, options)));
    });
  check_output_overlap(state.calls, state.outputs);
}

QUOKA_FUNC void attend(std::span<const AttentionSequence> batch, const AttentionOptions& options,
                       ExecutorRef executor, AttentionWorkspace& workspace) {
  AttentionWorkspace::State& state = workspace.state();
  state.begin(batch.size());
  for (const AttentionSequence& x : batch)
    state.calls.push_back(
        resolved_call(x.q, x.past, x.chunk, x.out, options, sequence_options(x, options)));
  run_batch(state, options, executor);
}

}  // namespace detail

QUOKA_FUNC OwnedAttentionOptions::OwnedAttentionOptions(const AttentionOptions& options)
    : numbers_(options),
      sinks_(options.sinks.begin(), options.sinks.end()),
      mask_factors_(options.mask_factors.begin(), options.mask_factors.end()),
      alibi_slopes_(options.alibi_slopes.begin(), options.alibi_slopes.end()) {
  if (!options.mask.absent())
    detail::fail_because(
        "a mask is one call's, which has as many columns as keys: options that are kept have none");
  if (!options.lists.absent())
    detail::fail_because(
        "lists are one call's, with one for each query of it: options that are kept have none");
  if (options.q_offset)
    detail::fail("q_offset", *options.q_offset,
                 "but options that are kept have none: it is where the past ends", "", 0);
  numbers_.sinks = numbers_.mask_factors = numbers_.alibi_slopes = {};
}

QUOKA_FUNC AttentionWorkspace::AttentionWorkspace() : state_(std::make_unique<State>()) {}
QUOKA_FUNC AttentionWorkspace::~AttentionWorkspace() = default;
QUOKA_FUNC AttentionWorkspace::AttentionWorkspace(AttentionWorkspace&&) noexcept = default;
QUOKA_FUNC AttentionWorkspace& AttentionWorkspace::operator=(AttentionWorkspace&&) noexcept =
    default;
QUOKA_FUNC Index AttentionWorkspace::bytes() const {
  if (state_ == nullptr) return 0;
  return state_->bytes();
}
QUOKA_FUNC AttentionWorkspace::State& AttentionWorkspace::state() {
  if (state_ == nullptr) state_ = std::make_unique<State>();
  return *state_;
}

QUOKA_FUNC void attention(const Rows& q, const Past& past, const Chunk& chunk,
                          const AttentionOutput& output, const AttentionOptions& options,
                          ExecutorRef executor, AttentionWorkspace& workspace) {
  AttentionWorkspace::State& state = workspace.state();
  detail::AttentionCall& call =
      state.begin_one(detail::checked_call(q, past, chunk, output, options));
  detail::prepare(call, options.arithmetic);
  state.run(executor);
}

QUOKA_FUNC void attention(std::span<const AttentionSequence> batch, const AttentionOptions& options,
                          ExecutorRef executor, AttentionWorkspace& workspace) {
  detail::check_attention(batch, options, workspace);
  detail::run_batch(workspace.state(), options, executor);
}

}  // namespace QUOKA_ABI
}  // namespace quoka
#endif  // QUOKA_DEFINES
