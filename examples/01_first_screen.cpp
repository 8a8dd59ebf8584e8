// The README's first screen: a layer that prefills a prompt chunk by chunk with QuoKA.

#include <quoka/quoka.hpp>

#include <iostream>
#include <vector>

using Tensor = Eigen::Tensor<float, 4, Eigen::RowMajor>;  // [batch, heads, tokens, channels]

struct ChunkOfPrompt {
  Tensor q, k, v, out;
};

int main() {
  std::vector<ChunkOfPrompt> chunks;  // 24 chunks of 128 tokens; yours come from the model
  for (int i = 0; i < 24; ++i) {
    ChunkOfPrompt& chunk = chunks.emplace_back(Tensor(1, 32, 128, 128), Tensor(1, 8, 128, 128),
                                               Tensor(1, 8, 128, 128), Tensor(1, 32, 128, 128));
    chunk.q.setRandom(), chunk.k.setRandom(), chunk.v.setRandom();
  }

  quoka::ChunkedPrefill<quoka::QuokaSelector> layer(
      {.q_heads = 32, .kv_heads = 8, .head_dim = 128},  // Qwen3-4B
      {.budget = 1024, .n_queries = 16});
  quoka::ThreadPool threads(2);

  for (auto& [q, k, v, out] : chunks) layer.forward(q, k, v, out, threads);

  std::cout << "prefilled " << layer.kv_len() << " tokens; the last chunk attended to "
            << layer.selection().count() << " of " << layer.selection().kv_len()
            << " cached keys per KV head, and to itself\n";
}
