// select/after_selection.hpp: a step of a layer is one parallel run, and the same to the last bit as selection,
// attention and append one after the other; whatever fails in it, the layer is as it was.

#include <quoka/attention/packed_past.hpp>
#include <quoka/packing/byte_formats.hpp>
#include <quoka/prefill/chunked_prefill.hpp>
#include <quoka/runtime/thread_pool.hpp>
#include <quoka/methods/sample_attention.hpp>
#include <quoka/methods/tidal_decode.hpp>
#include <quoka/select/quoka.hpp>

#include "support/attention_fixtures.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string_view>
#include <utility>
#include <vector>

namespace {

using namespace quoka_test;
using quoka::AttentionOptions;
using quoka::ChunkedPrefill;
using quoka::LayerShape;
using quoka::QuokaOptions;
using quoka::QuokaSelector;

// Leaves alone what follows.
template <class S>
struct Alone {
  using Options = typename S::Options;
  using State = typename S::State;
  explicit Alone(const Options& options) : selector(options) {}
  void select(const quoka::SelectorInput& input, State& state, Selection& selection,
              ExecutorRef executor) const {
    selector.select(input, state, selection, executor);
  }
  void appended(const quoka::SelectorInput& input, State& state, ExecutorRef executor) const {
    selector.appended(input, state, executor);
  }
  S selector;
};

// So many workers, all of them the calling thread; counts runs, and fails at a task.
struct Counting {
  int claimed = 1;
  int* runs = nullptr;
  long* tasks_left = nullptr;

  int workers() const { return claimed; }
  template <class F>
  void run(Index tasks, F&& f) {
    if (runs != nullptr) ++*runs;
    for (Index task = 0; task < tasks; ++task)
      one([&] { f(task, static_cast<int>(task % claimed)); });
  }
  void run_chains(const quoka::Chains& chains) {
    if (runs != nullptr) ++*runs;
    int worker = 0;
    // All chains of the slots side by side, stage by stage.
    for (Index first = 0; first < chains.count(); first += chains.slots())
      for (int stage = 0; stage < chains.stages(); ++stage)
        for (Index chain = first; chain < std::min(chains.count(), first + chains.slots()); ++chain)
          for (Index task = 0; task < chains.tasks(stage); ++task)
            one([&] { chains(chain, stage, task, worker++ % claimed); });
  }

 private:
  template <class F>
  void one(F&& f) {
    if (tasks_left != nullptr && (*tasks_left)-- == 0) throw std::runtime_error("fails");
    f();
  }
};

struct Case {
  const char* name;
  LayerShape shape;
  AttentionOptions attention;
  std::vector<Index> chunks;  // after a first one of 300
};

std::vector<Case> cases() {
  static const std::vector<float> sinks{0.5f, -1.0f, 2.0f, 0.0f, 1.0f, -3.0f, 0.25f, 4.0f},
      slopes{0.5f, 0.25f, 0.125f, 0.0625f, 0.03f, 0.015f, 0.007f, 0.003f};
  const LayerShape plain{.q_heads = 8, .kv_heads = 2, .head_dim = 40, .v_dim = 24};
  LayerShape batch = plain, half = plain, bytes = plain, packed = plain;
  batch.batch = 3;
  half.k_format = half.v_format = &quoka::format_of<Eigen::half>();
  bytes.k_format = bytes.v_format = &quoka::q8_0_format();
  bytes.head_dim = bytes.v_dim = 64;
  packed.packed = true;
  AttentionOptions with_sinks, biased, capped, window;
  with_sinks.sink_logits = sinks;
  biased.alibi_slopes = slopes;
  capped.softcap = 20.0f;
  window.sliding_window = 150;
  return {{"chunks", plain, {}, {128, 37, 5, 1, 1, 64}},
          {"batch", batch, {}, {32, 1, 7}},
          {"half", half, {}, {64, 1}},
          {"bytes", bytes, {}, {64, 1}},
          {"packed", packed, {}, {64, 1}},
          {"sinks", plain, with_sinks, {64, 1}},
          {"alibi", plain, biased, {64, 1}},
          {"softcap", plain, capped, {64, 1}},
          {"window", plain, window, {64, 1}}};
}

struct Chunk {
  Tensor4<float> q, k, v, out;
  Chunk(Random& random, const LayerShape& shape, Index len)
      : q(random.tensor<float>(shape.batch, shape.q_heads, len, shape.head_dim)),
        k(random.tensor<float>(shape.batch, shape.kv_heads, len, shape.head_dim)),
        v(random.tensor<float>(shape.batch, shape.kv_heads, len, shape.v_dim)),
        out(shape.batch, shape.q_heads, len, shape.v_dim) {
    out.setConstant(-1234.0f);
  }
};

std::vector<Chunk> prompt_of(const Case& of, std::uint64_t seed) {
  Random random(seed);
  std::vector<Chunk> prompt;
  prompt.emplace_back(random, of.shape, 300);
  for (const Index len : of.chunks) prompt.emplace_back(random, of.shape, len);
  return prompt;
}

template <class Layer>
void forward(Layer& layer, Chunk& chunk, ExecutorRef executor) {
  layer.forward(chunk.q, chunk.k, chunk.v, quoka::TensorView<float>(chunk.out), executor);
}

QuokaOptions of_preset(std::string_view name, Index budget) {
  QuokaOptions options = QuokaOptions::preset(name, Budget::keys(budget));
  options.sketch = quoka::Sketch::on;
  return options;
}

template <class S>
void expect_the_same(const Case& of, const typename S::Options& options, ExecutorRef executor) {
  std::vector<Chunk> one = prompt_of(of, 7), alone = prompt_of(of, 7);
  ChunkedPrefill<S> layer(of.shape, options, of.attention);
  ChunkedPrefill<Alone<S>> expected(of.shape, options, of.attention);
  for (std::size_t i = 0; i < one.size(); ++i) {
    SCOPED_TRACE(testing::Message() << of.name << ", chunk " << i);
    forward(layer, one[i], executor);
    forward(expected, alone[i], SerialExecutor{});
    ASSERT_EQ(layer.kv_len(), expected.kv_len());
    ASSERT_EQ(layer.selection(), expected.selection());
    ASSERT_TRUE(same_bits(one[i].out, alone[i].out));
    ASSERT_EQ(layer.kept_bytes(), expected.kept_bytes());
  }
  // What was appended in the run is what the next selection reads.
  Random random(8);
  const auto q = random.tensor<float>(of.shape.batch, of.shape.q_heads, 20, of.shape.head_dim);
  EXPECT_EQ(layer.select(q), expected.select(q));
}

// The library's selectors refuse windows; one of a caller's own may choose as if there were none.
struct OfNoWindow : QuokaSelector {
  explicit OfNoWindow(const Options& options = {}) : QuokaSelector(options) {}
  void select(quoka::SelectorInput input, State& state, Selection& selection, ExecutorRef executor,
              quoka::AfterSelection* after = nullptr) const {
    if (input.logits) input.logits->sliding_window = 0;
    QuokaSelector::select(input, state, selection, executor, after);
  }
};

TEST(OneRun, IsSelectAttendAppendToTheLastBit) {
  quoka::ThreadPool pool(3);
  for (const Case& of : cases())
    for (const std::string_view preset : {"paper", "balanced", "recommended"}) {
      if (preset != "paper" && !of.attention.alibi_slopes.empty()) continue;  // refused
      SCOPED_TRACE(preset);
      const QuokaOptions options = of_preset(preset, 60);
      for (const int workers : {1, 5, 64, 128})
        expect_the_same<OfNoWindow>(of, options, Counting{workers});
      expect_the_same<OfNoWindow>(of, options, pool);
      QuokaOptions in_float = options;
      in_float.sketch = quoka::Sketch::off;
      expect_the_same<OfNoWindow>(of, in_float, Counting{5});
    }
}
TEST(OneRun, TakesInASelectorThatOnlyScores) {
  for (const Case& of : cases())
    for (const int workers : {1, 40}) {
      const AttentionOptions& attention = of.attention;
      if (attention.softcap != 0.0f || !attention.alibi_slopes.empty() ||
          attention.sliding_window > 0)
        continue;  // refused
      expect_the_same<quoka::SampleAttentionSelector>(of, {.budget = Budget::keys(60)},
                                                      Counting{workers});
    }
}
// How work is cut follows from which keys a window hides: attention waits for all heads' lists.
TEST(OneRun, WaitsWhereAWindowHidesKeysOfTheLists) {
  Case of = cases().front();
  of.attention.sliding_window = 300;
  of.chunks = {700, 96, 96, 96, 96, 96, 96, 1, 96};
  for (const int workers : {1, 64})
    expect_the_same<OfNoWindow>(of, of_preset("paper", 500), Counting{workers});
}
// Lists as long as several parts, and chunks in one of them.
TEST(OneRun, AttendsToLongLists) {
  const Case of{
      "long", {.q_heads = 4, .kv_heads = 2, .head_dim = 16, .v_dim = 16}, {}, {5000, 128, 1}};
  for (const int workers : {1, 2, 64})
    expect_the_same<QuokaSelector>(of, of_preset("paper", 4500), Counting{workers});
}

TEST(OneRun, IsOneParallelRun) {
  const Case of = cases().front();
  for (const char* const preset : {"paper", "balanced", "recommended"})
    for (const int workers : {1, 8, 64}) {
      ChunkedPrefill<QuokaSelector> layer(of.shape, of_preset(preset, 60));
      std::vector<Chunk> prompt = prompt_of(of, 7);
      forward(layer, prompt[0], SerialExecutor{});
      for (std::size_t i = 1; i < prompt.size(); ++i) {
        int runs = 0;
        forward(layer, prompt[i], Counting{workers, &runs});
        EXPECT_EQ(runs, 1) << preset << ", " << workers << " workers, chunk " << i;
      }
    }
}

// The layer goes on from where it was, whichever task fails: at 40 of them, the last ones among them.
TEST(OneRun, WhereATaskFailsTheLayerIsAsItWas) {
  const Case of = cases().front();
  for (const char* const preset : {"paper", "balanced", "recommended"})
    for (const int workers : {1, 64}) {
      std::vector<Chunk> expected = prompt_of(of, 9);
      const QuokaOptions options = of_preset(preset, 60);
      ChunkedPrefill<QuokaSelector> layer(of.shape, options), undisturbed(of.shape, options);
      for (Chunk& chunk : expected) forward(undisturbed, chunk, SerialExecutor{});
      std::vector<Chunk> prompt = prompt_of(of, 9);
      forward(layer, prompt[0], SerialExecutor{});
      for (std::size_t i = 1; i < prompt.size(); ++i) {
        const Index len = layer.kv_len();
        constexpr long many = std::numeric_limits<long>::max();
        long left = many;
        {
          ChunkedPrefill<QuokaSelector> counted(of.shape, options);
          for (std::size_t before = 0; before < i; ++before)
            forward(counted, expected[before], SerialExecutor{});
          forward(counted, expected[i], Counting{workers, nullptr, &left});
        }
        const long tasks = many - left;
        int failures = 0;
        for (long at = 0; at < tasks; at += at + 8 < tasks ? std::max(1L, tasks / 32) : 1) {
          left = at;
          EXPECT_THROW(forward(layer, prompt[i], Counting{workers, nullptr, &left}),
                       std::runtime_error);
          ++failures;
          ASSERT_EQ(layer.kv_len(), len);
        }
        EXPECT_GE(failures, std::min(tasks, 16L));
        forward(layer, prompt[i], Counting{workers});
        EXPECT_TRUE(same_bits(prompt[i].out, expected[i].out)) << preset << ", chunk " << i;
      }
      Random random(8);
      const auto q = random.tensor<float>(1, of.shape.q_heads, 20, of.shape.head_dim);
      EXPECT_EQ(layer.select(q), undisturbed.select(q));
    }
}

// A head whose rows codes cannot stand for is scored in float within the run.
TEST(OneRun, TakesInHeadsThatAreScoredInFloat) {
  const Case of = cases().front();
  for (const int workers : {1, 64}) {
    const QuokaOptions options = of_preset("balanced", 60);
    std::vector<Chunk> one = prompt_of(of, 11), alone = prompt_of(of, 11);
    ChunkedPrefill<QuokaSelector> layer(of.shape, options);
    ChunkedPrefill<Alone<QuokaSelector>> expected(of.shape, options);
    for (std::vector<Chunk>* const prompt : {&one, &alone})
      for (Chunk& chunk : *prompt)
        for (Index i = 0; i < chunk.k.dimension(2); i += 3) chunk.k(0, 1, i, 4) *= 1e20f;
    for (std::size_t i = 0; i < one.size(); ++i) {
      int runs = 0;
      forward(layer, one[i], Counting{workers, &runs});
      forward(expected, alone[i], SerialExecutor{});
      ASSERT_EQ(layer.selection(), expected.selection());
      ASSERT_TRUE(same_bits(one[i].out, alone[i].out));
      if (i > 0) {
        EXPECT_EQ(runs, 1);
        EXPECT_EQ(layer.state().scorer.logit_error(1), std::numeric_limits<float>::infinity());
        EXPECT_TRUE(std::isfinite(layer.state().scorer.logit_error(0)));
      }
    }
  }
}

TEST(OneRun, APromiseIsNothingUnlessItIsKept) {
  Selection selection;
  {
    quoka::SelectionWriter writer(selection, 1, 2, 10, 3);
    const Selection& promised = writer.unfinished();
    EXPECT_EQ(&promised, &selection);
    EXPECT_EQ(promised.count(0, 1), 3);
    for (const Index head : {0, 1})
      for (Index i = 0; i < 3; ++i)
        writer.row(0, head)[uz(i)] = static_cast<quoka::Position>(4 * i + head);
    EXPECT_EQ(promised.row(0, 1)[2], 9);
    writer.check(0), writer.check(1);
    writer.row(0, 1)[1] = 1;
    expect_refused([&] { writer.check(1); }, {"KV head 1", 1});
  }
  EXPECT_EQ(selection, Selection());
  {
    quoka::SelectionWriter writer(selection, 1, 1, 10, 1);
    writer.unfinished();
    writer.row(0, 0)[0] = 7;
    writer.commit();
  }
  EXPECT_EQ(selection.positions(0, 0), std::vector<quoka::Position>{7});
}

// Positions that are none are found before anything reads keys by them.
TEST(OneRun, ChecksAHeadsPositionsBeforeTheyAreRead) {
  struct Reader final : quoka::AfterSelection {
    bool add_to(quoka::Chains& chains, const Selection&, int) override {
      chains.add_member<&Reader::read>(1, *this);
      return true;
    }
    quoka::SelectorInput appended() const override { return {}; }
    void read(Index head, int, Index, int) { heads.push_back(head); }
    std::vector<Index> heads;
  };
  for (const quoka::Position wrong : {-1, 3, 10}) {
    Selection selection;
    Reader reader;
    {
      quoka::SelectionWriter writer(selection, 1, 2, 10, 2);
      quoka::detail::AfterWriting rest(writer, &reader);
      quoka::Chains chains(2, 1);
      rest.add_to(chains, 1);
      for (const Index head : {0, 1})
        writer.row(0, head)[0] = 3, writer.row(0, head)[1] = head == 0 ? 5 : wrong;
      ExecutorRef executor = SerialExecutor{};
      EXPECT_THROW(executor.run_chains(chains), std::invalid_argument);
    }
    EXPECT_EQ(reader.heads, std::vector<Index>{0});
    EXPECT_EQ(selection, Selection());
  }
}

// A selector of a caller's own that takes along what follows.
enum class By { itself, other_pool, wrong_selection, wrong_chains, failing_run };
struct Own {
  struct Options {
    By by = By::itself;
  };
  using State = quoka::NoState;
  explicit Own(const Options& o) : options(o) {}
  void select(const quoka::SelectorInput& input, State&, Selection& selection,
              ExecutorRef) const {  // every third key
    choose(input, selection, nullptr, SerialExecutor{});
  }
  void select(const quoka::SelectorInput& input, State&, Selection& selection, ExecutorRef executor,
              quoka::AfterSelection* after) const {
    if (options.by != By::failing_run)
      return choose(input, selection, after,
                    options.by == By::other_pool ? ExecutorRef(sixteen) : executor);
    long left = 5;
    Counting failing{1, nullptr, &left};
    try {
      choose(input, selection, after, failing);
    } catch (const std::runtime_error&) {
      choose(input, selection, nullptr, executor);
    }
  }
  void appended(const quoka::SelectorInput&, State&, ExecutorRef) const {}

  void choose(const quoka::SelectorInput& input, Selection& selection, quoka::AfterSelection* after,
              ExecutorRef executor) const {
    const Index batch = input.k.batch(), heads = input.k.heads();
    const Index len =
        input.k.len() + (options.by == By::wrong_selection && after != nullptr ? 9 : 0);
    quoka::SelectionWriter writer(selection, batch, heads, len, len / 3);
    quoka::Chains chains(batch * heads - (options.by == By::wrong_chains ? 1 : 0),
                         executor.workers());
    auto write = [&](Index head, Index, int) {
      for (Index i = 0; i < len / 3; ++i)
        writer.row(head / heads, head % heads)[uz(i)] = static_cast<quoka::Position>(3 * i);
    };
    chains.add(1, write);
    quoka::detail::AfterWriting rest(writer, after);
    rest.add_to(chains, executor.workers());
    executor.run_chains(chains);
    writer.commit();
  }

  Options options;
  mutable Counting sixteen{16};
};
static_assert(quoka::Selector<Own>);

TEST(OneRun, TakesInACallersSelector) {
  const Case of = cases().front();
  for (const By by : {By::itself, By::other_pool, By::failing_run})
    expect_the_same<Own>(of, {by}, Counting{8});
}
TEST(OneRun, RefusesWhatACallersSelectorMustNotPassOn) {
  const Case of = cases().front();
  for (const By by : {By::wrong_selection, By::wrong_chains}) {
    ChunkedPrefill<Own> layer(of.shape, {by});
    std::vector<Chunk> prompt = prompt_of(of, 7);
    layer.append(prompt[0].k, prompt[0].v);
    if (by == By::wrong_selection)
      expect_refused([&] { forward(layer, prompt[1], SerialExecutor{}); }, {"kv_len", 309, 300});
    else
      expect_refused([&] { forward(layer, prompt[1], SerialExecutor{}); },
                     {"chains", 1, "kv_heads", 2});
    EXPECT_EQ(layer.kv_len(), 300);
    EXPECT_EQ(prompt[1].out(0, 0, 0, 0), -1234.0f);
  }
}

// A choice that layers share outlives a layer's failure: the layer can be called again.
TEST(OneRun, AFailedLayerKeepsTheChoiceOfOthers) {
  const Case of = cases().front();
  using Layer = ChunkedPrefill<quoka::TidalDecodeSelector>;
  const auto shared = std::make_shared<quoka::SharedChoice>();
  std::vector<Layer> layers;
  for (Index i = 0; i < 3; ++i) {
    quoka::TidalDecodeSelector::Options options;
    options.budget = Budget::keys(30);
    options.plan = {.layer = i, .layer_count = 3, .first_sparse = 0};
    quoka::TidalDecodeSelector::State state;
    state.shared = shared;
    layers.emplace_back(of.shape, options, AttentionOptions{}, std::move(state));
  }
  std::vector<Chunk> prompt = prompt_of(of, 7);
  for (Layer& layer : layers) layer.append(prompt[0].k, prompt[0].v);
  for (Index i = 0; i < 3; ++i) {
    long left = 1;
    if (i == 2) {
      EXPECT_THROW(forward(layers[uz(i)], prompt[1], Counting{1, nullptr, &left}),
                   std::runtime_error);
    }
    forward(layers[uz(i)], prompt[1], SerialExecutor{});
  }
  EXPECT_EQ(layers[2].selection(), layers[1].selection());
}

}  // namespace
