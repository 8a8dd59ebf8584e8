// What of a call's memory may not be shared: nothing that it writes with anything else, of its own or of another
// sequence of a batch.
#pragma once

#include <quoka/attention/call.hpp>
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

// Without bytes where the call has none of it.
inline Footprint memory_of(const AttentionCall& call, CallMemory which) {
  switch (which) {
    case CallMemory::out:
      return Footprint(Rows(call.out));
    case CallMemory::lse:
      return Footprint(TensorView<const float, 3>(call.lse));
    case CallMemory::q:
      return Footprint(call.q);
    case CallMemory::past_k:
      return Footprint(call.past_k);
    case CallMemory::past_v:
      return Footprint(call.past_v);
    case CallMemory::chunk_k:
      return Footprint(call.chunk_k);
    case CallMemory::chunk_v:
      return Footprint(call.chunk_v);
    case CallMemory::mask:
      return call.mask != nullptr ? Footprint(*call.mask) : Footprint();
    case CallMemory::lists:
      return call.lists != nullptr ? Footprint(*call.lists) : Footprint();
  }
  return Footprint();
}

// ---- of one call --------------------------------------------------------------------------------

template <class View>
void require_rows_apart(const View& output, const char* name) {
  if (rows_share_memory(output))
    fail_because(std::string("rows of ") + name + " share memory with each other");
}

// Throws std::invalid_argument for an output that shares memory with itself or with anything else, and for a chunk that
// lies in the past.
inline void check_memory(const AttentionCall& call) {
  require_rows_apart(Rows(call.out), "out");
  require_rows_apart(TensorView<const float, 3>(call.lse), "lse");
  const Footprint out = memory_of(call, CallMemory::out), lse = memory_of(call, CallMemory::lse);
  const auto require_apart = [](const Footprint& a, CallMemory written, const Footprint& b,
                                CallMemory other) {
    if (share_memory(a, b))
      fail_because(std::string(name_of(written)) + " shares memory with " + name_of(other));
  };
  require_apart(lse, CallMemory::lse, out, CallMemory::out);
  for (const CallMemory which : memory_read) {
    const Footprint read = memory_of(call, which);
    require_apart(out, CallMemory::out, read, which);
    require_apart(lse, CallMemory::lse, read, which);
  }
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

// A stretch of a sequence's output.
struct OutputMemory {
  std::uintptr_t begin, end;
  const AttentionCall* call;
  CallMemory which;
};

// The outputs of all sequences in the order of memory. Throws where two of them share bytes.
inline void list_outputs(const std::vector<AttentionCall>& calls,
                         std::vector<OutputMemory>& outputs) {
  outputs.clear();
  for (const AttentionCall& call : calls)
    for (const CallMemory which : {CallMemory::out, CallMemory::lse})
      memory_of(call, which).for_each_stretch([&](std::uintptr_t begin, std::uintptr_t end) {
        outputs.push_back({begin, end, &call, which});
      });
  sort(outputs.data(), std::ssize(outputs),
       [](const OutputMemory& a, const OutputMemory& b) { return a.begin < b.begin; });
  for (std::size_t i = 1; i < outputs.size(); ++i) {
    if (outputs[i - 1].end <= outputs[i].begin) continue;
    const OutputMemory* pair[2] = {&outputs[i - 1], &outputs[i]};
    if (pair[0]->call < pair[1]->call) std::swap(pair[0], pair[1]);
    fail_shared(pair[0]->which, pair[0]->call - calls.data(), pair[1]->which,
                pair[1]->call - calls.data());
  }
}

// No sequence's output may lie where another one reads or writes. `outputs` is scratch. Only outputs within an input's
// extent are compared with it.
inline void check_output_overlap(const std::vector<AttentionCall>& calls,
                                 std::vector<OutputMemory>& outputs) {
  if (calls.size() < 2) return;
  list_outputs(calls, outputs);
  for (const AttentionCall& call : calls)
    for (const CallMemory which : memory_read) {
      const Footprint read = memory_of(call, which);
      if (read.empty()) continue;
      auto output = std::partition_point(outputs.begin(), outputs.end(),
                                         [&](const OutputMemory& x) { return x.end <= read.base; });
      for (; output != outputs.end() && output->begin < read.end(); ++output)
        if (output->call != &call && share_memory(memory_of(*output->call, output->which), read))
          fail_shared(output->which, output->call - calls.data(), which, &call - calls.data());
    }
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
