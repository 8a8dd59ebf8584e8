// Scratch memory of a parallel call: one part per worker of the executor.
//
// Parts are sized before the tasks start and for every worker, whichever of them will run a task,
// so no task allocates and a repeated call allocates nothing. A Part has reserve(sizes...) and
// bytes(). Not to be shared by concurrent calls.
#pragma once

#include <quoka/views/index.hpp>

#include <algorithm>
#include <vector>

namespace quoka {
inline namespace QUOKA_ABI {

template <class Part>
class WorkerScratch {
 public:
  template <class... Sizes>
  void reserve(int workers, const Sizes&... sizes) {
    parts_.resize(std::max(parts_.size(), static_cast<std::size_t>(workers)));
    for (Part& part : parts_) part.reserve(sizes...);
  }
  Part& operator[](int worker) { return parts_[static_cast<std::size_t>(worker)]; }
  Index bytes() const {
    Index sum = 0;
    for (const Part& part : parts_) sum += part.bytes();
    return sum;
  }

 private:
  std::vector<Part> parts_;
};

}  // namespace QUOKA_ABI
}  // namespace quoka
