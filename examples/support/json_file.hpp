// Results as a JSON file.
#pragma once

#include <nlohmann/json.hpp>

#include <fstream>
#include <stdexcept>
#include <string>

namespace quoka_examples {

// Throws std::runtime_error where the file cannot be written whole.
inline void write_json(const std::string& path, const nlohmann::json& json) {
  std::ofstream file(path);
  file << json.dump(1) << '\n';
  file.close();
  if (!file) throw std::runtime_error("could not write " + path);
}

}  // namespace quoka_examples
