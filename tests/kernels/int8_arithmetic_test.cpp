// kernels/int8_panels.hpp by the ISA's own sums and by plain ones, to the same bits; rows to codes; numbers that codes
// cannot hold; typical errors. Properties of every arithmetic are in panel_arithmetics_test.

#include "kernels/every_arithmetic.hpp"

#include <quoka/kernels/int8_panels.hpp>

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace {

using namespace quoka_test;
namespace detail = quoka::detail;
namespace simd = quoka::simd;
namespace tuning = quoka::tuning;
using quoka::Arithmetic;

template <class T>
Output<T> by_codes(const Inputs<T>& in, const AttentionOptions& options = {},
                   const Selection* keep = nullptr, ExecutorRef executor = SerialExecutor{}) {
  const auto plain = attend_by(panels_named("plain quads"), in, options, keep, executor);
  const auto own = attend_by(panels_named("quads"), in, options, keep, executor);
  EXPECT_TRUE(same_bits(own.out, plain.out)) << "the ISA's integers are others";
  EXPECT_TRUE(same_bits(own.lse, plain.lse));
  return own;
}

// ---- sums, bytes, quads -------------------------------------------------------------------------

TEST(QuadSums, AreExactForAnyBytes) {
  Random random(900);
  alignas(64) simd::Quad column[simd::lanes];
  alignas(64) float own[simd::lanes], plain[simd::lanes];
  for (int turn = 0; turn < 300; ++turn) {
    const auto draw = [&] {
      return turn < 4 ? (turn % 2 == 0 ? 0x80808080u : 0xffffffffu)
                      : static_cast<std::uint32_t>(random.below(Index{1} << 32));
    };
    const simd::Quad signed_quad{draw()};
    for (simd::Quad& one : column) one.bits = draw();
    const auto start = static_cast<std::int32_t>(random.below(20001)) - 10000;
    const auto of = [&]<class Sums>(std::type_identity<Sums>, float* to) {
      simd::store(
          to, fma(Sums::broadcast(signed_quad), Sums::load(column), Sums::from(start)).to_float());
    };
    of(std::type_identity<simd::QuadSums>{}, own);
    of(std::type_identity<simd::PlainQuadSums>{}, plain);
    for (int i = 0; i < simd::lanes; ++i) {
      int exact = start;
      for (int b = 0; b < 32; b += 8)
        exact += static_cast<std::int8_t>(signed_quad.bits >> b) *
                 static_cast<int>((column[i].bits >> b) & 0xffu);
      ASSERT_EQ(own[i], static_cast<float>(exact));
      ASSERT_EQ(plain[i], static_cast<float>(exact));
    }
  }
}

TEST(QuadSums, BytesAndQuadsAreRoundedIntegers) {
  Random random(901);
  alignas(64) float x[4][simd::lanes];
  alignas(64) simd::Quad quads[simd::lanes];
  std::uint8_t bytes[simd::lanes + 1];
  for (int turn = 0; turn < 100; ++turn) {
    simd::Packet four[4];
    for (int of = 0; of < 4; ++of) {
      for (float& one : x[of]) one = static_cast<float>(254.0 * random.uniform() - 127.0);
      if (turn == 0) x[of][0] = 0.5f, x[of][simd::lanes - 1] = -126.5f;
      four[of] = simd::round_to(simd::load(x[of]));
    }
    simd::store_quads(quads, four);
    bytes[simd::lanes] = 77;
    simd::store_bytes(bytes, simd::round_to(simd::load(x[0]), 128.0f));
    ASSERT_EQ(bytes[simd::lanes], 77);
    for (int i = 0; i < simd::lanes; ++i) {
      ASSERT_EQ(bytes[i], static_cast<int>(std::nearbyint(x[0][i])) + 128);
      for (int of = 0; of < 4; ++of)
        ASSERT_EQ(static_cast<std::int8_t>(quads[i].bits >> 8 * of),
                  static_cast<int>(std::nearbyint(x[of][i])));
    }
  }
}

// ---- rows to codes ------------------------------------------------------------------------------

// The rotation, with its unit.
void rotate(const float* from, Index dim, float* to) {
  detail::rotate_channels(from, dim, to);
  for (Index c = 0; c < dim; ++c) to[c] *= detail::rotation_unit(dim);
}

// Channel c of `padded` after the rotation: as written down, level by level, so that any ISA has these bits.
std::vector<float> rotated_plainly(std::vector<float> x) {
  const Index slabs = static_cast<Index>(x.size()) / 16, most = detail::slabs_together(slabs);
  for (Index first = 0; first < slabs;) {
    const Index group = detail::slabs_together(slabs - first);
    std::vector<Index> spans;
    for (Index span = 1; span < group; span *= 2) spans.push_back(16 * span);
    spans.push_back(8), spans.push_back(4);
    for (const Index span : spans)
      for (Index c = 16 * first; c < 16 * (first + group); ++c)
        if (c / span % 2 == 0) {
          const float a = x[uz(c)], b = x[uz(c + span)];
          x[uz(c)] = a + b, x[uz(c + span)] = a - b;
        }
    const auto times = static_cast<float>(std::sqrt(static_cast<double>(most / group)));
    for (Index c = 16 * first; c < 16 * (first + group); ++c) x[uz(c)] *= times;
    first += group;
  }
  return x;
}

TEST(Int8Packing, RotationIsTheSameOnEveryMachine) {
  Random random(907);
  for (const Index dim : {16, 32, 48, 64, 80, 96, 112, 128, 144, 192, 256, 304}) {
    std::vector<float> x(uz(dim));
    for (float& one : x) one = static_cast<float>(random.normal());
    alignas(64) float rotated[304];
    const simd::Packet most = detail::rotate_channels(x.data(), dim, rotated);
    const auto expected = rotated_plainly(x);
    EXPECT_EQ(std::memcmp(rotated, expected.data(), uz(dim) * 4), 0) << dim;
    float largest = 0.0f;
    for (const float one : expected) largest = std::max(largest, std::abs(one));
    EXPECT_EQ(simd::reduce_max(most), largest) << dim;
    for (const float odd : {not_a_number, infinity, -infinity})
      for (Index c = 0; c < dim; ++c) {
        auto spoilt = x;
        spoilt[uz(c)] = odd;
        ASSERT_EQ(simd::reduce_max(detail::rotate_channels(spoilt.data(), dim, rotated)), infinity)
            << dim << ", " << c;
      }
  }
}

// Sums of rotated values [channels][panel_rows] are turned back by the same rotation.
TEST(Int8Packing, SumsOfValuesAreTurnedBack) {
  Random random(908);
  constexpr Index width = tuning::panel_rows;
  for (const Index dim : {16, 32, 48, 64, 80, 96, 128, 304}) {
    std::vector<std::vector<float>> columns(uz(width));
    quoka::Buffer<float> out;
    out.reserve(dim * width);
    for (Index row = 0; row < width; ++row) {
      columns[uz(row)].resize(uz(dim));
      for (float& one : columns[uz(row)]) one = static_cast<float>(random.normal());
      for (Index c = 0; c < dim; ++c) out.data()[c * width + row] = columns[uz(row)][uz(c)];
    }
    detail::turn_back(dim, out.data());
    for (Index row = 0; row < width; ++row) {
      const auto expected = rotated_plainly(columns[uz(row)]);
      for (Index c = 0; c < dim; ++c)
        ASSERT_NEAR(out.data()[c * width + row], expected[uz(c)], 1e-5) << dim << ", " << c;
    }
  }
}

TEST(Int8Packing, RotationKeepsProductsAndLengths) {
  Random random(902);
  for (const Index dim : {16, 32, 48, 64, 80, 96, 112, 128, 192, 256, 304}) {
    alignas(64) float a[304], b[304], ra[304], rb[304];
    for (Index c = 0; c < dim; ++c)
      a[c] = static_cast<float>(random.normal()), b[c] = static_cast<float>(random.normal());
    rotate(a, dim, ra), rotate(b, dim, rb);
    double exact = 0.0, rotated = 0.0, length = 0.0, kept = 0.0;
    for (Index c = 0; c < dim; ++c) {
      exact += static_cast<double>(a[c]) * static_cast<double>(b[c]);
      rotated += static_cast<double>(ra[c]) * static_cast<double>(rb[c]);
      length += static_cast<double>(a[c]) * static_cast<double>(a[c]);
      kept += static_cast<double>(ra[c]) * static_cast<double>(ra[c]);
    }
    EXPECT_NEAR(rotated, exact, 1e-5 * length) << dim;
    EXPECT_NEAR(kept, length, 1e-5 * length) << dim;
    rotate(a, dim, a);  // in place
    EXPECT_EQ(std::memcmp(a, ra, static_cast<std::size_t>(dim) * 4), 0) << dim;
  }
}

// One channel, 100 times as large as all others, costs them less when it is spread.
TEST(Int8Packing, AnOutlierChannelIsSpread) {
  alignas(64) float x[128];
  std::fill_n(x, 128, 1.0f);
  x[40] = 100.0f;
  rotate(x, 128, x);
  EXPECT_LT(*std::max_element(x, x + 128), 45.0f);
}

TEST(Int8Packing, ScalesOfOddRows) {
  EXPECT_EQ(detail::int8_scale(127.0f), 1.0f);
  EXPECT_EQ(detail::int8_scale(0.0f), 0.0f);
  EXPECT_EQ(detail::int8_scale(1e-40f), 0.0f);
  for (const float odd : {infinity, not_a_number, 0x1p50f})
    EXPECT_TRUE(std::isnan(detail::int8_scale(odd))) << odd;
  EXPECT_GT(detail::int8_scale(0x1p49f), 0.0f);
}

// ---- the option ---------------------------------------------------------------------------------

TEST(Int8Attention, TheOptionDoesWhatItSays) {
  Random random(903);
  const auto in =
      random_inputs<float>(random, {.q_heads = 4, .kv_heads = 2, .q_len = 37, .kv_len = 301});
  const auto output = attend(in, {.arithmetic = Arithmetic::int8});
  const Arithmetic used = quoka::arithmetic_used(Arithmetic::int8);
  if (simd::has_tiles)
    EXPECT_EQ(used, Arithmetic::bf16);
  else
    EXPECT_EQ(used, simd::has_quad_sums ? Arithmetic::int8 : Arithmetic::float_);
  if (used == Arithmetic::int8)
    expect_same(output, by_codes(in));
  else
    expect_same(output, attend(in, {.arithmetic = used}));
}

// ---- few rows -----------------------------------------------------------------------------------

// The arithmetic that int8 becomes for this many rows of a KV head whose keys are not packed.
Arithmetic for_rows(Index rows) {
  const bool no_bfloat16 = detail::bfloat16_of_here<1>() == nullptr;
  if (!simd::has_tiles && !simd::has_quad_sums) return Arithmetic::float_;
  if (simd::has_tiles || (rows < 64 && !no_bfloat16)) return Arithmetic::bf16;
  return no_bfloat16 && rows <= simd::lanes ? Arithmetic::float_ : Arithmetic::int8;
}
template <class T>
Output<T> as_for_rows(Index rows, const Inputs<T>& in, AttentionOptions options = {},
                      const Selection* keep = nullptr) {
  if (for_rows(rows) == Arithmetic::int8) return by_codes(in, options, keep);
  options.arithmetic = for_rows(rows);
  return attend(in, options, keep);
}
const AttentionOptions eight_bits{.arithmetic = Arithmetic::int8};

// Group times queries count, neither of them alone.
TEST(Int8Attention, FewRowsAreComputedByWhatPacksSooner) {
  Random random(904);
  const quoka::Format& format = quoka::float_format();
  for (const Index group : {1, 4})
    for (const Index rows :
         {Index{4}, Index{simd::lanes}, Index{simd::lanes + 4}, Index{60}, Index{64}, Index{68}}) {
      SCOPED_TRACE(std::to_string(group) + " heads, rows " + std::to_string(rows));
      const auto in = random_inputs<float>(
          random,
          {.batch = 2, .q_heads = 2 * group, .kv_heads = 2, .q_len = rows / group, .kv_len = 301});
      const Arithmetic used = quoka::arithmetic_used(Arithmetic::int8, format, format, rows);
      EXPECT_EQ(used, for_rows(rows));
      if (in.q.dimension(2) == 1) continue;  // a token, always in float
      const auto output = attend(in, eight_bits);
      expect_same(output, as_for_rows(rows, in));
      // That arithmetic, asked for by name, is the same for any rows.
      EXPECT_EQ(quoka::arithmetic_used(used), used);
      expect_same(output, attend(in, {.arithmetic = used}));
    }
  EXPECT_EQ(quoka::arithmetic_used(Arithmetic::int8, format, format, 64),
            quoka::arithmetic_used(Arithmetic::int8));
  for (const Arithmetic other : {Arithmetic::automatic, Arithmetic::float_, Arithmetic::bf16})
    EXPECT_EQ(quoka::arithmetic_used(other, format, format, 2), quoka::arithmetic_used(other));
  expect_refused([&] { quoka::arithmetic_used(Arithmetic::int8, format, format, 0); }, {0, 1});
}

// Each sequence of a batch as alone, with a selection, lists, a window.
TEST(Int8Attention, FewRowsOfABatchAndOfChosenKeys) {
  Random random(905);
  const auto few = random_inputs<float>(random, {.q_heads = 2, .q_len = 9, .kv_len = 501}),
             many = random_inputs<float>(random, {.q_heads = 2, .q_len = 40, .kv_len = 301});
  auto out_few = unwritten<float>(few.q, 16), out_many = unwritten<float>(many.q, 16);
  std::vector<quoka::AttentionSequence> batch;
  batch.push_back({.q = few.q,
                   .past = {few.past_k, few.past_v},
                   .chunk = {few.k, few.v},
                   .out = {out_few.out, out_few.lse}});
  batch.push_back({.q = many.q,
                   .past = {many.past_k, many.past_v},
                   .chunk = {many.k, many.v},
                   .out = {out_many.out, out_many.lse}});
  for_each_executor([&](ExecutorRef executor) {
    quoka::AttentionWorkspace workspace;
    quoka::attention(batch, eight_bits, executor, workspace);
    expect_same(out_few, as_for_rows(18, few));
    expect_same(out_many, as_for_rows(80, many));
  });
  const Selection keep = random_selection(random, 1, 1, 501, 100);
  expect_same(attend(few, eight_bits, &keep), as_for_rows(18, few, {}, &keep));
  std::vector<Position> listed;
  for (Index i = 0; i < 9 * 50; ++i) listed.push_back(static_cast<Position>(i % 50 * 10 + i / 50));
  AttentionOptions options = eight_bits;
  options.lists =
      quoka::IndexLists(quoka::TensorView<const Position>(listed.data(), {1, 1, 9, 50}));
  expect_same(attend(few, options), as_for_rows(18, few, options));
}

// Keys of each query's own, by tiles: float's results, to within the typical error of codes.
TEST(Int8Attention, ListsAreAsInFloat) {
  Random random(909);
  const auto in = random_inputs<float>(
      random, {.q_heads = 4, .head_dim = 64, .v_dim = 80, .q_len = 40, .kv_len = 501});
  std::vector<Position> listed;
  for (Index i = 0; i < 40; ++i)
    for (Index at = 0; at < 100; ++at)
      listed.push_back(static_cast<Position>(at < 90 ? at * 5 : 450 + (at - 90) * 5 + i / 10));
  AttentionOptions options;
  options.lists =
      quoka::IndexLists(quoka::TensorView<const Position>(listed.data(), {1, 1, 40, 100}));
  const auto output = by_codes(in, options);
  options.arithmetic = Arithmetic::float_;
  const auto expected = attend(in, options);
  for (Index i = 0; i < output.out.size(); ++i)
    ASSERT_NEAR(output.out.data()[i], expected.out.data()[i], 0.05) << i;
}

// ---- the error ----------------------------------------------------------------------------------

// Outputs are off by `typical` of the largest value at most, where errors have any sign: far less than the bound.
template <class T>
void expect_typical(const Inputs<T>& in, double typical) {
  const double value = std::max(largest(in.past_v), largest(in.v));
  EXPECT_TRUE(elements_close(by_codes(in).out, oracle_attend(in).out, typical * value));
}

TEST(Int8Attention, EveryHeadDim) {
  for_each_storage([]<class T>() {
    Random random(910);
    for (const Index dim : {1, 3, 17, 40, 64, 80, 96, 100, 128, 256}) {
      SCOPED_TRACE("head_dim " + std::to_string(dim));
      expect_typical(
          random_inputs<T>(
              random, {.q_heads = 3, .head_dim = dim, .v_dim = dim, .q_len = 37, .kv_len = 127}),
          0.03);
    }
  });
}

// ---- numbers as real models have them -----------------------------------------------------------

// A sink takes nearly all of the weight, and its values are near zero: what is left of the output is that of the other
// keys, whose weights are below 1/255 of the sink's.
TEST(Int8Attention, AnAttentionSinkLeavesTheStepsToTheOthers) {
  Random random(920);
  auto in = random_inputs<float>(
      random, {.q_heads = 2, .head_dim = 64, .v_dim = 64, .q_len = 8, .kv_len = 100});
  for (Index head = 0; head < 2; ++head)
    for (Index i = 0; i < 8; ++i) in.q(0, head, i, 7) = 8.0f;
  for (Index t = 0; t < 100; ++t) in.past_k(0, 0, t, 7) = 0.0f;
  in.past_k(0, 0, 0, 7) = 9.0f;  // a logit of 9 above all others
  for (Index c = 0; c < 64; ++c) in.past_v(0, 0, 0, c) *= 1e-4f;
  const auto output = by_codes(in), exact = attend(in, {.arithmetic = Arithmetic::float_});
  double error = 0.0, size = 0.0;
  for (Index i = 0; i < output.out.size(); ++i) {
    const auto a = static_cast<double>(output.out.data()[i]),
               b = static_cast<double>(exact.out.data()[i]);
    error += (a - b) * (a - b), size += b * b;
  }
  EXPECT_LT(std::sqrt(error / size), 0.05);
}

// The sink's values are zero, and its logit is far enough above the others' that a reference of theirs would make its
// weight infinite.
TEST(Int8Attention, ASinkOfZerosFarAboveTheOthers) {
  Random random(922);
  auto in = random_inputs<float>(
      random, {.q_heads = 2, .head_dim = 64, .v_dim = 64, .q_len = 8, .kv_len = 100});
  for (Index head = 0; head < 2; ++head)
    for (Index i = 0; i < 8; ++i) in.q(0, head, i, 7) = 32.0f;
  for (Index t = 0; t < 100; ++t) in.past_k(0, 0, t, 7) = 0.0f;
  for (Index t = 0; t < in.k.dimension(2); ++t) in.k(0, 0, t, 7) = 0.0f;
  in.past_k(0, 0, 40, 7) = 32.0f;  // a logit of 128 above all others
  for (Index c = 0; c < 64; ++c) in.past_v(0, 0, 40, c) = 0.0f;
  const auto output = by_codes(in), exact = attend(in, {.arithmetic = Arithmetic::float_});
  for (Index i = 0; i < output.out.size(); ++i)
    EXPECT_NEAR(output.out.data()[i], exact.out.data()[i], 1e-6);
  for (Index i = 0; i < output.lse.size(); ++i)
    EXPECT_NEAR(output.lse.data()[i], exact.lse.data()[i], 2.0);
}

TEST(Int8Attention, ConstantKeysAndZeroRows) {
  Random random(921);
  auto same = random_inputs<float>(random, {.q_heads = 2, .q_len = 37, .kv_len = 101});
  for (auto* x : {&same.past_k, &same.k, &same.past_v, &same.v})
    for (Index i = 0; i < x->size(); ++i) x->data()[i] = 3.0f;
  expect_typical(same, 0.005);
  for (auto* x : {&same.past_k, &same.past_v, &same.v})
    for (Index i = 0; i < x->size(); ++i) x->data()[i] = 0.0f;
  const auto nothing = by_codes(same);
  for (Index i = 0; i < nothing.out.size(); ++i) EXPECT_EQ(nothing.out.data()[i], 0.0f);
}

// ---- what codes cannot hold ---------------------------------------------------------------------

// Numbers that codes of values cannot hold, in one part of the keys or in several, which join: they change one channel
// alone, whichever path computes it. Rows that do not see them keep their bits.
TEST(Int8Attention, UnfitValuesOfPartsAreAsInFloat) {
  Random random(936);
  const Index block = tuning::block_keys, part = tuning::long_part_keys;
  for (const Index q_len :
       {Index{9}, Index{5} * tuning::panel_rows}) {  // cut over its keys, and walked in long parts
    SCOPED_TRACE(q_len);
    const auto clean = random_inputs<float>(
        random,
        {.q_heads = 2, .head_dim = 80, .v_dim = 80, .q_len = q_len, .kv_len = 2 * part + 500});
    const auto by_own = [](const auto& in, ExecutorRef executor) {
      return attend_by(panels_named("quads"), in, {}, nullptr, executor);
    };
    const auto base = by_own(clean, SerialExecutor{});
    for (const std::vector<Index>& at :
         {std::vector<Index>{3}, {block + 5, part + 7}, {part + 9}, {7, 2 * part + 9}}) {
      auto in = clean;
      for (std::size_t i = 0; i < at.size(); ++i) {
        in.past_v(0, 0, at[i], 5) = 0x1p60f;
        in.past_v(0, 0, at[i] + 1, 79) = i == 0 ? infinity : 3e38f;
        in.past_v(0, 0, at[i] + 2, 17) = i == 0 ? 0x1p49f : -0x1p51f;
      }
      in.v(0, 0, 4, 33) = not_a_number;
      const auto output = by_own(in, SerialExecutor{}),
                 expected = attend(in, {.arithmetic = Arithmetic::float_});
      for_each_executor([&](ExecutorRef executor) { expect_same(by_own(in, executor), output); });
      for (Index head = 0; head < 2; ++head)
        for (Index i = 0; i < q_len; ++i)
          for (Index c = 0; c < 80; ++c) {
            const float x = output.out(0, head, i, c), y = expected.out(0, head, i, c);
            ASSERT_TRUE(std::isnan(x) == std::isnan(y) && std::isinf(x) == std::isinf(y))
                << x << " " << y << " " << i << " " << c;
            if (!std::isfinite(y)) continue;
            // 2^49 is coded, and others that are rotated with it have a share of its step.
            ASSERT_NEAR(x, y, 0.1 * std::abs(y) + 0x1p33) << i << " " << c;
          }
    }
    // The chunk's last value: only the last query sees it.
    auto last = clean;
    last.v(0, 0, q_len - 1, 60) = infinity;
    const auto output = by_own(last, SerialExecutor{});
    for (Index head = 0; head < 2; ++head)
      for (Index i = 0; i < q_len; ++i) {
        if (i + 1 < q_len) {
          ASSERT_TRUE(same_row(output, base, 0, head, i)) << i;
          continue;
        }
        for (Index c = 0; c < 80; ++c)
          ASSERT_EQ(std::isinf(output.out(0, head, i, c)), c == 60) << c;
      }
  }
}

TEST(Int8Attention, AHugeQueryIsAsInFloat) {
  Random random(934);
  auto in = random_inputs<float>(random, {.q_heads = 2, .q_len = 37, .kv_len = 101});
  in.q(0, 1, 5, 3) = std::numeric_limits<float>::max();
  for (auto* k : {&in.past_k, &in.k})
    for (Index t = 0; t < k->dimension(2); ++t) (*k)(0, 0, t, 3) = 0.0f;  // which no key multiplies
  const auto output = by_codes(in), expected = attend(in, {.arithmetic = Arithmetic::float_});
  for (Index i = 0; i < output.out.size(); ++i)
    EXPECT_NEAR(output.out.data()[i], expected.out.data()[i], 0.15);
}

// A query or key that is too short for codes still has a logit at a scale of 1e30.
TEST(Int8Attention, ShortRowsBesideAHugeScaleAreAsInFloat) {
  Random random(935);
  auto in = random_inputs<float>(random, {.q_heads = 2, .q_len = 37, .kv_len = 101});
  in.q.setZero(), in.past_k.setZero(), in.k.setZero();
  const auto expect_as_float = [&](const char* what) {
    const AttentionOptions options{.scale = 1e30f};
    const auto output = by_codes(in, options);
    auto by_single = options;
    by_single.arithmetic = Arithmetic::float_;
    const auto expected = attend(in, by_single);
    for (Index head = 0; head < 2; ++head)
      for (Index i = 0; i < 37; ++i) {
        const float lse = expected.lse(0, head, i);
        ASSERT_NEAR(output.lse(0, head, i), lse, 0.01f * std::abs(lse) + 0.05f) << what << i;
      }
  };
  // Lengths of queries, each with the length of the key that makes its logit about 50.
  for (const int exponent : {-93, -101, -115, -121, -130, -147}) {
    SCOPED_TRACE("2^" + std::to_string(exponent));
    const float one = std::ldexp(1.0f, exponent);
    const auto other = [&](int most) { return std::ldexp(1.0f, std::min(most, -94 - exponent)); };
    for (Index i = 0; i < 37; ++i) in.q(0, 1, i, 3) = one;
    for (Index t = 0; t < 101; t += 2) in.past_k(0, 0, t, 3) = other(49);
    expect_as_float("a short query, row ");
    for (Index i = 0; i < 37; ++i) in.q(0, 1, i, 3) = other(27);  // times the scale it is finite
    for (Index t = 0; t < 101; t += 2) in.past_k(0, 0, t, 3) = one;
    expect_as_float("a short key, row ");
  }
}

}  // namespace
