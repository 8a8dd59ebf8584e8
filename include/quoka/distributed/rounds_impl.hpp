// Definitions of rounds.hpp.
#pragma once

#include <quoka/distributed/rounds.hpp>
#include <quoka/base/check.hpp>
#include <quoka/base/hash.hpp>

#include <algorithm>
#include <cstdio>
#include <cstring>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

QUOKA_FUNC void Settings::add(const Named& setting) {
  const auto extended = [](std::int64_t hash, std::int64_t by) {
    const std::array both{hash, by};
    return hash_of(std::as_bytes(std::span(both)));
  };
  const std::int64_t name = hash_of(setting.name);
  hash_of_names_ = extended(hash_of_names_, name);
  hash_ = extended(extended(hash_, name), setting.bits);
  require_at_most("the number of settings", std::ssize(names_) + 1, "the most",
                  static_cast<Index>(most));
  names_.emplace_back(setting.name);
  numbers_.push_back(setting);
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

QUOKA_FUNC void Rounds::agree(const char* step, std::initializer_list<Named> numbers,
                              const Settings* settings) {
  gather(step, {numbers.begin(), numbers.size()}, settings);
  const Header* const all = headers_.data();
  for (int rank = 1; rank < ranks(); ++rank)
    if (all[rank].step != all[0].step) fail(rank, "it is at another step than rank 0");
  compare({numbers.begin(), numbers.size()});
  for (int rank = 1; rank < ranks(); ++rank)
    if (all[rank].settings != all[0].settings) compare_settings(*settings);
}

QUOKA_FUNC void Rounds::gather(const char* step, std::span<const Named> numbers,
                               const Settings* settings) {
  Header mine;
  mine.step = hash_of(step);
  if (settings != nullptr) mine.settings = settings->hash();
  std::transform(numbers.begin(), numbers.end(), mine.values.begin(),
                 [](const Named& number) { return number.bits; });
  gather(mine);
}

// Of the headers that were gathered.
QUOKA_FUNC void Rounds::compare(std::span<const Named> numbers) {
  const Header* const all = headers_.data();
  for (int rank = 1; rank < ranks(); ++rank) {
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      const std::int64_t there = all[rank].values[i], first = all[0].values[i];
      if (there == first) continue;
      char text[text_bytes];
      if (numbers[i].is_real)
        std::snprintf(text, sizeof text, "%s is %.9g, but %.9g on rank 0", numbers[i].name,
                      std::bit_cast<double>(there), std::bit_cast<double>(first));
      else
        std::snprintf(text, sizeof text, "%s is %lld, but %lld on rank 0", numbers[i].name,
                      static_cast<long long>(there), static_cast<long long>(first));
      fail(rank, text);
    }
  }
}

// All ranks have seen that a hash differs, and come here: as many rounds on each, however many settings
// it has.
QUOKA_FUNC void Rounds::compare_settings(const Settings& settings) {
  int other = 0;  // the first rank that differs
  while (headers_.data()[other].settings == headers_.data()[0].settings) ++other;
  std::array<Named, Settings::most> list;
  list.fill(Named("a setting", 0));
  for (std::size_t i = 0; i < settings.size(); ++i) list[i] = settings[i];
  // Names first: the numbers of other methods are not comparable.
  gather("names", std::array{Named("the hash of the names", settings.hash_of_names())}, nullptr);
  for (int rank = 1; rank < ranks(); ++rank)
    if (headers_.data()[rank].values[0] != headers_.data()[0].values[0])
      fail(rank, "it was made with another method than rank 0");
  for (std::size_t first = 0; first < list.size(); first += max_numbers) {
    const auto part = std::span(list).subspan(first, std::min(max_numbers, list.size() - first));
    gather("settings", part, nullptr);
    compare(part);
  }
  fail(other, "its settings differ from those of rank 0");
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
