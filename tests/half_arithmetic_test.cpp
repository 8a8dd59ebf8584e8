// core/half_panels.hpp: attention in half arithmetic, against the oracle, with the same kernels
// wherever the tests run: on emulated half packets, and on the ISA's own where there are any.
//
// Errors are relative to the largest |value|: an output is a mean of values. bench/README.md has
// them relative to the largest output.

#include <quoka/attention/attention.hpp>
#include <quoka/select/quoka.hpp>

#include "support/attention_fixtures.hpp"
#include "support/capture.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace {

using namespace quoka_test;
using quoka::Arithmetic;
namespace simd = quoka::simd;
namespace tuning = quoka::tuning;

// simd::HalfPacket is the ISA's own or, where it has none, EmulatedHalf.
using Panels = quoka::detail::HalfPanels<simd::HalfPacket>;

template <class T, class P = Panels, class E = quoka::SerialExecutor>
Output<T> attend_in_half(const Inputs<T>& in, const AttentionOptions& options = {},
                         const Selection* keep = nullptr, E&& executor = E{}) {
  Output<T> output = unwritten<T>(in.q, std::max(in.past_v.dimension(3), in.v.dimension(3)));
  quoka::Past<T> past(in.past_k, in.past_v);
  past.keep = keep;
  quoka::AttentionWorkspace<T> workspace;
  quoka::detail::attention_in<P>(in.q, past, {in.k, in.v}, {output.out, output.lse}, options,
                                 executor, workspace);
  return output;
}

// Of the largest |value|, each element; of the whole, Frobenius, beside the rounding of the output;
// of the log-sum-exp. For normal queries, keys and values; measured here: 0.95e-3, 1.6e-3 and
// 2.7e-3.
constexpr double element_error = 1.5e-3, whole_error = 2.5e-3, lse_error = 4e-3;

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
  expect_near(attend_in_half(in, options, keep), oracle_attend(in, options, keep), in, factor);
}

// ---- the option ---------------------------------------------------------------------------------

TEST(HalfArithmetic, SaysWhatItComesTo) {
  static_assert(quoka::arithmetic_used(Arithmetic::single) == Arithmetic::single);
  static_assert(quoka::arithmetic_used(Arithmetic::half) ==
                (simd::has_half_arithmetic ? Arithmetic::half : Arithmetic::single));
  EXPECT_EQ(AttentionOptions{}.arithmetic, Arithmetic::single);
}

// Float where there is no half arithmetic, to the last bit; half where there is.
TEST(HalfArithmetic, TheOptionDoesWhatItSays) {
  Random random(1);
  const auto in =
      random_inputs<float>(random, {.q_heads = 4, .kv_heads = 2, .q_len = 37, .kv_len = 501});
  const Selection keep = random_selection(random, 1, 2, 501, 127);
  for (const Selection* kept : {static_cast<const Selection*>(nullptr), &keep}) {
    const auto asked = attend(in, {.arithmetic = Arithmetic::half}, kept);
    if (quoka::arithmetic_used(Arithmetic::half) == Arithmetic::half)
      expect_same(asked, attend_in_half(in, {}, kept));
    else
      expect_same(asked, attend(in, {}, kept));
  }
}

TEST(HalfArithmetic, OneTokenIsInFloat) {
  Random random(2);
  const auto in =
      random_inputs<float>(random, {.q_heads = 3, .kv_heads = 3, .q_len = 1, .kv_len = 501});
  expect_same(attend_in_half(in), attend(in));
}

// ---- the packets --------------------------------------------------------------------------------

// |x| rounded to half, to nearest even, from a double that holds it exactly.
double rounded(double x) {
  int exponent = 0;
  std::frexp(x, &exponent);
  const double unit = std::ldexp(1.0, std::max(exponent, -13) - 11);
  return std::nearbyint(x / unit) * unit;
}

// Sums of products of halves of all sizes, denormal results among them. The ISA rounds once; the
// emulation, which rounds to float first, is allowed one in 1,000 that is off by the last bit.
TEST(HalfArithmetic, MultiplyAddIsRoundedToHalf) {
  Random random(3);
  constexpr int n = simd::half_lanes;
  alignas(64) Eigen::half a[n], b[n], c[n], got[n];
  int off = 0, all = 0;
  for (int round = 0; round < 4000; ++round) {
    const auto draw = [&] {
      return static_cast<Eigen::half>(std::ldexp(static_cast<float>(random.bits() % 4095) - 2047.0f,
                                                 -static_cast<int>(random.bits() % 16) - 5));
    };
    for (int i = 0; i < n; ++i) a[i] = draw(), b[i] = draw(), c[i] = draw();
    fma(simd::HalfPacket::load(a), simd::HalfPacket::load(b), simd::HalfPacket::load(c)).store(got);
    for (int i = 0; i < n; ++i, ++all) {
      const auto wide = [](Eigen::half x) { return static_cast<double>(static_cast<float>(x)); };
      const double exact = wide(a[i]) * wide(b[i]) + wide(c[i]);
      if (std::abs(exact) >= 65504.0) continue;
      if (wide(got[i]) == rounded(exact)) continue;
      ++off;
      EXPECT_LE(std::abs(wide(got[i]) - exact),
                0.501 * std::abs(rounded(exact)) * 0x1p-9 + 0x1p-25);
    }
  }
  EXPECT_LE(off, simd::has_half_arithmetic ? 0 : all / 1000);
}

TEST(HalfArithmetic, APairFillsAPacket) {
  constexpr int n = simd::half_lanes;
  alignas(64) Eigen::half got[n];
  for (const float x : {0.0f, -1.5f, 65504.0f, 0x1p-24f, infinity}) {
    simd::HalfPacket::broadcast(simd::pair_of(static_cast<Eigen::half>(x))).store(got);
    for (int i = 0; i < n; ++i) EXPECT_EQ(static_cast<float>(got[i]), x);
  }
}

TEST(HalfArithmetic, FloatsArePairedUpRounded) {
  Random random(4);
  alignas(64) float x[simd::lanes];
  simd::HalfPair pairs[simd::lanes];
  for (float& value : x) value = static_cast<float>(random.normal());
  simd::store_pairs(pairs, simd::load(x));
  for (int i = 0; i < simd::lanes; ++i)
    EXPECT_EQ(pairs[i].bits, simd::pair_of(static_cast<Eigen::half>(x[i])).bits);
}

// What is tested below on the ISA's packets holds for the emulated ones, and the other way round.
TEST(HalfArithmetic, TheEmulationIsTheIsasUpToDoubleRounding) {
  if (!simd::has_half_arithmetic) GTEST_SKIP() << "no half arithmetic here";
  Random random(5);
  const auto in =
      random_inputs<float>(random, {.q_heads = 4, .head_dim = 64, .q_len = 37, .kv_len = 501});
  const auto own = attend_in_half(in);
  const auto emulated = attend_in_half<float, quoka::detail::HalfPanels<simd::EmulatedHalf>>(in);
  EXPECT_LE(oracle::relative_error(to_oracle(own.out), to_oracle(emulated.out)), 2e-4);
}

// ---- shapes -------------------------------------------------------------------------------------

template <class T>
class HalfAttention : public ::testing::Test {};
TYPED_TEST_SUITE(HalfAttention, StorageTypes, StorageNames);

TYPED_TEST(HalfAttention, EveryHeadDim) {
  Random random(10);
  for (const Index dim : {1, 3, 15, 16, 17, 64, 80, 100, 128, 192}) {
    SCOPED_TRACE("head_dim " + std::to_string(dim));
    expect_near_oracle(random_inputs<TypeParam>(
        random, {.q_heads = 3, .head_dim = dim, .v_dim = dim, .q_len = 37, .kv_len = 127}));
  }
}

TYPED_TEST(HalfAttention, ValueDimMayDifferFromHeadDim) {
  Random random(11);
  for (const auto& [dim, v_dim] : {std::pair<Index, Index>{192, 128}, {37, 1}, {1, 37}}) {
    SCOPED_TRACE("head_dim " + std::to_string(dim) + ", v_dim " + std::to_string(v_dim));
    expect_near_oracle(random_inputs<TypeParam>(
        random, {.q_heads = 2, .head_dim = dim, .v_dim = v_dim, .q_len = 37, .kv_len = 127}));
  }
}

TYPED_TEST(HalfAttention, EveryGroupAndBatch) {
  Random random(12);
  for (const Index group : {1, 4, 7}) {
    SCOPED_TRACE("group " + std::to_string(group));
    expect_near_oracle(random_inputs<TypeParam>(
        random, {.batch = 2, .q_heads = 2 * group, .kv_heads = 2, .q_len = 19, .kv_len = 127}));
  }
}

TYPED_TEST(HalfAttention, KeysAroundAChainASumAndABlock) {
  Random random(13);
  for (const Index border :
       {Index{tuning::half_chain}, Index{tuning::half_chain * tuning::half_chains},
        Index{tuning::block_keys}, Index{2 * tuning::block_keys}})
    for (Index keys = border - 1; keys <= border + 1; ++keys) {
      SCOPED_TRACE(std::to_string(keys) + " keys");
      expect_near_oracle(
          random_inputs<TypeParam>(random, {.q_heads = 9, .q_len = 5, .kv_len = keys - 5}));
    }
}

TYPED_TEST(HalfAttention, RowsAroundAPanel) {
  Random random(14);
  constexpr Index panel = quoka::detail::panel_rows_of<Panels>;
  for (const Index panels : {1, 2})
    for (Index rows = panels * panel - 1; rows <= panels * panel + 1; ++rows) {
      SCOPED_TRACE(std::to_string(rows) + " rows");
      expect_near_oracle(random_inputs<TypeParam>(random, {.q_heads = 1, .q_len = rows}));
    }
}

// Fewer rows than a task is worth: cut over the keys, and merged.
TYPED_TEST(HalfAttention, AFewRowsOverManyKeys) {
  Random random(15);
  expect_near_oracle(random_inputs<TypeParam>(random, {.q_heads = 3, .q_len = 7, .kv_len = 2003}));
}

TYPED_TEST(HalfAttention, SelectedPast) {
  Random random(16);
  const auto in = random_inputs<TypeParam>(
      random,
      {.q_heads = 8, .kv_heads = 2, .head_dim = 64, .v_dim = 64, .q_len = 37, .kv_len = 501});
  for (const Index count : {1, 37, 113, 500}) {
    SCOPED_TRACE("count " + std::to_string(count));
    const Selection keep = random_selection(random, 1, 2, 501, count);
    expect_near_oracle(in, {}, &keep);
  }
}

TYPED_TEST(HalfAttention, AllSelectedIsNoSelectionBitForBit) {
  Random random(17);
  const auto in =
      random_inputs<TypeParam>(random, {.q_heads = 4, .kv_heads = 2, .q_len = 37, .kv_len = 127});
  const Selection all = to_selection(oracle::all_positions(1, 2, 127), 127);
  expect_same(attend_in_half(in, {}, &all), attend_in_half(in));
}

// ---- options ------------------------------------------------------------------------------------

TYPED_TEST(HalfAttention, ScaleSoftCapSinksAndWindow) {
  Random random(20);
  const auto in =
      random_inputs<TypeParam>(random, {.q_heads = 4, .kv_heads = 2, .q_len = 37, .kv_len = 301});
  const std::vector<float> sinks{-3.0f, 0.0f, 2.5f, 8.0f};
  expect_near_oracle(in, {.scale = 0.5f}, nullptr, 2.0);
  expect_near_oracle(in, {.scale = -0.25f});
  expect_near_oracle(in, {.scale = 2.0f, .softcap = 5.0f}, nullptr, 4.0);
  expect_near_oracle(in, {.sink_logits = sinks});
  expect_near_oracle(in, {.sliding_window = 29}, nullptr, 2.0);
}

TYPED_TEST(HalfAttention, ThreadsDoNotChangeABit) {
  Random random(21);
  const auto in =
      random_inputs<TypeParam>(random, {.q_heads = 10, .kv_heads = 2, .q_len = 71, .kv_len = 301});
  const auto serial = attend_in_half(in);
  for (const int workers : {1, 2, 3}) {
    quoka::ThreadPool pool(workers);
    expect_same(attend_in_half<TypeParam, Panels>(in, {}, nullptr, pool), serial);
  }
}

// ---- what a row does not see --------------------------------------------------------------------

// Exact while the change leaves the block's largest element what it is: scales are then the same.
TYPED_TEST(HalfAttention, AChunkKeyReachesOnlyItsOwnAndLaterRows) {
  Random random(30);
  auto in = random_inputs<TypeParam>(random, {.q_heads = 3, .q_len = 37, .kv_len = 101});
  in.past_k(0, 0, 100, 0) = in.past_v(0, 0, 100, 0) = stored<TypeParam>(7.0);
  const auto before = attend_in_half(in);
  for (const Index j : {0, 10, 36})
    for (const bool key : {true, false}) {
      auto changed = in;
      for (Index c = 0; c < 16; ++c)
        (key ? changed.k : changed.v)(0, 0, j, c) = stored<TypeParam>(3.0);
      const auto after = attend_in_half(changed);
      for (Index head = 0; head < 3; ++head)
        for (Index i = 0; i < 37; ++i)
          EXPECT_EQ(same_row(before, after, 0, head, i), i < j)
              << "key " << j << ", head " << head << ", row " << i;
    }
}

TYPED_TEST(HalfAttention, NaNSpoilsTheRowsThatSeeIt) {
  Random random(31);
  const auto in = random_inputs<TypeParam>(random, {.q_heads = 3, .q_len = 37, .kv_len = 101});
  const auto clean = attend_in_half(in);
  for (const Index j : {0, 11, 36}) {
    auto key = in, value = in, query = in;
    key.k(0, 0, j, 3) = stored<TypeParam>(std::nan(""));
    expect_spoilt(attend_in_half(key), clean, [&](Index, Index, Index i) { return i >= j; });
    query.q(0, 1, j, 7) = stored<TypeParam>(std::nan(""));
    expect_spoilt(attend_in_half(query), clean,
                  [&](Index, Index head, Index i) { return head == 1 && i == j; });
    for (Index c = 0; c < 16; ++c) value.v(0, 0, j, c) = stored<TypeParam>(std::nan(""));
    auto output = attend_in_half(value);
    EXPECT_TRUE(same_bits(output.lse, clean.lse));
    for (Index head = 0; head < 3; ++head)
      for (Index i = j; i < 37; ++i) output.lse(0, head, i) = not_a_number;
    expect_spoilt(output, clean, [&](Index, Index, Index i) { return i >= j; });
  }
}

TYPED_TEST(HalfAttention, InfinityInAValueReachesTheRowsThatSeeIt) {
  Random random(32);
  auto in = random_inputs<TypeParam>(random, {.q_heads = 2, .q_len = 37, .kv_len = 101});
  const auto clean = attend_in_half(in);
  for (Index c = 0; c < 16; ++c) in.v(0, 0, 20, c) = stored<TypeParam>(-HUGE_VAL);
  const auto output = attend_in_half(in);
  for (Index head = 0; head < 2; ++head)
    for (Index i = 0; i < 37; ++i)
      for (Index c = 0; c < 16; ++c)
        EXPECT_EQ(static_cast<float>(output.out(0, head, i, c)),
                  i >= 20 ? -infinity : static_cast<float>(clean.out(0, head, i, c)));
}

// ---- the range of half --------------------------------------------------------------------------

// A channel of the keys a thousand times the others, as post-RoPE keys have it, though not so
// large; the queries all but ignore it.
TYPED_TEST(HalfAttention, AHugeChannelOfTheKeys) {
  Random random(40);
  auto in = random_inputs<TypeParam>(
      random, {.q_heads = 3, .head_dim = 64, .v_dim = 64, .q_len = 37, .kv_len = 301});
  for (auto* k : {&in.past_k, &in.k})
    for (Index t = 0; t < k->dimension(2); ++t)
      (*k)(0, 0, t, 5) = stored<TypeParam>(2000.0 + static_cast<double>(t % 7));
  for (Index head = 0; head < 3; ++head)
    for (Index i = 0; i < 37; ++i)
      in.q(0, head, i, 5) = static_cast<TypeParam>(static_cast<float>(in.q(0, head, i, 5)) * 1e-3f);
  expect_near_oracle(in, {}, nullptr, 2.0);
}

// Every product of these, and every sum, is beyond 65,504.
TEST(HalfAttentionRange, LargeKeysAndQueriesDoNotOverflow) {
  Random random(41);
  auto in = random_inputs<float>(
      random, {.q_heads = 3, .head_dim = 64, .v_dim = 64, .q_len = 37, .kv_len = 301});
  const auto plain = attend_in_half(in);
  for (auto* x : {&in.q, &in.past_k, &in.k})
    for (Index i = 0; i < x->size(); ++i) x->data()[i] *= 0x1p60f;
  const auto scaled = attend_in_half(in, {.scale = 0x1p-123f});  // of 1 / 8
  EXPECT_TRUE(same_bits(scaled.out, plain.out));
}

TEST(HalfAttentionRange, LargeAndSmallValuesAreScaledExactly) {
  Random random(42);
  const auto in = random_inputs<float>(random, {.q_heads = 3, .q_len = 37, .kv_len = 301});
  const auto plain = attend_in_half(in);
  for (const float factor : {0x1p100f, 0x1p-90f}) {
    auto other = in;
    for (auto* x : {&other.past_v, &other.v})
      for (Index i = 0; i < x->size(); ++i) x->data()[i] *= factor;
    const auto scaled = attend_in_half(other);
    for (Index i = 0; i < plain.out.size(); ++i)
      EXPECT_EQ(scaled.out.data()[i], plain.out.data()[i] * factor);
  }
}

// The largest sum there can be: all products positive and as large as the scaling lets them be.
TEST(HalfAttentionRange, TheLargestSumsStayFinite) {
  Random random(43);
  auto in = random_inputs<float>(
      random, {.q_heads = 3, .head_dim = 128, .v_dim = 128, .q_len = 37, .kv_len = 301});
  in.q.setConstant(std::nextafter(64.0f, 0.0f));
  for (auto* x : {&in.past_k, &in.k, &in.past_v, &in.v}) x->setConstant(std::nextafter(4.0f, 0.0f));
  const auto output = attend_in_half(in, {.scale = 0.01f});
  for (Index i = 0; i < output.out.size(); ++i) EXPECT_NEAR(output.out.data()[i], 4.0f, 4e-3f);
}

// Products of the largest floats are beyond float, too: logits of plus and minus infinity, as in
// float, and a zero query is still one.
TEST(HalfAttentionRange, AZeroQueryAmongTheLargestKeysIsTheMean) {
  Random random(44);
  auto in = random_inputs<float>(random, {.q_heads = 3, .q_len = 37, .kv_len = 301});
  for (auto* x : {&in.past_k, &in.k})
    for (Index i = 0; i < x->size(); ++i) x->data()[i] *= 1e37f;
  in.q.setZero();
  expect_near_oracle(in);
}

TEST(HalfAttentionRange, ZeroKeysAndValues) {
  Random random(45);
  auto in = random_inputs<float>(random, {.q_heads = 3, .q_len = 37, .kv_len = 301});
  for (auto* x : {&in.past_k, &in.k, &in.past_v, &in.v}) x->setZero();
  const auto output = attend_in_half(in);
  for (Index i = 0; i < output.out.size(); ++i) EXPECT_EQ(output.out.data()[i], 0.0f);
  EXPECT_NEAR(output.lse(0, 0, 0), std::log(302.0f), 1e-5f);
}

// One key far above the others: 2^-25 of its weight is all that they have together.
TEST(HalfAttentionRange, AKeyFarAboveTheOthersIsTheAnswer) {
  Random random(46);
  auto in = random_inputs<Eigen::half>(random, {.q_heads = 2, .q_len = 1, .kv_len = 501}, false);
  Inputs<Eigen::half> rows = random_inputs<Eigen::half>(random, {.q_heads = 2, .q_len = 37}, false);
  rows.past_k = in.past_k, rows.past_v = in.past_v;
  for (Index i = 0; i < rows.q.size(); ++i) rows.q.data()[i] = in.q.data()[i % 16];
  for (Index c = 0; c < 16; ++c)
    rows.past_k(0, 0, 300, c) =
        static_cast<Eigen::half>(static_cast<float>(rows.q(0, 0, 0, c)) * 30.0f);
  const auto output = attend_in_half(rows, {.scale = 1.0f});
  for (Index i = 0; i < 37; ++i)
    for (Index c = 0; c < 16; ++c) EXPECT_EQ(output.out(0, 1, i, c), rows.past_v(0, 0, 300, c));
}

// ---- recorded queries, keys and values ----------------------------------------------------------

// Logits of up to 20 in natural units: an error of 2^-11 of them is one of a percent of a weight.
// Measured, of the largest output: 2.5e-3 dense and 3.8e-3 selected; 1.2e-3 and 1.3e-3 of the
// whole.
TEST(HalfAttentionRealData, ErrorIsWhatWasMeasured) {
  const quoka_examples::SafetensorsFile file(std::string(QUOKA_EXAMPLES_DATA) +
                                             "/tinyllama_passkey_2046_layer11.safetensors");
  const auto layer = quoka_examples::load_layers(file).front();
  const TensorView<const float> q = layer.q, k = layer.k, v = layer.v;
  constexpr Index chunk = 64;
  const Index begin = q.len() - chunk;
  const auto copy = [](const TensorView<const float>& x) {
    Tensor4<float> y(1, x.heads(), x.len(), x.dim());
    for (Index head = 0; head < x.heads(); ++head)
      for (Index i = 0; i < x.len(); ++i)
        std::copy_n(x.row(0, head, i), x.dim(), &y(0, head, i, 0));
    return y;
  };
  const Inputs<float> in{copy(q.slice(begin, chunk)), copy(k.slice(0, begin)),
                         copy(v.slice(0, begin)), copy(k.slice(begin, chunk)),
                         copy(v.slice(begin, chunk))};
  const AttentionOptions options{.scale = quoka_examples::softmax_scale(file)};
  const Selection keep = quoka::QuokaSelector({.budget = 256}).select(in.q, in.past_k);
  for (const Selection* kept : {static_cast<const Selection*>(nullptr), &keep}) {
    const auto output = attend_in_half(in, options, kept);
    const auto expected = oracle_attend(in, options, kept);
    double most = 0.0;
    for (const double x : expected.out.data) most = std::max(most, std::abs(x));
    EXPECT_TRUE(elements_close(output.out, expected.out, 5e-3 * most));
    EXPECT_LE(oracle::relative_error(to_oracle(output.out), expected.out), 2e-3);
  }
}

}  // namespace
