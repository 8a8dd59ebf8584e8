// layer/chunked_prefill.hpp by example: in chunks of any size a prompt has the same bits; and refusals. Properties of
// every layer, after failures too, are in prefill_suite_test.cpp.

#include <quoka/layer/chunked_prefill.hpp>
#include <quoka/select/quoka.hpp>
#include <quoka/simd/tuning.hpp>

#include "support/attention_fixtures.hpp"

#include <gtest/gtest.h>

#include <deque>
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
    for (const Index chunk_len : row.alike) {  // up to rounding
      const auto other = in_chunks(chunk_len);
      for (Index i = 0; i < whole.size(); ++i)
        ASSERT_NEAR(other.data()[i], whole.data()[i],
                    0x1p-23 * std::abs(double{whole.data()[i]}) + noise * 4)
            << "chunk " << chunk_len;
    }
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

// A layer of 200 keys and a chunk of 37 that fits. With something wrong forward(), prefill() and append() refuse it: cache
// and Selection are as they were, nothing is written, and the sound chunk runs as if nothing had happened.
TEST(ChunkedPrefillRefuses, AChunkThatDoesNotFitOrSharesMemory) {
  Random random(60);
  const Prompt prefix(random, 200), sound(random, 37);
  Quoka layer(layer_shape, {.budget = Budget::keys(37)}),
      undisturbed(layer_shape, {.budget = Budget::keys(37)});
  layer.append(prefix.k, prefix.v), undisturbed.append(prefix.k, prefix.v);
  const Selection before = layer.select(sound.q);
  const Rows own_k = layer.cache().k(), own_v = layer.cache().v();
  std::deque<Tensor4<float>> tensors;
  const auto some = [&](Index b, Index heads, Index len, Index dim) -> Tensor4<float>& {
    return tensors.emplace_back(b, heads, len, dim).setConstant(-12345.0f), tensors.back();
  };
  std::vector<Position> order;
  struct Chunk {
    Rows q, k, v;
    quoka::OutputRows out;

    void write_into(const void* memory) {
      out = TensorView<float>(static_cast<float*>(const_cast<void*>(memory)),
                              {1, q_heads, 37, v_dim});
    }
    void share(Rows& rows, const Tensor4<float>& memory) {
      rows = TensorView<const float>(memory.data(), rows.sizes());
      write_into(memory.data());
    }
  };
  const struct {
    std::function<void(Chunk&)> wrong;
    std::vector<Fragment> says;
  } table[] = {
      {[&](Chunk& x) { x.q = some(1, 4, 37, head_dim); }, {"q's heads", 4, 6}},
      {[&](Chunk& x) { x.k = some(1, kv_heads, 36, head_dim); }, {"k's len", 36, 37}},
      {[&](Chunk& x) { x.v = some(1, kv_heads, 30, v_dim); }, {"v's len", 30, 37}},
      {[&](Chunk& x) { x.out = some(1, q_heads, 37, head_dim); }, {"out's dim", 16, 20}},
      {[&](Chunk& x) { x.share(x.q, some(1, q_heads, 37, v_dim)); }, {"out shares", "with q"}},
      {[&](Chunk& x) { x.share(x.k, some(1, q_heads, 37, v_dim)); },
       {"out shares", "with the chunk's keys"}},
      {[&](Chunk& x) { x.share(x.v, some(1, q_heads, 37, v_dim)); },
       {"out shares", "with the chunk's values"}},
      {[&](Chunk& x) {  // which the first chunk's results would overwrite
         order.assign(uz(q_heads * 37 * v_dim), 5);
         x.k = x.k.gathered(std::span(order).first(37));
         x.write_into(order.data());
       },
       {"out shares", "with the list of the chunk's keys"}},
      // The layer's own cache, which growth frees.
      {[&](Chunk& x) {
         x.q = {own_k.data(), own_k.format(), {1, q_heads, 37, head_dim}, {0, 0, head_dim * 4}};
       },
       {"q lies in the layer's cache"}},
      {[&](Chunk& x) { x.k = own_k.slice(160, 37); }, {"k", "cache"}},
      {[&](Chunk& x) { x.v = own_v.slice(163, 37); }, {"v", "cache"}},
      {[&](Chunk& x) { x.write_into(own_k.data()); }, {"out lies in the layer's cache"}},
      {[&](Chunk& x) {  // the third chunk's rows are the first one's
         x.out = TensorView<float>(some(1, q_heads, 37, v_dim).data(), {1, q_heads, 37, v_dim},
                                   {0, 37 * v_dim, 0, 1});
       },
       {"rows of out share memory"}},
  };
  enum By { forward, prefill, append };
  for (const auto& row : table)
    for (const By by : {forward, prefill, append}) {
      SCOPED_TRACE(::testing::Message() << "row " << &row - table << ", by " << by);
      Tensor4<float>& result = some(1, q_heads, 37, v_dim);
      Chunk x{sound.q, sound.k, sound.v, result};
      row.wrong(x);
      if (by == append && x.out.data() != Rows(result).data()) continue;
      expect_refused(
          [&] {
            if (by == forward) layer.forward(x.q, x.k, x.v, x.out);
            if (by == prefill) layer.prefill(x.q, x.k, x.v, x.out, 1);
            if (by == append) layer.append(x.q, x.k, x.v);
          },
          row.says);
      for (const Tensor4<float>& memory : tensors)
        ASSERT_EQ(std::count(memory.data(), memory.data() + memory.size(), -12345.0f),
                  memory.size());
      ASSERT_EQ(layer.kv_len(), 200);
      EXPECT_EQ(layer.selection(), before);
      EXPECT_EQ(layer.cache().k().data(), own_k.data()) << "the cache has grown";
      EXPECT_TRUE(same_bits(layer.cache().k(), prefix.k));
      EXPECT_TRUE(same_bits(layer.cache().v(), prefix.v));
    }
  auto out = output_of(sound);
  const auto q = [&](Index n) { return sound.q_rows(0, n); };
  const auto k = [&](Index n) { return sound.k_rows(0, n); };
  const auto v = [&](Index n) { return sound.v_rows(0, n); };
  expect_refused([&] { layer.forward(q(0), k(0), v(0), TensorView<float>(out).slice(0, 0)); },
                 {"q_len", 0, 1});
  expect_refused([&] { layer.prefill(q(37), k(37), v(37), out, 0); }, {"chunk_len", 0, 1});
  expect_refused([&] { layer.append(q(7), k(8), v(8)); }, {"len", 8, 7});
  expect_refused([&] { layer.append(own_k.slice(0, 3), v(3)); }, {"k", "cache"});
  expect_refused([&] { layer.append(k(3), own_v.slice(0, 3)); }, {"v", "cache"});
  expect_refused([&] { layer.reserve(-5); }, {"capacity", -5, 0});
  expect_refused([&] { layer.truncate(201); }, {201, 200});
  expect_refused([&] { layer.truncate(-1); }, {-1, 0});
  EXPECT_TRUE(same_bits(run(layer, sound, 37), run(undisturbed, sound, 37)));
  const Quoka to(std::move(layer));
  EXPECT_EQ(to.kv_len(), 237);
  EXPECT_EQ(layer.kv_len(), 0);  // NOLINT: what was moved from has no shape
  EXPECT_THROW(layer.forward(sound.q, sound.k, sound.v, out), std::invalid_argument);
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
