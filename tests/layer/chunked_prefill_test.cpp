// layer/chunked_prefill.hpp by example: in chunks of any size a prompt has the same bits; and refusals. Properties of
// every layer, after failures too, are in prefill_suite_test.cpp.

#include <quoka/layer/chunked_prefill.hpp>
#include <quoka/select/quoka.hpp>
#include <quoka/simd/tuning.hpp>

#include "support/attention_fixtures.hpp"

#include <gtest/gtest.h>

#include <stdexcept>
#include <utility>

namespace {

using namespace quoka_test;
using quoka::ChunkedPrefill;
using quoka::DenseSelector;
using quoka::LayerShape;
using quoka::QuokaSelector;

using Dense = ChunkedPrefill<DenseSelector>;
using Quoka = ChunkedPrefill<QuokaSelector>;

constexpr Index q_heads = 6, kv_heads = 2, head_dim = 16, v_dim = 20;
constexpr LayerShape layer_shape{
    .q_heads = q_heads, .kv_heads = kv_heads, .head_dim = head_dim, .v_dim = v_dim};

struct Prompt {
  Tensor4<float> q, k, v;  // [batch, heads, len, dim]

  Prompt(Random& random, Index len, Index batch = 1)
      : q(random.tensor<float>(batch, q_heads, len, head_dim)),
        k(random.tensor<float>(batch, kv_heads, len, head_dim)),
        v(random.tensor<float>(batch, kv_heads, len, v_dim)) {}
  Index len() const { return q.dimension(2); }
  Rows q_rows(Index begin, Index n) const { return Rows(q).slice(begin, n); }
  Rows k_rows(Index begin, Index n) const { return Rows(k).slice(begin, n); }
  Rows v_rows(Index begin, Index n) const { return Rows(v).slice(begin, n); }
};

Tensor4<float> output_of(const Prompt& prompt) {
  Tensor4<float> out(prompt.q.dimension(0), q_heads, prompt.len(), v_dim);
  out.setConstant(-12345.0f);
  return out;
}

// The rows [begin, end) of a prompt in chunks; the rows of `out` before and after stay.
template <class Layer>
void run(Layer& layer, const Prompt& prompt, Index begin, Index end, Index chunk_len,
         Tensor4<float>& out) {
  for (; begin < end; begin += chunk_len) {
    const Index n = std::min(chunk_len, end - begin);
    layer.forward(prompt.q_rows(begin, n), prompt.k_rows(begin, n), prompt.v_rows(begin, n),
                  TensorView<float>(out).slice(begin, n));
  }
}
template <class Layer>
Tensor4<float> run(Layer& layer, const Prompt& prompt, Index chunk_len) {
  Tensor4<float> out = output_of(prompt);
  run(layer, prompt, 0, prompt.len(), chunk_len, out);
  return out;
}

// ---- chunk sizes ----------------------------------------------------------------------------------

// Also for as many keys as are attended to in parts. A single token adds up in another order.
TEST(ChunkedPrefill, ChunkSizeChangesNoBitOfDenseOutput) {
  const std::vector<float> sinks{0.5f, -1.0f, 3.0f, 0.0f, 1.0f, 2.0f};
  const AttentionOptions with_sinks{.softcap = 10.0f, .sinks = sinks, .sliding_window = 130};
  const struct {
    Index batch, past;
    AttentionOptions options;
    std::vector<Index> same, alike;  // chunk lengths
  } table[] = {{2, 0, {}, {7, 37, 128, 299}, {1, 300}},
               {1, 0, with_sinks, {37, 128}, {1}},
               {1, 2 * quoka::tuning::long_part_keys, {}, {77}, {1}}};
  for (const auto& row : table) {
    SCOPED_TRACE(row.past);
    Random random(2);
    const Prompt prompt(random, row.past + 301, row.batch);
    LayerShape shape = layer_shape;
    shape.batch = row.batch;
    const auto in_chunks = [&](Index chunk_len) {
      Dense layer(shape, {}, row.options);
      layer.append(prompt.k_rows(0, row.past), prompt.v_rows(0, row.past));
      Tensor4<float> out = output_of(prompt);
      run(layer, prompt, row.past, prompt.len(), chunk_len, out);
      return out;
    };
    const auto whole = in_chunks(301);
    for (const Index chunk_len : row.same)
      EXPECT_TRUE(same_bits(in_chunks(chunk_len), whole)) << "chunk " << chunk_len;
    for (const Index chunk_len : row.alike)
      EXPECT_TRUE(same_up_to_rounding(in_chunks(chunk_len), whole, noise * 4))
          << "chunk " << chunk_len;
  }
}

TEST(ChunkedPrefill, ScratchOfASharedWorkspaceIsNotTheLayers) {
  Random random(21);
  const Prompt prompt(random, 40);
  quoka::AttentionWorkspace workspace;
  Dense layer(layer_shape);
  (void)run(layer, prompt, 40);
  EXPECT_GT(layer.scratch_bytes(), 0);
  layer.share_workspace(workspace);
  (void)run(layer, prompt, 40);
  EXPECT_EQ(layer.scratch_bytes(), 0);
  EXPECT_GT(workspace.bytes(), 0);
}

// ---- what is refused ----------------------------------------------------------------------------

TEST(ChunkedPrefillRefuses, ShapesAndOptionsThatAreNone) {
  using L = Quoka;
  const auto refused = [](const LayerShape& shape, std::initializer_list<Fragment> fragments) {
    expect_refused([&] { L{shape}; }, fragments);
  };
  for (const auto& [q, kv] :
       {std::pair<Index, Index>{7, 3}, {2, 4}, {0, 2}, {4, 0}, {4, -2}, {0, 0}})
    refused({.q_heads = q, .kv_heads = kv, .head_dim = 16}, {"q_heads", q, "kv_heads", kv});
  refused({.q_heads = 4, .kv_heads = 2, .head_dim = 0}, {"dim", 0, 1});
  refused({.q_heads = 4, .kv_heads = 2, .head_dim = 16, .v_dim = -1}, {"dim", -1, 1});
  refused({.q_heads = 4, .kv_heads = 2, .head_dim = 16, .batch = 0}, {"batch", 0, 1});
  const std::vector<float> sinks(5);
  const auto attending = [](const AttentionOptions& options,
                            std::initializer_list<Fragment> fragments) {
    expect_refused([&] { L(layer_shape, {}, options); }, fragments);
  };
  attending({.sinks = sinks}, {"sinks", 5, 6});
  attending({.softcap = -1.0f}, {"softcap", "[1e-30, 1e30]"});
  attending({.sliding_window = -3}, {"sliding_window", -3, 0});
  // One call's: with the next chunk there are more keys.
  const std::uint8_t seen[] = {1};
  attending({.mask = quoka::Mask::bytes(seen, {1, 1, 1, 1}, {1, 1, 1})}, {"mask", "one call's"});
  attending({.q_offset = 9}, {"q_offset", 9});
}

TEST(ChunkedPrefillRefuses, AChunkOnceItWasMovedFrom) {
  Random random(42);
  const Prompt prompt(random, 37);
  auto out = output_of(prompt);
  Quoka from(layer_shape);
  run(from, prompt, 0, 37, 37, out);
  const Quoka to(std::move(from));
  EXPECT_EQ(to.kv_len(), 37);
  EXPECT_EQ(from.kv_len(), 0);
  EXPECT_THROW(from.forward(prompt.q, prompt.k, prompt.v, out), std::invalid_argument);
}

// A layer of 127 keys, and a chunk of 37 with something wrong: forward() and prefill() refuse it,
// the cache and the Selection are as they were, nothing is written, and the valid chunk runs as if
// nothing had happened.
TEST(ChunkedPrefillRefuses, AChunkOfOtherShapes) {
  Random random(60);
  const Prompt prefix(random, 127), sound(random, 37);
  Quoka layer(layer_shape, {.budget = Budget::keys(37)});
  layer.append(prefix.k, prefix.v);
  const Selection before = layer.select(sound.q);
  const Index capacity = layer.cache().capacity();
  const struct {
    const char* name;
    std::array<Index, 4> sizes;
    std::initializer_list<Fragment> says;
  } table[] = {
      {"q", {2, q_heads, 37, head_dim}, {2, 1}},     {"q", {1, 4, 37, head_dim}, {4, 6}},
      {"q", {1, q_heads, 37, 17}, {17, 16}},         {"k", {1, kv_heads, 36, head_dim}, {36, 37}},
      {"k", {1, 3, 37, head_dim}, {3, 2}},           {"k", {1, kv_heads, 37, 15}, {15, 16}},
      {"v", {1, kv_heads, 30, v_dim}, {30, 37}},     {"v", {3, kv_heads, 37, v_dim}, {3, 1}},
      {"v", {1, kv_heads, 37, 16}, {16, 20}},        {"out", {1, q_heads, 30, v_dim}, {30, 37}},
      {"out", {1, q_heads, 37, head_dim}, {16, 20}}, {"out", {1, kv_heads, 37, v_dim}, {2, 6}},
  };
  for (const auto& [name, sizes, says] : table)
    for (const bool whole : {false, true}) {
      SCOPED_TRACE(std::string(whole ? "prefill" : "forward") + " of another " + name);
      Prompt chunk = sound;
      Tensor4<float> out = output_of(chunk);
      const std::string is = name;
      (is == "q"   ? chunk.q
       : is == "k" ? chunk.k
       : is == "v" ? chunk.v
                   : out) = random.tensor<float>(sizes[0], sizes[1], sizes[2], sizes[3]);
      out.setConstant(-12345.0f);
      expect_refused(
          [&] {
            if (whole)
              layer.prefill(chunk.q, chunk.k, chunk.v, out, 7);
            else
              layer.forward(chunk.q, chunk.k, chunk.v, out);
          },
          says);
      for (Index i = 0; i < out.size(); ++i) ASSERT_EQ(out.data()[i], -12345.0f);
      ASSERT_EQ(layer.kv_len(), 127);
      EXPECT_EQ(layer.selection(), before);
      EXPECT_EQ(layer.cache().capacity(), capacity);
      EXPECT_TRUE(same_bits(layer.cache().k(), prefix.k));
      EXPECT_TRUE(same_bits(layer.cache().v(), prefix.v));
    }
  auto out = output_of(sound);
  const auto none = [](const Tensor4<float>& x) { return TensorView<const float>(x).slice(0, 0); };
  expect_refused(
      [&] {
        layer.forward(none(sound.q), none(sound.k), none(sound.v),
                      TensorView<float>(out).slice(0, 0));
      },
      {"q_len", 0, 1});
  expect_refused([&] { layer.prefill(sound.q, sound.k, sound.v, out, 0); }, {"chunk_len", 0, 1});
  expect_refused([&] { layer.append(sound.q_rows(0, 7), sound.k_rows(0, 8), sound.v_rows(0, 8)); },
                 {"len", 8, 7});
  expect_refused([&] { layer.reserve(-5); }, {"capacity", -5, 0});
  expect_refused([&] { layer.truncate(128); }, {128, 127});
  expect_refused([&] { layer.truncate(-1); }, {-1, 0});
  layer.truncate(127);
  Quoka undisturbed(layer_shape, {.budget = Budget::keys(37)});
  undisturbed.append(prefix.k, prefix.v);
  EXPECT_TRUE(same_bits(run(layer, sound, 37), run(undisturbed, sound, 37)));
}

TEST(ChunkedPrefillRefuses, APromptWhoseOutputLiesInItsInputs) {
  Random random(63);
  const auto q = random.tensor<float>(1, 2, 37, 16), k = random.tensor<float>(1, 2, 37, 16),
             v = random.tensor<float>(1, 2, 37, 16);
  Quoka layer({.q_heads = 2, .kv_heads = 2, .head_dim = 16});
  for (const auto& [x, name] : {std::pair{&q, "q"}, {&k, "k"}, {&v, "v"}}) {
    const TensorView<float> out(const_cast<float*>(x->data()), {1, 2, 37, 16},
                                {2 * 37 * 16, 37 * 16, 16, 1});
    expect_refused([&] { layer.prefill(q, k, v, out, 10); },
                   {std::string("out shares memory with ") + name});
    EXPECT_EQ(layer.kv_len(), 0);
  }
}

// A caller's own selector may return a wrong Selection.
struct OneKeyMore : DenseSelector {
  using DenseSelector::DenseSelector;
  void select(const quoka::SelectorInput& input, State&, Selection& selection, ExecutorRef) const {
    const Index len = input.k.len();
    selection.select_all(input.k.batch(), input.k.heads(), len > 0 ? len + 1 : 0);
  }
};

TEST(ChunkedPrefillRefuses, ASelectionOfAnotherCache) {
  Random random(62);
  const Prompt prompt(random, 74);
  ChunkedPrefill<OneKeyMore> layer(layer_shape);
  auto out = output_of(prompt);
  expect_refused([&] { layer.prefill(prompt.q, prompt.k, prompt.v, out, 37); },
                 {"the selection's kv_len", 38, 37});
  EXPECT_EQ(layer.kv_len(), 0);
}

}  // namespace
