// select/after_selection.hpp: a step of a layer is one parallel run; what a selector may pass on to what follows it, and
// what is checked of it. That such a step is selection, attention and append one after the other, and that whatever
// fails in it leaves the layer as it was: prefill_suite_test.cpp.

#include <quoka/prefill/chunked_prefill.hpp>
#include <quoka/select/quoka.hpp>

#include "support/failing_executor.hpp"
#include "support/fixtures.hpp"

#include <gtest/gtest.h>

#include <stdexcept>
#include <vector>

namespace {

using namespace quoka_test;
using quoka::ChunkedPrefill;
using quoka::LayerShape;
using quoka::QuokaOptions;
using quoka::QuokaSelector;

constexpr LayerShape layer_shape{.q_heads = 8, .kv_heads = 2, .head_dim = 40, .v_dim = 24};

struct Chunk {
  Tensor4<float> q, k, v, out;
  Chunk(Random& random, Index len)
      : q(random.tensor<float>(1, 8, len, 40)),
        k(random.tensor<float>(1, 2, len, 40)),
        v(random.tensor<float>(1, 2, len, 24)),
        out(1, 8, len, 24) {
    out.setConstant(-1234.0f);
  }
};

std::vector<Chunk> prompt() {
  Random random(7);
  std::vector<Chunk> chunks;
  for (const Index len : {300, 128, 37, 5, 1, 1, 64}) chunks.emplace_back(random, len);
  return chunks;
}

template <class Layer>
void forward(Layer& layer, Chunk& chunk, ExecutorRef executor) {
  layer.forward(chunk.q, chunk.k, chunk.v, quoka::TensorView<float>(chunk.out), executor);
}

TEST(OneRun, IsOneParallelRun) {
  for (const char* const preset : {"paper", "balanced", "recommended"})
    for (const int workers : {1, 8, 64}) {
      QuokaOptions options = QuokaOptions::preset(preset, Budget::keys(60));
      options.sketch = quoka::Sketch::on;
      ChunkedPrefill<QuokaSelector> layer(layer_shape, options);
      std::vector<Chunk> chunks = prompt();
      for (Chunk& chunk : chunks) chunk.k(0, 1, 0, 4) *= 1e20f;  // a head that is scored in float
      forward(layer, chunks[0], SerialExecutor{});
      for (std::size_t i = 1; i < chunks.size(); ++i) {
        int runs = 0;
        forward(layer, chunks[i], InTurns{workers, &runs});
        EXPECT_EQ(runs, 1) << preset << ", " << workers << " workers, chunk " << i;
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
    try {
      choose(input, selection, after, FailsAt{5, 1});
    } catch (const Failure&) {
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
  mutable InTurns sixteen{16};
};
static_assert(quoka::Selector<Own>);

// Leaves alone what follows.
struct Alone {
  using Options = Own::Options;
  using State = Own::State;
  explicit Alone(const Options& options) : selector(options) {}
  void select(const quoka::SelectorInput& input, State& state, Selection& selection,
              ExecutorRef executor) const {
    selector.select(input, state, selection, executor);
  }
  void appended(const quoka::SelectorInput&, State&, ExecutorRef) const {}
  Own selector;
};

TEST(OneRun, TakesInACallersSelector) {
  for (const By by : {By::itself, By::other_pool, By::failing_run}) {
    std::vector<Chunk> one = prompt(), alone = prompt();
    ChunkedPrefill<Own> layer(layer_shape, {by});
    ChunkedPrefill<Alone> expected(layer_shape, {by});
    for (std::size_t i = 0; i < one.size(); ++i) {
      forward(layer, one[i], InTurns{8});
      forward(expected, alone[i], SerialExecutor{});
      ASSERT_EQ(layer.selection(), expected.selection());
      ASSERT_TRUE(same_bits(one[i].out, alone[i].out));
    }
  }
}

TEST(OneRun, RefusesWhatACallersSelectorMustNotPassOn) {
  for (const By by : {By::wrong_selection, By::wrong_chains}) {
    ChunkedPrefill<Own> layer(layer_shape, {by});
    std::vector<Chunk> chunks = prompt();
    layer.append(chunks[0].k, chunks[0].v);
    if (by == By::wrong_selection)
      expect_refused([&] { forward(layer, chunks[1], SerialExecutor{}); }, {"kv_len", 309, 300});
    else
      expect_refused([&] { forward(layer, chunks[1], SerialExecutor{}); },
                     {"chains", 1, "kv_heads", 2});
    EXPECT_EQ(layer.kv_len(), 300);
    EXPECT_EQ(chunks[1].out(0, 0, 0, 0), -1234.0f);
  }
}

}  // namespace
