// The conclusions of `check` from its measurements, on passes made up here.

#include "ggml/check_advice.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <sstream>

namespace {

using namespace quoka_ggml;

// ubatches of 100 tokens; contender c takes seconds[c](ubatch), and each sample's next token costs it nll[c] more.
Pass made_up(const std::vector<Index>& lengths,
             const std::vector<std::function<double(Index)>>& seconds,
             const std::vector<double>& nll, const std::vector<double>& right) {
  Pass pass;
  for (Index end = 100; end <= lengths.back(); end += 100) pass.ends.push_back(end);
  for (Index at = 5; at < lengths.back(); at += 10) pass.samples.push_back(at);
  pass.asked.assign(lengths.size(), {0, 1});
  for (std::size_t c = 0; c < seconds.size(); ++c) {
    Readings r;
    for (Index i = 0; i < std::ssize(pass.ends); ++i) r.seconds.push_back(seconds[c](i));
    for (std::size_t i = 0; i < pass.samples.size(); ++i) {
      r.nll.push_back(2.0 + nll[c]), r.kl.push_back(nll[c] / 2);
      r.agrees.push_back(c == 0 || i % 4 != 0);
    }
    r.right.assign(lengths.size(), {right[c], 1.0});
    pass.of.push_back(r);
  }
  return pass;
}
double one(Index) { return 1.0; }

TEST(CheckOutcome, SumsTimesAndComparesWithTheFirst) {
  const Pass pass =
      made_up({200, 400}, {one, [](Index i) { return i < 2 ? 0.5 : 0.25; }}, {0, 0.02}, {1, 0.5});
  const Outcome first = outcome(pass, {200, 400}, 1, "x", 0, 0),
                second = outcome(pass, {200, 400}, 1, "x", 1, 1),
                all = outcome(pass, {200, 400}, 1, "x", 0, 1);
  EXPECT_DOUBLE_EQ(first.seconds, 1.0);
  EXPECT_DOUBLE_EQ(first.speedup, 2.0);
  EXPECT_DOUBLE_EQ(second.seconds, 1.5) << "from the prompt's beginning";
  EXPECT_DOUBLE_EQ(second.speedup, 4 / 1.5);
  EXPECT_EQ(second.length, 400);
  EXPECT_NEAR(all.perplexity.mean, 100 * std::expm1(0.02), 1e-9);
  EXPECT_NEAR(all.perplexity.low, all.perplexity.mean, 1e-9) << "all samples alike";
  EXPECT_NEAR(all.kl, 0.01, 1e-12);
  EXPECT_NEAR(all.agrees, 0.75, 1e-12);
  EXPECT_NEAR(all.right, 0.75, 1e-12);
  EXPECT_NEAR(all.needles.mean, -25, 1e-9);
  EXPECT_LT(all.needles.low, -25);
}

// The text's change from one length to the next, not from the beginning.
TEST(CheckOutcome, ALengthHasItsOwnSamples) {
  Pass pass = made_up({200, 400}, {one, one}, {0, 0}, {1, 1});
  for (std::size_t i = 20; i < pass.of[1].nll.size(); ++i) pass.of[1].nll[i] += 0.1;
  EXPECT_NEAR(outcome(pass, {200, 400}, 1, "", 0, 0).perplexity.mean, 0, 1e-9);
  EXPECT_NEAR(outcome(pass, {200, 400}, 1, "", 1, 1).perplexity.mean, 100 * std::expm1(0.1), 1e-9);
  EXPECT_NEAR(outcome(pass, {200, 400}, 1, "", 0, 1).perplexity.mean, 100 * std::expm1(0.05), 1e-9);
}

TEST(CheckOutcome, AGainOverExactModeHasAnInterval) {
  const auto gain = [](const std::function<double(Index)>& own) {
    return outcome(made_up({1600}, {one, one, own}, {0, 0, 0}, {1, 1, 1}), {1600}, 2, "", 0, 0)
        .gain;
  };
  const Estimate steady = gain([](Index) { return 0.5; });
  EXPECT_NEAR(steady.mean, 2, 1e-9);
  EXPECT_NEAR(steady.low, 2, 1e-9);
  const Estimate varies = gain([](Index i) { return i % 2 == 0 ? 0.1 : 1.7; });
  EXPECT_NEAR(varies.mean, 1.0 / 0.9, 1e-9);
  EXPECT_LT(varies.low, 1);
  EXPECT_GT(varies.high, 1.2);
  const Estimate grows = gain([](Index i) { return 1 - 0.04 * static_cast<double>(i); });
  EXPECT_NEAR(grows.mean, 1 / 0.7, 1e-9);
  EXPECT_GT(grows.low, grows.mean - 0.04) << "more is gained along a prompt: that is not chance";
}

Outcome with(const std::string& name, double speedup, double perplexity, double needles,
             double kl = 0) {
  Outcome o;
  o.name = name, o.length = 1000, o.speedup = speedup, o.kl = kl;
  o.perplexity = {perplexity, perplexity - 1, perplexity + 1},
  o.needles = {needles, needles - 5, needles + 5};
  o.gain = {speedup / 2, speedup / 2 - 0.04, speedup / 2 + 0.04};  // exact mode: 2, nearly always
  return o;
}

// Perplexity that falls, or that chance may have raised, and needles that are found are no loss. A text's perplexity rises and
// falls by chance where logits move as roundings move them; so do needles in exact mode, of which a dozen are asked for.
// Selection can lose needles whatever its divergence on text.
TEST(CheckAdvice, NamesWhatIsLostAndNothingElse) {
  Outcome noisy = with("", 8, 2, 0, 0.01), layer = with("", 8, 0, 0);
  noisy.perplexity.low = -0.01;
  layer.worst_layer = 11, layer.worst_layer_kl = 0.0101;
  const std::string points = "needles -8.3 points, at most 5 may be lost";
  const struct {
    double kl_of_exact;
    Outcome outcome;
    std::string loss;
  } all[] = {
      {0.003, with("", 8, -0.99, 2, 0.0131),
       "divergence 0.0131, at most 0.01 more than exact mode's 0.0030 is allowed"},
      {0.003, with("", 8, 1.25, -6, 0.01),
       "perplexity +1.25 %, at most +1 % is allowed; needles -6.0 points, at most 5 may be lost"},
      {0.003, with("", 8, -3, 9, 0.0129), ""},
      {0.003, noisy, ""},
      {0.003, layer, "layer 11 alone diverges by 0.0101, at most 0.01 is allowed"},
      {0.0033, with("exact bf16", 3, 2, -8.3, 0.0065), ""},
      {0.0033, with("exact bf16", 3, 2, 0, 0.0067), "perplexity +2.00 %, at most +1 % is allowed"},
      {0.0033, with("exact bf16", 3, 0, -8.3, 0.0067), points},
      {0.0033, with("recommended", 3, 2, 0, 0.0065), ""},
      {0.0033, with("recommended", 3, 2, -8.3, 0.0065), points},
  };
  for (const auto& [kl_of_exact, outcome, loss] : all)
    EXPECT_EQ(loses_too_much(outcome, with("exact", 2, 0, 0, kl_of_exact), {}), loss);
}

// Among those that lose little and are surely 1.05 times as fast as exact mode: the fastest, or one that loses less and
// is about as fast, a difference that may be chance. Else exact mode, if it is faster than llama.cpp and has its
// logits.
TEST(CheckAdvice, IsTheFastestThatLosesLittle) {
  using Use = Advice::Use;
  const Outcome exact = with("exact", 2, 0, 0), single = with("exact float", 2, 0, 0);
  Outcome unsure = with("recommended", 2.4, 0, 0);
  unsure.gain = {1.2, 0.99, 1.4};
  const auto about_as_fast = [](double x, double y) {
    return std::vector{with("x", x, 0, 0, 0.009), with("y", y, 0, 0, 0.004)};
  };
  const std::vector in_bf16{with("exact bf16", 2.2, 0, 0, 0.003),
                            with("quoka 64 float", 2.1, 0, 0, 0.004),
                            with("quoka 64 bf16", 3, 0, 0, 0.016)};
  const struct {
    Outcome exact;
    std::vector<Outcome> others;
    Use use;
    std::size_t contender;
    std::string says = "";  // parts of Advice::why, with | between them
    Limits limits = {};
  } all[] = {
      {exact,
       {with("paper", 8, 1.01, 0), with("other", 7, 0, -5.1), with("recommended", 5, 0.99, -4.9),
        with("slow", 4, 0, 0), with("far", 9, -2, 3, 0.011)},
       Use::selection,
       4,
       "5.00 times|2.50 as exact"},
      {exact, {with("", 8, 1.01, 0)}, Use::selection, 2, "", {.perplexity = 2}},
      {exact, {with("", 8, 0, -9)}, Use::selection, 2, "", {.needles = 10}},
      {exact, about_as_fast(3, 2.73), Use::selection, 3},
      {exact, about_as_fast(3, 2.72), Use::selection, 2},  // 1.10 times as fast is worth it
      {exact, about_as_fast(2.73, 3), Use::selection, 3},
      {exact, {with("", 3, 0, 0, 0.004), with("", 8, 0, 0, 0.009)}, Use::selection, 3},
      {exact, {with("", 2.11, 0, 0)}, Use::selection, 2},
      {exact, {with("", 2.09, 0, 0)}, Use::exact, 1},  // 1.045 times exact mode
      {exact, {}, Use::exact, 1, "no other settings were tried"},
      {exact,
       {with("paper", 8, 3, 0), with("slow", 4, 3, 0)},
       Use::exact,
       1,
       "; paper loses too much: perplexity +3.00 %, at most +1 % is allowed"},
      {exact,
       {with("paper", 8, -0.99, 0, 0.07)},
       Use::exact,
       1,
       "; paper loses too much: divergence 0.0700, at most 0.01 more than exact mode's 0.0000 is"},
      {exact, {with("recommended", 2.4, 0, 0)}, Use::selection, 2},
      {exact,  // other ubatches might not show this gain
       {unsure},
       Use::exact,
       1,
       "recommended is only 1.20 times as fast as exact mode (0.99 to 1.40), 1.05 are wanted"},
      {single, in_bf16, Use::selection, 2, "1.10 as exact float"},
      {single, in_bf16, Use::exact, 1, "exact float is 2.00 times as fast", {.gain = 1.2}},
      {with("exact", 1.04, 0, 0), {with("paper", 2, 5, 0)}, Use::nothing, 0, "do not use it here"},
      {with("exact", 3, 0, 0, 0.011), {with("paper", 9, 0, 0)}, Use::nothing, 0, "0.0110"},
  };
  for (const auto& [of_exact, others, use, contender, says, limits] : all) {
    std::vector<Outcome> outcomes{with("llama.cpp", 1, 0, 0), of_exact};
    outcomes.insert(outcomes.end(), others.begin(), others.end());
    const Advice advice = advise(outcomes, limits);
    EXPECT_EQ(advice.use, use) << advice.why;
    EXPECT_EQ(advice.contender, contender) << advice.why;
    std::istringstream parts(says);
    for (std::string part; std::getline(parts, part, '|');)
      EXPECT_NE(advice.why.find(part), std::string::npos) << part << ": " << advice.why;
  }
}

TEST(CheckAdvice, SaysWhenTimesAreNoOnesWord) {
  const auto table = [](double speedup) {
    return std::vector<Outcome>{with("llama.cpp", 1, 0, 0), with("exact", speedup, 0, 0)};
  };
  EXPECT_EQ(unsteady(table(1.0), table(1.14)), "");
  const std::string said = unsteady(table(0.71), table(1.06));
  EXPECT_NE(said.find("0.71"), std::string::npos) << said;
  EXPECT_NE(said.find("1.06"), std::string::npos) << said;
  EXPECT_EQ(unsteady(table(1.06), table(0.71)).find("1.06 times"), said.find("0.71 times"));
  EXPECT_EQ(unsteady({with("llama.cpp", 1, 0, 0)}, table(9)), "") << "nothing to compare";
}

TEST(CheckAdvice, PaysFromTheLengthAfterWhichItStaysFaster) {
  const std::vector<Index> lengths{200, 400, 800};
  const auto from = [&](double a, double b, double c) {
    return pays_from(
        made_up(lengths, {one, one, [=](Index i) { return i < 2   ? a
                                                          : i < 4 ? b
                                                                  : c; }}, {0, 0, 0},
                {1, 1, 1}),
        lengths, 2, 1.05);
  };
  EXPECT_EQ(from(0.5, 0.5, 0.5), 0);
  EXPECT_EQ(from(1.0, 0.5, 0.5), 200);
  EXPECT_EQ(from(0.5, 0.96, 0.5), 400) << "1.04 times is not enough";
  EXPECT_EQ(from(0.5, 0.5, 1.5), 800);
}

TEST(CheckAdvice, APromiseIsBrokenBeyondItsInterval) {
  const auto at = [](double perplexity, double needles, double kl = 0) {
    return with("", 2, perplexity, needles, kl);
  };
  const auto broken = [](const Outcome& promised, const Outcome& kept,
                         Advice::Use use = Advice::Use::selection) {
    return broken_promise(promised, kept, {}, use);
  };
  EXPECT_EQ(broken(at(0.5, 0), at(0.9, -3)), "");
  EXPECT_EQ(broken(at(0.5, 0), at(2.4, 0)), "") << "intervals meet";
  EXPECT_NE(broken(at(0.5, 0), at(2.6, 0)).find("+1.60 % at the least, +1.50"), std::string::npos);
  EXPECT_EQ(broken(at(0.5, -1), at(0, -10.9)), "");
  EXPECT_NE(broken(at(0.5, -1), at(0, -11.1)).find("-6.1 points at the most, -6.0"),
            std::string::npos);
  EXPECT_EQ(broken(at(-3, 9), at(1.9, -9)), "") << "within what was allowed at all";
  EXPECT_EQ(broken(at(0, 0, 0.04), at(0, 0, 0.0599)), "");
  EXPECT_NE(broken(at(0, 0, 0.04), at(0, 0, 0.0601)).find("0.0601, 0.0600"), std::string::npos);
  EXPECT_EQ(broken(at(0, 0, 0.001), at(0, 0, 0.0099)), "") << "within what was allowed at all";
  EXPECT_EQ(broken(at(0, 0), at(5, -50, 0.009), Advice::Use::exact), "");
  EXPECT_NE(broken(at(0, 0), at(0, 0, 0.011), Advice::Use::exact).find("0.0110"),
            std::string::npos);
}

TEST(CheckPass, DivergenceIsKullbackAndLeiblers) {
  const std::vector<float> a{std::log(0.5f), std::log(0.25f), std::log(0.25f)}, b{1.0f, 1.0f, 1.0f};
  EXPECT_NEAR(divergence(a, b), 0.5 * std::log(1.5) + 0.5 * std::log(0.75), 1e-6);
  EXPECT_NEAR(divergence(b, a), (std::log(2.0 / 3) + 2 * std::log(4.0 / 3)) / 3, 1e-6);
  EXPECT_EQ(divergence(a, a), 0);
  const std::vector<float> far{1000.0f, -1000.0f, 0.0f};
  EXPECT_EQ(divergence(far, far), 0) << "no overflow";
  const std::vector<float> bad{0.0f, std::numeric_limits<float>::quiet_NaN(), 0.0f};
  EXPECT_THROW(divergence(a, bad), std::runtime_error);
}

TEST(CheckPass, SamplesAreWhereTheTextGoesOn) {
  Reading reading;
  reading.tokens.assign(100, 7), reading.is_text.assign(100, true);
  for (int i = 50; i < 60; ++i) reading.is_text[static_cast<std::size_t>(i)] = false;
  const auto all = sample_positions(reading, 1000);
  EXPECT_EQ(all.front(), 31);
  EXPECT_EQ(all.back(), 98) << "the last token has none after it";
  EXPECT_EQ(std::ssize(all), 68 - 11) << "neither a fact's nor the one before";
  for (const Index at : all) EXPECT_TRUE(at < 49 || at >= 60) << at;
  const auto some = sample_positions(reading, 10);
  ASSERT_EQ(some.size(), 10u);
  EXPECT_EQ(some.front(), 31);
  EXPECT_GT(some.back(), 88);
}

TEST(CheckPass, AsksForWhatAPrefixHolds) {
  Reading reading;
  for (const Index until : {10, 20, 30, 40})
    reading.questions.push_back({"key", until - 5, until, {}, {}});
  EXPECT_EQ(questions_within(reading, 30, 9), (std::vector<std::size_t>{0, 1, 2}));
  EXPECT_EQ(questions_within(reading, 29, 9), (std::vector<std::size_t>{0, 1}));
  EXPECT_EQ(questions_within(reading, 40, 2), (std::vector<std::size_t>{0, 2}));
  EXPECT_TRUE(questions_within(reading, 5, 2).empty());
}

}  // namespace
