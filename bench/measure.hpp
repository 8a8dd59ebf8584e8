// Registration, counters and checks that all benchmarks share.
//
// measure() times a body and sets the counters; every benchmark then gives its expected output to
// verify(). A run that computed nothing or the wrong thing is reported as an error and makes the
// program fail. Formulas: README.md.
#pragma once

#include "data.hpp"
#include "plain.hpp"

#include "support/machine.hpp"

#include <benchmark/benchmark.h>

#include <cmath>
#include <functional>
#include <initializer_list>
#include <string>
#include <utility>

namespace quoka_bench {

using namespace quoka_examples;

// ---- names --------------------------------------------------------------------------------------

// "score_keys" and {{"kv_len", 32768}} to "score_keys/kv_len:32768".
inline std::string named(std::string name,
                         std::initializer_list<std::pair<const char*, Index>> shape) {
  for (const auto& [key, value] : shape)
    name.append("/").append(key).append(":").append(std::to_string(value));
  return name;
}

inline benchmark::internal::Benchmark* add(const std::string& name,
                                           std::function<void(benchmark::State&)> body,
                                           benchmark::TimeUnit unit = benchmark::kMillisecond) {
  return benchmark::RegisterBenchmark(name.c_str(), std::move(body))->Unit(unit);
}

// With more than one thread, work is timed by the wall clock: the calling thread's time is not the
// work's.
inline void timed_for(benchmark::internal::Benchmark* registered, int threads) {
  if (threads > 1) registered->UseRealTime();
}

// ---- counters -----------------------------------------------------------------------------------

// The work of one iteration, by the formulas of README.md; 0: does not apply.
struct Cost {
  double flops = 0.0;
  double bytes = 0.0;  // read and written, each once
  int threads = 1;
  bool from_memory = false;  // larger than the caches: also report the share of the read bandwidth
};

// One for the whole program.
inline const ReadProbe& read_probe() {
  static const ReadProbe probe;
  return probe;
}

// The machine's limits at this moment, on one core.
struct Limits {
  double gflops = 0.0, gbs = 0.0;

  void probe(const Cost& cost) {
    if (cost.flops > 0.0) gflops = std::max(gflops, fma_peak_gflops(20));
    if (cost.from_memory) gbs = std::max(gbs, read_probe().gbs(2));
  }
};

// Times body() and sets GFLOP/s, peak, GB/s and bandwidth. The limits are probed before and after,
// and the larger counts. Shares are of `threads` times one core's limit, which for memory no
// machine reaches.
template <class Body>
void measure(benchmark::State& state, const Cost& cost, Body&& body) {
  Limits limits;
  limits.probe(cost);
  const auto clock =
      cost.threads == 1 ? thread_seconds : wall_seconds;  // as Google Benchmark counts
  const double start = clock();
  for (auto _ : state) {
    body();
    benchmark::ClobberMemory();
  }
  const double seconds = (clock() - start) / static_cast<double>(state.iterations());
  limits.probe(cost);
  const double gflops = cost.flops / seconds / 1e9, gbs = cost.bytes / seconds / 1e9;
  if (cost.flops > 0.0) state.counters["GFLOP/s"] = gflops;
  if (cost.flops > 0.0) state.counters["peak"] = gflops / (limits.gflops * cost.threads);
  if (cost.bytes > 0.0) state.counters["GB/s"] = gbs;
  if (cost.from_memory) state.counters["bandwidth"] = gbs / (limits.gbs * cost.threads);
}

// f(executor) on one thread or on a pool of its own.
inline void with_executor(int threads, const std::function<void(quoka::ExecutorRef)>& f) {
  if (threads == 1) return f(quoka::SerialExecutor{});
  quoka::ThreadPool pool(threads);
  f(pool);
}

// `n` rows of every KV head.
template <class T>
double row_bytes(const LayerShape& shape, Index n) {
  return static_cast<double>(shape.kv_heads * n * shape.head_dim) * static_cast<double>(sizeof(T));
}

// ---- checks -------------------------------------------------------------------------------------

// Failed checks of the whole program; main() returns 1 if there are any.
inline int failures = 0;

inline bool verify(benchmark::State& state, bool right, const char* wrong) {
  if (right) return true;
  ++failures;
  state.SkipWithError(wrong);
  return false;
}

// Largest relative error of an output stored as T, against one computed in float in another order.
template <class T>
inline constexpr float tolerance = std::is_same_v<T, float>         ? 1e-4f
                                   : std::is_same_v<T, Eigen::half> ? 2e-3f
                                                                    : 1e-2f;

// |a - b| within `relative` of the largest |b|, element by element; false for NaN.
template <class A, class B>
bool near(const A* a, const B* b, Index count, float relative) {
  float largest = 0.0f, difference = 0.0f;
  for (Index i = 0; i < count; ++i) {
    const float x = static_cast<float>(a[i]), y = static_cast<float>(b[i]);
    if (!(std::isfinite(x) && std::isfinite(y))) return false;
    largest = std::max(largest, std::abs(y)), difference = std::max(difference, std::abs(x - y));
  }
  return largest > 0.0f && difference <= relative * largest;
}

// Makes a run that leaves an element unwritten fail.
template <class T>
void poison(Tensor<T>& out) {
  std::fill_n(out.data(), out.size(), static_cast<T>(std::numeric_limits<float>::quiet_NaN()));
}

template <class T>
bool all_finite(Tensor<T>& out) {
  return std::all_of(out.data(), out.data() + out.size(),
                     [](T x) { return std::isfinite(static_cast<float>(x)); });
}

// Every element of `out` was written, and eight of its rows are what the plain twin gives.
template <class T>
bool attention_is_right(const plain::Attention<T>& in, Tensor<T>& out,
                        float relative = tolerance<T>) {
  if (!all_finite(out)) return false;
  const Index heads = in.q.heads(), len = in.q.len(), dim = in.q.dim();
  std::vector<float> expected(static_cast<std::size_t>(dim));
  constexpr Index samples = 8;
  for (Index s = 0; s < samples; ++s) {
    const Index head = s * (heads - 1) / (samples - 1), q = (s * 37 + len - 1) % len;
    plain::attend_row(in, head, q, expected.data());
    if (!near(out.view().row(0, head, q), expected.data(), dim, relative)) return false;
  }
  return true;
}

inline plain::Positions positions_of(const quoka::Selection& selection) {
  plain::Positions lists;
  for (Index head = 0; head < selection.heads(); ++head) {
    const auto list = selection.positions(0, head);
    lists.emplace_back(list.begin(), list.end());
  }
  return lists;
}

}  // namespace quoka_bench
