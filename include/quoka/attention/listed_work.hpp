// Attention where each query has keys of its own, as far as the tasks of a call know it: what is behind it is compiled
// where a caller has lists, and nowhere else (views/own_keys.hpp).
#pragma once

#include <quoka/attention/attend_panels.hpp>
#include <quoka/attention/join_rows.hpp>

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
  // As so many parts.
  Index parts(const AttentionCall& call, Index b) const {
    return std::clamp<Index>(ranges(call, b), 1, tuning::max_parts);
  }
  // Panels [first, first + count) of head b * kv_heads + kv_head over all keys, to the call's output. Where the call's
  // heads are in parts, all panels over part `part`, to `partials`.
  virtual void attend(const AttentionCall& call, Index head, Index first, Index count, Index part,
                      const Partials& partials, Arena arena, int worker) = 0;
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
