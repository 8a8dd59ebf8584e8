// An engine with a paged cache: half keys and values in pages of 16 tokens, [page, kv_head, token,
// channel], a block table per sequence, and the chunk written to its pages before attention. Queries
// and outputs are float. Nothing is copied, gathered or converted.

#include <quoka/attention/diagnostics.hpp>
#include <quoka/quoka.hpp>

#include <Eigen/Core>

#include <algorithm>
#include <iostream>
#include <numeric>
#include <random>
#include <vector>

namespace {

using quoka::Index;

constexpr Index q_heads = 32, kv_heads = 8, head_dim = 128, page = 16, pages = 1024, chunk = 128;

}  // namespace

int main() {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<Eigen::half> k_pages(pages * kv_heads * page * head_dim), v_pages(k_pages.size());
  for (auto* memory : {&k_pages, &v_pages})
    for (auto& x : *memory) x = static_cast<Eigen::half>(normal(random));

  // One sequence of 8,000 tokens, the last 128 of them the chunk; its pages lie anywhere.
  const Index tokens = 8000;
  std::vector<quoka::Position> table(pages);
  std::iota(table.begin(), table.end(), 0);
  std::shuffle(table.begin(), table.end(), random);
  table.resize(static_cast<std::size_t>(quoka::ceil_div(tokens, page)));

  std::vector<float> queries(q_heads * chunk * head_dim), results(queries.size()),
      exact(queries.size());
  for (auto& x : queries) x = 3.0f * normal(random);
  const auto q = quoka::token_major(queries, chunk, q_heads, head_dim),
             out = quoka::token_major(results, chunk, q_heads, head_dim),
             dense = quoka::token_major(exact, chunk, q_heads, head_dim);

  // The pools, and the sequence in them.
  const auto pool = [](const std::vector<Eigen::half>& memory) {
    return quoka::head_major(memory, page, kv_heads, head_dim, {.batch = pages});
  };
  const quoka::Rows k = paged(pool(k_pages), table, tokens),
                    v = paged(pool(v_pages), table, tokens);
  auto [past, own] = quoka::chunk_in_cache(k, v, chunk);

  // The pool's sketch, shared by all sequences, makes the selection faster. Update it with the rows that were written:
  // here all of them, in an engine those of each chunk.
  quoka::ThreadPool threads(2);
  quoka::KeySketch sketch;
  sketch.update(pool(k_pages), 0, pages * page, threads);

  const quoka::QuokaSelector selector({.budget = quoka::Budget::share(0.5)});
  quoka::QuokaSelector::State state;
  quoka::Selection selection;
  const quoka::AttentionOptions options;  // both calls get the same: the defaults here
  selector.select({.q = q, .k = past.k, .logits = options, .sketch = &sketch}, state, selection,
                  threads);
  past.selection = &selection;
  quoka::attention(q, past, own, out, options, threads);

  past.selection = nullptr;
  quoka::attention(q, past, own, dense, options, threads);
  std::cout << "attended to " << selection.max_count() << " of " << selection.kv_len()
            << " cached keys in pages; output differs from dense by "
            << quoka::output_error(out, dense)
            << " (random keys: the worst case, all of them matter)\n";
}
