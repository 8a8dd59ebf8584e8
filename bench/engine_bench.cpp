// Attention over caches as engines have them: 8-bit rows, pages, sequences of different lengths. How
// they compare with the library's own cache, in turns: engines.cpp.

#include "engine_cache.hpp"
#include "measure.hpp"

namespace quoka_bench {
namespace {

constexpr LayerShape shape = EngineCache::shape;

// q_len queries over all of the past. Outputs are near those of float: eight bits of integer, or four
// of fp8's mantissa.
void attend(benchmark::State& state, const quoka::Format& format, Layout layout, Index kv_len,
            Index q_len) {
  const EngineCache cache(format, kv_len, layout);
  const float rounding = &format == &quoka::e4m3_format() ? 0.2f : 0.03f;
  const auto past = past_of<float>(shape, kv_len);
  ChunkData<float> chunk(shape, q_len);
  quoka::AttentionWorkspace workspace;
  poison(chunk.out);
  measure(state,
          {.flops = attention_flops(shape, q_len, kv_len),
           .bytes = cache.bytes(),
           .from_memory = q_len == 1},
          [&] {
            quoka::attention(chunk.q.view(), {cache.k, cache.v}, {chunk.k.view(), chunk.v.view()},
                             {chunk.out.view()}, {}, quoka::SerialExecutor{}, workspace);
          });
  const plain::Attention<float> input{chunk.q.view(), past.k,         past.v,
                                      chunk.k.view(), chunk.v.view(), nullptr};
  verify(state, attention_is_right(input, chunk.out, rounding), "attention is wrong");
}

// One token of each of 32 sequences of 256 to 8,192 keys, in pages of half.
void ragged(benchmark::State& state, int threads) {
  const Index sequences = 32, longest = 8192;
  const EngineCache cache(quoka::format_of<Eigen::half>(), longest, Layout::pages);
  std::vector<std::unique_ptr<ChunkData<float>>> tokens;
  std::vector<quoka::AttentionSequence> batch;
  double bytes = 0.0, flops = 0.0;
  for (Index i = 1; i <= sequences; ++i) {
    const Index len = i * longest / sequences;
    tokens.push_back(std::make_unique<ChunkData<float>>(shape, 1));
    ChunkData<float>& x = *tokens.back();
    poison(x.out);
    batch.push_back({.q = x.q.view(),
                     .past = {cache.k.slice(0, len), cache.v.slice(0, len)},
                     .chunk = {x.k.view(), x.v.view()},
                     .out = x.out.view()});
    bytes += 2.0 * static_cast<double>(shape.kv_heads * len * cache.row_bytes);
    flops += attention_flops(shape, 1, len);
  }
  quoka::AttentionWorkspace workspace;
  with_executor(threads, [&](quoka::ExecutorRef executor) {
    measure(state, {.flops = flops, .bytes = bytes, .threads = threads},
            [&] { quoka::attention(batch, {}, executor, workspace); });
  });
  for (auto& x : tokens) verify(state, all_finite(x->out), "a sequence was left out");
}

// One token of each of 1,024 sequences of 16 keys, outputs head by head or token by token: of so little work what a batch
// is checked for shows. Calls of their own are its twin.
void short_sequences(benchmark::State& state, bool head_by_head, bool in_one_call) {
  const Index sequences = 1024, len = 16, heads = shape.q_heads, dim = shape.head_dim;
  const auto past = past_of<float>(shape, len);
  ChunkData<float> token(shape, 1);
  std::vector<float> out(static_cast<std::size_t>(sequences * heads * dim), NAN);
  std::vector<quoka::AttentionSequence> batch;
  for (Index i = 0; i < sequences; ++i) {
    const auto to =
        head_by_head ? quoka::TensorView<float>(out.data() + i * dim, {1, heads, 1, dim},
                                                {0, sequences * dim, dim, 1})
                     : quoka::TensorView<float>(out.data() + i * heads * dim, {1, heads, 1, dim});
    batch.push_back({.q = token.q.view(),
                     .past = {past.k, past.v},
                     .chunk = {token.k.view(), token.v.view()},
                     .out = to});
  }
  quoka::AttentionWorkspace workspace;
  measure(state, {.flops = static_cast<double>(sequences) * attention_flops(shape, 1, len)}, [&] {
    if (in_one_call) return quoka::attention(batch, {}, quoka::SerialExecutor{}, workspace);
    for (const auto& x : batch)
      quoka::attention(x.q, x.past, x.chunk, x.out, {}, quoka::SerialExecutor{}, workspace);
  });
  const auto finite = [](float x) { return std::isfinite(x); };
  verify(state, std::all_of(out.begin(), out.end(), finite), "a sequence was left out");
}

const bool registered = [] {
  const auto row = [](const quoka::Format& format, Layout layout) {
    const std::string name =
        std::string("engine/") + layout_names[static_cast<int>(layout)] + "/" + format.name;
    add(named(name + "/token", {{"kv_len", 32768}}),
        [&format, layout](benchmark::State& state) { attend(state, format, layout, 32768, 1); });
    add(named(name + "/chunk", {{"kv_len", 8192}}), [&format, layout](benchmark::State& state) {
      attend(state, format, layout, 8192, chunk_len);
    });
  };
  for (const Layout layout : {Layout::contiguous, Layout::pages})
    for (const auto* format :
         {&quoka::format_of<Eigen::half>(), &quoka::format_of<Eigen::bfloat16>(),
          &quoka::q8_0_format(), &quoka::u8_format(), &quoka::i8_format(),
          &quoka::i8_channel_format(), &quoka::e4m3_format()})
      row(*format, layout);
  row(quoka::format_of<Eigen::half>(), Layout::slots);
  row(quoka::format_of<Eigen::half>(), Layout::transposed);
  for (const bool head_by_head : {false, true})
    for (const bool in_one_call : {false, true})
      add(std::string("engine/ragged/1024_short/") + (head_by_head ? "by_head/" : "by_token/") +
              (in_one_call ? "one_call" : "calls_of_their_own"),
          [=](benchmark::State& state) { short_sequences(state, head_by_head, in_one_call); });
  for (const int threads : {1, 2})
    timed_for(add(named("engine/ragged/32_tokens", {{"threads", threads}}),
                  [=](benchmark::State& state) { ragged(state, threads); }),
              threads);
  return true;
}();

}  // namespace
}  // namespace quoka_bench
