// Attention over caches as engines have them: 8-bit rows, pages, sequences of different lengths.

#include "measure.hpp"

#include <quoka/kernels/byte_formats.hpp>

#include <algorithm>
#include <numeric>
#include <random>

namespace quoka_bench {
namespace {

using quoka::Rows;

// How tokens lie: one after the other, in pages of 16, in slots in any order, and in pages whose keys
// are [dim, token] (half).
enum class Layout { contiguous, pages, slots, transposed };
constexpr const char* layout_names[] = {"contiguous", "pages", "slots", "transposed"};

// The keys and values of past_of() in a format, [kv_heads, len, dim] or [page, kv_heads, page_size, dim] in
// shuffled order, of Qwen3-4B's shape. k and v look into it.
class EngineCache {
 public:
  static constexpr LayerShape shape = qwen3_4b;

  explicit EngineCache(const quoka::Format& format, Index len, Layout layout = Layout::contiguous)
      : row_bytes(format.row_bytes({shape.head_dim})),
        page_size_(layout == Layout::slots ? 1 : 16),
        table_(static_cast<std::size_t>(quoka::ceil_div(len, page_size_))),
        scales_(static_cast<std::size_t>(format.separate_scales(shape.head_dim)), 6.0f / 127.0f) {
    std::iota(table_.begin(), table_.end(), quoka::Position{0});
    std::shuffle(table_.begin(), table_.end(), std::mt19937(7));
    const auto past = past_of<float>(shape, len);
    k = stored(format, past.k, layout, memory_[0]);
    v = stored(format, past.v, layout, memory_[1]);
    if (layout == Layout::transposed) transpose_keys(len);
  }
  EngineCache(const EngineCache&) = delete;
  EngineCache& operator=(const EngineCache&) = delete;

  double bytes() const {  // of keys and values
    return 2.0 * static_cast<double>(shape.kv_heads * k.len() * row_bytes);
  }

  Rows k, v;
  Index row_bytes;

 private:
  Rows stored(const quoka::Format& format, const TensorView<const float>& from, Layout layout,
              quoka::Buffer<std::byte>& memory) {
    const Index pages = std::ssize(table_), heads = shape.kv_heads, len = from.len();
    std::byte* const data = memory.reserve(pages * page_size_ * heads * row_bytes);
    const Rows pool(data, format, {pages, heads, page_size_, shape.head_dim},
                    {heads * page_size_ * row_bytes, page_size_ * row_bytes, row_bytes});
    const Rows flat(data, format, {1, heads, len, shape.head_dim}, {0, len * row_bytes, row_bytes});
    Rows rows = layout == Layout::contiguous ? flat : quoka::paged(pool, table_, len);
    if (!scales_.empty()) rows = rows.with_scales(scales_.data(), 0);
    for (Index head = 0; head < heads; ++head)
      for (Index i = 0; i < len; ++i)
        format.narrow(from.row(0, head, i), rows.shape(head),
                      const_cast<std::byte*>(rows.row(0, head, i)));
    return rows;
  }
  // Elements of two bytes: each page's keys [page_size, dim] become [dim, page_size].
  void transpose_keys(Index len) {
    const Index pages = std::ssize(table_), page_bytes = page_size_ * row_bytes;
    auto* data = memory_[0].data();
    std::vector<std::byte> page(static_cast<std::size_t>(page_bytes));
    for (Index block = 0; block < pages * shape.kv_heads; ++block, data += page_bytes) {
      std::copy_n(data, page_bytes, page.data());
      for (Index i = 0; i < page_size_; ++i)
        for (Index c = 0; c < shape.head_dim; ++c)
          std::copy_n(page.data() + (i * shape.head_dim + c) * 2, 2,
                      data + (c * page_size_ + i) * 2);
    }
    const Rows pool(memory_[0].data(), quoka::channel_major_format<Eigen::half>(),
                    {pages, shape.kv_heads, page_size_, shape.head_dim},
                    {shape.kv_heads * page_bytes, page_bytes, 2}, page_size_ * 2);
    k = quoka::paged(pool, table_, len);
  }

  Index page_size_;
  std::vector<quoka::Position> table_;
  std::vector<float> scales_;  // of one head, the same for all
  quoka::Buffer<std::byte> memory_[2];
};

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

// One token of each of 1,024 sequences of 16 keys, outputs head by head: with this little work the cost of checking a
// batch shows. Its twin are separate calls.
void short_sequences(benchmark::State& state, bool in_one_call) {
  const Index sequences = 1024, len = 16, heads = shape.q_heads, dim = shape.head_dim;
  const auto past = past_of<float>(shape, len);
  ChunkData<float> token(shape, 1);
  std::vector<float> out(static_cast<std::size_t>(sequences * heads * dim), NAN);
  std::vector<quoka::AttentionSequence> batch;
  for (Index i = 0; i < sequences; ++i)
    batch.push_back({.q = token.q.view(),
                     .past = {past.k, past.v},
                     .chunk = {token.k.view(), token.v.view()},
                     .out = quoka::TensorView<float>(out.data() + i * dim, {1, heads, 1, dim},
                                                     {0, sequences * dim, dim, 1})});
  quoka::AttentionWorkspace workspace;
  measure(state, {.flops = static_cast<double>(sequences) * attention_flops(shape, 1, len)}, [&] {
    if (in_one_call) return quoka::attention(batch, {}, quoka::SerialExecutor{}, workspace);
    for (const auto& x : batch)
      quoka::attention(x.q, x.past, x.chunk, x.out, {}, quoka::SerialExecutor{}, workspace);
  });
  const auto finite = [](float x) { return std::isfinite(x); };
  verify(state, std::all_of(out.begin(), out.end(), finite), "a sequence was left out");
}

[[maybe_unused]] const bool registered = [] {
  const auto row = [](const quoka::Format& format, Layout layout) {
    const std::string name =
        std::string("engine/") + layout_names[static_cast<int>(layout)] + "/" + format.name;
    add(named(name + "/token", {{"kv_len", 32768}}),
        [&format, layout](auto& state) { attend(state, format, layout, 32768, 1); });
    add(named(name + "/chunk", {{"kv_len", 8192}}),
        [&format, layout](auto& state) { attend(state, format, layout, 8192, chunk_len); });
  };
  const quoka::Format& half = quoka::format_of<Eigen::half>();
  for (const Layout layout : {Layout::contiguous, Layout::pages, Layout::slots, Layout::transposed})
    row(half, layout);
  for (const auto* format : {&quoka::q8_0_format(), &quoka::u8_format(), &quoka::i8_format(),
                             &quoka::i8_channel_format(), &quoka::e4m3_format()})
    row(*format, Layout::contiguous);
  row(quoka::q8_0_format(), Layout::pages);
  for (const int threads : {1, 2})
    timed_for(add(named("engine/ragged/32_tokens", {{"threads", threads}}),
                  [=](auto& state) { ragged(state, threads); }),
              threads);
  for (const bool in_one_call : {false, true})
    add(std::string("engine/ragged/1024_short/") +
            (in_one_call ? "one_call" : "calls_of_their_own"),
        [=](auto& state) { short_sequences(state, in_one_call); });
  return true;
}();

}  // namespace
}  // namespace quoka_bench
