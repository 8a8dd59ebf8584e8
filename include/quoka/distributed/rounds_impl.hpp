// Definitions of rounds.hpp.
#pragma once

#include <quoka/distributed/rounds.hpp>

#include <cstdio>
#include <cstring>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// FNV-1a.
QUOKA_FUNC std::int64_t number_of(const char* text) {
  std::uint64_t hash = 14695981039346656037u;
  for (; *text != '\0'; ++text) hash = (hash ^ static_cast<unsigned char>(*text)) * 1099511628211u;
  return static_cast<std::int64_t>(hash);
}

QUOKA_FUNC Rounds::Rounds(CommunicatorRef communicator) : communicator_(communicator) {
  headers_.reserve(communicator.ranks());
}

QUOKA_FUNC void Rounds::gather(const Header& mine) {
  exchange([&](const CommunicatorRef& c) {
    c.allgather(
        std::as_bytes(std::span(&mine, 1)),
        std::as_writable_bytes(std::span(headers_.data(), static_cast<std::size_t>(c.ranks()))));
  });
  for (int rank = 0; rank < ranks(); ++rank) {
    if (headers_.data()[rank].failed == 0) continue;
    std::array<char, text_bytes> text{};
    if (rank == this->rank()) return;  // report() has the text
    exchange([&](const CommunicatorRef& c) {
      c.broadcast(std::as_writable_bytes(std::span(text)), rank);
    });
    fail(rank, text.data());
  }
}

QUOKA_FUNC void Rounds::fail(int rank, const char* text) {
  char message[text_bytes + 64];
  const bool ours = std::strncmp(text, "quoka: ", 7) == 0;
  std::snprintf(message, sizeof message, "quoka: rank %d: %s", rank, text + (ours ? 7 : 0));
  throw RankError(rank, message);
}

// This rank failed: says so in the round that the others come to, whichever it is.
QUOKA_FUNC void Rounds::report(const char* text) {
  Header mine;
  mine.failed = 1;
  gather(mine);  // throws where a lower rank failed as well
  std::array<char, text_bytes> bytes{};
  std::strncpy(bytes.data(), text, text_bytes - 1);
  exchange([&](const CommunicatorRef& c) {
    c.broadcast(std::as_writable_bytes(std::span(bytes)), rank());
  });
  fail(rank(), bytes.data());
}

QUOKA_FUNC void Rounds::agree(const char* step, std::initializer_list<Named> numbers) {
  Header mine;
  mine.step = number_of(step);
  std::size_t i = 0;
  for (const Named& number : numbers) mine.values[i++] = number.value;
  gather(mine);
  const Header* const all = headers_.data();
  for (int rank = 1; rank < ranks(); ++rank)
    if (all[rank].step != all[0].step) fail(rank, "it is at another step than rank 0");
  for (int rank = 1; rank < ranks(); ++rank) {
    i = 0;
    for (const Named& number : numbers) {
      const std::int64_t there = all[rank].values[i], first = all[0].values[i];
      ++i;
      if (there == first) continue;
      char text[text_bytes];
      std::snprintf(text, sizeof text, "%s is %lld, but %lld on rank 0", number.name,
                    static_cast<long long>(there), static_cast<long long>(first));
      fail(rank, text);
    }
  }
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
