// Gather: the selected rows, in order, bit for bit.

#include <quoka/select/stages.hpp>

#include "support/fixtures.hpp"

namespace {

using namespace quoka_test;
using quoka::gather;

// Some positions of kv_len, another list for every head.
oracle::Positions some_positions(Random& random, Index batch, Index heads, Index kv_len,
                                 Index count) {
  oracle::Positions lists(uz(batch));
  for (Index b = 0; b < batch; ++b)
    for (Index head = 0; head < heads; ++head) {
      std::vector<Index> list = random.permutation(kv_len);
      list.resize(uz(count));
      std::sort(list.begin(), list.end());
      lists[uz(b)].push_back(list);
    }
  return lists;
}

TEST(Gather, TakesTheSelectedRows) {
  for_each_storage([]<class T>() {
    Random random(121);
    for (Index dim : {1, 17, 64})
      for (Index count : {1, 7, 36}) {
        const auto past = random.tensor<T>(2, 3, 37, dim);
        const auto lists = some_positions(random, 2, 3, 37, count);
        const auto rows = gather(past, to_selection(lists, 37));
        ASSERT_EQ(rows.dimension(2), count);
        ASSERT_EQ(rows.dimension(3), dim);
        for (Index b = 0; b < 2; ++b)
          for (Index head = 0; head < 3; ++head)
            for (Index i = 0; i < count; ++i)
              for (Index c = 0; c < dim; ++c)
                ASSERT_EQ(rows(b, head, i, c), past(b, head, lists[uz(b)][uz(head)][uz(i)], c));
      }
  });
}

TEST(Gather, EndsInZerosWhereAHeadKeepsFewer) {
  Random random(127);
  const auto past = random.tensor<Element>(1, 3, 37, 17);
  const oracle::Positions lists = {{{2, 30}, {}, {0, 1, 35, 36}}};
  const auto rows = gather(past, to_selection(lists, 37));
  ASSERT_EQ(rows.dimension(2), 4);
  for (Index head = 0; head < 3; ++head)
    for (Index i = 0; i < 4; ++i)
      for (Index c = 0; c < 17; ++c) {
        const auto& list = lists[0][uz(head)];
        const Element expected =
            i < std::ssize(list) ? past(0, head, list[uz(i)], c) : stored<Element>(0.0);
        ASSERT_EQ(rows(0, head, i, c), expected);
      }
}

TEST(Gather, OfAllIsACopy) {
  Random random(122);
  const auto past = random.tensor<Element>(2, 3, 37, 17);
  EXPECT_TRUE(same_bits(gather(past, Selection::all(2, 3, 37)), past));
}

TEST(Gather, OfNoneIsEmpty) {
  Random random(123);
  Selection none;
  none.select_none(2, 3, 37);
  const auto rows = gather(random.tensor<Element>(2, 3, 37, 17), none);
  EXPECT_EQ(rows.dimension(2), 0);
  EXPECT_EQ(rows.size(), 0);
}

TEST(Gather, OfAnEmptyPastIsEmpty) {
  const Tensor4<Element> past(2, 3, 0, 17);
  EXPECT_EQ(gather(past, Selection::all(2, 3, 0)).size(), 0);
}

TEST(Gather, KeepsNanAndInfinity) {
  Random random(124);
  auto past = random.tensor<Element>(1, 1, 7, 3);
  past(0, 0, 2, 1) = stored<Element>(std::nan(""));
  past(0, 0, 5, 0) = stored<Element>(infinity);
  const auto rows = gather(past, to_selection({{{2, 5}}}, 7));
  EXPECT_TRUE(std::isnan(static_cast<float>(rows(0, 0, 0, 1))));
  EXPECT_EQ(static_cast<float>(rows(0, 0, 1, 0)), infinity);
}

TEST(Gather, StridedRowsGiveTheSame) {
  for_each_storage([]<class T>() {
    Random random(125);
    const auto past = random.tensor<T>(2, 3, 37, 17);
    const Strided<T> strided(past);
    const Selection keep = to_selection(some_positions(random, 2, 3, 37, 7), 37);
    EXPECT_TRUE(same_bits(gather(past, keep), gather(strided.view(), keep)));
  });
}

TEST(Gather, AnyNumberOfThreadsGivesTheSame) {
  Random random(126);
  const auto past = random.tensor<Element>(2, 3, 127, 17);
  const Selection keep = to_selection(some_positions(random, 2, 3, 127, 37), 127);
  const auto alone = gather(past, keep);
  for_each_executor(
      [&](ExecutorRef executor) { EXPECT_TRUE(same_bits(gather(past, keep, executor), alone)); });
}

TEST(GatherRefuses, ASelectionOfAnotherShape) {
  const Tensor4<float> past(2, 3, 37, 17);
  expect_refused([&] { (void)gather(past, Selection::all(1, 3, 37)); }, {"batch", 1, 2});
  expect_refused([&] { (void)gather(past, Selection::all(2, 4, 37)); }, {"heads", 4, 3});
  expect_refused([&] { (void)gather(past, Selection::all(2, 3, 36)); }, {"len", 36, 37});
}

}  // namespace
