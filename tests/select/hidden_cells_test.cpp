// select/visible.hpp and layer/ragged.hpp: a State of a sequence whose masks hide other cells in each call.

#include <quoka/layer/ragged.hpp>
#include <quoka/methods/all.hpp>

#include "support/attention_fixtures.hpp"
#include "support/selector_names.hpp"

#include <memory>
#include <set>

namespace {

using namespace quoka_test;
using quoka::Mask;
using quoka::QuokaOptions;
using quoka::QuokaSelector;
using quoka::RaggedSequence;
using quoka::RaggedWorkspace;
using quoka::Sketch;
using quoka::VisibleCells;

template <class S>
constexpr bool keeps = requires(const typename S::State& state) {
  state.kept_bytes();
};

constexpr Index q_heads = 4, kv_heads = 2, dim = 16, q_len = 5;

// A cache of one sequence that grows, and masks over it.
struct Cache {
  static constexpr Index room = 700;
  Random random{70};
  Tensor4<float> q = random.tensor<float>(1, q_heads, q_len, dim),
                 k = random.tensor<float>(1, kv_heads, room, dim);
  std::vector<std::uint8_t> seen;

  Rows keys(Index len) const { return Rows(k).slice(0, len); }
  // hidden(query, cell) of the first `len` cells; the chunk sees itself.
  template <class F>
  Mask mask(Index len, F&& hidden) {
    const Index row = len + q_len;
    seen.assign(uz(q_len * row), 1);
    for (Index i = 0; i < q_len; ++i)
      for (Index t = 0; t < len; ++t)
        if (hidden(i, t)) seen[uz(i * row + t)] = 0;
    return Mask::bytes(seen.data(), {1, 1, q_len, row}, {0, 0, row});
  }
};

template <class S>
typename S::Options with_budget(quoka::Budget budget) {
  typename S::Options options{};
  if constexpr (requires { options.budget = budget; }) options.budget = budget;
  if constexpr (requires { options.sketch = Sketch::on; }) options.sketch = Sketch::on;
  return options;
}

template <class S>
class StateOfHiddenCells : public ::testing::Test {};
TYPED_TEST_SUITE(StateOfHiddenCells, SelectorTypes, SelectorNames);

// An engine that gives only its cache's length: a State's memory grows by doubling, so it is copied a few times in all,
// not once for each few tokens.
TYPED_TEST(StateOfHiddenCells, GrowsByDoublingWhereTheCapacityIsNotKnown) {
  using S = TypeParam;
  if constexpr (keeps<S>) {
    Cache cache;
    const S selector(with_budget<S>(quoka::Budget::keys(40)));
    typename S::State state;
    std::set<Index> sizes;
    Selection keep;
    for (Index len = 500; len <= Cache::room; ++len) {
      const quoka::SelectorInput input{
          .q = cache.q, .k = cache.keys(len), .logits = quoka::LogitOptions{}, .capacity = len};
      if (len == 550) selector.select(input, state, keep, SerialExecutor{});
      selector.appended(input, state, SerialExecutor{});
      sizes.insert(state.kept_bytes());
    }
    EXPECT_LE(sizes.size(), 5u);
  }
}

// Keys that are not of the sketched cache. Those of it: selection_fuzz_test.cpp.
TEST(VisibleWithASketch, RefusesTheKeysOfAnotherCache) {
  Cache cache;
  quoka::KeySketch sketch;
  sketch.update(Rows(cache.k), 0, Cache::room, SerialExecutor{});
  const QuokaSelector selector(with_budget<QuokaSelector>(quoka::Budget::keys(40)));
  QuokaSelector::State state;
  const Tensor4<float> elsewhere = cache.k;
  const Mask mask = cache.mask(600, [](Index, Index t) { return t == 9; });
  Selection keep;
  const auto refused = [&](const Rows& keys) {
    expect_refused(
        [&] {
          select_visible(selector, {.q = cache.q, .k = keys, .sketch = &sketch},
                         VisibleCells(mask, 600), state, keep);
        },
        {"not of the cache"});
  };
  refused(Rows(elsewhere).slice(0, 600));
  sketch.update(Rows(cache.k).slice(50, 620), 0, 0, SerialExecutor{});  // it lies elsewhere now
  refused(Rows(cache.k).slice(49, 600));
  refused(Rows(cache.k).slice(71, 600));
}

// ---- ragged -------------------------------------------------------------------------------------

// Some sequences over one cache, each with a State.
class RaggedStates : public ::testing::Test {
 protected:
  static constexpr Index n = 3, len = 300;

  RaggedSequence<QuokaSelector> sequence(std::size_t i) {
    return {.q = cache_.q,
            .past_k = cache_.keys(len),
            .past_v = cache_.keys(len),
            .chunk = {own_, own_},
            .out = outs_[i],
            .state = &states_[i],
            .sequence = 100 + i};
  }
  void SetUp() override {
    for (std::size_t i = 0; i < n; ++i) outs_.push_back(cache_.q);
    for (std::size_t i = 0; i < n; ++i) batch_.push_back(sequence(i));
  }
  void run(const AttentionOptions& options = {}) {
    quoka::select_and_attend<QuokaSelector>(selector_, batch_, options, SerialExecutor{},
                                            workspace_);
  }
  // Nothing is written, and no State has been used.
  void refused(std::initializer_list<Fragment> fragments, const AttentionOptions& options = {}) {
    const auto before = outs_;
    expect_refused([&] { run(options); }, fragments);
    for (std::size_t i = 0; i < n; ++i) EXPECT_TRUE(same_bits(outs_[i], before[i]));
  }

  Cache cache_;
  Tensor4<float> own_ = cache_.random.tensor<float>(1, kv_heads, q_len, dim);
  QuokaSelector selector_{QuokaOptions{.budget = quoka::Budget::keys(40)}};
  QuokaSelector::State states_[n];
  std::vector<Tensor4<float>> outs_;
  std::vector<RaggedSequence<QuokaSelector>> batch_;
  RaggedWorkspace<QuokaSelector> workspace_;
};

TEST_F(RaggedStates, ServeMasksThatHideMoreFromCallToCall) {
  for (Index hidden = 0; hidden < 5; ++hidden) {
    const Mask mask = cache_.mask(len, [&](Index, Index t) { return t >= 20 && t < 20 + hidden; });
    batch_[1].mask = mask;
    run();
    Selection expected;
    QuokaSelector::State own;
    select_visible(selector_, {.q = cache_.q, .k = cache_.keys(len)}, VisibleCells(mask, len), own,
                   expected);
    EXPECT_EQ(workspace_.selection(1), expected) << hidden;
    EXPECT_EQ(workspace_.selection(1).max_count(), 40);
  }
}

// A mask of the options is that of the sequences that have none, in selection too.
TEST_F(RaggedStates, SelectByTheMaskOfTheOptions) {
  const Mask mask = cache_.mask(len, [&](Index, Index t) { return t < 200; });
  run({.mask = mask});
  for (Index i = 0; i < n; ++i)
    for (Index head = 0; head < kv_heads; ++head) {
      EXPECT_EQ(workspace_.selection(i).count(0, head), 40);
      EXPECT_GE(workspace_.selection(i).positions(0, head).front(), 200);
    }
}

TEST_F(RaggedStates, NameTheSequenceThatAttentionRefuses) {
  batch_[2].past_v = cache_.keys(len - 1);
  refused({"sequence", 2, "past v's len", len - 1, len});
  EXPECT_EQ(states_[0].kept_bytes(), 0) << "a State was used before all was checked";
  batch_[2] = sequence(2);
  batch_[1].mask = cache_.mask(len - 7, [](Index, Index) { return false; });
  refused({"sequence", 1, "mask's keys", len - 7 + q_len, len + q_len});
  EXPECT_EQ(states_[0].kept_bytes(), 0);
}

TEST_F(RaggedStates, NameTheSequenceThatSelectionRefuses) {
  const QuokaSelector with_sketch{
      QuokaOptions{.budget = quoka::Budget::keys(40), .sketch = Sketch::on}};
  for (std::size_t i = 0; i < n; ++i)
    with_sketch.appended({.q = cache_.q, .k = cache_.keys(len), .sequence = 100 + i}, states_[i],
                         SerialExecutor{});
  run();
  batch_[1].sequence = 7;
  refused({"sequence", 1, "sequence's number", 7, 101});
  quoka::ThreadPool pool(2);
  expect_refused(
      [&] { quoka::select_and_attend<QuokaSelector>(with_sketch, batch_, {}, pool, workspace_); },
      {"sequence", 1, "sequence's number", 7, 101});
}

TEST_F(RaggedStates, BelongToOneSequenceEach) {
  batch_[2].state = batch_[0].state;
  refused({"sequences", 0, 2, "the same State"});
  batch_[0].state = batch_[2].state = nullptr;  // no State serves two sequences
  EXPECT_NO_THROW(run());
}

// Keeps one key of another past.
struct ShortSighted {
  struct Options {};
  using State = quoka::NoState;
  explicit ShortSighted(const Options&) {}
  void select(const quoka::SelectorInput& input, State&, Selection& keep, ExecutorRef) const {
    keep.select_none(input.k.batch(), input.k.heads(), input.k.len() - 1);
  }
  void appended(const quoka::SelectorInput&, State&, ExecutorRef) const {}
};

TEST_F(RaggedStates, NameTheSequenceOfASelectionOfAnotherPast) {
  ShortSighted::State state;
  std::vector<RaggedSequence<ShortSighted>> batch;
  for (std::size_t i = 0; i < n; ++i)
    batch.push_back({.q = cache_.q,
                     .past_k = cache_.keys(len),
                     .past_v = cache_.keys(len),
                     .chunk = {own_, own_},
                     .out = outs_[i],
                     .state = i == 1 ? &state : nullptr});
  RaggedWorkspace<ShortSighted> workspace;
  expect_refused(
      [&] {
        quoka::select_and_attend<ShortSighted>(ShortSighted({}), batch, {}, SerialExecutor{},
                                               workspace);
      },
      {"sequence", 1, "selection's kv_len", len - 1, len});
}

}  // namespace
