// Results as a JSON file.
#pragma once

#include <nlohmann/json.hpp>

#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>

namespace quoka_examples {

// In place of what the file held, which stays until the new one is whole: a run that is cut short
// leaves a file to go on with. Throws std::runtime_error where it cannot be written.
inline void write_json(const std::string& path, const nlohmann::json& json) {
  namespace fs = std::filesystem;
  const bool is_file = !fs::exists(path) || fs::is_regular_file(path);  // and not /dev/stdout
  const std::string written = is_file ? path + ".part" : path;
  std::ofstream file(written);
  file << json.dump(1) << '\n';
  file.close();
  if (!file) throw std::runtime_error("could not write " + written);
  if (is_file) fs::rename(written, path);
}

}  // namespace quoka_examples
