// select/visible.hpp: selection among the cells that all queries see, and what some see besides.

#include <quoka/select/visible.hpp>

#include <quoka/select/quoka.hpp>

#include "support/fixtures.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

namespace {

using namespace quoka_test;
using quoka::Budget;
using quoka::QuokaOptions;
using quoka::QuokaSelector;
using quoka::VisibleCells;

// Of each 35 cells 7 are hidden from all, and 4 others from the first query.
class SelectVisible : public ::testing::Test {
 protected:
  static constexpr Index heads = 3, len = 350, q_len = 5, dim = 16;

  void SetUp() override {
    mask_.setZero();
    for (Index cell = 0; cell < len; ++cell) {
      if (cell % 5 == 0)
        for (Index i = 0; i < q_len; ++i) mask_(0, 0, i, cell) = -infinity;
      else if (cell % 7 == 3)
        mask_(0, 0, 0, cell) = -infinity;
    }
    // The first head's softmax is steep: a budget by scores keeps fewer of its keys.
    for (Index i = 0; i < len; ++i)
      for (Index c = 0; c < dim; ++c) k_(0, 0, i, c) *= 8.0f;
  }
  VisibleCells visible() const { return {mask_, len}; }
  Selection select(const QuokaOptions& options, const VisibleCells& cells,
                   bool with_norms = false) const {
    Tensor3<float> norms(1, heads, len);
    for (Index head = 0; head < heads; ++head)
      for (Index i = 0; i < len; ++i) {
        double sum = 0;
        for (Index c = 0; c < dim; ++c)
          sum += double{k_(0, head, i, c)} * double{k_(0, head, i, c)};
        norms(0, head, i) = static_cast<float>(1 / std::sqrt(sum));
      }
    quoka::SelectorInput input{q_, k_, quoka::LogitOptions{}};
    if (with_norms) input.inverse_norms = norms;
    QuokaSelector::State state;
    Selection keep;
    quoka::select_visible(QuokaSelector(options), input, cells, state, keep);
    return keep;
  }
  // The same with the keys that all see side by side, in memory of their own.
  void expect_as_of_a_cache_of_these(const QuokaOptions& options, bool with_norms = false) const {
    const VisibleCells cells = visible();
    const auto count = std::ssize(cells.to_all);
    Tensor4<float> seen(1, heads, count, dim);
    for (Index head = 0; head < heads; ++head)
      for (Index i = 0; i < count; ++i)
        for (Index c = 0; c < dim; ++c) seen(0, head, i, c) = k_(0, head, cells.to_all[uz(i)], c);
    const Selection of_these = QuokaSelector(options).select(q_, seen, {}),
                    keep = select(options, cells, with_norms);
    ASSERT_EQ(keep.kv_len(), len);
    for (Index head = 0; head < heads; ++head) {
      std::vector<Position> wanted = cells.to_some;
      for (const Position i : of_these.positions(0, head)) wanted.push_back(cells.to_all[uz(i)]);
      std::sort(wanted.begin(), wanted.end());
      EXPECT_EQ(keep.positions(0, head), wanted) << head;
    }
  }

  Random random_{41};
  Tensor4<float> q_ = random_.tensor<float>(1, 2 * heads, q_len, dim),
                 k_ = random_.tensor<float>(1, heads, len, dim);
  Tensor4<float> mask_{1, 1, q_len, len};
};

TEST_F(SelectVisible, IsThatOfACacheOfTheCellsThatAllSee) {
  for (const bool with_norms : {false, true})
    expect_as_of_a_cache_of_these({.budget = quoka::Budget::keys(20), .sketch = quoka::Sketch::off},
                                  with_norms);
}

TEST_F(SelectVisible, OfNothingThatAllSeeIsWhatSomeSee) {
  VisibleCells cells = visible();
  cells.to_all.clear();
  const Selection keep = select({.budget = quoka::Budget::keys(20)}, cells);
  for (Index head = 0; head < heads; ++head) EXPECT_EQ(keep.positions(0, head), cells.to_some);
  cells.to_some.clear();
  EXPECT_EQ(select({.budget = quoka::Budget::keys(20)}, cells).sum_of_counts(), 0);
}

}  // namespace
