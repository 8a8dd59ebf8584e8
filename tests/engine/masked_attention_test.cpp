// MaskedAttention against the library's own calls on the same tokens in order, and its reports.

#include <quoka/engine/masked_attention.hpp>
#include <quoka/quoka.hpp>

#include "ggml/known_cells.hpp"
#include "support/engine_mask.hpp"
#include "support/executors.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <deque>
#include <functional>
#include <map>
#include <numeric>
#include <optional>

namespace {

using namespace quoka;
using namespace quoka_test;
using quoka::AttentionOptions;
using quoka::Budget;
using quoka::Rows;

using Output = Tensor4<float>;  // [1, q_heads, queries, dim]

// What a stream's mask asks for.
Output by_oracle(const MaskedStream& stream, const Tensor4<Eigen::half>& mask) {
  oracle::AttentionOptions options;
  options.causal = false;
  options.mask = [&](Index, Index, Index query, Index cell) {
    const float added = static_cast<float>(mask(0, 0, query, cell));
    return added <= Mask::hides_from ? -oracle::infinity : static_cast<double>(added);
  };
  const auto result = oracle::attention(to_oracle(stream.q), to_oracle(stream.k),
                                        to_oracle(stream.v), nullptr, {}, {}, options);
  Output out(1, stream.q.heads(), stream.q.len(), stream.v.dim());
  std::copy(result.out.data.begin(), result.out.data.end(), out.data());
  return out;
}

// Two sequences in one cache, cells in a random order, and a batch with a chunk of each.
class Engine {
 public:
  static constexpr Index q_heads = 4, kv_heads = 2, dim = 32, cells = 700;
  struct Sequence {
    std::vector<Position> cells;  // by token
    Index chunk;                  // tokens of the batch, its last
  };

  explicit Engine(bool shuffled, std::uint64_t seed = 5, std::array<Index, 2> chunks = {70, 45})
      : random_(seed), n_q(chunks[0] + chunks[1]) {
    const std::vector<Index> order =
        shuffled ? random_.permutation(cells) : oracle::range(0, cells);
    sequences = {{{order.begin(), order.begin() + 400}, chunks[0]},
                 {{order.begin() + 400, order.begin() + 600}, chunks[1]}};
    out.setConstant(NAN), mask.setConstant(Eigen::half(-INFINITY));
    Index row = 0;
    for (const Sequence& s : sequences)
      for (Index i = std::ssize(s.cells) - s.chunk; i < std::ssize(s.cells); ++i, ++row)
        for (Index j = 0; j <= i; ++j) mask(0, 0, row, s.cells[uz(j)]) = Eigen::half(0);
  }
  MaskedStream stream() { return {.q = q, .k = k, .v = v, .mask = mask, .out = out}; }
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
    const Tensor4<float> written = k;
    for (const Sequence& s : sequences)
      for (Index i = std::ssize(s.cells) - s.chunk; i < std::ssize(s.cells); ++i)
        k.chip(s.cells[uz(i)], 2).setZero();
    return [this, written] { std::copy_n(written.data(), k.size(), k.data()); };
  }
  // The same by select() and attention(), sequence by sequence, chunk by chunk, and what a report says of it. An engine's
  // mask does not tell the order of the tokens before a batch: it is that of their cells.
  Output expected(const MaskedOptions& masked, const AttentionOptions& options = {},
                  const KeySketch* sketch = nullptr) {
    // All members: one that is not among those that are drawn does not compile.
    const auto& [selection, chunk, min_past, decode, sketches] = masked;
    Output all(out.dimensions());
    all.setConstant(NAN);
    report = {.queries = n_q};
    const OutputRows to = all;
    const Rows keys = k, values = v;
    Index row = 0;
    for (const Sequence& s : sequences) {
      std::vector<Position> list_of = s.cells;
      std::sort(list_of.begin(), list_of.end() - s.chunk);
      const std::span<const Position> list = list_of;
      const Index first = std::ssize(list) - s.chunk;
      for (Index i = 0, count = 0; i < s.chunk; i += count) {
        const Index past = first + i;
        count = std::min((past / chunk + 1) * chunk - past, s.chunk - i);
        const auto n = static_cast<double>(count);
        const auto before = list.first(uz(past)), own = list.subspan(uz(past), uz(count));
        Past of{keys.gathered(before), values.gathered(before)};
        Selection keep = Selection::all(1, kv_heads, past);
        AnySelector::State state;
        if (selection && (decode || s.chunk >= std::max<Index>(2, std::min<Index>(chunk, 64))) &&
            past >= min_past) {
          AnySelector(*selection)
              .select({.q = Rows(q).slice(row + i, count),
                       .k = of.k,
                       .logits = options,
                       .capacity = past,
                       .sketch = sketch,
                       .chunk_k = keys.gathered(own),
                       .attends = true},
                      state, keep, SerialExecutor{});
          for (const float share : keep.kept_shares())
            report.kept += n * static_cast<double>(share) / static_cast<double>(keep.heads());
          report.by_shares += keep.kept_shares().empty() ? 0 : n;
        }
        of.selection = &keep;
        report.seen += static_cast<double>(past) * n;
        report.attended +=
            static_cast<double>(keep.sum_of_counts()) * n / static_cast<double>(keep.heads());
        report.own += n * (n + 1) / 2;
        quoka::attention(Rows(q).slice(row + i, count), of,
                         {keys.gathered(own), values.gathered(own)}, to.slice(row + i, count),
                         options);
      }
      row += s.chunk;
    }
    return all;
  }
  void expect_as_expected(const MaskedOptions& masked, const AttentionOptions& options = {}) {
    EXPECT_LE(distance(expected(masked, options)), 2e-5f);
  }
  // A sketch of all cells as they lie.
  KeySketch sketch() const {
    KeySketch sketch;
    sketch.update(k, 0, cells, SerialExecutor{});
    return sketch;
  }
  // The largest difference, of all queries or of one.
  float distance(const Output& wanted, Index query = -1) const {
    float most = 0;
    for (Index i = 0; i < out.size(); ++i) {
      if (query >= 0 && i / dim % n_q != query) continue;
      const float x = std::abs(out.data()[i] - wanted.data()[i]);
      most = std::isnan(x) ? INFINITY : std::max(most, x);
    }
    return most;
  }

 private:
  Random random_;

 public:
  std::vector<Sequence> sequences;
  Index n_q;
  Tensor4<float> q = random_.tensor<float>(1, q_heads, n_q, dim),
                 k = random_.tensor<float>(1, kv_heads, cells, dim),
                 v = random_.tensor<float>(1, kv_heads, cells, dim);
  Output out{1, q_heads, n_q, dim};
  Tensor4<Eigen::half> mask{1, 1, n_q, cells};
  MaskedReport report;  // of what was expected last
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

// Drawn at random: caches, also as lists of their cells, streams and options, cells that are new, calls that are refused or
// fail in between, and one object for several of them, which checks all that it remembers.
TEST(MaskedAttention, IsWhatTheLibraryGivesForEachSequenceAlone) {
  for_each_draw(24, [](Random& random) {
    Layer layer;
    const Index kind = random.below(4);
    for (int call = 0; call < 3; ++call) {
      const Budget budget = random.below(2) == 0 ? Budget::keys(40) : Budget::share(0.125);
      MaskedOptions masked;  // exact
      // In the softmax domain a sketch chooses other keys than its float twin.
      if (kind > 0) {
        masked = selecting(kind == 1   ? SelectionOptions(QuokaOptions{.budget = budget})
                           : kind == 2 ? MassOptions::balanced(budget)
                                       : MassOptions::balanced(Budget::keys(40)),
                           random.one_of(16, 32));
        masked.sketch = kind == 1 && random.below(2) == 0;
        masked.decode = random.seldom(3);
        if (random.seldom(4)) masked.min_past = 250;
      }
      AttentionOptions options;
      if (random.below(2) == 0) options.scale = random.one_of(0.05f, 0.7f, 1.0f);
      // Logits so large multiply the errors of tiles' products.
      if (options.scale > 0.5f) options.arithmetic = Arithmetic::float_;
      const bool usual = random.below(2) == 0, apart = random.below(2) == 0;
      std::deque<Engine> engines;
      std::vector<std::function<void()>> writes;
      bool in_order = true;
      for (Index count = 1 + random.below(2); count > 0; --count) {
        std::array<Index, 2> chunks{70, 45};
        if (!usual)
          chunks = {1 + (random.seldom(4) ? 0 : random.below(150)),
                    1 + (random.seldom(4) ? 0 : random.below(90))};
        if (!usual && random.seldom(3)) chunks[0] = 400;  // without a past
        const bool shuffled = random.below(2) == 0;
        in_order = in_order && !shuffled;
        engines.emplace_back(shuffled, random.bits(), chunks);
      }
      for (Engine& engine : engines) writes.emplace_back(engine.before_the_batch());
      // Which cell of a list is a query's own, where they are in no order, is not known.
      const bool listed = random.seldom(3) && (in_order || !masked.selection);
      std::vector<Position> cells(listed ? Engine::cells : 0);
      std::iota(cells.begin(), cells.end(), 0);
      const auto streams = [&] {
        std::vector<MaskedStream> all;
        for (Engine& engine : engines)
          for (MaskedStream& stream : apart ? engine.streams() : std::vector{engine.stream()}) {
            if (!cells.empty())
              stream.k = stream.k.gathered(cells), stream.v = stream.v.gathered(cells);
            all.push_back(stream);
          }
        return all;
      };
      ThreadPool threads(1 + static_cast<int>(random.below(3)));
      layer.run(streams(), masked, options, threads);
      for (const auto& write : writes) write();
      if (random.seldom(3)) {
        std::vector<MaskedStream> wrong = streams();
        wrong.back().v = wrong.back().v.slice(0, 100);
        EXPECT_THROW(layer.run(wrong, masked, options, threads), std::invalid_argument);
      }
      std::optional<MaskedReport> report;
      if (random.seldom(3)) try {
          report = layer.run(streams(), masked, options, FailsAt{random.below(150)});
        } catch (const Failure&) {
        }
      if (!report) report = layer.run(streams(), masked, options, threads);
      MaskedReport expected;
      for (Engine& engine : engines) {
        engine.expect_as_expected(masked, options);
        const MaskedReport& of = engine.report;
        expected.queries += of.queries, expected.by_shares += of.by_shares;
        expected.kept += of.kept, expected.own += of.own;
        expected.seen += of.seen, expected.attended += of.attended;
      }
      EXPECT_EQ(report->by_shares, expected.by_shares);
      EXPECT_NEAR(report->kept, expected.kept, 1e-4 * expected.by_shares);
      EXPECT_DOUBLE_EQ(report->seen, expected.seen);
      EXPECT_DOUBLE_EQ(report->attended, expected.attended);
      EXPECT_DOUBLE_EQ(report->own, expected.own);
      EXPECT_EQ(report->queries, expected.queries);
      EXPECT_EQ(report->sequences, 2 * std::ssize(engines));
      if (!masked.selection) {
        EXPECT_EQ(report->outcome, MaskedOutcome::asked_exact);
      } else if (usual && masked.min_past == 0) {
        EXPECT_EQ(report->outcome, MaskedOutcome::selected);
      }
      if (has_failed()) return;
    }
  });
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
  const MaskedOptions masked = selecting(
      MassOptions{.budget = Budget::keys(100), .threshold = 0.0f, .least = 0, .kernel_size = 1});
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
    return Output(engine.out);
  };
  const Output in_float = output(other, off), by_sketch = output(layer, on);
  EXPECT_FALSE(same_bits(by_sketch, in_float));
  EXPECT_TRUE(same_bits(output(layer, off), output(other, off)));
  EXPECT_TRUE(same_bits(output(layer, on), by_sketch));
}

// A whole prompt in one call: its first chunk selects nothing, its last ones do.
TEST_F(MaskedSketch, IsMadeForTheLastChunksOfAPrompt) {
  Engine engine(false, 5, {400, 200});
  EXPECT_TRUE(sketches(engine, masked));
  MaskedOptions late = masked;
  late.min_past = 384;  // of the first sequence's last chunk
  EXPECT_TRUE(sketches(engine, late));
}

// Does row i see what the row before sees, and one cell more?
bool is_next_token(const EngineMask& mask, Index i) {
  Index more = 0;
  for (Index cell = 0; cell < mask.values.dimension(3); ++cell) {
    const bool before = mask.sees(i - 1, cell);
    if (mask.sees(i, cell) != before) more += before ? 2 : 1;
  }
  return more == 1;
}

// Without a selection, or with one that keeps all, each row is attention by its mask in double. With few keys all rows
// are but those that select: of 32 rows or more, each of which is the next token of the one before.
TEST(MaskedAttention, EachRowIsWhatItsMaskSays) {
  std::map<EngineMask::Kind, int> selected;
  const bool complete = for_each_draw(90, [&](Random& random) {
    const Index n_q = random.one_of(2, 7, 40, 70, 150),
                cells = n_q + (random.seldom(6) ? 1200 : 60 + random.below(300));
    const EngineMask mask(random, n_q, cells);
    SCOPED_TRACE(::testing::Message() << "mask " << mask.kind << ", " << n_q << " of " << cells);
    Index seen = 0;
    std::vector<Index> tokens(uz(n_q));  // of the chunk that a row is of
    for (Index i = 0, begin = 0; i < n_q; ++i) {
      for (Index cell = 0; cell < cells; ++cell) seen += mask.sees(i, cell);
      if (i > 0 && !is_next_token(mask, i)) begin = i;
      std::fill(tokens.begin() + begin, tokens.begin() + i + 1, i + 1 - begin);
    }

    const auto q = random.tensor<float>(1, 8, n_q, 16);
    const auto k = random.tensor<Eigen::half>(1, 2, cells, 16),
               v = random.tensor<Eigen::half>(1, 2, cells, 16);
    Tensor4<float> out(1, 8, n_q, 16);
    const MaskedStream stream{.q = q, .k = k, .v = v, .mask = mask.values, .out = out};
    const Output wanted = by_oracle(stream, mask.values);
    const std::vector<std::uint8_t> hidden(uz(n_q * cells));
    ThreadPool threads(1 + static_cast<int>(random.below(3)));
    for (const Index budget : {Index{0}, cells, Index{20}}) {
      SCOPED_TRACE(::testing::Message() << "of " << budget << " keys, or exact");
      MaskedOptions masked;
      if (budget > 0) masked = selecting(QuokaOptions{.budget = Budget::keys(budget)});
      // Other options that say which keys are seen have no effect.
      AttentionOptions options{.arithmetic = Arithmetic::float_, .causal = random.below(2) == 0};
      if (random.below(2) == 0) {
        options.mask = quoka::Mask::bytes(hidden.data(), {1, 1, n_q, cells}, {0, 0, cells});
        options.q_offset = cells;
      }
      const MaskedReport report = Layer().run(std::vector{stream}, masked, options, threads);
      selected[mask.kind] += report.outcome == MaskedOutcome::selected;
      EXPECT_TRUE(budget == 20 || report.outcome != MaskedOutcome::selected);
      if (mask.kind == EngineMask::set && seen > 4 * cells) {
        EXPECT_LT(report.sequences, n_q) << "rows are joined";
      }
      for (Index at = 0; at < out.size(); ++at) {
        const Index i = at / 16 % n_q;
        if (budget == 20 && tokens[uz(i)] >= 32) continue;
        const float x = out.data()[at], expected = wanted.data()[at];
        ASSERT_EQ(std::isnan(x), std::isnan(expected)) << "query " << i;
        if (!std::isnan(expected)) {
          ASSERT_NEAR(x, expected, 3e-5f) << "query " << i;
        }
      }
    }
  });
  if (!complete) return;
  EXPECT_GT(selected[EngineMask::chunk], 0);
  EXPECT_GT(selected[EngineMask::padded], 0);
  EXPECT_GT(selected[EngineMask::prefix] + selected[EngineMask::images], 0);
}

// Why a call was exact is said of that call and of all its sequences.
TEST(MaskedAttention, SaysWhyItIsExact) {
  using enum MaskedOutcome;
  Layer layer;
  const auto run = [&](Engine& engine, const MaskedOptions& masked,
                       const AttentionOptions& options = {}) {
    return layer.run(std::vector{engine.stream()}, masked, options, SerialExecutor{});
  };
  const auto keys = [](Index budget, Index chunk = 32, bool decode = false, Index min_past = 0) {
    MaskedOptions masked = selecting(QuokaOptions{.budget = Budget::keys(budget)}, chunk);
    masked.decode = decode, masked.min_past = min_past;
    return masked;
  };
  const auto keys_by_mass = [](const Budget& budget) {
    MaskedOptions masked = selecting(MassOptions::recommended(budget), 400);
    std::get<MassOptions>(*masked.selection).sketch = Sketch::on, masked.decode = true;
    return masked;
  };
  const struct {
    MaskedOutcome outcome;
    MaskedOptions masked;
    std::array<Index, 2> chunks = {70, 45};
  } table[] = {
      {asked_exact, {}},
      {all_kept, keys(4000)},
      {all_kept, selecting(MassOptions::recommended())},
      {all_kept, keys(40, 32, false, 5000)},
      {single_queries, keys(4000), {1, 1}},
      {all_kept, keys(4000, 32, true), {1, 1}},
      {single_queries, keys(4000), {31, 1}},  // the draft that speculation verifies
      {all_kept, keys(4000, 32, true), {31, 1}},
      {all_kept, keys(4000), {32, 1}},
      {all_kept, keys(4000), {1, 32}},
      {single_queries, keys(4000, 128), {63, 1}},
      {all_kept, keys(4000, 128), {64, 1}},
      {all_kept, keys_by_mass(Budget::keys(30)), {1, 1}},  // without a sketch none of them pays
  };
  for (const auto& [outcome, masked, chunks] : table) {
    SCOPED_TRACE(&outcome - &table[0].outcome);
    Engine engine(false, 5, chunks);
    const MaskedReport report = run(engine, masked);
    EXPECT_EQ(report.outcome, outcome);
    EXPECT_EQ(report.by_shares, 0);
    EXPECT_FALSE(report.by_mask);
    engine.expect_as_expected({});
  }
  // Half of the keys are too many for products of 8 bits, where the machine has such.
  Engine chunk(false, 5, {128, 1});
  for (const Arithmetic asked : {Arithmetic::float_, Arithmetic::int8})
    EXPECT_EQ(run(chunk, keys_by_mass(Budget::share(0.5)), {.arithmetic = asked}).outcome,
              arithmetic_used(asked) == Arithmetic::int8 ? all_kept : selected);
  Engine engine(false), biased(false), slides(false), alike(false);
  const std::vector<float> slopes = alibi_slopes(Engine::q_heads);
  EXPECT_EQ(run(engine, keys(40), {.mask_factors = slopes}).outcome, masks);
  MaskedStream all = biased.stream();  // one stream without a mask of one head: all are exact
  all.mask = {};
  const MaskedReport both =
      layer.run(std::vector{engine.stream(), all}, keys(40), {}, SerialExecutor{});
  EXPECT_EQ(both.outcome, masks);
  EXPECT_EQ(both.attended, both.seen);
  EXPECT_TRUE(both.by_mask);
  engine.expect_as_expected({});
  EXPECT_EQ(both.seen, run(engine, keys(40)).seen + static_cast<double>(biased.n_q * Engine::cells))
      << "hidden cells are counted";
  for (const Index cell : {3, 403}) {  // of the first sequence, and of both
    const Index end = cell == 3 ? 70 : biased.n_q;
    for (Index row = 0; row < end; ++row) biased.mask(0, 0, row, cell) = Eigen::half(0.5f);
    EXPECT_EQ(run(biased, keys(4000)).outcome, biases);
  }
  for (Index row = 0; row < 70; ++row)
    for (Index cell = 0; cell < Engine::cells; ++cell) {
      if (cell < 300 + row) slides.mask(0, 0, row, cell) = Eigen::half(-INFINITY);
      alike.mask(0, 0, row, cell) = Eigen::half(cell < 400 ? 0.0f : -INFINITY);
    }
  EXPECT_TRUE(run(slides, {}).sliding_window) << "asked for or not";
  EXPECT_EQ(run(slides, keys(4000)).outcome, sliding_window);
  EXPECT_EQ(run(alike, keys(4000)).outcome, bidirectional);
  for (int what = static_cast<int>(asked_exact); what <= static_cast<int>(single_queries); ++what)
    EXPECT_EQ(std::string(describe(static_cast<MaskedOutcome>(what))).find("exact: "), 0u);
}

// A biased entry concerns its own row: that row attends to all that it sees, to the last bias; the others select as
// if it were not there, to the last bit.
TEST(MaskedAttention, ABiasedEntryCostsItsRowAlone) {
  for (const bool shuffled : {false, true})
    for (const MaskedOptions& masked :
         {MaskedOptions{}, selecting(QuokaOptions{.budget = Budget::keys(40)})}) {
      Engine engine(shuffled);
      Layer layer;
      const auto run = [&] {  // on keys that are new
        const auto write = engine.before_the_batch();
        layer.run(std::vector{engine.stream()}, masked, {}, SerialExecutor{});
        write();
        return layer.run(std::vector{engine.stream()}, masked, {}, SerialExecutor{});
      };
      const MaskedReport without = run();
      const Output plain = engine.out;
      const Index row = 33, cell = engine.sequences[0].cells[123];
      engine.mask(0, 0, row, cell) = Eigen::half(-0.001f);
      const MaskedReport with = run();
      EXPECT_EQ(with.outcome, without.outcome);
      EXPECT_LE(engine.distance(by_oracle(engine.stream(), engine.mask), row), 2e-5f);
      EXPECT_NE(engine.distance(plain, row), 0.0f);
      for (Index other = 0; other < engine.n_q; ++other)
        EXPECT_TRUE(other == row || engine.distance(plain, other) == 0.0f) << other;
      EXPECT_TRUE(masked.selection ? with.attended > without.attended
                                   : with.attended == without.attended);
      EXPECT_LE(with.attended, without.attended + 400) << "that row's past, and no other's";
      if (masked.selection) {
        EXPECT_GT(with.select, 0.0) << "seconds";
      }
      engine.mask(0, 0, row + 18, cell) = Eigen::half(-0.001f);
      EXPECT_EQ(run().attended - without.attended, 2 * (with.attended - without.attended))
          << "two rows of a chunk, far apart";
      engine.mask(0, 0, row + 18, cell) = Eigen::half(0.0f);
      engine.mask(0, 0, row, cell) = Eigen::half(0.0f);
      run();
      EXPECT_EQ(engine.distance(plain), 0.0f) << "nothing of it is left";
    }
}

// Streams together decide whether workers are woken: by what they read, and by what they multiply.
TEST(MaskedAttention, WakesWorkersForTheWorkOfAllStreams) {
  Random random(1);
  const auto runs_of = [&](Index streams, Index cells, Index n_q) {
    const auto q = random.tensor<float>(1, 2, n_q, 16);
    const auto k = random.tensor<float>(1, 1, cells, 16), v = random.tensor<float>(1, 1, cells, 16);
    std::vector<Output> out(uz(streams), Output(1, 2, n_q, 16));
    std::vector<MaskedStream> all;
    for (Output& to : out) all.push_back({.q = q, .k = k, .v = v, .mask = {}, .out = to});
    int runs = 0;
    Layer layer;
    layer.run(all, {}, {}, InTurns{.runs = &runs});
    return runs;
  };
  for (const auto& [cells, n_q] : {std::pair<Index, Index>{10'000, 1}, {1'000, 25}}) {
    EXPECT_EQ(runs_of(1, cells, n_q), 0) << cells;
    EXPECT_GT(runs_of(2, cells, n_q), 0) << cells;
  }
}

// By the stream's number and both numbers, and before anything is written.
TEST(MaskedAttention, RefusesWhatDoesNotFit) {
  Engine first(false), second(false);
  const MaskedOptions usual = selecting(QuokaOptions{.budget = Budget::keys(40)});
  MaskedOptions no_chunk = usual;
  no_chunk.chunk = 0;
  const std::vector<Position> entries(uz(first.n_q), 0);
  const AttentionOptions listed{.lists = quoka::IndexLists({entries.data(), {1, 1, first.n_q, 1}})};
  const std::vector<float> slopes = alibi_slopes(Engine::q_heads);
  const struct {
    std::function<void(MaskedStream&)> wrong;
    std::vector<Fragment> says;
    MaskedOptions masked = {};
    AttentionOptions options = {};
  } table[] = {
      {[](MaskedStream&) {}, {"chunk", 0, 1}, no_chunk},
      {[](MaskedStream&) {}, {"lists of each query's keys", "a mask says"}, usual, listed},
      {[](MaskedStream&) {}, {"sliding_window", 5, 0, "a mask says"}, {}, {.sliding_window = 5}},
      {[](MaskedStream&) {}, {"alibi_slopes", "mask_factors"}, {}, {.alibi_slopes = slopes}},
      {[&](MaskedStream& x) {
         auto* const memory = reinterpret_cast<std::byte*>(first.mask.data());
         x.out = OutputRows(memory, x.out.format(), x.out.sizes(), x.out.strides());
       },
       {"out of sequence 1", "the mask of sequence 0"}},
      {[](MaskedStream& x) { x.v = x.v.slice(0, 100); },
       {"quoka: stream 1: past v's len is 100, but must be 700"},
       usual},
      {[](MaskedStream& x) { x.mask = x.mask.slice(0, 30); },  // some queries would be left out
       {"quoka: stream 1: the mask's q_len is 30, but must equal q_len, which is 115"},
       usual},
      {[](MaskedStream& x) { x.q = x.q.slice(0, 0), x.out = x.out.slice(0, 0); },
       {"the mask's queries", 115, 0},
       usual},
      {[](MaskedStream& x) { x.k = x.k.slice(0, 600), x.v = x.v.slice(0, 600); },
       {"stream", 1, 700, 600},
       usual},
      {[&](MaskedStream& x) {  // two views of one cache
         const auto [batch, head, row] = Rows(first.k).strides();
         x.k = Rows(Rows(first.k).data(), x.k.format(), x.k.sizes(), {batch, head / 2, row});
       },
       {"two streams have the same CacheCells"},
       usual},
  };
  for (const auto& [wrong, says, masked, options] : table) {
    Layer layer;
    MaskedStream stream = second.stream();
    wrong(stream);
    expect_refused(
        [&] {
          layer.run(std::vector{first.stream(), stream}, masked, options, SerialExecutor{});
        },
        says);
    for (Index i = 0; i < first.out.size(); ++i) ASSERT_TRUE(std::isnan(first.out.data()[i]));
  }
}

}  // namespace
