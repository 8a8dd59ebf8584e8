// Selections of another implementation: the PyTorch port of QuoKA in CompactAttention, run on the committed
// capture (torch_port.py says how, data/torch_port.txt is what it selected).
//
// With its top-k set to sort, the port selects the same keys. As published it averages the heads of a group
// in the order that an unsorted top-k leaves, not rank by rank: other queries, and another selection, which
// keeps as much of the attention.

#include <quoka/attention/diagnostics.hpp>
#include <quoka/select/quoka.hpp>

#include "support/attention_fixtures.hpp"
#include "support/capture.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

namespace {

using namespace quoka_test;
using quoka::Position;

struct Case {
  std::string order;  // of the port's top-k
  Index past = 0, chunk = 0;
  double queries = 0.0, keys = 0.0;          // shares
  std::vector<std::vector<Position>> lists;  // what the port selected for each KV head
};

std::vector<Case> cases_with(std::string_view order) {
  std::ifstream file(QUOKA_PROGRAMS_DATA "/torch_port.txt");
  std::vector<Case> cases;
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with('#')) continue;
    std::istringstream words(line);
    Case one;
    Index kv_head = 0;
    words >> one.order >> one.past >> one.chunk >> one.queries >> one.keys >> kv_head;
    if (one.order != order) continue;
    if (kv_head == 0) cases.push_back(one);
    cases.back().lists.emplace_back(std::istream_iterator<Position>(words),
                                    std::istream_iterator<Position>());
  }
  return cases;
}

struct Chunk {
  Tensor4<float> q, past_k;
};
Chunk chunk_of(const Case& one) {
  static const auto layers = quoka_examples::load_layers(quoka_examples::SafetensorsFile(
      QUOKA_EXAMPLES_DATA "/tinyllama_passkey_2046_layer11.safetensors"));
  return {rows<float>(layers.front().q, one.past, one.chunk),
          rows<float>(layers.front().k, 0, one.past)};
}

Selection port_selects(const Case& one) {
  return Selection::from_lists(1, std::ssize(one.lists), one.past, one.lists);
}
Selection library_selects(const Case& one, const Chunk& chunk, quoka::Sketch sketch) {
  // Shares become numbers as they do in the port.
  const auto part = [](double share, Index of) {
    return std::max<Index>(1, static_cast<Index>(share * static_cast<double>(of)));
  };
  quoka::QuokaOptions options{.budget = quoka::Budget::keys(part(one.keys, one.past))};
  options.n_queries = part(one.queries, one.chunk);
  options.sketch = sketch;
  return quoka::QuokaSelector(options).select(chunk.q, chunk.past_k, {});
}

double mean_mass(const Chunk& chunk, const Selection& keep) {
  quoka::RowShares shares;
  const auto kept = quoka::mass_kept(chunk.q, chunk.past_k, keep);
  shares.add(kept);
  return shares.mean();
}

TEST(TorchPort, SelectsTheSameKeysWithASortedTopK) {
  const std::vector<Case> cases = cases_with("sorted");
  ASSERT_EQ(cases.size(), 6u);
  for (const Case& one : cases) {
    SCOPED_TRACE(std::to_string(one.chunk) + " tokens after " + std::to_string(one.past));
    const Chunk chunk = chunk_of(one);
    ASSERT_EQ(one.lists.size(), 2u);
    EXPECT_EQ(library_selects(one, chunk, quoka::Sketch::on), port_selects(one));
    EXPECT_EQ(library_selects(one, chunk, quoka::Sketch::off), port_selects(one));
  }
}

TEST(TorchPort, AsPublishedItKeepsAsMuchByOtherKeys) {
  const std::vector<Case> cases = cases_with("as_it_is");
  ASSERT_EQ(cases.size(), 6u);
  double overlap = 0.0, mass = 0.0, port_mass = 0.0;
  for (const Case& one : cases) {
    const Chunk chunk = chunk_of(one);
    const Selection ours = library_selects(one, chunk, quoka::Sketch::automatic);
    const Selection port = port_selects(one);
    ASSERT_EQ(ours.sum_of_counts(), port.sum_of_counts());
    overlap += quoka::overlap(ours, port) / 6.0;
    mass += mean_mass(chunk, ours) / 6.0, port_mass += mean_mass(chunk, port) / 6.0;
  }
  RecordProperty("overlap", std::to_string(overlap));
  RecordProperty("mass", std::to_string(mass));
  RecordProperty("port_mass", std::to_string(port_mass));
  EXPECT_GT(overlap, 0.6);
  EXPECT_LT(overlap, 0.95);
  EXPECT_NEAR(mass, port_mass, 0.01);
}

}  // namespace
