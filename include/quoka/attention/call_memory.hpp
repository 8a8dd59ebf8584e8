// What of a call's memory may not be shared: nothing that it writes with anything else, of its own or of another
// sequence of a batch.
#pragma once

#include <quoka/attention/attention_call.hpp>
#include <quoka/views/overlap.hpp>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// What a call writes, then what it reads.
enum class CallMemory { out, lse, q, past_k, past_v, chunk_k, chunk_v, mask, lists };
inline constexpr CallMemory memory_read[] = {
    CallMemory::q,       CallMemory::past_k, CallMemory::past_v, CallMemory::chunk_k,
    CallMemory::chunk_v, CallMemory::mask,   CallMemory::lists};

inline const char* name_of(CallMemory which) {
  static constexpr const char* names[] = {"out",
                                          "lse",
                                          "q",
                                          "the past's keys",
                                          "the past's values",
                                          "the chunk's keys",
                                          "the chunk's values",
                                          "the mask",
                                          "the lists"};
  return names[static_cast<int>(which)];
}

// Without rows where the call has none of it.
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

// ---- of one call --------------------------------------------------------------------------------

inline void require_apart(const AttentionCall& call, CallMemory written, CallMemory other) {
  if (!share_memory(memory_of(call, written), memory_of(call, other))) [[likely]]
    return;
  fail_because(std::string(name_of(written)) + " shares memory with " + name_of(other));
}
template <class View>
void require_rows_apart(const View& output, const char* name) {
  if (rows_share_memory(ByteLattice(output), output.sizes(), output.strides()))
    fail_because(std::string("rows of ") + name + " share memory with each other");
}

// Throws std::invalid_argument for an output that shares memory with itself or with anything else, and for a chunk that
// lies in the past.
inline void check_memory(const AttentionCall& call) {
  require_rows_apart(Rows(call.out), "out");
  require_rows_apart(TensorView<const float, 3>(call.lse), "lse");
  require_apart(call, CallMemory::lse, CallMemory::out);
  for (const CallMemory written : {CallMemory::out, CallMemory::lse})
    for (const CallMemory read : memory_read) require_apart(call, written, read);
  require_no_shared_rows(
      call.past_k, call.chunk_k,
      "the chunk's keys lie in the past's: they would count twice; slice the past");
  require_no_shared_rows(
      call.past_v, call.chunk_v,
      "the chunk's values lie in the past's: they would count twice; slice the past");
}

// ---- of several sequences -----------------------------------------------------------------------

[[noreturn, gnu::cold, gnu::noinline]] inline void fail_shared(CallMemory output, Index sequence,
                                                               CallMemory other,
                                                               Index other_sequence) {
  char message[128];
  std::snprintf(message, sizeof message, "%s of sequence %td shares memory with %s of sequence %td",
                name_of(output), sequence, name_of(other), other_sequence);
  fail_because(message);
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
    for (const CallMemory which : memory_read) {
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
