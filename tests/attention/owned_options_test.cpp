// OwnedAttentionOptions: the numbers behind the spans are the object's own, and so are a copy's.

#include <quoka/attention/attention.hpp>

#include "support/attention_fixtures.hpp"

#include <memory>

namespace {

using namespace quoka_test;
using quoka::OwnedAttentionOptions;

using Span = std::span<const float>;

// Options whose spans refer to memory that can be spoilt.
struct Borrowed {
  std::vector<float> sinks{1, 2, 3}, factors{4, 5, 6}, slopes{7, 8, 9};

  AttentionOptions options() const {
    return {.scale = 0.5f,
            .softcap = 3.0f,
            .sinks = sinks,
            .sliding_window = 9,
            .causal = false,
            .mask_factors = factors,
            .alibi_slopes = slopes};
  }
  void spoil() {
    for (auto* x : {&sinks, &factors, &slopes}) std::fill(x->begin(), x->end(), not_a_number);
  }
};

void expect_as_given(const OwnedAttentionOptions& owned) {
  const AttentionOptions x = owned.view();
  const Borrowed given;
  const auto same = [](Span a, const std::vector<float>& b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end());
  };
  EXPECT_TRUE(same(x.sinks, given.sinks));
  EXPECT_TRUE(same(x.mask_factors, given.factors));
  EXPECT_TRUE(same(x.alibi_slopes, given.slopes));
  EXPECT_EQ(x.scale, 0.5f);
  EXPECT_EQ(x.softcap, 3.0f);
  EXPECT_EQ(x.sliding_window, 9);
  EXPECT_FALSE(x.causal);
}

TEST(OwnedAttentionOptions, OutliveWhatTheyWereMadeFrom) {
  Borrowed from;
  const OwnedAttentionOptions owned(from.options());
  from.spoil();
  expect_as_given(owned);
}

// The source is spoilt by what it is assigned, and then gone.
TEST(OwnedAttentionOptions, ACopyHasItsOwn) {
  auto source = std::make_unique<OwnedAttentionOptions>(Borrowed().options());
  const OwnedAttentionOptions copy(*source);
  OwnedAttentionOptions assigned;
  assigned = *source;
  const AttentionOptions a = source->view(), b = copy.view(), c = assigned.view();
  for (const auto& [x, y] : {std::pair{&a, &b}, std::pair{&a, &c}, std::pair{&b, &c}}) {
    EXPECT_NE(x->sinks.data(), y->sinks.data());
    EXPECT_NE(x->mask_factors.data(), y->mask_factors.data());
    EXPECT_NE(x->alibi_slopes.data(), y->alibi_slopes.data());
  }
  Borrowed other;
  other.spoil();
  *source = OwnedAttentionOptions(other.options());
  source.reset();
  expect_as_given(copy);
  expect_as_given(assigned);
}

TEST(OwnedAttentionOptions, MovedFromRefersToNothing) {
  OwnedAttentionOptions source(Borrowed().options());
  auto moved = std::make_unique<OwnedAttentionOptions>(std::move(source));
  expect_as_given(*moved);
  OwnedAttentionOptions assigned;
  assigned = std::move(*moved);
  moved.reset();
  expect_as_given(assigned);
  EXPECT_TRUE(source.view().sinks.empty());
  EXPECT_TRUE(source.view().mask_factors.empty());
  EXPECT_TRUE(source.view().alibi_slopes.empty());
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
