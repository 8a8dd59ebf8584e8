// JSON that people write, read to its end.
#pragma once

#include <nlohmann/json.hpp>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

namespace quoka_examples {

// An object's keys as nlohmann::json::parse() meets them; by itself it keeps the last of equal
// ones, silently. Hand it every event of the parser's callback.
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

// JSON from text. Throws std::invalid_argument, which names `source`, for what is not JSON to its
// end (and at which byte), and for a key that an object has twice.
inline nlohmann::json parse_json(const std::string& source, const std::string& text) try {
  RepeatedKeys is_repeated;
  return nlohmann::json::parse(
      text, [&](int, RepeatedKeys::Event event, const nlohmann::json& parsed) {
        if (is_repeated(event, parsed))
          throw std::invalid_argument(source + ": the key " + parsed.dump() +
                                      " occurs twice in one object");
        return true;
      });
} catch (const nlohmann::json::parse_error& e) {
  throw std::invalid_argument(source + " is not JSON: it cannot be read from byte " +
                              std::to_string(e.byte) + " on");
} catch (const nlohmann::json::exception& e) {  // a number beyond double
  throw std::invalid_argument(source + " is not JSON: " + std::string(e.what()).substr(0, 200));
}

// The same of one object. Throws as above, and for anything else.
inline nlohmann::json parse_json_object(const std::string& source, const std::string& text) {
  nlohmann::json all = parse_json(source, text);
  if (!all.is_object()) throw std::invalid_argument(source + " is not a JSON object");
  return all;
}
// The object in a file. Throws as above, and where there is no such file.
inline nlohmann::json read_json_object(const std::string& path) {
  if (std::filesystem::is_directory(path))
    throw std::invalid_argument(path + " is a folder, but must be a file");
  std::ifstream file(path);
  if (!file) throw std::invalid_argument("cannot read " + path);
  return parse_json_object(path, {std::istreambuf_iterator<char>(file), {}});
}

}  // namespace quoka_examples
