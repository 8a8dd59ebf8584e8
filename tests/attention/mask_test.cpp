// views/mask.hpp: masks of all kinds, causality left to them, ALiBi: against the oracle, and what
// must hold to the last bit: what a query may not see has no influence on it.

#include <quoka/attention/attention.hpp>
#include <quoka/runtime/thread_pool.hpp>

#include "support/attention_fixtures.hpp"

#include <gtest/gtest.h>

#include <optional>

namespace {

using namespace quoka_test;
using quoka::Mask;
using quoka::Past;
namespace tuning = quoka::tuning;

// What is added to the logits: [batch or 1, q_heads or 1, q_len, keys].
using Added = Tensor4<float>;

// Biases of k / 8, of which half and bfloat16 are exact, in some places, -infinity in others.
Added random_mask(Random& random, Index batch, Index heads, Index q_len, Index keys,
                  double hidden = 0.3, double biased = 0.3) {
  Added x(batch, heads, q_len, keys);
  for (Index i = 0; i < x.size(); ++i) {
    const double kind = random.uniform();
    x.data()[i] = kind < hidden            ? -infinity
                  : kind < hidden + biased ? static_cast<float>(random.below(33) - 16) / 8
                                           : 0.0f;
  }
  return x;
}

// The mask as the caller has it, `padding` elements of something else between its rows.
class Stored {
 public:
  enum class Kind { single, half, bfloat16, bytes, bits };

  Stored(const Added& x, Kind kind, Index padding = 3) : kind_(kind) {
    for (std::size_t axis = 0; axis < 4; ++axis) sizes_[axis] = x.dimension(axis);
    const Index keys = sizes_[3], width = kind == Kind::single                           ? 4
                                          : kind == Kind::half || kind == Kind::bfloat16 ? 2
                                                                                         : 1;
    const Index row = kind == Kind::bits ? (keys + 7) / 8 + padding : (keys + padding) * width;
    strides_ = {sizes_[1] * sizes_[2] * row, sizes_[2] * row, row};
    memory_.assign(uz(sizes_[0] * strides_[0]), 0xff);
    for (Index b = 0; b < sizes_[0]; ++b)
      for (Index head = 0; head < sizes_[1]; ++head)
        for (Index i = 0; i < sizes_[2]; ++i) {
          std::uint8_t* const to =
              memory_.data() + b * strides_[0] + head * strides_[1] + i * strides_[2];
          for (Index key = 0; key < keys; ++key) put(x(b, head, i, key), key, to);
        }
  }

  Mask mask() const {
    const auto* const data = reinterpret_cast<const std::byte*>(memory_.data());
    switch (kind_) {
      case Kind::single:
        return Rows(data, quoka::format_of<float>(), sizes_, strides_);
      case Kind::half:
        return Rows(data, quoka::format_of<Eigen::half>(), sizes_, strides_);
      case Kind::bfloat16:
        return Rows(data, quoka::format_of<Eigen::bfloat16>(), sizes_, strides_);
      case Kind::bytes:
        return Mask::bytes(data, sizes_, strides_);
      case Kind::bits:
        return Mask::bits(data, sizes_, strides_);
    }
    return {};
  }

 private:
  void put(float x, Index key, std::uint8_t* row) const {
    const auto as = [&](auto element) {
      std::memcpy(row + key * static_cast<Index>(sizeof element), &element, sizeof element);
    };
    switch (kind_) {
      case Kind::single:
        return as(x);
      case Kind::half:
        return as(static_cast<Eigen::half>(x));
      case Kind::bfloat16:
        return as(static_cast<Eigen::bfloat16>(x));
      case Kind::bytes:
        return as(static_cast<std::uint8_t>(x == 0.0f ? 1 + key % 255 : 0));
      case Kind::bits:
        if (x != 0.0f) row[key / 8] = static_cast<std::uint8_t>(row[key / 8] & ~(1 << (key % 8)));
    }
  }

  Kind kind_;
  std::array<Index, 4> sizes_;
  std::array<Index, 3> strides_;
  std::vector<std::uint8_t> memory_;
};
constexpr Stored::Kind all_kinds[] = {Stored::Kind::single, Stored::Kind::half,
                                      Stored::Kind::bfloat16, Stored::Kind::bytes,
                                      Stored::Kind::bits};

template <class T>
oracle::AttentionResult oracle_masked(const Inputs<T>& in, const Added& added,
                                      const AttentionOptions& options = {},
                                      const Selection* keep = nullptr) {
  oracle::AttentionOptions exact = to_oracle(options);
  exact.mask = [&added](Index b, Index head, Index i, Index key) {
    return static_cast<double>(added(b % added.dimension(0), head % added.dimension(1), i, key));
  };
  return oracle_result(in, exact, keep);
}

template <class T>
Output<T> attend_masked(const Inputs<T>& in, const Added& added, AttentionOptions options = {},
                        const Selection* keep = nullptr, ExecutorRef executor = SerialExecutor{}) {
  options.mask = added;
  return attend(in, options, keep, executor);
}

template <class T>
void expect_masked_as_oracle(const Inputs<T>& in, const Added& added,
                             const AttentionOptions& options = {}, const Selection* keep = nullptr,
                             double factor = 2.0) {
  expect_close(attend_masked(in, added, options, keep), oracle_masked(in, added, options, keep), in,
               factor);
}

// ---- against the oracle -------------------------------------------------------------------------

TEST(Masked, EveryGroup) {
  Random random(1);
  for (const Index group : {1, 2, 3, 4, 5, 6, 7, 8})
    for (const Index q_len : {1, 5}) {
      SCOPED_TRACE("group " + std::to_string(group) + ", q_len " + std::to_string(q_len));
      const auto in = random_inputs<Element>(
          random, {.q_heads = 2 * group, .kv_heads = 2, .q_len = q_len, .kv_len = 127});
      const Index heads = group % 2 == 0 ? 2 * group : 1;
      expect_masked_as_oracle(in, random_mask(random, 1, heads, q_len, 127 + q_len));
    }
}

TEST(Masked, EveryLength) {
  Random random(2);
  for (const Index q_len : {1, 5, 40, 130})
    for (const Index kv_len : {0, 1, 150}) {
      SCOPED_TRACE("q_len " + std::to_string(q_len) + ", kv_len " + std::to_string(kv_len));
      const auto in = random_inputs<Element>(random, {.q_len = q_len, .kv_len = kv_len});
      for (const bool causal : {true, false})
        expect_masked_as_oracle(in, random_mask(random, 1, 2, q_len, kv_len + q_len),
                                {.causal = causal});
    }
}

TEST(Masked, HeadDims) {
  Random random(3);
  for (const Index dim : {64, 80}) {
    const auto in = random_inputs<Element>(
        random,
        {.q_heads = 4, .kv_heads = 2, .head_dim = dim, .v_dim = dim, .q_len = 40, .kv_len = 101});
    expect_masked_as_oracle(in, random_mask(random, 1, 1, 40, 141));
  }
}

// Batches and heads with a mask each, or the same.
TEST(Masked, Broadcast) {
  Random random(4);
  for (const Index q_len : {1, 5}) {
    const auto in = random_inputs<Element>(
        random, {.batch = 2, .q_heads = 6, .kv_heads = 2, .q_len = q_len, .kv_len = 127});
    const Selection keep = random_selection(random, 2, 2, 127, 60);
    for (const Index batch : {1, 2})
      for (const Index heads : {1, 6}) {
        SCOPED_TRACE("batch " + std::to_string(batch) + ", heads " + std::to_string(heads));
        Added added = random_mask(random, batch, heads, q_len, 127 + q_len);
        expect_masked_as_oracle(in, added);
        expect_masked_as_oracle(in, added, {}, &keep);
        // Cells that no query of a sequence sees: other ones in each.
        for (Index b = 0; b < batch; ++b)
          for (Index t = 10 + 30 * b; t < 50 + 30 * b; ++t)
            for (Index head = 0; head < heads; ++head)
              for (Index i = 0; i < q_len; ++i) added(b, head, i, t) = -infinity;
        expect_masked_as_oracle(in, added);
        expect_masked_as_oracle(in, added, {}, &keep);
      }
  }
}

// Few rows over many keys: parts that are merged.
TEST(Masked, CutOverTheKeys) {
  Random random(5);
  const Index kv_len = 2 * tuning::part_blocks * tuning::block_keys + 33;
  for (const Index q_len : {1, 3}) {
    const auto in =
        random_inputs<Element>(random, {.q_heads = 2, .q_len = q_len, .kv_len = kv_len});
    for (const Index heads : {1, 2})
      expect_masked_as_oracle(in, random_mask(random, 1, heads, q_len, kv_len + q_len));
    // Sparse: most of it hidden from all, and with it whole parts.
    expect_masked_as_oracle(in, random_mask(random, 1, 1, q_len, kv_len + q_len, 0.95, 0.0));
  }
}

TEST(Masked, EveryKindIsTheSame) {
  Random random(6);
  for (const Index q_len : {1, 37}) {
    const auto in = random_inputs<Element>(
        random, {.batch = 2, .q_heads = 4, .kv_heads = 2, .q_len = q_len, .kv_len = 127});
    const Selection keep = random_selection(random, 2, 2, 127, 60);
    const Added visible = random_mask(random, 2, 4, q_len, 127 + q_len, 0.3, 0.0),
                biases = random_mask(random, 2, 1, q_len, 127 + q_len);
    for (const Stored::Kind kind : all_kinds) {
      SCOPED_TRACE("kind " + std::to_string(static_cast<int>(kind)));
      const Stored of_visible(visible, kind);
      expect_same(attend(in, {.mask = of_visible.mask()}), attend_masked(in, visible));
      expect_same(attend(in, {.mask = of_visible.mask()}, &keep),
                  attend_masked(in, visible, {}, &keep));
      if (kind == Stored::Kind::bytes || kind == Stored::Kind::bits) continue;
      const Stored of_biases(biases, kind);
      expect_same(attend(in, {.mask = of_biases.mask()}), attend_masked(in, biases));
      expect_same(attend(in, {.mask = of_biases.mask()}, &keep),
                  attend_masked(in, biases, {}, &keep));
    }
  }
}

TEST(Masked, NaNInAMaskHides) {
  Random random(7);
  for (const Index q_len : {1, 37}) {
    const auto in = random_inputs<Element>(random, {.q_len = q_len, .kv_len = 127});
    Added added = random_mask(random, 1, 1, q_len, 127 + q_len), spoilt = added;
    for (Index i = 0; i < added.size(); ++i)
      if (added.data()[i] == -infinity) spoilt.data()[i] = not_a_number;
    expect_same(attend_masked(in, spoilt), attend_masked(in, added));
  }
}

TEST(Masked, SelectionWindowSinksScaleAndSoftCap) {
  for_each_storage([]<class T>() {
    Random random(8);
    const std::vector<float> sinks{0.5f, -1.0f, 3.0f, 0.0f};
    for (const Index q_len : {1, 40}) {
      const auto in =
          random_inputs<T>(random, {.q_heads = 4, .kv_heads = 2, .q_len = q_len, .kv_len = 150});
      const Selection keep = random_selection(random, 1, 2, 150, 70);
      for (const Index heads : {1, 4}) {
        const Added added = random_mask(random, 1, heads, q_len, 150 + q_len);
        expect_masked_as_oracle(in, added, {}, &keep);
        expect_masked_as_oracle(in, added, {.sliding_window = 70});
        expect_masked_as_oracle(in, added, {.sliding_window = 70, .causal = false}, &keep);
        expect_masked_as_oracle(in, added, {.scale = 0.7f, .sink_logits = sinks}, &keep);
        // The cap is below the biases: they are added after it.
        expect_masked_as_oracle(in, added, {.softcap = 1.0f});
      }
    }
  });
}

// What a mask leaves of each head's list has room for the longest, whichever it is.
TEST(Masked, ListsOfWhichTheFirstIsShortest) {
  Random random(27);
  for (const Index q_len : {1, 40}) {
    const auto in = random_inputs<float>(
        random, {.batch = 2, .q_heads = 6, .kv_heads = 3, .q_len = q_len, .kv_len = 150});
    std::vector<std::vector<Position>> lists(6);
    for (std::size_t head = 0; head < 6; ++head)
      for (Position i = 0; i < 150; ++i)
        if (head == 0 ? i == 7 : (i + static_cast<Position>(head)) % 4 != 0)
          lists[head].push_back(i);
    const Selection keep = Selection::from_lists(2, 3, 150, lists);
    expect_masked_as_oracle(in, random_mask(random, 2, 1, q_len, 150 + q_len), {}, &keep);
    expect_masked_as_oracle(in, random_mask(random, 1, 6, q_len, 150 + q_len), {}, &keep);
    Added hides(1, 1, q_len, 150 + q_len);  // cells from all queries: lists are made anew
    hides.setZero();
    for (Index cell = 0; cell < 150; cell += 3)
      for (Index i = 0; i < q_len; ++i) hides(0, 0, i, cell) = -infinity;
    expect_masked_as_oracle(in, hides, {}, &keep);
  }
}

// Finite biases alone: nothing is hidden. Columns 0 and 1 have them for one query, or for all.
TEST(Masked, FiniteBiases) {
  Random random(9);
  for (const Index q_len : {1, 40}) {
    const auto in = random_inputs<Element>(
        random, {.q_heads = 4, .kv_heads = 2, .q_len = q_len, .kv_len = 250});
    expect_masked_as_oracle(in, random_mask(random, 1, 4, q_len, 250 + q_len, 0.0, 0.9));
    expect_masked_as_oracle(in, random_mask(random, 1, 1, q_len, 250 + q_len, 0.0, 0.01));
    Added one(1, 1, q_len, 250 + q_len);
    one.setZero();
    expect_same(attend_masked(in, one), attend(in));
    one(0, 0, q_len - 1, 200) = 4.0f;
    expect_masked_as_oracle(in, one);
  }
}

TEST(Masked, FactorsMultiplyBiasesAndNothingElse) {
  Random random(10);
  const std::vector<float> factors{0.25f, -1.0f, 0.0f, 2.0f};
  for (const Index q_len : {1, 40}) {
    const auto in = random_inputs<Element>(
        random, {.q_heads = 4, .kv_heads = 2, .q_len = q_len, .kv_len = 150});
    for (const Index heads : {1, 4}) {
      const Added added = random_mask(random, 1, heads, q_len, 150 + q_len);
      expect_masked_as_oracle(in, added, {.mask_factors = factors}, nullptr, 4.0);
    }
    // Of a factor without a mask there is nothing to see.
    expect_same(attend(in, {.mask_factors = factors}), attend(in));
  }
}

// The lowest float is a bias in name only: models' masks have it in place of -infinity.
TEST(Masked, TheLowestFloatHides) {
  Random random(11);
  for (const Index q_len : {1, 37}) {
    const auto in = random_inputs<Element>(random, {.q_len = q_len, .kv_len = 127});
    Added added = random_mask(random, 1, 1, q_len, 127 + q_len), lowest = added;
    for (Index i = 0; i < added.size(); ++i)
      if (added.data()[i] == -infinity) lowest.data()[i] = std::numeric_limits<float>::lowest();
    expect_close(attend_masked(in, lowest), oracle_masked(in, added), in, 2.0);
    // And what else stands for it: a row that it hides everything from is nothing, not the mean of all.
    added.chip(0, 2).setConstant(-infinity);
    for (const float hides : {-60000.0f, -65504.0f, -1e9f}) {
      for (Index i = 0; i < added.size(); ++i)
        lowest.data()[i] = added.data()[i] == -infinity ? hides : added.data()[i];
      expect_close(attend_masked(in, lowest), oracle_masked(in, added), in, 2.0);
    }
  }
}

// ---- ALiBi --------------------------------------------------------------------------------------

TEST(Masked, Alibi) {
  Random random(12);
  const std::vector<float> slopes{0.5f, 0.125f, 0.03125f, 0.0f};
  for (const Index q_len : {1, 3, 40}) {
    const auto in = random_inputs<Element>(
        random, {.q_heads = 4, .kv_heads = 2, .q_len = q_len, .kv_len = 130});
    const Selection keep = random_selection(random, 1, 2, 130, 60);
    const Added added = random_mask(random, 1, 1, q_len, 130 + q_len);
    for (const Selection* kept : {static_cast<const Selection*>(nullptr), &keep})
      for (const AttentionOptions& options :
           {AttentionOptions{.alibi_slopes = slopes},
            AttentionOptions{.softcap = 2.0f, .sliding_window = 90, .alibi_slopes = slopes},
            AttentionOptions{.causal = false, .alibi_slopes = slopes},
            AttentionOptions{.query_position = 170, .alibi_slopes = slopes}}) {
        expect_close(attend(in, options, kept), oracle_attend(in, options, kept), in, 4.0);
        expect_masked_as_oracle(in, added, options, kept, 4.0);
      }
  }
}

// A shard's keys stand where it says.
TEST(Masked, AlibiOfAShard) {
  Random random(13);
  const std::vector<float> slopes{0.25f, 0.0625f};
  for (const Index q_len : {1, 7}) {
    const auto in = random_inputs<Element>(random, {.q_len = q_len, .kv_len = 60});
    AttentionOptions options{.sliding_window = 50, .query_position = 170, .alibi_slopes = slopes};
    auto output = unwritten<Element>(in.q, 16);
    Past past(in.past_k, in.past_v);
    past.first_position = 100;
    quoka::attention(in.q, past, {in.k, in.v}, {output.out, output.lse}, options);
    oracle::AttentionOptions exact = to_oracle(options);
    exact.first_position = 100;
    expect_close(output, oracle_result(in, exact), in, 4.0);
  }
}

TEST(Masked, ASlopeOfZeroIsNoAlibi) {
  Random random(14);
  const std::vector<float> slopes{0.0f, 0.0f};
  for (const Index q_len : {1, 37}) {
    const auto in = random_inputs<Element>(random, {.q_len = q_len, .kv_len = 127});
    expect_same(attend(in, {.alibi_slopes = slopes}), attend(in));
  }
}

// ---- who sees what ------------------------------------------------------------------------------

TEST(Masked, WithoutCausalityAllIsSeen) {
  Random random(15);
  for (const Index q_len : {5, 40, 130}) {
    const auto in = random_inputs<Element>(random, {.q_len = q_len, .kv_len = 60});
    const AttentionOptions all{.causal = false};
    expect_close(attend(in, all), oracle_attend(in, all), in);
    const AttentionOptions window{.sliding_window = 20, .causal = false};
    expect_close(attend(in, window), oracle_attend(in, window), in);
  }
}

// A prefix of the chunk that is seen both ways, then causal.
TEST(Masked, PrefixOfTheChunk) {
  Random random(16);
  const auto in =
      random_inputs<Element>(random, {.q_heads = 4, .kv_heads = 2, .q_len = 40, .kv_len = 60});
  Added added(1, 1, 40, 100), causal(1, 1, 40, 100);
  for (Index i = 0; i < 40; ++i)
    for (Index key = 0; key < 100; ++key) {
      causal(0, 0, i, key) = key - 60 <= i ? 0.0f : -infinity;
      added(0, 0, i, key) = key - 60 <= i || key - 60 < 17 ? 0.0f : -infinity;
    }
  expect_masked_as_oracle(in, added, {.causal = false});
  // Causality is a mask like others, and joins one.
  expect_same(attend_masked(in, causal, {.causal = false}), attend(in));
  expect_same(attend_masked(in, added), attend(in));
}

// Drafts: a token sees the past, itself and those that it follows in the tree.
TEST(Masked, ATreeOfDrafts) {
  Random random(17);
  constexpr Index parent[] = {-1, 0, 0, 1, 1, 2, 4, 4, 7};
  const auto in =
      random_inputs<Element>(random, {.q_heads = 4, .kv_heads = 2, .q_len = 9, .kv_len = 60});
  Added added(1, 1, 9, 69);
  added.setConstant(-infinity);
  for (Index i = 0; i < 9; ++i) {
    for (Index key = 0; key < 60; ++key) added(0, 0, i, key) = 0.0f;
    for (Index above = i; above >= 0; above = parent[above]) added(0, 0, i, 60 + above) = 0.0f;
  }
  const auto output = attend_masked(in, added, {.causal = false});
  expect_close(output, oracle_masked(in, added, {.causal = false}), in, 2.0);
  // A token is the last of its branch alone.
  for (Index i = 0; i < 9; ++i) {
    std::vector<Index> branch;
    for (Index above = i; above >= 0; above = parent[above]) branch.insert(branch.begin(), above);
    const Index n = std::ssize(branch);
    Inputs<Element> alone{Tensor4<Element>(1, 4, n, 16), in.past_k, in.past_v,
                          Tensor4<Element>(1, 2, n, 16), Tensor4<Element>(1, 2, n, 16)};
    for (Index at = 0; at < n; ++at)
      for (Index c = 0; c < 16; ++c) {
        for (Index head = 0; head < 4; ++head)
          alone.q(0, head, at, c) = in.q(0, head, branch[uz(at)], c);
        for (Index head = 0; head < 2; ++head) {
          alone.k(0, head, at, c) = in.k(0, head, branch[uz(at)], c);
          alone.v(0, head, at, c) = in.v(0, head, branch[uz(at)], c);
        }
      }
    const auto of_branch = attend(alone);
    for (Index head = 0; head < 4; ++head)
      EXPECT_NEAR(output.lse(0, head, i), of_branch.lse(0, head, n - 1), 1e-5f) << i;
  }
}

template <class T>
void spoil(Tensor4<T>& x, Index t, float with = not_a_number) {
  for (Index b = 0; b < x.dimension(0); ++b)
    for (Index head = 0; head < x.dimension(1); ++head)
      for (Index c = 0; c < x.dimension(3); ++c) x(b, head, t, c) = static_cast<T>(with);
}

// Holes of a cache: attention over what is left, to the last bit.
TEST(Masked, CellsThatNoQuerySeesAreNotThere) {
  Random random(18);
  for (const Index q_len : {1, 5, 40}) {
    auto in = random_inputs<Element>(random,
                                     {.q_heads = 4, .kv_heads = 2, .q_len = q_len, .kv_len = 250});
    std::vector<Index> left;
    Added added(1, 1, q_len, 250 + q_len);
    added.setZero();
    for (Index t = 0; t < 250; ++t) {
      if (random.uniform() < 0.6) {
        left.push_back(t);
        continue;
      }
      spoil(in.past_k, t), spoil(in.past_v, t, t % 2 == 0 ? infinity : not_a_number);
      for (Index i = 0; i < q_len; ++i) added(0, 0, i, t) = -infinity;
    }
    const Selection keep = to_selection({{left, left}}, 250);
    for (const AttentionOptions& options :
         {AttentionOptions{}, AttentionOptions{.sliding_window = 90},
          AttentionOptions{.arithmetic = quoka::Arithmetic::bfloat16}})
      expect_same(attend_masked(in, added, options), attend(in, options, &keep));
    // Among those that are selected.
    oracle::Positions some{{}}, kept{{}};
    for (Index head = 0; head < 2; ++head) {
      some[0].emplace_back(), kept[0].emplace_back();
      for (Index t = 0; t < 250; ++t) {
        if (random.uniform() < 0.5) continue;
        some[0].back().push_back(t);
        if (std::binary_search(left.begin(), left.end(), t)) kept[0].back().push_back(t);
      }
    }
    const Selection selected = to_selection(some, 250), seen = to_selection(kept, 250);
    expect_same(attend_masked(in, added, {}, &selected), attend(in, {}, &seen));
  }
}

// The chunk's own keys likewise: padding.
TEST(Masked, ChunkKeysThatNoQuerySeesHaveNoInfluence) {
  Random random(19);
  for (const Index q_len : {1, 5, 40}) {
    const auto in = random_inputs<Element>(
        random, {.q_heads = 4, .kv_heads = 2, .q_len = q_len, .kv_len = 150});
    Added added(1, 1, q_len, 150 + q_len);
    added.setZero();
    for (Index i = 0; i < q_len; ++i)
      for (Index j = q_len - 1; j > q_len / 2 || j == q_len - 1; --j)
        added(0, 0, i, 150 + j) = -infinity;
    const auto clean = attend_masked(in, added);
    expect_close(clean, oracle_masked(in, added), in);
    for (const float with : {not_a_number, infinity, -infinity}) {
      auto spoilt = in;
      spoil(spoilt.k, q_len - 1, with), spoil(spoilt.v, q_len - 1, with);
      expect_same(attend_masked(spoilt, added), clean);
    }
  }
}

// NaN reaches the rows that see it and no other, whether it lies in the past or in the chunk.
TEST(Masked, NaNSpoilsTheRowsThatSeeIt) {
  Random random(20);
  const auto in = random_inputs<Element>(
      random, {.batch = 2, .q_heads = 4, .kv_heads = 2, .q_len = 37, .kv_len = 150});
  const std::vector<float> slopes{0.5f, 0.125f, 0.25f, 0.0625f};
  for (const bool causal : {true, false})
    for (const Index heads : {1, 4})
      for (const quoka::Arithmetic by : {quoka::Arithmetic::automatic, quoka::Arithmetic::single}) {
        const Added added = random_mask(random, 2, heads, 37, 187, 0.5, 0.2);
        const AttentionOptions options{.arithmetic = by, .causal = causal, .alibi_slopes = slopes};
        const auto clean = attend_masked(in, added, options);
        for (const Index t : {0, 111, 112, 149, 150, 170, 186})
          for (const bool key : {true, false}) {
            SCOPED_TRACE((key ? "key " : "value ") + std::to_string(t));
            auto spoilt = in;
            if (t < 150)
              spoil(key ? spoilt.past_k : spoilt.past_v, t);
            else
              spoil(key ? spoilt.k : spoilt.v, t - 150);
            auto output = attend_masked(spoilt, added, options);
            const auto sees = [&](Index b, Index head, Index i) {
              return added(b, head % heads, i, t) > -infinity && (!causal || t - 150 <= i);
            };
            // A NaN value leaves the log-sum-exp alone.
            for (Index b = 0; b < 2 && !key; ++b)
              for (Index head = 0; head < 4; ++head)
                for (Index i = 0; i < 37; ++i)
                  if (sees(b, head, i)) {
                    EXPECT_EQ(output.lse(b, head, i), clean.lse(b, head, i));
                    output.lse(b, head, i) = not_a_number;
                  }
            expect_spoilt(output, clean, sees);
          }
      }
}

// The same with a NaN that is hidden by causality alone, under biases.
TEST(Masked, BiasesDoNotOpenWhatCausalityHides) {
  Random random(21);
  const auto in = random_inputs<Element>(random, {.q_len = 37, .kv_len = 101});
  const Added added = random_mask(random, 1, 1, 37, 138, 0.0, 0.5);
  const auto clean = attend_masked(in, added);
  auto spoilt = in;
  spoil(spoilt.k, 20), spoil(spoilt.v, 20);
  expect_spoilt(attend_masked(spoilt, added), clean, [](Index, Index, Index i) { return i >= 20; });
  const AttentionOptions window{.sliding_window = 30};
  const auto in_window = attend_masked(in, added, window);
  spoilt = in;
  spoil(spoilt.past_k, 90), spoil(spoilt.past_v, 90);
  expect_spoilt(attend_masked(spoilt, added, window), in_window,
                [](Index, Index, Index i) { return 101 + i - 90 < 30; });
}

TEST(Masked, RowsThatSeeNothingAreZero) {
  Random random(22);
  for (const Index q_len : {1, 5, 40}) {
    const auto in = random_inputs<Element>(
        random, {.batch = 2, .q_heads = 4, .kv_heads = 2, .q_len = q_len, .kv_len = 150});
    // Nobody sees anything in sequence 0; in sequence 1 the last query does.
    Added added = random_mask(random, 2, 1, q_len, 150 + q_len);
    for (Index i = 0; i < q_len; ++i)
      for (Index key = 0; key < 150 + q_len; ++key)
        if (i < q_len - 1) added(1, 0, i, key) = -infinity;
    for (Index i = 0; i < q_len; ++i)
      for (Index key = 0; key < 150 + q_len; ++key) added(0, 0, i, key) = -infinity;
    const auto output = attend_masked(in, added);
    expect_close(output, oracle_masked(in, added), in, 2.0);
    for (Index b = 0; b < 2; ++b)
      for (Index head = 0; head < 4; ++head)
        for (Index i = 0; i < q_len; ++i) {
          if (b == 1 && i == q_len - 1) continue;
          EXPECT_EQ(output.lse(b, head, i), -infinity);
          for (Index c = 0; c < 16; ++c)
            EXPECT_EQ(static_cast<float>(output.out(b, head, i, c)), 0.0f);
        }
    const std::vector<float> sinks{0.5f, -1.0f, 3.0f, 0.0f};
    expect_masked_as_oracle(in, added, {.sink_logits = sinks});
  }
}

// ---- one token ----------------------------------------------------------------------------------

// Heads side by side take turns; biases alone leave them to it, holes do not.
TEST(Masked, OneTokenWithHeadsSideBySide) {
  Random random(23);
  const std::vector<float> slopes{0.5f, 0.25f, 0.125f, 0.0f, 0.03125f, 0.0625f},
      factors{1.0f, 0.5f, -1.0f, 0.0f, 2.0f, 0.25f};
  for (const Index kv_len : {Index{40}, Index{tuning::token_together_keys + 1}, Index{500}}) {
    const auto in = random_inputs<Element>(
        random,
        {.batch = 2, .q_heads = 6, .kv_heads = 3, .head_dim = 19, .q_len = 1, .kv_len = kv_len});
    const Strided<Element> past_k(in.past_k), past_v(in.past_v);
    for (const double hidden : {0.0, 0.4}) {
      Added added = random_mask(random, 2, 1, 1, kv_len + 1, hidden);
      for (Index b = 0; b < 2; ++b) added(b, 0, 0, kv_len) = 1.5f;
      AttentionOptions options{.mask = added, .mask_factors = factors, .alibi_slopes = slopes};
      auto output = unwritten<Element>(in.q, 16);
      quoka::attention(in.q, {past_k.view(), past_v.view()}, {in.k, in.v}, {output.out, output.lse},
                       options);
      options.mask = {};
      expect_close(output, oracle_masked(in, added, options), in, 4.0);
    }
  }
}

// A group too large for it; a mask for each head; the token's own key hidden.
TEST(Masked, OneTokenThatIsAPanel) {
  Random random(24);
  const Index group = tuning::token_rows + 1;
  const auto many = random_inputs<Element>(
      random, {.q_heads = 2 * group, .kv_heads = 2, .q_len = 1, .kv_len = 150});
  expect_masked_as_oracle(many, random_mask(random, 1, 1, 1, 151));
  const auto in =
      random_inputs<Element>(random, {.q_heads = 4, .kv_heads = 2, .q_len = 1, .kv_len = 150});
  expect_masked_as_oracle(in, random_mask(random, 1, 4, 1, 151));
  Added added = random_mask(random, 1, 1, 1, 151);
  added(0, 0, 0, 150) = -infinity;
  auto spoilt = in;
  spoil(spoilt.k, 0), spoil(spoilt.v, 0);
  expect_close(attend_masked(spoilt, added), oracle_masked(spoilt, added), in, 2.0);
  // Of the past alone.
  const auto past = random_inputs<Element>(
      random, {.q_heads = 4, .kv_heads = 2, .q_len = 1, .kv_len = 150}, false);
  expect_masked_as_oracle(past, random_mask(random, 1, 1, 1, 150));
}

// ---- threads ------------------------------------------------------------------------------------

TEST(Masked, ThreadsChangeNoBit) {
  Random random(25);
  for (const Index q_len : {1, 40}) {
    const Index kv_len = 1200;  // more columns than one task looks at
    const auto in = random_inputs<Element>(
        random, {.batch = 2, .q_heads = 4, .kv_heads = 2, .q_len = q_len, .kv_len = kv_len});
    const Added added = random_mask(random, 2, 1, q_len, kv_len + q_len);
    const auto serial = attend_masked(in, added);
    for_each_executor([&](ExecutorRef executor) {
      expect_same(attend_masked(in, added, {}, nullptr, executor), serial);
    });
  }
}

// A sequence whose chunk is hidden has fewer keys than the next one of the batch: fewer blocks, and fewer parts.
TEST(Masked, ASequenceWithoutItsChunkBesideOneWithIt) {
  Random random(26);
  constexpr int block = tuning::usual_block_keys, q_len = 130;
  for (const Index kv_len :
       {Index{4 * block}, Index{4 * 128}, quoka::round_up(tuning::long_part_keys, Index{block}),
        tuning::long_part_keys, 2 * tuning::long_part_keys}) {
    const auto in = random_inputs<float>(
        random, {.batch = 2, .q_heads = 1, .head_dim = 16, .q_len = q_len, .kv_len = kv_len});
    Added added(2, 1, q_len, kv_len + q_len);
    added.setZero();
    for (Index i = 0; i < q_len; ++i)
      for (Index key = kv_len; key < kv_len + q_len; ++key) added(0, 0, i, key) = -infinity;
    const auto serial = attend_masked(in, added);
    expect_close(serial, oracle_masked(in, added), in, 2.0);
    for (const int workers : {3, 16}) {
      quoka::ThreadPool pool(workers);
      expect_same(attend_masked(in, added, {}, nullptr, pool), serial);
    }
  }
}

// ---- visible cells ------------------------------------------------------------------------------

TEST(VisibleCells, ByWhoSeesThem) {
  Random random(26);
  for (const Index kv_len : {0, 7, 1500}) {
    Added added = random_mask(random, 2, 3, 5, kv_len + 5, 0.05, 0.3);
    for (Index b = 0; b < 2; ++b)
      for (Index t = b; t < kv_len; t += 6)
        for (Index head = 0; head < 3; ++head)
          for (Index i = 0; i < 5; ++i) added(b, head, i, t) = t % 4 < 2 ? -infinity : 0.5f;
    for (const Stored::Kind kind : {Stored::Kind::single, Stored::Kind::half, Stored::Kind::bits})
      for (Index b = 0; b < 2; ++b) {
        // A kind without biases hides what has one.
        const auto seen = [&](Index t, Index head, Index i) {
          const float x = added(b, head, i, t);
          return kind == Stored::Kind::bits ? x == 0.0f : x > -infinity;
        };
        std::vector<Position> to_all, to_some;
        for (Index t = 0; t < kv_len; ++t) {
          Index count = 0;
          for (Index head = 0; head < 3; ++head)
            for (Index i = 0; i < 5; ++i) count += seen(t, head, i) ? 1 : 0;
          if (count == 15) to_all.push_back(static_cast<Position>(t));
          if (count > 0 && count < 15) to_some.push_back(static_cast<Position>(t));
        }
        const Stored kept(added, kind);
        const quoka::VisibleCells cells(kept.mask(), kv_len, b);
        EXPECT_EQ(cells.to_all, to_all);
        EXPECT_EQ(cells.to_some, to_some);
        quoka::ThreadPool pool(2);
        EXPECT_EQ(quoka::VisibleCells(kept.mask(), kv_len, b, pool).to_all, to_all);
      }
  }
}

TEST(VisibleCells, RefusesWhatTheMaskHasNot) {
  Random random(27);
  const Added added = random_mask(random, 2, 1, 5, 20), one = random_mask(random, 1, 1, 5, 20);
  expect_refused([&] { (void)quoka::VisibleCells(added, 21); }, {21, 20});
  expect_refused([&] { (void)quoka::VisibleCells(added, -1); }, {-1, 0});
  expect_refused([&] { (void)quoka::VisibleCells(added, 20, 2); }, {2, 1});
  expect_refused([&] { (void)quoka::VisibleCells(added, 20, -1); }, {-1, 0});
  EXPECT_NO_THROW(quoka::VisibleCells(one, 20, 7));  // the same for all
}

// Selection among the cells that all see, the others attended to exactly.
TEST(VisibleCells, ServeASelection) {
  Random random(28);
  const auto in =
      random_inputs<float>(random, {.q_heads = 4, .kv_heads = 2, .q_len = 5, .kv_len = 90});
  Added added(1, 1, 5, 95);
  added.setZero();
  for (Index t = 0; t < 90; ++t)
    for (Index i = 0; i < 5; ++i)
      if (t % 3 == 1 || (t % 3 == 2 && i % 2 == 0)) added(0, 0, i, t) = -infinity;
  const quoka::VisibleCells cells(added, 90);
  ASSERT_EQ(cells.to_all.size(), 30u);
  ASSERT_EQ(cells.to_some.size(), 30u);
  std::vector<Index> some(cells.to_some.begin(), cells.to_some.end());
  for (std::size_t i = 0; i < 10; ++i) some.push_back(cells.to_all[3 * i]);
  std::sort(some.begin(), some.end());
  const Selection keep = to_selection({{some, some}}, 90);
  expect_masked_as_oracle(in, added, {}, &keep);
}

// ---- what is refused ----------------------------------------------------------------------------

class MaskRefuses : public ::testing::Test {
 protected:
  void refused(const Added& mask, std::initializer_list<Fragment> fragments) {
    auto output = unwritten<float>(in_.q, 16);
    const auto before = output;
    expect_refused(
        [&] {
          quoka::attention(in_.q, {in_.past_k, in_.past_v}, {in_.k, in_.v},
                           {output.out, output.lse}, {.mask = mask});
        },
        fragments);
    expect_same(output, before);
  }

  Random random_{29};
  Inputs<float> in_ = random_inputs<float>(
      random_, {.batch = 2, .q_heads = 4, .kv_heads = 2, .q_len = 7, .kv_len = 37});
};

TEST_F(MaskRefuses, OtherSizes) {
  refused(random_mask(random_, 3, 4, 7, 44), {"mask's batch", 3, 2});
  refused(random_mask(random_, 2, 2, 7, 44), {"mask's heads", 2, 4});
  refused(random_mask(random_, 2, 4, 6, 44), {"mask's q_len", 6, 7});
  refused(random_mask(random_, 2, 4, 7, 37), {"mask's keys", 37, 44});
  refused(random_mask(random_, 2, 4, 7, 45), {"mask's keys", 45, 44});
  refused(random_mask(random_, 2, 4, 7, 0), {"mask's keys", 0, 44});
  refused(random_mask(random_, 2, 4, 0, 44), {"mask's q_len", 0, 7});
}

TEST_F(MaskRefuses, AnotherNumberOfFactorsOrSlopes) {
  const std::vector<float> three(3, 1.0f);
  expect_refused([&] { (void)attend(in_, {.mask_factors = three}); }, {"mask_factors", 3, 4});
  expect_refused([&] { (void)attend(in_, {.alibi_slopes = three}); }, {"alibi_slopes", 3, 4});
}

TEST_F(MaskRefuses, NoMemoryAndNegativeSizes) {
  expect_refused(
      [] {
        (void)Mask::bytes(nullptr, {1, 1, 7, 44}, {0, 0, 44});
      },
      {"a mask of [1, 1, 7, 44]", "null"});
  const auto refused = [](const Mask::Sizes& sizes, const char* axis) {
    expect_refused([&] { (void)Mask::bits(nullptr, sizes, {0, 0, 44}); }, {axis, -1, 0});
  };
  refused({-1, 1, 7, 44}, "a mask's batch");
  refused({1, -1, 7, 44}, "a mask's heads");
  refused({1, 1, -1, 44}, "a mask's q_len");
  refused({1, 1, 7, -1}, "a mask's keys");
}

TEST_F(MaskRefuses, RowsInPagesAndOtherFormats) {
  const std::vector<Position> cells{1, 0};
  const Added added = random_mask(random_, 1, 1, 2, 44);
  expect_refused([&] { (void)Mask(Rows(added).listed(cells)); }, {"in pages"});
  quoka::Format other = quoka::format_of<float>();
  other.name = "other", other.element_bytes = 0;  // channels that are not by themselves
  expect_refused(
      [&] {
        (void)Mask(Rows(reinterpret_cast<const std::byte*>(added.data()), other, {1, 1, 2, 44},
                        {352, 352, 176}));
      },
      {"not other"});
}

TEST_F(MaskRefuses, AnOutputThatLiesInIt) {
  Added added = random_mask(random_, 2, 4, 7, 44);
  const Added before = added;
  const TensorView<float> out(added.data() + 100, {2, 4, 7, 16}, {448, 112, 16, 1});
  expect_refused(
      [&] {
        quoka::attention(in_.q, {in_.past_k, in_.past_v}, {in_.k, in_.v}, out, {.mask = added});
      },
      {"out shares memory with the mask"});
  Tensor4<float> apart(2, 4, 7, 16);
  const TensorView<float, 3> lse(added.data() + 100, {2, 4, 7}, {28, 7, 1});
  expect_refused(
      [&] {
        quoka::attention(in_.q, {in_.past_k, in_.past_v}, {in_.k, in_.v}, {apart, lse},
                         {.mask = added});
      },
      {"lse shares memory with the mask"});
  EXPECT_TRUE(same_bits(added, before));
  // The last byte of a mask of bits.
  const std::vector<std::uint8_t> bits(16, 0xff);
  auto* const memory = reinterpret_cast<float*>(added.data());
  const Mask of_bits = Mask::bits(memory, {1, 1, 7, 44}, {0, 0, 6});  // 42 bytes: 10.5 floats
  const auto one_row = [&](Index at) {
    return TensorView<float, 3>(memory + at, {2, 4, 7}, {28, 7, 1});
  };
  expect_refused(
      [&] {
        quoka::attention(in_.q, {in_.past_k, in_.past_v}, {in_.k, in_.v}, {apart, one_row(10)},
                         {.mask = of_bits});
      },
      {"lse shares memory with the mask"});
  EXPECT_NO_THROW(quoka::attention(in_.q, {in_.past_k, in_.past_v}, {in_.k, in_.v},
                                   {apart, one_row(11)}, {.mask = of_bits}));
}

// Nothing to see at all, and a mask that says so.
TEST(MaskSizes, OfNoKeys) {
  Random random(30);
  const auto in = random_inputs<float>(random, {.kv_len = 0}, false);
  const Added none(1, 1, 7, 0);
  const auto output = attend_masked(in, none);
  for (Index i = 0; i < output.lse.size(); ++i) EXPECT_EQ(output.lse.data()[i], -infinity);
  for (Index i = 0; i < output.out.size(); ++i) EXPECT_EQ(output.out.data()[i], 0.0f);
}

}  // namespace
