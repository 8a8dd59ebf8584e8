// Ranks that are threads of one process: each thread takes the communicator of its rank.
//
//   ThreadRanks ranks(2);
//   std::thread other([&] { auto mine = ranks.communicator(1); work(mine); });
//   auto mine = ranks.communicator(0);
//   work(mine);
//   other.join();
//
// Ranks hand each other the addresses of their buffers, wait for all, copy, and wait again.
#pragma once

#include "context_parallel/communicator.hpp"

#include <quoka/base/check.hpp>

#include <algorithm>
#include <barrier>
#include <vector>

namespace quoka_examples {

class ThreadRanks {
 public:
  // It refers to its ThreadRanks, which must outlive it.
  class Rank final : public Communicator {
   public:
    Rank(ThreadRanks& all, int rank) : all_(all), rank_(rank) {}
    int rank() const override { return rank_; }
    int ranks() const override { return static_cast<int>(all_.buffers_.size()); }
    void allgather(std::span<const std::byte> mine, std::span<std::byte> all) override {
      all_.buffers_[static_cast<std::size_t>(rank_)] = mine.data();
      all_.barrier_.arrive_and_wait();
      std::byte* to = all.data();
      for (const std::byte* const from : all_.buffers_) {
        if (from != to) std::copy_n(from, mine.size(), to);
        to += mine.size();
      }
      all_.barrier_.arrive_and_wait();
    }

   private:
    ThreadRanks& all_;
    int rank_;
  };

  // Throws std::invalid_argument for fewer than one rank.
  explicit ThreadRanks(int ranks)
      : barrier_((quoka::detail::require_at_least("ranks", ranks, 1), ranks)),
        buffers_(static_cast<std::size_t>(ranks)) {}
  // Throws std::invalid_argument for a rank that there is not.
  Rank communicator(int rank) {
    quoka::detail::require_at_least("rank", rank, 0);
    quoka::detail::require_at_most("rank", rank, "the last", std::ssize(buffers_) - 1);
    return {*this, rank};
  }

 private:
  std::barrier<> barrier_;
  std::vector<const std::byte*> buffers_;  // of each rank, between two waits
};

}  // namespace quoka_examples
