// QuoKA: query-oriented KV selection for LLM prefill, header-only C++20 on Eigen.
//
// For each chunk of a prompt: keep the few queries that are least like the chunk's mean query,
// score the cached keys by cosine similarity to them, attend only to the `budget` best keys and to
// the chunk itself.
//
// Jones et al., ICLR 2026, arXiv 2602.08722. Start at layer/chunked_prefill.hpp, or, with a cache
// of your own, at select/mass_selector.hpp or select/quoka.hpp, and attention/attention.hpp;
// README.md beside this file is the map.
//
// Not included here, because they take longer to compile: select/stages.hpp (Algorithm 1 step by
// step on Eigen tensors), methods/all.hpp (the methods QuoKA is compared with, a model's index
// heads), attention/diagnostics.hpp (what a selection keeps).
#pragma once

#include <quoka/base/index.hpp>
#include <quoka/base/version.hpp>

#include <quoka/runtime/executor.hpp>
#include <quoka/runtime/isa.hpp>
#include <quoka/runtime/thread_pool.hpp>

#include <quoka/rows/format.hpp>
#include <quoka/rows/index_lists.hpp>
#include <quoka/rows/layouts.hpp>
#include <quoka/rows/mask.hpp>
#include <quoka/rows/rows.hpp>
#include <quoka/rows/selection.hpp>
#include <quoka/rows/tensor_view.hpp>

#include <quoka/select/any_selector.hpp>
#include <quoka/select/key_scores.hpp>
#include <quoka/select/key_sketch.hpp>
#include <quoka/select/mass_selector.hpp>
#include <quoka/select/options.hpp>
#include <quoka/select/query_rows.hpp>
#include <quoka/select/quoka.hpp>
#include <quoka/select/scored_selector.hpp>
#include <quoka/select/selector.hpp>
#include <quoka/select/softmax_scores.hpp>
#include <quoka/select/visible.hpp>

#include <quoka/attention/attention.hpp>
#include <quoka/attention/merge.hpp>

#include <quoka/layer/chunked_prefill.hpp>
#include <quoka/layer/kv_cache.hpp>
#include <quoka/layer/ragged.hpp>
