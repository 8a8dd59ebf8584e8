// Attention over caches as engines have them: 8-bit rows, pages, sequences of different lengths. How
// they compare with the library's own cache, in turns: engines.cpp.

#include "measure.hpp"

#include <quoka/packing/byte_formats.hpp>

#include <numeric>

namespace quoka_bench {
namespace {

using quoka::Position;
using quoka::Rows;

constexpr LayerShape shape = qwen3_4b;
constexpr Index dim = shape.head_dim;

// How tokens lie: one after the other, in pages of 16, in slots in any order, and in pages whose keys
// are [dim, token] (half).
enum class Layout { contiguous, pages, slots, transposed };
constexpr const char* layout_names[] = {"contiguous", "pages", "slots", "transposed"};

// Generated keys and values in a format, [kv_heads, len, dim] or [page, kv_heads, page_len, dim].
struct EngineCache {
  EngineCache(const quoka::Format& format, Index len, Layout layout)
      : page_len(layout == Layout::slots ? 1 : 16),
        table(static_cast<std::size_t>(quoka::ceil_div(len, page_len))),
        scales(static_cast<std::size_t>(format.scales_apart(dim)), 6.0f / 127.0f),
        bytes(format.row_bytes({dim})) {
    std::iota(table.begin(), table.end(), Position{0});
    std::shuffle(table.begin(), table.end(), std::mt19937(7));
    const auto past = past_of<float>(shape, len);
    const Index pages = std::ssize(table);
    for (int side = 0; side < 2; ++side) {
      std::byte* const data = memory[side].reserve(pages * page_len * shape.kv_heads * bytes);
      const Rows pool(data, format, {pages, shape.kv_heads, page_len, dim},
                      {shape.kv_heads * page_len * bytes, page_len * bytes, bytes});
      const Rows flat(data, format, {1, shape.kv_heads, len, dim}, {0, len * bytes, bytes});
      rows[side] = layout == Layout::contiguous ? flat : quoka::paged(pool, table, len);
      if (!scales.empty()) rows[side] = rows[side].with_scales(scales.data(), 0);
      const auto& from = side == 0 ? past.k : past.v;
      for (Index head = 0; head < shape.kv_heads; ++head)
        for (Index i = 0; i < len; ++i)
          format.narrow(from.row(0, head, i), rows[side].shape(head),
                        const_cast<std::byte*>(rows[side].row(0, head, i)));
    }
    if (layout == Layout::transposed) transpose_keys(pages, len);
  }
  // Elements of two bytes: each page's keys [page_len, dim] become [dim, page_len].
  void transpose_keys(Index pages, Index len) {
    auto* data = memory[0].data();
    std::vector<std::byte> page(static_cast<std::size_t>(page_len * bytes));
    for (Index block = 0; block < pages * shape.kv_heads; ++block, data += page_len * bytes) {
      std::copy_n(data, page_len * bytes, page.data());
      for (Index i = 0; i < page_len; ++i)
        for (Index c = 0; c < dim; ++c)
          std::copy_n(page.data() + (i * dim + c) * 2, 2, data + (c * page_len + i) * 2);
    }
    const Rows pool(memory[0].data(), quoka::channel_major_format<Eigen::half>(),
                    {pages, shape.kv_heads, page_len, dim},
                    {shape.kv_heads * page_len * bytes, page_len * bytes, 2}, page_len * 2);
    rows[0] = quoka::paged(pool, table, len);
  }
  double total_bytes() const {
    return 2.0 * static_cast<double>(shape.kv_heads * rows[0].len() * bytes);
  }

  Index page_len;
  std::vector<Position> table;
  std::vector<float> scales;  // of one head, the same for all
  Index bytes;
  quoka::Buffer<std::byte> memory[2];
  Rows rows[2];
};

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
  for (const int threads : {1, 2})
    timed_for(add(named("engine/ragged/32_tokens", {{"threads", threads}}),
                  [=](benchmark::State& state) { ragged(state, threads); }),
              threads);
  return true;
}();

}  // namespace
}  // namespace quoka_bench
