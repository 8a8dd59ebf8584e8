// How the ranks of a sharded layer talk to each other. MPI: mpi_communicator.hpp. Threads of one
// process: thread_ranks.hpp.
#pragma once

#include <cstddef>
#include <span>

namespace quoka_examples {

class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;  // of this process, in [0, ranks())
  virtual int ranks() const = 0;
  // all [ranks() * mine.size()]: every rank's `mine`, in the order of the ranks. `mine` may lie in
  // its place there, on all ranks or on none. Collective: every rank makes the same calls in the
  // same order, from one thread at a time.
  virtual void allgather(std::span<const std::byte> mine, std::span<std::byte> all) = 0;
};

// The same of numbers.
template <class T>
void allgather(Communicator& ranks, std::span<const T> mine, std::span<T> all) {
  ranks.allgather(std::as_bytes(mine), std::as_writable_bytes(all));
}

}  // namespace quoka_examples
