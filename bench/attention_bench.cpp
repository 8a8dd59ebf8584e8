// Attention of one chunk over all of the past and over a selection, and the plain twin.

#include "arithmetic.hpp"
#include "measure.hpp"

namespace quoka_bench {
namespace {

template <class T>
plain::Attention<T> plain_input(const ChunkData<T>& chunk, const PastData<T>& past,
                                const plain::Positions* selection = nullptr) {
  return {chunk.q.view(), past.k, past.v, chunk.k.view(), chunk.v.view(), selection};
}

// ---- dense --------------------------------------------------------------------------------------

// If asked for another arithmetic than float, a benchmark says which one it used, and may be off by more.
template <class T>
struct InArithmetic {
  quoka::AttentionOptions options;
  float tolerance;

  InArithmetic(benchmark::State& state, quoka::Arithmetic asked)
      : options{.arithmetic = asked}, tolerance(quoka_bench::tolerance<T>) {
    if (asked == quoka::Arithmetic::float_) return;
    state.SetLabel(used_arithmetic_name(asked));
    if (quoka::arithmetic_used(asked) == asked) tolerance += 2e-3f;
  }
};

// logit_size: a factor of the logits. With normal data they are normal, and all weights are nearly equal. Times 24 they
// span as much as in real models, and most weights are nearly zero.
template <class T>
void dense(benchmark::State& state, const LayerShape& shape, Index kv_len, int threads,
           quoka::Arithmetic arithmetic, float logit_size) {
  const InArithmetic<T> in(state, arithmetic);
  const auto past = past_of<T>(shape, kv_len);
  ChunkData<T> chunk(shape, chunk_len);
  if (logit_size != 1.0f)
    for (Index i = 0; i < chunk.q.size(); ++i)
      chunk.q.data()[i] = static_cast<T>(logit_size * static_cast<float>(chunk.q.data()[i]));
  quoka::AttentionWorkspace workspace;
  poison(chunk.out);
  with_executor(threads, [&](quoka::ExecutorRef executor) {
    measure(state, {.flops = attention_flops(shape, chunk_len, past.k.len()), .threads = threads},
            [&] {
              quoka::attention(chunk.q.view(), {past.k, past.v}, {chunk.k.view(), chunk.v.view()},
                               {chunk.out.view()}, in.options, executor, workspace);
            });
  });
  verify(state, attention_is_right(plain_input(chunk, past), chunk.out, in.tolerance),
         "attention is wrong");
}

// ---- one token ----------------------------------------------------------------------------------

template <class T>
void token(benchmark::State& state, const LayerShape& shape, Index kv_len, Index budget,
           int threads) {
  const auto past = past_of<T>(shape, kv_len);
  const auto selections = scattered_selections(shape, kv_len, budget > 0 ? budget : kv_len);
  ChunkData<T> chunk(shape, 1);
  quoka::AttentionWorkspace workspace;
  std::size_t turn = 0;
  const Index kept = budget > 0 ? budget : kv_len;
  poison(chunk.out);
  with_executor(threads, [&](quoka::ExecutorRef executor) {
    measure(state,
            {.flops = attention_flops(shape, 1, kept),
             .bytes = 2.0 * row_bytes<T>(shape, kept),
             .threads = threads,
             .from_memory = true},
            [&] {
              quoka::Past all(past.k, past.v);
              turn = (turn + 1) % selections.size();
              if (budget > 0) all.selection = &selections[turn];
              quoka::attention(chunk.q.view(), all, {chunk.k.view(), chunk.v.view()},
                               {chunk.out.view()}, {}, executor, workspace);
            });
  });
  const auto selection = positions_of(selections[turn]);
  verify(state, attention_is_right(plain_input(chunk, past, &selection), chunk.out),
         "attention is wrong");
}

// ---- a window -----------------------------------------------------------------------------------

// A whole prompt with a sliding window, as AttentionOptions has it and as a mask of bytes: masks that transformers and
// ONNX give a model's windowed layers.
void window_of_prompt(benchmark::State& state, const LayerShape& shape, Index q_len, Index window,
                      bool as_mask, quoka::Arithmetic arithmetic) {
  const InArithmetic<float> in(state, arithmetic);
  ChunkData<float> chunk(shape, q_len);
  quoka::AttentionOptions options = in.options, by_mask = in.options;
  options.sliding_window = window;
  std::vector<std::uint8_t> seen(static_cast<std::size_t>(q_len * q_len));
  for (Index i = 0; i < q_len; ++i)
    for (Index key = std::max<Index>(0, i - window + 1); key <= i; ++key)
      seen[static_cast<std::size_t>(i * q_len + key)] = 1;
  by_mask.causal = false;
  by_mask.mask =
      quoka::Mask::bytes(seen.data(), {1, 1, q_len, q_len}, {q_len * q_len, q_len * q_len, q_len});
  const auto call = [&](bool mask) {
    quoka::attention(chunk.q.view(), {}, {chunk.k.view(), chunk.v.view()}, {chunk.out.view()},
                     mask ? by_mask : options);
  };
  const double pairs = static_cast<double>(window) * static_cast<double>(q_len) -
                       0.5 * static_cast<double>(window) * static_cast<double>(window - 1);
  const double flops = 4.0 * static_cast<double>(shape.q_heads * shape.head_dim) * pairs;
  poison(chunk.out);
  measure(state, {.flops = flops}, [&] { call(as_mask); });
  const std::vector<float> measured(chunk.out.data(), chunk.out.data() + chunk.out.size());
  call(!as_mask);
  verify(state, near(measured.data(), chunk.out.data(), chunk.out.size(), in.tolerance),
         "attention is wrong");
}

// ---- selected -----------------------------------------------------------------------------------

template <class T>
void selected(benchmark::State& state, const LayerShape& shape, Index kv_len, Index budget,
              int threads, quoka::Arithmetic arithmetic) {
  const InArithmetic<T> in(state, arithmetic);
  const auto past = past_of<T>(shape, kv_len);
  const auto selections = scattered_selections(shape, kv_len, budget);
  ChunkData<T> chunk(shape, chunk_len);
  quoka::AttentionWorkspace workspace;
  std::size_t turn = 0;
  poison(chunk.out);
  with_executor(threads, [&](quoka::ExecutorRef executor) {
    measure(state, {.flops = attention_flops(shape, chunk_len, budget), .threads = threads}, [&] {
      turn = (turn + 1) % selections.size();
      quoka::attention(chunk.q.view(), {past.k, past.v, selections[turn]},
                       {chunk.k.view(), chunk.v.view()}, {chunk.out.view()}, in.options, executor,
                       workspace);
    });
  });
  const auto selection = positions_of(selections[turn]);
  verify(state, attention_is_right(plain_input(chunk, past, &selection), chunk.out, in.tolerance),
         "attention is wrong");
}

// ---- plain --------------------------------------------------------------------------------------

void plainly(benchmark::State& state, const LayerShape& shape, Index kv_len) {
  const auto past = past_of<float>(shape, kv_len);
  ChunkData<float> chunk(shape, chunk_len);
  plain::Rows out(1, 1, 1);
  measure(state, {.flops = attention_flops(shape, chunk_len, kv_len)},
          [&] { out = plain::attention(plain_input(chunk, past)); });
  quoka::attention(chunk.q.view(), {past.k, past.v}, {chunk.k.view(), chunk.v.view()},
                   {chunk.out.view()});
  verify(state, near(out.data.data(), chunk.out.data(), chunk.out.size(), tolerance<float>),
         "attention is wrong");
}

// ---- names --------------------------------------------------------------------------------------

template <class T>
void add_token(const char* name, const LayerShape& shape, Index kv_len, Index budget = 0,
               int threads = 1) {
  auto full =
      named(name, {{"kv_len", kv_len}, {"q_heads", shape.q_heads}, {"kv_heads", shape.kv_heads}});
  if (budget > 0) full = named(full, {{"budget", budget}});
  if (threads > 1) full = named(full, {{"threads", threads}});
  timed_for(add(full, [=](auto& state) { token<T>(state, shape, kv_len, budget, threads); }),
            threads);
}

std::string dense_name(const char* name, const LayerShape& shape, Index kv_len, int threads) {
  return named(name, {{"kv_len", kv_len},
                      {"head_dim", shape.head_dim},
                      {"group", shape.q_heads / shape.kv_heads},
                      {"threads", threads}});
}

template <class T>
void add_dense(const char* name, const LayerShape& shape, Index kv_len, int threads = 1,
               quoka::Arithmetic arithmetic = quoka::Arithmetic::float_, float logit_size = 1.0f) {
  timed_for(
      add(dense_name(name, shape, kv_len, threads),
          [=](auto& state) { dense<T>(state, shape, kv_len, threads, arithmetic, logit_size); }),
      threads);
}

template <class T>
void add_selected(const char* name, const LayerShape& shape, Index kv_len, Index budget,
                  int threads = 1, quoka::Arithmetic arithmetic = quoka::Arithmetic::float_) {
  auto full = named(name, {{"kv_len", kv_len}, {"budget", budget}});
  if (shape.head_dim != qwen3_4b.head_dim) full = named(full, {{"head_dim", shape.head_dim}});
  if (threads > 1) full = named(full, {{"threads", threads}});
  timed_for(
      add(full,
          [=](auto& state) { selected<T>(state, shape, kv_len, budget, threads, arithmetic); }),
      threads);
}

[[maybe_unused]] const bool registered = [] {
  constexpr Index usual = 8192;
  for (const Index kv_len : {Index{1024}, usual, longest_kv_len})
    add_dense<float>("attention/dense", qwen3_4b, kv_len);
  for (const LayerShape& shape : {qwen25_7b, head_dim_64, head_dim_80})
    add_dense<float>("attention/dense", shape, usual);
  add_dense<float>("attention/dense", qwen3_4b, usual, 2);
  add_dense<float>("attention/dense/wide_logits", qwen3_4b, usual, 1, quoka::Arithmetic::float_,
                   24.0f);
  add_dense<Eigen::half>("attention/dense/half", qwen3_4b, usual);
  add(dense_name("attention/plain", qwen3_4b, 1024, 1),
      [](auto& state) { plainly(state, qwen3_4b, 1024); });

  // The windowed layers of Gemma 3 270M.
  constexpr LayerShape gemma3_270m{.q_heads = 4, .kv_heads = 1, .head_dim = 256};
  for (const quoka::Arithmetic arithmetic : {quoka::Arithmetic::float_, quoka::Arithmetic::int8})
    for (const bool as_mask : {false, true})
      add(named(std::string("attention/window/") + (as_mask ? "mask" : "option") +
                    (arithmetic == quoka::Arithmetic::int8 ? "/int8" : ""),
                {{"q_len", 4096}, {"window", 512}}),
          [=](auto& state) {
            window_of_prompt(state, gemma3_270m, 4096, 512, as_mask, arithmetic);
          });

  add_selected<float>("attention/selected", qwen3_4b, longest_kv_len, 1024);
  add_selected<float>("attention/selected", qwen3_4b, longest_kv_len, 1024, 2);
  add_selected<float>("attention/selected", head_dim_64, longest_kv_len, 1024);
  add_selected<Eigen::half>("attention/selected/half", qwen3_4b, longest_kv_len, 1024);

  for (const int threads : {1, 2})
    add_token<float>("attention/token", qwen3_4b, longest_kv_len, 0, threads);
  add_token<float>("attention/token", qwen3_4b, longest_kv_len, 1024);
  add_token<Eigen::half>("attention/token/half", qwen3_4b, longest_kv_len);
  return true;
}();

}  // namespace
}  // namespace quoka_bench
