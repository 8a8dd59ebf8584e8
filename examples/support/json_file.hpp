// Results as a JSON file.
#pragma once

#include <nlohmann/json.hpp>

#include <set>
#include <string>
#include <vector>

namespace quoka_examples {

// An object's keys as nlohmann::json::parse() meets them; by itself it keeps the last of equal ones, silently.
// Hand it every event of the parser's callback.
class RepeatedKeys {
 public:
  using Event = nlohmann::json::parse_event_t;
  // Is this a key that the object has already?
  bool operator()(Event event, const nlohmann::json& parsed) {
    if (event == Event::object_start) keys_.emplace_back();
    if (event == Event::object_end) keys_.pop_back();
    return event == Event::key && !keys_.back().insert(parsed.get<std::string>()).second;
  }

 private:
  std::vector<std::set<std::string>> keys_;  // of every object that is open
};

// Throws std::invalid_argument where a text is not JSON, and for a key that an object has twice.
nlohmann::json parse_json(const std::string& text);

// A result's settings, a member a line, then its arrays of records, a record a line: what a reader
// scrolls through and a diff shows.
std::string one_record_a_line(const nlohmann::json& json);

// In place of what the file held, which stays until the new one is whole: a run that is cut short
// leaves a file to go on with. Throws std::runtime_error where it cannot be written.
void write_json(const std::string& path, const nlohmann::json& json);

}  // namespace quoka_examples
