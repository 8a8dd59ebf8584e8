// The README's first screen: exact attention over a cache that the reader already has, then selection.
#include <quoka/quoka.hpp>

#include <cstdio>
#include <vector>

int main() {
  // One layer of your engine. The cache, [capacity, kv_heads, head_dim], holds the new tokens too.
  const int q_heads = 32, kv_heads = 8, head_dim = 128, capacity = 8192, tokens = 4096, q_len = 128;
  std::vector<float> queries(q_len * q_heads * head_dim, 0.1f), result(queries.size());
  std::vector<float> k_cache(capacity * kv_heads * head_dim, 0.1f), v_cache(k_cache);

  quoka::ThreadPool threads(2);  // or an executor over your own threads
  const auto q = quoka::token_major(queries, q_len, q_heads, head_dim);
  const auto out = quoka::token_major(result, q_len, q_heads, head_dim);
  const auto k = quoka::token_major(k_cache, tokens, kv_heads, head_dim, {.capacity = capacity});
  const auto v = quoka::token_major(v_cache, tokens, kv_heads, head_dim, {.capacity = capacity});
  auto [past, chunk] = quoka::chunk_in_cache(k, v, q_len);

  const quoka::AttentionOptions options;  // causal, scale 1 / sqrt(head_dim)
  quoka::attention(q, past, chunk, out, options, threads);

  // Optional: attend to the cached keys that each query head needs most, 1,024 on average.
  const quoka::MassSelector selector(quoka::MassOptions::recommended(quoka::Budget::keys(1024)));
  const quoka::Selection selection = selector.select(q, past.k, chunk.k, options, threads);
  quoka::attention(q, {past.k, past.v, selection}, chunk, out, options, threads);
  std::printf("a query head attended to %td of %td cached keys on average\n",
              selection.sum_of_counts() / selection.heads(), selection.kv_len());
}
