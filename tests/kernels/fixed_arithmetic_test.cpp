// kernels/fixed_panels.hpp: attention in 16-bit fixed point, against the oracle, with the same
// kernels wherever the tests run: with plain integers, and with the ISA's instructions where there
// are any.
//
// Errors are relative to the largest |value|: an output is a mean of values. bench/README.md has
// them relative to the largest output.

#include <quoka/select/quoka.hpp>

#include "kernels/arithmetic_fixtures.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace {

using namespace quoka_test;
using quoka::Arithmetic;
namespace simd = quoka::simd;
namespace tuning = quoka::tuning;
using simd::Int16Pair;

// simd::PairSums is the ISA's own or, where it has none, PlainPairSums.
template <class T, class Sums = simd::PairSums>
Output<T> attend_in_fixed(const Inputs<T>& in, const AttentionOptions& options = {},
                          const Selection* keep = nullptr,
                          ExecutorRef executor = SerialExecutor{}) {
  return attend_with(quoka::detail::fixed_panels<Sums>(), in, options, keep, executor);
}

// Of the largest |value|, each element; of the whole, Frobenius, beside the rounding of the output;
// of the log-sum-exp. For normal queries, keys and values: bench/README.md has what is measured.
constexpr double element_error = 2e-4, whole_error = 4e-4, lse_error = 4e-4;

template <class T>
void expect_near(const Output<T>& output, const oracle::AttentionResult& expected,
                 const Inputs<T>& in, double factor = 1.0) {
  const double value = std::max(largest(in.past_v), largest(in.v));
  EXPECT_TRUE(elements_close(output.out, expected.out, factor * element_error * value));
  EXPECT_TRUE(lse_close(output.lse, expected.lse, factor * lse_error));
  EXPECT_LE(oracle::relative_error(to_oracle(output.out), expected.out),
            factor * (whole_error + rounding_error<T>));
}

template <class T>
void expect_near_oracle(const Inputs<T>& in, const AttentionOptions& options = {},
                        const Selection* keep = nullptr, double factor = 1.0) {
  expect_near(attend_in_fixed(in, options, keep), oracle_attend(in, options, keep), in, factor);
}

// ---- the option ---------------------------------------------------------------------------------

TEST(FixedArithmetic, SaysWhatItComesTo) {
  EXPECT_EQ(quoka::arithmetic_used(Arithmetic::single), Arithmetic::single);
  EXPECT_EQ(quoka::arithmetic_used(Arithmetic::fixed16),
            simd::has_pair_sums ? Arithmetic::fixed16 : Arithmetic::single);
  EXPECT_NE(Arithmetic::fixed16, Arithmetic::single);
  EXPECT_STREQ(Arithmetic::single.name(), "single");
  EXPECT_STREQ(Arithmetic::fixed16.name(), "fixed16");
}

// Float where there are no instructions for it, to the last bit; fixed point where there are.
TEST(FixedArithmetic, TheOptionDoesWhatItSays) {
  Random random(1);
  const auto in =
      random_inputs<float>(random, {.q_heads = 4, .kv_heads = 2, .q_len = 37, .kv_len = 501});
  const Selection keep = random_selection(random, 1, 2, 501, 127);
  for (const Selection* kept : {static_cast<const Selection*>(nullptr), &keep}) {
    const auto asked = attend(in, {.arithmetic = Arithmetic::fixed16}, kept);
    if (quoka::arithmetic_used(Arithmetic::fixed16) == Arithmetic::fixed16)
      expect_same(asked, attend_in_fixed(in, {}, kept));
    else
      expect_same(asked, attend(in, {}, kept));
  }
}

TEST(FixedArithmetic, OneTokenIsInFloat) {
  Random random(2);
  const auto in =
      random_inputs<float>(random, {.q_heads = 3, .kv_heads = 3, .q_len = 1, .kv_len = 501});
  expect_same(attend_in_fixed(in), attend(in));
}

// Equal weights and equal values: their product is as large as integers hold, if the norm of the values is
// right. It is not where squares are denormals.
TEST(FixedArithmetic, ValuesWhoseSquaresAreDenormalsDoNotOverflow) {
  Random random(9);
  for (const float value : {1.6e-22f, 2.6e-22f, 1e-21f, 1e-15f, 1e-3f}) {
    auto in =
        random_inputs<float>(random, {.q_heads = 4, .kv_heads = 2, .q_len = 37, .kv_len = 501});
    in.q.setZero();
    in.past_v.setConstant(value), in.v.setConstant(value);
    const auto output = attend_in_fixed(in);
    for (Index i = 0; i < output.out.size(); ++i)
      ASSERT_NEAR(static_cast<double>(output.out.data()[i] / value), 1.0, 1e-3) << value;
  }
}

// ---- the packets --------------------------------------------------------------------------------

struct IntegerPacket {
  alignas(64) Int16Pair pairs[simd::lanes];
  std::int64_t low(int i) const { return static_cast<std::int16_t>(pairs[i].bits & 0xffff); }
  std::int64_t high(int i) const { return static_cast<std::int16_t>(pairs[i].bits >> 16); }
};

// Modulo 2^32, extremes among them: a sum may leave 32 bits on its way as long as it comes back.
template <class Sums>
void expect_exact_sums() {
  Random random(3);
  const auto draw = [&] {
    const std::uint64_t bits = random.bits();
    return bits % 3 == 0 ? std::int16_t{-32768} : static_cast<std::int16_t>(bits >> 20);
  };
  for (int round = 0; round < 1000; ++round) {
    std::int64_t expected[simd::lanes] = {};
    Sums sums = Sums::zero();
    for (int steps = 0; steps < 5; ++steps) {
      IntegerPacket a, b;
      for (int i = 0; i < simd::lanes; ++i) {
        a.pairs[i] = simd::pair_of(draw(), draw()), b.pairs[i] = simd::pair_of(draw(), draw());
        expected[i] += a.low(i) * b.low(i) + a.high(i) * b.high(i);
      }
      sums = fma(Sums::load(a.pairs), Sums::load(b.pairs), sums);
    }
    alignas(64) float got[simd::lanes];
    simd::store(got, sums.to_float());
    for (int i = 0; i < simd::lanes; ++i)
      EXPECT_EQ(got[i], static_cast<float>(static_cast<std::int32_t>(
                            static_cast<std::uint32_t>(static_cast<std::uint64_t>(expected[i])))));
  }
}
TEST(FixedArithmetic, SumsOfProductsAreExact) {
  expect_exact_sums<simd::PairSums>();
  expect_exact_sums<simd::PlainPairSums>();
}

TEST(FixedArithmetic, APairFillsAPacket) {
  IntegerPacket ones;
  std::fill_n(ones.pairs, simd::lanes, simd::pair_of(1, 1));
  alignas(64) float got[simd::lanes];
  for (const auto& [low, high] : {std::pair<int, int>{1, 2}, {-32768, 32767}, {-1, 0}, {0, -5}}) {
    const auto pair =
        simd::pair_of(static_cast<std::int16_t>(low), static_cast<std::int16_t>(high));
    simd::store(got, fma(simd::PairSums::broadcast(pair), simd::PairSums::load(ones.pairs),
                         simd::PairSums::zero())
                         .to_float());
    for (const float x : got) EXPECT_EQ(x, static_cast<float>(low + high));
  }
}

TEST(FixedArithmetic, FloatsArePairedUpRounded) {
  const std::pair<float, int> cases[] = {{0.5f, 0},         {1.5f, 2},         {-2.5f, -2},
                                         {-0.75f, -1},      {32766.6f, 32767}, {-32767.4f, -32767},
                                         {not_a_number, 0}, {0x1p-18f, 0}};
  for (const auto& [a, low] : cases)
    for (const auto& [b, high] : cases) {
      IntegerPacket got;
      simd::store_pairs(got.pairs, simd::broadcast(a), simd::broadcast(b));
      for (int i = 0; i < simd::lanes; ++i) {
        EXPECT_EQ(got.low(i), low) << a;
        EXPECT_EQ(got.high(i), high) << b;
      }
    }
}

TEST(FixedArithmetic, ExponentialsAreScaledIntegers) {
  constexpr int bits = 14;
  double most = 0.0;
  for (float x = -20.0f; x <= 0.0f; x += 0x1p-12f) {
    const double exact = std::exp(static_cast<double>(x)) * 0x1p14;
    const auto lane = simd::exp_scaled<bits>(simd::broadcast(x));
    alignas(64) float packet[simd::lanes];
    simd::store(packet, lane);
    EXPECT_LE(packet[0], 0x1p14f);
    if (x >= -(bits + 2) * 0.6931472f)
      most = std::max(most, std::abs(static_cast<double>(packet[0]) / exact - 1));
    else
      EXPECT_LT(packet[0], 0.25f);
  }
  EXPECT_LE(most, static_cast<double>(simd::exp_scaled_max_error));
  EXPECT_EQ(simd::exp_scaled<bits>(0.0f), 0x1p14f);
  EXPECT_LT(simd::exp_scaled<bits>(-infinity), 0.25f);
  EXPECT_TRUE(std::isnan(simd::exp_scaled<bits>(not_a_number)));
}

// What is tested below with the ISA's instructions holds for plain integers, and the other way
// round.
TEST(FixedArithmetic, PlainIntegersGiveTheSameBits) {
  Random random(5);
  for (const Index dim : {64, 100}) {
    const auto in = random_inputs<float>(
        random, {.q_heads = 4, .head_dim = dim, .v_dim = 37, .q_len = 37, .kv_len = 501});
    expect_same(attend_in_fixed(in), attend_in_fixed<float, simd::PlainPairSums>(in));
  }
}

// ---- shapes -------------------------------------------------------------------------------------

TEST(FixedAttention, EveryHeadDim) {
  for_each_storage([]<class T>() {
    Random random(10);
    for (const Index dim : {1, 3, 15, 16, 17, 64, 80, 100, 128, 192}) {
      SCOPED_TRACE("head_dim " + std::to_string(dim));
      expect_near_oracle(random_inputs<T>(
          random, {.q_heads = 3, .head_dim = dim, .v_dim = dim, .q_len = 37, .kv_len = 127}));
    }
  });
}

TEST(FixedAttention, ValueDimMayDifferFromHeadDim) {
  Random random(11);
  for (const auto& [dim, v_dim] : {std::pair<Index, Index>{192, 128}, {37, 1}, {1, 37}}) {
    SCOPED_TRACE("head_dim " + std::to_string(dim) + ", v_dim " + std::to_string(v_dim));
    expect_near_oracle(random_inputs<Element>(
        random, {.q_heads = 2, .head_dim = dim, .v_dim = v_dim, .q_len = 37, .kv_len = 127}));
  }
}

TEST(FixedAttention, EveryGroupAndBatch) {
  Random random(12);
  for (const Index group : {1, 4, 7}) {
    SCOPED_TRACE("group " + std::to_string(group));
    expect_near_oracle(random_inputs<Element>(
        random, {.batch = 2, .q_heads = 2 * group, .kv_heads = 2, .q_len = 19, .kv_len = 127}));
  }
}

TEST(FixedAttention, KeysAroundATileAndABlock) {
  Random random(13);
  for (const Index border :
       {Index{tuning::tile_rows}, Index{tuning::block_keys}, Index{2 * tuning::block_keys}})
    for (Index keys = border - 1; keys <= border + 1; ++keys) {
      SCOPED_TRACE(std::to_string(keys) + " keys");
      expect_near_oracle(
          random_inputs<Element>(random, {.q_heads = 9, .q_len = 5, .kv_len = keys - 5}));
    }
}

TEST(FixedAttention, RowsAroundAPanel) {
  Random random(14);
  constexpr Index panel = tuning::panel_rows;
  for (const Index panels : {1, 2})
    for (Index rows = panels * panel - 1; rows <= panels * panel + 1; ++rows) {
      SCOPED_TRACE(std::to_string(rows) + " rows");
      expect_near_oracle(random_inputs<Element>(random, {.q_heads = 1, .q_len = rows}));
    }
}

// Fewer rows than a task is worth: cut over the keys, and merged.
TEST(FixedAttention, AFewRowsOverManyKeys) {
  Random random(15);
  expect_near_oracle(random_inputs<Element>(random, {.q_heads = 3, .q_len = 7, .kv_len = 2003}));
}

TEST(FixedAttention, SelectedPast) {
  Random random(16);
  const auto in = random_inputs<Element>(
      random,
      {.q_heads = 8, .kv_heads = 2, .head_dim = 64, .v_dim = 64, .q_len = 37, .kv_len = 501});
  for (const Index count : {1, 37, 113, 500}) {
    SCOPED_TRACE("count " + std::to_string(count));
    const Selection keep = random_selection(random, 1, 2, 501, count);
    expect_near_oracle(in, {}, &keep);
  }
}

TEST(FixedAttention, AllSelectedIsNoSelectionBitForBit) {
  Random random(17);
  const auto in =
      random_inputs<Element>(random, {.q_heads = 4, .kv_heads = 2, .q_len = 37, .kv_len = 127});
  const Selection all = to_selection(oracle::all_positions(1, 2, 127), 127);
  expect_same(attend_in_fixed(in, {}, &all), attend_in_fixed(in));
}

// ---- options ------------------------------------------------------------------------------------

TEST(FixedAttention, ScaleSoftCapSinksAndWindow) {
  Random random(20);
  const auto in =
      random_inputs<Element>(random, {.q_heads = 4, .kv_heads = 2, .q_len = 37, .kv_len = 301});
  const std::vector<float> sinks{-3.0f, 0.0f, 2.5f, 8.0f};
  expect_near_oracle(in, {.scale = 0.5f}, nullptr, 2.0);
  expect_near_oracle(in, {.scale = -0.25f});
  expect_near_oracle(in, {.scale = 2.0f, .softcap = 5.0f}, nullptr, 4.0);
  expect_near_oracle(in, {.sink_logits = sinks});
  expect_near_oracle(in, {.sliding_window = 29}, nullptr, 2.0);
}

TEST(FixedAttention, ThreadsDoNotChangeABit) {
  Random random(21);
  const auto in =
      random_inputs<Element>(random, {.q_heads = 10, .kv_heads = 2, .q_len = 71, .kv_len = 301});
  const auto serial = attend_in_fixed(in);
  for (const int workers : {1, 2, 3}) {
    quoka::ThreadPool pool(workers);
    expect_same(attend_in_fixed(in, {}, nullptr, pool), serial);
  }
}

// ---- what a row does not see --------------------------------------------------------------------

TEST(FixedAttention, AKeyReachesOnlyItsOwnAndLaterRows) {
  Random random(30);
  const auto in = random_inputs<Element>(random, {.q_heads = 3, .q_len = 37, .kv_len = 101});
  const auto before = attend_in_fixed(in);
  for (const Index j : {0, 10, 36}) {
    auto changed = in;
    for (Index c = 0; c < 16; ++c) changed.k(0, 0, j, c) = stored<Element>(30.0);
    const auto after = attend_in_fixed(changed);
    for (Index head = 0; head < 3; ++head)
      for (Index i = 0; i < 37; ++i)
        EXPECT_EQ(same_row(before, after, 0, head, i), i < j)
            << "key " << j << ", head " << head << ", row " << i;
  }
}

// A value has a part in the scale of its channel, so earlier rows may change, by their error.
TEST(FixedAttention, AValueReachesOnlyItsOwnAndLaterRows) {
  Random random(31);
  auto in = random_inputs<Element>(random, {.q_heads = 3, .q_len = 37, .kv_len = 101});
  for (Index c = 0; c < 16; ++c) in.v(0, 0, 11, c) = stored<Element>(30.0);
  expect_near_oracle(in);
}

// `spoilt` rows are NaN, the others near the oracle's of `clean`.
template <class T, class F>
void expect_others_near(const Output<T>& output, const Inputs<T>& clean, F&& spoilt) {
  const auto expected = oracle_attend(clean);
  Output<T> others = output;
  const double value = std::max(largest(clean.past_v), largest(clean.v));
  for (Index head = 0; head < output.out.dimension(1); ++head)
    for (Index i = 0; i < output.out.dimension(2); ++i)
      for (Index c = 0; c < output.out.dimension(3); ++c)
        if (spoilt(i)) {
          EXPECT_TRUE(std::isnan(static_cast<float>(output.out(0, head, i, c)))) << i;
          others.out(0, head, i, c) =
              static_cast<T>(static_cast<float>(expected.out.at(0, head, i, c)));
        }
  EXPECT_TRUE(elements_close(others.out, expected.out, element_error * value));
}

TEST(FixedAttention, NaNSpoilsTheRowsThatSeeIt) {
  Random random(32);
  const auto in = random_inputs<Element>(random, {.q_heads = 3, .q_len = 37, .kv_len = 101});
  const auto clean = attend_in_fixed(in);
  for (const Index j : {0, 11, 36}) {
    auto key = in, value = in, query = in;
    key.k(0, 0, j, 3) = stored<Element>(std::nan(""));
    expect_spoilt(attend_in_fixed(key), clean, [&](Index, Index, Index i) { return i >= j; });
    query.q(0, 1, j, 7) = stored<Element>(std::nan(""));
    expect_spoilt(attend_in_fixed(query), clean,
                  [&](Index, Index head, Index i) { return head == 1 && i == j; });
    for (Index c = 0; c < 16; ++c) value.v(0, 0, j, c) = stored<Element>(std::nan(""));
    const auto output = attend_in_fixed(value);
    EXPECT_TRUE(same_bits(output.lse, clean.lse));
    expect_others_near(output, in, [&](Index i) { return i >= j; });
  }
}

TEST(FixedAttention, NaNInThePastSpoilsOnlyRowsWhoseWindowReachesIt) {
  Random random(33);
  const auto in = random_inputs<Element>(random, {.q_heads = 3, .q_len = 37, .kv_len = 127});
  const AttentionOptions options{.sliding_window = 30};
  const auto clean = attend_in_fixed(in, options);
  for (const Index t : {98, 111, 112, 126}) {
    auto spoilt = in;
    spoilt.past_k(0, 0, t, 5) = stored<Element>(std::nan(""));
    expect_spoilt(attend_in_fixed(spoilt, options), clean,
                  [&](Index, Index, Index i) { return 127 + i - t < 30; });
  }
}

// ---- masks --------------------------------------------------------------------------------------

TEST(FixedAttention, MasksAndAlibi) {
  Random random(35);
  const std::vector<float> slopes{0.5f, 0.125f, 0.03125f, 0.0f}, factors{0.5f, -1.0f, 0.0f, 2.0f};
  for (const Index q_len : {5, 40}) {
    const auto in = random_inputs<Element>(
        random,
        {.q_heads = 4, .kv_heads = 2, .head_dim = 64, .v_dim = 64, .q_len = q_len, .kv_len = 150});
    const Selection keep = random_selection(random, 1, 2, 150, 70);
    const RandomMask mask(random, q_len, 150 + q_len);
    for (AttentionOptions options : {AttentionOptions{}, AttentionOptions{.causal = false},
                                     AttentionOptions{.sliding_window = 50, .alibi_slopes = slopes},
                                     AttentionOptions{.softcap = 1.0f, .mask_factors = factors}}) {
      const oracle::AttentionOptions exact = mask.with(options);
      expect_near(attend_in_fixed(in, options), oracle_result(in, exact), in, 2.0);
      expect_near(attend_in_fixed(in, options, &keep), oracle_result(in, exact, &keep), in, 2.0);
    }
  }
}

// A key that integers cannot hold, a value that they cannot: only for rows that see it.
TEST(FixedAttention, NaNThatAMaskHidesIsNotThere) {
  Random random(36);
  const auto in = random_inputs<Element>(random, {.q_heads = 3, .q_len = 37, .kv_len = 101});
  const RandomMask mask(random, 37, 138);
  AttentionOptions options;
  const auto expected = oracle_result(in, mask.with(options));
  const auto clean = attend_in_fixed(in, options);
  const double value = std::max(largest(in.past_v), largest(in.v));
  for (const Index t : {20, 100, 101, 120, 137}) {
    const auto sees = [&](Index, Index, Index i) {
      return mask.added(0, 0, i, t) > -infinity && t - 101 <= i;
    };
    auto spoilt = in;
    const bool past = t < 101;
    (past ? spoilt.past_k : spoilt.k)(0, 0, past ? t : t - 101, 5) = stored<Element>(std::nan(""));
    expect_spoilt(attend_in_fixed(spoilt, options), clean, sees);
    spoilt = in;
    for (Index c = 0; c < 16; ++c)
      (past ? spoilt.past_v : spoilt.v)(0, 0, past ? t : t - 101, c) =
          stored<Element>(std::nan(""));
    const auto output = attend_in_fixed(spoilt, options);
    EXPECT_TRUE(same_bits(output.lse, clean.lse));
    for (Index head = 0; head < 3; ++head)
      for (Index i = 0; i < 37; ++i)
        for (Index c = 0; c < 16; ++c) {
          const auto x = static_cast<double>(static_cast<float>(output.out(0, head, i, c)));
          if (sees(0, head, i))
            EXPECT_TRUE(std::isnan(x)) << t << ", " << i;
          else
            EXPECT_NEAR(x, expected.out.at(0, head, i, c),
                        (2 * element_error + 2 * rounding_error<Element>)*value)
                << t << ", " << i;
        }
  }
}

// Padding behind the chunk: whatever its memory holds costs the values of its block nothing.
TEST(FixedAttention, ChunkKeysThatAMaskHidesFromAllCostNothing) {
  Random random(37);
  for (const auto& [begin, end] :
       {std::pair<Index, Index>{0, 0}, {0, 1}, {0, 30}, {5, 12}}) {  // what is seen of the chunk
    std::vector<Index> hidden;
    for (Index j = 0; j < 37; ++j)
      if (j < begin || j >= end) hidden.push_back(j);
    const auto in = random_inputs<Element>(random, {.q_heads = 3, .q_len = 37, .kv_len = 101});
    RandomMask mask(random, 37, 138);
    for (Index i = 0; i < 37; ++i)
      for (const Index j : hidden) mask.added(0, 0, i, 101 + j) = -infinity;
    AttentionOptions options{.causal = false};
    const oracle::AttentionOptions exact = mask.with(options);
    const auto clean = attend_in_fixed(in, options);
    expect_near(clean, oracle_result(in, exact), in, 2.0);
    for (const float with : {1e4f, infinity, not_a_number}) {
      auto spoilt = in;
      for (const Index j : hidden)
        for (Index c = 0; c < 16; ++c)
          spoilt.k(0, 0, j, c) = spoilt.v(0, 0, j, c) = static_cast<Element>(with);
      expect_same(attend_in_fixed(spoilt, options), clean);
    }
  }
}

TEST(FixedAttention, OneNaNChannelOfAValueSpoilsThatChannelAlone) {
  for_each_storage([]<class T>() {
    Random random(34);
    auto in = random_inputs<T>(random, {.q_len = 37, .kv_len = 101});
    const auto clean = attend_in_fixed(in);
    in.v(0, 0, 20, 5) = stored<T>(std::nan(""));
    const auto output = attend_in_fixed(in);
    for (Index head = 0; head < 2; ++head)
      for (Index i = 0; i < 37; ++i)
        for (Index c = 0; c < 16; ++c) {
          const bool nan = std::isnan(static_cast<float>(output.out(0, head, i, c)));
          EXPECT_EQ(nan, i >= 20 && c == 5) << i << ", " << c;
          EXPECT_TRUE(c == 5 || output.out(0, head, i, c) == clean.out(0, head, i, c));
        }
  });
}

TEST(FixedAttention, NaNUnderASoftCapIsStillNaN) {
  Random random(35);
  auto in = random_inputs<Element>(random, {.q_len = 37, .kv_len = 101});
  const AttentionOptions options{.softcap = 20.0f};
  const auto clean = attend_in_fixed(in, options);
  in.k(0, 0, 20, 3) = stored<Element>(std::nan(""));
  expect_spoilt(attend_in_fixed(in, options), clean, [](Index, Index, Index i) { return i >= 20; });
}

// A logit of plus infinity has no softmax; one of minus infinity has the weight 0.
TEST(FixedAttention, InfinityInAKeyIsALogitOfItsSign) {
  Random random(36);
  auto in = random_inputs<Element>(random, {.q_heads = 1, .q_len = 37, .kv_len = 101});
  in.past_k(0, 0, 50, 3) = stored<Element>(HUGE_VAL);
  const auto output = attend_in_fixed(in), in_float = attend(in);
  for (Index i = 0; i < 37; ++i) {
    EXPECT_EQ(row_is_nan(output, 0, 0, i), row_is_nan(in_float, 0, 0, i)) << i;
    if (row_is_nan(output, 0, 0, i)) continue;
    EXPECT_NEAR(output.lse(0, 0, i), in_float.lse(0, 0, i), lse_error) << i;
  }
}

TEST(FixedAttention, InfinityInAValueReachesTheRowsThatSeeIt) {
  Random random(37);
  auto in = random_inputs<Element>(random, {.q_heads = 2, .q_len = 37, .kv_len = 101});
  const auto expected = oracle_attend(in);
  const double bound = element_error * std::max(largest(in.past_v), largest(in.v)) + 1e-2;
  for (Index c = 0; c < 16; ++c) in.v(0, 0, 20, c) = stored<Element>(-HUGE_VAL);
  const auto output = attend_in_fixed(in);
  for (Index head = 0; head < 2; ++head)
    for (Index i = 0; i < 37; ++i)
      for (Index c = 0; c < 16; ++c) {
        const double x = static_cast<double>(static_cast<float>(output.out(0, head, i, c)));
        if (i >= 20)
          EXPECT_EQ(x, -HUGE_VAL);
        else
          EXPECT_NEAR(x, expected.out.at(0, head, i, c), bound);
      }
}

// ---- the range of 16 bits -----------------------------------------------------------------------

// A channel of the keys a thousand times the others, as post-RoPE keys have it, though not so
// large; the queries all but ignore it.
TEST(FixedAttention, AHugeChannelOfTheKeys) {
  Random random(40);
  auto in = random_inputs<Element>(
      random, {.q_heads = 3, .head_dim = 64, .v_dim = 64, .q_len = 37, .kv_len = 301});
  for (auto* k : {&in.past_k, &in.k})
    for (Index t = 0; t < k->dimension(2); ++t)
      (*k)(0, 0, t, 5) = stored<Element>(50.0 + static_cast<double>(t % 7));
  for (Index head = 0; head < 3; ++head)
    for (Index i = 0; i < 37; ++i)
      in.q(0, head, i, 5) = static_cast<Element>(static_cast<float>(in.q(0, head, i, 5)) * 0.02f);
  expect_near_oracle(in, {}, nullptr, 8.0);
}

// Each channel of the values has a scale of its own.
TEST(FixedAttentionRange, AHugeChannelOfTheValuesCostsTheOthersNothing) {
  Random random(41);
  auto in = random_inputs<float>(random, {.q_heads = 3, .v_dim = 17, .q_len = 37, .kv_len = 301});
  const auto plain = attend_in_fixed(in);
  for (auto* v : {&in.past_v, &in.v})
    for (Index t = 0; t < v->dimension(2); ++t) (*v)(0, 0, t, 5) *= 0x1p20f;
  const auto output = attend_in_fixed(in);
  for (Index i = 0; i < 37; ++i)
    for (Index c = 0; c < 17; ++c)
      EXPECT_EQ(output.out(0, 1, i, c), plain.out(0, 1, i, c) * (c == 5 ? 0x1p20f : 1.0f));
}

// And so has each key: one that is huge leaves the others' bits alone.
TEST(FixedAttentionRange, AHugeKeyCostsTheOthersNothing) {
  Random random(42);
  auto in = random_inputs<float>(random, {.q_heads = 3, .q_len = 37, .kv_len = 301});
  for (Index c = 0; c < 16; ++c) in.past_k(0, 0, 100, c) = c == 3 ? 1e4f : 0.0f;
  for (Index i = 0; i < in.q.size(); i += 1)
    if (i % 16 == 3) in.q.data()[i] = -std::abs(in.q.data()[i]);  // of no weight
  expect_near_oracle(in);
}

// A block's weights are relative to its own maximum, so 4,480 keys that have 2^-16 of the first one's
// weight each are not lost.
TEST(FixedAttentionRange, ManySmallWeightsAreNotLost) {
  Random random(43);
  auto in = random_inputs<float>(
      random, {.q_heads = 1, .q_len = 37, .kv_len = 41 * tuning::block_keys}, false);
  in.q.setConstant(0.25f);
  for (Index c = 0; c < 16; ++c) {
    in.past_k(0, 0, 0, c) = 11.0f;
    for (Index t = 1; t < tuning::block_keys; ++t) in.past_k(0, 0, t, c) = -11.0f;
  }
  expect_near_oracle(in, {.query_position = 41 * tuning::block_keys});
}

// The largest sums there can be: all vectors parallel, all weights equal, and the largest element
// the same everywhere or all of the norm.
TEST(FixedAttentionRange, TheLargestSumsDoNotOverflow) {
  Random random(44);
  for (const Index dim : {1, 2, 37, 256, 1024}) {
    SCOPED_TRACE("head_dim " + std::to_string(dim));
    auto in = random_inputs<float>(
        random, {.q_heads = 3, .head_dim = dim, .v_dim = 37, .q_len = 37, .kv_len = 301});
    for (const bool spike : {false, true})
      for (const float sign : {1.0f, -1.0f}) {
        for (auto* x : {&in.q, &in.past_k, &in.k})
          for (Index i = 0; i < x->size(); ++i)
            x->data()[i] = spike && i % dim != 0 ? 0.0f : std::nextafter(2.0f, 0.0f);
        for (auto* x : {&in.past_v, &in.v}) x->setConstant(std::nextafter(4.0f, 0.0f));
        const float scale = sign / static_cast<float>(spike ? 1 : dim);
        const auto output = attend_in_fixed(in, {.scale = scale});
        for (Index i = 0; i < output.out.size(); ++i)
          EXPECT_NEAR(output.out.data()[i], 4.0f, 2e-3f);
        for (Index i = 0; i < 37; ++i)
          EXPECT_NEAR(output.lse(0, 0, i), 4.0f * sign + std::log(static_cast<float>(301 + i + 1)),
                      1e-3f);
      }
  }
}

// Random signs, but queries, keys and values along one direction each.
TEST(FixedAttentionRange, ParallelVectorsDoNotOverflow) {
  Random random(45);
  auto in = random_inputs<float>(
      random, {.q_heads = 3, .head_dim = 256, .v_dim = 64, .q_len = 37, .kv_len = 301});
  const auto direction = random.tensor<float>(1, 1, 1, 256);
  for (auto* x : {&in.q, &in.past_k, &in.k})
    for (Index i = 0; i < x->size(); ++i) x->data()[i] = direction.data()[i % 256];
  expect_near_oracle(in, {.scale = 0.01f});
}

// Norms beyond what is scaled: in float then, and of all sizes in one block.
TEST(FixedAttentionRange, LargeAndSmallKeysAndQueries) {
  Random random(46);
  for (const float size : {0x1p60f, 0x1p-60f}) {
    auto in = random_inputs<float>(
        random, {.q_heads = 3, .head_dim = 64, .v_dim = 64, .q_len = 37, .kv_len = 301});
    for (auto* x : {&in.past_k, &in.k})
      for (Index i = 0; i < x->size(); ++i) x->data()[i] *= size;
    for (Index i = 0; i < in.q.size(); ++i) in.q.data()[i] /= size;
    expect_near_oracle(in);
    auto one = in;
    for (Index c = 0; c < 64; ++c) one.past_k(0, 0, 17, c) = 0.0f;
    one.q.setZero();
    expect_near_oracle(one);
  }
}

TEST(FixedAttentionRange, LargeAndSmallValues) {
  Random random(47);
  const auto in = random_inputs<float>(random, {.q_heads = 3, .q_len = 37, .kv_len = 301});
  const auto plain = attend_in_fixed(in);
  for (const float factor : {0x1p40f, 0x1p-40f}) {  // scaled exactly
    auto other = in;
    for (auto* x : {&other.past_v, &other.v})
      for (Index i = 0; i < x->size(); ++i) x->data()[i] *= factor;
    const auto scaled = attend_in_fixed(other);
    for (Index i = 0; i < plain.out.size(); ++i)
      EXPECT_EQ(scaled.out.data()[i], plain.out.data()[i] * factor);
  }
  for (const float factor : {0x1p100f, 0x1p-100f}) {  // in float
    auto other = in;
    for (auto* x : {&other.past_v, &other.v})
      for (Index i = 0; i < x->size(); ++i) x->data()[i] *= factor;
    expect_near_oracle(other);
  }
}

// Products of the largest floats are beyond float, too: logits of plus and minus infinity, as in
// float, and a zero query is still one.
TEST(FixedAttentionRange, AZeroQueryAmongTheLargestKeysIsTheMean) {
  Random random(48);
  auto in = random_inputs<float>(random, {.q_heads = 3, .q_len = 37, .kv_len = 301});
  for (auto* x : {&in.past_k, &in.k})
    for (Index i = 0; i < x->size(); ++i) x->data()[i] *= 1e37f;
  in.q.setZero();
  expect_near_oracle(in);
}

TEST(FixedAttentionRange, ZeroKeysAndValues) {
  Random random(49);
  auto in = random_inputs<float>(random, {.q_heads = 3, .q_len = 37, .kv_len = 301});
  for (auto* x : {&in.past_k, &in.k, &in.past_v, &in.v}) x->setZero();
  const auto output = attend_in_fixed(in);
  for (Index i = 0; i < output.out.size(); ++i) EXPECT_EQ(output.out.data()[i], 0.0f);
  EXPECT_NEAR(output.lse(0, 0, 0), std::log(302.0f), 1e-5f);
}

// One key far above the others is the answer, to the precision of a value.
TEST(FixedAttentionRange, AKeyFarAboveTheOthersIsTheAnswer) {
  Random random(50);
  auto in = random_inputs<float>(random, {.q_heads = 2, .q_len = 37, .kv_len = 501});
  for (Index i = 0; i < in.q.size(); ++i) in.q.data()[i] = in.q.data()[i % 16];
  for (Index c = 0; c < 16; ++c) in.past_k(0, 0, 300, c) = in.q(0, 0, 0, c) * 30.0f;
  const auto output = attend_in_fixed(in, {.scale = 1.0f});
  for (Index i = 0; i < 37; ++i)
    for (Index c = 0; c < 16; ++c)
      EXPECT_NEAR(output.out(0, 1, i, c), in.past_v(0, 0, 300, c),
                  element_error * largest(in.past_v));
}

// Errors of such logits are larger than one, so that weights mean nothing: rows are means of values
// still.
TEST(FixedAttentionRange, HugeLogitsStayFinite) {
  Random random(51);
  const auto in = random_inputs<float>(random, {.q_len = 37, .kv_len = 501});
  const double value = std::max(largest(in.past_v), largest(in.v));
  for (const float scale : {1e4f, -1e4f, 1e30f}) {
    const auto output = attend_in_fixed(in, {.scale = scale});
    EXPECT_LE(largest(output.out), value * (1 + 1e-4));
    for (Index i = 0; i < output.out.size(); ++i) EXPECT_TRUE(std::isfinite(output.out.data()[i]));
  }
}

// ---- where the error is larger: the bounds at the declaration of Arithmetic::fixed16 --------------

// The largest |error| over the largest |output|.
template <class T>
double output_error(const Output<T>& output, const oracle::AttentionResult& exact) {
  const oracle::Tensor got = to_oracle(output.out);
  double most = 0.0, error = 0.0;
  for (std::size_t i = 0; i < got.data.size(); ++i) {
    most = std::max(most, std::abs(exact.out.data[i]));
    error = std::max(error, std::abs(got.data[i] - exact.out.data[i]));
  }
  return error / most;
}

// Channel 0 is 1 in every query and 0 in every key but key 0, whose logit it is; the others' logits
// are normal.
Inputs<float> with_a_sink(Random& random, Index kv_len, double logit) {
  constexpr Index dim = 64;
  auto in = random_inputs<float>(
      random, {.q_heads = 4, .head_dim = dim, .v_dim = dim, .q_len = 32, .kv_len = kv_len});
  for (Index i = 0; i < in.q.size(); i += dim) in.q.data()[i] = 1.0f;
  for (auto* k : {&in.past_k, &in.k})
    for (Index i = 0; i < k->size(); i += dim) k->data()[i] = 0.0f;
  for (Index c = 0; c < dim; ++c) {
    in.past_k(0, 0, 0, c) = c == 0 ? static_cast<float>(logit * std::sqrt(64.0)) : 0.0f;
    in.past_v(0, 0, 0, c) *= 0.01f;
  }
  return in;
}

// A weight below 1/2 of 2^-14 of the sink's is lost: the error of what little the others add up to,
// and in the end all of it.
TEST(FixedAttentionRange, ASinkWithoutAValueCostsTheOthersTheirWeights) {
  Random random(52);
  constexpr std::pair<double, double> bounds[] = {{6, 4e-3}, {8, 2.5e-2}, {10, 0.15}, {12, 1.0}};
  for (const Index kv_len : {80, 500})
    for (const auto& [logit, bound] : bounds)
      for (const float value : {1.0f, 0.0f}) {  // of the sink, times 0.01
        SCOPED_TRACE(std::to_string(kv_len) + " keys, a sink of " + std::to_string(logit));
        auto in = with_a_sink(random, kv_len, logit);
        for (Index c = 0; c < 64; ++c) in.past_v(0, 0, 0, c) *= value;
        const auto exact = oracle_attend(in);
        EXPECT_LE(output_error(attend_in_fixed(in), exact), bound);
        EXPECT_LE(output_error(attend(in), exact), 1e-4) << "float";
      }
}

// Steps of a key's integers are relative to its norm, which the offset makes large.
TEST(FixedAttentionRange, AnOffsetOf300InOneChannelOfTheKeys) {
  Random random(53);
  for (const Index dim : {64, 128})
    for (const Index kv_len : {80, 500}) {
      SCOPED_TRACE("head_dim " + std::to_string(dim) + ", " + std::to_string(kv_len) + " keys");
      auto in = random_inputs<float>(
          random, {.q_heads = 4, .head_dim = dim, .v_dim = dim, .q_len = 32, .kv_len = kv_len});
      for (auto* k : {&in.past_k, &in.k})
        for (Index i = 0; i < k->size(); i += dim) k->data()[i] += 300.0f;
      const auto exact = oracle_attend(in);
      EXPECT_LE(output_error(attend_in_fixed(in), exact), 8e-3);
    }
}

TEST(FixedAttentionRange, NormalDataIsOffByAtMostOneInAThousand) {
  Random random(54);
  for (const Index dim : {64, 128}) {
    const auto in = random_inputs<float>(
        random, {.q_heads = 4, .head_dim = dim, .v_dim = dim, .q_len = 32, .kv_len = 1000});
    EXPECT_LE(output_error(attend_in_fixed(in), oracle_attend(in)), 1e-3) << dim;
  }
}

// ---- formats ------------------------------------------------------------------------------------

// Integers come from the floats that a format holds: a short past and a float chunk, in one block.
TEST(FixedAttentionFormats, AShortPastAndAFloatChunkShareABlock) {
  if (!simd::has_pair_sums) GTEST_SKIP() << "fixed16 is float here: attention_test.cpp";
  Random random(55);
  const auto in = random_inputs<Eigen::half>(
      random,
      {.q_heads = 4, .kv_heads = 2, .head_dim = 64, .v_dim = 37, .q_len = 71, .kv_len = 205});
  const auto floats_of = [](const Tensor4<Eigen::half>& x) {
    Tensor4<float> y(x.dimensions());
    for (Index i = 0; i < x.size(); ++i) y.data()[i] = static_cast<float>(x.data()[i]);
    return y;
  };
  const Inputs<float> floats{random.tensor<float>(1, 4, 71, 64), floats_of(in.past_k),
                             floats_of(in.past_v), random.tensor<float>(1, 2, 71, 64),
                             random.tensor<float>(1, 2, 71, 37)};
  const AttentionOptions options{.arithmetic = Arithmetic::fixed16};
  auto output = unwritten<float>(floats.q, 37);
  quoka::attention(floats.q, {in.past_k, in.past_v}, {floats.k, floats.v}, {output.out, output.lse},
                   options);
  expect_same(output, attend(floats, options));
}

}  // namespace
