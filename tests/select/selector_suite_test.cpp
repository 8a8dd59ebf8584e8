// The selectors that methods/all.hpp lists: their names, how their States grow, and what a selector is (concepts).
// Their properties are in selection_fuzz_test.cpp, their refusals in refusals_test.cpp.

#include <quoka/methods/all.hpp>

#include "support/fixtures.hpp"
#include "support/selector_names.hpp"

#include <set>
#include <string>

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

// An engine that gives only its cache's length: a State's memory is copied a few times in all, not once for each few
// tokens.
TEST(SelectorList, StatesGrowByDoublingWhereTheCapacityIsNotKnown) {
  Random random(210);
  const auto q = random.tensor<float>(1, 4, 5, 20), k = random.tensor<float>(1, 2, 700, 20);
  quoka::for_each_selector([&]<class S>(const char* name) {
    typename S::State grown;
    if constexpr (requires { grown.kept_bytes(); }) {
      typename S::Options options{};
      if constexpr (requires { options.sketch; }) options.sketch = quoka::Sketch::on;
      const S selector(options);
      std::set<Index> sizes;
      Selection keep;
      for (Index len = 500; len <= 700; ++len) {
        const SelectorInput input{
            .q = q, .k = Rows(k).slice(0, len), .logits = LogitOptions{}, .capacity = len};
        if (len == 550) selector.select(input, grown, keep, SerialExecutor{});
        selector.appended(input, grown, SerialExecutor{});
        sizes.insert(grown.kept_bytes());
      }
      EXPECT_LE(sizes.size(), 5u) << name;
    }
  });
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
