// Ranks that are threads of one process: each thread takes the communicator of its rank. For tests, and
// for one rank per socket without MPI.
//
//   ThreadRanks ranks(2);
//   std::thread other([&] { work(ranks.communicator(1)); });
//   work(ranks.communicator(0));
//
// Ranks hand each other the addresses of their buffers, wait for all, copy, and wait again. Who waits
// longer than `limit` throws std::runtime_error, and so do all others from then on: a rank that never
// comes is no deadlock.
#pragma once

#include <quoka/distributed/communicator.hpp>
#include <quoka/base/check.hpp>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <vector>

namespace quoka {
inline namespace QUOKA_ABI {

// Makes the communicators of all ranks: communicator(rank).
class ThreadRanks {
 public:
  using Limit = std::chrono::milliseconds;  // how long a rank waits for the others

  // That of one rank. It refers to its ThreadRanks, which must outlive it.
  class Communicator {
   public:
    int rank() const { return rank_; }
    int ranks() const { return ranks_->count_; }

    void allgather(std::span<const std::byte> mine, std::span<std::byte> all) const {
      ranks_->meet(rank_, mine.data(), [&](const std::vector<const void*>& buffers) {
        for (std::size_t i = 0; i < buffers.size(); ++i) {
          std::byte* const to = all.data() + i * mine.size();
          if (buffers[i] != to)
            std::copy_n(static_cast<const std::byte*>(buffers[i]), mine.size(), to);
        }
      });
    }
    void allreduce_max(std::span<float> x) const {
      reduce(x, [](float a, float b) { return a < b ? b : a; });
    }
    void allreduce_sum(std::span<std::int64_t> x) const {
      reduce(x, [](std::int64_t a, std::int64_t b) { return a + b; });
    }
    void broadcast(std::span<std::byte> x, int root) const {
      ranks_->meet(rank_, x.data(), [&](const std::vector<const void*>& buffers) {
        if (rank_ != root)
          std::copy_n(static_cast<const std::byte*>(buffers[static_cast<std::size_t>(root)]),
                      x.size(), x.data());
      });
    }
    // Collective here: all ranks call it at once, each rank is sent to by one.
    void sendrecv(std::span<const std::byte> to_send, int, std::span<std::byte> to_receive,
                  int from) const {
      ranks_->meet(rank_, to_send.data(), [&](const std::vector<const void*>& buffers) {
        std::copy_n(static_cast<const std::byte*>(buffers[static_cast<std::size_t>(from)]),
                    to_receive.size(), to_receive.data());
      });
    }

   private:
    friend class ThreadRanks;
    Communicator(ThreadRanks& ranks, int rank) : ranks_(&ranks), rank_(rank) {}

    template <class T, class Op>
    void reduce(std::span<T> x, Op op) const {
      std::vector<T> result(x.begin(), x.end());
      ranks_->meet(rank_, x.data(), [&](const std::vector<const void*>& buffers) {
        for (const void* const other : buffers)
          if (other != x.data())
            for (std::size_t i = 0; i < x.size(); ++i)
              result[i] = op(result[i], static_cast<const T*>(other)[i]);
      });
      std::copy(result.begin(), result.end(), x.begin());
    }

    ThreadRanks* ranks_;
    int rank_;
  };

  // Throws std::invalid_argument for fewer than one rank and a negative limit. A limit of 0: none.
  explicit ThreadRanks(int ranks, Limit limit = Limit(0)) : count_(ranks), limit_(limit) {
    detail::require_at_least("ranks", ranks, 1);
    detail::require_at_least("the limit in milliseconds", static_cast<Index>(limit.count()), 0);
    data_.resize(static_cast<std::size_t>(ranks));
  }

  // Throws std::invalid_argument for a rank that there is not.
  Communicator communicator(int rank) {
    detail::require_at_least("rank", rank, 0);
    detail::require_at_most("rank", rank, "the last", count_ - 1);
    return {*this, rank};
  }

 private:
  // use(everyone's data), while everyone is here.
  template <class F>
  void meet(int rank, const void* data, F&& use) {
    data_[static_cast<std::size_t>(rank)] = data;
    wait();
    use(data_);
    wait();
  }

  void wait() {
    std::unique_lock lock(mutex_);
    if (broken_) fail();
    const std::uint64_t turn = turn_;
    if (++here_ == count_) {
      here_ = 0, ++turn_;
      all_here_.notify_all();
      return;
    }
    const auto passed = [&] { return turn_ != turn || broken_; };
    if (limit_ == Limit(0))
      all_here_.wait(lock, passed);
    else if (!all_here_.wait_for(lock, limit_, passed))
      came_ = std::max(came_, here_), broken_ = true, all_here_.notify_all();
    if (turn_ == turn) fail();
  }
  [[noreturn]] void fail() const {
    char message[128];
    std::snprintf(message, sizeof message, "quoka: %d of %d ranks came within the limit of %td ms",
                  came_, count_, static_cast<Index>(limit_.count()));
    throw std::runtime_error(message);
  }

  int count_;
  Limit limit_;
  std::mutex mutex_;
  std::condition_variable all_here_;
  int here_ = 0;
  int came_ = 0;  // of the meeting that failed
  std::uint64_t turn_ = 0;
  bool broken_ = false;
  std::vector<const void*> data_;  // of each rank, between two waits
};

static_assert(Communicator<ThreadRanks::Communicator>);

}  // namespace QUOKA_ABI
}  // namespace quoka
