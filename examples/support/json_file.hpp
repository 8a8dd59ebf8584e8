// Results as a JSON file.
#pragma once

#include <nlohmann/json.hpp>

#include <string>

namespace quoka_examples {

// A result's settings, a member a line, then its arrays of records, a record a line: what a reader
// scrolls through and a diff shows.
std::string one_record_a_line(const nlohmann::json& json);

// Replaces the file once the new one is complete, so a run that is cut short leaves a file to
// continue with. Throws std::runtime_error where it cannot be written.
void write_json(const std::string& path, const nlohmann::json& json);

}  // namespace quoka_examples
