// After a failure: an executor that fails at each of its tasks in turn, over layers that share a choice and over ragged
// batches. Whichever task failed, and whether the call is repeated or dropped, the object continues as one that saw the
// successful calls alone. selection_fuzz_test.cpp tests this for a State alone, prefill_suite_test.cpp for a layer
// alone.

#include <quoka/layer/chunked_prefill.hpp>
#include <quoka/layer/ragged.hpp>
#include <quoka/methods/tidal_decode.hpp>
#include <quoka/select/mass_selector.hpp>

#include "support/failing_executor.hpp"
#include "support/fixtures.hpp"

#include <functional>
#include <memory>

namespace {

using namespace quoka_test;
using quoka::AttentionOptions;
using quoka::ChunkedPrefill;
using quoka::LayerShape;
using quoka::SelectorInput;

// ---- steps of an object -------------------------------------------------------------------------

// All bits of a step's results.
using Results = std::vector<std::vector<float>>;

std::vector<float> numbers(const Selection& keep) {
  std::vector<float> all{static_cast<float>(keep.kv_len())};
  for (const auto& heads : to_positions(keep))
    for (const auto& list : heads) {
      for (const Index position : list) all.push_back(static_cast<float>(position));
      all.push_back(-1.0f);
    }
  return all;
}
std::vector<float> numbers(const Tensor4<float>& x) { return {x.data(), x.data() + x.size()}; }

// A step of an object; returns what a caller sees of it.
template <class Object>
using Step = std::function<std::vector<float>(Object&, ExecutorRef)>;

// The steps one after the other, without one of them.
template <class Object>
Results run(Object& object, const std::vector<Step<Object>>& steps, std::size_t but = ~0ul) {
  Results results;
  for (std::size_t i = 0; i < steps.size(); ++i)
    if (i != but) results.push_back(steps[i](object, SerialExecutor{}));
  return results;
}

// make() gives a fresh object.
template <class Object>
void expect_unharmed(const std::function<std::unique_ptr<Object>()>& make,
                     const std::vector<Step<Object>>& steps) {
  const auto fresh = make();
  const Results expected = run(*fresh, steps);
  // Each step fails wherever it can, and is tried again.
  const auto tried = make();
  std::vector<long> places;
  for (std::size_t i = 0; i < steps.size(); ++i) {
    for (long at = 0;; ++at) {
      ASSERT_LT(at, 100000);
      try {
        const std::vector<float> result = steps[i](*tried, FailsAt{at});
        ASSERT_EQ(result, expected[i]) << "step " << i << " after " << at << " failures";
        places.push_back(at);
        break;
      } catch (const Failure&) {
      }
    }
  }
  EXPECT_GT(*std::max_element(places.begin(), places.end()), 0);
  // It fails once and is dropped: at no more than 12 places of a step.
  for (std::size_t i = 0; i < steps.size(); ++i) {
    if (places[i] == 0) continue;
    const auto without = make();
    const Results others = run(*without, steps, i);
    for (long at = 0; at < places[i]; at += std::max(1L, places[i] / 11)) {
      const auto object = make();
      Results results;
      for (std::size_t j = 0; j < steps.size(); ++j) {
        if (j != i)
          results.push_back(steps[j](*object, SerialExecutor{}));
        else
          EXPECT_THROW(steps[j](*object, FailsAt{at}), Failure);
      }
      ASSERT_EQ(results, others) << "step " << i << " dropped at place " << at;
    }
  }
}

// ---- layers that share a choice -----------------------------------------------------------------

constexpr Index batch = 2, q_heads = 4, kv_heads = 2, dim = 20, longest = 660;

struct Keys {
  explicit Keys(std::uint64_t seed) : random(seed) {}

  Random random;
  Tensor4<float> q = random.tensor<float>(batch, q_heads, longest, dim),
                 k = random.tensor<float>(batch, kv_heads, longest, dim),
                 v = random.tensor<float>(batch, kv_heads, longest, dim);
};

template <class S>
Step<ChunkedPrefill<S>> forward(const Keys& keys, Index begin, Index n) {
  return [&keys, begin, n](ChunkedPrefill<S>& layer, ExecutorRef by) {
    Tensor4<float> out(batch, q_heads, n, dim);
    const auto part = [&](const Tensor4<float>& x) { return Rows(x).slice(begin, n); };
    EXPECT_EQ(layer.kv_len(), begin);
    layer.forward(part(keys.q), part(keys.k), part(keys.v), TensorView<float>(out), by);
    EXPECT_EQ(layer.kv_len(), begin + n);
    std::vector<float> result = numbers(out);
    for (const float position : numbers(layer.selection())) result.push_back(position);
    return result;
  };
}
struct Stack {
  using S = quoka::TidalDecodeSelector;

  explicit Stack(const LayerShape& shape) {
    const auto shared = std::make_shared<quoka::SharedChoice>();
    for (Index i = 0; i < 5; ++i) {
      S::Options options;
      options.budget = quoka::Budget::keys(31);
      options.plan = {.layer = i, .layer_count = 5, .first_sparse = 1};
      S::State state;
      state.shared = shared;
      layers.emplace_back(shape, options, AttentionOptions{}, std::move(state));
    }
  }
  std::vector<ChunkedPrefill<S>> layers;
};

// One chunk through all layers; after a failure all of them go back to where they were, or the layer is called again.
TEST(AfterFailuresOfASharedChoice, AChunkIsGivenAgainFromTheFirstLayerOrTheOneThatFailed) {
  const Keys keys(624);
  const LayerShape shape{
      .q_heads = q_heads, .kv_heads = kv_heads, .head_dim = dim, .v_dim = dim, .batch = batch};
  const auto chunk = [&keys](Index begin, Index n) -> Step<Stack> {
    return [&keys, begin, n](Stack& stack, ExecutorRef by) {
      std::vector<float> results;
      for (auto& layer : stack.layers) {
        if (layer.kv_len() > begin) layer.truncate(begin);
        if (layer.kv_len() < begin) return std::vector<float>{};  // the step before was dropped
      }
      for (auto& layer : stack.layers)
        for (const float x : forward<Stack::S>(keys, begin, n)(layer, by)) results.push_back(x);
      return results;
    };
  };
  expect_unharmed<Stack>([&] { return std::make_unique<Stack>(shape); },
                         {chunk(0, 100), chunk(100, 20), chunk(120, 1), chunk(110, 20)});
  // Callers of select() alone, whose caches nobody truncates.
  std::vector<Stack::S> selectors;
  std::vector<Stack::S::State> states(5);
  for (Index i = 0; i < 5; ++i) {
    Stack::S::Options options;
    options.budget = quoka::Budget::keys(31);
    options.plan = {.layer = i, .layer_count = 5, .first_sparse = 1};
    selectors.emplace_back(options);
    states[uz(i)].shared = states[0].shared;
  }
  const SelectorInput input{Rows(keys.q).slice(0, 20), Rows(keys.k).slice(0, 200),
                            quoka::LogitOptions{}};
  std::vector<Selection> expected(5), keep(5);
  for (std::size_t i = 0; i < 5; ++i)
    selectors[i].select(input, states[i], expected[i], SerialExecutor{});
  for (const std::size_t fails : {1, 2})
    for (long at = 0; at < 3; ++at)
      for (const bool from_the_first : {false, true}) {
        for (std::size_t i = 0; i < fails; ++i)
          selectors[i].select(input, states[i], keep[i], SerialExecutor{});
        EXPECT_THROW(selectors[fails].select(input, states[fails], keep[fails], FailsAt{at}),
                     Failure);
        for (std::size_t i = from_the_first ? 0 : fails; i < 5; ++i) {
          selectors[i].select(input, states[i], keep[i], SerialExecutor{});
          EXPECT_EQ(keep[i], expected[i]) << i;
        }
      }
}

// Each layer fails wherever it can and is called again; the others are left alone.
TEST(AfterFailuresOfASharedChoice, TheLayerMayBeCalledAgain) {
  const Keys keys(627);
  const LayerShape shape{
      .q_heads = q_heads, .kv_heads = kv_heads, .head_dim = dim, .v_dim = dim, .batch = batch};
  Stack stack(shape), fresh(shape);
  for (const auto& [begin, n] : {std::pair<Index, Index>{0, 200}, {200, 40}, {240, 1}, {241, 20}})
    for (std::size_t i = 0; i < stack.layers.size(); ++i) {
      const auto step = forward<Stack::S>(keys, begin, n);
      const std::vector<float> expected = step(fresh.layers[i], SerialExecutor{});
      for (long at = 0;; ++at) {
        try {
          ASSERT_EQ(step(stack.layers[i], FailsAt{at}), expected) << "layer " << i << ", " << at;
          break;
        } catch (const Failure&) {
        }
      }
    }
}

// ---- ragged batches -----------------------------------------------------------------------------

struct Batch {
  using S = quoka::MassSelector;

  explicit Batch(const Keys& keys_in) : keys(&keys_in) {}

  // Both sequences' first tokens [.., begin) are the past, and `n` more are the chunk.
  std::vector<float> run(Index begin, Index n, ExecutorRef by) {
    std::vector<Tensor4<float>> outs(2, Tensor4<float>(1, q_heads, n, dim));
    std::vector<quoka::RaggedSequence<S>> sequences;
    for (Index b = 0; b < 2; ++b) {
      const Index first = b == 0 ? 0 : 100;
      const auto of = [&](const Tensor4<float>& x, Index from, Index count) {
        const Rows all(x);
        return Rows(all.data() + b * all.strides()[0], all.format(),
                    {1, all.heads(), all.len(), all.dim()}, all.strides())
            .slice(from, count);
      };
      quoka::RaggedSequence<S> x{.q = of(keys->q, begin, n),
                                 .past_k = of(keys->k, first, begin - first),
                                 .past_v = of(keys->v, first, begin - first),
                                 .chunk = {of(keys->k, begin, n), of(keys->v, begin, n)},
                                 .out = TensorView<float>(outs[uz(b)]),
                                 .state = &states[shared ? 0 : b]};
      sequences.push_back(x);
    }
    quoka::select_and_attend(selector, std::span<const quoka::RaggedSequence<S>>(sequences), {}, by,
                             workspace);
    std::vector<float> results;
    for (const Tensor4<float>& out : outs)
      for (const float x : numbers(out)) results.push_back(x);
    return results;
  }
  std::vector<float> appended(Index b, Index end, ExecutorRef by) {
    const Index first = b == 0 ? 0 : 100;
    const auto of = [&](const Rows& x) {
      return Rows(x.data() + b * x.strides()[0], x.format(), {1, x.heads(), x.len(), x.dim()},
                  x.strides());
    };
    selector.appended(
        {of(Rows(keys->q)).slice(end - 20, 20), of(Rows(keys->k)).slice(first, end - first)},
        states[b], by);
    return {};
  }

  const Keys* keys;
  S selector{[] {
    quoka::MassOptions options = quoka::MassOptions::balanced(quoka::Budget::keys(31));
    options.sketch = quoka::Sketch::on;
    return options;
  }()};
  S::State states[2];
  bool shared = false;  // the first State serves both
  quoka::RaggedWorkspace<S> workspace;
};

TEST(AfterFailuresOfABatch, ItsStatesGoOnAsIfTheyHadNeverBeen) {
  const Keys keys(625);
  const auto attend = [](Index begin, Index n) -> Step<Batch> {
    return [begin, n](Batch& x, ExecutorRef by) { return x.run(begin, n, by); };
  };
  const auto appended = [](Index b, Index end) -> Step<Batch> {
    return [b, end](Batch& x, ExecutorRef by) { return x.appended(b, end, by); };
  };
  expect_unharmed<Batch>(
      [&] { return std::make_unique<Batch>(keys); },
      {appended(0, 300), appended(1, 300), attend(300, 20), appended(0, 320), appended(1, 320),
       attend(320, 1), appended(1, 600), appended(0, 600), attend(600, 30)});
}

// Sequences are selected for at once: a State of two of them would be written by both.
TEST(ABatch, RefusesOneStateForTwoSequences) {
  const Keys keys(626);
  Batch batch_of_two(keys);
  EXPECT_NO_THROW((void)batch_of_two.run(300, 20, SerialExecutor{}));
  batch_of_two.shared = true;
  expect_refused([&] { (void)batch_of_two.run(300, 20, SerialExecutor{}); }, {"sequence", 1, 0});
}

}  // namespace
