// What of a call's memory may not be shared: nothing that it writes with anything else, of its own or of another
// sequence of a batch.
#pragma once

#include <quoka/attention/call.hpp>
#include <quoka/rows/overlap.hpp>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

struct NamedMemory {
  const char* name;
  Footprint memory;  // without bytes where the call has none of it
};
inline constexpr std::size_t written_memory = 2;  // the first ones of a call's

// What a call writes, then what it reads.
inline std::array<NamedMemory, 9> memory_of(const AttentionCall& call) {
  return {{{"lse", Footprint(TensorView<const float, 3>(call.lse))},
           {"out", Footprint(Rows(call.out))},
           {"q", Footprint(call.q)},
           {"the past's keys", Footprint(call.past_k)},
           {"the past's values", Footprint(call.past_v)},
           {"the chunk's keys", Footprint(call.chunk_k)},
           {"the chunk's values", Footprint(call.chunk_v)},
           {"the mask", call.mask != nullptr ? Footprint(*call.mask) : Footprint()},
           {"the lists", call.lists != nullptr ? Footprint(*call.lists) : Footprint()}}};
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
  const auto all = memory_of(call);
  for (std::size_t i = 0; i < written_memory; ++i)
    for (std::size_t j = i + 1; j < all.size(); ++j)
      if (share_memory(all[i].memory, all[j].memory))
        fail_because(std::string(all[i].name) + " shares memory with " + all[j].name);
  require_no_shared_rows(
      call.past_k, call.chunk_k,
      "the chunk's keys lie in the past's: they would count twice; slice the past");
  require_no_shared_rows(
      call.past_v, call.chunk_v,
      "the chunk's values lie in the past's: they would count twice; slice the past");
}

// ---- of several sequences -----------------------------------------------------------------------

[[noreturn, gnu::cold, gnu::noinline]] inline void fail_shared(const char* output, Index sequence,
                                                               const char* other,
                                                               Index other_sequence) {
  char message[128];
  std::snprintf(message, sizeof message, "%s of sequence %td shares memory with %s of sequence %td",
                output, sequence, other, other_sequence);
  fail_because(message);
}

// A stretch of a sequence's output.
struct OutputMemory {
  std::uintptr_t begin, end;
  const AttentionCall* call;
  std::size_t which;  // of memory_of(*call)
};

// No sequence's output may lie where another one reads or writes. `outputs` is scratch: the stretches of all outputs
// in the order of memory. An input is compared with the outputs within its extent.
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
    const auto all = memory_of(call);
    for (std::size_t which = written_memory; which < all.size(); ++which) {
      const auto& [name, read] = all[which];
      if (read.empty()) continue;
      auto output = std::partition_point(
          outputs.begin(), outputs.end(),
          [&read = read](const OutputMemory& x) { return x.end <= read.base; });
      for (; output != outputs.end() && output->begin < read.end(); ++output)
        if (output->call != &call && share_memory(output_of(*output).memory, read))
          fail_shared(output_of(*output).name, sequence(output->call), name, sequence(&call));
    }
  }
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
