// What the layout of a cache costs: the same keys and values behind other strides.
//
//   contiguous   [heads, len, dim], as KvCache has them
//   len_major    [len, heads, dim]
//   unaligned    contiguous, one element off any alignment
//   pages        every row at the beginning of a 4 KiB page

#include "measure.hpp"

namespace quoka_bench {
namespace {

constexpr Index budget = 1024;

enum class Layout { contiguous, len_major, unaligned, pages };

// A copy of rows [1, heads, len, dim] in another layout.
template <class T>
class LaidOut {
 public:
  LaidOut(const TensorView<const T>& rows, Layout layout) : sizes_(rows.sizes()) {
    const Index heads = rows.heads(), len = rows.len(), dim = rows.dim();
    const Index page = 4096 / static_cast<Index>(sizeof(T));
    const Index row = layout == Layout::pages       ? page
                      : layout == Layout::len_major ? heads * dim
                                                    : dim;
    const Index head = layout == Layout::len_major ? dim : len * row;
    first_ = layout == Layout::unaligned ? 1 : 0;
    strides_ = {heads * len * row, head, row, 1};
    T* const data = buffer_.reserve(first_ + heads * len * std::max(row, dim)) + first_;
    for (Index h = 0; h < heads; ++h)
      for (Index i = 0; i < len; ++i)
        std::copy_n(rows.row(0, h, i), dim, data + h * head + i * row);
  }
  TensorView<const T> view() const { return {buffer_.data() + first_, sizes_, strides_}; }

 private:
  std::array<Index, 4> sizes_, strides_;
  Index first_ = 0;
  quoka::Buffer<T> buffer_;
};

// Attention of q_len tokens over all of the past.
void dense(benchmark::State& state, Layout layout, Index q_len, Index kv_len) {
  const auto past = past_of<float>(qwen3_4b, kv_len);
  const LaidOut<float> k(past.k, layout), v(past.v, layout);
  ChunkData<float> chunk(qwen3_4b, q_len);
  quoka::AttentionWorkspace workspace;
  poison(chunk.out);
  measure(state,
          {.flops = attention_flops(qwen3_4b, q_len, kv_len),
           .bytes = 2.0 * row_bytes<float>(qwen3_4b, kv_len),
           .from_memory = q_len == 1},
          [&] {
            quoka::attention(chunk.q.view(), {k.view(), v.view()}, {chunk.k.view(), chunk.v.view()},
                             {chunk.out.view()}, {}, quoka::SerialExecutor{}, workspace);
          });
  const plain::Attention<float> input{chunk.q.view(), past.k,         past.v,
                                      chunk.k.view(), chunk.v.view(), nullptr};
  verify(state, attention_is_right(input, chunk.out), "attention is wrong");
}

// One QuoKA chunk: its keys into the sketch, selection, attention.
void quoka_chunk(benchmark::State& state, Layout layout, Index kv_len) {
  const auto past = past_of<float>(qwen3_4b, kv_len);
  const LaidOut<float> k(past.k, layout), v(past.v, layout);
  ChunkData<float> chunk(qwen3_4b, chunk_len);
  const quoka::QuokaSelector selector({.budget = quoka::Budget::keys(budget)});
  quoka::QuokaSelector::State selector_state;
  quoka::Selection keep, expected;
  quoka::AttentionWorkspace workspace;
  const quoka::SelectorInput input{chunk.q.view(), k.view(), quoka::LogitOptions{},
                                   past.inverse_norms, kv_len};
  selector.appended(input, selector_state, quoka::SerialExecutor{});
  poison(chunk.out);
  measure(state, {.flops = attention_flops(qwen3_4b, chunk_len, budget)}, [&] {
    selector_state.truncate(kv_len - chunk_len);
    selector.appended(input, selector_state, quoka::SerialExecutor{});
    selector.select(input, selector_state, keep, quoka::SerialExecutor{});
    quoka::attention(chunk.q.view(), {k.view(), v.view(), keep}, {chunk.k.view(), chunk.v.view()},
                     {chunk.out.view()}, {}, quoka::SerialExecutor{}, workspace);
  });
  expected =
      selector.select(chunk.q.view(), past.k, {}, quoka::SerialExecutor{}, past.inverse_norms);
  verify(state, keep == expected && all_finite(chunk.out), "the step is wrong");
}

[[maybe_unused]] const bool registered = [] {
  for (const auto& [name, layout] :
       {std::pair{"contiguous", Layout::contiguous}, std::pair{"len_major", Layout::len_major},
        std::pair{"unaligned", Layout::unaligned}, std::pair{"pages", Layout::pages}}) {
    const auto full = [&](const char* what, Index kv_len) {
      return named(std::string("layout/") + what + "/" + name, {{"kv_len", kv_len}});
    };
    add(full("dense", 8192), [=](auto& state) { dense(state, layout, chunk_len, 8192); });
    add(full("decode", longest_kv_len),
        [=](auto& state) { dense(state, layout, 1, longest_kv_len); });
    add(full("quoka", longest_kv_len),
        [=](auto& state) { quoka_chunk(state, layout, longest_kv_len); });
  }
  return true;
}();

}  // namespace
}  // namespace quoka_bench
