// Appending a chunk to the cache, and its plain twin.

#include "measure.hpp"

namespace quoka_bench {
namespace {

constexpr Index capacity = 16384;

// Each key and value read once and written once, and one norm per key written.
Cost append_cost(const LayerShape& shape) {
  const double norms = static_cast<double>(shape.kv_heads * chunk_len) * sizeof(float);
  return {.bytes = 4.0 * row_bytes<float>(shape, chunk_len) + norms};
}

// Walks through the whole capacity, so that rows go to memory and not to a cache line just written.
void append(benchmark::State& state) {
  constexpr Index n = chunk_len;
  const LayerShape shape = qwen3_4b;
  const ChunkData<float> chunk(shape, n);
  quoka::KvCache cache(1, shape.kv_heads, shape.head_dim, shape.head_dim);
  cache.reserve(capacity);
  const auto step = [&] {
    if (cache.len() + n > capacity) cache.truncate(0);
    cache.append(chunk.k.view(), chunk.v.view());
  };
  for (Index i = 0; i < capacity / n; ++i) step();  // every page is there
  measure(state, append_cost(shape), step);

  bool right = true;
  const Index last = cache.len() - 1;
  const auto cached_k = cache.k().typed<float>(), cached_v = cache.v().typed<float>();
  for (Index head = 0; head < shape.kv_heads; ++head) {
    const float *k = chunk.k.view().row(0, head, n - 1), *v = chunk.v.view().row(0, head, n - 1);
    const float norm = plain::inverse_norm(k, shape.head_dim);
    right = right && std::equal(k, k + shape.head_dim, cached_k.row(0, head, last)) &&
            std::equal(v, v + shape.head_dim, cached_v.row(0, head, last)) &&
            near(cache.inverse_norms().row(0, head, last), &norm, 1, tolerance<float>);
  }
  verify(state, right, "the last row is not in the cache");
}

void append_plainly(benchmark::State& state) {
  constexpr Index n = chunk_len;
  const LayerShape shape = qwen3_4b;
  const ChunkData<float> chunk(shape, n);
  plain::Cache cache(shape.kv_heads, capacity, shape.head_dim);
  measure(state, append_cost(shape), [&] {
    if (cache.len + n > capacity) cache.len = 0;
    cache.append(chunk.k.view(), chunk.v.view());
  });
  const float expected = plain::inverse_norm(chunk.k.view().row(0, 0, n - 1), shape.head_dim);
  verify(state, *cache.inverse_norms.row(0, cache.len - 1) == expected,
         "the last row is not in the cache");
}

[[maybe_unused]] const bool registered = [] {
  const std::string shape = named("", {{"q_len", chunk_len}});
  add("kv_cache_append" + shape, append, benchmark::kMicrosecond);
  add("kv_cache_append/plain" + shape, append_plainly, benchmark::kMicrosecond);
  return true;
}();

}  // namespace
}  // namespace quoka_bench
