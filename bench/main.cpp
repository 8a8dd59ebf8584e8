// quoka_bench: all benchmarks of the library, or with --tune its block sizes tried on this machine.
// --help lists the options.
//
// Returns 1 if any benchmark computed nothing or the wrong thing.

#include "measure.hpp"
#include "tune.hpp"
#include "support/build_info.hpp"

#include <CLI/CLI.hpp>

#include <iostream>

int main(int argc, char** argv) {
  using namespace quoka_examples;
  quoka_bench::TuneFlags flags;
  CLI::App app("The library's benchmarks, or its block sizes tried on this machine");
  app.set_help_flag();  // below, Google Benchmark's options are told, too
  bool help = false;
  app.add_flag("-h,--help", help, "print this");
  auto* const tune =
      app.add_option(
             "--tune", flags.name,
             "tries the library's block sizes and distances, or those whose names contain "
             "NAME, on this machine, about a minute, and prints the best beside the defaults; "
             "no benchmark is run")
          ->expected(0, 1)
          ->type_name("[NAME]");
  app.add_option("--tune_keys", flags.keys, "cached keys")
      ->needs(tune)
      ->check(CLI::Range(64ll, 1ll << 40))
      ->capture_default_str();
  app.add_option("--tune_seconds", flags.seconds,
                 "about so long; half as many leave ratios less sure")
      ->needs(tune)
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.allow_extras();  // Google Benchmark's
  try {
    app.parse(argc, argv);
    if (*tune && !help && !app.remaining().empty()) throw CLI::ExtrasError(app.remaining());
  } catch (const CLI::ParseError& error) {
    app.exit(error);
    return 2;
  }
  if (help) {
    std::cout << app.help() << "Without --tune, Google Benchmark's options:\n\n";
    benchmark::PrintDefaultHelp();
    return 0;
  }
  if (*tune) {
    fmt::print("{}, {}\n", cpu_name(), build_description());
    return quoka_bench::tune(flags);
  }
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  benchmark::AddCustomContext("cpu", cpu_name());
  benchmark::AddCustomContext("build", build_description());
  benchmark::AddCustomContext("fma_peak",
                              fmt::format("{:.1f} GFLOP/s per core", fma_peak_gflops()));
  benchmark::AddCustomContext("read_bandwidth",
                              fmt::format("{:.1f} GB/s per core", read_bandwidth_gbs()));
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return quoka_bench::failures == 0 ? 0 : 1;
}
