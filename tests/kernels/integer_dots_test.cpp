// Dot products of small integers: the ISA's own and the plain ones are exact, and codes lie where
// the functions that place them say.

#include <quoka/kernels/code_units.hpp>

#include "support/codes.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <limits>
#include <random>
#include <span>
#include <utility>
#include <vector>

QUOKA_PACKET_ARGUMENTS_BEGIN
namespace {

namespace simd = quoka::simd;
using quoka::Index;
using simd::lanes;

TEST(RoundToInt16, IsToNearestEven) {
  for (float x : {0.0f, 0.5f, 1.5f, 2.5f, -0.5f, -1.5f, 0.49f, -32768.0f, 32767.4f, 1234.6f})
    EXPECT_EQ(simd::round_to_int16(x), static_cast<std::int16_t>(std::nearbyint(x)));
  EXPECT_EQ(simd::round_to_int16(std::numeric_limits<float>::quiet_NaN()), 0);
}

// Two blocks of codes against `rows` queries.
struct Case {
  using Code = std::function<int(Index row, Index c)>;
  Index dim, rows;
  std::vector<int> keys;     // [2 * code_block, dim]
  std::vector<int> queries;  // [rows, dim]

  Case(Index dim_, Index rows_, const Code& key, const Code& query) : dim(dim_), rows(rows_) {
    for (Index i = 0; i < 2 * simd::code_block; ++i)
      for (Index c = 0; c < dim; ++c) keys.push_back(key(i, c));
    for (Index m = 0; m < rows; ++m) {
      for (Index c = 0; c < dim; ++c) queries.push_back(query(m, c));
      quoka_test::keep_to_run_sums(std::span(queries).last(static_cast<std::size_t>(dim)));
    }
  }
  static Case drawn(Index dim, Index rows) {
    std::mt19937 random(static_cast<unsigned>(dim * 31 + rows));
    const auto draw = [&](Index, Index) { return static_cast<int>(random() % 255u) - 127; };
    return {dim, rows, draw, draw};
  }
  int dot(Index key, Index row) const {
    int sum = 0;
    for (Index c = 0; c < dim; ++c)
      sum += keys[static_cast<std::size_t>(key * dim + c)] *
             queries[static_cast<std::size_t>(row * dim + c)];
    return sum;
  }
};

void expect_exact(simd::CodeScores over, const Case& x) {
  struct alignas(64) Line {
    std::uint8_t bytes[64];
  };
  const auto lines = static_cast<std::size_t>(simd::code_block_bytes(x.dim) / 64);
  std::vector<Line> store(2 * lines);
  std::memset(store.data(), simd::stored_key_code(0), store.size() * sizeof(Line));
  std::uint8_t* const block[2] = {store.front().bytes, store[lines].bytes};
  for (Index key = 0; key < 2 * simd::code_block; ++key)
    for (Index c = 0; c < x.dim; ++c)
      block[key / simd::code_block][simd::key_code_at(key % simd::code_block, c)] =
          simd::stored_key_code(x.keys[static_cast<std::size_t>(key * x.dim + c)]);
  std::vector<std::int32_t> queries(static_cast<std::size_t>(simd::code_steps(x.dim) * x.rows));
  std::vector<std::int32_t> offset;
  auto* const codes = reinterpret_cast<std::int8_t*>(queries.data());
  for (Index m = 0; m < x.rows; ++m) {
    std::int32_t sum = 0;
    for (Index c = 0; c < x.dim; ++c) {
      const int code = x.queries[static_cast<std::size_t>(m * x.dim + c)];
      codes[simd::query_code_at(x.rows, m, c)] = static_cast<std::int8_t>(code);
      sum += code;
    }
    offset.push_back(simd::code_offset(sum));
  }
  alignas(64) std::int32_t best[2 * simd::code_block];
  std::fill(best, best + 2 * simd::code_block, -1000);
  const std::uint8_t* const keys[2] = {block[0], block[1]};
  quoka::detail::VectorCodes(
      {queries.data(), offset.data(), x.rows, x.rows, simd::code_steps(x.dim)})
      .dots(over, keys, best, {});
  for (Index key = 0; key < 2 * simd::code_block; ++key) {
    std::int32_t exact = -1000;
    for (Index m = 0; m < x.rows; ++m)
      exact =
          over == simd::CodeScores::max ? std::max(exact, x.dot(key, m)) : exact + x.dot(key, m);
    ASSERT_EQ(best[key], exact) << key;
  }
}

TEST(CodeDots, AreExactForAnyNumberOfQueriesAndChannels) {
  for (Index dim : {1, 3, 4, 37, 128})
    for (Index rows : {1, 2, 3, 4, 7, 8, 13, 16, 20, 24, 27, 45}) {
      const Case x = Case::drawn(dim, rows);
      expect_exact(simd::CodeScores::max, x);
      expect_exact(simd::CodeScores::sum, x);
    }
}

// The patterns of codes that saturate first: the largest ones, of one sign or of two, in all channels,
// or in the few that are added in 16 bits.
std::vector<Case> extreme_cases(std::initializer_list<Index> dims) {
  const auto all = [](int code) { return [code](Index, Index) { return code; }; };
  const Case::Code patterns[] = {
      all(127),
      all(-127),
      [](Index, Index c) { return c % 2 == 0 ? 127 : -127; },
      [](Index, Index c) { return c % 4 < 2 ? 127 : -127; },
      [](Index, Index c) { return c % 8 < 4 ? 127 : -127; },
      [](Index, Index c) { return c % 4 < 2 ? 127 : 0; },
      [](Index, Index c) { return c % 4 >= 2 ? -127 : 0; },
      [](Index, Index c) { return c % 8 < 2 ? 127 : 0; },
      [](Index, Index c) { return c % 8 == 5   ? 127
                                  : c % 8 == 4 ? 1
                                               : 0; },
      [](Index m, Index c) { return c == m % 8 ? 127 : 0; },
  };
  std::vector<Case> cases;
  for (const Index dim : dims)
    for (const auto& key : patterns)
      for (const auto& query : patterns) cases.emplace_back(dim, 9, key, query);
  return cases;
}

TEST(CodeDots, NothingSaturates) {
  for (const Case& x : extreme_cases({1, 2, 3, 5, 8, 9, 12, 36, 37, 128})) {
    expect_exact(simd::CodeScores::max, x);
    expect_exact(simd::CodeScores::sum, x);
  }
}

// Which channels are added in 16 bits is what the instructions do: pairs, of code_run steps of four.
TEST(CodeDots, RunSumsAreOfTheChannelsThatAreAddedTogether) {
  if (simd::code_run == 0) GTEST_SKIP() << "products are added in 32 bits";
  std::vector<int> query(19);
  const auto sum_of = [&](std::vector<std::pair<Index, int>> codes) {
    std::fill(query.begin(), query.end(), 0);
    for (const auto& [c, code] : codes) query[static_cast<std::size_t>(c)] = code;
    return simd::run_sum(query.data(), std::ssize(query));
  };
  EXPECT_EQ(sum_of({}), 0);
  EXPECT_EQ(sum_of({{0, 1}, {1, 2}, {4, 4}, {5, 8}}), 15);
  EXPECT_EQ(sum_of({{2, 1}, {3, 2}, {6, 4}, {7, 8}}), 15);
  EXPECT_EQ(sum_of({{0, 1}, {2, 2}, {8, 4}}), 4);
  EXPECT_EQ(sum_of({{0, -1}, {1, -2}, {4, 5}, {5, -4}}), 7);
  EXPECT_EQ(sum_of({{16, 3}, {17, -4}, {18, 5}}), 5);
}

TEST(CodeDots, AQueryAtItsRunScaleKeepsToTheRunSum) {
  std::mt19937 random(17);
  std::normal_distribution<float> normal;
  for (const Index dim : {1, 3, 8, 37, 128})
    for (int turn = 0; turn < 100; ++turn) {
      std::vector<float> query(static_cast<std::size_t>(dim));
      for (float& x : query) x = turn % 2 == 0 ? normal(random) : 1.0f;
      const float scale = simd::run_scale(query.data(), dim);
      if (simd::code_run == 0) {
        ASSERT_EQ(scale, 0.0f);
        continue;
      }
      std::vector<int> codes;
      for (const float x : query) codes.push_back(static_cast<int>(std::nearbyint(x / scale)));
      const int sum = simd::run_sum(codes.data(), dim);
      ASSERT_LE(sum, simd::most_run_sum);
      // The sum is as large as it can be: there is room for 1 a code, of which rounding takes 1/2 either way.
      ASSERT_GE(sum, simd::most_run_sum - 3 * simd::code_run);
    }
}

TEST(CodeDots, BlocksAndStepsAreRoundedUp) {
  EXPECT_EQ(simd::code_blocks(0), 0);
  EXPECT_EQ(simd::code_blocks(simd::code_block + 1), 2);
  EXPECT_EQ(simd::code_steps(simd::code_channels + 1), 2);
}

}  // namespace
QUOKA_PACKET_ARGUMENTS_END
