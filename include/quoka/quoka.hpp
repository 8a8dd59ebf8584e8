// QuoKA: query-oriented KV selection for LLM prefill, header-only C++20 on Eigen.
//
// For each chunk of a prompt: keep the few queries least like the chunk's mean query, score the
// cached keys against them by cosine similarity, attend only to the `budget` best keys and the
// chunk itself.
//
//     views ─▶ select ─────────────────────────────────▶ attention ─▶ chunked prefill
//              subselect_queries ▶ pre_aggregate ▶          past[Selection], then the chunk, causal
//              score_keys ▶ top_k ▶ (gather)
//
// Jones et al., ICLR 2026, arXiv 2602.08722. Each header includes only headers above it here. Start
// at prefill/chunked_prefill.hpp, or, with a cache of your own, at select/quoka.hpp and
// attention/attention.hpp. Not included here: the methods QuoKA is compared with, select/all.hpp,
// and the measures of what a selection keeps, diagnostics.hpp.
#pragma once

#include <quoka/version.hpp>

#include <quoka/core/types.hpp>
#include <quoka/core/check.hpp>
#include <quoka/core/view.hpp>
#include <quoka/core/buffer.hpp>
#include <quoka/core/worker_scratch.hpp>
#include <quoka/core/executor.hpp>
#include <quoka/core/simd.hpp>
#include <quoka/core/pair_sums.hpp>
#include <quoka/core/tuning.hpp>
#include <quoka/core/inverse_norm.hpp>
#include <quoka/core/int8_dot.hpp>
#include <quoka/core/compact.hpp>
#include <quoka/core/packing.hpp>
#include <quoka/core/register_tile.hpp>
#include <quoka/core/softmax_state.hpp>
#include <quoka/core/panel_kernels.hpp>
#include <quoka/core/fixed_panels.hpp>
#include <quoka/core/token_kernels.hpp>

#include <quoka/cache/row_store.hpp>
#include <quoka/cache/kv_cache.hpp>
#include <quoka/cache/key_sketch.hpp>

#include <quoka/select/selection.hpp>
#include <quoka/select/options.hpp>
#include <quoka/select/concepts.hpp>
#include <quoka/select/subselect_queries.hpp>
#include <quoka/select/pre_aggregate.hpp>
#include <quoka/select/score_keys.hpp>
#include <quoka/select/top_k.hpp>
#include <quoka/select/gather.hpp>
#include <quoka/select/scored_selector.hpp>
#include <quoka/select/dense.hpp>
#include <quoka/select/sketched_top_k.hpp>
#include <quoka/select/quoka.hpp>

#include <quoka/attention/key_sequence.hpp>
#include <quoka/attention/partial_rows.hpp>
#include <quoka/attention/head_attention.hpp>
#include <quoka/attention/token_attention.hpp>
#include <quoka/attention/attention_tasks.hpp>
#include <quoka/attention/attention.hpp>
#include <quoka/attention/merge.hpp>

#include <quoka/prefill/layer_shape.hpp>
#include <quoka/prefill/chunked_prefill.hpp>
