// The checks of a call, before anything is done: shapes, options, and memory. An output must not
// share memory with anything else, of its own sequence or of another one of a batch.
#pragma once

#include <quoka/attention/call.hpp>
#include <quoka/base/sort.hpp>
#include <quoka/rows/overlap.hpp>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// ---- memory -------------------------------------------------------------------------------------

struct NamedMemory {
  const char* name;
  Footprint memory;  // without bytes where the call has none of it
};
inline constexpr std::size_t written_memory = 2;  // the first ones of a call's

// The memory that a call writes, then the memory that it reads.
inline std::array<NamedMemory, 10> memory_of(const AttentionCall& call) {
  return {{{"lse", Footprint(call.lse)},
           {"out", Footprint(Rows(call.out))},
           {"q", Footprint(call.q)},
           {"the past's keys", Footprint(call.past_k)},
           {"the past's values", Footprint(call.past_v)},
           {"the chunk's keys", Footprint(call.chunk_k)},
           {"the chunk's values", Footprint(call.chunk_v)},
           {"the mask", call.logits.mask != nullptr ? Footprint(*call.logits.mask) : Footprint()},
           {"the lists", call.lists != nullptr ? Footprint(call.lists->entries()) : Footprint()},
           {"the lists' counts",
            call.lists != nullptr ? Footprint(call.lists->counts()) : Footprint()}}};
}

// f(name, memory) of what else is read: numbers of each head, scales that lie apart from their
// rows, block tables and lists by which rows are found.
template <class F>
void for_each_small_input(const AttentionCall& call, F&& f) {
  const auto of_heads = [&](const char* name, std::span<const float> numbers) {
    if (!numbers.empty())
      f(name, Footprint(numbers.data(), std::ssize(numbers) * Index{sizeof(float)}, {}));
  };
  of_heads("the sinks", call.logits.sinks);
  of_heads("the mask_factors", call.logits.mask_factors);
  of_heads("the alibi_slopes", call.logits.alibi_slopes);
  const auto of_rows = [&](const Rows& rows, const char* scales, const char* list,
                           const char* table) {
    if (rows.len() == 0 || (rows.stores_alone() && !rows.mapped())) return;
    const auto [least, most] =  // a step between heads may be negative
        std::minmax({rows.shape(0).scales, rows.shape(rows.heads() - 1).scales});
    if (least != nullptr)
      of_heads(scales, {least, most + rows.format().separate_scales(rows.dim())});
    const RowMap& map = rows.map();
    const Index begin = rows.pool_begin(), end = begin + rows.len();
    const auto entries = [&](const char* name, const Position* first, Index count) {
      f(name, Footprint(first, count * Index{sizeof(Position)}, {}));
    };
    if (map.cells != nullptr) entries(list, map.cells + begin, rows.len());
    if (map.pages == nullptr) return;
    Index first = map.cell(begin), last = map.cell(end - 1);
    for (Index i = begin; i < end && map.cells != nullptr; ++i)
      first = std::min(first, map.cell(i)), last = std::max(last, map.cell(i));
    const Index page = map.page_of(first);
    entries(table, map.pages + page, map.page_of(last) + 1 - page);
  };
  of_rows(call.past_k, "the scales of the past's keys", "the list of the past's keys",
          "the block table of the past's keys");
  of_rows(call.past_v, "the scales of the past's values", "the list of the past's values",
          "the block table of the past's values");
  of_rows(call.chunk_k, "the scales of the chunk's keys", "the list of the chunk's keys",
          "the block table of the chunk's keys");
  of_rows(call.chunk_v, "the scales of the chunk's values", "the list of the chunk's values",
          "the block table of the chunk's values");
}

// Throws std::invalid_argument for an output that shares memory with itself or with anything else,
// and for a chunk that lies in the past.
inline void check_memory(const AttentionCall& call) {
  require_rows_apart(Rows(call.out), "out");
  require_rows_apart(call.lse, "lse");
  const auto all = memory_of(call);
  for (std::size_t i = 0; i < written_memory; ++i)
    for (std::size_t j = i + 1; j < all.size(); ++j)
      if (share_memory(all[i].memory, all[j].memory))
        fail_because(std::string(all[i].name) + " shares memory with " + all[j].name);
  for_each_small_input(call, [&](const char* name, const Footprint& read) {
    for (std::size_t i = 0; i < written_memory; ++i)
      if (share_memory(all[i].memory, read))
        fail_because(std::string(all[i].name) + " shares memory with " + name);
  });
  require_no_shared_rows(
      call.past_k, call.chunk_k,
      "the chunk's keys lie in the past's: they would count twice; slice the past");
  require_no_shared_rows(
      call.past_v, call.chunk_v,
      "the chunk's values lie in the past's: they would count twice; slice the past");
}

[[noreturn, gnu::cold, gnu::noinline]] inline void fail_shared(const char* output, Index sequence,
                                                               const char* other,
                                                               Index other_sequence) {
  char message[128];
  std::snprintf(message, sizeof message, "%s of sequence %td shares memory with %s of sequence %td",
                output, sequence, other, other_sequence);
  fail_because(message);
}

// Bytes of a sequence's output that lie side by side.
struct OutputMemory {
  std::uintptr_t begin, end;
  const AttentionCall* call;
  std::size_t which;  // of memory_of(*call)
};

// No sequence's output may lie where another one reads or writes. `outputs` is scratch: the
// stretches of all outputs in the order of memory. An input is compared with the outputs within its
// extent.
inline void check_output_overlap(const std::vector<AttentionCall>& calls,
                                 std::vector<OutputMemory>& outputs) {
  if (calls.size() < 2) return;
  outputs.clear();
  for (const AttentionCall& call : calls) {
    const auto all = memory_of(call);
    for (std::size_t which = 0; which < written_memory; ++which)
      all[which].memory.for_each_stretch([&](std::uintptr_t begin, std::uintptr_t end) {
        outputs.push_back({begin, end, &call, which});
      });
  }
  const auto sequence = [&](const AttentionCall* call) { return call - calls.data(); };
  const auto output_of = [](const OutputMemory& x) { return memory_of(*x.call)[x.which]; };
  sort(outputs.data(), std::ssize(outputs),
       [](const OutputMemory& a, const OutputMemory& b) { return a.begin < b.begin; });
  for (std::size_t i = 1; i < outputs.size(); ++i) {
    if (outputs[i - 1].end <= outputs[i].begin) continue;
    const OutputMemory *a = &outputs[i - 1], *b = &outputs[i];
    if (a->call < b->call) std::swap(a, b);
    fail_shared(output_of(*a).name, sequence(a->call), output_of(*b).name, sequence(b->call));
  }
  for (const AttentionCall& call : calls) {
    const auto require_apart = [&](const char* name, const Footprint& read) {
      if (read.empty()) return;
      auto output = std::partition_point(outputs.begin(), outputs.end(),
                                         [&](const OutputMemory& x) { return x.end <= read.base; });
      for (; output != outputs.end() && output->begin < read.end(); ++output)
        if (output->call != &call && share_memory(output_of(*output).memory, read))
          fail_shared(output_of(*output).name, sequence(output->call), name, sequence(&call));
    };
    const auto all = memory_of(call);
    for (std::size_t which = written_memory; which < all.size(); ++which)
      require_apart(all[which].name, all[which].memory);
    for_each_small_input(call, require_apart);
  }
}

// ---- shapes and options -------------------------------------------------------------------------

// Throws unless keys and values [batch, kv_heads, len, head_dim | v_dim] fit the call and each
// other.
inline void check_keys_and_values(const AttentionCall& call, const Rows& k, const Rows& v,
                                  std::string_view k_name, std::string_view v_name) {
  if (k.len() == 0 && v.len() == 0) return;
  require_sizes(k_name, k.sizes(), {call.q.batch(), call.kv_heads, k.len(), call.q.dim()});
  require_sizes(v_name, v.sizes(), {call.q.batch(), call.kv_heads, k.len(), call.v_dim});
}

QUOKA_FUNC void check_options(const AttentionOptions& options, Index q_heads) {
  if (!options.sinks.empty())
    require_equal("the number of sinks", std::ssize(options.sinks), "q_heads", q_heads);
  if (!options.mask_factors.empty())
    require_equal("the number of mask_factors", std::ssize(options.mask_factors), "q_heads",
                  q_heads);
  if (!options.alibi_slopes.empty())
    require_equal("the number of alibi_slopes", std::ssize(options.alibi_slopes), "q_heads",
                  q_heads);
  require_at_least("sliding_window", options.sliding_window, 0);
  check_logit_options(options);
  require_factors("mask_factors", options.mask_factors);
  require_factors("alibi_slopes", options.alibi_slopes);
  for (std::size_t i = 0; i < options.sinks.size(); ++i)
    if (!(options.sinks[i] <= std::numeric_limits<float>::max()))
      fail_element("sinks", static_cast<Index>(i), static_cast<double>(options.sinks[i]),
                   "[-infinity, 3.4e38]");
}

// Rows that need more than their own bytes: scales, or channels that lie apart.
[[noreturn, gnu::cold, gnu::noinline]] inline void fail_not_plain(const char* name,
                                                                  const RowShape& shape) {
  if (shape.channel_step != 0)
    fail(std::string(name) + "'s step between channels in bytes", shape.channel_step,
         "but channels must lie side by side, a step of", "", 0);
  fail_because(std::string(name) + " has scales that lie apart, but must need none");
}

// Without a chunk nothing says in which order the past's keys and several queries stand.
[[noreturn, gnu::cold, gnu::noinline]] inline void fail_order(Index q_len, Index kv_len) {
  char message[384];
  std::snprintf(
      message, sizeof message,
      "q_len is %td and there is no chunk: each query would see all %td keys of the past, "
      "those of later tokens among them; chunk_in_cache(k, v, q_len) splits a cache that "
      "holds the chunk; q_offset or causal = false says that all keys lie before the "
      "queries",
      q_len, kv_len);
  fail_because(message);
}

// The one check of a call.
[[gnu::noinline]] inline AttentionCall checked_call(const AttentionSequence& x,
                                                    const AttentionOptions& options) {
  const Rows& q = x.q;
  const Index past_len = x.past.k.len(), chunk_len = x.chunk.k.len();
  // These come first: resolved_call() computes with them.
  require_at_least("q's batch", q.batch(), 1);
  require_at_least("q_len", q.len(), 1);
  require_at_least("head_dim", q.dim(), 1);
  require_keys("q_len", q.len());
  require_keys("the past's len", past_len);
  require_at_least("the past's first_position", x.past.first_position, 0);
  require_at_most("the past's first_position", x.past.first_position,
                  "max_position without the past's len", max_position - past_len);
  const AttentionCall call = resolved_call(x, options);
  require_multiple("q_heads", q.heads(), "kv_heads", call.kv_heads);
  require_at_least("v's dim", call.v_dim, 1);
  check_keys_and_values(call, call.past_k, call.past_v, "past k", "past v");
  check_keys_and_values(call, call.chunk_k, call.chunk_v, "chunk k", "chunk v");
  if (chunk_len > 0) require_equal("chunk k's len", chunk_len, "q_len", q.len());
  const Index keys = past_len + chunk_len;
  require_sizes("out", call.out.sizes(), {q.batch(), q.heads(), q.len(), call.v_dim});
  if (!call.lse.absent())
    require_sizes("lse_nat", call.lse.sizes(), {q.batch(), q.heads(), q.len()});
  const Selection* const selection = x.past.selection;
  if (selection != nullptr && past_len > 0)
    selection->require_fits(q.batch(), call.kv_heads, q.heads(), past_len);
  else if (selection != nullptr)
    require_equal("the selection's kv_len", selection->kv_len(), "the keys' kv_len", 0);
  check_options(options, q.heads());
  require_keys("the number of past and chunk keys", keys);
  require_at_least("q_offset", call.logits.q_offset, x.past.first_position + past_len);
  require_at_most("q_offset", call.logits.q_offset, "max_position without q_len",
                  max_position - q.len());
  if (options.causal && !x.q_offset && !options.q_offset && chunk_len == 0 && past_len > 0 &&
      q.len() > 1)
    fail_order(q.len(), past_len);
  if (!q.stores_alone()) fail_not_plain("q", q.shape(0));
  if (!call.out.stores_alone()) fail_not_plain("out", call.out.shape(0));
  if (call.logits.mask != nullptr) call.logits.mask->check(q.batch(), q.heads(), q.len(), keys);
  if (call.lists != nullptr) {
    if (selection != nullptr && !selection->is_all())
      fail_because(
          "there are lists of each query's keys and a Selection, which all queries share: hand in "
          "one of them");
    call.lists->check(q.batch(), call.kv_heads, q.len(), keys);
  }
  check_memory(call);
  return call;
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
