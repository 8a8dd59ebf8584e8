// How the ranks of a sharded layer talk to each other: the few operations that MPI has under the same
// names. The library brings ranks that are threads (thread_communicator.hpp); a caller's own plugs in by
// these members:
//
//   struct MyCommunicator {
//     int rank() const;    // of this process, in [0, ranks())
//     int ranks() const;
//     // all [ranks() * mine.size()]: every rank's `mine`, in the order of the ranks; `mine` may lie in its place
//     // there, on all of them or on none (MPI_IN_PLACE)
//     void allgather(std::span<const std::byte> mine, std::span<std::byte> all);
//     // in place, element by element over the ranks
//     void allreduce_max(std::span<float> x);
//     void allreduce_sum(std::span<std::int64_t> x);
//     // `root`'s bytes to all
//     void broadcast(std::span<std::byte> x, int root);
//     // to one rank while another sends; either may be empty
//     void sendrecv(std::span<const std::byte> to_send, int to, std::span<std::byte> to_receive, int from);
//   };
//
// All of them are collective: every rank makes the same calls in the same order, from one thread at a
// time. The library never calls them from an executor's tasks. A failure of the network is theirs to
// throw; the layer passes it on and says nothing more to the other ranks.
#pragma once

#include <quoka/base/index.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace quoka {
inline namespace QUOKA_ABI {

// What a communicator has: as MyCommunicator at the top of communicator.hpp.
template <class C>
concept Communicator = requires(std::remove_reference_t<C>& c, std::span<const std::byte> from,
                                std::span<std::byte> to, std::span<float> floats,
                                std::span<std::int64_t> integers, int rank) {
  { c.rank() } -> std::convertible_to<int>;
  { c.ranks() } -> std::convertible_to<int>;
  c.allgather(from, to);
  c.allreduce_max(floats);
  c.allreduce_sum(integers);
  c.broadcast(to, rank);
  c.sendrecv(from, rank, to, rank);
};

// A call that failed on one rank has failed on all: each of them throws this, with the same rank and the
// same text.
class RankError : public std::runtime_error {
 public:
  // Thrown by the library.
  RankError(int rank, const std::string& text) : std::runtime_error(text), rank_(rank) {}
  int rank() const { return rank_; }  // the rank that failed

 private:
  int rank_;
};

// A communicator of any type, borrowed: it must outlive who holds this. Itself a Communicator.
class CommunicatorRef {
 public:
  // Of this communicator.
  template <Communicator C>
  CommunicatorRef(C& communicator) requires(!std::same_as<std::remove_cv_t<C>, CommunicatorRef>)
      : communicator_(const_cast<void*>(static_cast<const void*>(std::addressof(communicator)))),
        operations_(&operations_of<C>),
        rank_(communicator.rank()),
        ranks_(communicator.ranks()) {}

  int rank() const { return rank_; }
  int ranks() const { return ranks_; }
  void allgather(std::span<const std::byte> mine, std::span<std::byte> all) const {
    operations_->allgather(communicator_, mine, all);
  }
  void allreduce_max(std::span<float> x) const { operations_->allreduce_max(communicator_, x); }
  void allreduce_sum(std::span<std::int64_t> x) const {
    operations_->allreduce_sum(communicator_, x);
  }
  void broadcast(std::span<std::byte> x, int root) const {
    operations_->broadcast(communicator_, x, root);
  }
  // The Communicator concept says what it does.
  void sendrecv(std::span<const std::byte> to_send, int to, std::span<std::byte> to_receive,
                int from) const {
    operations_->sendrecv(communicator_, to_send, to, to_receive, from);
  }

 private:
  using Sent = std::span<const std::byte>;
  using Received = std::span<std::byte>;
  struct Operations {
    void (*allgather)(void*, Sent, Received);
    void (*allreduce_max)(void*, std::span<float>);
    void (*allreduce_sum)(void*, std::span<std::int64_t>);
    void (*broadcast)(void*, Received, int);
    void (*sendrecv)(void*, Sent, int, Received, int);
  };
  template <class C>
  static constexpr Operations operations_of = {
      [](void* c, Sent mine, Received all) { static_cast<C*>(c)->allgather(mine, all); },
      [](void* c, std::span<float> x) { static_cast<C*>(c)->allreduce_max(x); },
      [](void* c, std::span<std::int64_t> x) { static_cast<C*>(c)->allreduce_sum(x); },
      [](void* c, Received x, int root) { static_cast<C*>(c)->broadcast(x, root); },
      [](void* c, Sent sent, int to, Received received, int from) {
        static_cast<C*>(c)->sendrecv(sent, to, received, from);
      }};

  void* communicator_;
  const Operations* operations_;
  int rank_, ranks_;
};

static_assert(Communicator<const CommunicatorRef>);

}  // namespace QUOKA_ABI
}  // namespace quoka
