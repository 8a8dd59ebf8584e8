// A mask that hides whole blocks of keys from whole panels of queries, as a window or documents of a long chunk do:
// hidden blocks are neither multiplied nor packed, and no bit changes.

#include <quoka/runtime/thread_pool.hpp>

#include "kernels/every_arithmetic.hpp"

#include <gtest/gtest.h>

#include <vector>

namespace {

using namespace quoka_test;
using quoka::detail::PanelArithmetic;
namespace detail = quoka::detail;
namespace tuning = quoka::tuning;

// Another one's kernels, and how often they were called.
class Counting final : public PanelArithmetic {
 public:
  explicit Counting(const PanelArithmetic& of) : of_(of) {}

  mutable Index packed = 0, attended = 0;
  mutable bool last_was_packed = false, packed_in_vain = false;

  detail::PanelCost cost() const override { return of_.cost(); }
  Index block_keys() const override { return of_.block_keys(); }
  Index key_bytes(Index dim) const override { return of_.key_bytes(dim); }
  Index value_bytes(Index v_dim) const override { return of_.value_bytes(v_dim); }
  Index query_bytes(Index dim) const override { return of_.query_bytes(dim); }
  void take(quoka::Arena& arena, detail::PanelScratch& s, Index v_dim, bool biased) const override {
    of_.take(arena, s, v_dim, biased);
  }
  Index sum_rows(Index v_dim) const override { return of_.sum_rows(v_dim); }
  Index first_unrotated(Index v_dim) const override { return of_.first_unrotated(v_dim); }
  void finish(const detail::Panel& panel, Index v_dim) const override { of_.finish(panel, v_dim); }
  void enter(detail::PanelScratch& s) const override { of_.enter(s); }
  void leave(detail::PanelScratch& s) const override { of_.leave(s); }
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
  void attend(const detail::PackedBlock& block, const detail::Panel& panel,
              const detail::VisibleKeys& visible, detail::PanelScratch& s) const override {
    ++attended, last_was_packed = false;
    of_.attend(block, panel, visible, s);
  }

 private:
  const PanelArithmetic& of_;
};

struct HiddenBlocks : testing::Test {
  static constexpr Index group = 2, q_len = 24 * tuning::panel_rows / group + 3, kv_len = 1300;

  // With a chunk its keys come after the past's.
  Inputs<float> inputs(bool chunk = false) {
    return random_inputs<float>(random,
                                {.q_heads = 2 * group,
                                 .kv_heads = 2,
                                 .head_dim = 20,
                                 .v_dim = 12,
                                 .q_len = q_len,
                                 .kv_len = chunk ? kv_len - q_len : kv_len},
                                chunk);
  }
  // The narrowest window() that shows each key to some query: how many queries there are hangs on the panel's rows.
  static constexpr Index narrowest = quoka::ceil_div(kv_len, q_len);
  // As a window: a query sees `width` keys that end where its part of them does; of later heads, earlier ones. Every
  // key is seen by some query, so that blocks are counted as they lie.
  static Tensor4<float> window(Index heads, Index width) {
    Tensor4<float> mask(1, heads, q_len, kv_len);
    mask.setConstant(-infinity);
    for (Index head = 0; head < heads; ++head)
      for (Index i = 0; i < q_len; ++i) {
        const Index end = std::max<Index>((i + 1) * kv_len / q_len - 200 * head, 1);
        for (Index key = std::max<Index>(end - width, 0); key < end; ++key)
          mask(0, head, i, key) = 0;
      }
    return mask;
  }
  static Output<float> attend_by(const PanelArithmetic& panels, const Inputs<float>& in,
                                 const Tensor4<float>& mask,
                                 ExecutorRef executor = SerialExecutor{}) {
    AttentionOptions options{.causal = false};
    options.mask = mask;
    return quoka_test::attend_by(panels, in, options, nullptr, executor);
  }
  // Pairs of a panel and a block of which some query sees some key.
  static Index seen_pairs(const Tensor4<float>& mask, Index block) {
    const Index rows = group * q_len;
    Index pairs = 0;
    for (Index head = 0; head < 2; ++head)
      for (Index first = 0; first < rows; first += tuning::panel_rows)
        for (Index begin = 0; begin < kv_len; begin += block) {
          bool seen = false;
          for (Index row = first; row < std::min(first + tuning::panel_rows, rows); ++row)
            for (Index key = begin; key < std::min(begin + block, kv_len); ++key)
              seen = seen || mask(0, mask.dimension(1) > 1 ? head * group + row % group : 0,
                                  row / group, key) != -infinity;
          pairs += seen;
        }
    return pairs;
  }

  Random random{78};
};

TEST_F(HiddenBlocks, AreNeitherMultipliedNorPacked) {
  for (const bool chunk : {false, true}) {
    const Inputs<float> in = inputs(chunk);
    for (const Index heads : {Index{1}, 2 * group})
      for (const Index width : {narrowest, narrowest + 35, Index{300}}) {
        SCOPED_TRACE(std::to_string(heads) + " heads, " + std::to_string(width) + " keys");
        const Tensor4<float> mask = window(heads, width);
        const Counting counting(panels_named("float"));
        attend_by(counting, in, mask);
        EXPECT_EQ(counting.attended, seen_pairs(mask, counting.block_keys()));
        EXPECT_FALSE(counting.packed_in_vain);
        EXPECT_LE(counting.packed, counting.attended);
      }
  }
}

// A key that a NaN is added to is seen, and makes its rows NaN.
TEST_F(HiddenBlocks, AreSeenWhereTheMaskIsNotANumber) {
  const Inputs<float> in = inputs();
  Tensor4<float> mask = window(1, 40);
  mask(0, 0, 0, kv_len - 1) = not_a_number;
  const Output<float> output = attend_by(panels_named("float"), in, mask);
  EXPECT_TRUE(std::isnan(output.out(0, 0, 0, 0)));
  EXPECT_FALSE(std::isnan(output.out(0, 0, 1, 0)));
}

// A bias far below all others, which no weight survives, in place of -infinity: every block is multiplied.
TEST_F(HiddenBlocks, ChangeNoBit) {
  const Inputs<float> in = inputs();
  quoka::ThreadPool pool(3);
  for (const PanelArithmetic* const one :
       {&panels_named("float"), &panels_named("quads"), &panels_named("emulated tiles, 1 product")})
    for (const Index heads : {Index{1}, 2 * group}) {
      const Tensor4<float> mask = window(heads, 130);
      Tensor4<float> low = mask;
      for (Index i = 0; i < low.size(); ++i)
        if (low.data()[i] == -infinity) low.data()[i] = -50000.0f;
      const Counting counting(*one);
      const Output<float> all = attend_by(counting, in, low);
      EXPECT_EQ(counting.attended, seen_pairs(low, one->block_keys()));
      const Counting fewer(*one);
      const Output<float> some = attend_by(fewer, in, mask);
      EXPECT_EQ(fewer.attended, seen_pairs(mask, one->block_keys()));
      EXPECT_LT(2 * fewer.attended, counting.attended);
      EXPECT_TRUE(same_bits(some.out, all.out));
      EXPECT_TRUE(same_bits(some.lse, all.lse));
      const Output<float> shared = attend_by(*one, in, mask, pool);
      EXPECT_TRUE(same_bits(some.out, shared.out));
    }
}

}  // namespace
