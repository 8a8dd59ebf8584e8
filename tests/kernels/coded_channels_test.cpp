// CodedChannels of select/code_mass.hpp: which channels of the codes voters are multiplied with, for keys and rows whose
// right choice is clear; that the products are those of the same rows and keys without the other channels; and MassSelector
// by such codes.

#include <quoka/select/code_mass.hpp>
#include <quoka/select/mass_selector.hpp>

#include "support/selector_fixtures.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace {

using namespace quoka_test;
using quoka::KeySketch;
using quoka::MassOptions;
using quoka::MassSelector;
using quoka::SelectorInput;
using quoka::Sketch;
namespace detail = quoka::detail;
namespace simd = quoka::simd;

constexpr float nan = std::numeric_limits<float>::quiet_NaN();

// A head's keys [len, dim], sketched, and rows in units of log2.
struct Channels {
  Index dim, len, rows;
  Tensor4<float> k;
  std::vector<float> q;

  Channels(Index dim_, Index len_, Index rows_, Random& random)
      : dim(dim_), len(len_), rows(rows_), k(random.tensor<float>(1, 1, len_, dim_)) {
    const auto drawn = random.tensor<float>(1, 1, rows_, dim_);
    q.assign(drawn.data(), drawn.data() + rows * dim);
  }
  float& key(Index t, Index c) { return k.data()[t * dim + c]; }
  float& row(Index m, Index c) { return q[uz(m * dim + c)]; }
  void scale_channel_of_rows(Index c, float by) {
    for (Index m = 0; m < rows; ++m) row(m, c) *= by;
  }
};

// The choice, and the memory that it refers to.
struct Choice {
  KeySketch sketch;
  quoka::Rows k;
  std::vector<std::uint8_t> memory;
  quoka::Buffer<std::uint8_t> gathered;
  std::vector<float> sums;
  std::unique_ptr<detail::CodedChannels> channels;

  explicit Choice(const Channels& x) : k(x.k) {
    sketch.append(x.k, x.len, SerialExecutor{});
    gathered.reserve(2 * simd::code_block_bytes(x.dim));
    sums.resize(uz(detail::block_sums_size(x.dim)));
    arenas.reserve(1, [&](quoka::Arena& arena) { detail::CodedChannels(arena, x.dim); });
    quoka::Arena arena = arenas[0];
    channels = std::make_unique<detail::CodedChannels>(arena, x.dim);
    channels->sample(blocks(), sketch.scales(0, 0), sketch.lengths(0, 0), x.len, gathered.data(),
                     sums.data());
    channels->choose(x.q.data(), x.rows, sums.data());
  }
  detail::CodeBlocks blocks() const { return {quoka::SketchedKeys(k, sketch), 0, 0}; }
  quoka::Arenas arenas;
};

Index half_of(Index steps) { return quoka::ceil_div(steps, Index{2}); }

TEST(CodedChannels, ThoseStayInWhichLogitsDiffer) {
  for_each_draw(20, [](Random& random) {
    const Index dim = random.one_of(40, 64, 80, 96, 128, 256);
    SCOPED_TRACE("head_dim " + std::to_string(dim));
    Channels x(dim, 700, 64, random);
    const Index steps = simd::code_steps(dim);
    // Every second step is large in the rows, the others are small; keys are of one size.
    for (Index c = 0; c < dim; ++c) x.scale_channel_of_rows(c, c / 4 % 2 == 1 ? 1.0f : 1e-3f);
    const Choice choice(x);
    EXPECT_FALSE(choice.channels->are_all());
    EXPECT_GE(choice.channels->steps(), half_of(steps));
    EXPECT_LE(choice.channels->steps(), half_of(steps) + 1);
    for (Index step = 1; step < steps; step += 2) EXPECT_TRUE(choice.channels->stays(step)) << step;
  });
}

TEST(CodedChannels, AreMoreWhereMoreThanHalfAreWanted) {
  Random random(4411);
  Channels x(128, 700, 64, random);
  for (float& c : x.q) c *= 4.0f;  // 16 * 128 squares of logits
  EXPECT_TRUE(Choice(x).channels->are_all());
  // Half as large in a quarter of the channels: they are a nat.
  for (Index c = 0; c < 32; ++c) x.scale_channel_of_rows(c, 0.03f);
  const Choice choice(x);
  EXPECT_EQ(choice.channels->steps(), 24);
  for (Index step = 0; step < 8; ++step) EXPECT_FALSE(choice.channels->stays(step)) << step;
}

// The variance of all keys would not see it: a sink is one key.
TEST(CodedChannels, OfASinkStay) {
  Random random(4412);
  Channels x(64, 3000, 64, random);
  for (Index c = 0; c < 64; ++c) x.scale_channel_of_rows(c, c < 32 ? 0.02f : 0.05f);
  EXPECT_FALSE(Choice(x).channels->stays(1));
  x.key(0, 5) = 60.0f;
  EXPECT_TRUE(Choice(x).channels->stays(1));
}

// Keys that codes cannot stand for do not count; of equal keys, zeros among them, the means decide alone.
TEST(CodedChannels, OfDegenerateKeys) {
  for_each_draw(10, [](Random& random) {
    const Index dim = random.one_of(40, 64, 128);
    Channels x(dim, 100, 40, random);
    for (float& c : x.q) c *= 0.02f;
    Channels with_nan = x;
    for (Index t = 16; t < 48; ++t) with_nan.key(t, 3) = nan, with_nan.key(t, 7) = simd::infinity;
    EXPECT_LT(Choice(with_nan).channels->steps(), simd::code_steps(dim));
    for (const float size : {1.0f, 0.0f}) {
      for (Index t = 0; t < x.len; ++t)
        for (Index c = 0; c < dim; ++c) x.key(t, c) = size * static_cast<float>(c % 5);
      const Choice choice(x);
      EXPECT_FALSE(choice.channels->are_all());
      std::vector<float> rows = x.q, dropped(uz(x.rows));
      choice.channels->compact(rows.data(), x.rows, dropped.data());
      for (Index m = 0; m < x.rows; ++m) {
        float logit = 0.0f, kept = dropped[uz(m)];
        for (Index c = 0; c < dim; ++c) {
          logit += x.row(m, c) * x.key(0, c);
          if (choice.channels->stays(c / 4)) kept += x.row(m, c) * x.key(0, c);
        }
        EXPECT_NEAR(kept, logit, 0.01f);
      }
    }
    std::fill_n(x.k.data(), x.len * dim, nan);
    const Choice choice(x);
    std::vector<float> rows = x.q, dropped(uz(x.rows));
    choice.channels->compact(rows.data(), x.rows, dropped.data());
    for (const float none : dropped) EXPECT_EQ(none, 0.0f);
  });
}

// Rows and blocks of keys without the dropped channels, and what those add on average.
TEST(CodedChannels, AreTakenFromRowsAndBlocks) {
  for_each_draw(20, [](Random& random) {
    const Index dim = random.one_of(37, 40, 64, 96, 128, 256);
    SCOPED_TRACE("head_dim " + std::to_string(dim));
    Channels x(dim, 32, 33, random);
    for (Index c = 0; c < dim; ++c) x.scale_channel_of_rows(c, c / 4 % 3 == 0 ? 0.01f : 1.0f);
    for (Index t = 0; t < x.len; ++t)
      for (Index c = 0; c < dim; ++c) x.key(t, c) += static_cast<float>(c % 3);
    Choice choice(x);
    const detail::CodedChannels& channels = *choice.channels;
    ASSERT_FALSE(channels.are_all());
    std::vector<Index> kept;
    for (Index c = 0; c < dim; ++c)
      if (channels.stays(c / 4)) kept.push_back(c);
    ASSERT_EQ(channels.dim(), std::ssize(kept));
    std::vector<float> rows = x.q, dropped(uz(x.rows));
    channels.compact(rows.data(), x.rows, dropped.data());
    quoka::Buffer<std::uint8_t> room;
    room.reserve(2 * simd::code_block_bytes(dim));
    const detail::KeyPair all = choice.blocks().at(0, 32, choice.gathered.data());
    detail::KeyPair some = all;
    channels.compact(some, room.data());
    for (Index t = 0; t < 32; ++t)
      for (Index i = 0; i < channels.dim(); ++i)
        ASSERT_EQ(some.codes[t / 16][simd::key_code_at(t % 16, i)],
                  all.codes[t / 16][simd::key_code_at(t % 16, kept[uz(i)])]);
    for (Index m = 0; m < x.rows; ++m) {
      double mean = 0.0;
      for (Index t = 0; t < 32; ++t)
        for (Index c = 0; c < dim; ++c)
          if (!channels.stays(c / 4))
            mean += static_cast<double>(x.row(m, c)) * static_cast<double>(x.key(t, c)) / 32.0;
      EXPECT_NEAR(static_cast<double>(dropped[uz(m)]), mean, 0.02 + 0.02 * std::abs(mean)) << m;
      for (Index i = 0; i < channels.dim(); ++i)
        ASSERT_EQ(rows[uz(m * channels.dim() + i)], x.row(m, kept[uz(i)]));
    }
  });
}

// By few channels voters select the same keys as by all of them, except some of nearly equal shares. The dropped
// channels add some nats to all logits of the past, but not to those of the chunk's keys.
TEST(CodedChannels, SelectWhatAllChannelsSelect) {
  Random random(4415);
  for (const Index dim : {40, 64, 80, 96, 128, 256}) {
    SCOPED_TRACE("head_dim " + std::to_string(dim));
    Tensor4<float> q = random.tensor<float>(1, 4, 64, dim, 2.0),
                   k = random.tensor<float>(1, 2, 1500, dim),
                   chunk = random.tensor<float>(1, 2, 64, dim);
    const auto is_quiet = [&](Index i) { return i % dim / 4 % 2 == 0; };
    for (Index i = 0; i < q.size(); ++i)
      if (is_quiet(i)) q.data()[i] = 0.04f;
    for (Index i = 0; i < k.size(); ++i)
      if (is_quiet(i)) k.data()[i] += 5.0f;
    const SelectorInput input{
        .q = q, .k = k, .logits = LogitOptions{}, .capacity = 1500, .chunk_k = chunk};
    Selection by_half, by_all;
    for (Selection* const selection : {&by_half, &by_all}) {
      MassOptions options = MassOptions::recommended(quoka::Budget::keys(150));
      options.sketch = Sketch::on, options.all_channels = selection == &by_all;
      const MassSelector selector(options);
      MassSelector::State state;
      selector.appended(input, state, SerialExecutor{});
      selector.select(input, state, *selection, SerialExecutor{});
    }
    Index same = 0;
    for (Index head = 0; head < 4; ++head) {
      const auto a = by_half.row(0, head), b = by_all.row(0, head);
      for (const Position t : a) same += std::binary_search(b.begin(), b.end(), t) ? 1 : 0;
      EXPECT_NEAR(by_half.kept_shares()[uz(head)], by_all.kept_shares()[uz(head)], 0.01f);
    }
    EXPECT_EQ(by_half.sum_of_counts(), by_all.sum_of_counts());
    EXPECT_GE(same, by_all.sum_of_counts() * 9 / 10);
    EXPECT_LT(same, by_all.sum_of_counts()) << "the same codes";
  }
}

}  // namespace
