// MPI as the ranks of a sharded layer. One thread per process calls it.
#pragma once

#include "context_parallel/communicator.hpp"

#include <quoka/base/index.hpp>

#include <mpi.h>

#include <limits>
#include <stdexcept>

namespace quoka_examples {

// MPI for the life of a program.
class MpiSession {
 public:
  MpiSession(int* argc, char*** argv) {
    int provided = 0;
    MPI_Init_thread(argc, argv, MPI_THREAD_FUNNELED, &provided);
  }
  ~MpiSession() { MPI_Finalize(); }
  MpiSession(const MpiSession&) = delete;
  MpiSession& operator=(const MpiSession&) = delete;
};

// Counts what this rank sends. MPI's own errors end the program, as MPI does by default.
class MpiCommunicator final : public Communicator {
 public:
  explicit MpiCommunicator(MPI_Comm comm = MPI_COMM_WORLD) : comm_(comm) {
    MPI_Comm_rank(comm, &rank_);
    MPI_Comm_size(comm, &ranks_);
  }

  int rank() const override { return rank_; }
  int ranks() const override { return ranks_; }
  // Thereof on this machine. Collective.
  int ranks_here() const {
    MPI_Comm here;
    MPI_Comm_split_type(comm_, MPI_COMM_TYPE_SHARED, rank_, MPI_INFO_NULL, &here);
    int count = 0;
    MPI_Comm_size(here, &count);
    MPI_Comm_free(&here);
    return count;
  }

  void allgather(std::span<const std::byte> mine, std::span<std::byte> all) override {
    bytes_ += static_cast<quoka::Index>(mine.size()), ++messages_;
    const int n = in_int(mine.size());
    const bool in_place = mine.data() == all.data() + static_cast<std::size_t>(rank_) * mine.size();
    MPI_Allgather(in_place ? MPI_IN_PLACE : mine.data(), n, MPI_BYTE, all.data(), n, MPI_BYTE,
                  comm_);
  }

  quoka::Index bytes() const { return bytes_; }
  quoka::Index messages() const { return messages_; }

 private:
  // MPI counts in int.
  static int in_int(std::size_t n) {
    if (n > static_cast<std::size_t>(std::numeric_limits<int>::max()))
      throw std::length_error("a message of more than 2^31 - 1 elements");
    return static_cast<int>(n);
  }

  MPI_Comm comm_;
  int rank_ = 0, ranks_ = 1;
  quoka::Index bytes_ = 0, messages_ = 0;
};

}  // namespace quoka_examples
