// Attention and QuoKA on the inputs of a real model's layers (TinyLlama-1.1B IQ2_XXS): logits with
// outliers, an attention sink and heads of every kind, unlike random data.
//
// The committed capture is one layer with 16/2 heads. A folder of whole captures is tested too if
// it is there, on fewer rows: the oracle takes a second per billion multiply-adds.

#include <quoka/attention/attention.hpp>
#include <quoka/layer/chunked_prefill.hpp>
#include <quoka/select/quoka.hpp>

#include "support/attention_fixtures.hpp"
#include "support/capture.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

namespace {

using namespace quoka_test;
using quoka_examples::LayerCapture;
using quoka_examples::SafetensorsFile;

constexpr Index budget = 256;
const quoka::QuokaOptions quoka_options{.budget = quoka::Budget::keys(budget)};
const oracle::QuokaOptions oracle_options{.budget = budget};

struct Layer {
  LayerCapture capture;
  float scale;
};

std::vector<Layer> load(const std::filesystem::path& path) {
  const SafetensorsFile file(path);
  std::vector<Layer> layers;
  for (LayerCapture& capture : quoka_examples::load_layers(file)) {
    const auto head_dim = static_cast<float>(capture.q.dimension(3));
    layers.push_back({std::move(capture),
                      quoka_examples::softmax_scale(file).value_or(1.0f / std::sqrt(head_dim))});
  }
  return layers;
}

// The committed layer, then those of every capture in the folder of whole captures, if there is one.
const std::vector<Layer>& all_layers() {
  static const std::vector<Layer> all = [] {
    std::vector<Layer> layers = load(std::filesystem::path(QUOKA_EXAMPLES_DATA) /
                                     "tinyllama_passkey_2046_layer11.safetensors");
    const std::filesystem::path folder = QUOKA_SHARED_DATA;
    if (!std::filesystem::is_directory(folder)) return layers;
    for (const auto& entry : std::filesystem::directory_iterator(folder))
      if (entry.path().extension() == ".safetensors")
        for (Layer& layer : load(entry.path())) layers.push_back(std::move(layer));
    return layers;
  }();
  return all;
}
const Layer& committed() { return all_layers().front(); }

// A chunk of n tokens at `begin`, and its past.
template <class T>
Inputs<T> chunk_at(const Layer& layer, Index begin, Index n) {
  const auto& [name, q, k, v, targets] = layer.capture;
  return {rows<T>(q, begin, n), rows<T>(k, 0, begin), rows<T>(v, 0, begin), rows<T>(k, begin, n),
          rows<T>(v, begin, n)};
}

Index len_of(const Layer& layer) { return layer.capture.q.dimension(2); }

// Attention to all of the past, or to the keys that the library's QuoKA selects.
void expect_attention(const Layer& layer, Index begin, Index n, bool selects) {
  SCOPED_TRACE(layer.capture.name + ", rows from " + std::to_string(begin));
  const auto in = chunk_at<float>(layer, begin, n);
  Selection keep;
  if (selects) keep = quoka::QuokaSelector(quoka_options).select(in.q, in.past_k, {});
  ASSERT_TRUE(!selects || keep.max_count() == budget);
  const Selection* const by = selects ? &keep : nullptr;
  const auto output = attend(in, {.scale = layer.scale}, by);
  EXPECT_LE(oracle::relative_error(to_oracle(output.out),
                                   oracle_attend(in, {.scale = layer.scale}, by).out),
            float_error);
}

// Share of the oracle's selection that the library's has, over all KV heads. Differences are near
// ties.
void expect_overlap(const Layer& layer, Index begin, Index n) {
  SCOPED_TRACE(layer.capture.name + ", rows from " + std::to_string(begin));
  const auto in = chunk_at<float>(layer, begin, n);
  const oracle::Positions got =
      to_positions(quoka::QuokaSelector(quoka_options).select(in.q, in.past_k, {}));
  const oracle::Positions expected =
      oracle::select(to_oracle(in.q), to_oracle(in.past_k), oracle_options);
  Index common = 0, all = 0;
  for (std::size_t head = 0; head < expected[0].size(); ++head) {
    std::vector<Index> both;
    std::set_intersection(got[0][head].begin(), got[0][head].end(), expected[0][head].begin(),
                          expected[0][head].end(), std::back_inserter(both));
    common += std::ssize(both);
    all += std::ssize(expected[0][head]);
  }
  const double overlap = static_cast<double>(common) / static_cast<double>(all);
  ::testing::Test::RecordProperty(layer.capture.name + "_overlap_at_" + std::to_string(begin),
                                  std::to_string(overlap));
  EXPECT_GE(overlap, 0.995);
}

// ---- tests --------------------------------------------------------------------------------------

TEST(RealData, AttentionIsTheOracles) {
  const Index len = len_of(committed());
  for (const auto& [begin, n] : {std::pair<Index, Index>{0, 37}, {896, 37}, {len - 128, 128}})
    expect_attention(committed(), begin, n, false);
  for (const Index begin : {Index{384}, Index{1024}, len - 128})
    expect_attention(committed(), begin, 128, true);
  for (const Layer& layer : all_layers()) {  // a few rows of each
    expect_attention(layer, 1000, 7, false);
    expect_attention(layer, len_of(layer) - 37, 37, true);
  }
}

TEST(RealData, SelectionIsTheOracles) {
  for (const Index begin : {384, 1024}) expect_overlap(committed(), begin, 128);
  expect_overlap(committed(), len_of(committed()) - 1, 1);
  for (const Layer& layer : all_layers()) expect_overlap(layer, len_of(layer) - 128, 128);
}

// The whole prompt through the driver, every chunk's selection the library's own; two chunks
// against the oracle, row by row of the past they kept.
TEST(RealData, AWholePrefillIsTheOracles) {
  const Layer& layer = committed();
  const TensorView<const float> q = layer.capture.q, k = layer.capture.k, v = layer.capture.v;
  quoka::ChunkedPrefill<quoka::QuokaSelector> prefill(
      {.q_heads = q.heads(), .kv_heads = k.heads(), .head_dim = q.dim(), .v_dim = v.dim()},
      quoka_options, {.scale = layer.scale});
  for (Index begin = 0; begin < q.len(); begin += 128) {
    const Index n = std::min<Index>(128, q.len() - begin);
    Tensor4<float> out(1, q.heads(), n, v.dim());
    prefill.forward(q.slice(begin, n), k.slice(begin, n), v.slice(begin, n), out);
    if (begin != 1024 && begin != 1920) continue;
    EXPECT_EQ(prefill.selection().max_count(), budget);
    const auto in = chunk_at<float>(layer, begin, n);
    const auto expected = oracle_attend(in, {.scale = layer.scale}, &prefill.selection());
    EXPECT_LE(oracle::relative_error(to_oracle(out), expected.out), float_error)
        << "chunk at " << begin;
  }
}

}  // namespace
