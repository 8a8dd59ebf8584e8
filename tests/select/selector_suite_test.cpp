// Properties of every selector that methods/all.hpp lists. selection_fuzz_test.cpp tests that it keeps to its budget
// and selects the same keys in any format and layout and by any executor.

#include <quoka/layer/kv_cache.hpp>
#include <quoka/methods/all.hpp>

#include "support/fixtures.hpp"
#include "support/selector_names.hpp"

#include <concepts>
#include <optional>
#include <set>
#include <string>
#include <thread>

namespace {

using namespace quoka_test;
using quoka::KvCache;
using quoka::SelectorInput;

// ---- the selectors ------------------------------------------------------------------------------

TEST(SelectorList, GivesEachSelectorANameOfItsOwn) {
  std::vector<std::string> names;
  quoka::for_each_selector([&]<class S>(const char* name) {
    names.push_back(name);
    EXPECT_EQ(SelectorNames::GetName<S>(0), name);  // else it is listed twice
  });
  EXPECT_EQ(names.front(), "dense");
  EXPECT_EQ(std::set<std::string>(names.begin(), names.end()).size(), names.size());
}

template <class S>
concept HasBudget = requires(typename S::Options options) {
  options.budget = Budget::keys(7);
};

constexpr Index batch = 2, q_heads = 6, kv_heads = 2, head_dim = 20;

// All other options have their defaults, except those that would make the method exact at these
// sizes.
template <class S>
S with_budget([[maybe_unused]] Budget budget) {
  typename S::Options options{};
  if constexpr (HasBudget<S>) options.budget = budget;
  if constexpr (requires { options.rank = 7; }) options.rank = 7;  // of head_dim channels
  if constexpr (requires { options.fitted = 40; }) options.fitted = 40;
  return S(options);
}

// ---- a layer under test -------------------------------------------------------------------------

// A cache and the state that a selector carries along, driven as a prefill drives them.
template <class S, class T>
struct Layer {
  explicit Layer(Index budget = 31) : selector(with_budget<S>(Budget::keys(budget))) {}

  // Appends a chunk of these keys.
  void append(const Rows& q, const Rows& k, ExecutorRef executor = SerialExecutor{}) {
    cache.append(k, k);
    selector.appended(input(q), state, executor);
  }
  Selection select(const Rows& q, ExecutorRef executor = SerialExecutor{}) {
    Selection selection;
    selector.select(input(q), state, selection, executor);
    return selection;
  }
  void truncate(Index len) {
    cache.truncate(len);
    state.truncate(len);
  }
  SelectorInput input(const Rows& q) const {
    return {q, cache.k(), LogitOptions{}, cache.inverse_norms()};
  }

  S selector;
  typename S::State state;
  KvCache cache{batch, kv_heads, head_dim, head_dim, quoka::format_of<T>(), quoka::format_of<T>()};
};

// Random queries and keys of one layer, fed in chunks.
template <class T>
struct Prompt {
  Prompt(Random& random, Index len)
      : q(random.tensor<T>(batch, q_heads, len, head_dim)),
        k(random.tensor<T>(batch, kv_heads, len, head_dim)) {}
  TensorView<const T> q_chunk(Index begin, Index n) const {
    return quoka::view_of(q).slice(begin, n);
  }

  template <class S>
  void feed(Layer<S, T>& layer, Index begin, Index end, Index chunk = 37,
            ExecutorRef executor = SerialExecutor{}) const {
    for (; begin < end; begin += chunk) {
      const Index n = std::min(chunk, end - begin);
      layer.append(q_chunk(begin, n), quoka::view_of(k).slice(begin, n), executor);
    }
  }

  Tensor4<T> q, k;
};

template <class S>
class EverySelector : public ::testing::Test {};
TYPED_TEST_SUITE(EverySelector, SelectorTypes, SelectorNames);

// ---- always the same ----------------------------------------------------------------------------

TYPED_TEST(EverySelector, MayBeSharedByThreads) {  // each with a layer of its own
  Random random(210);
  const Prompt<float> prompt(random, 164);
  const TypeParam shared = with_budget<TypeParam>(Budget::keys(31));
  std::vector<Layer<TypeParam, float>> layers(4);
  for (auto& layer : layers) prompt.feed(layer, 0, 127);
  std::vector<Selection> selections(4);
  std::vector<std::thread> users;
  for (std::size_t i = 0; i < 4; ++i)
    users.emplace_back([&, i] {
      for (int round = 0; round < 7; ++round)
        shared.select(layers[i].input(prompt.q_chunk(127, 37)), layers[i].state, selections[i],
                      SerialExecutor{});
    });
  for (std::thread& user : users) user.join();
  for (const Selection& selection : selections)
    EXPECT_EQ(selection, layers[0].select(prompt.q_chunk(127, 37)));
}

// Does it weigh each query of the chunk by itself? Others choose among them by place, or by likeness.
template <class S>
constexpr bool weighs_each_query =
    !std::is_same_v<S, quoka::QuokaSelector> &&
    !std::is_same_v<S, quoka::SampleAttentionSelector> &&
    !std::is_same_v<S, quoka::XAttentionSelector> &&
    !std::is_same_v<S, quoka::FlashPrefillSelector> && !std::is_same_v<S, quoka::SnapKvSelector>;

TYPED_TEST(EverySelector, LeavesQueriesThatAreNotFiniteOut) {
  if (!weighs_each_query<TypeParam>) return;
  Random random(212);
  const Prompt<float> prompt(random, 164);
  Layer<TypeParam, float> layer(31);
  prompt.feed(layer, 0, 127);
  auto q = random.tensor<float>(batch, q_heads, 17, head_dim);
  Tensor4<float> rest(batch, q_heads, 16, head_dim);
  for (Index i = 0; i < 16; ++i) rest.chip(i, 2) = q.chip(i < 5 ? i : i + 1, 2);
  const Selection keep = layer.select(rest);
  for (const float odd : {not_a_number, infinity, -infinity}) {
    for (Index b = 0; b < batch; ++b)
      for (Index head = 0; head < q_heads; ++head) {
        std::fill_n(&q(b, head, 5, 0), head_dim, 1000.0f);
        q(b, head, 5, 19) = odd;
      }
    EXPECT_EQ(layer.select(q), keep) << odd;
  }
}

// ---- refused ------------------------------------------------------------------------------------

TYPED_TEST(EverySelector, RefusesShapesThatDoNotFitAndSelectsNothing) {
  const TypeParam selector = with_budget<TypeParam>(Budget::keys(7));
  const auto refuses = [&](std::array<Index, 4> q_sizes, std::array<Index, 4> k_sizes,
                           std::initializer_list<Fragment> both,
                           std::array<Index, 3> norm_sizes = {0, 0, 0}) {
    const auto tensor = [](const auto& s) {
      Tensor4<float> x(s[0], s[1], s[2], s[3]);
      x.setZero();
      return x;
    };
    const Tensor4<float> q = tensor(q_sizes), k = tensor(k_sizes);
    Tensor3<float> norms(norm_sizes[0], norm_sizes[1], norm_sizes[2]);
    SelectorInput input{q, k, LogitOptions{}};
    if (norm_sizes[0] > 0) input.inverse_norms = norms;
    typename TypeParam::State state;
    Selection selection = to_selection({{{1, 3}}}, 7);
    expect_refused([&] { selector.select(input, state, selection, SerialExecutor{}); }, both);
    EXPECT_EQ(selection, to_selection({{{1, 3}}}, 7));
  };
  refuses({2, 6, 37, 20}, {3, 2, 127, 20}, {"batch", 3, 2});
  refuses({2, 7, 37, 20}, {2, 2, 127, 20}, {"q_heads", 7, 2});
  refuses({2, 2, 37, 20}, {2, 6, 127, 20}, {"q_heads", 2, 6});
  refuses({2, 6, 37, 20}, {2, 0, 127, 20}, {"q_heads", 6, 0});
  refuses({2, 6, 37, 20}, {2, 2, 127, 24}, {"dim", 24, 20});
  refuses({2, 6, 0, 20}, {2, 2, 127, 20}, {"q_len", 0, 1});
  refuses({0, 6, 37, 20}, {0, 2, 127, 20}, {"batch", 0, 1});
  refuses({2, 6, 37, 0}, {2, 2, 127, 0}, {"dim", 0, 1});
  refuses({2, 6, 37, 20}, {2, 2, 127, 20}, {"inverse_norms", 3, 2}, {3, 2, 127});
  refuses({2, 6, 37, 20}, {2, 2, 127, 20}, {"inverse_norms", 6, 2}, {2, 6, 127});
  refuses({2, 6, 37, 20}, {2, 2, 127, 20}, {"inverse_norms", 126, 127}, {2, 2, 126});
}

// The keys that a window hides would take the budget of those that are seen.
TYPED_TEST(EverySelector, RefusesALayerWithAWindowUnlessItKeepsAll) {
  Layer<TypeParam, float> layer;
  Random random(218);
  const Prompt<float> prompt(random, 164);
  prompt.feed(layer, 0, 127);
  SelectorInput windowed = layer.input(prompt.q_chunk(127, 37));
  windowed.logits->sliding_window = 50;
  Selection selection = to_selection({{{1, 3}}}, 7);
  const auto select = [&] {
    layer.selector.select(windowed, layer.state, selection, SerialExecutor{});
  };
  if constexpr (HasBudget<TypeParam>) {
    expect_refused(select, {"sliding_window", 50});
    EXPECT_EQ(selection, to_selection({{{1, 3}}}, 7));
  } else {
    EXPECT_NO_THROW(select());
  }
}

// A selector whose choice depends on the scale refuses a call that does not give it.
TYPED_TEST(EverySelector, AsksForTheScaleOrDoesNotNeedIt) {
  Layer<TypeParam, float> layer;
  Random random(219);
  const Prompt<float> prompt(random, 164);
  prompt.feed(layer, 0, 127);
  SelectorInput input = layer.input(prompt.q_chunk(127, 37));
  Tensor4<float> louder = prompt.q;
  for (Index i = 0; i < louder.size(); ++i) louder.data()[i] *= 4.0f;
  const auto selected = [&](const std::optional<LogitOptions>& logits, bool loud = false) {
    input.q = loud ? quoka::view_of(louder).slice(127, 37) : prompt.q_chunk(127, 37);
    input.logits = logits;
    Selection selection;
    layer.selector.select(input, layer.state, selection, SerialExecutor{});
    return selection;
  };
  Selection unasked;
  try {
    unasked = selected({});
  } catch (const std::invalid_argument& error) {
    EXPECT_NE(std::string(error.what()).find("SelectorInput::logits"), std::string::npos);
    // Only the scaled logit counts.
    for (const float scale : {0.02f, 2.0f})
      EXPECT_EQ(selected(LogitOptions{.scale = scale / 4.0f}, true),
                selected(LogitOptions{.scale = scale}));
    return;
  }
  for (const float scale : {0.01f, 3.0f})
    EXPECT_EQ(selected(LogitOptions{.scale = scale}), unasked) << scale;
}

// Which would make all logits NaN, or infinite, and so rank by position.
TYPED_TEST(EverySelector, RefusesAScaleThatIsNoScale) {
  Random random(220);
  const auto q = random.tensor<float>(batch, q_heads, 5, head_dim);
  const auto k = random.tensor<float>(batch, kv_heads, 37, head_dim);
  const auto selector = with_budget<TypeParam>(Budget::keys(10));
  for (const float scale : {not_a_number, infinity, -infinity, 1.1e30f}) {
    typename TypeParam::State state;
    Selection selection;
    const SelectorInput input{
        .q = q, .k = k, .logits = LogitOptions{.scale = scale}, .capacity = 37};
    expect_refused([&] { selector.select(input, state, selection, SerialExecutor{}); },
                   {"scale", "[-1e30, 1e30]"});
  }
}

// An engine that gives only its cache's length: a State's memory grows by doubling, so it is copied a few times in all,
// not once for each few tokens.
TYPED_TEST(EverySelector, AStateGrowsByDoublingWhereTheCapacityIsNotKnown) {
  typename TypeParam::State state;
  if constexpr (requires { state.kept_bytes(); }) {
    Random random(70);
    const Prompt<float> prompt(random, 700);
    typename TypeParam::Options options{};
    if constexpr (requires { options.sketch = quoka::Sketch::on; })
      options.sketch = quoka::Sketch::on;
    const TypeParam selector(options);
    std::set<Index> sizes;
    Selection keep;
    for (Index len = 500; len <= 700; ++len) {
      const SelectorInput input{.q = prompt.q_chunk(0, 5),
                                .k = quoka::view_of(prompt.k).slice(0, len),
                                .logits = LogitOptions{},
                                .capacity = len};
      if (len == 550) selector.select(input, state, keep, SerialExecutor{});
      selector.appended(input, state, SerialExecutor{});
      sizes.insert(state.kept_bytes());
    }
    EXPECT_LE(sizes.size(), 5u);
  }
}

// A caller's own selector, the least there is: the concept asks for no more.
struct LeastSelector {
  struct Options {};
  using State = quoka::NoState;
  explicit LeastSelector(const Options&) {}
  void select(const SelectorInput& input, State&, Selection& selection, ExecutorRef) const {
    selection.select_all(input.k.batch(), input.k.heads(), input.k.len());
  }
  void appended(const SelectorInput&, State&, ExecutorRef) const {}
};
static_assert(quoka::Selector<LeastSelector>);
struct NotConst : LeastSelector {
  using LeastSelector::LeastSelector;
  void select(const SelectorInput&, State&, Selection&, ExecutorRef);
};
static_assert(!quoka::Selector<int> && !quoka::Selector<NotConst>);

// A scorer is const, has one of score() and decide(), and a State that can be asked what it keeps.
struct LeastScorer {
  struct Options {
    quoka::Budget budget = quoka::Budget::keys(1024);
  };
  using State = quoka::NoState;
  explicit LeastScorer(const Options&) {}
  void score(const SelectorInput&, State&, TensorView<float, 3>, ExecutorRef) const;
};
struct ScoresAndDecides : LeastScorer {
  using LeastScorer::LeastScorer;
  void decide(const SelectorInput&, State&, Selection&, ExecutorRef) const;
};
struct ScoresOnce : LeastScorer {
  using LeastScorer::LeastScorer;
  void score(const SelectorInput&, State&, TensorView<float, 3>, ExecutorRef);
};
struct Kept {
  static void truncate(Index);
  Index kept_bytes();
};
struct KeepsUnasked : LeastScorer {
  using LeastScorer::LeastScorer;
  using State = Kept;
  void score(const SelectorInput&, State&, TensorView<float, 3>, ExecutorRef) const;
};
static_assert(quoka::Scorer<LeastScorer> && !quoka::Scorer<ScoresAndDecides>);
static_assert(!quoka::Scorer<ScoresOnce> && !quoka::Scorer<KeepsUnasked>);

// An optional member that does not fit: not const, of another type, or no constant.
struct WeighsOnce : LeastScorer {
  using LeastScorer::LeastScorer;
  bool weighs_logits();
};
struct CapsByNumber : LeastScorer {
  using LeastScorer::LeastScorer;
  int supports_softcap() const;
};
struct EvictsIfAsked : LeastScorer {
  using LeastScorer::LeastScorer;
  static bool evicts() { return false; }
};
struct EvictsByVariable : LeastScorer {
  using LeastScorer::LeastScorer;
  static inline bool evicts = false;
};
struct CutsByFunction : LeastScorer {
  using LeastScorer::LeastScorer;
  Index most_queries() const;
};
struct HasAll : LeastScorer {
  using LeastScorer::LeastScorer;
  static bool weighs_logits();
  bool supports_softcap() const;
  static constexpr bool evicts = false;
  static constexpr Index most_queries = 64;
};
static_assert(quoka::Scorer<HasAll> && !quoka::Scorer<WeighsOnce> && !quoka::Scorer<CapsByNumber>);
static_assert(!quoka::Scorer<EvictsIfAsked> && !quoka::Scorer<EvictsByVariable>);
static_assert(!quoka::Scorer<CutsByFunction>);

}  // namespace
