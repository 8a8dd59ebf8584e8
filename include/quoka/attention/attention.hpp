// Attention of a chunk over the past (all of it, or a Selection) and the chunk itself.
//
//   logit[q][t] = scale * q . k_t,  capped if asked: cap * tanh(logit / cap)
//   out[q]      = sum over visible t of softmax(logit)[t] * v_t
//
// Query i of the chunk stands at absolute position kv_len + i. It sees the past keys that are kept
// and chunk keys 0..i; with a sliding window w only those at a distance below w. Query head h reads
// KV head h / group. It is exact, in FlashAttention's way: one pass over the keys with an online
// softmax, and no score matrix. 2 * q_heads * q_len * keys * (head_dim + v_dim) FLOPs. There are
// three drivers:
//
//   a chunk      panels of query rows over packed keys, many keys in parts, bound by arithmetic:
//                attend_panels.hpp. Its kernels are a PanelArithmetic, which used_arithmetic()
//                chooses (kernels/panel_arithmetic.hpp)
//   decode       one query, few heads for each KV head (AttentionCall::is_decode): keys and values
//                read once where they lie, bound by memory: attend_decode.hpp. Its kernels are
//                functions of the rows' Format (kernels/token_kernels.hpp)
//   lists        a separate key list per query, by rows or by panels: attend_lists.hpp. Rows take
//                kernels of the Format (kernels/list_kernels.hpp), panels the PanelArithmetic
//
// Names with token_ belong to decode, names with gather_ to lists by rows.
//
// run_calls(), below, goes from a checked call to its output. plan.hpp cuts the call into items of
// work, drivers attend to them, and join_parts() joins parts of the keys.
//
// Numbers. Logits are natural, and every finite one counts: q * scale, then times k, added up in
// float. Overflow gives infinity, as in IEEE arithmetic. A key with a logit of -infinity is not
// seen; a logit of infinity or NaN makes its row NaN. A key more than `negligible_below` below the
// row's largest logit, its sink included, may count as nothing. Its weight is below 5e-28 of the
// largest; keeping such weights would make attention up to three times slower, because of
// denormals. Values are weighted, added up and then divided: their sum is finite where each is
// below 3.4e38 / keys.
//
// Each KV head's keys and values are read once per max_panels_per_task panels of query rows.
// Scratch per worker: one packed block of keys and values, and the queries and accumulators of an
// item. At head_dim 128 that is 0.7 MiB for 16 panels and 1.2 for 32; 1.2 and 2.2 if an item joins
// parts of the keys. Decode needs 0.3 MiB in all with 32/8 heads of 128. If there are fewer KV
// heads than workers, each head also takes 2 MiB of packed keys, or its output for each of up to 22
// parts. Lists take up to 17 MiB per worker, most of it bits of keys (KeySets).
#pragma once

#include <quoka/attention/attention_options.hpp>

#if QUOKA_DEFINES
#include <quoka/attention/attend_decode.hpp>
#include <quoka/attention/attend_lists.hpp>
#include <quoka/attention/attend_panels.hpp>
#include <quoka/attention/check_call.hpp>
#include <quoka/attention/plan.hpp>
#include <algorithm>
#include <memory>
#include <vector>
#endif

namespace quoka {
inline namespace QUOKA_ABI {

// A weight of at most e^-negligible_below of its row's largest may be left out of the sums. A
// larger one never is.
inline constexpr float negligible_below = 63.0f;

// Attention of q [batch, q_heads, q_len, head_dim] to past and chunk, written to output. Results do
// not depend on the executor, and those of a sequence do not depend on the others of its batch. NaN
// in a query row, or in a key that a row sees, makes that row NaN. NaN in a value makes its channel
// NaN in the rows that see it. Throws std::invalid_argument, before anything is written, when
// shapes do not fit together, for more than max_keys keys and positions beyond max_position, and
// when the output shares memory with an input. Also when the chunk's keys or values lie in the
// past's, because they would count twice. Also for several queries over a past without a chunk,
// unless q_offset or causal = false says that all of the past lies before them.
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

// Sequences of different kv_len and q_len in one call: prefill chunks and decode steps mixed, as
// continuous batching has them. Each gets the same bits as in a call of its own; work is balanced
// over the workers by its cost. Throws as above, before anything is written, with the number of the
// sequence. Throws also when one sequence's output shares memory with an input or output of
// another.
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

// The two steps of attention(), for layers that do something between them.
// First: throws std::invalid_argument where attention() would.
void check_attention(const AttentionSequence& call, const AttentionOptions& options);
void check_attention(std::span<const AttentionSequence> batch, const AttentionOptions& options,
                     AttentionWorkspace& workspace);
// Second: computes calls that were checked. A Selection may have been added since the check.
void run_checked(std::span<const AttentionSequence> batch, const AttentionOptions& options,
                 ExecutorRef executor, AttentionWorkspace& workspace);

void check_options(const AttentionOptions& options, Index q_heads);

}  // namespace detail

#if QUOKA_DEFINES

// Memory that calls reuse.
struct AttentionWorkspace::State {
  Arenas workers;  // scratch of each
  // Memory that all items share. `masks`, for the cells that the masks leave, is taken before the
  // plan is made, which depends on them; `shared`, for packed blocks and partial results, after it.
  Arenas masks, shared;
  std::vector<detail::AttentionCall> calls;  // of a batch
  std::vector<detail::VisiblePast> visible;  // of calls with a mask
  std::vector<detail::OutputMemory> outputs;
  detail::Plan plan;

  Index bytes() const { return bytes_of(workers, masks, shared); }
};

namespace detail {

// ---- from a checked call to its output ----------------------------------------------------------

// The last changes to a checked call before it is planned. Query heads with different Selections
// become heads with a KV head each, and the arithmetic is chosen.
inline void prepare_call(Arithmetic asked, AttentionCall& call) {
  call.split_groups();
  float cache_rounding = infinity;
  for (const Rows* const x : {&call.past_k, &call.past_v, &call.chunk_k, &call.chunk_v})
    if (!x->empty()) cache_rounding = std::min(cache_rounding, x->format().rounding);
  call.arithmetic = used_arithmetic(asked, cache_rounding, call.rows()).panels;
}

// Finds the cells that the calls' masks leave, and sets AttentionCall::visible.
inline void find_visible(std::span<AttentionCall> calls, AttentionWorkspace::State& memory,
                         ExecutorRef executor) {
  const auto reads_mask = [](const AttentionCall& call) {
    return call.logits.mask != nullptr && !call.own_keys();
  };
  std::vector<VisiblePast>& visible = memory.visible;
  // Run twice: the first run, from an empty arena, only adds up sizes.
  const auto lay_out_visible = [&](Arena& arena) {
    visible.clear();
    for (const AttentionCall& call : calls)
      if (reads_mask(call))
        visible.emplace_back(arena, *call.logits.mask, call.selection, call.q.batch(),
                             call.kv_heads, call.past_k.len());
  };
  memory.masks.reserve(1, lay_out_visible);
  Arena arena = memory.masks[0];
  lay_out_visible(arena);
  std::size_t next = 0;
  for (AttentionCall& call : calls) {
    if (!reads_mask(call)) continue;
    visible[next].find(*call.logits.mask, call.selection, executor);
    call.visible = &visible[next++];
  }
}

inline Driver driver_of(const AttentionCall& call) {
  if (call.own_keys())
    return call.lists != nullptr ? call.lists->driver() : call.logits.mask->driver();
  return call.is_decode() ? attend_decode : attend_panels;
}

// Memory of the workers, and memory that items share. A single call gets room for a cache that has
// grown, since a decode loop must not allocate.
inline void take_memory(AttentionWorkspace::State& memory, int workers) {
  std::vector<CallPlan>& plans = memory.plan.calls;
  const bool alone = plans.size() == 1;
  Index most = 0;
  for (const CallPlan& plan : plans) {
    // A driver that gets an empty arena only adds up what its largest item takes.
    Arena sizes;
    plan.attend({.plan = &plan,
                 .head = 0,
                 .heads = alone ? plan.most_heads : plan.item_heads,
                 .first_panel = 0,
                 .panels = plan.item_panels,
                 .part = 0},
                sizes);
    most = std::max(most, sizes.used());
  }
  memory.workers.reserve(workers, [&](Arena& arena) { arena.take<std::byte>(most); });
  memory.shared.reserve(1, [&](Arena& arena) {
    for (CallPlan& plan : plans) plan.take(arena, alone ? plan.most_parts : plan.parts);
  });
  Arena arena = memory.shared[0];
  for (CallPlan& plan : plans) plan.take(arena, plan.parts);
}

// Runs calls that were checked and prepared. The order of items only decides which worker does
// what, and when.
inline void run_calls(std::span<AttentionCall> calls, AttentionWorkspace::State& memory,
                      ExecutorRef executor) {
  Plan& plan = memory.plan;
  find_visible(calls, memory, executor);
  plan.make(calls, executor.workers());
  for (CallPlan& x : plan.calls) x.attend = driver_of(*x.call);
  take_memory(memory, executor.workers());
  if (!plan.packs.empty())
    executor.run(std::ssize(plan.packs), [&](Index i, int) { pack_shared(plan.packs.data()[i]); });
  if (!plan.attends.empty())
    executor.run(std::ssize(plan.attends), [&](Index i, int worker) {
      const AttendItem& item = plan.attends.data()[i];
      Arena arena = memory.workers[worker];
      item.plan->attend(item, arena);
    });
  if (!plan.joins.empty())
    executor.run(std::ssize(plan.joins), [&](Index i, int) {
      const JoinItem& item = plan.joins.data()[i];
      join_parts(*item.plan->call, item.plan->partials, item.head, item.panel);
    });
}

// ---- calls --------------------------------------------------------------------------------------

QUOKA_FUNC void check_attention(const AttentionSequence& call, const AttentionOptions& options) {
  checked_call(call, options);
}

QUOKA_FUNC void check_attention(std::span<const AttentionSequence> batch,
                                const AttentionOptions& options, AttentionWorkspace& workspace) {
  AttentionWorkspace::State& memory = workspace.state();
  memory.calls.clear();
  for (const AttentionSequence& x : batch)
    name_part("sequence", &x - batch.data(),
              [&] { memory.calls.push_back(checked_call(x, options)); });
  check_output_overlap(memory.calls, memory.outputs);
}

QUOKA_FUNC void run_checked(std::span<const AttentionSequence> batch,
                            const AttentionOptions& options, ExecutorRef executor,
                            AttentionWorkspace& workspace) {
  AttentionWorkspace::State& memory = workspace.state();
  memory.calls.clear();
  for (const AttentionSequence& x : batch) {
    memory.calls.push_back(resolved_call(x, options));
    prepare_call(options.arithmetic, memory.calls.back());
  }
  run_calls(memory.calls, memory, executor);
}

}  // namespace detail

QUOKA_FUNC void attention(const Rows& q, const Past& past, const Chunk& chunk,
                          const AttentionOutput& output, const AttentionOptions& options,
                          ExecutorRef executor, AttentionWorkspace& workspace) {
  detail::AttentionCall call = detail::checked_call({q, past, chunk, output}, options);
  detail::prepare_call(options.arithmetic, call);
  detail::run_calls({&call, 1}, workspace.state(), executor);
}

QUOKA_FUNC void attention(std::span<const AttentionSequence> batch, const AttentionOptions& options,
                          ExecutorRef executor, AttentionWorkspace& workspace) {
  detail::check_attention(batch, options, workspace);
  AttentionWorkspace::State& memory = workspace.state();
  for (detail::AttentionCall& call : memory.calls) detail::prepare_call(options.arithmetic, call);
  detail::run_calls(memory.calls, memory, executor);
}

// ---- objects that are kept ----------------------------------------------------------------------

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

#endif  // QUOKA_DEFINES

}  // namespace QUOKA_ABI
}  // namespace quoka
