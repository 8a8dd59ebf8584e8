// attention/attention.hpp against the oracle, and what must hold to the last bit: causality, the
// selection, the layout. NaN and extreme values: attention_extremes_test.cpp.

#include <quoka/attention/attention.hpp>

#include "support/attention_fixtures.hpp"

#include <gtest/gtest.h>

#include <optional>
#include <utility>

namespace {

using namespace quoka_test;
namespace tuning = quoka::tuning;

// ---- shapes -------------------------------------------------------------------------------------

TEST(Attention, EveryHeadDim) {
  for_each_storage([]<class T>() {
    Random random(1);
    for (const Index dim : {1, 3, 56, 64, 80, 96, 100, 112, 128, 192, 256}) {
      SCOPED_TRACE("head_dim " + std::to_string(dim));
      expect_as_oracle(random_inputs<T>(random, {.head_dim = dim, .v_dim = dim, .kv_len = 127}));
    }
  });
}

TEST(Attention, EveryGroup) {
  Random random(2);
  for (const Index group : {1, 4, 5, 6, 7, 8, 16}) {
    SCOPED_TRACE("group " + std::to_string(group));
    expect_as_oracle(random_inputs<Element>(
        random, {.q_heads = 3 * group, .kv_heads = 3, .q_len = 3, .kv_len = 127}));
  }
}

TEST(Attention, ValueDimMayDifferFromHeadDim) {
  for_each_storage([]<class T>() {
    Random random(3);
    for (const auto& [dim, v_dim] :
         {std::pair<Index, Index>{192, 128}, {64, 80}, {37, 1}, {1, 37}, {128, 256}}) {
      SCOPED_TRACE("head_dim " + std::to_string(dim) + ", v_dim " + std::to_string(v_dim));
      expect_as_oracle(random_inputs<T>(
          random, {.q_heads = 4, .kv_heads = 2, .head_dim = dim, .v_dim = v_dim, .kv_len = 127}));
    }
  });
}

TEST(Attention, EveryLength) {
  Random random(4);
  for (const Index q_len : {1, 3, 37, 128})
    for (const Index kv_len : {0, 1, 37, 501}) {
      SCOPED_TRACE("q_len " + std::to_string(q_len) + ", kv_len " + std::to_string(kv_len));
      expect_as_oracle(random_inputs<Element>(random, {.q_len = q_len, .kv_len = kv_len}));
    }
}

TEST(Attention, KeysAroundABlock) {
  Random random(5);
  for (const Index border :
       {Index{tuning::tile_rows}, Index{tuning::block_keys}, Index{2 * tuning::block_keys}})
    for (const Index q_len : {1, 3})
      for (Index keys = border - 1; keys <= border + 1; ++keys) {
        SCOPED_TRACE(std::to_string(keys) + " keys, of them the chunk " + std::to_string(q_len));
        expect_as_oracle(random_inputs<Element>(random, {.q_len = q_len, .kv_len = keys - q_len}));
      }
}

TEST(Attention, RowsAroundAPanel) {
  Random random(6);
  for (const Index panels : {1, 2})
    for (Index rows = panels * tuning::panel_rows - 1; rows <= panels * tuning::panel_rows + 1;
         ++rows) {
      SCOPED_TRACE(std::to_string(rows) + " rows");
      expect_as_oracle(random_inputs<Element>(random, {.q_heads = 1, .q_len = rows}));
      expect_as_oracle(random_inputs<Element>(random, {.q_heads = rows, .q_len = 1}));
    }
}

TEST(Attention, RowsAroundATask) {
  Random random(7);
  constexpr Index rows = tuning::max_panels_per_task * tuning::panel_rows;
  for (Index q_len = rows - 1; q_len <= rows + 1; ++q_len) {
    SCOPED_TRACE(std::to_string(q_len) + " rows");
    expect_as_oracle(
        random_inputs<Element>(random, {.q_heads = 1, .head_dim = 3, .v_dim = 3, .q_len = q_len}));
  }
}

TEST(Attention, Batch) {
  Random random(8);
  expect_as_oracle(
      random_inputs<Element>(random, {.batch = 2, .q_heads = 6, .kv_heads = 2, .kv_len = 127}));
}

TEST(Attention, BatchIsItsSequencesOneByOne) {
  Random random(9);
  const auto in =
      random_inputs<Element>(random, {.batch = 2, .q_heads = 6, .kv_heads = 2, .kv_len = 127});
  const auto both = attend(in);
  const auto of = [](const auto& x, Index b) {
    Tensor4<Element> one(1, x.dimension(1), x.dimension(2), x.dimension(3));
    std::copy_n(x.data() + b * one.size(), one.size(), one.data());
    return one;
  };
  for (const Index b : {0, 1}) {
    const auto one = attend<Element>(
        {of(in.q, b), of(in.past_k, b), of(in.past_v, b), of(in.k, b), of(in.v, b)});
    EXPECT_TRUE(same_bits(one.out, of(both.out, b)));
  }
}

TEST(Attention, ChunkAlone) {
  for_each_storage([]<class T>() {
    Random random(10);
    auto in = random_inputs<T>(random, {.q_heads = 4, .kv_heads = 2, .q_len = 37, .kv_len = 0});
    const auto expected = oracle_attend(in);
    expect_close(attend(in), expected, in);
    auto absent = unwritten<T>(in.q, 16);  // no view of a past at all
    quoka::attention(in.q, {}, {in.k, in.v}, {absent.out, absent.lse});
    expect_close(absent, expected, in);
  });
}

TEST(Attention, PastAlone) {
  Random random(11);
  const auto in = random_inputs<Element>(
      random, {.q_heads = 4, .kv_heads = 2, .q_len = 37, .kv_len = 127}, false);
  const auto expected = oracle_attend(in);
  expect_close(attend(in), expected, in);
  auto absent = unwritten<Element>(in.q, 16);
  for (const AttentionOptions& said :
       {AttentionOptions{.query_position = 127}, AttentionOptions{.causal = false}}) {
    absent = unwritten<Element>(in.q, 16);
    quoka::attention(in.q, {in.past_k, in.past_v}, {}, {absent.out, absent.lse}, said);
    expect_close(absent, expected, in);
  }
}

TEST(Attention, RankThreeIsBatchOne) {
  Random random(12);
  const auto in = random_inputs<Element>(random, {.q_heads = 4, .kv_heads = 2});
  const auto drop = [](const Tensor4<Element>& x) {
    Tensor3<Element> y(x.dimension(1), x.dimension(2), x.dimension(3));
    std::copy_n(x.data(), x.size(), y.data());
    return y;
  };
  const auto q = drop(in.q), past_k = drop(in.past_k), past_v = drop(in.past_v), k = drop(in.k),
             v = drop(in.v);
  Tensor3<Element> out(4, 7, 16);
  quoka::attention(q, {past_k, past_v}, {k, v}, out);
  EXPECT_TRUE(same_bits(out, attend(in).out));
}

// ---- causality ----------------------------------------------------------------------------------

TEST(Attention, AChunkKeyReachesOnlyItsOwnAndLaterRows) {
  Random random(20);
  const auto in =
      random_inputs<Element>(random, {.q_heads = 6, .kv_heads = 2, .q_len = 37, .kv_len = 101});
  const auto before = attend(in);
  for (const Index j : {0, 1, 10, 11, 35, 36})
    for (const bool key : {true, false}) {
      auto changed = in;
      for (Index c = 0; c < 16; ++c)
        (key ? changed.k : changed.v)(0, 1, j, c) = stored<Element>(3.0);
      const auto after = attend(changed);
      for (Index head = 0; head < 6; ++head)
        for (Index i = 0; i < 37; ++i) {
          const bool sees = head >= 3 && i >= j;
          EXPECT_EQ(same_row(before, after, 0, head, i), !sees)
              << "key " << j << ", head " << head << ", row " << i;
        }
    }
}

TEST(Attention, ARowIsTheDecodeStepAtItsPosition) {
  Random random(21);
  const Index q_len = 37, kv_len = 101;
  const auto in = random_inputs<Element>(random, {.q_heads = 5, .q_len = q_len, .kv_len = kv_len});
  const auto chunk = attend(in);
  const auto join = [&](const Tensor4<Element>& past, const Tensor4<Element>& now, Index n) {
    Tensor4<Element> joined(1, 1, kv_len + n, 16);
    std::copy_n(past.data(), past.size(), joined.data());
    std::copy_n(now.data(), n * 16, joined.data() + past.size());
    return joined;
  };
  for (Index i = 0; i < q_len; ++i) {
    const auto past_k = join(in.past_k, in.k, i), past_v = join(in.past_v, in.v, i);
    const auto row_of = [&](const auto& x) { return TensorView<const Element>(x).slice(i, 1); };
    auto step = unwritten<Element>(random.tensor<Element>(1, 5, 1, 16), 16);
    quoka::attention(row_of(in.q), {past_k, past_v}, {row_of(in.k), row_of(in.v)},
                     {step.out, step.lse});
    EXPECT_TRUE(same_up_to_rounding(row_of(chunk.out), TensorView<const Element>(step.out),
                                    noise * largest(in.past_v)))
        << "row " << i;
    for (Index head = 0; head < 5; ++head)
      EXPECT_NEAR(chunk.lse(0, head, i), step.lse(0, head, 0), noise * 10) << "row " << i;
  }
}

// ---- selections ---------------------------------------------------------------------------------

TEST(Attention, SelectedPast) {
  for_each_storage([]<class T>() {
    Random random(30);
    const auto in = random_inputs<T>(
        random, {.batch = 2, .q_heads = 4, .kv_heads = 2, .q_len = 3, .kv_len = 501});
    for (const Index count :
         {1, 3, 37, tuning::block_keys - 1, tuning::block_keys, tuning::block_keys + 1, 500}) {
      SCOPED_TRACE("count " + std::to_string(count));
      const Selection keep = random_selection(random, 2, 2, 501, count);
      expect_as_oracle(in, {}, &keep);
    }
  });
}

TEST(Attention, SelectedPastWithoutAChunk) {
  Random random(31);
  const auto in = random_inputs<Element>(
      random, {.q_heads = 4, .kv_heads = 2, .q_len = 3, .kv_len = 501}, false);
  const Selection keep = random_selection(random, 1, 2, 501, 127);
  expect_as_oracle(in, {}, &keep);
}

TEST(Attention, SelectionIsAttentionOverTheGatheredPast) {
  Random random(32);
  const auto in =
      random_inputs<Element>(random, {.q_heads = 4, .kv_heads = 2, .q_len = 37, .kv_len = 501});
  const Selection keep = random_selection(random, 1, 2, 501, 127);
  const auto gathered = [&](const Tensor4<Element>& x) {
    Tensor4<Element> y(1, 2, 127, 16);
    for (Index head = 0; head < 2; ++head)
      for (Index i = 0; i < 127; ++i)
        for (Index c = 0; c < 16; ++c)
          y(0, head, i, c) = x(0, head, keep.positions(0, head)[uz(i)], c);
    return y;
  };
  expect_same(attend(in, {}, &keep),
              attend<Element>({in.q, gathered(in.past_k), gathered(in.past_v), in.k, in.v}));
}

TEST(Attention, AllSelectedIsNoSelectionBitForBit) {
  Random random(33);
  const auto in = random_inputs<Element>(
      random, {.batch = 2, .q_heads = 6, .kv_heads = 3, .q_len = 37, .kv_len = 127});
  const auto dense = attend(in);
  const Selection all = Selection::all(2, 3, 127);
  const Selection listed = to_selection(oracle::all_positions(2, 3, 127), 127);
  expect_same(attend(in, {}, &all), dense);
  expect_same(attend(in, {}, &listed), dense);
}

TEST(Attention, NothingSelectedIsTheChunkAloneBitForBit) {
  Random random(34);
  auto in =
      random_inputs<Element>(random, {.q_heads = 4, .kv_heads = 2, .q_len = 37, .kv_len = 127});
  const Selection none = to_selection(oracle::all_positions(1, 2, 0), 127);
  const auto selected = attend(in, {}, &none);
  in.past_k = Tensor4<Element>(1, 2, 0, 16);
  in.past_v = Tensor4<Element>(1, 2, 0, 16);
  expect_same(selected, attend(in));
}

// A count for each KV head, 0 and all among them.
Selection ragged_selection(Random& random, const std::vector<Index>& counts, Index batch,
                           Index kv_heads, Index kv_len) {
  oracle::Positions lists = oracle::all_positions(batch, kv_heads, 0);
  for (Index b = 0; b < batch; ++b)
    for (Index head = 0; head < kv_heads; ++head) {
      auto& list = lists[uz(b)][uz(head)];
      list = random.permutation(kv_len);
      list.resize(uz(counts[uz(b * kv_heads + head)]));
      std::sort(list.begin(), list.end());
    }
  return to_selection(lists, kv_len);
}

// A chunk, few rows that are cut over their keys, one token.
TEST(Attention, EachKvHeadMayKeepACountOfItsOwn) {
  Random random(35);
  for (const Index q_len : {71, 3, 1}) {
    SCOPED_TRACE("q_len " + std::to_string(q_len));
    const Index kv_len = 2003;
    const auto in = random_inputs<Element>(
        random, {.batch = 2, .q_heads = 6, .kv_heads = 3, .q_len = q_len, .kv_len = kv_len});
    const Selection keep =
        ragged_selection(random, {0, kv_len, 37, 1, tuning::block_keys, 997}, 2, 3, kv_len);
    expect_as_oracle(in, {}, &keep);
    expect_as_oracle(in, {.sliding_window = 1200}, &keep);
  }
}

TEST(Attention, WithoutAChunkAHeadThatKeepsNothingIsEmptyAndOthersAreNot) {
  Random random(36);
  for (const Index q_len : {71, 3, 1}) {
    SCOPED_TRACE("q_len " + std::to_string(q_len));
    const auto in = random_inputs<Element>(
        random, {.q_heads = 6, .kv_heads = 3, .q_len = q_len, .kv_len = 501}, false);
    const Selection keep = ragged_selection(random, {37, 0, 501}, 1, 3, 501);
    expect_as_oracle(in, {}, &keep);
    EXPECT_EQ(attend(in, {}, &keep).lse(0, 2, 0), -infinity);
  }
}

// How a head is cut over its keys depends on its own count: 16 parts of 4 blocks are the most, and
// one key more makes fewer and larger parts.
TEST(Attention, AHeadsBitsDoNotDependOnTheCountsOfOthers) {
  Random random(37);
  constexpr Index sixteen_parts = tuning::max_parts * tuning::part_blocks * tuning::block_keys;
  const Index kv_len = 2 * sixteen_parts;
  for (const Index q_len : {150, 71, 3, 1}) {
    const auto in = random_inputs<Element>(
        random,
        {.q_heads = 2, .kv_heads = 2, .head_dim = 8, .v_dim = 8, .q_len = q_len, .kv_len = kv_len});
    for (const Index head : {0, 1})  // before the other one, and behind it
      for (const Index own : {Index{0}, Index{100}, Index{1000}, sixteen_parts - q_len}) {
        std::optional<Output<Element>> first;
        for (const Index others : {own, Index{0}, Index{1000}, sixteen_parts - q_len + 1, kv_len}) {
          SCOPED_TRACE("q_len " + std::to_string(q_len) + ", head " + std::to_string(head) +
                       ", count " + std::to_string(own) + ", the other's " +
                       std::to_string(others));
          Random same(38), another(39);
          std::vector<Position> lists[2];
          lists[head] = ragged_selection(same, {own}, 1, 1, kv_len).positions(0, 0);
          lists[1 - head] = ragged_selection(another, {others}, 1, 1, kv_len).positions(0, 0);
          const Selection keep = Selection::from_lists(1, 2, kv_len, lists);
          const auto output = attend(in, {}, &keep);
          if (!first) first = output;
          for (Index i = 0; i < q_len; ++i) EXPECT_TRUE(same_row(output, *first, 0, head, i)) << i;
        }
      }
  }
}

// A Selection of nothing selects nothing, whatever its heads.
TEST(Attention, ASelectionOfNoPast) {
  Random random(39);
  const auto in = random_inputs<float>(
      random, {.batch = 2, .q_heads = 4, .kv_heads = 2, .q_len = 7, .kv_len = 0});
  const auto without = attend(in);
  for (const Selection& keep : {Selection::all(2, 2, 0), to_selection({{{}}}, 0), Selection()}) {
    auto output = unwritten<float>(in.q, 16);
    quoka::attention(in.q, {in.past_k, in.past_v, keep}, {in.k, in.v}, {output.out, output.lse});
    expect_same(output, without);
  }
}

// The chunk stands where a shard ends, wherever that begins.
TEST(Attention, TheFirstQueryStandsBehindTheShard) {
  Random random(40);
  for (const Index q_len : {1, 40}) {
    const auto in =
        random_inputs<float>(random, {.q_heads = 4, .kv_heads = 2, .q_len = q_len, .kv_len = 127});
    const AttentionOptions options{.sliding_window = 50};
    auto output = unwritten<float>(in.q, 16);
    quoka::Past past(in.past_k, in.past_v);
    past.first_position = 1000;
    quoka::attention(in.q, past, {in.k, in.v}, {output.out, output.lse}, options);
    expect_same(output, attend(in, options));
  }
}

// ---- scale, soft-cap, sinks, log-sum-exp --------------------------------------------------------

TEST(Attention, Scale) {
  Random random(40);
  const auto in = random_inputs<Element>(random, {.q_heads = 4, .kv_heads = 2, .kv_len = 127});
  for (const float scale : {0.088f, 0.5f, -0.25f, 1e-20f}) {
    SCOPED_TRACE("scale " + std::to_string(scale));
    expect_as_oracle(in, {.scale = scale});
  }
}

TEST(Attention, DefaultScaleIsOneOverTheRootOfHeadDim) {
  Random random(41);
  const auto in = random_inputs<Element>(random, {.kv_len = 127});
  expect_same(attend(in), attend(in, {.scale = 0.25f}));
}

TEST(Attention, ScaleZeroIsTheMeanOfTheValues) {
  Random random(42);
  const auto in =
      random_inputs<Element>(random, {.head_dim = 3, .v_dim = 3, .q_len = 1, .kv_len = 127});
  const auto output = attend(in, {.scale = 0.0f});
  oracle::Tensor mean(1, 2, 1, 3);
  for (Index head = 0; head < 2; ++head)
    for (Index c = 0; c < 3; ++c) {
      for (Index t = 0; t < 127; ++t)
        mean.at(0, head, 0, c) +=
            static_cast<double>(static_cast<float>(in.past_v(0, 0, t, c))) / 128;
      mean.at(0, head, 0, c) += static_cast<double>(static_cast<float>(in.v(0, 0, 0, c))) / 128;
    }
  EXPECT_TRUE(elements_close(output.out, mean, noise * 3.5));
  EXPECT_NEAR(output.lse(0, 1, 0), std::log(128.0f), 1e-6f);
}

// tanh is off by a few units in the last place, and so is the capped logit: twice the error of
// plain ones.
TEST(Attention, SoftCap) {
  Random random(43);
  const auto in =
      random_inputs<Element>(random, {.q_heads = 4, .kv_heads = 2, .q_len = 37, .kv_len = 501});
  for (const float cap : {0.5f, 5.0f, 30.0f, 50.0f})
    for (const float scale : {0.25f, 2.0f}) {
      SCOPED_TRACE("cap " + std::to_string(cap) + ", scale " + std::to_string(scale));
      expect_as_oracle(in, {.scale = scale, .softcap = cap}, nullptr, 2.0);
    }
}

// Logits of plus and minus 1.6e5: all of them at the cap.
TEST(Attention, SoftCapHoldsHugeLogits) {
  Random random(44);
  auto in = random_inputs<Element>(random, {.kv_len = 127});
  in.q.setConstant(stored<Element>(1.0));
  for (auto* x : {&in.k, &in.past_k})
    for (Index t = 0; t < x->dimension(2); ++t) {
      const double sign = random.below(2) == 0 ? 1.0 : -1.0;
      for (Index c = 0; c < 16; ++c) (*x)(0, 0, t, c) = stored<Element>(sign);
    }
  expect_as_oracle(in, {.scale = 1e4f, .softcap = 3.0f}, nullptr, 2.0);
}

TEST(Attention, SinkLogits) {
  Random random(45);
  const std::vector<float> sinks{-3.0f, 0.0f, 2.5f, 8.0f};
  const auto in =
      random_inputs<Element>(random, {.q_heads = 4, .kv_heads = 2, .q_len = 37, .kv_len = 127});
  const Selection keep = random_selection(random, 1, 2, 127, 37);
  expect_as_oracle(in, {.sink_logits = sinks});
  expect_as_oracle(in, {.sink_logits = sinks}, &keep);
  expect_as_oracle(in, {.sink_logits = sinks, .sliding_window = 11}, &keep);
  // Few rows over many keys are cut over these: a sink counts once.
  expect_as_oracle(
      random_inputs<Element>(random, {.q_heads = 4, .kv_heads = 2, .q_len = 11, .kv_len = 1300}),
      {.sink_logits = sinks});
}

TEST(Attention, SinkLogitsAreNeitherScaledNorCapped) {
  Random random(46);
  const std::vector<float> sinks{-3.0f, 7.0f};
  const auto in = random_inputs<Element>(random, {.kv_len = 127});
  expect_as_oracle(in, {.scale = 0.1f, .softcap = 2.0f, .sink_logits = sinks}, nullptr, 2.0);
}

TEST(Attention, ASinkOfMinusInfinityIsNoSinkBitForBit) {
  Random random(47);
  const std::vector<float> sinks{-infinity, -infinity};
  const auto in = random_inputs<Element>(random, {.kv_len = 127});
  expect_same(attend(in, {.sink_logits = sinks}), attend(in));
}

TEST(Attention, AHugeSinkTakesAllWeight) {
  Random random(48);
  const std::vector<float> sinks{1e4f, 1e30f};
  const auto in = random_inputs<Element>(random, {.kv_len = 127});
  const auto output = attend(in, {.sink_logits = sinks});
  for (Index i = 0; i < output.out.size(); ++i)
    EXPECT_EQ(static_cast<float>(output.out.data()[i]), 0.0f);
  EXPECT_FLOAT_EQ(output.lse(0, 0, 3), 1e4f);
  EXPECT_FLOAT_EQ(output.lse(0, 1, 3), 1e30f);
}

TEST(Attention, LogSumExpIsOptionalAndChangesNothing) {
  Random random(49);
  const auto in = random_inputs<Element>(random, {.kv_len = 127});
  auto alone = unwritten<Element>(in.q, 16);
  quoka::attention(in.q, {in.past_k, in.past_v}, {in.k, in.v}, alone.out);
  EXPECT_TRUE(same_bits(alone.out, attend(in).out));
}

// ---- rows that see nothing ----------------------------------------------------------------------

template <class T>
void expect_empty(const Output<T>& output) {
  for (Index i = 0; i < output.out.size(); ++i)
    EXPECT_EQ(static_cast<float>(output.out.data()[i]), 0.0f);
  for (Index i = 0; i < output.lse.size(); ++i) EXPECT_EQ(output.lse.data()[i], -infinity);
}

TEST(Attention, NoKeysAtAllGiveZerosAndMinusInfinity) {
  Random random(50);
  expect_empty(attend(random_inputs<Element>(random, {.kv_len = 0}, false)));
}

TEST(Attention, NoChunkAndNothingSelectedGiveZerosAndMinusInfinity) {
  Random random(51);
  const auto in = random_inputs<Element>(random, {.kv_len = 127}, false);
  const Selection none = to_selection(oracle::all_positions(1, 1, 0), 127);
  expect_empty(attend(in, {}, &none));
}

TEST(Attention, PastOutOfTheWindowGivesZerosAndMinusInfinity) {
  Random random(52);
  const auto in = random_inputs<Element>(random, {.q_len = 37, .kv_len = 127}, false);
  expect_empty(attend(in, {.sliding_window = 1}));  // query i stands at 127 + i
  const Selection far = to_selection({{{0, 1, 2, 50, 100}}}, 127);
  expect_empty(attend(in, {.sliding_window = 27}, &far));
}

TEST(Attention, OnlyRowsThatSeeNothingAreEmpty) {
  Random random(53);
  const auto in = random_inputs<Element>(random, {.q_len = 37, .kv_len = 127}, false);
  for (const Index window : {2, 20, 37}) expect_as_oracle(in, {.sliding_window = window});
}

TEST(Attention, WithoutKeysTheSinkAloneRemains) {
  Random random(54);
  const std::vector<float> sinks{-3.0f, 7.0f};
  const auto in = random_inputs<Element>(random, {.kv_len = 0}, false);
  const auto output = attend(in, {.sink_logits = sinks});
  for (Index i = 0; i < output.out.size(); ++i)
    EXPECT_EQ(static_cast<float>(output.out.data()[i]), 0.0f);
  for (Index i = 0; i < 7; ++i) {
    EXPECT_FLOAT_EQ(output.lse(0, 0, i), -3.0f);
    EXPECT_FLOAT_EQ(output.lse(0, 1, i), 7.0f);
  }
}

// ---- sliding window -----------------------------------------------------------------------------

TEST(Attention, SlidingWindow) {
  Random random(60);
  const auto in = random_inputs<Element>(random, {.q_len = 37, .kv_len = 501});
  for (const Index window : {1, 2, 36, 37, 38, 127, 128, 129, 200, 501, 537, 538, 1000}) {
    SCOPED_TRACE("window " + std::to_string(window));
    expect_as_oracle(in, {.sliding_window = window});
  }
}

TEST(Attention, SlidingWindowOverASelection) {
  Random random(61);
  const auto in =
      random_inputs<Element>(random, {.q_heads = 4, .kv_heads = 2, .q_len = 37, .kv_len = 501});
  for (const Index count : {37, 300})
    for (const Index window : {1, 20, 37, 127, 200, 501}) {
      SCOPED_TRACE("window " + std::to_string(window) + ", count " + std::to_string(count));
      const Selection keep = random_selection(random, 1, 2, 501, count);
      expect_as_oracle(in, {.sliding_window = window}, &keep);
    }
}

TEST(Attention, SlidingWindowShorterThanALongChunk) {
  Random random(62);
  const auto in =
      random_inputs<Element>(random, {.head_dim = 7, .v_dim = 7, .q_len = 300, .kv_len = 37});
  for (const Index window : {1, 5, 129, 299, 300, 301}) {
    SCOPED_TRACE("window " + std::to_string(window));
    expect_as_oracle(in, {.sliding_window = window});
  }
}

TEST(Attention, AWindowOverEverythingIsNoWindowBitForBit) {
  Random random(63);
  const auto in = random_inputs<Element>(random, {.q_len = 37, .kv_len = 127});
  expect_same(attend(in, {.sliding_window = 127 + 37}), attend(in));
  expect_same(attend(in, {.sliding_window = std::numeric_limits<Index>::max()}), attend(in));
  expect_same(attend(in, {.sliding_window = std::numeric_limits<Index>::max() - 1}), attend(in));
}

TEST(Attention, AWindowOfOneCopiesTheOwnValueExactly) {
  for_each_storage([]<class T>() {
    Random random(64);
    const auto in = random_inputs<T>(random, {.q_heads = 3, .q_len = 127, .kv_len = 501});
    const auto output = attend(in, {.sliding_window = 1, .arithmetic = quoka::Arithmetic::single});
    for (Index head = 0; head < 3; ++head)
      for (Index i = 0; i < 127; ++i)
        for (Index c = 0; c < 16; ++c) EXPECT_EQ(output.out(0, head, i, c), in.v(0, 0, i, c)) << i;
  });
}

TEST(Attention, WhatNoRowSeesIsNotRead) {
  for_each_storage([]<class T>() {
    Random random(65);
    auto in = random_inputs<T>(random, {.q_len = 37, .kv_len = 501});
    const Selection keep = random_selection(random, 1, 1, 501, 300);
    const auto clean = attend(in, {.sliding_window = 130}),
               clean_kept = attend(in, {.sliding_window = 130}, &keep);
    for (Index t = 0; t <= 501 - 130; ++t)
      for (Index c = 0; c < 16; ++c)
        in.past_k(0, 0, t, c) = in.past_v(0, 0, t, c) = stored<T>(std::nan(""));
    expect_same(attend(in, {.sliding_window = 130}), clean);
    expect_same(attend(in, {.sliding_window = 130}, &keep), clean_kept);
  });
}

// ---- layout -------------------------------------------------------------------------------------

TEST(Attention, ACacheInLenHeadsOrderGivesTheSameBits) {
  Random random(70);
  for (const Index dim : {3, 64, 100}) {
    const auto in = random_inputs<Element>(random, {.batch = 2,
                                                    .q_heads = 6,
                                                    .kv_heads = 3,
                                                    .head_dim = dim,
                                                    .v_dim = dim + 1,
                                                    .q_len = 37,
                                                    .kv_len = 127});
    const Selection keep = random_selection(random, 2, 3, 127, 37);
    const Strided<Element> q(in.q), past_k(in.past_k), past_v(in.past_v), k(in.k), v(in.v);
    for (const Selection* selection : {static_cast<const Selection*>(nullptr), &keep}) {
      const auto dense = attend(in, {}, selection);
      Strided<Element> out(2, 6, 37, dim + 1);
      Tensor4<float> lse_memory(2, 37, 6, 2);
      const TensorView<float, 3> lse(lse_memory.data(), {2, 6, 37}, {37 * 6 * 2, 2, 6 * 2});
      quoka::Past past(past_k.view(), past_v.view());
      past.keep = selection;
      quoka::attention(q.view(), past, {k.view(), v.view()}, {out.view(), lse});
      EXPECT_TRUE(same_bits(std::as_const(out).view(), dense.out)) << "head_dim " << dim;
      EXPECT_TRUE(same_bits(TensorView<const float, 3>(lse), TensorView<const float, 3>(dense.lse)))
          << "head_dim " << dim;
      EXPECT_TRUE(out.padding_intact());
    }
  }
}

TEST(Attention, UnalignedMemoryGivesTheSameBits) {
  for_each_storage([]<class T>() {
    Random random(71);
    const auto in = random_inputs<T>(
        random, {.q_heads = 4, .kv_heads = 2, .head_dim = 64, .v_dim = 64, .kv_len = 127});
    const auto aligned = attend(in);
    for (const Index shift : {1, 3, 7}) {
      std::vector<std::vector<T>> memory;
      const auto shifted = [&](const Tensor4<T>& x) {
        memory.emplace_back(uz(x.size() + shift));
        std::copy_n(x.data(), x.size(), memory.back().data() + shift);
        const Index heads = x.dimension(1), len = x.dimension(2), dim = x.dimension(3);
        return TensorView<T>(memory.back().data() + shift, {x.dimension(0), heads, len, dim},
                             {heads * len * dim, len * dim, dim, 1});
      };
      const TensorView<T> out = shifted(aligned.out);
      quoka::attention(shifted(in.q), {shifted(in.past_k), shifted(in.past_v)},
                       {shifted(in.k), shifted(in.v)}, out);
      EXPECT_TRUE(same_bits(out, aligned.out)) << "shift " << shift;
    }
  });
}

TEST(Attention, OneKeyForAllByStrideZero) {
  Random random(72);
  const auto in = random_inputs<Element>(random, {.q_len = 3, .kv_len = 1}, false);
  const TensorView<const Element> k(in.past_k.data(), {1, 1, 127, 16}, {0, 0, 0, 1}),
      v(in.past_v.data(), {1, 1, 127, 16}, {0, 0, 0, 1});
  Tensor4<Element> out(1, 2, 3, 16);
  quoka::attention(in.q, {k, v}, {}, out, {.causal = false});
  EXPECT_TRUE(elements_close(out, oracle_attend(in).out, noise * 3.5));
}

// ---- formats ------------------------------------------------------------------------------------

// x rounded to T, as T and as the floats that T holds.
template <class T, class From>
Tensor4<T> as(const Tensor4<From>& x) {
  Tensor4<T> y(x.dimensions());
  for (Index i = 0; i < x.size(); ++i)
    y.data()[i] = static_cast<T>(static_cast<float>(x.data()[i]));
  return y;
}

// The shapes of the three ways through attention: a chunk, few rows over parts of the keys, one
// token. Past lengths that are no multiple of a block: one block holds keys of past and chunk.
const Shape ways[] = {
    {.q_heads = 8, .kv_heads = 2, .head_dim = 37, .v_dim = 19, .q_len = 71, .kv_len = 205},
    {.q_heads = 4, .kv_heads = 2, .head_dim = 37, .v_dim = 19, .q_len = 3, .kv_len = 1999},
    {.q_heads = 4, .kv_heads = 2, .head_dim = 64, .v_dim = 64, .q_len = 1, .kv_len = 205},
    {.q_heads = 4, .kv_heads = 2, .head_dim = 37, .v_dim = 19, .q_len = 1, .kv_len = 1999}};

using ShortTypes = ::testing::Types<Eigen::half, Eigen::bfloat16>;

// Float queries over a short cache: neither the queries nor the outputs are rounded.
TEST(AttentionFormats, FloatQueriesAndOutputsOverAShortCache) {
  for_each_storage<ShortTypes>([]<class T>() {
    Random random(80);
    for (const Shape& shape : ways) {
      SCOPED_TRACE("q_len " + std::to_string(shape.q_len));
      const auto in = random_inputs<T>(random, shape);
      const auto q = random.tensor<float>(1, shape.q_heads, shape.q_len, shape.head_dim);
      auto output = unwritten<float>(q, shape.v_dim);
      quoka::attention(q, {in.past_k, in.past_v}, {in.k, in.v}, {output.out, output.lse});
      const auto exact = oracle::attention(to_oracle(q), to_oracle(in.past_k), to_oracle(in.past_v),
                                           nullptr, to_oracle(in.k), to_oracle(in.v), {});
      EXPECT_TRUE(elements_close(output.out, exact.out, noise * 3.5));
      EXPECT_TRUE(lse_close(output.lse, exact.lse, noise));
    }
  });
}

// Rounding the queries beforehand is the only difference to queries of the cache's type.
TEST(AttentionFormats, FloatQueriesRoundedBeforehandAreQueriesOfTheCachesType) {
  for_each_storage<ShortTypes>([]<class T>() {
    Random random(81);
    for (const Shape& shape : ways) {
      SCOPED_TRACE("q_len " + std::to_string(shape.q_len));
      const auto in = random_inputs<T>(random, shape);
      const auto same_type = attend(in);
      const auto q = as<float>(in.q);
      auto output = unwritten<float>(q, shape.v_dim);
      quoka::attention(q, {in.past_k, in.past_v}, {in.k, in.v}, {output.out, output.lse});
      EXPECT_TRUE(same_bits(output.lse, same_type.lse));
      EXPECT_TRUE(same_bits(as<T>(output.out), same_type.out)) << "one rounding, at the end";
    }
  });
}

// A format is how numbers are stored: float copies of everything give the same bits.
TEST(AttentionFormats, KeysAndValuesMayHaveAFormatEach) {
  for_each_storage<ShortTypes>([]<class T>() {
    Random random(82);
    for (const Shape& shape : ways) {
      SCOPED_TRACE("q_len " + std::to_string(shape.q_len));
      const auto in = random_inputs<T>(random, shape);
      const Inputs<float> floats{as<float>(in.q), as<float>(in.past_k), as<float>(in.past_v),
                                 as<float>(in.k), as<float>(in.v)};
      const auto expected = attend(floats);
      auto output = unwritten<float>(floats.q, shape.v_dim);
      quoka::attention(floats.q, {in.past_k, floats.past_v}, {in.k, floats.v},
                       {output.out, output.lse});
      expect_same(output, expected);
      output = unwritten<float>(floats.q, shape.v_dim);
      quoka::attention(floats.q, {floats.past_k, in.past_v}, {floats.k, in.v},
                       {output.out, output.lse});
      expect_same(output, expected);
    }
  });
}

TEST(AttentionFormats, AShortPastAndAFloatChunkShareABlock) {
  for_each_storage<ShortTypes>([]<class T>() {
    Random random(83);
    for (const Shape& shape : ways) {
      SCOPED_TRACE("q_len " + std::to_string(shape.q_len));
      ASSERT_NE(shape.kv_len % tuning::block_keys, 0);
      const auto in = random_inputs<T>(random, shape);
      const Inputs<float> floats{as<float>(in.q), as<float>(in.past_k), as<float>(in.past_v),
                                 random.tensor<float>(1, 2, shape.q_len, shape.head_dim),
                                 random.tensor<float>(1, 2, shape.q_len, shape.v_dim)};
      const Selection keep = random_selection(random, 1, 2, shape.kv_len, 117);
      for (const Selection* kept : {static_cast<const Selection*>(nullptr), &keep}) {
        const auto expected = attend(floats, {}, kept);
        auto output = unwritten<float>(floats.q, shape.v_dim);
        quoka::Past past(in.past_k, in.past_v);
        past.keep = kept;
        quoka::attention(floats.q, past, {floats.k, floats.v}, {output.out, output.lse});
        expect_same(output, expected);
        expect_close(output, oracle_attend(floats, {}, kept), floats);
      }
    }
  });
}

// The other way round: the chunk is short, and only the keys differ.
TEST(AttentionFormats, AFloatPastAndAShortChunkShareABlock) {
  for_each_storage<ShortTypes>([]<class T>() {
    Random random(84);
    for (const Shape& shape : ways) {
      SCOPED_TRACE("q_len " + std::to_string(shape.q_len));
      const auto in = random_inputs<T>(random, shape);
      const Inputs<float> floats{
          as<float>(in.q), random.tensor<float>(1, 2, shape.kv_len, shape.head_dim),
          random.tensor<float>(1, 2, shape.kv_len, shape.v_dim), as<float>(in.k),
          random.tensor<float>(1, 2, shape.q_len, shape.v_dim)};
      const auto expected = attend(floats);
      auto output = unwritten<float>(floats.q, shape.v_dim);
      quoka::attention(floats.q, {floats.past_k, floats.past_v}, {in.k, floats.v},
                       {output.out, output.lse});
      expect_same(output, expected);
    }
  });
}

// ---- what is refused ----------------------------------------------------------------------------

class AttentionRefuses : public ::testing::Test {
 protected:
  static constexpr Shape shape{.batch = 2,
                               .q_heads = 6,
                               .kv_heads = 3,
                               .head_dim = 16,
                               .v_dim = 20,
                               .q_len = 7,
                               .kv_len = 37};

  // Refused with these fragments, and nothing written.
  void refused(std::initializer_list<Fragment> fragments) {
    auto output = unwritten<float>(in_.q, 20);
    if (out_dims_[3] != 0) output.out = Tensor4<float>(out_dims_).setConstant(-12345.0f);
    if (lse_dims_[2] != 0) output.lse = Tensor3<float>(lse_dims_).setConstant(-12345.0f);
    const auto before = output;
    expect_refused(
        [&] {
          quoka::Past past(in_.past_k, in_.past_v);
          past.keep = keep_;
          quoka::attention(in_.q, past, {in_.k, in_.v}, {output.out, output.lse}, options_);
        },
        fragments);
    expect_same(output, before);
  }

  Random random_{100};
  Inputs<float> in_ = random_inputs<float>(random_, shape);
  const Selection* keep_ = nullptr;
  AttentionOptions options_ = {};
  Eigen::array<Index, 4> out_dims_{};
  Eigen::array<Index, 3> lse_dims_{};
};

TEST_F(AttentionRefuses, QueryHeadsThatNoGroupFits) {
  in_.q = random_.tensor<float>(2, 7, 7, 16);
  refused({"q_heads", 7, "kv_heads", 3});
}
TEST_F(AttentionRefuses, NoQueries) {
  in_.q = Tensor4<float>(2, 6, 0, 16);
  refused({"q_len", 0, 1});
}
TEST_F(AttentionRefuses, NoBatch) {
  in_.q = Tensor4<float>(0, 6, 7, 16);
  refused({"batch", 0, 1});
}
TEST_F(AttentionRefuses, NoChannels) {
  in_.q = Tensor4<float>(2, 6, 7, 0);
  refused({"head_dim", 0, 1});
}
TEST_F(AttentionRefuses, PastKeysOfAnotherHeadDim) {
  in_.past_k = random_.tensor<float>(2, 3, 37, 15);
  refused({"past k", 15, 16});
}
TEST_F(AttentionRefuses, ChunkKeysOfAnotherHeadDim) {
  in_.k = random_.tensor<float>(2, 3, 7, 17);
  refused({"chunk k", 17, 16});
}
TEST_F(AttentionRefuses, PastOfAnotherBatch) {
  in_.past_k = random_.tensor<float>(1, 3, 37, 16);
  refused({"batch", 1, 2});
}
TEST_F(AttentionRefuses, ChunkOfAnotherBatch) {
  in_.v = random_.tensor<float>(3, 3, 7, 20);
  refused({"batch", 3, 2});
}
TEST_F(AttentionRefuses, ChunkOfOtherHeads) {
  in_.k = random_.tensor<float>(2, 2, 7, 16);
  refused({"heads", 2, 3});
}
TEST_F(AttentionRefuses, PastValuesOfOtherHeads) {
  in_.past_v = random_.tensor<float>(2, 6, 37, 20);
  refused({"heads", 6, 3});
}
TEST_F(AttentionRefuses, PastKeysAndValuesOfTwoLengths) {
  in_.past_v = random_.tensor<float>(2, 3, 38, 20);
  refused({"past", 38, 37});
}
TEST_F(AttentionRefuses, ChunkKeysAndValuesOfTwoLengths) {
  in_.v = random_.tensor<float>(2, 3, 8, 20);
  refused({"chunk", 8, 7});
}
TEST_F(AttentionRefuses, AChunkThatIsNotTheQueries) {
  in_.k = random_.tensor<float>(2, 3, 5, 16);
  in_.v = random_.tensor<float>(2, 3, 5, 20);
  refused({"chunk", 5, "q_len", 7});
}
TEST_F(AttentionRefuses, ChunkAndPastValuesOfTwoDims) {
  in_.v = random_.tensor<float>(2, 3, 7, 21);
  refused({"dim", 21, 20});
}
TEST_F(AttentionRefuses, OutputOfAnotherDim) {
  out_dims_ = {2, 6, 7, 16};
  refused({"out", 16, 20});
}
TEST_F(AttentionRefuses, OutputOfAnotherLength) {
  out_dims_ = {2, 6, 8, 20};
  refused({"out", 8, 7});
}
TEST_F(AttentionRefuses, OutputOfOtherHeads) {
  out_dims_ = {2, 3, 7, 20};
  refused({"out", 3, 6});
}
TEST_F(AttentionRefuses, LseOfAnotherShape) {
  lse_dims_ = {2, 6, 9};
  refused({"lse", 9, 7});
}
TEST_F(AttentionRefuses, ASelectionOfAnotherPast) {
  const Selection keep = random_selection(random_, 2, 3, 38, 7);
  keep_ = &keep;
  refused({"selection", 38, 37});
}
TEST_F(AttentionRefuses, ASelectionOfAnotherBatch) {
  const Selection keep = random_selection(random_, 1, 3, 37, 7);
  keep_ = &keep;
  refused({"selection", 1, 2});
}
TEST_F(AttentionRefuses, ASelectionOfOtherHeads) {
  const Selection keep = Selection::all(2, 6, 37);
  keep_ = &keep;
  refused({"selection", 6, 3});
}
TEST_F(AttentionRefuses, ASelectionOfAPastThatIsNotThere) {
  const Selection keep = random_selection(random_, 2, 3, 37, 7);
  Tensor4<float> out(2, 6, 7, 20);
  const TensorView<const float> past_k(in_.past_k), past_v(in_.past_v);
  expect_refused(
      [&] {
        quoka::attention(in_.q, {past_k.slice(0, 0), past_v.slice(0, 0), keep}, {in_.k, in_.v},
                         out);
      },
      {"selection", 37, 0});
}
TEST_F(AttentionRefuses, ValuesWithoutKeys) {
  Tensor4<float> out(2, 6, 7, 20);
  const TensorView<const float> past_k(in_.past_k), k(in_.k);
  expect_refused(
      [&] {
        quoka::attention(in_.q, {past_k.slice(0, 0), in_.past_v}, {in_.k, in_.v}, out);
      },
      {"past v's len", 37, 0});
  expect_refused(
      [&] {
        quoka::attention(in_.q, {in_.past_k, in_.past_v}, {k.slice(0, 0), in_.v}, out);
      },
      {"chunk v's len", 7, 0});
}
TEST_F(AttentionRefuses, SinksOfAnotherNumber) {
  const std::vector<float> sinks(3);
  options_.sink_logits = sinks;
  refused({"sink_logits", 3, "q_heads", 6});
}
TEST_F(AttentionRefuses, ANegativeWindow) {
  options_.sliding_window = -1;
  refused({"sliding_window", -1, 0});
}
TEST_F(AttentionRefuses, ASoftCapThatIsNoCap) {
  for (const float cap : {-1.0f, infinity, not_a_number}) {
    options_.softcap = cap;
    refused({"softcap", "[1e-30, 1e30]"});
  }
}
TEST_F(AttentionRefuses, AScaleThatIsNotFinite) {
  for (const float scale : {infinity, -infinity, not_a_number}) {
    options_.scale = scale;
    refused({"scale", "[-1e30, 1e30]"});
  }
}
TEST_F(AttentionRefuses, AnLseWithSizesButWithoutMemory) {
  Tensor4<float> out(2, 6, 7, 20);
  out.setConstant(-12345.0f);
  const Tensor4<float> before = out;
  expect_refused(
      [&] {
        quoka::attention(in_.q, {in_.past_k, in_.past_v}, {in_.k, in_.v},
                         {out, TensorView<float, 3>(nullptr, {2, 6, 7}, {42, 7, 1})});
      },
      {"pointer is null"});
  EXPECT_TRUE(same_bits(out, before));
}
TEST_F(AttentionRefuses, AQueryPositionInThePast) {
  options_.query_position = 36;
  refused({"query_position", 36, 37});
}
TEST_F(AttentionRefuses, ANegativeFirstPosition) {
  Tensor4<float> out(2, 6, 7, 20);
  quoka::Past past(in_.past_k, in_.past_v);
  past.first_position = -1;
  expect_refused(
      [&] {
        quoka::attention(in_.q, past, {in_.k, in_.v}, out);
      },
      {"first_position", -1, 0});
}
TEST_F(AttentionRefuses, QueriesAndOutputsThatNeedMoreThanTheirRows) {
  Tensor4<float> out(2, 6, 7, 20);
  out.setConstant(-12345.0f);
  const Tensor4<float> before = out;
  const float scale = 0.5f;
  const auto refused = [&](const Rows& q, const quoka::OutputRows& to,
                           std::initializer_list<Fragment> fragments) {
    expect_refused(
        [&] {
          quoka::attention(q, {in_.past_k, in_.past_v}, {in_.k, in_.v}, to);
        },
        fragments);
    EXPECT_TRUE(same_bits(out, before));
  };
  const Rows q(in_.q);
  const quoka::OutputRows rows(out);
  refused(q.with_scales(&scale, 0), rows, {"q has scales that lie apart"});
  refused(q, rows.with_scales(&scale, 0), {"out has scales that lie apart"});
  refused(Rows(q.data(), q.format(), q.sizes(), q.strides(), 8), rows,
          {"q's step between channels in bytes is", 8, "a step of", 0});
  refused(q, quoka::OutputRows(rows.data(), rows.format(), rows.sizes(), rows.strides(), 12),
          {"out's step between channels in bytes is", 12, "a step of", 0});
}
TEST_F(AttentionRefuses, NoKvHeads) {
  Tensor4<float> out(2, 6, 7, 20);
  expect_refused([&] { quoka::attention(in_.q, {}, {}, out); }, {"q_heads", 6, "kv_heads", 0});
}

// ---- memory that is shared ----------------------------------------------------------------------

// q, k, v, past and out of one head size; `memory` is a copy of everything, to see what was written.
class AttentionSharedMemory : public ::testing::Test {
 protected:
  using View = TensorView<float>;
  static constexpr Shape shape{.q_heads = 2, .kv_heads = 2, .q_len = 7, .kv_len = 37};

  static View view(Tensor4<float>& x) { return x; }

  // Refused for `reason`, and no input has another bit.
  void refused(const quoka::Past& past, const quoka::AttentionOutput& output,
               std::initializer_list<Fragment> reason, const char* file = __builtin_FILE(),
               int line = __builtin_LINE()) {
    const Inputs<float> before = in_;
    expect_refused(
        [&] {
          quoka::attention(in_.q, past, {in_.k, in_.v}, output);
        },
        reason, file, line);
    EXPECT_TRUE(same_bits(in_.q, before.q));
    EXPECT_TRUE(same_bits(in_.k, before.k));
    EXPECT_TRUE(same_bits(in_.v, before.v));
    EXPECT_TRUE(same_bits(in_.past_k, before.past_k));
    EXPECT_TRUE(same_bits(in_.past_v, before.past_v));
  }
  quoka::Past past() const { return {in_.past_k, in_.past_v}; }

  Random random_{110};
  Inputs<float> in_ = random_inputs<float>(random_, shape);
};

TEST_F(AttentionSharedMemory, OutInTheQueriesIsRefused) {
  refused(past(), view(in_.q), {"out shares memory with q"});
}
TEST_F(AttentionSharedMemory, OutInTheChunkIsRefused) {
  refused(past(), view(in_.k), {"out shares memory with the chunk's keys"});
  refused(past(), view(in_.v), {"out shares memory with the chunk's values"});
}
TEST_F(AttentionSharedMemory, OutInThePastIsRefused) {
  refused(past(), view(in_.past_k).slice(30, 7), {"out shares memory with the past's keys"});
  refused(past(), view(in_.past_v).slice(0, 7), {"out shares memory with the past's values"});
}
// One float is enough: the last of one is the first of the other.
TEST_F(AttentionSharedMemory, OutThatOverlapsByOneElementIsRefused) {
  std::vector<float> memory(uz(2 * in_.q.size()), -12345.0f);
  const auto before = memory;
  std::copy_n(in_.q.data(), in_.q.size(), memory.data());
  const View q(memory.data(), {1, 2, 7, 16}, {224, 112, 16, 1});
  for (const Index begin : {in_.q.size() - 1, in_.q.size()}) {
    const View out(memory.data() + begin, {1, 2, 7, 16}, {224, 112, 16, 1});
    const auto call = [&] { quoka::attention(q, past(), {in_.k, in_.v}, out); };
    if (begin < in_.q.size()) {
      expect_refused(call, {"out shares memory with q"});
      EXPECT_EQ(memory.back(), before.back());
    } else {
      EXPECT_NO_THROW(call());
    }
  }
}
TEST_F(AttentionSharedMemory, LseInOutIsRefused) {
  Tensor4<float> out(1, 2, 7, 16);
  out.setConstant(-12345.0f);
  const Tensor4<float> before = out;
  // One float of each row of out.
  refused(past(), {view(out), TensorView<float, 3>(out.data() + 3, {1, 2, 7}, {224, 112, 16})},
          {"lse shares memory with out"});
  EXPECT_TRUE(same_bits(out, before));
}
TEST_F(AttentionSharedMemory, LseInAnInputIsRefused) {
  Tensor4<float> out(1, 2, 7, 16);
  out.setConstant(-12345.0f);
  const Tensor4<float> before = out;
  const auto refused_in = [&](Tensor4<float>& x, const char* name) {
    refused(past(), {view(out), TensorView<float, 3>(x.data(), {1, 2, 7}, {14, 7, 1})},
            {std::string("lse shares memory with ") + name});
  };
  refused_in(in_.q, "q");
  refused_in(in_.k, "the chunk's keys");
  refused_in(in_.v, "the chunk's values");
  refused_in(in_.past_k, "the past's keys");
  refused_in(in_.past_v, "the past's values");
  EXPECT_TRUE(same_bits(out, before));
}
TEST_F(AttentionSharedMemory, AChunkInsideThePastIsRefused) {
  Tensor4<float> out(1, 2, 7, 16);
  out.setConstant(-12345.0f);
  const Tensor4<float> before = out;
  const View k(in_.past_k), v(in_.past_v);
  expect_refused(
      [&] {
        quoka::attention(in_.q, past(), {k.slice(30, 7), in_.v}, out);
      },
      {"chunk's keys lie in the past's"});
  expect_refused(
      [&] {
        quoka::attention(in_.q, past(), {in_.k, v.slice(30, 7)}, out);
      },
      {"chunk's values lie in the past's"});
  EXPECT_TRUE(same_bits(out, before));
}
// An engine appends first and attends then: the past is sliced.
TEST_F(AttentionSharedMemory, AChunkBehindThePastInOneCacheIsTheSame) {
  const View k(in_.past_k), v(in_.past_v);
  Tensor4<float> chunk_k(1, 2, 7, 16), chunk_v(1, 2, 7, 16), past_k(1, 2, 30, 16),
      past_v(1, 2, 30, 16);
  for (Index head = 0; head < 2; ++head)
    for (Index i = 0; i < 37; ++i)
      for (Index c = 0; c < 16; ++c) {
        (i < 30 ? past_k(0, head, i, c) : chunk_k(0, head, i - 30, c)) = in_.past_k(0, head, i, c);
        (i < 30 ? past_v(0, head, i, c) : chunk_v(0, head, i - 30, c)) = in_.past_v(0, head, i, c);
      }
  const auto expected = attend<float>({in_.q, past_k, past_v, chunk_k, chunk_v});
  auto output = unwritten<float>(in_.q, 16);
  quoka::attention(in_.q, {k.slice(0, 30), v.slice(0, 30)}, {k.slice(30, 7), v.slice(30, 7)},
                   {output.out, output.lse});
  expect_same(output, expected);
}
// [len, q | k | v | out, heads, dim]: extents overlap, no byte does.
TEST_F(AttentionSharedMemory, OneFusedBufferIsAccepted) {
  const auto expected = attend(in_);
  constexpr Index heads = 2, dim = 16, token = 4 * heads * dim;
  std::vector<float> memory(uz(7 * token), -12345.0f);
  const auto part = [&](Index which) {
    return View(memory.data() + which * heads * dim, {1, heads, 7, dim},
                {7 * token, dim, token, 1});
  };
  const Tensor4<float>* const from[] = {&in_.q, &in_.k, &in_.v};
  for (Index which = 0; which < 3; ++which)
    for (Index head = 0; head < heads; ++head)
      for (Index i = 0; i < 7; ++i)
        std::copy_n(&(*from[which])(0, head, i, 0), dim, part(which).row(0, head, i));
  quoka::attention(part(0), past(), {part(1), part(2)}, part(3));
  EXPECT_TRUE(same_bits(part(3), expected.out));
  EXPECT_TRUE(same_bits(part(0), in_.q));
  // One head further, and out lies in the next token's queries.
  const View shifted(memory.data() + 3 * heads * dim + dim, {1, heads, 6, dim},
                     {6 * token, dim, token, 1});
  expect_refused(
      [&] {
        quoka::attention(part(0).slice(1, 6), past(), {part(1).slice(1, 6), part(2).slice(1, 6)},
                         shifted);
      },
      {"out shares memory with q"});
}
// Rows in the order of memory backwards are found, too.
TEST_F(AttentionSharedMemory, ANegativeStrideIsFollowed) {
  const View backwards(&in_.q(0, 0, 6, 0), {1, 2, 7, 16}, {224, 112, -16, 1});
  refused(past(), backwards, {"out shares memory with q"});
}
// Keys and values may be the same memory (MLA), and so may the keys of all heads.
TEST_F(AttentionSharedMemory, InputsMayShareMemoryWithEachOther) {
  Tensor4<float> out(1, 2, 7, 16);
  EXPECT_NO_THROW(quoka::attention(in_.q, {in_.past_k, in_.past_k}, {in_.k, in_.k}, out));
}

}  // namespace
