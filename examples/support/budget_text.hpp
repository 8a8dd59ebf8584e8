// Budgets by scores as text, the same on command lines and in files.
#pragma once

#include <quoka/select/options.hpp>

#include <charconv>
#include <string>
#include <system_error>
#include <vector>

namespace quoka_examples {

using quoka::Index;

inline constexpr Index most_keys = 1'000'000'000;  // that a flag may ask for

// True if all of the text is one number of that type: no sign but '-', no spaces, no suffix.
template <class Number>
bool read_number(const std::string& text, Number& number) {
  const char* const end = text.data() + text.size();
  const auto [stopped, error] = std::from_chars(text.data(), end, number);
  return error == std::errc() && stopped == end;
}

// "mass:0.95" or "relative:0.1", and a floor and a ceiling in keys after it if wanted:
// "mass:0.95:64:4096". False if the text is none.
inline bool read_budget_by_scores(const std::string& text, quoka::Budget& budget) {
  std::vector<std::string> parts(1);
  for (const char c : text)
    if (c == ':')
      parts.emplace_back();
    else
      parts.back() += c;
  double threshold = 0.0;
  Index floor = 1, ceiling = most_keys;
  if (parts.size() < 2 || parts.size() > 4 || !read_number(parts[1], threshold) ||
      (parts.size() > 2 && !read_number(parts[2], floor)) ||
      (parts.size() > 3 && !read_number(parts[3], ceiling)) || floor < 1 || ceiling < floor ||
      ceiling > most_keys || !(threshold > 0.0 && threshold <= 1.0))
    return false;
  if (parts[0] == "mass")
    budget = quoka::Budget::mass(threshold, floor, ceiling);
  else if (parts[0] == "relative")
    budget = quoka::Budget::relative(threshold, floor, ceiling);
  return parts[0] == "mass" || parts[0] == "relative";
}

}  // namespace quoka_examples
