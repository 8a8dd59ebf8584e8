// Every arithmetic of panels, by every unit that this machine compiles. Properties first: the oracle's numbers within the
// bound that bfloat16_error() and int8_error() state for all inputs, float's results for numbers that are too large or
// NaN, the same bits in a panel of any width, hidden blocks that are neither multiplied nor packed. Then by example: which
// arithmetic a call takes, and the parts: splits of numbers, packing, rotations, integer sums, emulated tiles.

#include "kernels/every_arithmetic.hpp"

#include <quoka/kernels/byte_formats.hpp>
#include <quoka/runtime/thread_pool.hpp>

#include "support/attention_case.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <typeinfo>

namespace {

using namespace quoka_test;
using quoka::Arithmetic;
using quoka::detail::PanelArithmetic;
namespace detail = quoka::detail;
namespace simd = quoka::simd;
namespace tuning = quoka::tuning;

// ---- every case ---------------------------------------------------------------------------------

// The oracle's numbers within the bound, in some cases from one end of float to the other; the same bits by any executor,
// and NaN in its rows alone. The ISA's integers are those of plain C++.
TEST(PanelArithmetics, OweWhatAttentionDoes) {
  for_each_draw(
      "ATTENTION", 50,
      [&](Random& first, std::uint64_t seed) {
        const bool at_the_ends = seed % 4 == 3;
        const auto numbers =
            at_the_ends ? AttentionCase::Numbers::ends_of_float : AttentionCase::Numbers::usual;
        const Random start = first;
        const AttentionCase c(first, numbers);
        if (c.shape().q_len == 1) return;
        SCOPED_TRACE(c.describe());
        Output<float> by_plain_quads;
        std::uint64_t turn = seed;  // NaN in one of three arithmetics: each time in others
        for_each_arithmetic([&](const Panels& one) {
          const auto by = [&](ExecutorRef executor) {
            return [&one, executor](const Rows& q, const quoka::Past& past,
                                    const quoka::Chunk& chunk, const quoka::AttentionOutput& output,
                                    const AttentionOptions& options) {
              attend_by(one.panels, q, past, chunk, output, options, executor);
            };
          };
          const ComputedIn by_one{one.arithmetic, one.products};
          const Output<float> output = c.attend(by(SerialExecutor{}));
          EXPECT_TRUE(c.is_as_oracle(output, by_one));
          if (at_the_ends) return;
          ShuffledExecutor shuffled(seed, 5);
          expect_same(c.attend(by(shuffled)), output);
          if (one.name == "plain quads") by_plain_quads = output;
          if (one.name == "quads") expect_same(output, by_plain_quads);
          if (++turn % 3 != 0) return;  // drawing the case again takes as long as all before
          Random random = start;
          AttentionCase spoiled(random, numbers);
          EXPECT_TRUE(spoiled.keeps_nan_in_its_rows(output, random, by(SerialExecutor{}), by_one));
        });
      },
      3);
}

// The errors of include/quoka/README.md's table of arithmetics: 16 query rows over 8,192 keys of normal numbers, the
// largest difference as part of the largest output.
TEST(PanelArithmetics, ErrorsOfNormalNumbersAreAsThePageSays) {
  const auto stated = [](const Panels& by) {
    if (by.arithmetic == Arithmetic::bf16) return 6e-3;
    if (by.products == 2) return 4e-3;  // the cache is of floats
    if (by.products == 3) return 1e-5;
    return by.arithmetic == Arithmetic::int8 ? 2.5e-2 : 1e-6;
  };
  for (std::uint64_t seed = 700; seed < 704; ++seed) {
    Random random(seed);
    const auto in = random_inputs<float>(
        random,
        {.q_heads = 4, .kv_heads = 1, .head_dim = 128, .v_dim = 128, .q_len = 4, .kv_len = 8188});
    const oracle::AttentionResult expected = oracle_attend(in);
    double most = 0;
    for (const double x : expected.out.data) most = std::max(most, std::abs(x));
    for_each_arithmetic([&](const Panels& by) {
      const Output<float> output = attend_by(by.panels, in);
      EXPECT_TRUE(elements_close(output.out, expected.out, stated(by) * most));
    });
  }
}

// ---- numbers that only float holds --------------------------------------------------------------

constexpr float most = std::numeric_limits<float>::max();
constexpr Index part = tuning::long_part_keys;

// Inputs, and how far results may lie from float's where these are finite.
struct Hostile {
  const char* name;
  Shape shape;
  std::function<void(Inputs<float>&, AttentionOptions&)> change;
  double relative = 0.1, absolute = 0.15, lse = 0.1;
};

template <class T>
void set_channel(Tensor4<T>& x, Index c, float value) {
  x.chip(c, 3).setConstant(value);
}

const Hostile hostile[] = {
    {"logits of -88.8 alone, in blocks of which some rows see nothing",
     {.q_len = 37, .kv_len = 101},
     [](Inputs<float>& in, AttentionOptions&) {
       in.q.setZero(), in.past_k.setZero(), in.k.setZero();
       set_channel(in.q, 3, 20.0f);
       set_channel(in.past_k, 3, -17.76f), set_channel(in.k, 3, -17.76f);
     }},
    {"the largest float in a key that one head sees, and in a value; an infinite value",
     {.q_len = 37, .kv_len = 101},
     [](Inputs<float>& in, AttentionOptions&) {
       for (Index i = 0; i < 37; ++i) in.q(0, 1, i, 3) = 0.0f;
       in.past_k(0, 0, 30, 3) = most;
       in.past_v(0, 0, 60, 7) = most, in.past_v(0, 0, 61, 9) = -infinity;
     }},
    {"an infinite key: a logit of its sign",
     {.q_heads = 1, .q_len = 37, .kv_len = 101},
     [](Inputs<float>& in, AttentionOptions&) { in.past_k(0, 0, 50, 3) = infinity; }},
    {"a value of minus infinity, which later rows see",
     {.q_len = 37, .kv_len = 101},
     [](Inputs<float>& in, AttentionOptions&) {
       for (Index c = 0; c < 16; ++c) in.v(0, 0, 20, c) = -infinity;
     }},
    {"huge queries, which no key multiplies",
     {.q_len = 37, .kv_len = 101},
     [](Inputs<float>& in, AttentionOptions&) {
       for (const Index i : {5, 9, 14}) in.q(0, 1, i, 3) = most;  // in each packet of a panel
       set_channel(in.past_k, 3, 0.0f), set_channel(in.k, 3, 0.0f);
     }},
    {"one key above all others: logits of either sign, small in some rows, up to 1e8 in others",
     {.q_len = 40, .kv_len = 200},
     [](Inputs<float>& in, AttentionOptions&) {
       in.q.setZero(), in.past_k.setZero(), in.k.setZero();
       for (Index i = 0; i < 40; ++i) {
         const auto row = static_cast<float>(i);
         const float size =
             i < 12 ? 0.25f : std::exp2(i < 24 ? 20.0f - 0.5f * row : 0.2f * row - 2.0f);
         in.q(0, 0, i, 3) = size, in.q(0, 1, i, 3) = -size;
       }
       set_channel(in.past_k, 3, -2e4f), set_channel(in.k, 3, -2e4f);
       in.past_k(0, 0, 77, 3) = -1e4f, in.past_k(0, 0, 78, 3) = -4e4f;
     },
     0.0,
     0.05},
    {"a scale of 1e30, and keys that are long where queries are zero: logits of 0",
     {.q_len = 40, .kv_len = 200},
     [](Inputs<float>& in, AttentionOptions& options) {
       in.q.setZero(), in.past_k.setZero(), in.k.setZero();
       set_channel(in.q, 3, 1e5f), set_channel(in.past_k, 1, 1e9f), set_channel(in.k, 1, 1e9f);
       options.scale = 1e30f;
     },
     0.0,
     0.05,
     1e-3},
    {"keys whose values are zero beside others, all of equal weight",
     {.q_len = 37, .kv_len = 101},
     [](Inputs<float>& in, AttentionOptions&) {
       in.q.setZero();
       for (Index t = 0; t < 101; t += 2)
         for (Index c = 0; c < 16; ++c) in.past_v(0, 0, t, c) = 0.0f;
     },
     0.0,
     0.01,
     1e-3},
    {"a sink with nearly all of the weight, whose values are small",
     {.head_dim = 64, .v_dim = 64, .q_len = 8, .kv_len = 100},
     [](Inputs<float>& in, AttentionOptions&) {
       set_channel(in.q, 7, 8.0f), set_channel(in.past_k, 7, 0.0f);
       in.past_k(0, 0, 0, 7) = 9.0f;  // a logit of 9 above all others
       for (Index c = 0; c < 64; ++c) in.past_v(0, 0, 0, c) *= 1e-4f;
     },
     0.0,
     1e-3},
    {"a sink of zeros, so far above that a reference of the others would make its weight infinite",
     {.head_dim = 64, .v_dim = 64, .q_len = 8, .kv_len = 100},
     [](Inputs<float>& in, AttentionOptions&) {
       set_channel(in.q, 7, 32.0f), set_channel(in.past_k, 7, 0.0f), set_channel(in.k, 7, 0.0f);
       in.past_k(0, 0, 40, 7) = 32.0f;  // a logit of 128 above all others
       for (Index c = 0; c < 64; ++c) in.past_v(0, 0, 40, c) = 0.0f;
     },
     0.0,
     1e-6,
     2.0},
    {"values that codes cannot hold, in several parts of the keys",
     {.head_dim = 80, .v_dim = 80, .q_len = 9, .kv_len = 2 * part + 500},
     [](Inputs<float>& in, AttentionOptions&) {
       for (const Index at : {Index{3}, part + 9, 2 * part + 9}) {
         in.past_v(0, 0, at, 5) = 0x1p60f, in.past_v(0, 0, at + 2, 17) = -0x1p51f;
         in.past_v(0, 0, at + 1, 79) = at == 3 ? infinity : 3e38f;
       }
       in.v(0, 0, 4, 33) = not_a_number;
     }},
    {"the same in long parts that one task walks",
     {.head_dim = 80, .v_dim = 80, .q_len = 5 * tuning::panel_rows, .kv_len = 2 * part + 500},
     [](Inputs<float>& in, AttentionOptions&) {
       in.past_v(0, 0, part + 7, 5) = 0x1p60f, in.past_v(0, 0, 2 * part + 9, 79) = 3e38f;
       in.v(0, 0, 5 * tuning::panel_rows - 1, 60) = infinity;  // the last query's alone
     }},
    {"rows of more channels than fit the stack",
     {.head_dim = 4100, .v_dim = 1030, .q_len = 37, .kv_len = 101},
     [](Inputs<float>& in, AttentionOptions&) { in.q(0, 1, 5, 4099) = 0x1p60f; }},
    {"a bias of infinity, and one of NaN",
     {.q_len = 37, .kv_len = 101},
     [](Inputs<float>&, AttentionOptions& options) {
       static Tensor4<float> added = Random(37).tensor<float>(1, 1, 37, 138);
       added(0, 0, 3, 20) = infinity, added(0, 0, 5, 70) = not_a_number;
       options.mask = added;
     }},
};

TEST(PanelArithmetics, NumbersThatOnlyFloatHoldsAreAsInFloat) {
  for (const Hostile& of : hostile) {
    SCOPED_TRACE(of.name);
    Random random(42);
    auto in = random_inputs<float>(random, of.shape);
    AttentionOptions options;
    of.change(in, options);
    options.arithmetic = Arithmetic::float_;
    const auto expected = attend(in, options);
    const bool in_parts = of.shape.kv_len > part;  // of the keys, which join
    for_each_arithmetic([&](const Panels& by) {
      if (in_parts && by.name != "quads") return;
      const auto output = attend_by(by.panels, in, options);
      if (in_parts)
        for_each_executor([&](ExecutorRef executor) {
          expect_same(attend_by(by.panels, in, options, executor), output);
        });
      const auto close = [](float x, float y, double bound) {
        return std::isfinite(y) ? std::abs(double{x} - double{y}) <= bound
                                : x == y || (std::isnan(x) && std::isnan(y));
      };
      for (Index i = 0; i < output.lse.size(); ++i) {
        const float x = output.lse.data()[i], y = expected.lse.data()[i];
        ASSERT_TRUE(close(x, y, of.lse * (1 + std::abs(double{y})))) << i << ": " << x << " " << y;
      }
      for (Index i = 0; i < output.out.size(); ++i) {
        const float x = output.out.data()[i], y = expected.out.data()[i];
        ASSERT_TRUE(close(x, y, of.relative * std::abs(double{y}) + of.absolute))
            << i << ": " << x << " " << y;
      }
    });
  }
}

// A query or key that is too short for codes still has a logit at a scale of 1e30.
TEST(PanelArithmetics, ShortRowsBesideAHugeScaleAreAsInFloat) {
  Random random(935);
  auto in = random_inputs<float>(random, {.q_len = 37, .kv_len = 101});
  in.q.setZero(), in.past_k.setZero(), in.k.setZero();
  // Lengths of one side, each with that of the other which makes a logit of about 50.
  for (const int exponent : {-61, -93, -101, -115, -121, -130, -147})
    for (const bool short_query : {true, false}) {
      SCOPED_TRACE("2^" + std::to_string(exponent) + (short_query ? " queries" : " keys"));
      const float one = std::ldexp(1.0f, exponent),
                  other = std::ldexp(1.0f, std::min(short_query ? 49 : 27, -94 - exponent));
      for (Index i = 0; i < 37; ++i) in.q(0, 1, i, 3) = short_query ? one : other;
      for (Index t = 0; t < 101; t += 2) in.past_k(0, 0, t, 3) = short_query ? other : one;
      const auto expected = attend(in, {.scale = 1e30f, .arithmetic = Arithmetic::float_});
      const auto output = attend_by(panels_named("quads"), in, {.scale = 1e30f});
      for (Index i = 0; i < output.lse.size(); ++i) {
        const float lse = expected.lse.data()[i];
        ASSERT_NEAR(output.lse.data()[i], lse, 0.01f * std::abs(lse) + 0.05f) << i;
      }
    }
}

// ---- panels of any width ------------------------------------------------------------------------

// The last panel of a head, if its rows fill the first packet alone: each row has the bits that it has in whole panels,
// among any others. Many keys are hidden, but none from all rows: blocks have the same keys.
TEST(PanelWidth, ChangesNoBit) {
  Random random(77);
  constexpr Index half = simd::lanes, whole = tuning::panel_rows, keys = 301;
  Inputs<float> plain = random_inputs<float>(random,
                                             {.q_heads = 2,
                                              .kv_heads = 2,
                                              .head_dim = 37,
                                              .v_dim = 29,
                                              .q_len = 2 * whole,
                                              .kv_len = keys},
                                             false);
  Inputs<float> odd = plain;
  odd.q(0, 0, 3 % half, 5) = 0x1p55f, odd.q(0, 1, whole, 1) = not_a_number;
  odd.past_k(0, 0, 9, 7) = 0x1p52f, odd.past_k(0, 1, 300, 36) = -0x1p60f;
  odd.past_v(0, 0, 17, 28) = infinity, odd.past_v(0, 1, 40, 3) = 0x1p70f;
  odd.past_v(0, 0, 18, 2) = not_a_number;
  Tensor4<float> mask(1, 1, 2 * whole, keys);
  for (Index i = 0; i < mask.size(); ++i)
    mask.data()[i] = random.below(3) == 0 ? -infinity : static_cast<float>(random.normal());
  for (Index key = 0; key < keys; ++key)
    if (mask(0, 0, 0, key) == -infinity) mask(0, 0, 1, key) = 0.5f;
  const std::vector<float> sinks{0.5f, -1.0f}, slopes{0.25f, 0.01f};
  for (const AttentionOptions& options :
       {AttentionOptions{}, AttentionOptions{.softcap = 3.0f, .sinks = sinks},
        AttentionOptions{.sliding_window = 290, .alibi_slopes = slopes},
        AttentionOptions{.softcap = 3.0f, .mask = mask}})
    for (const Inputs<float>* const in : {&plain, &odd})
      for_each_arithmetic([&](const Panels& one) {
        const auto attend_to_first = [&](Index rows) {
          Output<float> output{Tensor4<float>(1, 2, rows, 29), Tensor3<float>(1, 2, rows)};
          AttentionOptions of = options;
          of.causal = false;
          if (!of.mask.absent()) of.mask = TensorView<const float>(mask).slice(0, rows);
          attend_by(one.panels, Rows(in->q).slice(0, rows), {in->past_k, in->past_v}, {},
                    {output.out, output.lse}, of);
          return output;
        };
        const auto all = attend_to_first(2 * whole);
        for (const Index rows : {Index{2}, half - 1, half, half + 1, whole + 1, whole + half}) {
          if (rows < 2) continue;  // one is a token
          const auto few = attend_to_first(rows);
          for (Index row = 0; row < 2 * rows; ++row)
            ASSERT_TRUE(same_row(few, all, 0, row / rows, row % rows)) << rows << " rows: " << row;
        }
      });
}

// ---- hidden blocks ------------------------------------------------------------------------------

// Float's kernels, which counts how often they are called.
class Counting final : public PanelArithmetic {
 public:
  mutable Index packed = 0, attended = 0;
  mutable bool last_was_packed = false, packed_in_vain = false;

  detail::PanelCost cost() const override { return of_.cost(); }
  Index key_bytes(Index dim) const override { return of_.key_bytes(dim); }
  Index value_bytes(Index v_dim) const override { return of_.value_bytes(v_dim); }
  Index query_bytes(Index dim) const override { return of_.query_bytes(dim); }
  void take(quoka::Arena& arena, detail::PanelScratch& s, Index v_dim, bool biased) const override {
    of_.take(arena, s, v_dim, biased);
  }
  void pack_keys(detail::PackedBlock& block) const override {
    packed_in_vain = packed_in_vain || last_was_packed;
    ++packed, last_was_packed = true;
    of_.pack_keys(block);
  }
  void pack_values(detail::PackedBlock& block) const override { of_.pack_values(block); }
  void pack_queries(const float* const* rows, Index count, Index dim, float scale,
                    const detail::Panel& panel) const override {
    of_.pack_queries(rows, count, dim, scale, panel);
  }
  void multiply_block(const detail::PackedBlock& block, const detail::Panel& panel,
                      const detail::VisibleKeys& visible, detail::PanelScratch& s) const override {
    ++attended, last_was_packed = false;
    of_.multiply_block(block, panel, visible, s);
  }

 private:
  const PanelArithmetic& of_ = panels_named("float");
};

// A mask that hides whole blocks of keys from whole panels of queries, as a window or documents of a long chunk do: a
// query sees `width` keys that end where its part of them does; of later heads, earlier ones. Every key is seen by some
// query, so that blocks are counted as they lie.
TEST(HiddenBlocks, AreNeitherMultipliedNorPacked) {
  constexpr Index group = 2, q_len = 24 * tuning::panel_rows / group + 3, kv_len = 1300,
                  rows = group * q_len, narrowest = quoka::ceil_div(kv_len, q_len);
  Random random(78);
  for (const bool chunk : {false, true}) {
    const auto in = random_inputs<float>(random,
                                         {.q_heads = 2 * group,
                                          .kv_heads = 2,
                                          .head_dim = 20,
                                          .v_dim = 12,
                                          .q_len = q_len,
                                          .kv_len = chunk ? kv_len - q_len : kv_len},
                                         chunk);
    for (const Index heads : {Index{1}, 2 * group})
      for (const Index width : {narrowest, narrowest + 35, Index{300}}) {
        SCOPED_TRACE(std::to_string(heads) + " heads, " + std::to_string(width) + " keys");
        Tensor4<float> mask(1, heads, q_len, kv_len);
        mask.setConstant(-infinity);
        for (Index head = 0; head < heads; ++head)
          for (Index i = 0; i < q_len; ++i) {
            const Index end = std::max<Index>((i + 1) * kv_len / q_len - 200 * head, 1);
            for (Index key = std::max<Index>(end - width, 0); key < end; ++key)
              mask(0, head, i, key) = 0;
          }
        const Counting counting;
        const Index block = counting.block_keys();
        Index pairs = 0;  // of a panel and a block of which some query sees some key
        for (Index head = 0; head < 2; ++head)
          for (Index first = 0; first < rows; first += tuning::panel_rows)
            for (Index begin = 0; begin < kv_len; begin += block) {
              bool seen = false;
              for (Index row = first; row < std::min(first + tuning::panel_rows, rows); ++row)
                for (Index key = begin; key < std::min(begin + block, kv_len); ++key)
                  seen = seen || mask(0, heads > 1 ? head * group + row % group : 0, row / group,
                                      key) != -infinity;
              pairs += seen;
            }
        attend_by(counting, in, {.causal = false, .mask = mask});
        EXPECT_EQ(counting.attended, pairs);
        EXPECT_FALSE(counting.packed_in_vain);
        EXPECT_LE(counting.packed, counting.attended);
      }
  }
}

// ---- which arithmetic a call takes --------------------------------------------------------------

// Three products, or two of what has been rounded to bfloat16 already; float without tiles, or bfmmla for two.
TEST(ArithmeticUsed, AutomaticRoundsNoMoreThanTheCacheHas) {
  EXPECT_EQ(AttentionOptions{}.arithmetic, Arithmetic::automatic);
  const quoka::Format &f32 = quoka::float_format(), &f16 = quoka::format_of<Eigen::half>(),
                      &bf16 = quoka::format_of<Eigen::bfloat16>(), &q8 = quoka::q8_0_format(),
                      &u8 = quoka::u8_format();
  const struct {
    const quoka::Format &k, &v;
    bool two;
  } caches[] = {{f32, f32, false},  {f16, f16, false},  {u8, u8, false},
                {bf16, f32, false}, {bf16, bf16, true}, {q8, q8, true}};
  for (const auto& [k, v, two] : caches) {
    SCOPED_TRACE(std::string(k.name) + ", " + v.name);
    const bool splits = simd::has_tiles || (two && simd::has_bfloat16_squares);
    EXPECT_EQ(quoka::arithmetic_used(Arithmetic::automatic, k, v),
              splits ? Arithmetic::automatic : Arithmetic::float_);
    const PanelArithmetic* const split =
        two ? detail::bfloat16_of_here<2>() : detail::bfloat16_of_here<3>();
    EXPECT_EQ(split != nullptr, splits);
    const PanelArithmetic& used =
        *detail::used_arithmetic(Arithmetic::automatic, std::min(k.rounding, v.rounding), 1).panels;
    const PanelArithmetic& expected = splits ? *split : detail::float_panels();
    EXPECT_TRUE(typeid(used) == typeid(expected));  // the library has its own object of each kind
  }
}

// The result is that of the arithmetic's unit; without a unit it is float to the last bit.
template <class T>
void expect_asked(Arithmetic asked, const PanelArithmetic* panels) {
  Random random(5);
  const auto in =
      random_inputs<T>(random, {.q_heads = 4, .kv_heads = 2, .q_len = 37, .kv_len = 301});
  const auto output = attend(in, {.arithmetic = asked});
  const Arithmetic used =
      quoka::arithmetic_used(asked, quoka::format_of<T>(), quoka::format_of<T>());
  if (asked != Arithmetic::int8 || !simd::has_tiles) {
    EXPECT_EQ(used, panels == nullptr ? Arithmetic::float_ : asked);
  } else {
    EXPECT_EQ(used, Arithmetic::bf16);
    panels = detail::bfloat16_of_here<1>();
  }
  expect_same(output, panels == nullptr ? attend(in, {.arithmetic = Arithmetic::float_})
                                        : attend_by(*panels, in));
}
TEST(ArithmeticUsed, IsTheOneAskedForWhereThereIsOne) {
  expect_asked<float>(Arithmetic::float_, &detail::float_panels());
  expect_asked<float>(Arithmetic::bf16, detail::bfloat16_of_here<1>());
  expect_asked<Eigen::bfloat16>(Arithmetic::automatic, detail::bfloat16_of_here<2>());
  expect_asked<float>(Arithmetic::automatic, detail::bfloat16_of_here<3>());
  expect_asked<float>(Arithmetic::int8, simd::has_quad_sums ? &panels_named("quads") : nullptr);
}

// What int8 becomes for this many rows of a KV head whose keys are not packed: group times queries.
TEST(ArithmeticUsed, FewRowsAreComputedByWhatPacksSooner) {
  const quoka::Format& format = quoka::float_format();
  const bool no_bfloat16 = detail::bfloat16_of_here<1>() == nullptr;
  for (const Index rows : {Index{1}, Index{simd::lanes}, Index{simd::lanes + 4}, Index{60},
                           Index{63}, Index{64}, Index{68}}) {
    SCOPED_TRACE(rows);
    const Arithmetic expected = !simd::has_tiles && !simd::has_quad_sums ? Arithmetic::float_
                                : simd::has_tiles || (rows < 64 && !no_bfloat16) ? Arithmetic::bf16
                                : no_bfloat16 && rows <= simd::lanes ? Arithmetic::float_
                                                                     : Arithmetic::int8;
    EXPECT_EQ(quoka::arithmetic_used(Arithmetic::int8, format, format, rows), expected);
    for (const Index group : {1, 4}) {
      if (rows % group != 0 || rows / group == 1) continue;  // a token, always in float
      Random random(904);
      const auto in = random_inputs<float>(
          random,
          {.batch = 2, .q_heads = 2 * group, .kv_heads = 2, .q_len = rows / group, .kv_len = 301});
      const auto output = attend(in, {.arithmetic = Arithmetic::int8});
      if (expected == Arithmetic::int8)
        expect_same(output, attend_by(panels_named("quads"), in));
      else
        expect_same(output, attend(in, {.arithmetic = expected}));
    }
  }
  EXPECT_EQ(quoka::arithmetic_used(Arithmetic::int8, format, format, 64),
            quoka::arithmetic_used(Arithmetic::int8));
  for (const Arithmetic other : {Arithmetic::automatic, Arithmetic::float_, Arithmetic::bf16})
    EXPECT_EQ(quoka::arithmetic_used(other, format, format, 2), quoka::arithmetic_used(other));
  expect_refused([&] { quoka::arithmetic_used(Arithmetic::int8, format, format, 0); }, {0, 1});
}

TEST(ArithmeticUsed, IsNamed) {
  for (const auto& [name, arithmetic] : {std::pair{"automatic", Arithmetic::automatic},
                                         {"float", Arithmetic::float_},
                                         {"bf16", Arithmetic::bf16},
                                         {"int8", Arithmetic::int8}}) {
    EXPECT_STREQ(quoka::arithmetic_name(arithmetic), name);
    EXPECT_EQ(quoka::arithmetic_named(name), arithmetic);
  }
  for (const char* const gone : {"bfloat16_x2", "bfloat16_x3"})
    expect_refused([&] { quoka::arithmetic_named(gone); }, {gone, "gone", "automatic"});
  expect_refused([] { quoka::arithmetic_named("single"); }, {"single", "float"});
  expect_refused([] { quoka::arithmetic_named("fp8"); }, {"fp8", "automatic, float, bf16"});
  expect_refused([] { quoka::arithmetic_named("bfloat16"); }, {"bfloat16", "called bf16"});
}

// ---- parts of bfloat16 --------------------------------------------------------------------------

using Emulated = detail::TileUnit<simd::EmulatedTiles>;
using PlainPairs = detail::PairUnit<simd::PlainBfloat16Sums>;

// A packet of floats of any exponent.
struct AnyFloats {
  alignas(64) float x[simd::lanes];

  explicit AnyFloats(Random& random) {
    for (float& one : x) {
      do one = simd::float_of(static_cast<std::uint32_t>(random.bits()));
      while (!(std::abs(one) < 0x1p126f));
    }
  }
  simd::Packet packet() const { return simd::load(x); }
};

// Rounded to 8 bits, split in two, and as pairs and back.
TEST(Bfloat16Parts, RoundingAndSplittingKeepTheirBounds) {
  Random random(50);
  for (int round = 0; round < 20000; ++round) {
    const AnyFloats x(random), y(random);
    alignas(64) float high[simd::lanes], low[simd::lanes], first[simd::lanes], second[simd::lanes],
        start[simd::lanes], sum[simd::lanes];
    const simd::Packet rounded = simd::round_bfloat16(x.packet()),
                       pairs = simd::round_pairs(x.packet(), y.packet());
    simd::store(high, rounded);
    simd::store(low, simd::round_bfloat16(simd::sub(x.packet(), rounded)));
    simd::store(first, simd::firsts(pairs)), simd::store(second, simd::seconds(pairs));
    for (float& one : start) one = static_cast<float>(random.normal());
    simd::store(sum, simd::add_pairs(simd::load(start), pairs));
    for (int i = 0; i < simd::lanes; ++i) {
      const auto is_rounded = [](float is, float of) {
        return (simd::bits_of(is) & 0xffffu) == 0 &&
               std::abs(double{is} - double{of}) <= 0x1p-8 * std::abs(double{of}) + 0x1p-126;
      };
      EXPECT_TRUE(is_rounded(high[i], x.x[i]) && is_rounded(first[i], x.x[i]) &&
                  is_rounded(second[i], y.x[i]))
          << x.x[i];
      EXPECT_EQ(simd::bits_of(low[i]) & 0xffffu, 0u);
      EXPECT_LE(std::abs(double{high[i]} + double{low[i]} - double{x.x[i]}),
                0x1p-16 * std::abs(double{x.x[i]}) + 0x1p-134);
      const double exact = double{start[i]} + double{first[i]} + double{second[i]},
                   size = std::abs(double{start[i]}) + std::abs(double{first[i]}) +
                          std::abs(double{second[i]});
      EXPECT_LE(std::abs(double{sum[i]} - exact), 0x1p-23 * size + 0x1p-126);
    }
  }
}

TEST(Bfloat16Parts, HalvesSideBySideAndZipped) {
  alignas(64) float a[simd::lanes], b[simd::lanes], pairs[simd::lanes], zipped[2 * simd::lanes];
  std::uint16_t halves[simd::lanes];
  for (int i = 0; i < simd::lanes; ++i) {
    a[i] = simd::float_of(0x3f800000u + (static_cast<std::uint32_t>(i) << 16));
    b[i] = simd::float_of(0xc0000000u + (static_cast<std::uint32_t>(i) << 16));
  }
  simd::store(pairs, simd::upper_halves(simd::load(a), simd::load(b)));
  simd::store_upper_half(halves, simd::load(a));
  simd::store_zipped(zipped, simd::load(a), simd::load(b));
  for (int i = 0; i < simd::lanes; ++i) {
    EXPECT_EQ(simd::bits_of(pairs[i]), simd::bits_of(a[i]) >> 16 | simd::bits_of(b[i]));
    EXPECT_EQ(halves[i], simd::bits_of(a[i]) >> 16);
    EXPECT_EQ(zipped[2 * i], a[i]);
    EXPECT_EQ(zipped[2 * i + 1], b[i]);
  }
}

// The ISA's own sums are those of the plain ones, to the bit.
template <class Sums>
void expect_plain_sums() {
  Random random(51);
  for (int round = 0; round < 2000; ++round) {
    alignas(64) simd::Bfloat16Pair a[simd::lanes], b[simd::lanes];
    alignas(64) float c[simd::lanes], got[simd::lanes], plain[simd::lanes];
    const auto draw = [&] {  // normal numbers, and denormals
      const float x = static_cast<float>(random.normal());
      return simd::bits_of(random.below(9) == 0 ? x * 1e-39f : x) & 0xffff0000u;
    };
    for (int i = 0; i < simd::lanes; ++i) {
      a[i].bits = draw() | draw() >> 16, b[i].bits = draw() | draw() >> 16;
      c[i] = static_cast<float>(random.normal());
    }
    simd::store(got, fma(Sums::load(a), Sums::load(b), Sums::of(simd::load(c))).to_float());
    simd::store(plain, fma(simd::PlainBfloat16Sums::load(a), simd::PlainBfloat16Sums::load(b),
                           simd::PlainBfloat16Sums::of(simd::load(c)))
                           .to_float());
    for (int i = 0; i < simd::lanes; ++i) EXPECT_EQ(got[i], plain[i]) << round;
  }
}
template <bool has = simd::has_bfloat16_sums>
void expect_own_sums() {
  if constexpr (has) expect_plain_sums<simd::DotBfloat16Sums>();
}
TEST(Bfloat16Parts, TheISAsSumsAreThePlainOnes) { expect_own_sums(); }

// Rows of one number, with `huge` at one place.
template <class T>
struct RowsWithOne {
  RowsWithOne(Index rows, Index dim, Index at_row, Index at_channel, float huge)
      : numbers(uz(rows * dim), static_cast<T>(0.5f)) {
    numbers[uz(at_row * dim + at_channel)] = static_cast<T>(huge);
    for (Index i = 0; i < rows; ++i) {
      all.push_back(reinterpret_cast<quoka::ConstRow>(numbers.data() + i * dim));
      floats.push_back(reinterpret_cast<const float*>(all.back()));
    }
    shape.dim = dim;
  }
  std::vector<T> numbers;
  std::vector<quoka::ConstRow> all;
  std::vector<const float*> floats;
  quoka::RowShape shape;
};

// Wherever a number lies that is left to float: keys, values and queries of a unit.
template <class Unit, class T>
void expect_huge_is_found(Index dim) {
  constexpr Index rows = 35, queries = tuning::panel_rows;
  const quoka::Format& format = quoka::format_of<T>();
  const Index padded = detail::padded_depth<Unit>(dim), channels = detail::padded_channels(dim),
              tiled = quoka::round_up(rows, Index{Unit::tile_rows});
  std::vector<detail::Bfloat16> keys(uz(tiled * padded)),
      values(uz(detail::unit_value_size<Unit>(dim, rows)));
  std::vector<float> factors(uz(tiled)), apart(uz(channels)),
      room(uz(padded + detail::unit_value_room(dim)));
  quoka::Buffer<detail::Bfloat16> panel;  // aligned
  panel.reserve(queries * padded);
  alignas(64) float of_queries[queries];
  for (const float huge : {0x1p49f, 0x1p51f}) {
    const bool held = huge < detail::most_length;
    for (const Index row : {Index{0}, Index{1}, rows / 2, rows - 1})
      for (Index c = 0; c < dim; ++c) {
        const RowsWithOne<T> x(rows, dim, row, c, huge);
        ASSERT_EQ(detail::pack_unit_keys<Unit>(format, x.all.data(), rows, x.shape,
                                               {keys.data(), nullptr}, factors.data(), room.data()),
                  held);
        for (Index i = 0; i < rows; ++i) ASSERT_EQ(std::isnan(factors[uz(i)]), !held && i == row);
        ASSERT_EQ(
            detail::pack_unit_values<Unit>(format, x.all.data(), rows, x.shape,
                                           {values.data(), nullptr}, apart.data(), room.data()),
            held);
        for (Index i = 0; i < channels; ++i) ASSERT_EQ(apart[uz(i)], !held && i == c ? 1.0f : 0.0f);
        const Index query = row * queries / rows;
        const RowsWithOne<float> q(queries, dim, query, c, 4 * huge);
        ASSERT_EQ(detail::pack_unit_queries<Unit>(q.floats.data(), queries, dim, 0.25f,
                                                  {panel.data(), nullptr}, of_queries),
                  held);
        for (Index i = 0; i < queries; ++i)
          ASSERT_EQ(std::isnan(of_queries[i]), !held && i == query) << dim << ", channel " << c;
      }
  }
}
TEST(Bfloat16Parts, HugeNumbersAreFoundWhereverTheyAre) {
  for (const Index dim : {37, 64, 128}) {
    expect_huge_is_found<Emulated, float>(dim);
    expect_huge_is_found<Emulated, Eigen::bfloat16>(dim);
    expect_huge_is_found<PlainPairs, Eigen::bfloat16>(dim);
  }
}

// A cache of bfloat16 has no low parts: a third product adds nothing.
TEST(Bfloat16Parts, OfARoundedCacheHaveNoThirdProduct) {
  Random random(24);
  const auto in = random_inputs<Eigen::bfloat16>(
      random, {.q_heads = 2, .head_dim = 64, .v_dim = 64, .q_len = 37, .kv_len = 301});
  expect_same(attend_by(panels_named("emulated tiles, 2 products"), in),
              attend_by(panels_named("emulated tiles, 3 products"), in));
}

// ---- parts of int8 ------------------------------------------------------------------------------

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
    of(std::type_identity<simd::OwnQuadSums>{}, own);
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

// Channels after the rotation, as written down, level by level, so that any ISA has these bits.
std::vector<float> rotated_plainly(std::vector<float> x) {
  const Index slabs = std::ssize(x) / 16, most_together = detail::slabs_together(slabs);
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
    const auto times = static_cast<float>(std::sqrt(static_cast<double>(most_together / group)));
    for (Index c = 16 * first; c < 16 * (first + group); ++c) x[uz(c)] *= times;
    first += group;
  }
  return x;
}

// To the same bits on every machine, with the largest channel, infinity for what is not finite; and back.
TEST(Int8Rotation, IsThePlainOneAndKeepsLengths) {
  Random random(907);
  constexpr Index width = tuning::panel_rows;
  for (const Index dim : {16, 32, 48, 64, 80, 96, 112, 128, 144, 192, 256, 304}) {
    SCOPED_TRACE(dim);
    quoka::Buffer<float> sums;  // of values [channels][panel_rows]
    sums.reserve(dim * width);
    std::vector<std::vector<float>> expected;
    alignas(64) float rotated[304];
    for (Index row = 0; row < width; ++row) {
      std::vector<float> x(uz(dim));
      for (float& one : x) one = static_cast<float>(random.normal());
      for (Index c = 0; c < dim; ++c) sums.data()[c * width + row] = x[uz(c)];
      expected.push_back(rotated_plainly(x));
      const simd::Packet largest = detail::rotate_channels(x.data(), dim, rotated);
      EXPECT_EQ(std::memcmp(rotated, expected.back().data(), uz(dim) * 4), 0);
      double length = 0, kept = 0;
      float top = 0.0f;
      for (Index c = 0; c < dim; ++c) {
        length += double{x[uz(c)]} * double{x[uz(c)]};
        kept += std::pow(double{rotated[c]} * double{detail::rotation_unit(dim)}, 2);
        top = std::max(top, std::abs(rotated[c]));
      }
      EXPECT_NEAR(kept, length, 1e-5 * length);
      EXPECT_EQ(simd::reduce_max(largest), top);
      for (const float odd : {not_a_number, infinity, -infinity}) {
        x[uz(random.below(dim))] = odd;
        EXPECT_EQ(simd::reduce_max(detail::rotate_channels(x.data(), dim, rotated)), infinity);
      }
    }
    detail::turn_back(dim, sums.data());
    for (Index row = 0; row < width; ++row)
      for (Index c = 0; c < dim; ++c)
        ASSERT_NEAR(sums.data()[c * width + row], expected[uz(row)][uz(c)], 1e-5) << c;
  }
}

TEST(Int8Rotation, ScalesOfOddRows) {
  EXPECT_EQ(detail::int8_scale(127.0f), 1.0f);
  EXPECT_EQ(detail::int8_scale(0.0f), 0.0f);
  EXPECT_EQ(detail::int8_scale(1e-40f), 0.0f);
  for (const float odd : {infinity, not_a_number, 0x1p50f})
    EXPECT_TRUE(std::isnan(detail::int8_scale(odd))) << odd;
  EXPECT_GT(detail::int8_scale(0x1p49f), 0.0f);
}

// ---- emulated tiles -----------------------------------------------------------------------------

// Loses what one of its registers holds.
struct ForgetfulTiles : simd::EmulatedTiles {
  template <int t>
  static void load(const void* p, Index step) {
    EmulatedTiles::load<t>(p, step);
    if (t == 6) EmulatedTiles::zero<t>();
  }
};
TEST(EmulatedTiles, PassTheTestBeforeTheFirstUseAndForgetfulOnesFail) {
  EXPECT_TRUE(detail::tiles_agree<simd::EmulatedTiles>());
  EXPECT_FALSE(detail::tiles_agree<ForgetfulTiles>());
}

// A guest leaves the tiles of its thread as its host had configured them.
TEST(EmulatedTiles, TheHostsConfigurationComesBack) {
  using Tiles = simd::EmulatedTiles;
  Random random(53);
  const auto in = random_inputs<float>(random, {.q_heads = 2, .q_len = 37, .kv_len = 101});
  simd::TileShapes host, after;
  host.palette = 1;
  for (int t = 0; t < simd::tile_count; ++t) host.rows[t] = 16, host.row_bytes[t] = 64;
  host.rows[3] = 5;
  for (const simd::TileShapes& before : {host, simd::TileShapes{}}) {
    Tiles::configure(before);
    EXPECT_TRUE(detail::tiles_agree<Tiles>());  // the self-test before the first use
    attend_by(panels_named("emulated tiles, 1 product"), in);
    Tiles::configuration(after);
    EXPECT_EQ(std::memcmp(&before, &after, sizeof after), 0);
  }
}

}  // namespace
