// An engine that owns its cache: [tokens, kv_heads, head_dim] in half precision, keys and values
// side by side in one allocation. Queries and outputs are float. Two calls stand where its attention
// call stood; nothing is copied or converted.

#include <quoka/attention/diagnostics.hpp>
#include <quoka/quoka.hpp>

#include <Eigen/Core>

#include <iostream>
#include <random>
#include <vector>

namespace {

constexpr quoka::Index q_heads = 32, kv_heads = 8, head_dim = 128, chunk = 128, cached = 8192;

// The engine's cache: for each token all keys of its heads, then all values.
struct EngineCache {
  std::vector<Eigen::half> memory =
      std::vector<Eigen::half>(2 * (cached + chunk) * kv_heads * head_dim);

  quoka::TensorView<const Eigen::half> view(quoka::Index offset, quoka::Index first,
                                            quoka::Index tokens) const {
    constexpr quoka::Index token = 2 * kv_heads * head_dim;
    return {memory.data() + first * token + offset,
            {1, kv_heads, tokens, head_dim},  // sizes: batch, heads, tokens, channels
            {0, head_dim, token, 1}};         // strides, in elements
  }
  auto keys(quoka::Index first, quoka::Index tokens) const { return view(0, first, tokens); }
  auto values(quoka::Index first, quoka::Index tokens) const {
    return view(kv_heads * head_dim, first, tokens);
  }
};

}  // namespace

int main() {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  EngineCache cache;
  for (auto& x : cache.memory) x = static_cast<Eigen::half>(normal(random));
  std::vector<float> queries(q_heads * chunk * head_dim), dense(queries.size()),
      sparse(queries.size());
  for (auto& x : queries) x = normal(random) * 3.0f;

  // Queries and outputs in the engine's order too: [tokens, q_heads, head_dim].
  const quoka::TensorView<float>::Sizes sizes{1, q_heads, chunk, head_dim},
      strides{0, head_dim, q_heads * head_dim, 1};
  const quoka::TensorView<float> q(queries.data(), sizes, strides),
      out_dense(dense.data(), sizes, strides), out(sparse.data(), sizes, strides);
  const auto past_k = cache.keys(0, cached), past_v = cache.values(0, cached);
  const auto k = cache.keys(cached, chunk), v = cache.values(cached, chunk);
  quoka::ThreadPool threads(2);

  const quoka::AttentionOptions options{.scale = 0.088f};  // both calls get the same
  const quoka::QuokaSelector selector({.budget = quoka::Budget::share(0.5)});
  const quoka::Selection keep = selector.select(q, past_k, options, threads);
  quoka::attention(q, {past_k, past_v, keep}, {k, v}, out, options, threads);

  quoka::attention(q, {past_k, past_v}, {k, v}, out_dense, options, threads);
  std::cout << "attended to " << keep.max_count() << " of " << keep.kv_len()
            << " cached keys; output differs from dense by " << quoka::output_error(out, out_dense)
            << " (random keys: the worst case, all of them matter)\n";
}
