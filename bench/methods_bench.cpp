// Selection alone, by every method: all stages from the chunk's queries to the Selection, 32 query
// and 8 KV heads of 128 channels, chunk 128, budget 1024 or the method's own threshold. GFLOP/s are of
// the formulas in support/scoring_flops.hpp.

#include "measure.hpp"

#include "support/paired_steps.hpp"

namespace {

using namespace quoka_examples;

constexpr Index kv_len = quoka_bench::longest_kv_len;

void select_method(benchmark::State& state, const std::string& method) {
  static GeneratedPrompt prompt(quoka_bench::qwen3_4b, 128);
  const LayerStack layers = make_layers(method, quoka_bench::qwen3_4b, {});
  AnyLayer& layer = *layers.front();
  quoka::ThreadPool one(1);
  prompt.fill(layer, kv_len);
  const quoka::TensorView<const float> q = prompt.q, k = prompt.k;
  layer.select(q, one, k);
  quoka_bench::measure(state, {.flops = layer.scoring_flops(128)},
                       [&] { benchmark::DoNotOptimize(layer.select(q, one, k).max_count()); });
  const bool by_scores = method.ends_with(".threshold") || method.ends_with(".compact");
  if (!by_scores && !quoka_bench::keeps(layer.selection(), 1024))
    state.SkipWithError("not 1024 keys were selected");
  state.counters["scratch_MiB"] = static_cast<double>(layer.scratch_bytes()) / 1048576.0;
  state.counters["kept_MiB"] = static_cast<double>(layer.kept_bytes()) / 1048576.0;
}

[[maybe_unused]] const bool registered = [] {
  for (const std::string& method : all_methods())
    if (method != "dense" && method != "keydiff" && method != "snapkv")  // chosen before: free here
      quoka_bench::add(quoka_bench::named("select/" + method, {{"kv_len", kv_len}}),
                       [method](auto& state) { select_method(state, method); });
  return true;
}();

}  // namespace
