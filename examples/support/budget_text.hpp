// Budgets as text and as numbers of a file, the same on command lines and in files.
//
//   1024               a count of keys, at least 16
//   0.25               with a point: a share of the past, (0, 1]; 1.0 is all of it
//
// Smaller counts are refused: 1 may mean one key or the whole past, and a few keys lose nearly
// every answer. budget.py says the same to scripts.
#pragma once

#include <quoka/select/options.hpp>

#include <charconv>
#include <concepts>
#include <optional>
#include <string>
#include <system_error>

namespace quoka_examples {

using quoka::Index;

inline constexpr Index least_keys = 16, most_keys = 1'000'000'000;  // that a flag may ask for

// True if all of the text is one number of that type: no sign but '-', no spaces, no suffix.
template <class Number>
bool read_number(const std::string& text, Number& number) {
  const char* const end = text.data() + text.size();
  const auto [stopped, error] = std::from_chars(text.data(), end, number);
  return error == std::errc() && stopped == end;
}

// The rule for budgets, in words.
inline std::string budget_rules() {
  return "a count of keys from " + std::to_string(least_keys) + " to " + std::to_string(most_keys) +
         ", or with a point a share of the past in (0, 1], such as 0.25, or 1.0 for all of it";
}

// Nothing if out of range.
inline std::optional<quoka::Budget> count_budget(Index keys) {
  if (keys < least_keys || keys > most_keys) return std::nullopt;
  return quoka::Budget::keys(keys);
}
// Nothing if out of range.
template <std::floating_point F>
std::optional<quoka::Budget> share_budget(F share) {
  if (!(share > F(0) && share <= F(1))) return std::nullopt;
  return quoka::Budget::share(share);
}

// Any of the forms above; nothing for other texts.
inline std::optional<quoka::Budget> read_budget(const std::string& text) {
  Index count = 0;
  double share = 0.0;
  if (text.find('.') == std::string::npos)
    return read_number(text, count) ? count_budget(count) : std::nullopt;
  return read_number(text, share) ? share_budget(share) : std::nullopt;
}

}  // namespace quoka_examples
