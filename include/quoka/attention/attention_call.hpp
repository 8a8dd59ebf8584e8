// One attention call, checked and resolved; shared by its tasks.
#pragma once

#include <quoka/attention/attention_options.hpp>
#include <quoka/attention/repeated_chunk.hpp>
#include <quoka/attention/visible_past.hpp>
#include <quoka/kernels/inverse_norm.hpp>
#include <quoka/kernels/panel_arithmetic.hpp>
#include <quoka/kernels/softmax_state.hpp>
#include <quoka/views/overlap.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

class PackedBlocks;

// A row of a KV head: a query of one of its heads.
struct QueryRow {
  Index q_head, query;
};

struct AttentionCall {
  Rows q;                             // [batch, q_heads, q_len, head_dim]
  Rows past_k, past_v;                // [batch, kv_heads, kv_len, head_dim | v_dim]
  Rows chunk_k, chunk_v;              // [batch, kv_heads, q_len or 0, head_dim | v_dim]
  OutputRows out;                     // [batch, q_heads, q_len, v_dim]
  TensorView<float, 3> lse;           // [batch, q_heads, q_len], or empty
  const Selection* keep;              // of the past; null: all
  const PastRest* rest = nullptr;     // what stands for the others; null: nothing
  const Mask* mask;                   // null: none
  const IndexLists* lists = nullptr;  // of each query; null: none
  std::uint64_t same_lists = 0;       // bit b: all queries of sequence b have one; of 64 sequences
  PackedPast* packed_past = nullptr;  // where blocks of the past are packed once; null: nowhere
  const PackedBlocks* packed = nullptr;  // its blocks, where they serve this call
  const VisiblePast* visible = nullptr;  // what the mask leaves of the past; null without a mask
  Index kv_heads, group, v_dim;
  const PanelArithmetic* arithmetic = nullptr;  // chosen before anything runs
  LogitRule logits;
  std::span<const float> sink_logits;
  Index window;          // no window: the largest Index
  Index first_position;  // of past key 0
  Index query_position;  // of query 0, and of chunk key 0
  bool causal;
  std::span<const float> mask_factors, alibi_slopes;
  bool codes_queries = false;  // may one token's queries be rounded to codes (token_codes.hpp)?

  Index block_keys() const { return arithmetic->block_keys(); }
  Index rows() const { return group * q.len(); }  // query rows of a KV head
  QueryRow query_row(Index kv_head, Index row) const {
    return {kv_head * group + row % group, row / group};
  }
  // A query's channels, scaled.
  void read_query(Index b, const QueryRow& row, float* to) const {
    q.format().widen(q.row(b, row.q_head, row.query), q.shape(row.q_head), to);
    for (Index c = 0; c < q.dim(); ++c) to[c] *= logits.scale;
  }
  // Does attended() say which rows of the past are attended to? Else it is all of them.
  bool listed() const { return keep != nullptr || (visible != nullptr && visible->listed()); }
  std::span<const Position> attended(Index b, Index kv_head) const {
    if (visible != nullptr && visible->listed()) return visible->row(b, kv_head);
    return keep != nullptr ? keep->row(b, kv_head) : std::span<const Position>{};
  }
  Index past_count(Index b, Index kv_head) const {
    return listed() ? std::ssize(attended(b, kv_head)) : past_k.len();
  }
  // Has each query keys of its own (listed_attention.hpp), by lists or by a mask that is read as lists?
  bool own_keys() const {
    return lists != nullptr ||
           (mask != nullptr && mask->is_lists() && keep == nullptr && q.len() > 1);
  }
  // Have all queries of sequence b one list?
  bool has_one_list(Index b) const {
    if (b < 64) return (same_lists >> b & 1u) != 0;
    return lists != nullptr && lists->same_for_all_queries(b);
  }
  // Columns are the past's rows, selected or not, then the chunk's. The first that query i sees through the window, one
  // past the last that it sees, and the position of one.
  Index begin_column(Index query) const {
    if (window == std::numeric_limits<Index>::max()) return 0;
    const Index hidden = query_position + query - window;  // last position out of sight
    if (hidden >= query_position) return past_k.len() + hidden - query_position + 1;
    return std::clamp<Index>(hidden - first_position + 1, 0, past_k.len());
  }
  Index end_column(Index query) const {
    return past_k.len() + (causal ? std::min(query + 1, chunk_k.len()) : chunk_k.len());
  }
  Index position_of_column(Index column) const {
    const Index in_chunk = column - past_k.len();
    return in_chunk < 0 ? first_position + column : query_position + in_chunk;
  }
  // One token, whose heads see the same keys: what a mask hides is not among them.
  bool is_a_token() const {
    return q.len() == 1 && !own_keys() && group <= tuning::token_rows &&
           (mask == nullptr || mask->heads() == 1);
  }
  // Is something added to logits, and without regard to the mask (logit_bias.hpp)?
  bool biased() const { return mask != nullptr || own_keys() || biased_everywhere(); }
  bool biased_everywhere() const { return !alibi_slopes.empty(); }
  // What a head's biases of the mask are times, its ALiBi slope, and its sink logit, -inf without one.
  float mask_factor(Index q_head) const { return head_number(mask_factors, q_head, 1.0f); }
  float alibi_slope(Index q_head) const { return head_number(alibi_slopes, q_head, 0.0f); }
  float sink_logit(Index q_head) const {
    return head_number(sink_logits, q_head, -std::numeric_limits<float>::infinity());
  }
  // The logits of queries [count], of head head_of(i) of sequence b, with what stands for the keys left out, to whole
  // packets, -infinity in those behind.
  template <class F>
  void rest_logits(Index b, F&& head_of, const float* const* queries, Index count,
                   float* to) const {
    const Index padded = round_up(count, simd::lanes);
    for (Index i = 0; i < count; ++i)
      to[i] = logits.scale * sum_of_products(queries[i], left_out(b, head_of(i)).key, q.dim());
    std::fill(to + count, to + padded, 0.0f);
    logits.apply(to, padded);
    for (Index i = 0; i < count; ++i) to[i] += left_out(b, head_of(i)).log_count;
    std::fill(to + count, to + padded, -simd::infinity);
  }
  // Of one query head.
  PastRest::Head left_out(Index b, Index q_head) const {
    return rest->head(b * q.heads() + q_head);
  }

 private:
  static float head_number(std::span<const float> numbers, Index q_head, float without) {
    return numbers.empty() ? without : numbers[static_cast<std::size_t>(q_head)];
  }
};

// Throws unless keys and values [batch, kv_heads, len, head_dim | v_dim] fit q and each other.
inline void check_keys_and_values(const Rows& q, const Rows& k, const Rows& v, Index kv_heads,
                                  Index v_dim, std::string_view k_name, std::string_view v_name) {
  if (k.len() == 0 && v.len() == 0) return;
  require_sizes(k_name, k.sizes(), {q.batch(), kv_heads, k.len(), q.dim()});
  require_sizes(v_name, v.sizes(), {q.batch(), kv_heads, k.len(), v_dim});
}

inline void check_call_options(const AttentionOptions& options, Index q_heads) {
  if (!options.sink_logits.empty())
    require_equal("the number of sink_logits", std::ssize(options.sink_logits), "q_heads", q_heads);
  if (!options.mask_factors.empty())
    require_equal("the number of mask_factors", std::ssize(options.mask_factors), "q_heads",
                  q_heads);
  if (!options.alibi_slopes.empty())
    require_equal("the number of alibi_slopes", std::ssize(options.alibi_slopes), "q_heads",
                  q_heads);
  require_at_least("sliding_window", options.sliding_window, 0);
  require_factor("scale", options.scale.value_or(1.0f));
  require_softcap(options.softcap);
  require_factors("mask_factors", options.mask_factors);
  require_factors("alibi_slopes", options.alibi_slopes);
  for (std::size_t i = 0; i < options.sink_logits.size(); ++i)
    if (!(options.sink_logits[i] <= std::numeric_limits<float>::max()))
      fail_element("sink_logits", static_cast<Index>(i),
                   static_cast<double>(options.sink_logits[i]), "[-infinity, 3.4e38]");
}

inline void check_memory(const Rows& q, const Past& past, const Chunk& chunk,
                         const AttentionOutput& output) {
  const Rows out = output.out;
  if (rows_share_memory(ByteLattice(out), out.sizes(), out.strides()))
    fail_because("rows of out share memory with each other");
  require_no_overlap(out, q, "out shares memory with q");
  require_no_overlap(out, past.k, "out shares memory with the past's keys");
  require_no_overlap(out, past.v, "out shares memory with the past's values");
  require_no_overlap(out, chunk.k, "out shares memory with the chunk's keys");
  require_no_overlap(out, chunk.v, "out shares memory with the chunk's values");
  require_no_shared_rows(
      past.k, chunk.k,
      "the chunk's keys lie in the past's: they would count twice; slice the past");
  require_no_shared_rows(
      past.v, chunk.v,
      "the chunk's values lie in the past's: they would count twice; slice the past");
  if (output.lse_nat.absent()) return;
  const TensorView<const float, 3> lse = output.lse_nat;
  if (rows_share_memory(ByteLattice(lse), lse.sizes(), lse.strides()))
    fail_because("rows of lse share memory with each other");
  require_no_overlap(lse, out, "lse shares memory with out");
  require_no_overlap(lse, q, "lse shares memory with q");
  require_no_overlap(lse, past.k, "lse shares memory with the past's keys");
  require_no_overlap(lse, past.v, "lse shares memory with the past's values");
  require_no_overlap(lse, chunk.k, "lse shares memory with the chunk's keys");
  require_no_overlap(lse, chunk.v, "lse shares memory with the chunk's values");
}

// Rows that are not by themselves all that is needed.
[[noreturn, gnu::cold, gnu::noinline]] inline void fail_not_plain(const char* name,
                                                                  const RowShape& shape) {
  if (shape.channel_step != 0)
    fail(std::string(name) + "'s step between channels in bytes", shape.channel_step,
         "but channels must lie side by side, a step of", "", 0);
  fail_because(std::string(name) + " has scales that lie apart, but must need none");
}

// KV heads and channels of a value: an empty part may leave its shape open.
struct KeyShape {
  Index kv_heads, v_dim;
};
inline KeyShape key_shape(const Past& past, const Chunk& chunk) {
  const bool by_past = past.k.len() > 0 || chunk.k.len() == 0;
  return {by_past ? past.k.heads() : chunk.k.heads(), by_past ? past.v.dim() : chunk.v.dim()};
}
inline Index first_query(const Past& past, std::optional<Index> position) {
  return position.value_or(past.first_position + past.k.len());
}

// Without a chunk nothing says in which order the past's keys and several queries stand.
[[noreturn, gnu::cold, gnu::noinline]] inline void fail_order(Index q_len, Index kv_len) {
  char message[384];
  std::snprintf(
      message, sizeof message,
      "q_len is %td and there is no chunk: each query would see all %td keys of the past, "
      "those of later tokens among them; chunk_in_cache(k, v, q_len) splits a cache that "
      "holds the chunk; query_position or causal = false says that all keys lie before the "
      "queries",
      q_len, kv_len);
  fail_because(message);
}

// What of the options a sequence may have its own of: the caller's.
struct SequenceOptions {
  const Mask& mask;
  const IndexLists& lists;
  std::optional<Index> position;
};
inline SequenceOptions sequence_options(const AttentionOptions& options) {
  return {options.mask, options.lists, options.query_position};
}

inline void check_lists(const Rows& q, const Past& past, const Chunk& chunk, Index kv_heads,
                        const AttentionOutput& output, const IndexLists& lists) {
  if (past.keep != nullptr && !past.keep->is_all())
    fail_because(
        "there are lists of each query's keys and a Selection, which all queries share: hand in "
        "one of them");
  lists.check(q.batch(), kv_heads, q.len(), past.k.len() + chunk.k.len());
  require_no_overlap(Rows(output.out), lists, "out shares memory with the lists");
  if (!output.lse_nat.absent())
    require_no_overlap(TensorView<const float, 3>(output.lse_nat), lists,
                       "lse shares memory with the lists");
}

inline void check_rest(const PastRest& rest, Index heads, Index k_dim, Index v_dim,
                       const AttentionOptions& options) {
  require_equal("the heads of the selection's rest", rest.heads(), "batch * q_heads", heads);
  require_equal("the channels of its keys", rest.k_dim(), "head_dim", k_dim);
  require_equal("the channels of its values", rest.v_dim(), "v's dim", v_dim);
  if (!options.alibi_slopes.empty())
    fail_because("there are " + std::to_string(options.alibi_slopes.size()) +
                 " alibi_slopes, and the selection's rest, a mean of keys, has no position: select "
                 "without QuokaOptions::rest");
}

// The one check of a call.
[[gnu::noinline]] inline void check_call(const Rows& q, const Past& past, const Chunk& chunk,
                                         const AttentionOutput& output,
                                         const AttentionOptions& options,
                                         const SequenceOptions& own) {
  const auto& [mask, lists, position] = own;
  require_at_least("q's batch", q.batch(), 1);
  require_at_least("q_len", q.len(), 1);
  require_at_least("head_dim", q.dim(), 1);
  const auto [kv_heads, v_dim] = key_shape(past, chunk);
  require_multiple("q_heads", q.heads(), "kv_heads", kv_heads);
  require_at_least("v's dim", v_dim, 1);
  require_keys("q_len", q.len());
  require_keys("the past's len", past.k.len());
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
  check_call_options(options, q.heads());
  if (past.keep != nullptr && !past.keep->rest().absent())
    check_rest(past.keep->rest(), q.batch() * q.heads(), q.dim(), v_dim, options);
  require_keys("the number of past and chunk keys", past.k.len() + chunk.k.len());
  require_at_least("the past's first_position", past.first_position, 0);
  require_at_most("the past's first_position", past.first_position,
                  "max_position without the past's len", max_position - past.k.len());
  require_at_least("query_position", first_query(past, position),
                   past.first_position + past.k.len());
  require_at_most("query_position", first_query(past, position), "max_position without q_len",
                  max_position - q.len());
  if (options.causal && !position && chunk.k.len() == 0 && past.k.len() > 0 && q.len() > 1)
    fail_order(q.len(), past.k.len());
  check_memory(q, past, chunk, output);
  if (!q.stores_alone()) fail_not_plain("q", q.shape(0));
  if (!output.out.stores_alone()) fail_not_plain("out", output.out.shape(0));
  if (!mask.absent()) {
    mask.check(q.batch(), q.heads(), q.len(), past.k.len() + chunk.k.len());
    require_no_overlap(output.out, mask, "out shares memory with the mask");
    if (!output.lse_nat.absent())
      require_no_overlap(TensorView<const float, 3>(output.lse_nat), mask,
                         "lse shares memory with the mask");
  }
  if (!lists.absent()) check_lists(q, past, chunk, kv_heads, output, lists);
  require_chunk_once(past, chunk, options, mask, lists);
}

inline std::uint64_t sequences_with_one_list(const IndexLists& lists, Index batch) {
  std::uint64_t same = 0;
  for (Index b = 0; b < std::min<Index>(batch, 64) && !lists.absent(); ++b)
    same |= std::uint64_t{lists.same_for_all_queries(b)} << b;
  return same;
}

// What was checked, with its defaults filled in. The mask and the lists outlive the call.
[[gnu::noinline]] inline AttentionCall resolved_call(const Rows& q, const Past& past,
                                                     const Chunk& chunk,
                                                     const AttentionOutput& output,
                                                     const AttentionOptions& options,
                                                     const SequenceOptions& own) {
  const auto& [mask, lists, position] = own;
  const auto [kv_heads, v_dim] = key_shape(past, chunk);
  const float scale = options.scale.value_or(1.0f / std::sqrt(static_cast<float>(q.dim())));
  const bool all = past.keep == nullptr || past.k.len() == 0 || past.keep->is_all();
  return {.q = q,
          .past_k = past.k,
          .past_v = past.v,
          .chunk_k = chunk.k,
          .chunk_v = chunk.v,
          .out = output.out,
          .lse = output.lse_nat,
          .keep = all ? nullptr : past.keep,
          .rest = all || past.keep->rest().absent() ? nullptr : &past.keep->rest(),
          .mask = mask.absent() ? nullptr : &mask,
          .lists = lists.absent() ? nullptr : &lists,
          .same_lists = sequences_with_one_list(lists, q.batch()),
          .packed_past = past.packed,
          .kv_heads = kv_heads,
          .group = q.heads() / kv_heads,
          .v_dim = v_dim,
          .logits = {.scale = scale, .softcap = options.softcap},
          .sink_logits = options.sink_logits,
          .window = options.sliding_window > 0 ? options.sliding_window
                                               : std::numeric_limits<Index>::max(),
          .first_position = past.first_position,
          .query_position = first_query(past, position),
          .causal = options.causal,
          .mask_factors = options.mask_factors,
          .alibi_slopes = options.alibi_slopes,
          .codes_queries = options.arithmetic.id() == ArithmeticId::automatic};
}

inline AttentionCall checked_call(const Rows& q, const Past& past, const Chunk& chunk,
                                  const AttentionOutput& output, const AttentionOptions& options,
                                  const SequenceOptions& own) {
  check_call(q, past, chunk, output, options, own);
  return resolved_call(q, past, chunk, output, options, own);
}
inline AttentionCall checked_call(const Rows& q, const Past& past, const Chunk& chunk,
                                  const AttentionOutput& output, const AttentionOptions& options) {
  return checked_call(q, past, chunk, output, options, sequence_options(options));
}

// What a call writes, then what it reads.
enum class CallMemory { out, lse, q, past_k, past_v, chunk_k, chunk_v, mask, lists };

inline ByteLattice memory_of(const AttentionCall& call, CallMemory which) {
  switch (which) {
    case CallMemory::out:
      return ByteLattice(Rows(call.out));
    case CallMemory::lse:
      return ByteLattice(TensorView<const float, 3>(call.lse));
    case CallMemory::q:
      return ByteLattice(call.q);
    case CallMemory::past_k:
      return ByteLattice(call.past_k);
    case CallMemory::past_v:
      return ByteLattice(call.past_v);
    case CallMemory::chunk_k:
      return ByteLattice(call.chunk_k);
    case CallMemory::chunk_v:
      return ByteLattice(call.chunk_v);
    case CallMemory::mask:
      return call.mask != nullptr ? ByteLattice(*call.mask) : ByteLattice(Rows());
    case CallMemory::lists:
      return call.lists != nullptr ? ByteLattice(*call.lists) : ByteLattice(Rows());
  }
  return ByteLattice(Rows());
}

[[noreturn, gnu::cold, gnu::noinline]] inline void fail_shared(CallMemory output, Index sequence,
                                                               CallMemory other,
                                                               Index other_sequence) {
  static constexpr const char* names[] = {"out",
                                          "lse",
                                          "q",
                                          "the past's keys",
                                          "the past's values",
                                          "the chunk's keys",
                                          "the chunk's values",
                                          "the mask",
                                          "the lists"};
  char message[128];
  std::snprintf(message, sizeof message, "%s of sequence %td shares memory with %s of sequence %td",
                names[static_cast<int>(output)], sequence, names[static_cast<int>(other)],
                other_sequence);
  fail_because(message);
}

// No two sequences may have one PackedPast: each packs its own cache. `order` is scratch.
inline void check_packed_once(const std::vector<AttentionCall>& calls, std::vector<Index>& order) {
  require_own("PackedPast", std::ssize(calls), order,
              [&](Index i) { return calls[static_cast<std::size_t>(i)].packed_past; });
}

// An output of a sequence, or a stretch of one, in the order of memory.
struct OutputMemory {
  std::uintptr_t begin, end;
  const AttentionCall* call;
  CallMemory which;
  bool is_whole;  // the extent of all rows, between which there may be gaps
};

inline void sort_outputs(std::vector<OutputMemory>& outputs) {
  sort(outputs.data(), std::ssize(outputs),
       [](const OutputMemory& a, const OutputMemory& b) { return a.begin < b.begin; });
}

// Outputs whose extents meet, stretch by stretch: heads of many sequences may lie in turn. No two have a byte in
// common then, or this throws.
inline void list_outputs(const std::vector<AttentionCall>& calls,
                         std::vector<OutputMemory>& outputs) {
  outputs.clear();
  for (const AttentionCall& call : calls)
    for (const CallMemory which : {CallMemory::out, CallMemory::lse}) {
      const ByteLattice x = memory_of(call, which);
      if (x.rows() > 0) outputs.push_back({x.base, x.end(), &call, which, true});
    }
  sort_outputs(outputs);
  const std::size_t extents = outputs.size();
  std::size_t alone = 0;
  for (std::size_t first = 0, next = 0; first < extents; first = next) {
    std::uintptr_t reach = outputs[first].end;
    for (next = first + 1; next < extents && outputs[next].begin < reach; ++next)
      reach = std::max(reach, outputs[next].end);
    if (next == first + 1) {
      outputs[alone++] = outputs[first];
      continue;
    }
    for (std::size_t i = first; i < next; ++i) {
      const OutputMemory output = outputs[i];
      memory_of(*output.call, output.which)
          .for_each_stretch([&](std::uintptr_t begin, std::uintptr_t end) {
            outputs.push_back({begin, end, output.call, output.which, false});
          });
    }
  }
  if (outputs.size() == extents) return;
  outputs.erase(outputs.begin() + static_cast<Index>(alone),
                outputs.begin() + static_cast<Index>(extents));
  sort_outputs(outputs);
  for (std::size_t i = 1; i < outputs.size(); ++i) {
    if (outputs[i - 1].end <= outputs[i].begin) continue;
    const OutputMemory* pair[2] = {&outputs[i - 1], &outputs[i]};
    if (pair[0]->call < pair[1]->call) std::swap(pair[0], pair[1]);
    fail_shared(pair[0]->which, pair[0]->call - calls.data(), pair[1]->which,
                pair[1]->call - calls.data());
  }
}

// No sequence's output may lie where another one reads or writes. `outputs` is scratch. An input is compared with
// the outputs that its extent reaches: by its stretches or by theirs, whichever are fewer.
inline void check_output_overlap(const std::vector<AttentionCall>& calls,
                                 std::vector<OutputMemory>& outputs) {
  if (calls.size() < 2) return;
  list_outputs(calls, outputs);
  const auto first_behind = [&](std::uintptr_t begin) {
    return std::partition_point(outputs.begin(), outputs.end(),
                                [&](const OutputMemory& output) { return output.end <= begin; });
  };
  for (const AttentionCall& call : calls)
    for (const CallMemory which :
         {CallMemory::q, CallMemory::past_k, CallMemory::past_v, CallMemory::chunk_k,
          CallMemory::chunk_v, CallMemory::mask, CallMemory::lists}) {
      const ByteLattice x = memory_of(call, which);
      if (x.rows() == 0) continue;
      const auto first = first_behind(x.base);
      if (first == outputs.end() || first->begin >= x.end()) continue;
      const auto end = std::partition_point(
          first, outputs.end(), [&](const OutputMemory& output) { return output.begin < x.end(); });
      const auto refuse = [&](const OutputMemory& output) {
        fail_shared(output.which, output.call - calls.data(), which, &call - calls.data());
      };
      if (x.stretches() < end - first) {
        x.for_each_stretch([&](std::uintptr_t begin, std::uintptr_t stop) {
          for (auto at = first_behind(begin); at != end && at->begin < stop; ++at) {
            if (at->call == &call) continue;
            const ByteLattice output = memory_of(*at->call, at->which);
            if (!at->is_whole || output.meets(static_cast<Index>(begin - output.base),
                                              static_cast<Index>(stop - output.base)))
              refuse(*at);
          }
        });
        continue;
      }
      for (auto at = first; at != end; ++at) {
        if (at->call == &call) continue;
        if (at->is_whole ? share_memory(memory_of(*at->call, at->which), x)
                         : x.meets(static_cast<Index>(at->begin - x.base),
                                   static_cast<Index>(at->end - x.base)))
          refuse(*at);
      }
    }
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
