// TidalDecode, and its common part with LessIsMore: a choice that some layers of a stack make and the others reuse.
// Layers that choose do as the control of exact attention, which scored_methods_test.cpp compares with the oracle.

#include <quoka/methods/oracle.hpp>
#include <quoka/methods/tidal_decode.hpp>

#include "support/executors.hpp"
#include "support/fixtures.hpp"

namespace {

using namespace quoka_test;
using quoka::LayerPlan;
using quoka::SelectorInput;
using quoka::TidalDecodeOptions;
using quoka::TidalDecodeSelector;

// Layers of a model that share a choice, and a query and keys of each.
struct Stack {
  static constexpr Index batch = 2, kv_heads = 2, most_keys = 164;
  TidalDecodeOptions options;
  Index layers;
  std::vector<Tensor4<float>> q, k;
  std::vector<TidalDecodeSelector::State> states;

  Stack(Random& random, const TidalDecodeOptions& of, Index count)
      : options(of), layers(count), states(uz(count)) {
    options.plan.layer_count = layers;
    for (Index layer = 0; layer < layers; ++layer) {
      q.push_back(random.tensor<float>(batch, 4, 17, 20));
      k.push_back(random.tensor<float>(batch, kv_heads, most_keys, 20));
      states[uz(layer)].shared = states[0].shared;
    }
  }
  TidalDecodeSelector selector(Index layer) const {
    TidalDecodeOptions of_layer = options;
    of_layer.plan.layer = layer;
    return TidalDecodeSelector(of_layer);
  }
  SelectorInput input(Index layer, Index kv_len, std::uint64_t sequence = 0) const {
    return {.q = q[uz(layer)],
            .k = Rows(k[uz(layer)]).slice(0, kv_len),
            .logits = LogitOptions{},
            .sequence = sequence};
  }
  Selection select(Index layer, const SelectorInput& of) {
    Selection keep;
    selector(layer).select(of, states[uz(layer)], keep, SerialExecutor{});
    return keep;
  }
};

TEST(LayerPlans, CorrectAtTwoFifths) {
  for (auto [layers, correction] : {std::pair{32, 13}, {36, 14}, {28, 11}, {10, 4}, {4, 2}, {1, 0}})
    EXPECT_EQ((LayerPlan{.layer = 0, .layer_count = layers}.correction_layer()), correction)
        << layers << " layers";
}

// Drawn plans and calls: dense layers first, then each reuses the choice of the last layer that chooses. Layers are
// called in their order or in another one, of chunks of several sequences, with cuts and failures. A layer may be asked
// again; one below the last begins the chunk anew, and so do other keys. Without a choice it is refused, and nothing
// has changed.
TEST(SharedChoices, AreMadeWhereThePlanSaysAndReused) {
  for_each_draw("METHODS", 60, [](Random& random, std::uint64_t) {
    const Index layers = 1 + random.below(10), first = random.below(layers),
                correction = LayerPlan{.layer_count = layers}.correction_layer();
    SCOPED_TRACE(std::to_string(layers) + " layers, first_sparse " + std::to_string(first));
    const TidalDecodeOptions options{.budget = Budget::keys(random.seldom(5) ? 127 : 31),
                                     .plan = {.first_sparse = first},
                                     .keep_first = random.below(2) * 4,
                                     .keep_last = random.below(2) * 7};
    Stack stack(random, options, layers);
    std::optional<Selection> chosen;  // in this chunk
    Index last = -1, last_len = -1, kv_len = 127, told = 0;
    std::uint64_t last_sequence = 0, sequence = 5;
    bool from_the_first = false;
    for (Index call = 0; call < 5 * layers && !has_failed(); ++call) {
      const Index layer = std::exchange(from_the_first, false) ? 0
                          : random.seldom(6)                   ? random.below(layers)
                                                               : (last + 1) % layers;
      if (layer == 0 || random.seldom(20)) kv_len = random.one_of(127, 128, 164);
      if (random.seldom(12)) sequence = random.one_of(5u, 6u);
      if (random.seldom(10)) {
        const Index len = random.one_of<Index>(kv_len, kv_len - 1);
        for (auto& state : stack.states) state.truncate(len);
        if (len < told || told == 0) chosen.reset(), last = last_len = -1;
        told = std::min(told, len);
      }
      const SelectorInput input = stack.input(layer, kv_len, sequence);
      const bool again = kv_len == last_len && sequence == last_sequence && layer >= last,
                 dense = layer < first || options.budget.count(kv_len) == kv_len,
                 chooses = layer == first || layer == correction;
      if (!dense && !chooses && !(again && chosen)) {
        expect_refused([&] { (void)stack.select(layer, input); },
                       {"layer", layer, "first_sparse", first});
        continue;
      }
      if (random.seldom(5))
        try {  // a failure first, which changes nothing: the layer, or the first one, is called again
          Selection keep;
          stack.selector(layer).select(input, stack.states[uz(layer)], keep,
                                       FailsAt{random.below(4)});
        } catch (const Failure&) {
          from_the_first = random.seldom(3);
          if (told > 0)
            stack.states[uz(layer)].truncate(told);  // as ChunkedPrefill does, layer by layer
        }
      if (from_the_first) continue;
      if (!again) chosen.reset();
      if (!dense && chooses)
        chosen = quoka::OracleSelector({.budget = options.budget,
                                        .keep_first = options.keep_first,
                                        .keep_last = options.keep_last})
                     .select(input.q, input.k, {});
      EXPECT_EQ(stack.select(layer, input), dense ? Selection::all(2, 2, kv_len) : *chosen)
          << "layer " << layer << " of " << kv_len;
      last = layer, last_len = kv_len, last_sequence = sequence;
      if (random.seldom(8)) {
        for (Index i = 0; i < layers; ++i)
          stack.selector(i).appended(input, stack.states[uz(i)], SerialExecutor{});
        told = kv_len;
      }
    }
  });
}

TEST(SharedChoices, RefuseLayersOfAnotherShape) {
  Random random(544);
  const auto refuses = [&](Index batch, Index heads, std::initializer_list<Fragment> both) {
    Stack stack(random, {.budget = Budget::keys(31)}, 6);
    (void)stack.select(2, stack.input(2, 127));
    SelectorInput other = stack.input(3, 127);
    const auto q = random.tensor<float>(batch, 4, 7, 20),
               k = random.tensor<float>(batch, heads, 127, 20);
    other.q = q, other.k = k;
    expect_refused([&] { (void)stack.select(3, other); }, both);
  };
  refuses(1, 2, {"batch", 2, 1});
  refuses(2, 4, {"kv_heads", 2, 4});
}

}  // namespace
