// The machine's limits, as benchmarks: see support/machine.hpp.

#include "measure.hpp"

namespace quoka_bench {
namespace {

void fma_peak(benchmark::State& state) {
  constexpr int runs = 8;
  float sum = 0.0f;
  measure(state, {.flops = runs * fma_run_flops}, [&] {
    for (int run = 0; run < runs; ++run) sum = detail::run_fma_chains(detail::fma_steps);
  });
  // x = 0.999 x + 0.001 comes to rest at 1, in every lane of every chain.
  const float expected = static_cast<float>(simd::lanes * detail::fma_chains);
  verify(state, std::abs(sum - expected) < 0.02f * expected, "the chains did not run");
}

void read_bandwidth(benchmark::State& state) {
  float sum = 0.0f;
  measure(state, {.bytes = static_cast<double>(ReadProbe::bytes()), .from_memory = true},
          [&] { sum = read_probe().read(); });
  const auto expected = static_cast<float>(ReadProbe::bytes() / static_cast<Index>(sizeof(float)));
  verify(state, near(&sum, &expected, 1, 0.01f), "the buffer was not read");
}

[[maybe_unused]] const bool registered = [] {
  add("machine/fma_peak", fma_peak);
  add("machine/read_bandwidth", read_bandwidth);
  return true;
}();

}  // namespace
}  // namespace quoka_bench
