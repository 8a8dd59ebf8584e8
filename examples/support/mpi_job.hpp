// This process among those of an MPI job, for programs that run alone as well as under mpirun: all
// processes do the same, the first one prints. Alone, or in a build without MPI, nothing is
// started.
#pragma once

#include "context_parallel/communicator.hpp"
#if defined(QUOKA_EXAMPLES_MPI)
#include "context_parallel/mpi_communicator.hpp"
#endif

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>

namespace quoka_examples {

class MpiJob {
 public:
  // A job of several processes ends, with an error, in a build without MPI: it would be run as many
  // times instead.
  MpiJob([[maybe_unused]] int* argc, [[maybe_unused]] char*** argv) {
    if (!launched()) return;
#if defined(QUOKA_EXAMPLES_MPI)
    session_ = std::make_unique<MpiSession>(argc, argv);
    communicator_ = std::make_unique<MpiCommunicator>();
    rank_ = communicator_->rank(), size_ = communicator_->ranks();
    here_ = communicator_->ranks_here();
    if (size_ > 1) ranks_ = communicator_.get();
    if (!is_first()) be_silent();
#else
    std::fprintf(stderr, "this is one of several processes, and was built without MPI\n");
    std::exit(1);
#endif
  }

  bool is_first() const { return rank_ == 0; }
  int size() const { return size_; }
  // The communicator for sharded layers; null for a process alone.
  Communicator* ranks() const { return ranks_; }
  // The processors of this machine, for each of the processes on it.
  int threads() const {
    return std::max(1, static_cast<int>(std::thread::hardware_concurrency()) / here_);
  }

  // Names an error that ends this process, and the job with it. Returns the exit status.
  int failed(const std::string& program, const std::exception& error) const {
    std::FILE* const to = errors_ != nullptr ? errors_ : stderr;
    std::fprintf(to, "%s: %s\n", program.c_str(), error.what());
    std::fflush(to);
#if defined(QUOKA_EXAMPLES_MPI)
    if (size_ > 1) MPI_Abort(MPI_COMM_WORLD, 1);
#endif
    return 1;
  }

 private:
  // By mpirun or srun, with more processes than this one.
  static bool launched() {
    for (const char* const variable : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS"})
      if (const char* const size = std::getenv(variable); size != nullptr && std::atoi(size) > 1)
        return true;
    return false;
  }
  void be_silent() {
    errors_ = ::fdopen(::dup(STDERR_FILENO), "w");
    if (std::freopen("/dev/null", "w", stdout) == nullptr ||
        std::freopen("/dev/null", "w", stderr) == nullptr)
      throw std::runtime_error("/dev/null cannot be opened");
  }

  int rank_ = 0, size_ = 1, here_ = 1;  // here_: processes on this machine
  Communicator* ranks_ = nullptr;
  std::FILE* errors_ = nullptr;  // of a silent process
#if defined(QUOKA_EXAMPLES_MPI)
  std::unique_ptr<MpiSession> session_;
  std::unique_ptr<MpiCommunicator> communicator_;
#endif
};

}  // namespace quoka_examples
