// What notices that a cache changed although nobody said so: which rows a call looks up, and how surely they show a change.

#include <quoka/cache/key_witness.hpp>
#include <quoka/cache/kv_cache.hpp>
#include <quoka/packing/byte_formats.hpp>
#include <quoka/views/tensor.hpp>

#include "support/fixtures.hpp"

#include <numeric>
#include <optional>
#include <set>

namespace {

using namespace quoka_test;
using quoka::detail::KeyWitness;
using quoka::detail::LookUps;
using quoka::detail::WitnessWords;

// ---- which rows ---------------------------------------------------------------------------------

// Of all heads together, as they are looked up in `calls` calls.
std::set<Index> looked_up(Index len, Index heads, Index calls, std::uint64_t first = 0) {
  std::set<Index> rows;
  for (Index turn = 0; turn < calls; ++turn) {
    const LookUps at(len, heads, first + static_cast<std::uint64_t>(turn));
    for (Index head = 0; head < heads; ++head)
      for (Index i = 0; i < at.count(); ++i) rows.insert(at(head, i));
  }
  return rows;
}

TEST(LookUps, AreOfTheNewestTheOldestAndOthersInEveryCall) {
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

// The numbers at the top of key_witness.hpp.
TEST(LookUps, FindARunOfKeysInTheFirstCall) {
  for (const Index len : {300, 4096, 100000})
    for (const Index heads : {1, 2, 3, 8, 16, 40})
      for (const std::uint64_t turn : {0, 1, 7, 100, 54321}) {
        const std::set<Index> rows = looked_up(len, heads, 1, turn);
        Index before = -1, longest = 0;
        for (const Index row : rows) longest = std::max(longest, row - before - 1), before = row;
        EXPECT_LT(longest, len / 46 + 1) << len << " keys, " << heads << " heads";
      }
}
TEST(LookUps, FindAShareOfTheKeysInSoManyCallsAndEachKeyInTime) {
  for (const Index len : {1000, 4096})
    for (const Index heads : {1, 8}) {
      const auto calls = [&](double share) {
        return static_cast<Index>(std::ceil(1.9 / (64 * share)));
      };
      const double share = 1.0 / 200;
      const std::set<Index> rows = looked_up(len, heads, calls(share), 12);
      Index before = -1, longest = 0;
      for (const Index row : rows) longest = std::max(longest, row - before - 1), before = row;
      EXPECT_LT(longest, static_cast<Index>(share * static_cast<double>(len)) + 1);
      EXPECT_EQ(std::ssize(looked_up(len, heads, calls(1.0 / static_cast<double>(len)), 5)), len);
    }
}
TEST(LookUps, FindScatteredKeysAsOftenAsIsSaid) {
  Random random(600);
  for (const auto& [share, expected] : {std::pair{0.01, 0.47}, {0.05, 0.96}}) {
    int found = 0;
    const int trials = 2000;
    for (int trial = 0; trial < trials; ++trial) {
      const LookUps at(10000, 8, static_cast<std::uint64_t>(trial));
      bool any = false;
      for (Index head = 0; head < 8; ++head)
        for (Index i = 2; i < at.count(); ++i) any = any || random.uniform() < share;
      found += any ? 1 : 0;
    }
    EXPECT_NEAR(found / static_cast<double>(trials), expected, 0.04);
  }
}

// ---- what is noted ------------------------------------------------------------------------------

constexpr WitnessWords words{"key", "was noted", "call somebody"};

void note(KeyWitness& witness, const Rows& rows, ExecutorRef executor = SerialExecutor{}) {
  witness.stage(rows, rows.len(), rows.len(), executor);
  witness.commit(rows.len());
}
bool holds(KeyWitness& witness, const Rows& rows, int calls = 1) {
  try {
    for (int i = 0; i < calls; ++i) witness.require(rows, words);
    return true;
  } catch (const std::invalid_argument&) {
    return false;
  }
}

struct Stored {
  const quoka::Format* format;
  std::vector<float> scales = {};
};
std::vector<Stored> formats() {
  return {{&quoka::format_of<float>()},
          {&quoka::format_of<Eigen::half>()},
          {&quoka::format_of<Eigen::bfloat16>()},
          {&quoka::q8_0_format()},
          {&quoka::i8_format(), {0.03f}}};
}
quoka::KvCache cache_of(const Stored& as, const Tensor4<float>& k) {
  quoka::KvCache cache(k.dimension(0), k.dimension(1), k.dimension(3), k.dimension(3),
                       {*as.format, as.scales}, {*as.format, as.scales});
  cache.append(k, k);
  return cache;
}

TEST(KeyWitness, EveryChannelOfARowCountsInEveryFormat) {
  Random random(601);
  for (const Stored& as : formats()) {
    SCOPED_TRACE(as.format->name);
    const auto k = random.tensor<float>(2, 3, 20, 64);
    const quoka::KvCache cache = cache_of(as, k);
    KeyWitness witness;
    note(witness, cache.k());
    EXPECT_EQ(witness.len(), 20);
    EXPECT_TRUE(holds(witness, cache.k(), 5));
    for (Index c = 0; c < 64; ++c) {
      auto other = k;
      const Index b = c % 2, head = c % 3, t = (7 * c) % 20;
      other(b, head, t, c) = other(b, head, t, c) > 0.0f ? -1.7f : 1.7f;
      const quoka::KvCache changed = cache_of(as, other);
      expect_refused([&] { witness.require(changed.k(), words); },
                     {"key at position", t, "batch " + std::to_string(b),
                      "KV head " + std::to_string(head), "was noted", 20, "call somebody"});
    }
    EXPECT_TRUE(holds(witness, cache.k()));  // nothing has changed
  }
}

// Another scale is another key, though its bytes are the same.
TEST(KeyWitness, ScalesThatLieApartCount) {
  Random random(602);
  const auto k = random.tensor<float>(1, 2, 40, 32);
  std::vector<float> scales{0.03f};
  const quoka::KvCache cache = cache_of({&quoka::i8_format(), scales}, k);
  const Rows plain(cache.k().data(), quoka::i8_format(), cache.k().sizes(), cache.k().strides());
  std::vector<float> own{0.03f, 0.03f};
  KeyWitness witness;
  note(witness, plain.with_scales(own.data(), 1));
  EXPECT_TRUE(holds(witness, plain.with_scales(own.data(), 1)));
  own[1] = 0.031f;
  EXPECT_FALSE(holds(witness, plain.with_scales(own.data(), 1)));
}

TEST(KeyWitness, ARowMayLieElsewhere) {
  Random random(603);
  const auto k = random.tensor<float>(1, 2, 100, 24);
  const Tensor4<float> copy = k;
  const Strided<float> strided(k);
  std::vector<Position> order(100);
  std::iota(order.begin(), order.end(), Position{0});
  std::shuffle(order.begin(), order.end(), std::mt19937(1));
  Tensor4<float> shuffled(1, 2, 100, 24), pool(20, 2, 5, 24);
  std::vector<Position> table;
  for (Index page = 0; page < 20; ++page) table.push_back(static_cast<Position>((7 * page) % 20));
  for (Index head = 0; head < 2; ++head)
    for (Index t = 0; t < 100; ++t)
      for (Index c = 0; c < 24; ++c) {
        shuffled(0, head, order[uz(t)], c) = k(0, head, t, c);
        pool(table[uz(t / 5)], head, t % 5, c) = k(0, head, t, c);
      }
  KeyWitness witness;
  note(witness, k);
  for (const Rows& rows : {Rows(copy), Rows(strided.view()), Rows(shuffled).listed(order),
                           paged(Rows(pool), table, 100)})
    EXPECT_TRUE(holds(witness, rows, 10));
  std::swap(order[3], order[77]);
  EXPECT_FALSE(holds(witness, Rows(shuffled).listed(order), 3));
  std::swap(table[4], table[11]);
  EXPECT_FALSE(holds(witness, paged(Rows(pool), table, 100), 3));
}

TEST(KeyWitness, GrowsIsCutAndGrowsOtherwise) {
  Random random(604);
  const auto k = random.tensor<float>(2, 2, 1000, 8);
  auto other = k;
  for (Index t = 600; t < 1000; ++t) other(1, 1, t, 3) += 1.0f;
  quoka::ThreadPool pool(3);
  KeyWitness witness;
  for (const Index len : {1, 2, 300, 301, 1000}) note(witness, Rows(k).slice(0, len), pool);
  EXPECT_TRUE(holds(witness, k, 30));
  EXPECT_FALSE(holds(witness, other, 2));
  witness.truncate(1200);
  EXPECT_EQ(witness.len(), 1000);
  witness.truncate(600);
  EXPECT_EQ(witness.len(), 600);
  EXPECT_TRUE(holds(witness, other, 30));
  note(witness, other);
  EXPECT_TRUE(holds(witness, other, 30));
  EXPECT_FALSE(holds(witness, k, 2));
  // 2 bytes a key and head, as memory grows: by doubling.
  EXPECT_GE(witness.bytes(), 2 * 2 * 2 * 1000);
  EXPECT_LE(witness.bytes(), 2 * 2 * 2 * 2000);
  witness.truncate(0);
  EXPECT_TRUE(holds(witness, k));
  const auto shape = random.tensor<float>(1, 3, 50, 12);
  note(witness, shape);
  EXPECT_TRUE(holds(witness, shape));
}

TEST(KeyWitness, WhatIsStagedIsNothingUntilItIsCommitted) {
  Random random(605);
  const auto k = random.tensor<float>(1, 2, 100, 8), other = random.tensor<float>(1, 2, 100, 8);
  KeyWitness witness;
  note(witness, Rows(k).slice(0, 50));
  witness.stage(other, 100, 100, SerialExecutor{});
  EXPECT_EQ(witness.len(), 50);
  EXPECT_TRUE(holds(witness, k, 5));
  note(witness, k);
  EXPECT_TRUE(holds(witness, k, 5));
  // Staged by tasks of others, kept, and committed without another look.
  witness.truncate(50);
  witness.reserve(k, 100, 100, 1);
  for (Index head = 0; head < 2; ++head) witness.stage(k, 0, head, 50, 100, 0);
  witness.keep_staged(100);
  note(witness, other);
  EXPECT_TRUE(holds(witness, k, 5));
  // A cut forgets what was kept.
  witness.truncate(50);
  witness.reserve(other, 100, 100, 1);
  for (Index head = 0; head < 2; ++head) witness.stage(other, 0, head, 50, 100, 0);
  witness.keep_staged(100);
  witness.truncate(50);
  note(witness, k);
  EXPECT_TRUE(holds(witness, k, 5));
}

}  // namespace
