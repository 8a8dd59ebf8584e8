// TidalDecode against the oracle, and its common part with LessIsMore: a choice that some layers of
// a stack make and the others reuse.

#include <quoka/methods/oracle.hpp>
#include <quoka/methods/tidal_decode.hpp>

#include "support/baseline_fixtures.hpp"

namespace {

using namespace quoka_test;
using quoka::LayerPlan;
using quoka::TidalDecodeOptions;
using quoka::TidalDecodeSelector;

using Tidal = Stack<TidalDecodeSelector>;

// Queries and keys of each layer of a chunk.
template <class T>
struct Chunk {
  Chunk(Random& random, Index layers, Index kv_len, Index batch = 1, Index q_len = 17) {
    for (Index layer = 0; layer < layers; ++layer) {
      q.push_back(random.tensor<T>(batch, 4, q_len, 20));
      k.push_back(random.tensor<T>(batch, 2, kv_len, 20));
    }
  }
  template <class S>
  Selection select(Stack<S>& stack, Index layer) const {
    return stack.select(layer, q[uz(layer)], k[uz(layer)]);
  }

  std::vector<Tensor4<T>> q, k;  // [layer]
};

TEST(TidalDecodeAlone, IsTheOracleControl) {  // a layer on its own chooses for itself; to the bit
  for_each_storage([]<class T>() {
    Random random(532);
    const Chunk<T> chunk(random, 1, 127);
    TidalDecodeSelector::State state;
    Selection keep;
    TidalDecodeSelector({.budget = Budget::keys(31), .keep_first = 4, .keep_last = 7})
        .select(SelectorInput{chunk.q[0], chunk.k[0], LogitOptions{}}, state, keep,
                quoka::SerialExecutor{});
    EXPECT_EQ(keep,
              quoka::OracleSelector({.budget = Budget::keys(31), .keep_first = 4, .keep_last = 7})
                  .select(chunk.q[0], chunk.k[0], {}));
  });
}

// ---- a stack of layers --------------------------------------------------------------------------

TEST(LayerPlans, CorrectAtTwoFifths) {
  for (auto [layers, correction] : {std::pair{32, 13}, {36, 14}, {28, 11}, {10, 4}, {4, 2}, {1, 0}})
    EXPECT_EQ((LayerPlan{.layer = 0, .layer_count = layers}.correction_layer()), correction)
        << layers << " layers";
}

// Drawn plans and chunks: dense layers first, then each reuses the choice of the last layer that chooses. A layer may be
// asked again, and a chunk begun anew at a layer that chooses or is dense.
TEST(SharedChoices, AreMadeWhereThePlanSaysAndReused) {
  for (std::uint64_t seed = 0; seed < 30; ++seed) {
    Random random(seed);
    const Index layers = 1 + random.below(10), first = random.below(layers);
    SCOPED_TRACE(std::to_string(layers) + " layers, first_sparse " + std::to_string(first));
    Tidal stack({.budget = Budget::keys(31), .plan = {.first_sparse = first}}, layers);
    const Index correction = LayerPlan{.layer_count = layers}.correction_layer();
    for (Index kv_len : {127, 164}) {
      const Chunk<float> chunk(random, layers, kv_len, 2);
      const Index again_after = random.below(2 * layers);
      for (Index layer = 0, done = 0; layer < layers; ++layer) {
        const Selection keep = chunk.select(stack, layer);
        const Index chosen_at = layer >= correction && correction > first ? correction : first;
        EXPECT_EQ(keep, layer < first
                            ? Selection::all(2, 2, kv_len)
                            : quoka::OracleSelector({.budget = Budget::keys(31)})
                                  .select(chunk.q[uz(chosen_at)], chunk.k[uz(chosen_at)], {}))
            << layer;
        EXPECT_EQ(chunk.select(stack, layer), keep) << layer;
        if (done++ == again_after) layer = std::min(first, layer) - 1;
      }
    }
  }
}

// The caller's numbers distinguish two sequences of one length.
TEST(SharedChoices, BelongToTheSequenceOfTheirNumber) {
  Random random(541);
  const auto q = random.tensor<float>(1, 4, 17, 20), k = random.tensor<float>(1, 2, 127, 20);
  const TidalDecodeSelector chooses({.budget = quoka::Budget::keys(31)}),
      reuses({.budget = quoka::Budget::keys(31), .plan = {.layer = 3}});
  TidalDecodeSelector::State state;
  const auto select = [&](const TidalDecodeSelector& layer, std::uint64_t sequence) {
    Selection keep;
    layer.select({.q = q, .k = k, .logits = quoka::LogitOptions{}, .sequence = sequence}, state,
                 keep, SerialExecutor{});
    return keep;
  };
  const Selection chosen = select(chooses, 5);
  EXPECT_EQ(select(reuses, 5), chosen);
  expect_refused([&] { select(reuses, 6); }, {"layer", 3, 2});
  EXPECT_EQ(select(reuses, 5), chosen);  // the refusal has changed nothing
  EXPECT_EQ(select(chooses, 6), chosen);
  EXPECT_EQ(select(reuses, 6), chosen);
}

TEST(SharedChoices, AreNotNeededWhereTheBudgetHoldsAll) {
  Random random(542);
  const auto q = random.tensor<float>(1, 4, 17, 20), k = random.tensor<float>(1, 2, 127, 20);
  const TidalDecodeSelector reuses({.budget = quoka::Budget::keys(127), .plan = {.layer = 3}});
  TidalDecodeSelector::State state;
  Selection keep;
  reuses.select({q, k, quoka::LogitOptions{}}, state, keep, SerialExecutor{});
  EXPECT_TRUE(keep.is_all());
}

// ---- refused choices ----------------------------------------------------------------------------

// A layer below the last one begins the chunk again: layers that choose may, the others have no choice to reuse.
TEST(SharedChoicesRefuse, LayersOutOfOrder) {
  Random random(541);
  const Chunk<float> chunk(random, 6, 127);
  Tidal stack({.budget = Budget::keys(31)}, 6);
  for (Index layer = 0; layer < 6; ++layer) (void)chunk.select(stack, layer);
  for (const Index layer : {3, 4})
    expect_refused([&] { (void)chunk.select(stack, layer); }, {"layer", layer, "first_sparse", 2});
  EXPECT_EQ(chunk.select(stack, 5).max_count(), 31);  // and nothing has changed
}
TEST(SharedChoicesRefuse, ReuseBeforeAnyChoice) {
  Random random(542);
  const Chunk<float> chunk(random, 6, 127), next(random, 6, 128);
  Tidal stack({.budget = Budget::keys(31)}, 6);
  expect_refused([&] { (void)chunk.select(stack, 3); }, {"layer", 3, "first_sparse", 2});
  for (Index layer = 0; layer < 6; ++layer) (void)chunk.select(stack, layer);
  expect_refused([&] { (void)next.select(stack, 5); }, {"layer", 5, "first_sparse", 2});
}

TEST(SharedChoicesRefuse, ReuseAfterTruncate) {  // even at the same length: the keys are others
  Random random(543);
  const Chunk<float> chunk(random, 6, 127);
  Tidal stack({.budget = Budget::keys(31)}, 6);
  for (Index layer = 0; layer < 4; ++layer) (void)chunk.select(stack, layer);
  stack.truncate(127);
  expect_refused([&] { (void)chunk.select(stack, 4); }, {"layer", 4, "first_sparse", 2});
  for (Index layer = 0; layer < 6; ++layer) (void)chunk.select(stack, layer);  // from the start
}

TEST(SharedChoicesRefuse, LayersOfAnotherShape) {
  Random random(544);
  const auto q = random.tensor<float>(2, 4, 7, 20), k = random.tensor<float>(2, 2, 127, 20);
  const auto refuses = [&](Index batch, Index heads, std::initializer_list<Fragment> both) {
    Tidal stack({.budget = Budget::keys(31)}, 6);
    (void)stack.select(2, q, k);
    const auto q_other = random.tensor<float>(batch, 4, 7, 20),
               k_other = random.tensor<float>(batch, heads, 127, 20);
    expect_refused([&] { (void)stack.select(3, q_other, k_other); }, both);
  };
  refuses(1, 2, {"batch", 2, 1});
  refuses(2, 4, {"kv_heads", 2, 4});
}

}  // namespace
