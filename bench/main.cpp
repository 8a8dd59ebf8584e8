// quoka_bench: the library's benchmarks. --help lists Google Benchmark's options.
//
// Returns 1 if any benchmark computed nothing or the wrong thing.

#include "measure.hpp"
#include "support/build_info.hpp"

int main(int argc, char** argv) {
  using namespace quoka_examples;
  const std::string command = command_line(argc, argv);  // Google Benchmark takes its flags away
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  benchmark::AddCustomContext("command", command);
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
