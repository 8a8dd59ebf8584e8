// OwnedAttentionOptions: the numbers behind the spans are the object's own, and so are a copy's.

#include <quoka/attention/attention.hpp>

#include "support/attention_fixtures.hpp"

#include <memory>

namespace {

using namespace quoka_test;
using quoka::OwnedAttentionOptions;

// Of options whose spans refer to memory that is spoilt before this returns.
std::unique_ptr<OwnedAttentionOptions> owned() {
  std::vector<float> sinks{1, 2, 3}, factors{4, 5, 6}, slopes{7, 8, 9};
  auto options = std::make_unique<OwnedAttentionOptions>(AttentionOptions{.scale = 0.5f,
                                                                          .softcap = 3.0f,
                                                                          .sinks = sinks,
                                                                          .sliding_window = 9,
                                                                          .causal = false,
                                                                          .mask_factors = factors,
                                                                          .alibi_slopes = slopes});
  for (auto* x : {&sinks, &factors, &slopes}) std::fill(x->begin(), x->end(), not_a_number);
  return options;
}
void expect_as_given(const OwnedAttentionOptions& options) {
  const AttentionOptions x = options.view();
  const auto same = [](std::span<const float> a, const std::vector<float>& b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end());
  };
  EXPECT_TRUE(same(x.sinks, {1, 2, 3}));
  EXPECT_TRUE(same(x.mask_factors, {4, 5, 6}));
  EXPECT_TRUE(same(x.alibi_slopes, {7, 8, 9}));
  EXPECT_EQ(x.scale, 0.5f);
  EXPECT_EQ(x.softcap, 3.0f);
  EXPECT_EQ(x.sliding_window, 9);
  EXPECT_FALSE(x.causal);
}

// The source is another, and then gone.
TEST(OwnedAttentionOptions, CopiesHaveTheirOwnAndMovesTakeThem) {
  auto source = owned();
  expect_as_given(*source);
  const OwnedAttentionOptions copy(*source);
  OwnedAttentionOptions assigned, moved_to;
  assigned = *source;
  for (const OwnedAttentionOptions* const x : {&copy, &std::as_const(assigned)}) {
    EXPECT_NE(x->view().sinks.data(), source->view().sinks.data());
    EXPECT_NE(x->view().mask_factors.data(), source->view().mask_factors.data());
    EXPECT_NE(x->view().alibi_slopes.data(), source->view().alibi_slopes.data());
  }
  OwnedAttentionOptions moved(std::move(*source));
  EXPECT_TRUE(source->view().sinks.empty());  // NOLINT: what was moved from may be used
  EXPECT_TRUE(source->view().mask_factors.empty());
  EXPECT_TRUE(source->view().alibi_slopes.empty());
  source.reset();
  moved_to = std::move(moved);
  expect_as_given(copy), expect_as_given(assigned), expect_as_given(moved_to);
}

TEST(OwnedAttentionOptions, RefuseWhatIsOneCalls) {
  const std::uint8_t seen[] = {1, 1};
  expect_refused(
      [&] {
        OwnedAttentionOptions({.mask = quoka::Mask::bytes(seen, {1, 1, 1, 2}, {2, 2, 2})});
      },
      {"mask", "one call's"});
  expect_refused([] { OwnedAttentionOptions({.q_offset = 17}); }, {"q_offset", 17});
}

}  // namespace
