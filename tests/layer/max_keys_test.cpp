// Limits of sizes and positions (base/index.hpp): sizes beyond them are refused with both numbers before a key is read,
// at every door; at them results are right. Rows with a stride of 0 make a past of any length.

#include <quoka/engine/masked_attention.hpp>
#include <quoka/layer/chunked_prefill.hpp>
#include <quoka/methods/all.hpp>
#include <quoka/select/key_sketch.hpp>
#include <quoka/select/stages.hpp>

#include "support/attention_fixtures.hpp"

namespace {

using namespace quoka_test;
using quoka::Mask;
using quoka::OutputRows;
using quoka::QuokaSelector;

constexpr Index most = std::numeric_limits<Position>::max(), too_many = most + 6;
constexpr Index q_heads = 4, kv_heads = 2, dim = 8;

// Refuses to run: a call that reaches it was about to read something.
struct Idle {
  bool& asked;
  static int workers() { return 1; }
  template <class F>
  void run(Index, F&&) {
    asked = true;
    throw std::logic_error("keys are read");
  }
};

class MaxKeys : public ::testing::Test {
 protected:
  // The same row this many times.
  Rows rows(Index heads, Index len) const {
    return TensorView<const float>(row_, {1, heads, len, dim}, {0, 0, 0, 1});
  }
  OutputRows out(Index len) { return TensorView<float>(out_, {1, q_heads, len, dim}); }
  Mask bytes(Index q_len, Index keys) const { return Mask::bytes(row_, {1, 1, q_len, keys}, {}); }
  Idle idle() { return {asked_}; }
  // By a sentence with all of these, and nothing was run.
  template <class F>
  void refused(F&& f, std::initializer_list<Fragment> fragments) {
    expect_refused(f, fragments);
    EXPECT_FALSE(std::exchange(asked_, false));
  }

  float row_[64] = {1, 2, 3, 4, 5, 6, 7, 8}, out_[1024] = {};
  bool asked_ = false;
};

// ---- attention ----------------------------------------------------------------------------------

TEST_F(MaxKeys, OfAttention) {
  const auto attention = [&](Index q_len, Index past, Index chunk,
                             const AttentionOptions& options) {
    quoka::attention(rows(q_heads, q_len), {rows(kv_heads, past), rows(kv_heads, past)},
                     {rows(kv_heads, chunk), rows(kv_heads, chunk)}, out(q_len), options, idle());
  };
  refused([&] { attention(1, too_many, 0, {}); }, {"past's len", too_many, most});
  refused([&] { attention(1, too_many, 1, {}); }, {"past's len", too_many, most});
  refused([&] { attention(1, too_many, 1, {.mask = bytes(1, too_many + 1)}); },
          {"past's len", too_many, most});
  refused([&] { attention(5, most - 2, 5, {}); }, {"past and chunk", most + 3, most});
  const Rows huge = rows(q_heads, too_many);
  refused(
      [&] {
        quoka::attention(huge, {rows(kv_heads, 3), rows(kv_heads, 3)}, {},
                         TensorView<float>(out_, {1, q_heads, too_many, dim}, {0, 0, 0, 1}), {},
                         idle());
      },
      {"q_len", too_many, most});
}

TEST_F(MaxKeys, OfOneSequenceOfABatch) {
  const auto sequence = [&](Index past, float* to) {
    return quoka::AttentionSequence{.q = rows(q_heads, 1),
                                    .past = {rows(kv_heads, past), rows(kv_heads, past)},
                                    .out = TensorView<float>(to, {1, q_heads, 1, dim})};
  };
  const std::vector batch{sequence(3, out_), sequence(too_many, out_ + 100)};
  refused([&] { quoka::attention(batch, {}, idle()); },
          {"sequence", 1, "past's len", too_many, most});
}

// Distances alone count: far away from 0 results have the bits that they have there.
TEST(MaxPosition, HasTheBitsOfSmallPositions) {
  Random random(1);
  const auto in =
      random_inputs<float>(random, {.q_heads = 4, .kv_heads = 2, .q_len = 9, .kv_len = 120});
  const auto token =
      random_inputs<float>(random, {.q_heads = 4, .kv_heads = 2, .q_len = 1, .kv_len = 120});
  const std::vector<float> slopes{0.5f, 0.25f, 0.125f, 0.0625f};
  const auto at = [](const Inputs<float>& x, Index first, AttentionOptions options) {
    quoka::Past past(x.past_k, x.past_v);
    past.first_position = first;
    auto output = unwritten<float>(x.q, 16);
    quoka::attention(x.q, past, {x.k, x.v}, {output.out, output.lse}, options);
    return output;
  };
  constexpr Index furthest = quoka::max_position;
  for (const Inputs<float>* x : {&in, &token}) {
    const Index q_len = x->q.dimension(2);
    for (const Index window : {Index{0}, Index{1}, Index{50}, std::numeric_limits<Index>::max() - 1,
                               std::numeric_limits<Index>::max()}) {
      SCOPED_TRACE(window);
      const AttentionOptions options{.sliding_window = window, .alibi_slopes = slopes};
      expect_same(at(*x, furthest - q_len - 120, options), at(*x, 0, options));
      AttentionOptions apart{.sliding_window = window, .q_offset = furthest - q_len};
      const auto expected = at(*x, furthest - q_len - 150, apart);
      apart.q_offset = 150;
      expect_same(expected, at(*x, 0, apart));
    }
    // At this distance before the queries the window sees no key of the past.
    expect_same(at(*x, 0, {.sliding_window = furthest / 2, .q_offset = furthest - q_len}),
                at(*x, 0, {.sliding_window = 200, .q_offset = 1000}));
  }
}

TEST_F(MaxKeys, AndPositionsBeyondTheLargest) {
  constexpr Index largest = std::numeric_limits<Index>::max(), furthest = quoka::max_position;
  const auto attention = [&](Index first, std::optional<Index> position, Index window) {
    quoka::Past past(rows(kv_heads, 10), rows(kv_heads, 10));
    past.first_position = first;
    quoka::attention(rows(q_heads, 3), past, {rows(kv_heads, 3), rows(kv_heads, 3)}, out(3),
                     {.sliding_window = window, .q_offset = position}, idle());
  };
  for (const Index window : {0, 5}) {
    for (const Index position : {largest, largest - 3, furthest - 2})
      refused([&] { attention(0, position, window); },
              {"q_offset", position, "max_position", furthest - 3});
    for (const Index first : {largest, largest - 10, furthest - 9})
      refused([&] { attention(first, {}, window); },
              {"first_position", first, "max_position", furthest - 10});
    refused([&] { attention(furthest - 10, {}, window); }, {"q_offset", furthest, furthest - 3});
  }
}

// ---- selection ----------------------------------------------------------------------------------

TEST_F(MaxKeys, OfEverySelector) {
  quoka::for_each_selector([&]<class S>(const char* name) {
    SCOPED_TRACE(name);
    const S selector{typename S::Options{}};
    typename S::State state;
    Selection keep;
    refused(
        [&] {
          selector.select({.q = rows(q_heads, 5),
                           .k = rows(kv_heads, too_many),
                           .logits = quoka::LogitOptions{}},
                          state, keep, idle());
        },
        {"kv_len", too_many, most});
    refused(
        [&] {
          selector.select({.q = rows(q_heads, too_many),
                           .k = rows(kv_heads, 5000),
                           .logits = quoka::LogitOptions{}},
                          state, keep, idle());
        },
        {"q_len", too_many, most});
    try {
      selector.appended(
          {.q = rows(q_heads, 5), .k = rows(kv_heads, too_many), .logits = quoka::LogitOptions{}},
          state, idle());
    } catch (const std::invalid_argument&) {
    }
    EXPECT_FALSE(asked_);
  });
}

TEST_F(MaxKeys, OfTheStages) {
  const TensorView<const float> keys(row_, {1, kv_heads, too_many, dim}, {0, 0, 0, 1});
  refused([&] { (void)quoka::subselect_query_positions(keys, 3, idle()); },
          {"q_len", too_many, most});
  const quoka::Tensor<float> q_bar(1, kv_heads, 3, dim);
  refused([&] { (void)quoka::score_keys(q_bar, keys, {}, {}, idle()); },
          {"kv_len", too_many, most});
}

TEST_F(MaxKeys, OfASelection) {
  refused([&] { (void)Selection::all(1, 2, too_many); }, {"kv_len", too_many, most});
  refused([&] { (void)Selection::all(1, 2, -1); }, {"kv_len", -1, 0});
  EXPECT_EQ(Selection::all(1, 2, most).kv_len(), most);
}

TEST_F(MaxKeys, OfVisibleCells) {
  const Mask mask = bytes(1, too_many + 1);
  refused([&] { (void)quoka::VisibleCells(mask, too_many, 0, idle()); },
          {"past_len", too_many, most});
}

// ---- caches, pages, layers ------------------------------------------------------------------------

TEST_F(MaxKeys, OfASketch) {
  quoka::KeySketch sketch;
  refused([&] { sketch.append(rows(kv_heads, too_many), 0, idle()); }, {"kv_len", too_many, most});
  const Position last[] = {most};
  refused([&] { sketch.update(rows(kv_heads, too_many), last, idle()); }, {too_many, most});
  refused([&] { sketch.update(rows(kv_heads, too_many), 3, 1, idle()); }, {too_many, most});
  const Rows pages = TensorView<const float>(row_, {1 << 16, kv_heads, 1 << 16, dim}, {0, 0, 0, 1});
  refused([&] { sketch.update(pages, {}, idle()); }, {Index{1} << 32, most});
  // Rows beyond the pool are refused before a list of them is made.
  refused([&] { sketch.update(rows(kv_heads, 40), 30, 11, idle()); }, {"number of rows", 11, 10});
  refused([&] { sketch.update(rows(kv_heads, 40), -1, 2, idle()); }, {"first row", -1, 0});
  refused([&] { sketch.update(rows(kv_heads, 40), 41, 0, idle()); }, {"first row", 41, 40});
  EXPECT_EQ(sketch.len(), 0);
}

TEST_F(MaxKeys, OfACache) {
  quoka::KvCache cache(1, kv_heads, dim, dim);
  cache.append(rows(kv_heads, 3), rows(kv_heads, 3));
  const Rows too_long = rows(kv_heads, most - 2);
  refused([&] { cache.append(too_long, too_long, idle()); }, {"k's len", most - 2, most - 3});
  refused([&] { cache.reserve(too_many); }, {"capacity", too_many, most});
  EXPECT_EQ(cache.len(), 3);
}

TEST_F(MaxKeys, OfALayer) {
  quoka::ChunkedPrefill<QuokaSelector> layer(
      {.q_heads = q_heads, .kv_heads = kv_heads, .head_dim = dim},
      {.budget = quoka::Budget::keys(2)});
  layer.append(rows(kv_heads, 3), rows(kv_heads, 3));
  const Rows q = rows(q_heads, most), k = rows(kv_heads, most);
  const OutputRows to = TensorView<float>(out_, {1, q_heads, most, dim}, {0, 0, 0, 1});
  refused([&] { layer.append(k, k, idle()); }, {"k's len", most, most - 3});
  refused([&] { layer.append(q, k, k, idle()); }, {"k's len", most, most - 3});
  refused([&] { layer.forward(q, k, k, to, idle()); }, {"k's len", most, most - 3});
  refused([&] { layer.prefill(q, k, k, to, 5, idle()); }, {"k's len", most, most - 3});
  refused([&] { layer.select(rows(q_heads, too_many), idle()); }, {"q_len", too_many, most});
  refused([&] { layer.reserve(too_many); }, {"capacity", too_many, most});
  EXPECT_EQ(layer.kv_len(), 3);
}

TEST_F(MaxKeys, OfPages) {
  const Rows pool = TensorView<const float>(row_, {1, kv_heads, too_many, dim}, {0, 0, 0, 1});
  const Position table[] = {0};
  refused([&] { (void)quoka::paged(pool, table, too_many); }, {too_many, most});
}

TEST_F(MaxKeys, OfAnEnginesCells) {
  Eigen::half none{};
  const Rows mask = TensorView<const Eigen::half>(&none, {1, 1, 1, too_many}, {0, 0, 0, 1});
  refused([&] { (void)quoka::read_mask_segments(mask, idle()); }, {"cells", too_many, most});
  quoka::MaskedAttention layer;
  const std::vector<quoka::MaskedStream> streams{{.q = rows(q_heads, 1),
                                                  .k = rows(kv_heads, too_many),
                                                  .v = rows(kv_heads, too_many),
                                                  .mask = mask,
                                                  .out = out(1)}};
  refused([&] { layer.run(streams, {}, {}, idle()); }, {"stream", 0, too_many, most});
}

}  // namespace
