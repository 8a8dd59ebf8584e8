// Rounding modes other than to nearest, and denormals taken for zeros: attention holds its bounds, and if a key differs
// from what was kept of it in another mode, the error says so. Drawn beside all else: top_k_test.cpp,
// mass_rule_test.cpp, QuoKA by the sketch in selection_fuzz_test.cpp, codes in byte_formats_test.cpp.

#include <quoka/attention/attention.hpp>
#include <quoka/select/key_sketch.hpp>
#include <quoka/select/quoka.hpp>

#include "support/attention_fixtures.hpp"
#include "support/rounding_modes.hpp"

#include <gtest/gtest.h>

namespace {

using namespace quoka_test;

// Keys of a cache sketched in one mode, selected from in another: the same Selection, or the reason. Of many lengths,
// so that quotients of the largest channel round either way.
TEST(RoundingModes, ASketchOfAnotherModeIsNamedAsSuch) {
  Random random(61);
  const auto q = random.tensor<float>(1, 4, 16, 64);
  auto k = random.tensor<float>(1, 2, 600, 64);
  for (Index t = 0; t < 600; ++t)
    for (Index c = 0; c < 64; ++c) k(0, 0, t, c) *= static_cast<float>(1 + t % 97) / 7.0f;
  quoka::KeySketch sketch;
  sketch.update(k, 0, 600, SerialExecutor{});
  const quoka::QuokaSelector selector({.budget = Budget::keys(100), .sketch = quoka::Sketch::on});
  int refused = 0;
  for (const RoundingMode& mode : rounding_modes) {
    if (mode.rounding == FE_TONEAREST) continue;
    SCOPED_TRACE(mode.name);
    quoka::QuokaSelector::State state;
    Selection kept;
    std::string message;
    in(mode, [&] {
      try {
        selector.select(
            {.q = q, .k = k, .logits = LogitOptions{}, .capacity = 600, .sketch = &sketch}, state,
            kept, SerialExecutor{});
      } catch (const std::invalid_argument& error) {
        message = error.what();
      }
    });
    if (message.empty()) continue;
    ++refused;
    EXPECT_NE(message.find("rounding mode"), std::string::npos) << message;
  }
  EXPECT_GT(refused, 0);
}

TEST(RoundingModes, AttentionIsTheOracles) {
  for (const Index q_len : {1, 3, 40}) {
    Random random(63);
    const auto input = random_inputs<float>(
        random, {.q_heads = 4, .kv_heads = 2, .head_dim = 64, .q_len = q_len, .kv_len = 700});
    const std::vector<float> sinks{0.5f, -1.0f, 2.0f, -infinity};
    for (const float cap : {0.0f, 5.0f}) {
      const AttentionOptions options{.softcap = cap, .sinks = sinks};
      const auto expected = oracle_attend(input, options);
      for (const RoundingMode& mode : rounding_modes) {
        SCOPED_TRACE(std::string(mode.name) + ", " + std::to_string(q_len) + " queries");
        const auto got = in(mode, [&] { return attend(input, options); });
        EXPECT_TRUE(elements_close(got.out, expected.out, 8 * noise * largest(input.past_v)));
        EXPECT_TRUE(lse_close(got.lse, expected.lse, 8 * noise));
      }
    }
  }
}

}  // namespace
