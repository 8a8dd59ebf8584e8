// quoka_bench: all benchmarks of the library. --help lists Google Benchmark's options.
//
// Returns 1 if any benchmark computed nothing or the wrong thing.

#include "measure.hpp"
#include "support/build_info.hpp"

#include <cstdio>

int main(int argc, char** argv) {
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
