// Attention over a list of keys for each query: the paths that the random cases of attention_suite_test.cpp are too small
// for, and biases that are not finite.

#include <quoka/attention/attention.hpp>
#include <quoka/kernels/kernels.hpp>
#include <quoka/runtime/thread_pool.hpp>

#include "support/attention_case.hpp"

#include <gtest/gtest.h>

namespace {

using namespace quoka_test;

// A call over lists alone, the same for all KV heads.
struct Listed {
  Inputs<float> in;
  StoredLists lists;

  Listed(Random& random, const Shape& s)
      : in(random_inputs<float>(random, s, false)), lists(1, 1, s.q_len, s.kv_len, 1) {}

  Output<float> attend(AttentionOptions options = {},
                       ExecutorRef executor = SerialExecutor{}) const {
    options.lists = lists.lists();
    options.causal = false, options.arithmetic = quoka::Arithmetic::float_;
    return quoka_test::attend(in, options, nullptr, executor);
  }
  // By the oracle, whose mask hides what is not listed.
  void expect_as_oracle(const Output<float>& output) const {
    oracle::AttentionOptions options;
    options.causal = false;
    options.mask = [&](Index, Index, Index i, Index key) {
      return lists.names(0, 0, i, key) ? 0.0 : -oracle::infinity;
    };
    const auto expected = oracle_result(in, options);
    EXPECT_TRUE(elements_close(output.out, expected.out, 1e-5));
    EXPECT_TRUE(lse_close(output.lse, expected.lse, 1e-5));
  }
};

std::vector<Index> random_list(Random& random, Index keys, Index count) {
  std::vector<Index> list = random.permutation(keys);
  list.resize(uz(count));
  return list;
}

TEST(ListedAttention, IsTheOraclesOfWhatIsListed) {
  // With this many heads a query's rows fill sixteen panels and end in one where the next query's begin.
  const Index panels = 16 * quoka::detail::kernel_sizes().panel_rows;
  const Shape shapes[] = {{1, panels + 2, 1, 16, 16, 3, 300}, {1, 8, 2, 32, 32, 33, 2500},
                          {1, 16, 1, 72, 64, 9, 700},         {1, 130, 1, 40, 24, 3, 300},
                          {1, 3, 3, 16, 16, 130, 400},        {1, 10, 2, 24, 17, 40, 1100},
                          {1, 6, 2, 64, 64, 1, 4000}};
  for (const Shape& s : shapes) {
    SCOPED_TRACE(::testing::Message()
                 << s.q_heads << "/" << s.kv_heads << ", dims " << s.head_dim << "/" << s.v_dim);
    Random random(1);
    Listed call(random, s);
    std::vector<Index> list;
    for (Index i = 0; i < s.q_len; ++i) {
      if (i % 3 != 1)  // else a neighbour's
        list = random_list(random, s.kv_len, s.kv_len / (i % 5 == 4 ? 1 : 3 + i % 7));
      if (i % 11 == 10) list = {i};
      if (i % 13 == 12) list.clear();
      call.lists.set(0, 0, i, list);
    }
    call.lists.store(random);
    call.expect_as_oracle(call.attend());
  }
}

// More keys than are looked at in one go.
TEST(ListedAttention, AStretchEndsAndAnotherBegins) {
  Random random(5);
  constexpr Index keys = 2 * 65536 + 777;
  Listed call(random, {1, 8, 1, 8, 8, 18, keys});
  for (Index i = 0; i < 18; ++i) {
    std::vector<Index> list;
    for (int n = 0; n < 300; ++n) list.push_back(random.below(keys));
    for (const Index x : {65535, 65536, 131071, 131072, 131848})
      if (random.below(2) == 0) list.push_back(x);
    call.lists.set(0, 0, i, list);
  }
  call.lists.store(random);
  const Output<float> alone = call.attend();
  call.expect_as_oracle(alone);
  quoka::ThreadPool pool(3);
  expect_same(call.attend({}, pool), alone);
}

// An infinity or a NaN that a mask adds to the logit of a key that is not listed is not seen; at a listed key it is its
// row's alone, even if no other bias of the call changes anything. Every fourth query lists key 700, beginning with the
// second.
TEST(ListedAttention, ABiasThatIsNotFiniteIsSeenWhereItsKeyIsListed) {
  for (const Index shared : {0, 900})  // keys that all of them list: by rows; by panels
    for (const float usual : {0.0f, 0.5f}) {
      SCOPED_TRACE(shared);
      Random random(9);
      Listed call(random, {1, 8, 2, 32, 32, 32, 1500});
      const std::vector<Index> common = random_list(random, 1500, shared);
      for (Index i = 0; i < 32; ++i) {
        std::vector<Index> list = random_list(random, 1500, 150);
        list.insert(list.end(), common.begin(), common.end());
        std::erase(list, 700);
        if (i % 4 == 1) list.push_back(700);
        call.lists.set(0, 0, i, list);
      }
      call.lists.store(random);
      Tensor4<float> bias(1, 1, 32, 1500);
      bias.setConstant(usual);
      const AttentionOptions options{.mask = quoka::Mask(TensorView<const float>(bias))};
      const Output<float> finite = call.attend(options);
      if (usual != 0.0f) {
        for (const float x : {infinity, not_a_number}) {
          for (Index i = 0; i < 32; ++i)
            if (i % 4 != 1) bias(0, 0, i, 700) = x;
          expect_same(call.attend(options), finite);
        }
        continue;
      }
      bias(0, 0, 1, 700) = not_a_number;
      const Output<float> output = call.attend(options);
      for (Index head = 0; head < 8; ++head)
        for (Index i = 0; i < 32; ++i) {
          EXPECT_EQ(row_is_nan(output, 0, head, i), i == 1) << head << ", " << i;
          if (i != 1) {
            EXPECT_EQ(output.lse(0, head, i), finite.lse(0, head, i));
          }
        }
    }
}

}  // namespace
