// After a failure: an executor that fails at any of its tasks, over layers that share a choice. Whichever task failed,
// and whether the call is repeated or the chunk begun again, the layers continue as if nothing had failed.
// tidal_decode_test.cpp tests this for their selectors alone, selection_fuzz_test.cpp for any State, prefill_suite_test.cpp
// for a layer alone, ragged_test.cpp for a batch.

#include <quoka/layer/chunked_prefill.hpp>
#include <quoka/methods/tidal_decode.hpp>

#include "support/executors.hpp"
#include "support/fixtures.hpp"

#include <memory>

namespace {

using namespace quoka_test;
using quoka::AttentionOptions;
using quoka::ChunkedPrefill;
using quoka::LayerShape;

constexpr Index batch = 2, q_heads = 4, kv_heads = 2, dim = 20, longest = 280, count = 5;
using S = quoka::TidalDecodeSelector;

S::Options options_of(Index layer) {
  return {.budget = quoka::Budget::keys(31),
          .plan = {.layer = layer, .layer_count = count, .first_sparse = 1}};
}

struct Keys {
  explicit Keys(std::uint64_t seed) : random(seed) {}

  Random random;
  Tensor4<float> q = random.tensor<float>(batch, q_heads, longest, dim),
                 k = random.tensor<float>(batch, kv_heads, longest, dim),
                 v = random.tensor<float>(batch, kv_heads, longest, dim);
};

struct Stack {
  Stack() {
    const auto shared = std::make_shared<quoka::SharedChoice>();
    const LayerShape shape{
        .q_heads = q_heads, .kv_heads = kv_heads, .head_dim = dim, .v_dim = dim, .batch = batch};
    for (Index i = 0; i < count; ++i) {
      S::State state;
      state.shared = shared;
      layers.emplace_back(shape, options_of(i), AttentionOptions{}, std::move(state));
    }
  }
  Tensor4<float> forward(std::size_t layer, const Keys& keys, Index begin, Index n,
                         ExecutorRef by) {
    Tensor4<float> out(batch, q_heads, n, dim);
    const auto part = [&](const Tensor4<float>& x) { return Rows(x).slice(begin, n); };
    EXPECT_EQ(layers[layer].kv_len(), begin);
    layers[layer].forward(part(keys.q), part(keys.k), part(keys.v), TensorView<float>(out), by);
    return out;
  }

  std::vector<ChunkedPrefill<S>> layers;
};

// Every layer fails wherever it can. Then it is called again, or all layers go back to the chunk's beginning.
TEST(AfterFailuresOfASharedChoice, AChunkIsGivenAgainFromTheFirstLayerOrTheOneThatFailed) {
  const Keys keys(624);
  Stack stack, fresh;
  for (const auto& [begin, n] :
       {std::pair<Index, Index>{0, 100}, {100, 100}, {200, 40}, {240, 1}, {241, 20}}) {
    std::vector<Tensor4<float>> expected;
    for (std::size_t i = 0; i < uz(count); ++i)
      expected.push_back(fresh.forward(i, keys, begin, n, SerialExecutor{}));
    std::vector<bool> began_again(uz(count));
    long at = 0;
    for (std::size_t i = 0; i < uz(count);) try {
        const Tensor4<float> out = stack.forward(i, keys, begin, n, FailsAt{at});
        ASSERT_TRUE(same_bits(out, expected[i])) << "layer " << i << " after " << at << " failures";
        EXPECT_EQ(stack.layers[i].selection(), fresh.layers[i].selection());
        ++i, at = 0;
      } catch (const Failure&) {
        EXPECT_EQ(stack.layers[i].kv_len(), begin);
        if (++at != 3 || began_again[i]) continue;
        began_again[i] = true;
        for (auto& layer : stack.layers)
          if (layer.kv_len() > begin) layer.truncate(begin);
        i = 0, at = 0;
      }
    EXPECT_TRUE(began_again[uz(count) - 1]);
  }
}

}  // namespace
