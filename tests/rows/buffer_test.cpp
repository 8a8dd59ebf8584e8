// base/buffer.hpp: memory that grows, and its state after a failure and a move.

#include <quoka/base/buffer.hpp>

#include "support/sanitized.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <new>
#include <utility>
#include <vector>

namespace {

using quoka::Buffer;
using quoka::Index;

constexpr Index most = std::numeric_limits<Index>::max();

TEST(Buffer, IsEmptyAtFirst) {
  Buffer<float> buffer;
  EXPECT_EQ(buffer.data(), nullptr);
  EXPECT_EQ(buffer.capacity(), 0);
  EXPECT_EQ(buffer.reserve(0), nullptr);
  EXPECT_EQ(buffer.bytes(), 0);
}

TEST(Buffer, GrowsAndNeverShrinks) {
  Buffer<float> buffer;
  const float* const first = buffer.reserve(37);
  EXPECT_EQ(buffer.capacity(), 37);
  EXPECT_EQ(buffer.bytes(), 37 * 4);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(first) % 64, 0u);
  EXPECT_EQ(buffer.reserve(5), first);
  EXPECT_EQ(buffer.capacity(), 37);
  buffer.reserve_amortised(38);
  EXPECT_EQ(buffer.capacity(), 74);
  buffer.reserve_amortised(1000);
  EXPECT_EQ(buffer.capacity(), 1000);
}

// More bytes than any machine has, or than an Index can count.
TEST(Buffer, AfterAFailureIsEmptyAndServesOn) {
  std::vector<Index> counts{most / 8, most / 4, most};
#if !defined(QUOKA_TEST_SANITIZED)
  counts.push_back(most / 64);
#endif
  for (const Index count : counts) {
    Buffer<double> buffer;
    buffer.reserve(100);
    EXPECT_THROW(buffer.reserve(count), std::bad_alloc) << count;
    double* const x = buffer.reserve(50);
    ASSERT_NE(x, nullptr) << count;
    EXPECT_GE(buffer.capacity(), 50);
    for (Index i = 0; i < 50; ++i) x[i] = 1.0;
  }
}

TEST(Buffer, WhatWasMovedFromIsEmptyAndServesOn) {
  Buffer<float> a;
  float* const memory = a.reserve(100);
  Buffer<float> b(std::move(a));
  EXPECT_EQ(b.data(), memory);
  EXPECT_EQ(b.capacity(), 100);
  EXPECT_EQ(a.capacity(), 0);  // NOLINT: what was moved from may be used
  ASSERT_NE(a.reserve(10), nullptr);
  a = std::move(b);
  EXPECT_EQ(a.data(), memory);
  EXPECT_EQ(a.capacity(), 100);
  EXPECT_EQ(b.capacity(), 0);  // NOLINT
  ASSERT_NE(b.reserve(10), nullptr);
  EXPECT_NE(b.data(), memory);
}

// Memory in huge pages, and of cache lines, in either's place.
TEST(Buffer, LargeAndSmallOnesChangePlaces) {
  Buffer<float> large, small;
  large.reserve(Index{1} << 21)[5] = 5.0f;
  small.reserve(10)[5] = 7.0f;
  std::swap(large, small);
  EXPECT_EQ(large.data()[5], 7.0f);
  EXPECT_EQ(small.data()[5], 5.0f);
}

}  // namespace
