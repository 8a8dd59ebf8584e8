// Gather: the selected rows, in order, bit for bit.

#include <quoka/select/stages.hpp>

#include "support/fixtures.hpp"

namespace {

using namespace quoka_test;
using quoka::gather;

// Any lists, none and all among them, rows of any layout, any threads; zeros behind a list that is shorter than
// another.
TEST(Gather, TakesTheSelectedRows) {
  for_each_storage([]<class T>() {
    for (std::uint64_t seed = 0; seed < 40; ++seed) {
      Random random(seed);
      const Index dims[] = {1, 17, 64};
      const Index dim = dims[random.below(3)], kv_len = random.below(4) == 0 ? 0 : 37;
      auto past = random.tensor<T>(2, 3, kv_len, dim);
      if (kv_len > 0) {
        past(0, 0, 2, 0) = stored<T>(std::nan(""));
        past(1, 2, 5, 0) = stored<T>(infinity);
      }
      oracle::Positions lists(2);
      Index most = 0;
      for (auto& heads : lists)
        for (int head = 0; head < 3; ++head) {
          std::vector<Index>& list = heads.emplace_back(random.permutation(kv_len));
          list.resize(uz(random.below(4) == 0 ? kv_len : random.below(kv_len + 1)));
          std::sort(list.begin(), list.end());
          most = std::max(most, std::ssize(list));
        }
      Tensor4<T> expected(2, 3, most, dim);
      expected.setConstant(stored<T>(0.0));
      for (Index b = 0; b < 2; ++b)
        for (Index head = 0; head < 3; ++head)
          for (Index i = 0; i < std::ssize(lists[uz(b)][uz(head)]); ++i)
            std::copy_n(&past(b, head, lists[uz(b)][uz(head)][uz(i)], 0), dim,
                        &expected(b, head, i, 0));
      const Selection keep = to_selection(lists, kv_len);
      const Strided<T> strided(past);
      for_each_executor([&](ExecutorRef executor) {
        EXPECT_TRUE(same_bits(gather(past, keep, executor), expected));
        EXPECT_TRUE(same_bits(gather(strided.view(), keep, executor), expected));
      });
      EXPECT_TRUE(same_bits(gather(past, Selection::all(2, 3, kv_len)), past));
    }
  });
}

TEST(GatherRefuses, ASelectionOfAnotherShape) {
  const Tensor4<float> past(2, 3, 37, 17);
  expect_refused([&] { (void)gather(past, Selection::all(1, 3, 37)); }, {"batch", 1, 2});
  expect_refused([&] { (void)gather(past, Selection::all(2, 4, 37)); }, {"heads", 4, 3});
  expect_refused([&] { (void)gather(past, Selection::all(2, 3, 36)); }, {"len", 36, 37});
}

}  // namespace
