// Definitions of attention.hpp.
#pragma once

#include <quoka/attention/attention.hpp>
#include <quoka/attention/check_call.hpp>
#include <quoka/attention/plan.hpp>
#include <quoka/kernels/bfloat16_panels.hpp>
#include <quoka/kernels/float_panels.hpp>
#include <quoka/kernels/format_table.hpp>
#include <quoka/kernels/int8_panels.hpp>
#include <quoka/kernels/pair_unit.hpp>
#include <quoka/kernels/square_unit.hpp>
#include <quoka/kernels/tile_unit.hpp>

namespace quoka {
inline namespace QUOKA_ABI {

// Everything that calls reuse, and how they are run.
struct AttentionWorkspace::State {
  detail::Arenas workers;  // scratch of each
  // What the items of calls share: found before they are planned, and after.
  detail::Arenas masks, shared;
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

  // All calls, each in its own arithmetic. The order of items decides nothing but who works when.
  void run(ExecutorRef executor) {
    find_visible(executor);
    plan.make(calls, executor.workers());
    take_memory(executor.workers());
    for (const detail::Plan::Phase phase : detail::Plan::phases) {
      const auto [begin, end] = plan.items(phase);
      if (begin == end) continue;
      executor.run(end - begin, [&, first = begin](Index i, int worker) {
        run_item(plan.item(first + i), phase, worker);
      });
    }
  }

 private:
  // What masks leave.
  void find_visible(ExecutorRef executor) {
    const auto reads_mask = [](const detail::AttentionCall& call) {
      return call.mask != nullptr && !call.own_keys();
    };
    const auto take = [&](detail::Arena& arena) {
      visible.clear();
      for (const detail::AttentionCall& call : calls)
        if (reads_mask(call))
          visible.emplace_back(arena, *call.mask, call.selection, call.q.batch(), call.kv_heads,
                               call.past_k.len());
    };
    masks.reserve(1, take);
    detail::Arena arena = masks[0];
    take(arena);
    std::size_t next = 0;
    for (detail::AttentionCall& call : calls) {
      if (reads_mask(call)) {
        call.visible = &visible[next++];
        visible[next - 1].find(*call.mask, call.selection, executor);
      }
    }
  }

  // A single call has room for what it needs when the cache has grown, since a decode loop must not allocate.
  void take_memory(int worker_count) {
    using Kind = detail::CallPlan::Kind;
    const bool alone = calls.size() == 1;
    Index most = 0;
    for (const detail::CallPlan& x : plan.calls) {
      detail::Arena arena;
      if (x.kind == Kind::decode)
        detail::TokenHeads(arena, *x.call, 0, alone ? x.most_heads : x.heads);
      else
        detail::HeadScratch(arena, *x.call, x.panels, x.walked > 1);
      if (x.kind == Kind::lists) detail::ListedScratch(arena, *x.call, x.panels);
      most = std::max(most, arena.used());
    }
    workers.reserve(worker_count, [&](detail::Arena& arena) { arena.take<std::byte>(most); });
    shared.reserve(1, [&](detail::Arena& arena) {
      for (const detail::CallPlan& x : plan.calls)
        detail::SharedMemory(arena, x, alone ? x.most_parts : x.parts);
    });
    detail::Arena arena = shared[0];
    for (detail::CallPlan& x : plan.calls) x.shared = detail::SharedMemory(arena, x, x.parts);
  }

  void run_item(const detail::Item& x, detail::Plan::Phase phase, int worker) {
    using Kind = detail::CallPlan::Kind;
    const detail::AttentionCall& call = *x.of->call;
    const detail::SharedMemory& memory = x.of->shared;
    const Kind kind = x.of->kind;
    const detail::Arena arena = workers[worker];
    const auto sums_of = [&](Index part) {
      return memory.sums.from((x.head * x.of->parts + part) * call.panels());
    };
    if (phase == detail::Plan::Phase::pack)
      pack_shared(call, x.head, x.first, x.part == 1, memory.blocks[x.head], arena);
    else if (phase == detail::Plan::Phase::join && kind == Kind::panels)
      join_parts(call, x.head, x.first, sums_of(0), arena);
    else if (phase == detail::Plan::Phase::join)
      join_partials(call, memory.partials, x.head);
    else if (kind == Kind::decode)
      attend_decode(call, x.head, x.count, x.part, memory.partials, arena);
    else if (kind == Kind::lists)
      attend_lists(call, x.head, x.first, x.count, x.part, memory.partials, arena);
    else if (x.of->parts > 1)
      attend_part(call, x.head, x.first, x.count, x.part, sums_of(x.part), arena);
    else
      attend_panels(call, x.head, x.first, x.count,
                    x.of->blocks > 0 ? &memory.blocks[x.head] : nullptr, arena);
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

// The unit for so many products of bfloat16, null where none is faster than float.
template <int products>
const PanelArithmetic* bfloat16_of_here() {
  if constexpr (simd::has_tiles)
    if (tiles_work()) return &bfloat16_panels<TileUnit<simd::Tiles>, products>();
  if constexpr (simd::has_bfloat16_squares && products < 3)
    return &bfloat16_panels<SquareUnit<simd::Bfloat16Square, simd::Bfloat16Eight>, products>();
  if constexpr (simd::has_bfloat16_sums && products == 1)
    if (simd::bfloat16_sums_pay())
      return &bfloat16_panels<PairUnit<simd::DotBfloat16Sums>, products>();
  return nullptr;
}

// Storage that has rounded as bfloat16 does, or more.
inline constexpr float bfloat16_rounding = 0x1p-8f;

// What a call comes to by products of 8 bits, null without them: few rows do not earn what it takes longer to pack their
// keys. Tiles multiply bfloat16 faster than vectors 8 bits.
template <bool has = simd::has_quad_sums>
const PanelArithmetic* int8_of_here([[maybe_unused]] Index rows) {
  if constexpr (has) {
    const bool packed_sooner = rows < tuning::int8_rows_beside_float ||
                               (rows < tuning::int8_rows && bfloat16_of_here<1>() != nullptr);
    if (!packed_sooner && !tiles_work()) return &int8_panels<simd::QuadSums>();
  }
  return nullptr;
}

// What an arithmetic comes to on the machine at hand, and its kernels.
struct UsedArithmetic {
  Arithmetic arithmetic;
  const PanelArithmetic* panels;
};

// For keys and values whose storage has rounded so much, the smaller of the two (Format::rounding), and so many query rows
// of a KV head.
inline UsedArithmetic used_arithmetic(Arithmetic asked, float cache_rounding, Index rows) {
  const PanelArithmetic* panels = nullptr;
  switch (asked) {
    case Arithmetic::fp32:
      break;
    case Arithmetic::automatic:
      panels = cache_rounding >= bfloat16_rounding ? bfloat16_of_here<2>() : bfloat16_of_here<3>();
      break;
    case Arithmetic::int8:
      panels = int8_of_here(rows);
      if (panels != nullptr) break;
      asked = Arithmetic::bfloat16;
      [[fallthrough]];
    case Arithmetic::bfloat16:
      panels = bfloat16_of_here<1>();
  }
  if (panels != nullptr) return {asked, panels};
  return {Arithmetic::fp32, &float_panels()};
}

inline float cache_rounding(const AttentionCall& call) {
  float least = simd::infinity;
  for (const Rows* const x : {&call.past_k, &call.past_v, &call.chunk_k, &call.chunk_v})
    if (!x->empty()) least = std::min(least, x->format().rounding);
  return least;
}

// What was checked becomes what runs.
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
    name_sequence(&x - batch.data(), [&] {
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

QUOKA_FUNC Arithmetic arithmetic_used(Arithmetic asked, const Format& k, const Format& v,
                                      Index rows) {
  detail::require_at_least("rows", rows, 1);
  return detail::used_arithmetic(asked, std::min(k.rounding, v.rounding), rows).arithmetic;
}

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
