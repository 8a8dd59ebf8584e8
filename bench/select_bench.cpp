// Scores of keys and top-k, each alone, and their plain twins.

#include "measure.hpp"

#include <quoka/select/stages.hpp>

namespace quoka_bench {
namespace {

using Scores = quoka::Tensor<float, 3>;
using QBar = quoka::Tensor<float>;

plain::Rows to_rows(const QBar& x) {
  plain::Rows rows(x.dimension(1), x.dimension(2), x.dimension(3));
  std::copy_n(x.data(), x.size(), rows.data.data());
  return rows;
}

// The chunk's kept queries, aggregated.
template <class T>
QBar q_bar_of(const LayerShape& shape) {
  const ChunkData<T> chunk(shape, chunk_len);
  return quoka::pre_aggregate(quoka::subselect_queries(chunk.q.view(), n_queries), shape.kv_heads);
}

// ---- score_keys ---------------------------------------------------------------------------------

template <class T>
Cost score_cost(const LayerShape& shape, Index kv_len, int threads) {
  const double keys = static_cast<double>(shape.kv_heads * kv_len);
  return {.flops = score_flops(shape, n_queries, kv_len),
          .bytes = row_bytes<T>(shape, kv_len) + 2.0 * keys * sizeof(float),
          .threads = threads,
          .from_memory = kv_len >= longest_kv_len};
}

// 64 scores of every head are what the plain twin gives.
template <class T>
bool scores_are_right(const plain::Rows& q_bar, const PastData<T>& past, const float* scores) {
  const Index kv_len = past.k.len();
  std::vector<float> sample, expected;
  for (Index head = 0; head < past.k.heads(); ++head)
    for (Index s = 0; s < 64; ++s) {
      const Index kv = s * (kv_len - 1) / 63;
      sample.push_back(scores[head * kv_len + kv]);
      expected.push_back(plain::score_key(q_bar, head, past.k.row(0, head, kv),
                                          past.inverse_norms.at(0, head, kv)));
    }
  const Index size = past.k.heads() * kv_len;
  return std::all_of(scores, scores + size, [](float x) { return std::abs(x) <= 1.0f; }) &&
         near(sample.data(), expected.data(), static_cast<Index>(sample.size()), tolerance<float>);
}

template <class T>
void score(benchmark::State& state, Index kv_len, int threads) {
  const LayerShape shape = qwen3_4b;
  const auto past = past_of<T>(shape, kv_len);
  const QBar q_bar = q_bar_of<T>(shape);
  Scores scores;
  with_executor(threads, [&](quoka::ExecutorRef executor) {
    measure(state, score_cost<T>(shape, kv_len, threads),
            [&] { scores = quoka::score_keys(q_bar, past.k, {}, past.inverse_norms, executor); });
  });
  verify(state, scores_are_right(to_rows(q_bar), past, scores.data()), "scores are wrong");
}

void score_plainly(benchmark::State& state, Index kv_len) {
  const LayerShape shape = qwen3_4b;
  const auto past = past_of<float>(shape, kv_len);
  const plain::Rows q_bar = to_rows(q_bar_of<float>(shape));
  plain::Rows scores(1, 1, 1);
  measure(state, score_cost<float>(shape, kv_len, 1),
          [&] { scores = plain::score_keys(q_bar, past.k, past.inverse_norms); });
  verify(state, scores_are_right(q_bar, past, scores.data.data()), "scores are wrong");
}

// ---- top_k --------------------------------------------------------------------------------------

void top_k(benchmark::State& state, Index kv_len, Index k, bool plainly) {
  const LayerShape shape = qwen3_4b;
  const auto past = past_of<float>(shape, kv_len);
  const Scores scores = quoka::score_keys(q_bar_of<float>(shape), past.k, {}, past.inverse_norms);
  plain::Rows plain_scores(shape.kv_heads, kv_len, 1);
  std::copy_n(scores.data(), scores.size(), plain_scores.data.data());
  const plain::Positions expected = plain::top_k(plain_scores, k);
  quoka::Selection selection;
  plain::Positions plain_selection;
  const double bytes = static_cast<double>(scores.size()) * sizeof(float) +
                       static_cast<double>(shape.kv_heads * k) * sizeof(quoka::Position);
  measure(state, {.bytes = bytes}, [&] {
    if (plainly)
      plain_selection = plain::top_k(plain_scores, k);
    else
      selection = quoka::top_k(scores, k);
  });
  verify(state, (plainly ? plain_selection : positions_of(selection)) == expected,
         "other keys were selected");
}

// ---- names --------------------------------------------------------------------------------------

[[maybe_unused]] const bool registered = [] {
  constexpr Index kv_len = longest_kv_len, k = 1024;
  const std::string shape = named("", {{"kv_len", kv_len}}), kept = named("", {{"k", k}});
  const auto in_microseconds = [](const std::string& name, auto&& f) {
    return add(name, f, benchmark::kMicrosecond);
  };
  in_microseconds("top_k" + shape + kept, [](auto& state) { top_k(state, kv_len, k, false); });
  in_microseconds("top_k/nth_element" + shape + kept,
                  [](auto& state) { top_k(state, kv_len, k, true); });
  add("score_keys" + shape, [](auto& state) { score<float>(state, kv_len, 1); });
  add("score_keys" + shape + "/threads:2", [](auto& state) {
    score<float>(state, kv_len, 2);
  })->UseRealTime();
  add("score_keys/half" + shape, [](auto& state) { score<Eigen::half>(state, kv_len, 1); });
  add("score_keys/plain" + shape, [](auto& state) { score_plainly(state, kv_len); });
  return true;
}();

}  // namespace
}  // namespace quoka_bench
