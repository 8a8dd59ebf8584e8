// Attention where each query has keys of its own, as far as the tasks of a call know it: what is behind it is compiled
// where a caller has lists, and nowhere else (views/own_keys.hpp).
#pragma once

#include <quoka/attention/head_attention.hpp>
#include <quoka/attention/partial_rows.hpp>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// With the memory of all workers.
class ListedWork {
 public:
  // That a task takes, and the leaves of a tree (list_plan.hpp).
  static constexpr Index most_panels = 16;

  virtual ~ListedWork() = default;
  virtual Index bytes() const = 0;
  // For tasks of so many panels.
  virtual void reserve(const AttentionCall& call, Index panels, int workers) = 0;
  // Ranges that the keys of sequence b are attended to in: as many parts may they be cut into.
  virtual Index ranges(const AttentionCall& call, Index b) const = 0;
  // Panels [first, first + count) of a head, over all keys; writes the call's output.
  virtual void run(const KeySequence& keys, Index first, Index count, HeadScratch& scratch,
                   int worker) = 0;
  // All `panels` of a head, over these ranges; leaves what is seen of them in `to`.
  virtual void run_part(const KeySequence& keys, Index panels, const KeyRange& ranges,
                        bool with_sinks, const PartialRows& to, HeadScratch& scratch,
                        int worker) = 0;
};

// Of a call whose queries have keys of their own.
inline std::unique_ptr<ListedWork> listed_work_of([[maybe_unused]] const AttentionCall& call) {
#if defined(QUOKA_COMPILED)
  return make_listed_work();
#else
  return (call.lists != nullptr ? call.lists->make_work() : call.mask->make_work())();
#endif
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
