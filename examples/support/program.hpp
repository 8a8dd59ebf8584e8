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

// Results as JSON: who measured ("command", "cpu", "build"), settings, and arrays of records. Written
// where --json says, if it is given.
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

// A program with one command. Options are CLI11's.
class Program : public CLI::App {
 public:
  Program(int argc, char** argv, const std::string& description)
      : CLI::App(description), report(command_line(argc, argv)), argc_(argc), argv_(argv) {}

  // body() once the command line is parsed: its value is the exit status. Then the report is written.
  // --help and a bad command line are answered by CLI11; failed(program, error) says what else is thrown.
  template <class Run, class Failed>
  int run(Run&& body, Failed&& failed) {
    report.add_flag(*this);
    CLI11_PARSE(*this, argc_, argv_);
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
