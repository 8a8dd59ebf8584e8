// Attention as an engine asks for it, with the library's own calls on the same tokens in order; what it says it did.

#include <quoka/attention/alibi.hpp>
#include <quoka/engine/layer_account.hpp>
#include <quoka/quoka.hpp>

#include "support/failing_executor.hpp"

#include <Eigen/Core>
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <random>
#include <stdexcept>

namespace {

using namespace quoka;

// Two sequences in one cache, cells in a random order, and a batch with a chunk of each.
class Engine {
 public:
  static constexpr Index q_heads = 4, kv_heads = 2, dim = 32, cells = 700;
  struct Sequence {
    std::vector<Position> cells;  // by token
    Index chunk;                  // tokens of the batch, its last
  };

  explicit Engine(bool shuffled) {
    std::vector<Position> order(cells);
    std::iota(order.begin(), order.end(), 0);
    if (shuffled) std::shuffle(order.begin(), order.end(), random_);
    sequences = {{{order.begin(), order.begin() + 400}, 70},
                 {{order.begin() + 400, order.begin() + 600}, 45}};
    fill(k_, kv_heads * cells * dim), fill(v_, kv_heads * cells * dim);
    n_q = 0;
    for (const Sequence& s : sequences) n_q += s.chunk;
    fill(q_, q_heads * n_q * dim), out_.assign(q_.size(), NAN);
    mask_.assign(static_cast<std::size_t>(n_q * cells), Eigen::half(-INFINITY));
    Index row = 0;
    for (const Sequence& s : sequences)
      for (Index i = std::ssize(s.cells) - s.chunk; i < std::ssize(s.cells); ++i, ++row)
        for (Index j = 0; j <= i; ++j)
          mask_[static_cast<std::size_t>(row * cells + s.cells[static_cast<std::size_t>(j)])] =
              Eigen::half(0);
  }
  MaskedStream stream() {
    return {.q = view(q_, q_heads, n_q),
            .k = view(k_, kv_heads, cells),
            .v = view(v_, kv_heads, cells),
            .mask = TensorView<const Eigen::half>(mask_.data(), {1, 1, n_q, cells}),
            .out = TensorView<float>(out_.data(), {1, q_heads, n_q, dim})};
  }
  // The same, a stream for each sequence.
  std::vector<MaskedStream> streams() {
    std::vector<MaskedStream> all;
    Index row = 0;
    for (const Sequence& s : sequences) {
      MaskedStream x = stream();
      x.q = x.q.slice(row, s.chunk), x.mask = x.mask.slice(row, s.chunk);
      x.out = x.out.slice(row, s.chunk);
      all.push_back(x), row += s.chunk;
    }
    return all;
  }
  // Before the batch's keys were written; the returned function writes them.
  auto before_the_batch() {
    const std::vector<float> written = k_;
    for (const Sequence& s : sequences)
      for (Index i = std::ssize(s.cells) - s.chunk; i < std::ssize(s.cells); ++i)
        for (Index head = 0; head < kv_heads; ++head)
          std::fill_n(k_.begin() + (head * cells + s.cells[static_cast<std::size_t>(i)]) * dim, dim,
                      0.0f);
    return [this, written] { std::copy(written.begin(), written.end(), k_.begin()); };
  }
  // The same by select() and attention(), sequence by sequence, chunk by chunk. An engine's mask does not tell
  // the order of the tokens before a batch: it is that of their cells.
  std::vector<float> expected(const MaskedOptions& masked) {
    std::vector<float> all(out_.size(), NAN);
    const OutputRows out = TensorView<float>(all.data(), {1, q_heads, n_q, dim});
    const Rows k = view(k_, kv_heads, cells), v = view(v_, kv_heads, cells),
               q = view(q_, q_heads, n_q);
    Index row = 0;
    for (const Sequence& s : sequences) {
      std::vector<Position> list_of = s.cells;
      std::sort(list_of.begin(), list_of.end() - s.chunk);
      const std::span<const Position> list = list_of;
      const Index first = std::ssize(list) - s.chunk;
      for (Index i = 0, count = 0; i < s.chunk; i += count) {
        const Index past = first + i, border = (past / masked.chunk + 1) * masked.chunk;
        count = masked.selection ? std::min(border - past, s.chunk - i) : s.chunk;
        const auto before = list.first(static_cast<std::size_t>(past));
        const auto own =
            list.subspan(static_cast<std::size_t>(past), static_cast<std::size_t>(count));
        Past of{k.listed(before), v.listed(before)};
        Selection keep;
        QuokaSelector::State state;
        if (masked.selection && past >= masked.min_past) {
          QuokaSelector(*masked.selection)
              .select({.q = q.slice(row + i, count), .k = of.k, .capacity = past}, state, keep,
                      SerialExecutor{});
          of.keep = &keep;
        }
        attention(q.slice(row + i, count), of, {k.listed(own), v.listed(own)},
                  out.slice(row + i, count));
      }
      row += s.chunk;
    }
    return all;
  }
  float distance(const std::vector<float>& wanted) const {
    float most = 0;
    for (std::size_t i = 0; i < out_.size(); ++i)
      most = std::max(most, std::abs(out_[i] - wanted[i]));
    return std::isnan(std::accumulate(out_.begin(), out_.end(), 0.0f)) ? INFINITY : most;
  }
  Eigen::half& mask(Index row, Index cell) {
    return mask_[static_cast<std::size_t>(row * cells + cell)];
  }

  std::vector<Sequence> sequences;
  Index n_q = 0;

 private:
  void fill(std::vector<float>& x, Index n) {
    std::normal_distribution<float> normal;
    x.resize(static_cast<std::size_t>(n));
    for (float& value : x) value = normal(random_);
  }
  static Rows view(const std::vector<float>& x, Index heads, Index len) {
    return TensorView<const float>(x.data(), {1, heads, len, dim});
  }

  std::mt19937 random_{5};
  std::vector<float> q_, k_, v_, out_;
  std::vector<Eigen::half> mask_;
};

MaskedOptions selecting(QuokaOptions options, Index chunk = 32) {
  return {.selection = options, .chunk = chunk};
}

TEST(MaskedAttention, IsWhatTheLibraryGivesForEachSequenceAlone) {
  ThreadPool threads(3);
  for (const bool shuffled : {false, true})
    for (MaskedOptions masked : {MaskedOptions{}, selecting(QuokaOptions::paper(40)),
                                 selecting(QuokaOptions::recommended(2, 40), 16),
                                 selecting(QuokaOptions::robust(2, 0.25))}) {
      masked.sketch = false;  // whose float twin chooses other keys in the softmax domain
      Engine engine(shuffled);
      MaskedAttention layer;
      const auto write = engine.before_the_batch();
      layer.run(std::vector{engine.stream()}, masked, {}, threads);
      write();
      const MaskedReport report = layer.run(std::vector{engine.stream()}, masked, {}, threads);
      EXPECT_LE(engine.distance(engine.expected(masked)), 2e-5f) << shuffled;
      EXPECT_EQ(report.outcome,
                masked.selection ? MaskedOutcome::selected : MaskedOutcome::asked_exact);
      EXPECT_EQ(report.queries, 115);
      EXPECT_EQ(report.sequences, 2);
      if (masked.selection)
        EXPECT_LT(report.attended, 0.5 * report.seen);
      else
        EXPECT_EQ(report.attended, report.seen);
    }
}

// Of all that is remembered between calls nothing is believed: the cache changed, and so does the result.
TEST(MaskedAttention, ACacheThatChangesUnderneath) {
  const MaskedOptions masked = selecting(QuokaOptions::paper(40));
  MaskedAttention layer;
  for (int i = 0; i < 3; ++i) {
    Engine engine(i == 1);  // at another address, or in the place of the one before
    const auto write = engine.before_the_batch();
    layer.run(std::vector{engine.stream()}, masked, {}, SerialExecutor{});
    write();
    layer.run(std::vector{engine.stream()}, masked, {}, SerialExecutor{});
    EXPECT_LE(engine.distance(engine.expected(masked)), 2e-5f) << i;
  }
}

// Which cells were written is found for both: the cache is looked at once.
TEST(MaskedAttention, TwoStreamsMayShareACache) {
  for (const bool shuffled : {false, true})
    for (const bool sketch : {false, true}) {
      MaskedOptions masked = selecting(QuokaOptions::paper(40));
      masked.sketch = sketch;
      Engine engine(shuffled);
      MaskedAttention layer;
      const auto write = engine.before_the_batch();
      layer.run(engine.streams(), masked, {}, SerialExecutor{});
      write();
      const MaskedReport report = layer.run(engine.streams(), masked, {}, SerialExecutor{});
      EXPECT_LE(engine.distance(engine.expected(masked)), 2e-5f) << shuffled << sketch;
      EXPECT_EQ(report.sequences, 2);
      EXPECT_EQ(report.queries, 115);
    }
}
TEST(MaskedAttention, RefusesTwoViewsOfOneCache) {
  Engine engine(true);
  MaskedAttention layer;
  std::vector<MaskedStream> streams = engine.streams();
  const Rows& k = streams[1].k;
  streams[1].k =
      Rows(k.data(), k.format(), k.sizes(), {k.strides()[0], k.strides()[1] / 2, k.strides()[2]});
  EXPECT_THROW(layer.run(streams, selecting(QuokaOptions::paper(40)), {}, SerialExecutor{}),
               std::invalid_argument);
}

// Wherever a call fails: made again it is right, and so is the one after it.
TEST(MaskedAttention, ACallThatFailedMayBeMadeAgain) {
  for (const bool sketch : {false, true}) {
    MaskedOptions masked = selecting(QuokaOptions::paper(40));
    masked.sketch = sketch;
    bool fails = true;
    Index failures = 0;
    for (long at = 0; fails; at += 1 + at / 8) {
      Engine engine(true);
      MaskedAttention layer;
      const auto write = engine.before_the_batch();
      layer.run(engine.streams(), masked, {}, SerialExecutor{});
      write();
      try {
        layer.run(engine.streams(), masked, {}, quoka_test::FailsAt{at});
        fails = false;
      } catch (const quoka_test::Failure&) {
        ++failures;
        layer.run(engine.streams(), masked, {}, SerialExecutor{});
      }
      ASSERT_LE(engine.distance(engine.expected(masked)), 2e-5f) << "place " << at;
    }
    EXPECT_GT(failures, 10);
  }
}

TEST(MaskedAttention, SaysWhyItIsExact) {
  MaskedAttention layer;
  const auto outcome = [&](Engine& engine, const MaskedOptions& masked,
                           const AttentionOptions& options = {}) {
    return layer.run(std::vector{engine.stream()}, masked, options, SerialExecutor{}).outcome;
  };
  Engine engine(false);
  EXPECT_EQ(outcome(engine, {}), MaskedOutcome::asked_exact);
  EXPECT_EQ(outcome(engine, selecting(QuokaOptions::paper(4000))), MaskedOutcome::all_kept);
  MaskedOptions late = selecting(QuokaOptions::paper(40));
  late.min_past = 5000;
  EXPECT_EQ(outcome(engine, late), MaskedOutcome::all_kept);
  EXPECT_LE(engine.distance(engine.expected({})), 2e-5f);
  const std::vector<float> slopes = alibi_slopes(Engine::q_heads);
  AttentionOptions factors;
  factors.mask_factors = slopes;
  EXPECT_EQ(outcome(engine, selecting(QuokaOptions::paper(40)), factors), MaskedOutcome::masks);
  engine.mask(3, 699) = Eigen::half(0.5f);  // a bias: all is read from the mask
  EXPECT_EQ(outcome(engine, selecting(QuokaOptions::paper(40))), MaskedOutcome::both_ways);
  for (const auto what : {MaskedOutcome::masks, MaskedOutcome::both_ways, MaskedOutcome::all_kept})
    EXPECT_EQ(std::string(describe(what)).find("exact: "), 0u);
}

TEST(MaskedAttention, RefusesBeforeItWrites) {
  Engine engine(false);
  MaskedAttention layer;
  EXPECT_THROW(layer.run(std::vector{engine.stream()}, selecting(QuokaOptions::paper(40), 0), {},
                         SerialExecutor{}),
               std::invalid_argument);
  MaskedStream stream = engine.stream();
  stream.v = stream.v.slice(0, 100);
  EXPECT_THROW(
      layer.run(std::vector{stream}, selecting(QuokaOptions::paper(40)), {}, SerialExecutor{}),
      std::invalid_argument);
  EXPECT_EQ(engine.distance(engine.expected({})), INFINITY) << "out is NaN as it was";
}

TEST(LayerAccount, SumsByLayerAndSaysAboutWhatIsSaved) {
  LayerAccount account;
  // Exact: 1000 pairs in 1 s. Selecting: of 4000 pairs 1000, in 1.5 s all told.
  account.add(
      0, {.queries = 10, .sequences = 1, .seen = 900, .attended = 900, .own = 100, .attend = 1},
      "exact: x");
  for (int layer = 1; layer < 4; ++layer)
    account.add(layer,
                {.queries = 10,
                 .sequences = 1,
                 .seen = 3900,
                 .attended = 900,
                 .own = 100,
                 .mask = 0.1,
                 .select = 0.4,
                 .attend = 1},
                "selected");
  const auto [took, dense] = account.saving();
  EXPECT_NEAR(took, 4.5, 1e-9);
  EXPECT_NEAR(dense, 12, 1e-9);
  const std::vector<std::string> lines = account.lines();
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_EQ(lines[0], "layer 0: 100.0 % of the past; exact: x (1 calls)");
  EXPECT_EQ(lines[1], "layer 1 to 3: 23.1 % of the past; selected (1 calls)");
}

// The paper's own: 8 heads from 1/2 to 1/256; and 12 heads, which are no power of two.
TEST(AlibiSlopes, AreThePapers) {
  const std::vector<float> eight = alibi_slopes(8), twelve = alibi_slopes(12);
  for (std::size_t h = 0; h < 8; ++h) {
    EXPECT_FLOAT_EQ(eight[h], std::exp2(-static_cast<float>(h + 1)));
    EXPECT_FLOAT_EQ(twelve[h], eight[h]);
  }
  for (std::size_t h = 8; h < 12; ++h)
    EXPECT_FLOAT_EQ(twelve[h], std::exp2(-(static_cast<float>(h - 8) + 0.5f)));
  EXPECT_THROW(alibi_slopes(0), std::invalid_argument);
}

}  // namespace
