// Selection alone, by every method: all stages from the chunk's queries to the Selection, 32 query
// and 8 KV heads of 128 channels, chunk 128, budget 1024 or the method's own threshold. GFLOP/s are of
// the formulas in support/scoring_flops.hpp.

#include "measure.hpp"

#include "support/paired_steps.hpp"

namespace {

using namespace quoka_examples;

void select_method(benchmark::State& state, const std::string& method, Index kv_len) {
  static GeneratedPrompt prompt({.q_heads = 32, .kv_heads = 8, .head_dim = 128}, 128);
  const LayerStack layers =
      make_layers(method, {.q_heads = 32, .kv_heads = 8, .head_dim = 128}, {});
  AnyLayer& layer = *layers.front();
  quoka::ThreadPool one(1);
  prompt.fill(layer, kv_len);
  const quoka::TensorView<const float> q = prompt.q, k = prompt.k;
  layer.select(q, one, k);
  quoka_bench::measure(state, {.flops = layer.scoring_flops(128)}, [&] {
    benchmark::DoNotOptimize(layer.select(q, one, k).max_count());
  });
  const bool by_scores = method.ends_with(".threshold") || method.ends_with(".compact");
  if (!by_scores && !quoka_bench::keeps(layer.selection(), 1024))
    state.SkipWithError("not 1024 keys were selected");
  state.counters["scratch_MiB"] = static_cast<double>(layer.scratch_bytes()) / 1048576.0;
  state.counters["kept_MiB"] = static_cast<double>(layer.kept_bytes()) / 1048576.0;
}

const bool registered = [] {
  for (const std::string& method : all_methods())
    if (method != "dense" && method != "keydiff" && method != "snapkv")  // chosen before: free here
      benchmark::RegisterBenchmark(
          std::string("select/").append(method).append("/kv_len:32768").c_str(), select_method,
          method, 32768)
          ->Unit(benchmark::kMillisecond);
  for (const Index kv_len : {2048, 8192, 16384})
    for (const std::string method : {"quoka", "quoka.float"})
      benchmark::RegisterBenchmark(std::string("select/")
                                       .append(method)
                                       .append("/kv_len:")
                                       .append(std::to_string(kv_len))
                                       .c_str(),
                                   select_method, method, kv_len)
          ->Unit(benchmark::kMillisecond);
  return true;
}();

}  // namespace
