// Attention over a list of keys for each query: calls that are too large for the drawn cases of
// attention_suite_test.cpp.

#include <quoka/attention/attention.hpp>
#include <quoka/runtime/thread_pool.hpp>

#include "support/attention_fixtures.hpp"
#include "support/world.hpp"

#include <gtest/gtest.h>

namespace {

using namespace quoka_test;

// More keys than the bits of one section cover, and so many rows that one task goes through all sections.
TEST(ListedAttention, ASectionOfKeysEndsAndAnotherBegins) {
  Random random(5);
  constexpr Index keys = 2 * 65536 + 777, q_len = 18;
  const auto in = random_inputs<float>(
      random, {.q_heads = 8, .head_dim = 8, .v_dim = 8, .q_len = q_len, .kv_len = keys}, false);
  StoredLists lists(1, 1, q_len, keys, 1);
  for (Index i = 0; i < q_len; ++i) {
    std::vector<Index> list;
    for (int n = 0; n < 300; ++n) list.push_back(random.below(keys));
    for (const Index end : {65536, 131072})  // up to one range of keys before it
      for (Index key = end - 1024; key <= end; ++key)
        if (random.below(8) == 0) list.push_back(key);
    lists.set(0, 0, i, list);
  }
  lists.store(random);
  AttentionOptions options{.arithmetic = quoka::Arithmetic::float_, .causal = false};
  oracle::AttentionOptions exact = to_oracle(options);
  exact.mask = [&](Index, Index, Index i, Index key) {
    return lists.names(0, 0, i, key) ? 0.0 : -oracle::infinity;
  };
  options.lists = lists.lists();
  const Output<float> alone = attend(in, options);
  const auto expected = oracle_result(in, exact);
  EXPECT_TRUE(elements_close(alone.out, expected.out, 1e-5));
  EXPECT_TRUE(lse_close(alone.lse, expected.lse, 1e-5));
  quoka::ThreadPool pool(3);
  expect_same(attend(in, options, nullptr, pool), alone);
}

}  // namespace
