// Limits of sizes and positions (base/index.hpp): sizes beyond them are refused with both numbers before a key is read,
// at every door. Rows with a stride of 0 make a past of any length. That results are right at the largest positions is in
// attention_suite_test.cpp.

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
  // The same row this many times; an output of that many; a mask.
  Rows rows(Index heads, Index len) const {
    return TensorView<const float>(row_, {1, heads, len, dim}, {0, 0, 0, 1});
  }
  Rows queries(Index len) const { return rows(q_heads, len); }
  Rows keys(Index len) const { return rows(kv_heads, len); }
  OutputRows out(Index len) {
    const Index row = len < 9 ? dim : 0;  // others are not looked at
    return TensorView<float>(out_, {1, q_heads, len, dim}, {0, 8 * row, row, 1});
  }
  Mask bytes(Index q_len, Index count) const { return Mask::bytes(row_, {1, 1, q_len, count}, {}); }
  quoka::AttentionSequence sequence(Index q_len, Index past, Index chunk = 0) {
    return {queries(q_len), {keys(past), keys(past)}, {keys(chunk), keys(chunk)}, out(q_len)};
  }
  void attend(const quoka::AttentionSequence& x, const AttentionOptions& options = {}) {
    quoka::attention(x.q, x.past, x.chunk, x.out, options, idle_);
  }
  // By a sentence with all of these, and nothing was run.
  template <class F>
  void refused(F&& f, std::initializer_list<Fragment> fragments) {
    expect_refused(f, fragments);
    EXPECT_FALSE(std::exchange(asked_, false));
  }

  float row_[64] = {1, 2, 3, 4, 5, 6, 7, 8}, out_[1024] = {};
  bool asked_ = false;
  Idle idle_{asked_};
};

TEST_F(MaxKeys, OfAttention) {
  refused([&] { attend(sequence(1, too_many)); }, {"past's len", too_many, most});
  refused([&] { attend(sequence(1, too_many, 1)); }, {"past's len", too_many, most});
  refused([&] { attend(sequence(1, too_many, 1), {.mask = bytes(1, too_many + 1)}); },
          {"past's len", too_many, most});
  refused([&] { attend(sequence(5, most - 2, 5)); }, {"past and chunk", most + 3, most});
  refused([&] { attend(sequence(too_many, 3)); }, {"q_len", too_many, most});
  const std::vector batch{sequence(1, 3), sequence(1, too_many)};
  refused([&] { quoka::attention(batch, {}, idle_); },
          {"sequence", 1, "past's len", too_many, most});
}

TEST_F(MaxKeys, AndPositionsBeyondTheLargest) {
  constexpr Index largest = std::numeric_limits<Index>::max(), furthest = quoka::max_position;
  const auto at = [&](Index first, std::optional<Index> position, Index window) {
    quoka::AttentionSequence x = sequence(3, 10, 3);
    x.past.first_position = first;
    attend(x, {.sliding_window = window, .q_offset = position});
  };
  for (const Index window : {0, 5}) {
    for (const Index position : {largest, largest - 3, furthest - 2})
      refused([&] { at(0, position, window); },
              {"q_offset", position, "max_position", furthest - 3});
    for (const Index first : {largest, largest - 10, furthest - 9})
      refused([&] { at(first, {}, window); },
              {"first_position", first, "max_position", furthest - 10});
    refused([&] { at(furthest - 10, {}, window); }, {"q_offset", furthest, furthest - 3});
  }
}

TEST_F(MaxKeys, OfEverySelectorAndTheStages) {
  quoka::for_each_selector([&]<class S>(const char* name) {
    SCOPED_TRACE(name);
    const S selector{typename S::Options{}};
    typename S::State state;
    Selection keep;
    const auto input = [&](Index q_len, Index kv_len) -> quoka::SelectorInput {
      return {.q = queries(q_len), .k = keys(kv_len), .logits = quoka::LogitOptions{}};
    };
    refused([&] { selector.select(input(5, too_many), state, keep, idle_); },
            {"kv_len", too_many, most});
    refused([&] { selector.select(input(too_many, 5000), state, keep, idle_); },
            {"q_len", too_many, most});
    try {
      selector.appended(input(5, too_many), state, idle_);
    } catch (const std::invalid_argument&) {
    }
    EXPECT_FALSE(asked_);
  });
  const TensorView<const float> many(row_, {1, kv_heads, too_many, dim}, {0, 0, 0, 1});
  const quoka::Tensor<float> q_bar(1, kv_heads, 3, dim);
  refused([&] { (void)quoka::subselect_query_positions(many, 3, idle_); },
          {"q_len", too_many, most});
  refused([&] { (void)quoka::score_keys(q_bar, many, {}, {}, idle_); }, {"kv_len", too_many, most});
}

TEST_F(MaxKeys, OfWhatHoldsRowsOrNumbersOfThem) {
  refused([&] { (void)Selection::all(1, 2, too_many); }, {"kv_len", too_many, most});
  refused([&] { (void)Selection::all(1, 2, -1); }, {"kv_len", -1, 0});
  EXPECT_EQ(Selection::all(1, 2, most).kv_len(), most);
  const Mask mask = bytes(1, too_many + 1);
  refused([&] { (void)quoka::VisibleCells(mask, too_many, 0, idle_); },
          {"past_len", too_many, most});
  const Rows pool = TensorView<const float>(row_, {1, kv_heads, too_many, dim}, {0, 0, 0, 1});
  const Position table[] = {0};
  refused([&] { (void)quoka::paged(pool, table, too_many); }, {too_many, most});

  quoka::KeySketch sketch;
  const Position last[] = {most};
  const Rows pages = TensorView<const float>(row_, {1 << 16, kv_heads, 1 << 16, dim}, {0, 0, 0, 1});
  refused([&] { sketch.append(keys(too_many), 0, idle_); }, {"kv_len", too_many, most});
  refused([&] { sketch.update(keys(too_many), last, idle_); }, {too_many, most});
  refused([&] { sketch.update(keys(too_many), 3, 1, idle_); }, {too_many, most});
  refused([&] { sketch.update(pages, {}, idle_); }, {Index{1} << 32, most});
  // Rows beyond the pool are refused before a list of them is made.
  refused([&] { sketch.update(keys(40), 30, 11, idle_); }, {"number of rows", 11, 10});
  refused([&] { sketch.update(keys(40), -1, 2, idle_); }, {"first row", -1, 0});
  refused([&] { sketch.update(keys(40), 41, 0, idle_); }, {"first row", 41, 40});
  EXPECT_EQ(sketch.len(), 0);

  quoka::KvCache cache(1, kv_heads, dim, dim);
  cache.append(keys(3), keys(3));
  refused([&] { cache.append(keys(most - 2), keys(most - 2), idle_); },
          {"k's len", most - 2, most - 3});
  refused([&] { cache.reserve(too_many); }, {"capacity", too_many, most});
  EXPECT_EQ(cache.len(), 3);
}

TEST_F(MaxKeys, OfALayerAndAnEnginesCells) {
  quoka::ChunkedPrefill<quoka::QuokaSelector> layer(
      {.q_heads = q_heads, .kv_heads = kv_heads, .head_dim = dim}, {.budget = Budget::keys(2)});
  layer.append(keys(3), keys(3));
  const Rows q = queries(most), k = keys(most);
  refused([&] { layer.append(k, k, idle_); }, {"k's len", most, most - 3});
  refused([&] { layer.append(q, k, k, idle_); }, {"k's len", most, most - 3});
  refused([&] { layer.forward(q, k, k, out(most), idle_); }, {"k's len", most, most - 3});
  refused([&] { layer.prefill(q, k, k, out(most), 5, idle_); }, {"k's len", most, most - 3});
  refused([&] { layer.select(queries(too_many), idle_); }, {"q_len", too_many, most});
  refused([&] { layer.reserve(too_many); }, {"capacity", too_many, most});
  EXPECT_EQ(layer.kv_len(), 3);

  Eigen::half none{};
  const Rows mask = TensorView<const Eigen::half>(&none, {1, 1, 1, too_many}, {0, 0, 0, 1});
  refused([&] { (void)quoka::read_mask_segments(mask, idle_); }, {"cells", too_many, most});
  const std::vector<quoka::MaskedStream> streams{
      {.q = queries(1), .k = keys(too_many), .v = keys(too_many), .mask = mask, .out = out(1)}};
  refused([&] { quoka::MaskedAttention().run(streams, {}, {}, idle_); },
          {"stream", 0, too_many, most});
}

}  // namespace
