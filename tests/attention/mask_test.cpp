// VisibleCells of rows/mask.hpp: the cells that a mask leaves to a selection. What a mask of any kind hides from attention,
// and what it adds, is in attention_suite_test.cpp.

#include <quoka/rows/mask.hpp>
#include <quoka/runtime/thread_pool.hpp>

#include "support/world.hpp"

#include <gtest/gtest.h>

#include <vector>

namespace {

using namespace quoka_test;

// Masks of bytes and of bits hide, and have no biases.
TEST(VisibleCells, ByWhoSeesThem) {
  using enum StoredMask::Kind;
  quoka::ThreadPool pool(2);
  for_each_draw(60, [&](Random& random) {
    const StoredMask::Kind kind = random.one_of(single, half, bfloat16, bytes, bits);
    const Index batch = 1 + random.below(2), heads = random.one_of(1, 3), q_len = 5,
                kv_len = random.one_of(0, 7, 64, 1500);
    const double seldom = random.one_of(0.0, 0.05);  // how often a cell is hidden from a query
    Tensor4<float> added(batch, heads, q_len, kv_len + q_len);
    added.setZero();
    std::vector<std::vector<Position>> to_all(uz(batch)), to_some = to_all;
    for (Index b = 0; b < batch; ++b)
      for (Index t = 0, run = 0; t < kv_len; ++t) {
        if (t % 16 == 0) run = random.below(3);  // equal cells: bytes are read by eight
        Index seen = 0;
        for (Index head = 0; head < heads; ++head)
          for (Index i = 0; i < q_len; ++i) {
            float& x = added(b, head, i, t);
            if (run == 1 || random.chance(seldom))
              x = -infinity;
            else if (run == 2 && kind < bytes)
              x = 0.5f;
            seen += x > -infinity ? 1 : 0;
          }
        if (seen > 0)
          (seen == heads * q_len ? to_all : to_some)[uz(b)].push_back(static_cast<Position>(t));
      }
    const StoredMask mask(added, kind, random.below(4));
    for (Index b = 0; b < batch; ++b) {
      const quoka::VisibleCells cells(mask.mask(), kv_len, b);
      EXPECT_EQ(cells.to_all, to_all[uz(b)]);
      EXPECT_EQ(cells.to_some, to_some[uz(b)]);
      EXPECT_EQ(quoka::VisibleCells(mask.mask(), kv_len, b, pool).to_all, to_all[uz(b)]);
    }
  });
}

TEST(VisibleCells, RefusesWhatTheMaskHasNot) {
  Random random(27);
  const auto added = random.tensor<float>(2, 1, 5, 20), one = random.tensor<float>(1, 1, 5, 20);
  expect_refused([&] { (void)quoka::VisibleCells(added, 21); }, {21, 20});
  expect_refused([&] { (void)quoka::VisibleCells(added, -1); }, {-1, 0});
  expect_refused([&] { (void)quoka::VisibleCells(added, 20, 2); }, {2, 1});
  expect_refused([&] { (void)quoka::VisibleCells(added, 20, -1); }, {-1, 0});
  EXPECT_NO_THROW(quoka::VisibleCells(one, 20, 7));  // the same for all
}

}  // namespace
