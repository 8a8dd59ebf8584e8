// Properties of every selector that methods/all.hpp lists, on one layer: it may be shared by threads, leaves out
// queries that are not finite, refuses what does not fit, depends on the scaled logits alone, and its State grows by
// doubling. What a selector is (concepts). Budgets, formats, layouts, executors and histories: selection_fuzz_test.cpp.

#include <quoka/methods/all.hpp>

#include "support/fixtures.hpp"
#include "support/selector_names.hpp"

#include <optional>
#include <set>
#include <string>
#include <thread>

namespace {

using namespace quoka_test;
using quoka::SelectorInput;

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

constexpr Index batch = 2, q_heads = 6, kv_heads = 2, head_dim = 20, past = 127, chunk = 37;

// A chunk of queries and the past's keys, of which a State was told chunk by chunk. Options have their defaults, except
// those that would make the method exact at these sizes.
template <class S>
class EverySelector : public ::testing::Test {
 protected:
  static S with_budget([[maybe_unused]] Index count) {
    typename S::Options options{};
    if constexpr (HasBudget<S>) options.budget = Budget::keys(count);
    if constexpr (requires { options.rank = 7; }) options.rank = 7;  // of head_dim channels
    if constexpr (requires { options.fitted = 40; }) options.fitted = 40;
    return S(options);
  }
  SelectorInput input(const Rows& q, Index kv_len = past) const {
    return {.q = q, .k = Rows(keys).slice(0, kv_len), .logits = LogitOptions{}, .capacity = kv_len};
  }
  void tell(typename S::State& of) const {
    for (Index begin = 0; begin < past; begin += chunk) {
      const Index n = std::min(chunk, past - begin);
      selector.appended(input(Rows(queries).slice(0, n), begin + n), of, SerialExecutor{});
    }
  }
  EverySelector() { tell(state); }
  Selection select(const SelectorInput& of) {
    Selection keep;
    selector.select(of, state, keep, SerialExecutor{});
    return keep;
  }
  // Nothing is selected then.
  void expect_refusal(const SelectorInput& of, const std::vector<Fragment>& says) {
    const Selection before = to_selection({{{1, 3}}}, 7);
    Selection keep = before;
    expect_refused([&] { selector.select(of, state, keep, SerialExecutor{}); }, says);
    EXPECT_EQ(keep, before);
  }

  Random random{210};
  Tensor4<float> queries = random.tensor<float>(batch, q_heads, chunk, head_dim),
                 keys = random.tensor<float>(batch, kv_heads, past, head_dim);
  S selector = with_budget(31);
  typename S::State state;
};
TYPED_TEST_SUITE(EverySelector, SelectorTypes, SelectorNames);

TYPED_TEST(EverySelector, MayBeSharedByThreads) {  // each with a State of its own
  std::vector<typename TypeParam::State> states(4);
  for (auto& one : states) this->tell(one);
  std::vector<Selection> selections(4);
  std::vector<std::thread> users;
  for (std::size_t i = 0; i < 4; ++i)
    users.emplace_back([&, i] {
      for (int round = 0; round < 7; ++round)
        this->selector.select(this->input(this->queries), states[i], selections[i],
                              SerialExecutor{});
    });
  for (std::thread& user : users) user.join();
  for (const Selection& selection : selections)
    EXPECT_EQ(selection, this->select(this->input(this->queries)));
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
  Tensor4<float> q = this->queries, rest(batch, q_heads, chunk - 1, head_dim);
  for (Index i = 0; i + 1 < chunk; ++i) rest.chip(i, 2) = q.chip(i < 5 ? i : i + 1, 2);
  const Selection keep = this->select(this->input(rest));
  for (const float odd : {not_a_number, infinity, -infinity}) {
    q.chip(5, 2).setConstant(1000.0f);
    q.chip(5, 2).chip(19, 2).setConstant(odd);
    EXPECT_EQ(this->select(this->input(q)), keep) << odd;
  }
}

TYPED_TEST(EverySelector, RefusesShapesThatDoNotFit) {
  using Sizes = std::array<Index, 4>;
  const Sizes q{2, 6, 37, 20}, k{2, 2, 127, 20};
  const struct {
    Sizes q, k;
    std::vector<Fragment> says;
    std::array<Index, 3> norms = {0, 0, 0};
  } all[] = {
      {q, {3, 2, 127, 20}, {"batch", 3, 2}},
      {{2, 7, 37, 20}, k, {"q_heads", 7, 2}},
      {{2, 2, 37, 20}, {2, 6, 127, 20}, {"q_heads", 2, 6}},
      {q, {2, 0, 127, 20}, {"q_heads", 6, 0}},
      {q, {2, 2, 127, 24}, {"dim", 24, 20}},
      {{2, 6, 0, 20}, k, {"q_len", 0, 1}},
      {{0, 6, 37, 20}, {0, 2, 127, 20}, {"batch", 0, 1}},
      {{2, 6, 37, 0}, {2, 2, 127, 0}, {"dim", 0, 1}},
      {q, k, {"inverse_norms", 3, 2}, {3, 2, 127}},
      {q, k, {"inverse_norms", 6, 2}, {2, 6, 127}},
      {q, k, {"inverse_norms", 126, 127}, {2, 2, 126}},
  };
  const auto zeros = [](const Sizes& s) {
    Tensor4<float> x(s[0], s[1], s[2], s[3]);
    x.setZero();
    return x;
  };
  for (const auto& one : all) {
    const Tensor4<float> q_of = zeros(one.q), k_of = zeros(one.k);
    const Tensor3<float> norms(one.norms[0], one.norms[1], one.norms[2]);
    SelectorInput input{q_of, k_of, LogitOptions{}};
    if (norms.size() > 0) input.inverse_norms = norms;
    this->state = {};
    this->expect_refusal(input, one.says);
  }
}

// The keys that a window hides would take the budget of those that are seen. A scale that is none would make all logits
// NaN, or infinite, and so rank by position.
TYPED_TEST(EverySelector, RefusesLogitsThatItCannotWeigh) {
  SelectorInput windowed = this->input(this->queries), scaled = windowed;
  windowed.logits->sliding_window = 50;
  if constexpr (HasBudget<TypeParam>)
    this->expect_refusal(windowed, {"sliding_window", 50});
  else  // it keeps all
    EXPECT_NO_THROW(this->select(windowed));
  for (const float scale : {not_a_number, infinity, -infinity, 1.1e30f}) {
    scaled.logits->scale = scale;
    this->expect_refusal(scaled, {"scale", "[-1e30, 1e30]"});
  }
}

// A selector whose choice depends on the scale refuses a call that does not give it, and only the scaled logit counts.
TYPED_TEST(EverySelector, AsksForTheScaleOrDoesNotNeedIt) {
  const Tensor4<float> louder = this->queries * 4.0f;
  const auto selected = [&](const std::optional<LogitOptions>& logits, bool loud = false) {
    SelectorInput input = this->input(loud ? louder : this->queries);
    input.logits = logits;
    return this->select(input);
  };
  try {
    const Selection unasked = selected({});
    for (const float scale : {0.01f, 3.0f})
      EXPECT_EQ(selected(LogitOptions{.scale = scale}), unasked) << scale;
  } catch (const std::invalid_argument& error) {
    EXPECT_NE(std::string(error.what()).find("SelectorInput::logits"), std::string::npos);
    for (const float scale : {0.02f, 2.0f})
      EXPECT_EQ(selected(LogitOptions{.scale = scale / 4.0f}, true),
                selected(LogitOptions{.scale = scale}));
  }
}

// An engine that gives only its cache's length: a State's memory is copied a few times in all, not once for each few
// tokens.
TYPED_TEST(EverySelector, AStateGrowsByDoublingWhereTheCapacityIsNotKnown) {
  if constexpr (requires { this->state.kept_bytes(); }) {
    typename TypeParam::Options options{};
    if constexpr (requires { options.sketch = quoka::Sketch::on; })
      options.sketch = quoka::Sketch::on;
    const TypeParam sketched(options);
    typename TypeParam::State grown;
    this->keys = this->random.template tensor<float>(batch, kv_heads, 700, head_dim);
    std::set<Index> sizes;
    Selection keep;
    for (Index len = 500; len <= 700; ++len) {
      const SelectorInput input = this->input(Rows(this->queries).slice(0, 5), len);
      if (len == 550) sketched.select(input, grown, keep, SerialExecutor{});
      sketched.appended(input, grown, SerialExecutor{});
      sizes.insert(grown.kept_bytes());
    }
    EXPECT_LE(sizes.size(), 5u);
  }
}

// ---- what a selector is, and a scorer -------------------------------------------------------------

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
struct LeastScorer : quoka::ScorerDefaults {
  struct Options {
    quoka::Budget budget = quoka::Budget::keys(1024);
  };
  using State = quoka::NoState;
  explicit LeastScorer(const Options&) {}
  void score(const SelectorInput&, State&, TensorView<float, 3>, ExecutorRef) const;
};
struct Kept {
  static void truncate(Index);
  Index kept_bytes();
};
// The same with other members: what does not fit, not const, of another type or no constant, is no scorer.
#define QUOKA_TEST_SCORER(name, is, ...) \
  struct name : LeastScorer {            \
    using LeastScorer::LeastScorer;      \
    __VA_ARGS__                          \
  };                                     \
  static_assert(quoka::Scorer<name> == is);
static_assert(quoka::Scorer<LeastScorer>);
QUOKA_TEST_SCORER(ScoresAndDecides, false,
                  void decide(const SelectorInput&, State&, Selection&, ExecutorRef) const;)
QUOKA_TEST_SCORER(ScoresOnce, false,
                  void score(const SelectorInput&, State&, TensorView<float, 3>, ExecutorRef);)
QUOKA_TEST_SCORER(KeepsUnasked, false, using State = Kept;
                  void score(const SelectorInput&, State&, TensorView<float, 3>, ExecutorRef)
                      const;)
QUOKA_TEST_SCORER(WeighsOnce, false, bool weighs_logits();)
QUOKA_TEST_SCORER(CapsByNumber, false, int supports_softcap() const;)
QUOKA_TEST_SCORER(EvictsIfAsked, false, static bool evicts();)
QUOKA_TEST_SCORER(EvictsByVariable, false, static inline bool evicts = false;)
QUOKA_TEST_SCORER(CutsByFunction, false, Index most_queries() const;)
QUOKA_TEST_SCORER(HasAll, true, static bool weighs_logits(); bool supports_softcap() const;
                  static constexpr bool evicts = false; static constexpr Index most_queries = 64;)
#undef QUOKA_TEST_SCORER

}  // namespace
