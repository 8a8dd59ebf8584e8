// One chunk of a long prompt, and one decode step, through ChunkedPrefill: select, attend, append.

#include "measure.hpp"

#include "support/methods.hpp"

namespace quoka_bench {
namespace {

constexpr Index budget = 1024;

// The one layer of this method, "quoka" or "dense", holding exactly the first kv_len tokens of past_of().
AnyLayer& layer_with(const std::string& method, Index kv_len) {
  static std::map<std::string, LayerStack> layers;
  LayerStack& stack = layers[method];
  if (stack.empty()) {
    stack = make_layers(method, qwen3_4b, {.budget = quoka::Budget::keys(budget)});
    stack.front()->reserve(longest_kv_len + chunk_len);
  }
  AnyLayer& layer = *stack.front();
  if (layer.kv_len() > kv_len) layer.truncate(kv_len);
  const Index len = layer.kv_len();
  const auto past = past_of<float>(qwen3_4b, kv_len);
  if (len < kv_len) layer.append(past.k.slice(len, kv_len - len), past.v.slice(len, kv_len - len));
  return layer;
}

// q_len tokens after kv_len; dense: all keys and values are read, QuoKA: the keys, and `budget`
// rows of both. A chunk is bound by arithmetic, a decode step by memory.
Cost step_cost(bool quoka, Index q_len, Index kv_len, int threads) {
  const LayerShape shape = qwen3_4b;
  const Index kept = quoka ? budget : kv_len, rows = std::min(n_queries, q_len);
  Cost cost{.flops = attention_flops(shape, q_len, kept),
            .bytes = 2.0 * row_bytes<float>(shape, kept),
            .threads = threads,
            .from_memory = q_len == 1};
  if (quoka) {
    cost.flops += pre_aggregate_flops(shape, rows) + score_flops(shape, rows, kv_len);
    if (q_len > n_queries) cost.flops += subselect_flops(shape, q_len);
    cost.bytes += row_bytes<float>(shape, kv_len);
  }
  return cost;
}

// QuoKA's selection by the plain twin, computed once per shape.
const plain::Positions& plain_selection(Index q_len, Index kv_len) {
  static std::map<std::pair<Index, Index>, plain::Positions> known;
  auto& positions = known[{q_len, kv_len}];
  if (positions.empty()) {
    const auto past = past_of<float>(qwen3_4b, kv_len);
    const ChunkData<float> chunk(qwen3_4b, q_len);
    positions = plain::select(chunk.q.view(), past.k, past.inverse_norms, n_queries, budget);
  }
  return positions;
}

void step(benchmark::State& state, const std::string& method, Index q_len, Index kv_len,
          int threads) {
  const bool quoka = method == "quoka";
  AnyLayer& layer = layer_with(method, kv_len);
  ChunkData<float> chunk(qwen3_4b, q_len);
  poison(chunk.out);
  with_executor(threads, [&](quoka::ExecutorRef executor) {
    measure(state, step_cost(quoka, q_len, kv_len, threads), [&] {
      layer.forward(chunk.q.view(), chunk.k.view(), chunk.v.view(), chunk.out.view(), executor);
      layer.truncate(kv_len);
    });
  });
  const auto past = past_of<float>(qwen3_4b, kv_len);
  const auto keep = positions_of(layer.selection());
  const plain::Attention<float> input{chunk.q.view(), past.k,         past.v,
                                      chunk.k.view(), chunk.v.view(), &keep};
  // Scores that differ in their last bit may choose another key at the threshold.
  if (quoka && !verify(state, overlap(keep, plain_selection(q_len, kv_len)) > 0.99,
                       "other keys were selected"))
    return;
  if (!verify(state, keeps(layer.selection(), quoka ? budget : kv_len), "the budget is wrong"))
    return;
  verify(state, attention_is_right(input, chunk.out), "attention is wrong");
}

void plain_step(benchmark::State& state, const std::string& method, Index q_len, Index kv_len) {
  const bool quoka = method == "quoka";
  const LayerShape shape = qwen3_4b;
  const auto past = past_of<float>(shape, kv_len);
  plain::Cache cache(shape.kv_heads, kv_len + q_len, shape.head_dim);
  cache.append(past.k, past.v);
  const ChunkData<float> chunk(shape, q_len);
  plain::Rows out(1, 1, 1);
  measure(state, step_cost(quoka, q_len, kv_len, 1), [&] {
    out = plain::chunk_step(chunk.q.view(), chunk.k.view(), chunk.v.view(), n_queries,
                            quoka ? budget : kv_len, cache);
    cache.len = kv_len;
  });
  AnyLayer& layer = layer_with(method, kv_len);
  Tensor<float> expected(shape.q_heads, q_len, shape.head_dim);
  layer.forward(chunk.q.view(), chunk.k.view(), chunk.v.view(), expected.view(),
                quoka::SerialExecutor{});
  layer.truncate(kv_len);
  // A key at the threshold may differ, and weighs little.
  verify(state,
         near(out.data.data(), expected.data(), expected.size(), quoka ? 0.02f : tolerance<float>),
         "the step is wrong");
}

[[maybe_unused]] const bool registered = [] {
  for (const Index q_len : {chunk_len, Index{1}}) {
    const std::string kind = q_len == 1 ? "decode/" : "chunk/";
    for (const std::string method : {"quoka", "dense"}) {
      for (const auto& [kv_len, threads] :
           {std::pair{Index{8192}, 1}, {longest_kv_len, 1}, {longest_kv_len, 2}}) {
        auto name = named(kind + method, {{"kv_len", kv_len}});
        if (threads > 1) name = named(name, {{"threads", threads}});
        timed_for(add(name, [=](auto& state) { step(state, method, q_len, kv_len, threads); }),
                  threads);
      }
      const Index kv_len = kind + method == "chunk/dense" ? 1024 : 8192;
      add(named(kind + "plain/" + method, {{"kv_len", kv_len}}),
          [=](auto& state) { plain_step(state, method, q_len, kv_len); });
    }
  }
  return true;
}();

}  // namespace
}  // namespace quoka_bench
