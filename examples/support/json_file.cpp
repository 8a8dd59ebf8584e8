#include "support/json_file.hpp"

#include <filesystem>
#include <fstream>
#include <stdexcept>

namespace quoka_examples {

nlohmann::json parse_json(const std::string& text) try {
  RepeatedKeys is_repeated;
  return nlohmann::json::parse(
      text, [&](int, RepeatedKeys::Event event, const nlohmann::json& parsed) {
        if (is_repeated(event, parsed))
          throw std::invalid_argument("the key " + parsed.dump() + " occurs twice in one object");
        return true;
      });
} catch (const nlohmann::json::exception& error) {
  throw std::invalid_argument("it is not JSON: " + std::string(error.what()).substr(0, 200));
}

std::string one_record_a_line(const nlohmann::json& json) {
  if (!json.is_object() || json.empty()) return json.dump(1);
  const auto is_records = [](const nlohmann::json& x) {
    return x.is_array() && !x.empty() && x.front().is_object();
  };
  std::string settings, records;
  for (const auto& [name, value] : json.items()) {
    std::string key = " ";
    key += nlohmann::json(name).dump() + ": ";
    if (!is_records(value)) {
      settings += key + value.dump() + ",\n";
      continue;
    }
    records += key + "[\n";
    for (const auto& record : value) records += "  " + record.dump() + ",\n";
    records.erase(records.size() - 2, 1);  // the last comma
    records += " ],\n";
  }
  std::string text = "{\n" + settings + records;
  text.erase(text.size() - 2, 1);
  return text + "}";
}

void write_json(const std::string& path, const nlohmann::json& json) {
  namespace fs = std::filesystem;
  const bool is_file = !fs::exists(path) || fs::is_regular_file(path);  // and not /dev/stdout
  const std::string written = is_file ? path + ".part" : path;
  std::ofstream file(written);
  file << one_record_a_line(json) << '\n';
  file.close();
  if (!file) throw std::runtime_error("could not write " + written);
  if (is_file) fs::rename(written, path);
}

}  // namespace quoka_examples
