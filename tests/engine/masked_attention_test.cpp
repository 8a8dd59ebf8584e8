// MaskedAttention against the library's own calls on the same tokens in order, and its reports.

#include <quoka/engine/masked_attention.hpp>
#include <quoka/quoka.hpp>

#include "ggml/known_cells.hpp"
#include "support/executors.hpp"
#include "support/fixtures.hpp"

#include <Eigen/Core>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <deque>
#include <functional>
#include <map>
#include <numeric>
#include <optional>
#include <random>
#include <stdexcept>
#include <utility>

namespace {

using namespace quoka;
using quoka_test::Tensor4;

// What a stream's mask asks for. [q_heads, queries, channels]
std::vector<float> by_oracle(const MaskedStream& stream,
                             const std::function<Eigen::half(Index query, Index cell)>& mask) {
  oracle::AttentionOptions options;
  options.causal = false;
  options.mask = [&](Index, Index, Index query, Index cell) {
    const float added = static_cast<float>(mask(query, cell));
    return added <= Mask::hides_from ? -oracle::infinity : static_cast<double>(added);
  };
  const auto result =
      oracle::attention(quoka_test::to_oracle(stream.q), quoka_test::to_oracle(stream.k),
                        quoka_test::to_oracle(stream.v), nullptr, {}, {}, options);
  return {result.out.data.begin(), result.out.data.end()};
}

// Two sequences in one cache, cells in a random order, and a batch with a chunk of each.
class Engine {
 public:
  static constexpr Index q_heads = 4, kv_heads = 2, dim = 32, cells = 700;
  struct Sequence {
    std::vector<Position> cells;  // by token
    Index chunk;                  // tokens of the batch, its last
  };

  explicit Engine(bool shuffled, unsigned seed = 5, std::array<Index, 2> chunks = {70, 45})
      : random_(seed) {
    std::vector<Position> order(cells);
    std::iota(order.begin(), order.end(), 0);
    if (shuffled) std::shuffle(order.begin(), order.end(), random_);
    sequences = {{{order.begin(), order.begin() + 400}, chunks[0]},
                 {{order.begin() + 400, order.begin() + 600}, chunks[1]}};
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
  std::vector<float> expected(const MaskedOptions& masked, const AttentionOptions& options = {},
                              const KeySketch* sketch = nullptr) {
    std::vector<float> all(out_.size(), NAN);
    by_shares = kept = 0;
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
        Past of{k.gathered(before), v.gathered(before)};
        Selection keep;
        AnySelector::State state;
        if (masked.selection &&
            (masked.decode || s.chunk >= std::max<Index>(2, std::min<Index>(masked.chunk, 64))) &&
            past >= masked.min_past) {
          AnySelector(*masked.selection)
              .select({.q = q.slice(row + i, count),
                       .k = of.k,
                       .logits = options,
                       .capacity = past,
                       .sketch = sketch,
                       .chunk_k = k.gathered(own),
                       .attends = true},
                      state, keep, SerialExecutor{});
          of.selection = &keep;
          for (const float share : keep.kept_shares())
            kept += static_cast<double>(count) * static_cast<double>(share) /
                    static_cast<double>(keep.heads());
          by_shares += keep.kept_shares().empty() ? 0 : static_cast<double>(count);
        }
        attention(q.slice(row + i, count), of, {k.gathered(own), v.gathered(own)},
                  out.slice(row + i, count), options);
      }
      row += s.chunk;
    }
    return all;
  }
  // The mask of all cells as they lie.
  KeySketch sketch() const {
    KeySketch sketch;
    sketch.update(view(k_, kv_heads, cells), 0, cells, SerialExecutor{});
    return sketch;
  }
  float distance(const std::vector<float>& wanted) const {
    float most = 0;
    for (std::size_t i = 0; i < out_.size(); ++i)
      most = std::max(most, std::abs(out_[i] - wanted[i]));
    return std::isnan(std::accumulate(out_.begin(), out_.end(), 0.0f)) ? INFINITY : most;
  }
  // The mask of one query.
  float distance(const std::vector<float>& wanted, Index query) const {
    float most = 0;
    for (Index head = 0; head < q_heads; ++head)
      for (Index c = 0; c < dim; ++c) {
        const auto at = static_cast<std::size_t>((head * n_q + query) * dim + c);
        most = std::max(most, std::abs(out_[at] - wanted[at]));
      }
    return most;
  }
  const std::vector<float>& out() const { return out_; }
  std::vector<float> by_the_mask() {
    return by_oracle(stream(), [&](Index row, Index cell) { return mask(row, cell); });
  }
  Eigen::half& mask(Index row, Index cell) {
    return mask_[static_cast<std::size_t>(row * cells + cell)];
  }

  std::vector<Sequence> sequences;
  Index n_q = 0;
  double by_shares = 0, kept = 0;  // MaskedReport's of what was expected last

 private:
  void fill(std::vector<float>& x, Index n) {
    std::normal_distribution<float> normal;
    x.resize(static_cast<std::size_t>(n));
    for (float& value : x) value = normal(random_);
  }
  static Rows view(const std::vector<float>& x, Index heads, Index len) {
    return TensorView<const float>(x.data(), {1, heads, len, dim});
  }

  std::mt19937 random_;
  std::vector<float> q_, k_, v_, out_;
  std::vector<Eigen::half> mask_;
};

// MaskedAttention and what the plug-in knows of the caches.
class Layer {
 public:
  MaskedReport run(std::vector<MaskedStream> streams, const MaskedOptions& masked,
                   const AttentionOptions& options, ExecutorRef executor) {
    for (MaskedStream& stream : streams) stream.known = &caches_[stream.k.data()];
    return attention_.run(streams, masked, options, executor);
  }

 private:
  std::map<const void*, quoka_ggml::KnownCells> caches_;
  MaskedAttention attention_;
};

MaskedOptions selecting(const SelectionOptions& options, Index chunk = 32) {
  return {.selection = options, .chunk = chunk};
}

// Drawn at random: caches, streams and options, cells that are new, calls that are refused or fail in between, and one
// object for several of them, which checks all that it remembers.
TEST(MaskedAttention, IsWhatTheLibraryGivesForEachSequenceAlone) {
  std::optional<Layer> kept;
  for (unsigned round = 0; round < 64; ++round) {
    SCOPED_TRACE(round);
    if (round % 4 == 0) kept.emplace();
    Layer& layer = *kept;
    std::mt19937 random(round);
    const auto some = [&](unsigned n) { return static_cast<Index>(random() % n); };
    const Budget budget = some(2) == 0 ? Budget::keys(40) : Budget::share(0.125);
    MaskedOptions masked;  // exact
    // In the softmax domain a sketch chooses other keys than its float twin.
    if (const unsigned kind = round / 4 % 4; kind > 0) {
      masked = selecting(kind == 1   ? SelectionOptions(QuokaOptions{.budget = budget})
                         : kind == 2 ? MassOptions::balanced(budget)
                                     : MassOptions::balanced(Budget::keys(40)),
                         some(2) == 0 ? 16 : 32);
      masked.sketch = kind == 1 && round / 16 % 2 == 0;
      masked.decode = some(3) == 0;
      if (some(4) == 0) masked.min_past = 250;
    }
    AttentionOptions options;
    if (some(2) == 0) options.scale = std::array{0.05f, 0.7f, 1.0f}[random() % 3];
    const bool usual = some(2) == 0, apart = some(2) == 0;
    std::deque<Engine> engines;
    std::vector<std::function<void()>> writes;
    for (Index count = 1 + some(2); count > 0; --count) {
      Engine& engine = engines.emplace_back(
          some(2) == 0, static_cast<unsigned>(100 * round + count),
          usual ? std::array<Index, 2>{70, 45} : std::array<Index, 2>{1 + some(150), 1 + some(90)});
      writes.emplace_back(engine.before_the_batch());
    }
    const auto streams = [&] {
      std::vector<MaskedStream> all;
      for (Engine& engine : engines)
        for (const MaskedStream& stream : apart ? engine.streams() : std::vector{engine.stream()})
          all.push_back(stream);
      return all;
    };
    ThreadPool threads(1 + static_cast<int>(some(3)));
    layer.run(streams(), masked, options, threads);
    for (const auto& write : writes) write();
    if (some(3) == 0) {
      std::vector<MaskedStream> wrong = streams();
      wrong.back().v = wrong.back().v.slice(0, 100);
      EXPECT_THROW(layer.run(wrong, masked, options, threads), std::invalid_argument);
    }
    std::optional<MaskedReport> report;
    if (some(3) == 0) try {
        report = layer.run(streams(), masked, options, quoka_test::FailsAt{some(150)});
      } catch (const quoka_test::Failure&) {
      }
    if (!report) report = layer.run(streams(), masked, options, threads);
    Index queries = 0;
    double by_shares = 0, shares = 0;
    for (Engine& engine : engines) {
      EXPECT_LE(engine.distance(engine.expected(masked, options)), 2e-5f);
      queries += engine.n_q, by_shares += engine.by_shares, shares += engine.kept;
    }
    EXPECT_EQ(report->by_shares, by_shares);
    EXPECT_NEAR(report->kept, shares, 1e-4 * by_shares);
    EXPECT_EQ(report->queries, queries);
    EXPECT_EQ(report->sequences, 2 * std::ssize(engines));
    if (!masked.selection) {
      EXPECT_EQ(report->outcome, MaskedOutcome::asked_exact);
      EXPECT_EQ(report->attended, report->seen);
    } else if (usual && masked.min_past == 0) {
      EXPECT_EQ(report->outcome, MaskedOutcome::selected);
      EXPECT_LT(report->attended, 0.5 * report->seen);
    }
    if (::testing::Test::HasFailure()) return;
  }
}

// One stream without a mask of one head: all are exact, and the call says so.
TEST(MaskedAttention, OneStreamThatCannotSelect) {
  Engine one(false), other(false, 6);
  MaskedStream all = other.stream();
  all.mask = {};
  Layer layer;
  const MaskedReport report =
      layer.run(std::vector{one.stream(), all},
                selecting(QuokaOptions{.budget = quoka::Budget::keys(40)}), {}, SerialExecutor{});
  EXPECT_EQ(report.outcome, MaskedOutcome::masks);
  EXPECT_EQ(report.attended, report.seen);
  EXPECT_LE(one.distance(one.expected({})), 2e-5f);
}

// Whether a call used its sketch shows in the softmax domain, where a sketch chooses other keys than float.
class MaskedSketch : public ::testing::Test {
 protected:
  // Did one call select as by a sketch of the cells, or as in float?
  bool sketches(Engine& engine, MaskedOptions asked, bool known = true) {
    std::get<MassOptions>(*asked.selection).sketch = Sketch::on;
    if (known)
      Layer().run({engine.stream()}, asked, {}, SerialExecutor{});
    else
      MaskedAttention().run(std::vector{engine.stream()}, asked, {}, SerialExecutor{});
    const KeySketch sketch = engine.sketch();
    const float by_sketch = engine.distance(engine.expected(asked, {}, &sketch)),
                in_float = engine.distance(engine.expected(asked));
    EXPECT_LE(std::min(by_sketch, in_float), 2e-5f);
    EXPECT_GT(std::max(by_sketch, in_float), 1e-3f);
    return by_sketch < in_float;
  }
  // Keys without neighbours, and many of them: some lie so near the threshold that 8-bit logits exchange them.
  const MaskedOptions masked = selecting(MassOptions{
      .budget = quoka::Budget::keys(100), .threshold = 0.0f, .least = 0, .kernel_size = 1});
};

// By the queries of all segments that select, together.
TEST_F(MaskedSketch, IsMadeForThirtyTwoQueries) {
  Engine many(false), together(false, 5, {16, 16}), few(false, 5, {16, 15}), one(false, 5, {31, 1});
  EXPECT_TRUE(sketches(many, masked));
  MaskedOptions short_chunks = masked;
  short_chunks.chunk = 16;
  EXPECT_TRUE(sketches(together, short_chunks));
  EXPECT_FALSE(sketches(few, short_chunks)) << "fewer queries than a chunk select nothing";
  EXPECT_FALSE(sketches(one, short_chunks)) << "a single query selects nothing";
  MaskedOptions decode = masked;
  decode.decode = true;
  EXPECT_TRUE(sketches(together, decode));
  EXPECT_FALSE(sketches(few, decode));
  EXPECT_TRUE(sketches(one, decode));
}

TEST_F(MaskedSketch, IsNotMadeOfCellsThatNobodyKnows) {
  Engine engine(false);
  EXPECT_FALSE(sketches(engine, masked, false));
  MaskedOptions off = masked;
  off.sketch = false;
  EXPECT_FALSE(sketches(engine, off));
}

// Cells in another order are looked at with a sketch or without.
TEST_F(MaskedSketch, IsNotUsedWhereItIsOffThoughThereIsOne) {
  Engine engine(true);
  MaskedOptions on = masked, off = masked;
  std::get<MassOptions>(*on.selection).sketch = Sketch::on, off.sketch = false;
  Layer layer, other;
  const auto output = [&](Layer& of, const MaskedOptions& asked) {
    of.run(std::vector{engine.stream()}, asked, {}, SerialExecutor{});
    return engine.out();
  };
  const std::vector<float> in_float = output(other, off), by_sketch = output(layer, on);
  EXPECT_NE(by_sketch, in_float);
  EXPECT_EQ(output(layer, off), output(other, off));
  EXPECT_EQ(output(layer, on), by_sketch);
}

// A whole prompt in one call: its first chunk selects nothing, its last ones do.
TEST_F(MaskedSketch, IsMadeForTheLastChunksOfAPrompt) {
  Engine engine(false, 5, {400, 200});
  EXPECT_TRUE(sketches(engine, masked));
  MaskedOptions late = masked;
  late.min_past = 384;  // of the first sequence's last chunk
  EXPECT_TRUE(sketches(engine, late));
}

// How much of the past is read; the first tokens of a sequence have none.
TEST(MaskedAttention, ReportsWhatItRead) {
  Engine engine(false, 5, {400, 45});
  Layer layer;
  MaskedOptions masked = selecting(QuokaOptions{.budget = quoka::Budget::keys(40)});
  for (const Index min_past : {0, 200}) {
    masked.min_past = min_past;
    const MaskedReport report =
        layer.run(std::vector{engine.stream()}, masked, {}, SerialExecutor{});
    double seen = 0, attended = 0, own = 0;
    for (const auto& [begin, end] : {std::pair<Index, Index>{0, 400}, {155, 200}})
      for (Index past = begin, count = 0; past < end; past += count) {
        count = std::min(end - past, 32 - past % 32);
        seen += static_cast<double>(past * count);
        attended +=
            static_cast<double>((past >= min_past ? std::min<Index>(past, 40) : past) * count);
        own += static_cast<double>(count * (count + 1)) / 2;
      }
    EXPECT_DOUBLE_EQ(report.seen, seen);
    EXPECT_DOUBLE_EQ(report.attended, attended);
    EXPECT_DOUBLE_EQ(report.own, own);
    // A layer that selects nothing saw the same keys of the same queries.
    MaskedOptions exact = masked;
    exact.selection.reset();
    const MaskedReport dense = layer.run(std::vector{engine.stream()}, exact, {}, SerialExecutor{});
    EXPECT_DOUBLE_EQ(dense.seen, seen);
    EXPECT_DOUBLE_EQ(dense.attended, seen);
    EXPECT_DOUBLE_EQ(dense.own, own);
    EXPECT_LE(engine.distance(engine.expected(exact)), 2e-5f);
    (void)layer.run(std::vector{engine.stream()}, masked, {}, SerialExecutor{});
    EXPECT_LE(engine.distance(engine.expected(masked)), 2e-5f);
  }
}

// Chunks that chose by shares of attention report what they keep; those with every key and those of the paper's
// selector report nothing.
TEST(MaskedAttention, ReportsTheAttentionThatIsKept) {
  Engine engine(false, 5, {400, 45});
  Layer layer;
  const auto report = [&](const SelectionOptions& options) {
    return layer.run(std::vector{engine.stream()}, selecting(options), {}, SerialExecutor{});
  };
  double less = 1;
  for (const Index keys : {80, 40, 20}) {
    const MaskedReport some = report(MassOptions::recommended(Budget::keys(keys)));
    EXPECT_GT(some.by_shares, 250);
    EXPECT_LE(some.by_shares, 445);
    EXPECT_GT(some.kept, 0);
    EXPECT_LT(some.kept / some.by_shares, less);
    less = some.kept / some.by_shares;
  }
  EXPECT_EQ(report(MassOptions::recommended()).by_shares, 0);
  EXPECT_EQ(report(QuokaOptions{.budget = quoka::Budget::keys(40)}).by_shares, 0);
}

// A cache that is a list of cells is its rows side by side, exact and selecting.
TEST(MaskedAttention, ACacheMayBeAList) {
  for (const bool shuffled : {false, true}) {
    Engine engine(shuffled);
    std::vector<Position> cells(Engine::cells);
    std::iota(cells.begin(), cells.end(), 0);
    const MaskedStream whole = engine.stream();
    for (const bool selects : {false, true}) {
      // Earlier calls show which cell is a query's own.
      if (shuffled && selects) continue;
      MaskedOptions masked = selecting(QuokaOptions{.budget = quoka::Budget::keys(40)});
      if (!selects) masked.selection.reset();
      MaskedStream stream = whole;
      stream.k = whole.k.gathered(cells), stream.v = whole.v.gathered(cells);
      Layer layer;
      layer.run(std::vector{stream}, masked, {}, SerialExecutor{});
      EXPECT_LE(engine.distance(engine.expected(masked)), 2e-5f) << shuffled << selects;
    }
  }
}

// Masks of all kinds, drawn: causal or not, of two sequences, of cells of each query's own as a model writes them that
// chooses keys by itself; with biases here and there or in stretches of rows, and rows that see nothing. Without a
// selection, or with one that keeps all, each row is attention by its mask in double. With few keys those rows are that
// see a key behind them.
TEST(MaskedAttention, EachRowIsWhatItsMaskSays) {
  for (std::uint64_t seed = 0; seed < 48; ++seed) {
    quoka_test::Random random(seed);
    const auto some = [&](Index n) { return random.below(n); };
    const Index kind = some(9), n_q = std::array<Index, 5>{2, 7, 40, 70, 150}[random.bits() % 5],
                cells = n_q + (kind == 8 || some(6) == 0 ? 1200 : 60 + some(300)),
                past = cells - n_q, share = std::array<Index, 3>{1, 4, 16}[random.bits() % 3];
    SCOPED_TRACE(::testing::Message() << "mask " << kind << ", " << n_q << " of " << cells);
    const std::function<bool(Index, Index)> sees[] = {
        [](Index, Index) { return true; },                                   // all see all
        [&](Index i, Index c) { return c <= past + std::max(i, n_q / 2); },  // a prefix both ways
        [&](Index i, Index c) {                                              // an image's tokens
          return c <= past + i || (i >= n_q / 3 && i < n_q / 2 && c < past + n_q / 2);
        },
        [](Index, Index c) { return c >= 9; },  // left padding, both ways
        [&](Index i, Index c) {
          return c <= past + i || (i % 7 == 3 && c == cells - 1);
        },                                                          // one key far behind
        [&](Index i, Index c) { return c >= 9 && c <= past + i; },  // causal, left padding
        [&](Index i, Index c) {
          return (i < n_q / 2) == (c < past / 2);
        },  // two sequences, both ways
        [&](Index i, Index c) { return (i < n_q / 2) == (c % 2 == 0) && c <= past + i; },  // causal
        [&](Index, Index) { return some(share) == 0; }};  // own cells
    Tensor4<Eigen::half> mask(1, 1, n_q, cells);
    std::vector<bool> sees_behind(static_cast<std::size_t>(n_q));
    for (Index i = 0; i < n_q; ++i) {
      const Index row = some(
          12);  // 0: sees nothing, as engines hide; 1: the same; 2: one cell; 3: hides otherwise
      const Eigen::half hides(row == 0 || row == 3 ? -65504.0f : -INFINITY);
      for (Index c = 0; c < cells; ++c) {
        const bool seen = row > 1 && (row > 2 || kind < 8) && sees[kind](i, c);
        mask(0, 0, i, c) = seen ? Eigen::half(0.0f) : hides;
        if (c > past + i && seen) sees_behind[static_cast<std::size_t>(i)] = true;
      }
      if (row == 2 && kind == 8) mask(0, 0, i, some(cells)) = Eigen::half(0.0f);
    }
    const auto bias = [&](Index i, Index c, float x) {
      if (mask(0, 0, i, c) == Eigen::half(0.0f)) mask(0, 0, i, c) = Eigen::half(x);
    };
    const Index biases = some(2) == 0 ? 0 : some(2) == 0 ? 1 + some(5) : 300;
    for (Index at = 0; at < biases; ++at)
      bias(some(n_q), some(cells), at % 7 == 0 ? 3.0f : at == 5 ? NAN : -0.001f);
    if (some(4) == 0)  // all of a stretch of rows
      for (Index i = some(n_q), end = std::min(n_q, i + some(60)); i < end; ++i)
        for (Index c = 0; c < cells; ++c) bias(i, c, static_cast<float>(some(200)) * 0.01f - 1.0f);

    const auto q = random.tensor<float>(1, 8, n_q, 16);
    const auto k = random.tensor<Eigen::half>(1, 2, cells, 16),
               v = random.tensor<Eigen::half>(1, 2, cells, 16);
    Tensor4<float> out(1, 8, n_q, 16);
    const MaskedStream stream{.q = q, .k = k, .v = v, .mask = mask, .out = out};
    const std::vector<float> wanted =
        by_oracle(stream, [&](Index i, Index c) { return mask(0, 0, i, c); });
    ThreadPool threads(1 + static_cast<int>(some(3)));
    for (const auto& selection :
         {std::optional<SelectionOptions>(),
          std::optional<SelectionOptions>(QuokaOptions{.budget = Budget::share(1.0)}),
          std::optional<SelectionOptions>(QuokaOptions{.budget = Budget::keys(20)})}) {
      const bool selects = selection && !keeps_all(*selection, past);
      SCOPED_TRACE(selects ? "20 keys" : selection ? "all keys" : "exact");
      Layer layer;
      const MaskedReport report =
          layer.run(std::vector{stream}, {.selection = selection, .chunk = 32},
                    {.arithmetic = Arithmetic::float_}, threads);
      if (kind == 8) {
        EXPECT_LT(report.sequences, std::max<Index>(n_q, 3)) << "rows are joined";
      }
      for (Index at = 0; at < out.size(); ++at) {
        const auto i = static_cast<std::size_t>(at / 16 % n_q);
        if (selects && !sees_behind[i]) continue;
        const float x = out.data()[at], expected = wanted[static_cast<std::size_t>(at)];
        ASSERT_EQ(std::isnan(x), std::isnan(expected)) << "query " << i;
        if (!std::isnan(expected)) {
          ASSERT_NEAR(x, expected, 3e-5f) << "query " << i;
        }
      }
    }
  }
}

// Why a call was exact is said of that call and of all its sequences.
TEST(MaskedAttention, SaysItOfThisCallAndOfAllSequences) {
  Layer layer;
  const auto outcome = [&](Engine& engine, bool decode = false, Index chunk = 32) {
    MaskedOptions masked = selecting(QuokaOptions{.budget = quoka::Budget::keys(4000)}, chunk);
    masked.decode = decode;
    return layer.run(std::vector{engine.stream()}, masked, {}, SerialExecutor{}).outcome;
  };
  Engine biased(false), tokens(false, 5, {1, 1}), few(false, 5, {31, 1}), first(false, 5, {32, 1}),
      second(false, 5, {1, 32});
  for (Index row = 0; row < 70; ++row) biased.mask(row, 3) = Eigen::half(0.5f);
  EXPECT_EQ(outcome(biased), MaskedOutcome::biases);
  EXPECT_EQ(outcome(tokens), MaskedOutcome::single_queries);
  EXPECT_EQ(outcome(tokens, true), MaskedOutcome::all_kept);
  EXPECT_EQ(outcome(few), MaskedOutcome::single_queries) << "the draft that speculation verifies";
  EXPECT_EQ(outcome(few, true), MaskedOutcome::all_kept);
  EXPECT_EQ(outcome(first), MaskedOutcome::all_kept);
  EXPECT_EQ(outcome(second), MaskedOutcome::all_kept);
  Engine less(false, 5, {63, 1}), enough(false, 5, {64, 1});
  EXPECT_EQ(outcome(less, false, 128), MaskedOutcome::single_queries);
  EXPECT_EQ(outcome(enough, false, 128), MaskedOutcome::all_kept);
}

TEST(MaskedAttention, SaysWhyItIsExact) {
  Layer layer;
  const auto outcome = [&](Engine& engine, const MaskedOptions& masked,
                           const AttentionOptions& options = {}) {
    return layer.run(std::vector{engine.stream()}, masked, options, SerialExecutor{}).outcome;
  };
  Engine engine(false);
  EXPECT_EQ(outcome(engine, {}), MaskedOutcome::asked_exact);
  EXPECT_EQ(outcome(engine, selecting(QuokaOptions{.budget = quoka::Budget::keys(4000)})),
            MaskedOutcome::all_kept);
  MaskedOptions late = selecting(QuokaOptions{.budget = quoka::Budget::keys(40)});
  late.min_past = 5000;
  EXPECT_EQ(outcome(engine, late), MaskedOutcome::all_kept);
  EXPECT_LE(engine.distance(engine.expected({})), 2e-5f);
  const std::vector<float> slopes = alibi_slopes(Engine::q_heads);
  AttentionOptions factors;
  factors.mask_factors = slopes;
  EXPECT_EQ(outcome(engine, selecting(QuokaOptions{.budget = quoka::Budget::keys(40)}), factors),
            MaskedOutcome::masks);
  for (Index row = 0; row < engine.n_q; ++row) engine.mask(row, 3) = Eigen::half(0.5f);
  for (Index row = 0; row < engine.n_q; ++row) engine.mask(row, 403) = Eigen::half(0.5f);
  EXPECT_EQ(outcome(engine, selecting(QuokaOptions{.budget = quoka::Budget::keys(4000)})),
            MaskedOutcome::biases);
  Engine slides(false);
  for (Index row = 0; row < 70; ++row)
    for (Index cell = 0; cell < 300 + row; ++cell) slides.mask(row, cell) = Eigen::half(-INFINITY);
  const MaskedReport windows =
      layer.run(std::vector{slides.stream()}, MaskedOptions{}, {}, SerialExecutor{});
  EXPECT_TRUE(windows.sliding_window) << "asked for or not";
  EXPECT_EQ(outcome(slides, selecting(QuokaOptions{.budget = quoka::Budget::keys(4000)})),
            MaskedOutcome::sliding_window);
  Engine alike(false);
  for (Index row = 0; row < 70; ++row)
    for (Index cell = 0; cell < Engine::cells; ++cell)
      alike.mask(row, cell) = Eigen::half(cell < 400 ? 0.0f : -INFINITY);
  EXPECT_EQ(outcome(alike, selecting(QuokaOptions{.budget = quoka::Budget::keys(4000)})),
            MaskedOutcome::bidirectional);
  for (int what = static_cast<int>(MaskedOutcome::asked_exact);
       what <= static_cast<int>(MaskedOutcome::single_queries); ++what)
    EXPECT_EQ(std::string(describe(static_cast<MaskedOutcome>(what))).find("exact: "), 0u);
}

// A biased entry concerns its own row: that row attends to all that it sees, to the last bias; the others select as
// if it were not there, to the last bit.
TEST(MaskedAttention, ABiasedEntryCostsItsRowAlone) {
  for (const bool shuffled : {false, true})
    for (const MaskedOptions& masked :
         {MaskedOptions{}, selecting(QuokaOptions{.budget = quoka::Budget::keys(40)})}) {
      Engine engine(shuffled);
      Layer layer;
      const auto run = [&] {  // on keys that are new
        const auto write = engine.before_the_batch();
        layer.run(std::vector{engine.stream()}, masked, {}, SerialExecutor{});
        write();
        return layer.run(std::vector{engine.stream()}, masked, {}, SerialExecutor{});
      };
      const MaskedReport without = run();
      const std::vector<float> plain = engine.out();
      const Index row = 33, cell = engine.sequences[0].cells[123];
      engine.mask(row, cell) = Eigen::half(-0.001f);
      const MaskedReport with = run();
      EXPECT_EQ(with.outcome, without.outcome);
      EXPECT_LE(engine.distance(engine.by_the_mask(), row), 2e-5f);
      EXPECT_NE(engine.distance(plain, row), 0.0f);
      for (Index other = 0; other < engine.n_q; ++other)
        EXPECT_TRUE(other == row || engine.distance(plain, other) == 0.0f) << other;
      if (masked.selection)
        EXPECT_GT(with.attended, without.attended);
      else
        EXPECT_EQ(with.attended, without.attended);
      EXPECT_LE(with.attended, without.attended + 400) << "that row's past, and no other's";
      engine.mask(row, cell) = Eigen::half(0.0f);
      run();
      EXPECT_EQ(engine.distance(plain), 0.0f) << "nothing of it is left";
    }
}

// By the stream's number and both numbers, and before anything is written.
TEST(MaskedAttention, RefusesWhatDoesNotFit) {
  Engine first(false), second(false);
  const auto refused = [&](const std::function<void(MaskedStream&)>& wrong,
                           const std::vector<quoka_test::Fragment>& says, Index chunk = 32) {
    Layer layer;
    MaskedStream stream = second.stream();
    wrong(stream);
    quoka_test::expect_refused(
        [&] {
          layer.run(std::vector{first.stream(), stream},
                    selecting(QuokaOptions{.budget = Budget::keys(40)}, chunk), {},
                    SerialExecutor{});
        },
        says);
    EXPECT_EQ(first.distance(first.expected({})), INFINITY) << "out is NaN as it was";
  };
  refused([](MaskedStream&) {}, {"chunk", 0, 1}, 0);
  refused([](MaskedStream& x) { x.v = x.v.slice(0, 100); },
          {"quoka: stream 1: past v's len is 100, but must be 700"});
  refused([](MaskedStream& x) { x.mask = x.mask.slice(0, 30); },  // some queries would be left out
          {"quoka: stream 1: the mask's q_len is 30, but must equal q_len, which is 115"});
  refused([](MaskedStream& x) { x.k = x.k.slice(0, 600), x.v = x.v.slice(0, 600); },
          {"stream", 1, 700, 600});
  // Two views of one cache.
  refused(
      [&](MaskedStream& x) {
        const Rows k = first.stream().k;
        x.k = Rows(k.data(), k.format(), k.sizes(),
                   {k.strides()[0], k.strides()[1] / 2, k.strides()[2]});
      },
      {"quoka"});
  // Lists among the options.
  const std::vector<Position> entries(static_cast<std::size_t>(first.n_q), 0);
  quoka_test::expect_refused(
      [&] {
        Layer().run(std::vector{first.stream()}, {},
                    {.lists = quoka::IndexLists({entries.data(), {1, 1, first.n_q, 1}})},
                    SerialExecutor{});
      },
      {"lists of each query's keys", "a mask says"});
  EXPECT_EQ(first.distance(first.expected({})), INFINITY);
}

TEST(MaskedAttention, SaysWhereTheMaskAloneSaysWhatIsSeen) {
  Engine causal(false);
  Layer layer;
  EXPECT_FALSE(layer.run(std::vector{causal.stream()}, {}, {}, SerialExecutor{}).by_mask);
  MaskedStream stream = causal.stream();
  stream.mask = {};
  EXPECT_TRUE(layer.run(std::vector{stream}, {}, {}, SerialExecutor{}).by_mask);
}

// The paper's own: 8 heads from 1/2 to 1/256; and 12 heads, which is not a power of two.
TEST(AlibiSlopes, AreThePapers) {
  const std::vector<float> eight = alibi_slopes(8), twelve = alibi_slopes(12);
  for (std::size_t h = 0; h < 8; ++h) {
    EXPECT_FLOAT_EQ(eight[h], std::exp2(-static_cast<float>(h + 1)));
    EXPECT_FLOAT_EQ(twelve[h], eight[h]);
  }
  for (std::size_t h = 8; h < 12; ++h)
    EXPECT_FLOAT_EQ(twelve[h], std::exp2(-(static_cast<float>(h - 8) + 0.5f)));
  EXPECT_THROW(alibi_slopes(0), std::invalid_argument);
  for (const float wrong : {NAN, INFINITY, -8.0f, 2e30f})
    EXPECT_THROW(alibi_slopes(4, wrong), std::invalid_argument) << wrong;
}

}  // namespace
