// main() of a program with one command.
#pragma once

#include <CLI/CLI.hpp>

#include <exception>
#include <filesystem>
#include <iostream>

namespace quoka_examples {

// run() once the command line is parsed: its value is the exit status. --help and a bad command line
// are answered by CLI11; anything that is thrown is named on stderr, with the program, and is 1.
template <class Run>
int run_program(CLI::App& app, int argc, char** argv, Run&& run) {
  CLI11_PARSE(app, argc, argv);
  try {
    return run();
  } catch (const std::exception& error) {
    std::cerr << std::filesystem::path(argv[0]).filename().string() << ": " << error.what() << '\n';
    return 1;
  }
}

// The same, for a program that may be one of several processes: an MpiJob.
template <class Job, class Run>
int run_program(CLI::App& app, int argc, char** argv, const Job& job, Run&& run) {
  CLI11_PARSE(app, argc, argv);
  try {
    return run();
  } catch (const std::exception& error) {
    return job.failed(std::filesystem::path(argv[0]).filename().c_str(), error);
  }
}

}  // namespace quoka_examples
