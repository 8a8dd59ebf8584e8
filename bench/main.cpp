// quoka_bench: all benchmarks of the library, or with --tune its block sizes tried on this machine.
// --help lists the options.
//
// Returns 1 if any benchmark computed nothing or the wrong thing.

#include "measure.hpp"
#include "tune.hpp"
#include "support/build_info.hpp"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <sstream>
#include <string_view>

namespace {

void print_help() {
  std::cout << R"(quoka_bench [--tune[=NAME]] [OPTIONS]

  --tune               tries the library's block sizes and distances on this machine, about a
                       minute, and prints the best beside the defaults; no benchmark is run
  --tune=NAME          only those whose names contain NAME
  --tune_keys=N        cached keys, 64 or more (32768)
  --tune_seconds=S     about so long; half as many leave ratios less sure (60)

Without --tune, Google Benchmark's options:

)";
  benchmark::PrintDefaultHelp();
}

// A positive number after `name`, which ends in =; false if the flag is another one.
template <class T>
bool number_of(std::string_view flag, std::string_view name, T& to) {
  if (!flag.starts_with(name) || flag.size() <= name.size()) return false;
  std::istringstream text{std::string(flag.substr(name.size()))};
  return text >> to && text.eof() && to > T{};
}

// 0: there is no --tune. Otherwise what was understood goes to flags; -1: something was not.
int read_tune_flags(int argc, char** argv, quoka_bench::TuneFlags& flags) {
  bool wanted = false, understood = true;
  for (int i = 1; i < argc; ++i) {
    const std::string_view flag = argv[i];
    if (flag == "--tune") {
      wanted = true;
    } else if (flag.starts_with("--tune=")) {
      wanted = true, flags.name = flag.substr(std::strlen("--tune="));
    } else if (!number_of(flag, "--tune_keys=", flags.keys) &&
               !number_of(flag, "--tune_seconds=", flags.seconds)) {
      understood = false;
    }
  }
  return !wanted ? 0 : understood && flags.keys >= 64 ? 1 : -1;
}

}  // namespace

int main(int argc, char** argv) {
  quoka_bench::TuneFlags flags;
  if (std::any_of(argv + 1, argv + argc,
                  [](const char* flag) { return !std::strcmp(flag, "--help"); })) {
    print_help();
    return 0;
  }
  if (const int wanted = read_tune_flags(argc, argv, flags); wanted != 0) {
    if (wanted < 0) {
      print_help();
      return 2;
    }
    std::cout << quoka_examples::cpu_name() << ", " << quoka_examples::build_description() << '\n';
    return quoka_bench::tune(flags);
  }
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  const auto text = [](double value, const char* unit) {
    char line[64];
    std::snprintf(line, sizeof line, "%.1f %s", value, unit);
    return std::string(line);
  };
  benchmark::AddCustomContext("cpu", quoka_examples::cpu_name());
  benchmark::AddCustomContext("build", quoka_examples::build_description());
  benchmark::AddCustomContext("fma_peak",
                              text(quoka_examples::fma_peak_gflops(), "GFLOP/s per core"));
  benchmark::AddCustomContext("read_bandwidth",
                              text(quoka_examples::read_bandwidth_gbs(), "GB/s per core"));
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return quoka_bench::failures == 0 ? 0 : 1;
}
