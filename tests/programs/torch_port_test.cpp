// Selections of another implementation: the PyTorch port of QuoKA in CompactAttention, run on the committed
// capture (torch_port.py says how, data/torch_port.txt is what it selected).
//
// With its top-k told to sort the port selects the same keys. As it is published it averages the heads of
// a group in the order that an unsorted top-k leaves, so a KV head of several query heads gets other
// queries: another selection of the same quality, on the whole.

#include <quoka/select/quoka.hpp>

#include "support/attention_fixtures.hpp"
#include "support/capture.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

namespace {

using namespace quoka_test;

struct Case {
  std::string order;  // of the port's top-k
  Index past = 0, chunk = 0;
  double queries = 0.0, keys = 0.0;  // shares
  Index kv_head = 0;
  std::vector<Index> selected;
};

std::vector<Case> port_selections() {
  std::ifstream file(QUOKA_PROGRAMS_DATA "/torch_port.txt");
  std::vector<Case> cases;
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with('#')) continue;
    std::istringstream words(line);
    Case one;
    words >> one.order >> one.past >> one.chunk >> one.queries >> one.keys >> one.kv_head;
    one.selected.assign(std::istream_iterator<Index>(words), {});
    cases.push_back(std::move(one));
  }
  return cases;
}

Tensor4<float> rows(const Tensor4<float>& x, Index begin, Index n) {
  const Eigen::array<Index, 4> from{0, 0, begin, 0},
      size{x.dimension(0), x.dimension(1), n, x.dimension(3)};
  return x.slice(from, size);
}

// Of the port's keys, the share that the library selects, too.
double shared(const Case& one, quoka::Sketch sketch) {
  static const Tensor4<float> q = quoka_examples::load_layers(quoka_examples::SafetensorsFile(
      QUOKA_EXAMPLES_DATA "/tinyllama_passkey_2046_layer11.safetensors"))[0]
                                      .q;
  static const Tensor4<float> k = quoka_examples::load_layers(quoka_examples::SafetensorsFile(
      QUOKA_EXAMPLES_DATA "/tinyllama_passkey_2046_layer11.safetensors"))[0]
                                      .k;
  // The port's numbers of queries and of keys.
  quoka::QuokaOptions options{
      .budget = std::max<Index>(1, static_cast<Index>(one.keys * static_cast<double>(one.past)))};
  options.n_queries =
      std::max<Index>(1, static_cast<Index>(one.queries * static_cast<double>(one.chunk)));
  options.sketch = sketch;
  const Tensor4<float> chunk = rows(q, one.past, one.chunk), past = rows(k, 0, one.past);
  const auto keep = to_positions(quoka::QuokaSelector(options).select(chunk, past));
  const std::vector<Index>& ours = keep[0][static_cast<std::size_t>(one.kv_head)];
  EXPECT_EQ(ours.size(), one.selected.size());
  std::vector<Index> both;
  std::set_intersection(ours.begin(), ours.end(), one.selected.begin(), one.selected.end(),
                        std::back_inserter(both));
  return static_cast<double>(both.size()) / static_cast<double>(one.selected.size());
}

TEST(TorchPort, SelectsTheSameKeysWithASortedTopK) {
  int cases = 0;
  for (const Case& one : port_selections()) {
    if (one.order != "sorted") continue;
    SCOPED_TRACE(std::to_string(one.chunk) + " tokens after " + std::to_string(one.past) +
                 ", KV head " + std::to_string(one.kv_head));
    EXPECT_EQ(shared(one, quoka::Sketch::automatic), 1.0);
    EXPECT_EQ(shared(one, quoka::Sketch::off), 1.0);
    ++cases;
  }
  EXPECT_EQ(cases, 12);
}

TEST(TorchPort, AsPublishedAveragesHeadsInAnotherOrder) {
  double sum = 0.0;
  int cases = 0;
  for (const Case& one : port_selections()) {
    if (one.order != "as_it_is") continue;
    std::printf("%s %d %d %f\n", one.order.c_str(), (int)one.past, (int)one.kv_head,
                shared(one, quoka::Sketch::automatic));
    sum += shared(one, quoka::Sketch::automatic);
    ++cases;
  }
  ASSERT_EQ(cases, 12);
  const double mean = sum / cases;
  EXPECT_GT(mean, 0.5);
  EXPECT_LT(mean, 1.0);
}

}  // namespace
