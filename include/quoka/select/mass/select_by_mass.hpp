// Selection by query head, against one threshold: from queries and keys to a Selection.
//
//   share[h][t] = mean over the voting queries of head h (voters.hpp) of the key's share of all the query's attention,
//                 past and own chunk, causal in the chunk                          float_votes.hpp, code_votes.hpp
//   selection   = {(h, t): the largest share of t and its neighbours >= threshold} threshold.hpp
//
// 2 * rows * keys * dim operations per KV head, rows = voters of its query heads, an exponential and a sum for each row
// and key. Scratch: 8 bytes for each list and key of the past, a pass of weights (tuning::mass_weight_bytes) and the
// packed rows for each KV head that is at work.
#pragma once

#include <quoka/select/selector.hpp>
#include <quoka/select/sketch/sketched_call.hpp>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// What is kept, of the pairs of a list and a key. Where both a threshold and a most are given, the more of the two that
// it takes; at least `least` keys a list on average stay.
struct MassRule {
  float threshold = 0.0f;       // times the average share, 1 / kv_len; 0: none
  Index most, least;            // keys of a list on average, not more than there are
  Index queries, kernel_size;   // of a KV head that vote; keys that share their maximum
  Index keep_first, keep_last;  // of each list, whatever their shares, inside `most`
  bool all_channels = false;    // of codes: else at least half (coded_channels.hpp)
};

// Reused memory.
struct MassMemory;

// codes: of the keys; null: in float. The rule's `most` is below kv_len, or there is a threshold.
void select_by_mass(const SelectorInput& input, const MassRule& rule, const SketchedKeys* codes,
                    MassMemory& memory, Selection& selection, ExecutorRef executor);

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka

#if !defined(QUOKA_COMPILED)
#include <quoka/select/mass/select_by_mass_impl.hpp>
#endif
