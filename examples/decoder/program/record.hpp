// A results file that a later run goes on with.
#pragma once

#include "decoder/program/common.hpp"

#include "support/build_info.hpp"

#include <nlohmann/json.hpp>

#include <filesystem>
#include <stdexcept>
#include <string>

namespace quoka_decoder {

// What the results hang on beside `settings` of a subcommand's own.
inline nlohmann::json run_settings(const ModelFlags& flags) {
  return {{"model", std::filesystem::path(flags.model).filename()},
          {"chunk", flags.chunk},
          {"dense_layers", flags.dense_layers},
          {"rope_scaling", flags.rope_scaling},
          {"rope_factor", flags.rope_factor}};
}

// command, machine, build, the settings, and "results": those that the file holds, none where there
// is no file or no path. Throws std::runtime_error if the file's results have other settings.
inline nlohmann::json open_record(const std::string& path, const std::string& command,
                                  const nlohmann::json& settings) {
  nlohmann::json json{{"command", command},
                      {"cpu", quoka_examples::cpu_name()},
                      {"build", quoka_examples::build_description()},
                      {"results", nlohmann::json::array()}};
  json.update(settings);
  if (path.empty() || !std::filesystem::exists(path)) return json;
  const auto before = nlohmann::json::parse(read_file(path));
  for (const auto& [key, value] : settings.items())
    if (before.at(key) != value)
      throw std::runtime_error(path + " holds results with " + key + ' ' + before.at(key).dump() +
                               ", not " + value.dump());
  json["results"] = before.at("results");
  return json;
}

}  // namespace quoka_decoder
