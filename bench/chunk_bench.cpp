// One chunk of a long prompt, and one decode step, through ChunkedPrefill: select, attend, append.

#include "measure.hpp"

namespace quoka_bench {
namespace {

constexpr Index budget = 1024;

// ---- layers -------------------------------------------------------------------------------------

// Any selector, preceded by a time in which nothing of the past is selected: filling a layer with
// 32,768 tokens then costs their copying, not a dense prefill.
template <quoka::Selector S>
class Warmed {
 public:
  using Options = typename S::Options;
  struct State {
    bool filling = false;
    typename S::State inner;
    void truncate(Index len) { inner.truncate(len); }
    Index bytes() const { return inner.bytes(); }
  };

  explicit Warmed(const Options& options) : selector_(options) {}

  void select(const quoka::SelectorInput& input, State& state, quoka::Selection& selection,
              quoka::ExecutorRef executor) const {
    if (state.filling)
      return selection.select_none(input.k.batch(), input.k.heads(), input.k.len());
    selector_.select(input, state.inner, selection, executor);
  }
  void appended(const quoka::SelectorInput& input, State& state,
                quoka::ExecutorRef executor) const {
    selector_.appended(input, state.inner, executor);
  }

 private:
  S selector_;
};

template <class S>
using Layer = quoka::ChunkedPrefill<Warmed<S>>;

template <class S>
typename S::Options options_of() {
  if constexpr (std::is_same_v<S, quoka::QuokaSelector>)
    return {.budget = quoka::Budget::keys(budget), .n_queries = n_queries};
  else
    return {};
}

// The one layer with this selector, holding exactly the first kv_len tokens of past_of().
template <class S>
Layer<S>& layer_with(Index kv_len) {
  const LayerShape shape = qwen3_4b;
  static Layer<S> layer(shape, options_of<S>());
  layer.reserve(longest_kv_len + chunk_len);
  if (layer.kv_len() > kv_len) layer.truncate(kv_len);
  if (layer.kv_len() < kv_len) {
    const auto past = past_of<float>(shape, kv_len);
    ChunkData<float> chunk(shape, chunk_len);
    layer.state().filling = true;
    for (Index begin = layer.kv_len(); begin < kv_len; begin += chunk_len)
      layer.forward(chunk.q.view(), past.k.slice(begin, chunk_len), past.v.slice(begin, chunk_len),
                    {chunk.out.view()});
    layer.state().filling = false;
  }
  return layer;
}

// ---- costs --------------------------------------------------------------------------------------

// q_len tokens after kv_len; dense: all keys and values are read, QuoKA: the keys, and `budget`
// rows of both. A chunk is bound by arithmetic, a decode step by memory.
template <class S>
Cost step_cost(Index q_len, Index kv_len, int threads) {
  const LayerShape shape = qwen3_4b;
  constexpr bool quoka = std::is_same_v<S, quoka::QuokaSelector>;
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

// ---- the fast path ------------------------------------------------------------------------------

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

template <class S>
void step(benchmark::State& state, Index q_len, Index kv_len, int threads) {
  auto& layer = layer_with<S>(kv_len);
  ChunkData<float> chunk(qwen3_4b, q_len);
  poison(chunk.out);
  with_executor(threads, [&](quoka::ExecutorRef executor) {
    measure(state, step_cost<S>(q_len, kv_len, threads), [&] {
      layer.forward(chunk.q.view(), chunk.k.view(), chunk.v.view(), {chunk.out.view()}, executor);
      layer.truncate(kv_len);
    });
  });
  const auto past = past_of<float>(qwen3_4b, kv_len);
  const auto keep = positions_of(layer.selection());
  const plain::Attention<float> input{chunk.q.view(), past.k,         past.v,
                                      chunk.k.view(), chunk.v.view(), &keep};
  // Scores that differ in their last bit may choose another key at the threshold.
  if (std::is_same_v<S, quoka::QuokaSelector> &&
      !verify(state, overlap(keep, plain_selection(q_len, kv_len)) > 0.99,
              "other keys were selected"))
    return;
  const Index kept = std::is_same_v<S, quoka::QuokaSelector> ? budget : kv_len;
  if (!verify(state, keeps(layer.selection(), kept), "the budget is wrong")) return;
  verify(state, attention_is_right(input, chunk.out), "attention is wrong");
}

// ---- the plain twin -----------------------------------------------------------------------------

template <class S>
void plain_step(benchmark::State& state, Index q_len, Index kv_len) {
  const LayerShape shape = qwen3_4b;
  const auto past = past_of<float>(shape, kv_len);
  plain::Cache cache(shape.kv_heads, kv_len + q_len, shape.head_dim);
  cache.append(past.k, past.v);
  const ChunkData<float> chunk(shape, q_len);
  constexpr bool quoka = std::is_same_v<S, quoka::QuokaSelector>;
  plain::Rows out(1, 1, 1);
  measure(state, step_cost<S>(q_len, kv_len, 1), [&] {
    out = plain::chunk_step(chunk.q.view(), chunk.k.view(), chunk.v.view(), n_queries,
                            quoka ? budget : kv_len, cache);
    cache.len = kv_len;
  });
  auto& layer = layer_with<S>(kv_len);
  Tensor<float> expected(shape.q_heads, q_len, shape.head_dim);
  layer.forward(chunk.q.view(), chunk.k.view(), chunk.v.view(), {expected.view()});
  layer.truncate(kv_len);
  // A key at the threshold may differ, and weighs little.
  verify(state,
         near(out.data.data(), expected.data(), expected.size(), quoka ? 0.02f : tolerance<float>),
         "the step is wrong");
}

// ---- names --------------------------------------------------------------------------------------

template <class S>
void add_steps(const std::string& selector, Index q_len, Index kv_len, int threads = 1) {
  auto name = named((q_len == 1 ? "decode/" : "chunk/") + selector, {{"kv_len", kv_len}});
  if (threads > 1) name = named(name, {{"threads", threads}});
  timed_for(add(name, [=](auto& state) { step<S>(state, q_len, kv_len, threads); }), threads);
}

template <class S>
void add_plain_step(const std::string& selector, Index q_len, Index kv_len) {
  const auto name =
      named((q_len == 1 ? "decode/plain/" : "chunk/plain/") + selector, {{"kv_len", kv_len}});
  add(name, [=](auto& state) { plain_step<S>(state, q_len, kv_len); });
}

[[maybe_unused]] const bool registered = [] {
  using quoka::DenseSelector, quoka::QuokaSelector;
  for (const Index q_len : {chunk_len, Index{1}}) {
    add_plain_step<QuokaSelector>("quoka", q_len, 8192);
    add_plain_step<DenseSelector>("dense", q_len, q_len == 1 ? 8192 : 1024);
    for (const Index kv_len : {Index{8192}, longest_kv_len}) {
      add_steps<QuokaSelector>("quoka", q_len, kv_len);
      add_steps<DenseSelector>("dense", q_len, kv_len);
    }
    add_steps<QuokaSelector>("quoka", q_len, longest_kv_len, 2);
    add_steps<DenseSelector>("dense", q_len, longest_kv_len, 2);
  }
  return true;
}();

}  // namespace
}  // namespace quoka_bench
