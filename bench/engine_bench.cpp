// Attention over caches as engines have them: 8-bit rows, pages, sequences of different lengths. How
// they compare with the library's own cache, in turns: engines.cpp.

#include "measure.hpp"

#include <quoka/formats/byte_formats.hpp>

#include <numeric>

namespace quoka_bench {
namespace {

using quoka::Position;
using quoka::Rows;

constexpr LayerShape shape = qwen3_4b;
constexpr Index page_len = 16;

// Generated keys and values in a format, [kv_heads, len, dim] or pages [page, kv_heads, 16, dim].
struct EngineCache {
  EngineCache(const quoka::Format& format, Index len, bool in_pages)
      : table(static_cast<std::size_t>(quoka::ceil_div(len, page_len))),
        bytes(format.row_bytes({shape.head_dim})) {
    std::iota(table.begin(), table.end(), Position{0});
    std::shuffle(table.begin(), table.end(), std::mt19937(7));
    const auto past = past_of<float>(shape, len);
    const Index pages = std::ssize(table);
    for (int side = 0; side < 2; ++side) {
      std::byte* const data = memory[side].reserve(pages * page_len * shape.kv_heads * bytes);
      const Rows pool(data, format, {pages, shape.kv_heads, page_len, shape.head_dim},
                      {shape.kv_heads * page_len * bytes, page_len * bytes, bytes});
      const Rows flat(data, format, {1, shape.kv_heads, len, shape.head_dim},
                      {0, len * bytes, bytes});
      rows[side] = in_pages ? quoka::paged(pool, table, len) : flat;
      const auto& from = side == 0 ? past.k : past.v;
      for (Index head = 0; head < shape.kv_heads; ++head)
        for (Index i = 0; i < len; ++i)
          format.narrow(from.row(0, head, i), {shape.head_dim},
                        const_cast<std::byte*>(rows[side].row(0, head, i)));
    }
  }
  double total_bytes() const {
    return 2.0 * static_cast<double>(shape.kv_heads * rows[0].len() * bytes);
  }

  std::vector<Position> table;
  Index bytes;
  quoka::Buffer<std::byte> memory[2];
  Rows rows[2];
};

// q_len queries over all of the past. Outputs are near those of float: eight bits of integer, or four
// of fp8's mantissa.
void attend(benchmark::State& state, const quoka::Format& format, bool in_pages, Index kv_len,
            Index q_len) {
  const EngineCache cache(format, kv_len, in_pages);
  const float rounding = &format == &quoka::e4m3_format() ? 0.2f : 0.03f;
  const auto past = past_of<float>(shape, kv_len);
  ChunkData<float> chunk(shape, q_len);
  quoka::AttentionWorkspace workspace;
  poison(chunk.out);
  measure(state,
          {.flops = attention_flops(shape, q_len, kv_len),
           .bytes = cache.total_bytes(),
           .from_memory = q_len == 1},
          [&] {
            quoka::attention(chunk.q.view(), {cache.rows[0], cache.rows[1]},
                             {chunk.k.view(), chunk.v.view()}, {chunk.out.view()}, {},
                             quoka::SerialExecutor{}, workspace);
          });
  const plain::Attention<float> input{chunk.q.view(), past.k,         past.v,
                                      chunk.k.view(), chunk.v.view(), nullptr};
  verify(state, attention_is_right(input, chunk.out, rounding), "attention is wrong");
}

// One token of each of 32 sequences of 256 to 8,192 keys, in pages of half.
void ragged(benchmark::State& state, int threads) {
  const Index sequences = 32, longest = 8192;
  const EngineCache cache(quoka::format_of<Eigen::half>(), longest, true);
  std::vector<std::unique_ptr<ChunkData<float>>> tokens;
  std::vector<quoka::AttentionSequence> batch;
  double bytes = 0.0, flops = 0.0;
  for (Index i = 1; i <= sequences; ++i) {
    const Index len = i * longest / sequences;
    tokens.push_back(std::make_unique<ChunkData<float>>(shape, 1));
    ChunkData<float>& x = *tokens.back();
    poison(x.out);
    batch.push_back({.q = x.q.view(),
                     .past = {cache.rows[0].slice(0, len), cache.rows[1].slice(0, len)},
                     .chunk = {x.k.view(), x.v.view()},
                     .out = x.out.view()});
    bytes += 2.0 * static_cast<double>(shape.kv_heads * len * cache.bytes);
    flops += attention_flops(shape, 1, len);
  }
  quoka::AttentionWorkspace workspace;
  with_executor(threads, [&](quoka::ExecutorRef executor) {
    measure(state, {.flops = flops, .bytes = bytes, .threads = threads},
            [&] { quoka::attention(batch, {}, executor, workspace); });
  });
  for (auto& x : tokens) verify(state, all_finite(x->out), "a sequence was left out");
}

const bool registered = [] {
  for (const bool pages : {false, true})
    for (const auto* format : {&quoka::format_of<Eigen::half>(), &quoka::q8_0_format(),
                               &quoka::u8_format(), &quoka::e4m3_format()}) {
      const std::string name =
          std::string("engine/") + (pages ? "pages/" : "contiguous/") + format->name;
      add(named(name + "/token", {{"kv_len", 32768}}),
          [=](benchmark::State& state) { attend(state, *format, pages, 32768, 1); });
      add(named(name + "/chunk", {{"kv_len", 8192}}),
          [=](benchmark::State& state) { attend(state, *format, pages, 8192, chunk_len); });
    }
  for (const int threads : {1, 2})
    timed_for(add(named("engine/ragged/32_tokens", {{"threads", threads}}),
                  [=](benchmark::State& state) { ragged(state, threads); }),
              threads);
  return true;
}();

}  // namespace
}  // namespace quoka_bench
