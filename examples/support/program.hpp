// A program that measures: its command line, and what it leaves as JSON.
#pragma once

#include "support/build_info.hpp"
#include "support/json_file.hpp"

#include <CLI/CLI.hpp>

#include <exception>
#include <filesystem>
#include <iostream>
#include <string>
#include <utility>

namespace quoka_examples {

// Results as JSON: who measured ("command", "cpu", "build"), settings, and arrays of records.
// Written where --json says, if it is given.
class Report {
 public:
  Report() = default;
  explicit Report(const std::string& command)
      : json_{{"command", command}, {"cpu", cpu_name()}, {"build", build_description()}} {}

  void add_flag(CLI::App& app) { app.add_option("--json", path_, "write the results there too"); }
  // Members beside those that are there.
  void add(const nlohmann::json& members) { json_.update(members); }
  nlohmann::json& operator[](const std::string& member) { return json_[member]; }
  // Another process writes it.
  void discard() { path_.clear(); }
  // Throws std::runtime_error where the file cannot be written.
  void write() const {
    if (!path_.empty()) write_json(path_, json_);
  }

 private:
  nlohmann::json json_;
  std::string path_;
};

// Throws CLI::ValidationError for a list with nothing before, between or behind its commas: CLI11
// reads "512," as one item, in silence.
inline void refuse_empty_items(const CLI::App& app, int argc, const char* const* argv) {
  for (const CLI::Option* const option : app.get_options())
    for (int i = 1; i < argc && option->get_delimiter() == ','; ++i)
      for (const std::string& name : option->get_lnames()) {
        const std::string flag = "--" + name, text = argv[i];
        const std::string list = text.starts_with(flag + "=")   ? text.substr(flag.size() + 1)
                                 : text == flag && i + 1 < argc ? argv[i + 1]
                                                                : "no list";
        if (list.empty() || list.front() == ',' || list.back() == ',' ||
            list.find(",,") != list.npos)
          throw CLI::ValidationError(flag, "an item of " + list + " is empty");
      }
  for (const CLI::App* const command : app.get_subcommands())
    refuse_empty_items(*command, argc, argv);
}

// A program with one command. Options are CLI11's.
class Program : public CLI::App {
 public:
  Program(int argc, char** argv, const std::string& description)
      : CLI::App(description), report(command_line(argc, argv)), argc_(argc), argv_(argv) {}

  // body() once the command line is parsed: its value is the exit status. Then the report is
  // written.
  // --help and a bad command line are answered by CLI11; failed(program, error) says what else is
  // thrown.
  template <class Run, class Failed>
  int run(Run&& body, Failed&& failed) {
    report.add_flag(*this);
    try {
      parse(argc_, argv_);
      refuse_empty_items(*this, argc_, argv_);
    } catch (const CLI::ParseError& error) {
      return exit(error);
    }
    try {
      const int status = body();
      report.write();
      return status;
    } catch (const std::exception& error) {
      return failed(std::filesystem::path(argv_[0]).filename().string(), error);
    }
  }
  // Names the error on stderr; the status is 1.
  template <class Run>
  int run(Run&& body) {
    return run(std::forward<Run>(body), [](const std::string& name, const std::exception& error) {
      std::cerr << name << ": " << error.what() << '\n';
      return 1;
    });
  }

  Report report;

 private:
  int argc_;
  char** argv_;
};

}  // namespace quoka_examples
