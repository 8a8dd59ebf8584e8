// Scratch memory of a parallel call: one part per worker of the executor, or per slot of a HeadPlan.
//
// Parts are sized before the tasks start and for every worker, whichever of them will run a task,
// so no task allocates (except where at_least() says so) and a repeated call allocates nothing. A Part
// has reserve(sizes...) and bytes(). Not to be shared by concurrent calls.
#pragma once

#include <quoka/base/index.hpp>

#include <vector>

namespace quoka {
inline namespace QUOKA_ABI {

template <class Part>
class WorkerScratch {
 public:
  WorkerScratch() = default;
  // Takes the memory over; the other one is then empty.
  WorkerScratch(WorkerScratch&&) = default;
  // Takes the memory over; the other one is then empty.
  WorkerScratch& operator=(WorkerScratch&&) = default;

  // At least `workers` parts, each of them with part.reserve(sizes...).
  template <class... Sizes>
  void reserve(Index workers, const Sizes&... sizes) {
    at_least(workers);
    for (Part& part : parts_) part.reserve(sizes...);
  }
  // As many without memory: parts for which a task reserves it, where that is seldom needed.
  void at_least(Index workers) {
    if (workers > std::ssize(parts_)) parts_.resize(static_cast<std::size_t>(workers));
  }
  // That of one worker.
  Part& operator[](Index worker) { return parts_[static_cast<std::size_t>(worker)]; }
  // Bytes of all parts.
  Index bytes() const {
    Index sum = 0;
    for (const Part& part : parts_) sum += part.bytes();
    return sum;
  }
  auto begin() { return parts_.begin(); }  // the first part
  auto end() { return parts_.end(); }      // behind the last one

 private:
  std::vector<Part> parts_;
};

}  // namespace QUOKA_ABI
}  // namespace quoka
