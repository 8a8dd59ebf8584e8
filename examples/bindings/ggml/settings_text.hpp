// Settings as text: a variable's name and value, and a mode with other settings as the programs
// here take it: "exact", "exact:arithmetic=bf16", "balanced:threads=1:sketch=0".
#pragma once

#include "support/budget_text.hpp"

#include <nlohmann/json.hpp>

#include <cctype>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace quoka_ggml {

// "min_past" gives "QUOKA_MIN_PAST".
inline std::string variable_of(std::string key) {
  for (char& c : key) c = static_cast<char>(std::toupper(c));
  return "QUOKA_" + key;
}
// The value of a variable: JSON, a number that begins or ends with its point, or else the text
// itself.
inline nlohmann::json value_of(const std::string& text) {
  nlohmann::json value = nlohmann::json::parse(text, nullptr, false);
  if (!value.is_discarded()) return value;
  double number = 0;
  const bool is_number = text.find_first_not_of("0123456789.") == text.npos &&
                         quoka_examples::read_number(text, number);
  return is_number && text.find('.') != text.npos ? nlohmann::json(number) : nlohmann::json(text);
}

// Settings, "mode" among them. Throws std::invalid_argument for a part that is not KEY=VALUE; keys
// and values are the backend's to refuse.
inline nlohmann::json settings_of_mode(const std::string& text) {
  std::size_t end = text.find(':');
  nlohmann::json all{{"mode", text.substr(0, end)}};
  while (end != text.npos) {
    const std::size_t begin = end + 1;
    end = text.find(':', begin);
    const std::string part = text.substr(begin, end == text.npos ? end : end - begin);
    const std::size_t equals = part.find('=');
    if (equals == part.npos)
      throw std::invalid_argument(text + ": " + part + " is not SETTING=VALUE");
    all[part.substr(0, equals)] = value_of(part.substr(equals + 1));
  }
  return all;
}

// Modes with commas between them; those inside brackets are a list's:
// "paper,balanced:dense_layers=[0,7]" is two.
inline std::vector<std::string> modes_of(std::string_view text) {
  std::vector<std::string> all{""};
  int open = 0;
  for (const char c : text) {
    open += c == '[' ? 1 : c == ']' ? -1 : 0;
    if (c == ',' && open <= 0)
      all.emplace_back();
    else
      all.back() += c;
  }
  return all;
}

// For this process, until clear_variables() of the same.
inline void set_variables(const nlohmann::json& settings) {
  for (const auto& [key, value] : settings.items())
    setenv(variable_of(key).c_str(),
           (value.is_string() ? value.get<std::string>() : value.dump()).c_str(), 1);
}
inline void clear_variables(const nlohmann::json& settings) {
  for (const auto& one : settings.items()) unsetenv(variable_of(one.key()).c_str());
}

}  // namespace quoka_ggml
