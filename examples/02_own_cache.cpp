// An engine that owns its cache: [tokens, kv_heads, head_dim] in half precision, keys and values
// side by side in one allocation, the chunk's among them. Queries and outputs are float. Two calls stand
// where its attention call stood; nothing is copied or converted.

#include <quoka/attention/diagnostics.hpp>
#include <quoka/quoka.hpp>

#include <Eigen/Core>

#include <iostream>
#include <random>
#include <vector>

namespace {

constexpr quoka::Index q_heads = 32, kv_heads = 8, head_dim = 128, chunk = 128, cached = 8192;

// The engine's cache: for each token all keys of its heads, then all values. Halves as integers, as most
// engines have them.
struct EngineCache {
  std::vector<std::uint16_t> memory =
      std::vector<std::uint16_t>((cached + chunk) * 2 * kv_heads * head_dim);

  // The chunk's tokens are in it already, behind the others.
  quoka::CachedChunk split() const {
    const quoka::Rows all =
        quoka::token_major(quoka::as_half(memory), cached + chunk, 2 * kv_heads, head_dim);
    return quoka::chunk_in_cache(all.some_heads(0, kv_heads), all.some_heads(kv_heads, kv_heads),
                                 chunk);
  }
};

}  // namespace

int main() {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  EngineCache cache;
  for (auto& x : cache.memory)
    x = Eigen::numext::bit_cast<std::uint16_t>(static_cast<Eigen::half>(normal(random)));
  std::vector<float> queries(chunk * q_heads * head_dim), dense(queries.size()),
      sparse(queries.size());
  for (auto& x : queries) x = normal(random) * 3.0f;

  // Queries and outputs in the engine's order too: [tokens, q_heads, head_dim].
  const auto q = quoka::token_major(queries, chunk, q_heads, head_dim),
             out_dense = quoka::token_major(dense, chunk, q_heads, head_dim),
             out = quoka::token_major(sparse, chunk, q_heads, head_dim);
  auto [past, own] = cache.split();
  quoka::ThreadPool threads(2);

  const quoka::AttentionOptions options{.scale = 0.088f};  // both calls get the same
  quoka::attention(q, past, own, out_dense, options, threads);

  const quoka::QuokaSelector selector({.budget = quoka::Budget::share(0.5)});
  const quoka::Selection selection = selector.select(q, past.k, options, threads);
  past.selection = &selection;
  quoka::attention(q, past, own, out, options, threads);

  std::cout << "attended to " << selection.max_count() << " of " << selection.kv_len()
            << " cached keys; output differs from dense by " << quoka::output_error(out, out_dense)
            << " (random keys: the worst case, all of them matter)\n";
}
