// Selection inside an engine's cache is that of MaskedAttention by the node's settings, whatever happened to the cache
// before. What that selects wherever cells lie, whatever else is in the ubatch: engine/masked_attention_test.cpp.

#include "ggml/nodes.hpp"
#include "support/fixtures.hpp"

#include <algorithm>
#include <tuple>

namespace {

using namespace quoka_test;
using quoka::Index;

std::string by_mode(const std::string& mode, const std::string& more = "") {
  return R"({"budget": 48, "chunk": 32, "dense_layers": 0, "decode": true, "mode": ")" + mode +
         "\"" + more + "}";
}
quoka::MaskedOptions options_of(const std::string& mode, bool sketch = true) {
  return {.selection = quoka::selection_preset(mode, quoka::Budget::keys(48)),
          .chunk = 32,
          .decode = true,
          .sketch = sketch};
}

NodeShape shape(Index n_q) {
  NodeShape s;
  s.n_q = n_q, s.cells = 512;
  return s;
}

// A draft that is verified, or the end of a prompt: exact without `decode` below 64 queries, or below a shorter chunk.
TEST(SelectionNode, FewQueriesAttendAsSingleOnesDo) {
  const auto given = [](Index size, const char* more = "") {
    return R"({"mode": "paper", "budget": 48, "dense_layers": 0, "chunk": )" +
           std::to_string(size) + more + "}";
  };
  for (const auto& [chunk_size, few] :
       {std::pair<Index, Index>{128, 63}, {64, 63}, {32, 31}, {2, 1}})
    for (const Index n_q : {Index{1}, few, few + 1}) {
      SCOPED_TRACE(std::to_string(n_q) + " queries, chunks of " + std::to_string(chunk_size));
      GraphOfOne graph(shape(n_q));
      graph.see_causally(300);
      const auto exact = graph.computed_by(Backends::quoka("").get());
      const auto differs = [&](const std::string& text) {
        return relative_error(graph.computed_by(Backends::quoka(text).get()), exact) > 1e-4;
      };
      EXPECT_EQ(differs(given(chunk_size)), n_q > few);
      EXPECT_TRUE(differs(given(chunk_size, R"(, "decode": true)")));
    }
}

// Of keys overwritten, moved and copied, one channel of one head at times, all of them, a shorter past, another
// sequence in the same cells, side by side or scattered: to the bit as by the library that knows the same of the cache;
// side by side, as by one that sees it for the first time. Of `recommended` few queries attend to all keys.
TEST(SelectionNode, IsTheLibrarysThroughAnyHistory) {
  for (const auto& [mode, sketch, n_q] : {std::tuple<std::string, bool, Index>{"paper", true, 1},
                                          {"paper", true, 2},
                                          {"paper", true, 20},
                                          {"paper", true, 32},
                                          {"paper", true, 40},
                                          {"paper", false, 40},
                                          {"paper", true, 100},
                                          {"recommended", true, 40},
                                          {"recommended", true, 100}}) {
    SCOPED_TRACE(mode + (sketch ? "" : ", no sketch") + ", queries " + std::to_string(n_q));
    GraphOfOne graph(shape(n_q));
    const ggml_backend_ptr ours =
                               Backends::quoka(by_mode(mode, sketch ? "" : R"(, "sketch": 0)"), 2),
                           exact = Backends::quoka("");
    KnownCells known;
    Random random(9);
    const auto cell = [&](Index i) {
      return static_cast<char*>(graph.k_cache->data) +
             static_cast<std::size_t>(i) * graph.k_cache->nb[1];
    };
    for (int round = 0; round < 30; ++round) {
      SCOPED_TRACE(round);
      if (round % 4 == 3)
        for (ggml_tensor* const t : {graph.k_cache, graph.v_cache}) graph.fill(t, 1.0f);
      for (Index changes = random.below(12); changes > 0; --changes) {
        const Index at = random.below(512), kind = random.below(3);
        if (kind == 0) std::copy_n(cell(at), graph.k_cache->nb[1], cell(random.below(512)));
        if (kind == 1) graph.write_keys(at, at + 1);
        if (kind == 2)
          reinterpret_cast<ggml_fp16_t*>(cell(at))[random.below(128)] = ggml_fp32_to_fp16(9.0f);
      }
      graph.hide_all();
      const bool scattered = random.seldom(2);
      const std::vector<Index> order = scattered ? random.permutation(512) : oracle::range(0, 512);
      const Index begin = random.below(100), past = begin + 100 + random.below(310 - n_q);
      for (Index query = 0; query < n_q; ++query)
        for (Index i = begin; i <= past + query; ++i) graph.see(order[uz(i)], query);
      const auto result = graph.computed_by(ours.get());
      EXPECT_EQ(result, by_the_library(graph, options_of(mode, sketch),
                                       quoka::Arithmetic::automatic, &known));
      if (!scattered) {
        EXPECT_EQ(result, by_the_library(graph, options_of(mode, sketch)));
      }
      EXPECT_GT(relative_error(result, graph.computed_by(exact.get())), 1e-4) << "nothing selects";
    }
  }
}

// Two layers, and two contexts whose caches lay at one address.
TEST(SelectionNode, CachesAreToldApart) {
  const ggml_backend_ptr ours = Backends::quoka(by_mode("recommended"));
  GraphOfOne first(shape(40)), second(shape(40));
  for (GraphOfOne* const graph : {&first, &second}) graph->see_causally(300);
  second.write_keys(0, 512);
  for (int round = 0; round < 3; ++round) {
    for (GraphOfOne* const graph : {&first, &second})
      EXPECT_EQ(graph->computed_by(ours.get()), by_the_library(*graph, options_of("recommended")));
    if (round == 1)
      std::swap_ranges(static_cast<char*>(first.k_cache->data),
                       static_cast<char*>(first.k_cache->data) + ggml_nbytes(first.k_cache),
                       static_cast<char*>(second.k_cache->data));
  }
}

TEST(SelectionNode, DenseLayersShortPastsAndOtherModelsStayExact) {
  GraphOfOne graph(shape(40));
  graph.see_causally(300);
  const auto exact = graph.computed_by(Backends::quoka("").get());
  for (const char* const text :
       {R"({"mode": "paper", "budget": 48, "dense_layers": [1]})",
        R"({"mode": "paper", "budget": 48, "dense_layers": 1})",
        R"({"mode": "paper", "budget": 48, "dense_layers": 0, "model": {"head_dim": 128}})",
        R"({"mode": "paper", "budget": 48, "dense_layers": 0, "layer_budgets": {"1": 1000}})",
        R"({"mode": "paper", "budget": 48, "dense_layers": 0, "decode": true, "min_past": 301})"}) {
    SCOPED_TRACE(text);
    EXPECT_LT(relative_error(graph.computed_by(Backends::quoka(text).get()), exact), 1e-9);
  }
  EXPECT_NE(graph.computed_by(Backends::quoka(by_mode("paper", R"(, "min_past": 300)")).get()),
            exact);
}

TEST(SelectionNode, BadParametersMakeNoBackend) {  // which settings_test.cpp has a table of
  backends();
  for (const char* const text : {R"({"mode": "fast"})", R"({"stats": 1})", "{"})
    EXPECT_EQ(Backends::quoka(text), nullptr) << text;
}

}  // namespace
