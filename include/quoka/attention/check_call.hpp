// The checks of a call, once and as a whole, before anything is done.
#pragma once

#include <quoka/attention/call.hpp>
#include <quoka/attention/call_memory.hpp>

#include <cstdio>
#include <limits>
#include <string>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// Throws unless keys and values [batch, kv_heads, len, head_dim | v_dim] fit q and each other.
inline void check_keys_and_values(const Rows& q, const Rows& k, const Rows& v, Index kv_heads,
                                  Index v_dim, std::string_view k_name, std::string_view v_name) {
  if (k.len() == 0 && v.len() == 0) return;
  require_sizes(k_name, k.sizes(), {q.batch(), kv_heads, k.len(), q.dim()});
  require_sizes(v_name, v.sizes(), {q.batch(), kv_heads, k.len(), v_dim});
}

inline void check_call_options(const AttentionOptions& options, Index q_heads) {
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

// Rows that are not by themselves all that is needed.
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

inline void check_lists(const Rows& q, const Past& past, const Chunk& chunk, Index kv_heads,
                        const IndexLists& lists) {
  if (past.selection != nullptr && !past.selection->is_all())
    fail_because(
        "there are lists of each query's keys and a Selection, which all queries share: hand in "
        "one of them");
  lists.check(q.batch(), kv_heads, q.len(), past.k.len() + chunk.k.len());
}

// The one check of a call.
[[gnu::noinline]] inline AttentionCall checked_call(const Rows& q, const Past& past,
                                                    const Chunk& chunk,
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
  if (past.selection != nullptr && past.k.len() > 0)
    past.selection->require_fits(q.batch(), kv_heads, q.heads(), past.k.len());
  else if (past.selection != nullptr)
    require_equal("the selection's kv_len", past.selection->kv_len(), "the keys' kv_len", 0);
  check_call_options(options, q.heads());
  require_keys("the number of past and chunk keys", past.k.len() + chunk.k.len());
  require_at_least("the past's first_position", past.first_position, 0);
  require_at_most("the past's first_position", past.first_position,
                  "max_position without the past's len", max_position - past.k.len());
  require_at_least("q_offset", first_query(past, position), past.first_position + past.k.len());
  require_at_most("q_offset", first_query(past, position), "max_position without q_len",
                  max_position - q.len());
  if (options.causal && !position && chunk.k.len() == 0 && past.k.len() > 0 && q.len() > 1)
    fail_order(q.len(), past.k.len());
  if (!q.stores_alone()) fail_not_plain("q", q.shape(0));
  if (!output.out.stores_alone()) fail_not_plain("out", output.out.shape(0));
  if (!mask.absent()) mask.check(q.batch(), q.heads(), q.len(), past.k.len() + chunk.k.len());
  if (!lists.absent()) check_lists(q, past, chunk, kv_heads, lists);
  const AttentionCall call = resolved_call(q, past, chunk, output, options, own);
  check_memory(call);
  return call;
}

inline AttentionCall checked_call(const Rows& q, const Past& past, const Chunk& chunk,
                                  const AttentionOutput& output, const AttentionOptions& options) {
  return checked_call(q, past, chunk, output, options, sequence_options(options));
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
