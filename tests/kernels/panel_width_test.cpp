// The last panel of a head, if its rows fill the first packet alone: each arithmetic gives the same bits for it as for
// the same rows in a whole panel.

#include "kernels/every_arithmetic.hpp"

#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

namespace {

using namespace quoka_test;
using quoka::detail::PanelArithmetic;
namespace detail = quoka::detail;
namespace simd = quoka::simd;
namespace tuning = quoka::tuning;

// The first `rows` queries over a past that all of them see, except the keys that options hide.
Output<float> attend_to_first(const PanelArithmetic& panels, const Inputs<float>& in, Index rows,
                              AttentionOptions options, const Tensor4<float>& mask) {
  const TensorView<const float> q = TensorView<const float>(in.q).slice(0, rows);
  Output<float> output{Tensor4<float>(1, q.heads(), rows, in.past_v.dimension(3)),
                       Tensor3<float>(1, q.heads(), rows)};
  options.causal = false;
  if (mask.size() > 0) options.mask = TensorView<const float>(mask).slice(0, rows);
  attend_by(panels, q, {in.past_k, in.past_v}, {}, {output.out, output.lse}, options);
  return output;
}

struct PanelWidth : testing::Test {
  static constexpr Index half = simd::lanes, whole = tuning::panel_rows;

  // A KV head for each query head, so that rows are queries; odd numbers of channels and keys.
  Inputs<float> inputs() {
    return random_inputs<float>(random,
                                {.q_heads = 2,
                                 .kv_heads = 2,
                                 .head_dim = 37,
                                 .v_dim = 29,
                                 .q_len = 2 * whole,
                                 .kv_len = 301},
                                false);
  }
  // Hides much, but nothing from all rows: blocks have the same keys, however many rows there are.
  Tensor4<float> random_mask() {
    Tensor4<float> mask(1, 1, 2 * whole, 301);
    for (Index i = 0; i < mask.size(); ++i)
      mask.data()[i] = random.below(3) == 0 ? -infinity : static_cast<float>(random.normal());
    for (Index key = 0; key < 301; ++key)
      if (mask(0, 0, 0, key) == -infinity) mask(0, 0, 1, key) = 0.5f;
    return mask;
  }
  // Each row of a call with a narrow last panel has the bits that it has in one of whole panels.
  void expect_any_width(const Inputs<float>& in, const AttentionOptions& options = {},
                        const Tensor4<float>& mask = {}) {
    for_each_arithmetic([&](const Panels& one) {
      const auto all = attend_to_first(one.panels, in, 2 * whole, options, mask);
      for (const Index rows : {Index{2}, half - 1, half, half + 1, whole + 1, whole + half}) {
        if (rows < 2) continue;  // one is a token
        const auto few = attend_to_first(one.panels, in, rows, options, mask);
        for (Index head = 0; head < 2; ++head)
          for (Index i = 0; i < rows; ++i)
            ASSERT_TRUE(same_row(few, all, 0, head, i)) << rows << " rows: " << head << " " << i;
      }
    });
  }

  Random random{77};
};

TEST_F(PanelWidth, ChangesNoBit) { expect_any_width(inputs()); }

TEST_F(PanelWidth, ChangesNoBitOfWhatOptionsDo) {
  const std::vector<float> sinks{0.5f, -1.0f}, slopes{0.25f, 0.01f};
  expect_any_width(inputs(), {.softcap = 3.0f, .sinks = sinks});
  expect_any_width(inputs(), {.sliding_window = 290, .alibi_slopes = slopes});
  expect_any_width(inputs(), {.softcap = 3.0f}, random_mask());
}

// Numbers that only float can hold, or none: in a query, a key, values.
TEST_F(PanelWidth, ChangesNoBitOfWhatIsNotFinite) {
  Inputs<float> in = inputs();
  in.q(0, 0, 3 % half, 5) = 0x1p55f, in.q(0, 1, whole, 1) = not_a_number;
  in.past_k(0, 0, 9, 7) = 0x1p52f, in.past_k(0, 1, 300, 36) = -0x1p60f;
  in.past_v(0, 0, 17, 28) = infinity, in.past_v(0, 1, 40, 3) = 0x1p70f;
  expect_any_width(in);
  // Hidden from some rows: values lane by lane.
  in.past_v(0, 0, 18, 2) = not_a_number;
  expect_any_width(in, {}, random_mask());
  expect_any_width(in, {.sliding_window = 290});
}

}  // namespace
