// The machine's own limits, measured: multiply-adds per second and bytes read per second of one
// core.
//
// A speed says little on a machine with a varying clock and shared cores. A share of the limit,
// measured in the same process at nearly the same moment, says more. Both limits are the best of
// several short runs: whatever else happens on the machine can only make a run slower.
#pragma once

#include "support/clock.hpp"

#include <quoka/base/buffer.hpp>
#include <quoka/simd/simd.hpp>
#include <quoka/base/index.hpp>

#if defined(__unix__)
#include <unistd.h>
#endif

#include <algorithm>

namespace quoka_examples {

using quoka::Index;
namespace simd = quoka::simd;

namespace detail {

// Independent chains of multiply-adds: more than latency (4 or 5 cycles) times units (2), and few
// enough for the registers, two of which hold the operands.
inline constexpr int fma_chains = simd::registers >= 32 ? 24 : 12;
inline constexpr Index fma_steps = 16384;

// Values the compiler cannot see through; read once, outside the loops.
inline volatile float opaque_factor = 0.999f, opaque_term = 0.001f, opaque_start = 1.0f;
inline volatile float sink;

// acc[i] = acc[i] * factor + term, `steps` times; each chain starts elsewhere, so none stands for
// another. The loop holds multiply-adds and its counter, no memory access.
[[gnu::noinline]] inline float run_fma_chains(Index steps) {
  const simd::Packet factor = simd::broadcast<simd::Packet>(opaque_factor),
                     term = simd::broadcast<simd::Packet>(opaque_term);
  const float start = opaque_start;
  simd::Packet acc[fma_chains];
  simd::unroll<fma_chains>([&](auto i) QUOKA_INLINE_LAMBDA {
    acc[i] = simd::broadcast<simd::Packet>(start + 0.01f * static_cast<float>(int{i}));
  });
  for (Index step = 0; step < steps; ++step)
    simd::unroll<fma_chains>([&](auto i)
                                 QUOKA_INLINE_LAMBDA { acc[i] = simd::fma(acc[i], factor, term); });
  simd::Packet sum = simd::zero();
  simd::unroll<fma_chains>([&](auto i) QUOKA_INLINE_LAMBDA { sum = simd::add(sum, acc[i]); });
  return simd::reduce_add(sum);
}

}  // namespace detail

// FLOPs of one run_fma_chains(fma_steps).
inline constexpr double fma_run_flops =
    2.0 * simd::lanes * detail::fma_chains * static_cast<double>(detail::fma_steps);

// One core's peak in GFLOP/s, a multiply-add counting 2: the best of `runs` runs of about 0.1 ms
// each. The default, 6 ms, also gives a sleeping core time to reach its clock.
inline double fma_peak_gflops(int runs = 60) {
  double best = 0.0;
  for (int run = 0; run < runs; ++run) {
    const double start = thread_seconds();
    detail::sink = detail::run_fma_chains(detail::fma_steps);
    best = std::max(best, fma_run_flops / (thread_seconds() - start) / 1e9);
  }
  return best;
}

// Reads a buffer much larger than the last-level cache, again and again.
class ReadProbe {
 public:
  ReadProbe()
      : count_(bytes() / static_cast<Index>(sizeof(float))), data_(buffer_.reserve(count_)) {
    std::fill_n(data_, count_, 1.0f);  // an untouched page is not memory yet
  }

  // Four times the last-level cache, 128 MiB at least and 256 MiB at most: some machines report the
  // caches of all their cores together.
  static Index bytes() {
    Index cache = 0;
#if defined(_SC_LEVEL3_CACHE_SIZE)
    cache = static_cast<Index>(::sysconf(_SC_LEVEL3_CACHE_SIZE));
#endif
    return std::clamp<Index>(4 * cache, Index{128} << 20, Index{256} << 20) >> 21 << 21;
  }

  // One pass: the sum of all elements.
  [[gnu::noinline]] float read() const {
    constexpr int packets = 8;
    constexpr Index step = packets * simd::lanes;
    simd::Packet acc[packets];
    simd::unroll<packets>([&](auto i) QUOKA_INLINE_LAMBDA { acc[i] = simd::zero(); });
    for (Index at = 0; at < count_; at += step)
      simd::unroll<packets>([&](auto i) QUOKA_INLINE_LAMBDA {
        acc[i] = simd::add(acc[i], simd::load(data_ + at + i * simd::lanes));
      });
    simd::unroll<packets - 1>([&](auto i)
                                  QUOKA_INLINE_LAMBDA { acc[0] = simd::add(acc[0], acc[i + 1]); });
    return simd::reduce_add(acc[0]);
  }

  // One core's read bandwidth in GB/s (1e9 bytes), the best of `passes`.
  double gbs(int passes) const {
    double best = 0.0;
    for (int pass = 0; pass < passes; ++pass) {
      const double start = thread_seconds();
      detail::sink = read();
      best = std::max(best, static_cast<double>(bytes()) / (thread_seconds() - start) / 1e9);
    }
    return best;
  }

 private:
  quoka::Buffer<float> buffer_;
  Index count_;
  float* data_;
};

inline double read_bandwidth_gbs() { return ReadProbe().gbs(8); }

}  // namespace quoka_examples
