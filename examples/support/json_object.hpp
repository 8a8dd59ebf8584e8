// JSON that people write, read to its end.
#pragma once

#include <nlohmann/json.hpp>

#include <set>
#include <stdexcept>
#include <string>
#include <vector>

namespace quoka_examples {

// One JSON object from text. Throws std::invalid_argument, which names `source`, for what is no JSON to its end (and at
// which byte), for no object, and for a member that stands twice in one object.
inline nlohmann::json parse_json_object(const std::string& source, const std::string& text) try {
  std::vector<std::set<std::string>> members;  // of the objects that are open
  const auto look = [&](int, nlohmann::json::parse_event_t event, const nlohmann::json& x) {
    if (event == nlohmann::json::parse_event_t::object_start) members.emplace_back();
    if (event == nlohmann::json::parse_event_t::object_end) members.pop_back();
    if (event == nlohmann::json::parse_event_t::key &&
        !members.back().insert(x.get<std::string>()).second)
      throw std::invalid_argument(source + ": " + x.dump() + " stands there twice");
    return true;
  };
  nlohmann::json all = nlohmann::json::parse(text, look);
  if (!all.is_object()) throw std::invalid_argument(source + " is no JSON object");
  return all;
} catch (const nlohmann::json::parse_error& e) {
  throw std::invalid_argument(source + " is no JSON object: it cannot be read from byte " +
                              std::to_string(e.byte) + " on");
}

}  // namespace quoka_examples
