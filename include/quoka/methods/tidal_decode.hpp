// TidalDecode: exact choice at two layers, reused by the layers between and after.
//
//   score[t] = mean over the group's heads and the chunk's queries of softmax over t of logits
//
// at the choosing layers: 2 * q_heads * q_len * kv_len * head_dim FLOPs there and none elsewhere.
// Source: Yang et al., "TidalDecode: Fast and Accurate LLM Decoding with Position Persistent Sparse
// Attention", arXiv 2410.05076, which decodes one query at a time and keeps a set per query head.
// Deviations: one set per KV head and chunk; the correction layer by rule (LayerPlan).
#pragma once

#include <quoka/methods/layer_shared.hpp>
#include <quoka/methods/oracle.hpp>

namespace quoka {
inline namespace QUOKA_ABI {

// Options of TidalDecodeSelector.
struct TidalDecodeOptions {
  Budget budget = Budget::keys(1024);  // keys per KV head
  LayerPlan plan = {};                 // this layer, and which layers choose
  Index keep_first = 0;                // attention sinks, inside the budget
  Index keep_last = 0;                 // most recent keys, inside the budget

  // Layers that choose are the oracle.
  operator OracleOptions() const {
    return {.budget = budget, .keep_first = keep_first, .keep_last = keep_last};
  }
};

using TidalDecodeSelector = LayerSharedSelector<OracleSelector, TidalDecodeOptions>;

}  // namespace QUOKA_ABI
}  // namespace quoka
