// Continuous batching: two prompts' chunks and three decode steps in one call, each with a cache of
// its own length, a selector state and an output. Results are those of five calls, to the last bit.

#include <quoka/kernels/byte_formats.hpp>
#include <quoka/quoka.hpp>

#include <cstring>
#include <deque>
#include <iostream>
#include <random>
#include <vector>

namespace {

using quoka::Index;

constexpr Index q_heads = 32, kv_heads = 8, head_dim = 128;

std::mt19937 source(1);

std::vector<float> numbers(Index count) {
  std::normal_distribution<float> normal;
  std::vector<float> x(static_cast<std::size_t>(count));
  for (float& one : x) one = normal(source);
  return x;
}

quoka::OutputRows view(std::vector<float>& x, Index heads, Index len) {
  return quoka::head_major(x, len, heads, head_dim);
}

// The engine's state of one sequence: its cache, in 8 bits, and the selector's state.
struct Sequence {
  Index cached, q_len;
  quoka::KvCache cache{1, kv_heads, head_dim, head_dim, quoka::q8_0_format(), quoka::q8_0_format()};
  quoka::QuokaSelector::State state;
  std::vector<float> q, k, v, out;

  Sequence(Index cached_tokens, Index tokens) : cached(cached_tokens), q_len(tokens) {
    auto past_k = numbers(kv_heads * cached * head_dim),
         past_v = numbers(kv_heads * cached * head_dim);
    cache.append(view(past_k, kv_heads, cached), view(past_v, kv_heads, cached));
    q = numbers(q_heads * q_len * head_dim);
    k = numbers(kv_heads * q_len * head_dim), v = numbers(kv_heads * q_len * head_dim);
    out.resize(q.size());
  }
  quoka::RaggedSequence<quoka::QuokaSelector> request() {
    return {.q = view(q, q_heads, q_len),
            .past_k = cache.k(),
            .past_v = cache.v(),
            .chunk = {view(k, kv_heads, q_len), view(v, kv_heads, q_len)},
            .out = view(out, q_heads, q_len),
            .state = q_len > 1 ? &state : nullptr,  // decode steps attend to everything here
            .inverse_norms = cache.inverse_norms()};
  }
};

}  // namespace

int main() {
  std::deque<Sequence> sequences;
  for (const auto& [cached, tokens] :
       {std::pair<Index, Index>{4096, 128}, {700, 128}, {9000, 1}, {300, 1}, {2500, 1}})
    sequences.emplace_back(cached, tokens);

  const quoka::QuokaSelector selector({.budget = quoka::Budget::keys(512)});
  quoka::ThreadPool threads(2);
  quoka::RaggedWorkspace<quoka::QuokaSelector> workspace;
  std::vector<quoka::RaggedSequence<quoka::QuokaSelector>> batch;
  for (Sequence& sequence : sequences) batch.push_back(sequence.request());
  quoka::select_and_attend<quoka::QuokaSelector>(selector, batch, {}, threads, workspace);

  bool same = true;
  for (std::size_t i = 0; i < batch.size(); ++i) {
    const std::vector<float> together = sequences[i].out;
    quoka::RaggedWorkspace<quoka::QuokaSelector> alone;
    quoka::select_and_attend<quoka::QuokaSelector>(selector, {&batch[i], 1}, {}, threads, alone);
    same = same && std::memcmp(together.data(), sequences[i].out.data(),
                               together.size() * sizeof(float)) == 0;
    std::cout << sequences[i].q_len << " tokens after " << sequences[i].cached << ": attended to "
              << workspace.selection(static_cast<Index>(i)).max_count() << " cached keys\n";
  }
  std::cout << (same ? "each as in a call of its own, to the last bit\n" : "results differ\n");
  return same ? 0 : 1;
}
