// Rounding modes other than to nearest, and denormals taken for zeros, as a program may have set them for its threads
// (std::fesetround, FTZ, DAZ). The same scores give the same Selection, sketches hold their bounds, codes stay in
// range, attention holds its bounds. If a key differs from what was kept of it in another mode, the error says so.

#include <quoka/attention/attention.hpp>
#include <quoka/kernels/byte_formats.hpp>
#include <quoka/select/any_selector.hpp>
#include <quoka/select/stages.hpp>

#include "support/attention_fixtures.hpp"

#include <gtest/gtest.h>

#include <cfenv>
#include <cmath>
#include <optional>
#include <vector>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace {

using namespace quoka_test;
using quoka::Format;
using quoka::QuokaOptions;
using quoka::QuokaSelector;
using quoka::SelectorInput;
using quoka::Sketch;

struct Mode {
  const char* name;
  int rounding;
  bool no_denormals;
};
const std::vector<Mode> modes = {
    {"to nearest", FE_TONEAREST, false},
    {"upward", FE_UPWARD, false},
    {"downward", FE_DOWNWARD, false},
    {"toward zero", FE_TOWARDZERO, false},
#if defined(__SSE2__)
    {"to nearest, denormals are zeros", FE_TONEAREST, true},
    {"downward, denormals are zeros", FE_DOWNWARD, true},
#endif
};

// Sets a mode for this thread, and restores the old one.
class InMode {
 public:
  explicit InMode(const Mode& mode) {
    std::fesetround(mode.rounding);
#if defined(__SSE2__)
    if (mode.no_denormals) _mm_setcsr(_mm_getcsr() | 0x8040u);
#endif
  }
  InMode(const InMode&) = delete;
  ~InMode() { std::fesetenv(&before_); }

 private:
  std::fenv_t before_ = [] {
    std::fenv_t now;
    std::fegetenv(&now);
    return now;
  }();
};

// f() in a mode; the mode is left before its result is looked at.
template <class F>
auto in(const Mode& mode, F&& f) {
  const InMode set(mode);
  return f();
}

// ---- top-k --------------------------------------------------------------------------------------

// Both zeros, denormals, and others. Denormals that are taken for zeros tie with them, so the same keys are kept as of
// zeros.
TEST(RoundingModes, TopKIsTheSame) {
  Random random(60);
  for (const Index len : {40, 500, 5000}) {
    Tensor3<float> scores(1, 1, len);
    for (Index t = 0; t < len; ++t) {
      const float zeros[] = {0.0f, -0.0f, 1e-40f, -1e-42f, 1e-45f};
      scores(0, 0, t) = random.below(3) > 0 ? zeros[random.below(5)]
                                            : static_cast<float>(random.normal() * 1e-37);
    }
    Tensor3<float> flushed = scores;
    for (Index t = 0; t < len; ++t)
      if (std::abs(flushed(0, 0, t)) < std::numeric_limits<float>::min()) flushed(0, 0, t) = 0.0f;
    for (const Mode& mode : modes)
      for (const Index k : {Index{1}, len / 6, len / 3, len / 2, 5 * len / 8, len - 1}) {
        SCOPED_TRACE(std::string(mode.name) + ", " + std::to_string(k) + " of " +
                     std::to_string(len));
        const auto kept = in(mode, [&] { return quoka::top_k(scores, k); });
        const auto expected = quoka::top_k(mode.no_denormals ? flushed : scores, k);
        ASSERT_EQ(kept.positions(0, 0), expected.positions(0, 0));
      }
  }
}

// ---- the sketch ---------------------------------------------------------------------------------

struct Keys {
  Tensor4<float> q, k;
};
Keys keys_of(Index len) {
  Random random(61);
  Keys x{random.tensor<float>(1, 4, 16, 64), random.tensor<float>(1, 2, len, 64)};
  for (Index t = 0; t < len;
       ++t)  // of many lengths, so that quotients of the largest channel round either way
    for (Index c = 0; c < 64; ++c) x.k(0, 0, t, c) *= static_cast<float>(1 + t % 97) / 7.0f;
  return x;
}

Selection selected(const Keys& x, const quoka::SelectionOptions& options) {
  quoka::AnySelector::State state;
  Selection kept;
  const SelectorInput input{
      .q = x.q, .k = x.k, .logits = quoka::LogitOptions{}, .capacity = x.k.dimension(2)};
  const quoka::AnySelector selector(options);
  selector.appended(input, state, SerialExecutor{});
  selector.select(input, state, kept, SerialExecutor{});
  return kept;
}

TEST(RoundingModes, TheSketchProposesWhatFloatKeeps) {
  const Keys x = keys_of(3000);
  for (const Mode& mode : modes) {
    SCOPED_TRACE(mode.name);
    const auto with = [&](Sketch sketch) {
      return in(mode, [&] {
        return selected(x, QuokaOptions{.budget = quoka::Budget::keys(200), .sketch = sketch});
      });
    };
    const Selection sketched = with(Sketch::on), in_float = with(Sketch::off);
    for (Index head = 0; head < 2; ++head)
      ASSERT_EQ(sketched.positions(0, head), in_float.positions(0, head));
  }
}

TEST(RoundingModes, MassByTheSketchIsNearlyThatToNearest) {
  const Keys x = keys_of(3000);
  const quoka::MassOptions options{
      .budget = quoka::Budget::keys(200), .queries = 64, .kernel_size = 1, .sketch = Sketch::on};
  const Selection to_nearest = selected(x, options);
  for (const Mode& mode : modes) {
    SCOPED_TRACE(mode.name);
    const Selection kept = in(mode, [&] { return selected(x, options); });
    for (Index head = 0; head < 2; ++head) {
      const auto a = kept.positions(0, head), b = to_nearest.positions(0, head);
      std::vector<Position> both;
      std::set_intersection(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(both));
      EXPECT_GE(10 * std::ssize(both), 9 * std::ssize(b));  // heads share the budget
    }
  }
}

// Keys of a cache sketched in one mode, selected from in another: the same Selection, or the reason.
TEST(RoundingModes, ASketchOfAnotherModeIsNamedAsSuch) {
  const Keys x = keys_of(600);
  int refused = 0;
  for (const Mode& mode : modes) {
    if (mode.rounding == FE_TONEAREST) continue;
    SCOPED_TRACE(mode.name);
    QuokaSelector::State state;
    Selection kept;
    quoka::KeySketch sketch;
    sketch.update(x.k, 0, 600, SerialExecutor{});
    const SelectorInput input{
        .q = x.q, .k = x.k, .logits = quoka::LogitOptions{}, .capacity = 600, .sketch = &sketch};
    const QuokaSelector selector(
        QuokaOptions{.budget = quoka::Budget::keys(100), .sketch = Sketch::on});
    std::string message;
    in(mode, [&] {
      try {
        selector.select(input, state, kept, SerialExecutor{});
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

// ---- formats ------------------------------------------------------------------------------------

TEST(RoundingModes, CodesStayInTheirRange) {
  Random random(62);
  for (const Mode& mode : modes)
    for (const Format* const format : {&quoka::q8_0_format(), &quoka::u8_format()}) {
      SCOPED_TRACE(std::string(mode.name) + ", " + format->name);
      for (int i = 0; i < 200; ++i) {
        const Tensor4<float> row = random.tensor<float>(1, 1, 1, 32, 1.0 + i);
        std::vector<std::byte> bytes(uz(format->row_bytes({32})));
        std::vector<float> back(32);
        in(mode, [&] { format->narrow(row.data(), {32}, bytes.data()); });
        format->widen(bytes.data(), {32}, back.data());
        const double step = 2 * largest(row) / 254;  // of either, and a bit more for the halves
        for (Index c = 0; c < 32; ++c)
          ASSERT_NEAR(back[uz(c)], row.data()[c], 1.2 * step + 127 * step * 0x1p-10);
      }
    }
}

// ---- attention ----------------------------------------------------------------------------------

TEST(RoundingModes, AttentionIsTheOracles) {
  for (const Index q_len : {1, 3, 40}) {
    Random random(63);
    const auto input = random_inputs<float>(
        random, {.q_heads = 4, .kv_heads = 2, .head_dim = 64, .q_len = q_len, .kv_len = 700});
    const std::vector<float> sinks{0.5f, -1.0f, 2.0f, -infinity};
    for (const float cap : {0.0f, 5.0f}) {
      const AttentionOptions options{.softcap = cap, .sinks = sinks};
      const auto expected = oracle_attend(input, options);
      for (const Mode& mode : modes) {
        SCOPED_TRACE(std::string(mode.name) + ", " + std::to_string(q_len) + " queries");
        const auto got = in(mode, [&] { return attend(input, options); });
        EXPECT_TRUE(elements_close(got.out, expected.out, 8 * noise * largest(input.past_v)));
        EXPECT_TRUE(lse_close(got.lse, expected.lse, 8 * noise));
      }
    }
  }
}

}  // namespace
