// QuoKA: query-oriented KV selection for LLM prefill, header-only C++20 on Eigen.
//
// For each chunk of a prompt: keep the few queries least like the chunk's mean query, score the
// cached keys against them by cosine similarity, attend only to the `budget` best keys and the
// chunk itself.
//
//     views ─▶ select ─────────────────────────────────▶ attention ─▶ chunked prefill
//              subselect_queries ▶ pre_aggregate ▶          past[Selection], then the chunk, causal
//              score_keys ▶ top_k, or both by a sketch
//
// Jones et al., ICLR 2026, arXiv 2602.08722. Start at prefill/chunked_prefill.hpp, or, with a cache
// of your own, at select/mass_selector.hpp or select/quoka.hpp, and attention/attention.hpp; README.md beside this file is the map.
// Not included here, for they take longer to compile: Algorithm 1 step by step on Eigen tensors,
// select/stages.hpp; the methods QuoKA is compared with, methods/all.hpp; what a selection keeps,
// attention/diagnostics.hpp. Each header includes only headers above it here.
#pragma once

#include <quoka/base/index.hpp>
#include <quoka/base/version.hpp>

#include <quoka/formats/format.hpp>

#include <quoka/runtime/executor.hpp>
#include <quoka/runtime/isa.hpp>
#include <quoka/runtime/thread_pool.hpp>

#include <quoka/views/tensor_view.hpp>
#include <quoka/views/rows.hpp>
#include <quoka/views/layouts.hpp>
#include <quoka/views/selection.hpp>
#include <quoka/views/mask.hpp>
#include <quoka/views/index_lists.hpp>

#include <quoka/cache/kv_cache.hpp>
#include <quoka/cache/key_sketch.hpp>

#include <quoka/select/options.hpp>
#include <quoka/select/selector.hpp>
#include <quoka/select/query_scores.hpp>
#include <quoka/select/scored_selector.hpp>
#include <quoka/select/visible.hpp>
#include <quoka/select/dense.hpp>
#include <quoka/select/quoka.hpp>
#include <quoka/select/mass_selector.hpp>
#include <quoka/select/any_selector.hpp>

#include <quoka/attention/attention.hpp>
#include <quoka/attention/merge.hpp>

#include <quoka/prefill/layer_shape.hpp>
#include <quoka/prefill/chunked_prefill.hpp>
#include <quoka/prefill/ragged.hpp>
