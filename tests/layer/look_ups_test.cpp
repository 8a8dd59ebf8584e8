// Which keys a call compares with their codes, and how surely they show that a cache has changed.

#include <quoka/select/key_sketch.hpp>

#include "support/fixtures.hpp"

#include <set>
#include <utility>

namespace {

using namespace quoka_test;
using quoka::detail::LookUps;

// ---- which rows ---------------------------------------------------------------------------------

// The keys that `calls` calls compare, over all heads.
std::set<Index> compared(Index len, Index heads, Index calls, std::uint64_t first = 0) {
  std::set<Index> rows;
  for (Index turn = 0; turn < calls; ++turn) {
    const LookUps at(len, heads, first + static_cast<std::uint64_t>(turn));
    for (Index head = 0; head < heads; ++head)
      for (Index i = 0; i < at.count(); ++i) rows.insert(at(head, i));
  }
  return rows;
}

// The longest run of keys without one of these rows, before the last of them.
Index longest_run_beside(const std::set<Index>& rows) {
  Index before = -1, longest = 0;
  for (const Index row : rows) longest = std::max(longest, row - std::exchange(before, row) - 1);
  return longest;
}

TEST(LookUps, EachCallChecksTheNewestTheOldestAndOtherKeys) {
  for (const Index len : {1, 2, 3, 10, 34, 35, 500, 100000})
    for (const Index heads : {1, 2, 8, 40})
      for (const std::uint64_t turn : {0, 1, 2, 1000003}) {
        const LookUps at(len, heads, turn);
        std::set<Index> others;
        for (Index head = 0; head < heads; ++head) {
          std::set<Index> of_head;
          for (Index i = 0; i < at.count(); ++i) {
            EXPECT_GE(at(head, i), 0);
            EXPECT_LT(at(head, i), len);
            of_head.insert(at(head, i));
          }
          EXPECT_TRUE(of_head.count(0) == 1 && of_head.count(len - 1) == 1);
          others.insert(of_head.begin(), of_head.end());
        }
        // Heads look elsewhere.
        EXPECT_GE(std::ssize(others), std::min<Index>(len, len < 500 ? 20 : 60));
      }
}

// The numbers at the top of key_sketch.hpp.
TEST(LookUps, OneCallFindsALongRunOfChangedKeys) {
  for (const Index len : {300, 4096, 100000})
    for (const Index heads : {1, 2, 3, 8, 16, 40})
      for (const std::uint64_t turn : {0, 1, 7, 100, 54321}) {
        EXPECT_LT(longest_run_beside(compared(len, heads, 1, turn)), len / 46 + 1)
            << len << " keys, " << heads << " heads";
      }
}
TEST(LookUps, SomeCallsFindASmallerRunAndInTimeEveryKey) {
  for (const Index len : {1000, 4096})
    for (const Index heads : {1, 8}) {
      const auto calls = [&](double share) {
        return static_cast<Index>(std::ceil(1.9 / (64 * share)));
      };
      const double share = 1.0 / 200;
      EXPECT_LT(longest_run_beside(compared(len, heads, calls(share), 12)),
                static_cast<Index>(share * static_cast<double>(len)) + 1);
      EXPECT_EQ(std::ssize(compared(len, heads, calls(1.0 / static_cast<double>(len)), 5)), len);
    }
}

}  // namespace
