// Selection inside an engine's cache is the library's for the same tokens in order, wherever their cells lie, whatever
// else is in the ubatch, and whatever happened to the cache before.

#include "ggml/nodes.hpp"

#include <quoka/quoka.hpp>

#include <Eigen/Core>

#include <algorithm>
#include <numeric>

namespace {

using namespace quoka_test;
using quoka::Index;

constexpr Index budget = 48, chunk = 32;
std::string by_mode(const std::string& mode, const std::string& more = "") {
  return R"({"budget": 48, "chunk": 32, "dense_layers": 0, "decode": true, "mode": ")" + mode +
         "\"" + more + "}";
}
const std::string settings = by_mode("paper"),
                  without_sketch = by_mode("paper", R"(, "sketch": 0)");
constexpr double tolerance = 1e-9;  // squared; the same keys, summed in another order at most

// The tokens of one sequence: where they lie, and which queries are its chunk.
struct Sequence {
  std::vector<std::int64_t> cells;
  Index first_query, count;
};

// By the library's own calls, from a copy of the sequence's keys in order.
void expect_selected(GraphOfOne& graph, const Sequence& sequence, const std::vector<float>& result,
                     const std::string& mode = "paper") {
  const NodeShape& s = graph.s;
  const auto len = static_cast<Index>(sequence.cells.size());
  const auto gather = [&](const ggml_tensor* cache) {
    std::vector<Eigen::half> rows;
    for (const std::int64_t cell : sequence.cells) {
      const auto* const from = reinterpret_cast<const Eigen::half*>(
          static_cast<const char*>(cache->data) + static_cast<std::size_t>(cell) * cache->nb[1]);
      rows.insert(rows.end(), from, from + cache->ne[0]);
    }
    return rows;
  };
  const auto k_rows = gather(graph.k_cache), v_rows = gather(graph.v_cache);
  const Index row = s.kv_heads * s.head_dim;
  const auto view = [&](const std::vector<Eigen::half>& rows) {
    return quoka::TensorView<const Eigen::half>(rows.data(), {1, s.kv_heads, len, s.head_dim},
                                                {0, s.head_dim, row, 1});
  };
  const quoka::AnySelector selector(quoka::selection_preset(mode, quoka::Budget::keys(budget)));
  const Index q_row = s.q_heads * s.head_dim;
  std::vector<float> expected(static_cast<std::size_t>(sequence.count * q_row));
  for (Index i = 0, n = 0; i < sequence.count; i += n) {  // chunks end at multiples of 32 tokens
    const Index begin = len - sequence.count + i;
    n = std::min(chunk - begin % chunk, sequence.count - i);
    const quoka::TensorView<const float> q(
        static_cast<const float*>(graph.q_rows->data) + (sequence.first_query + i) * q_row,
        {1, s.q_heads, n, s.head_dim}, {0, s.head_dim, q_row, 1});
    const quoka::TensorView<float> out(expected.data() + i * q_row, {1, s.q_heads, n, s.head_dim},
                                       {0, s.head_dim, q_row, 1});
    const quoka::Rows k = view(k_rows), v = view(v_rows);
    quoka::KeySketch sketch;  // not of the same order of cells: codes are a key's own
    sketch.update(k, 0, len, quoka::SerialExecutor{});
    quoka::AnySelector::State state;
    quoka::Selection keep;
    selector.select({.q = q,
                     .k = k.slice(0, begin),
                     .logits = quoka::LogitOptions{},
                     .sketch = mode != "paper" ? &sketch : nullptr,
                     .chunk_k = k.slice(begin, n)},
                    state, keep, quoka::SerialExecutor{});
    quoka::attention(q, {k.slice(0, begin), v.slice(0, begin), keep},
                     {k.slice(begin, n), v.slice(begin, n)}, out);
  }
  const std::vector<float> part(result.begin() + sequence.first_query * q_row,
                                result.begin() + (sequence.first_query + sequence.count) * q_row);
  EXPECT_LT(relative_error(part, expected), tolerance);
}

void see(GraphOfOne& graph, const Sequence& sequence) {
  const Index past = static_cast<Index>(sequence.cells.size()) - sequence.count;
  for (Index i = 0; i < sequence.count; ++i)
    for (Index t = 0; t <= past + i; ++t)
      graph.see(sequence.cells[static_cast<std::size_t>(t)], sequence.first_query + i);
}

std::vector<std::int64_t> range(std::int64_t begin, std::int64_t end) {
  std::vector<std::int64_t> cells(static_cast<std::size_t>(end - begin));
  std::iota(cells.begin(), cells.end(), begin);
  return cells;
}

NodeShape shape(Index n_q, Index cells = 512) {
  NodeShape s;
  s.n_q = n_q, s.cells = cells;
  return s;
}

TEST(SelectionNode, CellsInOrder) {
  for (const std::string mode : {"paper", "recommended"})  // the latter by a sketch
    for (const Index n_q : {1, 2, 20, 32, 100}) {
      if (mode == "recommended" && n_q < 40) continue;  // few rows attend to all keys
      SCOPED_TRACE(mode + ", queries " + std::to_string(n_q));
      GraphOfOne graph(shape(n_q));
      const Sequence sequence{range(0, 300 + n_q), 0, n_q};
      see(graph, sequence);
      const auto result = graph.computed_by(Backends::quoka(by_mode(mode)).get());
      expect_selected(graph, sequence, result, mode);
      const auto exact = graph.computed_by(Backends::quoka("").get());
      EXPECT_GT(relative_error(result, exact), 1e-4) << "nothing was selected";
    }
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

// A server: two prompts, two decode steps and holes between their cells.
TEST(SelectionNode, SequencesMixed) {
  GraphOfOne graph(shape(72, 1024));
  std::vector<Sequence> sequences;
  sequences.push_back({range(10, 211), 0, 1});
  auto decode = range(300, 420);
  decode.push_back(220);  // the end of a hole
  sequences.push_back({decode, 1, 1});
  sequences.push_back({range(430, 600), 2, 40});
  auto resumed = range(600, 700);
  for (const std::int64_t cell : range(720, 750)) resumed.push_back(cell);
  sequences.push_back({resumed, 42, 30});
  for (const Sequence& sequence : sequences) see(graph, sequence);
  const ggml_backend_ptr ours = Backends::quoka(settings, 2);
  const auto result = graph.computed_by(ours.get());
  for (std::size_t i : {0u, 2u, 3u}) {
    SCOPED_TRACE(i);
    expect_selected(graph, sequences[i], result);
  }
  // One call does not show which cell the second one wrote. The next token's call does.
  sequences[1].cells.push_back(221);
  graph.see(221, 1);
  graph.fill(graph.q_rows, 3.0f);
  for (ggml_tensor* const t : {graph.k_cache, graph.v_cache}) {
    auto* const row = static_cast<ggml_fp16_t*>(t->data) + 221 * t->ne[0];
    for (std::int64_t c = 0; c < t->ne[0]; ++c)
      row[c] = ggml_fp32_to_fp16(0.1f * static_cast<float>(c % 7));
  }
  const auto next = graph.computed_by(ours.get());
  for (const Sequence& sequence : sequences) expect_selected(graph, sequence, next);
}

// A backend that has seen everything before gives, to the bit, what a new one gives: keys overwritten,
// moved and copied, one channel of one head at times, all of them, a shorter past, another sequence in the same cells.
TEST(SelectionNode, AKnownCacheGivesWhatANewBackendGives) {
  for (const std::string& given : {settings, without_sketch, by_mode("recommended")}) {
    SCOPED_TRACE(given);
    const std::string mode = given == by_mode("recommended") ? "recommended" : "paper";
    GraphOfOne graph(shape(40));
    const ggml_backend_ptr ours = Backends::quoka(given, 2);
    std::mt19937 random(9);
    const auto cell = [&](std::int64_t i) {
      return static_cast<char*>(graph.k_cache->data) +
             static_cast<std::size_t>(i) * graph.k_cache->nb[1];
    };
    for (int round = 0; round < 20; ++round) {
      SCOPED_TRACE(round);
      if (round % 4 == 3)
        for (ggml_tensor* const t : {graph.k_cache, graph.v_cache}) graph.fill(t, 1.0f);
      for (auto changes = random() % 12; changes-- > 0;) {
        const auto at = static_cast<std::int64_t>(random() % 512),
                   to = static_cast<std::int64_t>(random() % 512);
        if (changes % 3 == 0) std::copy_n(cell(at), graph.k_cache->nb[1], cell(to));
        if (changes % 3 == 1) graph.write_keys(at, at + 1);
        if (changes % 3 == 2)
          reinterpret_cast<ggml_fp16_t*>(cell(at))[random() % 128] = ggml_fp32_to_fp16(9.0f);
      }
      graph.hide_all();
      const auto begin = static_cast<std::int64_t>(random() % 100);
      const Sequence sequence{range(begin, begin + 140 + static_cast<std::int64_t>(random() % 270)),
                              0, 40};
      see(graph, sequence);
      const auto result = graph.computed_by(ours.get());
      EXPECT_EQ(result, graph.computed_by(Backends::quoka(given, 2).get()));
      expect_selected(graph, sequence, result, mode);
    }
  }
}

// Two layers, and two contexts whose caches lay at one address.
TEST(SelectionNode, CachesAreToldApart) {
  const std::string given = by_mode("recommended");
  const ggml_backend_ptr ours = Backends::quoka(given);
  GraphOfOne first(shape(40)), second(shape(40));
  for (GraphOfOne* const graph : {&first, &second}) graph->see_causally(300);
  second.write_keys(0, 512);
  for (int round = 0; round < 2; ++round)
    for (GraphOfOne* const graph : {&first, &second})
      EXPECT_EQ(graph->computed_by(ours.get()), graph->computed_by(Backends::quoka(given).get()));
  std::swap_ranges(static_cast<char*>(first.k_cache->data),
                   static_cast<char*>(first.k_cache->data) + ggml_nbytes(first.k_cache),
                   static_cast<char*>(second.k_cache->data));
  for (GraphOfOne* const graph : {&first, &second})
    EXPECT_EQ(graph->computed_by(ours.get()), graph->computed_by(Backends::quoka(given).get()));
}

TEST(SelectionNode, ShuffledCells) {
  std::mt19937 random(5);
  for (int round = 0; round < 10; ++round) {
    SCOPED_TRACE(round);
    GraphOfOne graph(shape(64));
    auto cells = range(0, 512);
    std::shuffle(cells.begin(), cells.begin() + 300, random);
    cells.resize(364);  // a past anywhere, the chunk after a hole
    for (std::size_t i = 300; i < cells.size(); ++i) cells[i] += 100;
    std::swap(cells[299], cells[300]);  // the chunk's first query wrote into the old part
    const Sequence sequence{cells, 0, 64};
    const ggml_backend_ptr ours = Backends::quoka(round % 2 == 0 ? settings : without_sketch);
    // The step before, so that the cells have been seen.
    const Sequence before{{cells.begin(), cells.begin() + 300}, 0, 64};
    const auto written = static_cast<std::size_t>(cells[300]) * graph.k_cache->nb[1];
    auto* const own = static_cast<char*>(graph.k_cache->data) + written;
    const std::vector<char> key(own, own + graph.k_cache->nb[1]);
    std::fill_n(own, graph.k_cache->nb[1], 0);
    see(graph, before);
    ASSERT_FALSE(graph.computed_by(ours.get()).empty());
    std::copy(key.begin(), key.end(), own);
    graph.hide_all();
    see(graph, sequence);
    // Budget and tokens are the same; only ties could depend on the order of cells.
    auto in_order = sequence;
    std::sort(in_order.cells.begin(), in_order.cells.begin() + 300);
    expect_selected(graph, in_order, graph.computed_by(ours.get()));
  }
}

TEST(SelectionNode, DenseLayersAndOtherModelsStayExact) {
  GraphOfOne graph(shape(40));
  graph.see_causally(300);
  const auto exact = graph.computed_by(Backends::quoka("").get());
  for (const char* const text :
       {R"({"mode": "paper", "budget": 48, "dense_layers": [1]})",
        R"({"mode": "paper", "budget": 48, "dense_layers": 1})",
        R"({"mode": "paper", "budget": 48, "dense_layers": 0, "model": {"head_dim": 128}})",
        R"({"mode": "paper", "budget": 48, "dense_layers": 0, "layer_budgets": {"1": 1000}})"}) {
    SCOPED_TRACE(text);
    EXPECT_LT(relative_error(graph.computed_by(Backends::quoka(text).get()), exact), tolerance);
  }
}

TEST(SelectionNode, BadParametersMakeNoBackend) {  // which settings_test.cpp has a table of
  backends();
  for (const char* const text : {R"({"mode": "fast"})", R"({"stats": 1})", "{"})
    EXPECT_EQ(Backends::quoka(text), nullptr) << text;
}

// One biased entry: its row is exact, the others select as without it.
TEST(SelectionNode, ABiasedEntryCostsItsRowAlone) {
  GraphOfOne graph(shape(40));
  const Sequence sequence{range(0, 340), 0, 40};
  see(graph, sequence);
  const auto without = graph.computed_by(Backends::quoka(settings).get());
  graph.mask_at(3, 7) = ggml_fp32_to_fp16(-0.001f);
  const auto ours = graph.computed_by(Backends::quoka(settings).get()),
             theirs = graph.computed_by(backends().cpu.get());
  const auto row = [&](const std::vector<float>& all, Index query) {
    const auto first = all.begin() + query * graph.s.q_heads * graph.s.v_dim;
    return std::vector<float>(first, first + graph.s.q_heads * graph.s.v_dim);
  };
  for (Index query = 0; query < 40; ++query) {
    SCOPED_TRACE(query);
    if (query == 7)
      EXPECT_LT(relative_error(row(ours, query), row(theirs, query)), 1e-5);
    else
      EXPECT_EQ(row(ours, query), row(without, query));
  }
}

// Every row biased: no chunk of it is left to select.
TEST(SelectionNode, BiasedRowsAreExact) {
  GraphOfOne graph(shape(40));
  graph.see_causally(300);
  for (std::int64_t query = 0; query < 40; ++query)
    for (std::int64_t cell = query % 3; cell <= 300 + query; cell += 3)
      graph.mask_at(cell, query) = ggml_fp32_to_fp16(-0.5f);
  const auto ours = graph.computed_by(Backends::quoka(settings).get());
  EXPECT_LT(relative_error(ours, graph.computed_by(backends().cpu.get())), 1e-5);
}

}  // namespace
