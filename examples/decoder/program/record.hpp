// What runs of many prompts share: their flags, and a results file that a later run goes on with.
#pragma once

#include "decoder/program/common.hpp"

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <vector>

namespace quoka_decoder {

// Prompts of some lengths, drawn from a seed, asked densely and with every selector and budget.
struct GridFlags {
  ModelFlags model;
  std::vector<Index> lengths;
  SelectorList selectors;
  std::uint32_t seed = 1;
  std::string json, command;  // the command line as typed
};

// --lengths, --seed, --dense, --json; those of the model and of the selectors.
inline void add_grid_flags(CLI::App& app, GridFlags& flags) {
  add_model_flags(app, flags.model);
  app.add_option("--lengths", flags.lengths, "prompt lengths in tokens")
      ->delimiter(',')
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--seed", flags.seed, "of the prompts")->capture_default_str();
  app.add_flag("--dense,!--no-dense", flags.selectors.dense, "run dense attention beside them");
  app.add_option("--json", flags.json,
                 "write the results there as they come; those that it holds are not run again");
  add_selector_list(app, flags.selectors);
}

// What the results hang on beside `settings` of a subcommand's own.
inline nlohmann::json run_settings(const ModelFlags& flags) {
  return {{"model", std::filesystem::path(flags.model).filename()},
          {"chunk", flags.chunk},
          {"dense_layers", flags.dense_layers},
          {"policy", flags.policy},
          {"rope_scaling", flags.rope_scaling},
          {"rope_factor", flags.rope_factor}};
}

// commands, machine, build, the settings, and "results": those that the file holds, none where
// there is no file or no path. A file that several commands wrote names all of them. Throws
// std::runtime_error if the file's results have other settings.
inline nlohmann::json open_record(const std::string& path, const std::string& command,
                                  const nlohmann::json& settings) {
  nlohmann::json json{{"commands", {command}},
                      {"cpu", cpu_name()},
                      {"build", build_description()},
                      {"results", nlohmann::json::array()}};
  json.update(settings);
  if (path.empty() || !std::filesystem::exists(path)) return json;
  const auto before = nlohmann::json::parse(read_file(path));
  for (const auto& [key, value] : settings.items())
    if (const auto held = before.value(key, nlohmann::json("")); held != value)
      throw std::runtime_error(path + " holds results with " + key + ' ' + held.dump() + ", not " +
                               value.dump());
  json["results"] = before.at("results");
  nlohmann::json commands = before.value("commands", nlohmann::json::array());
  if (std::find(commands.begin(), commands.end(), command) == commands.end())
    commands.push_back(command);
  json["commands"] = commands;
  return json;
}

}  // namespace quoka_decoder
