// The vector unit: exp2 within the error it declares, widening and rounding of storage, transposes.

#include <quoka/core/simd.hpp>

#include "support/fixtures.hpp"

QUOKA_PACKET_ARGUMENTS_BEGIN
namespace {

using namespace quoka_test;
namespace simd = quoka::simd;
using simd::lanes;
using simd::Packet;

inline constexpr std::size_t width = std::size_t{lanes};
using Lanes = std::array<float, width>;

std::uint32_t bits(float x) { return std::bit_cast<std::uint32_t>(x); }

Lanes lanes_of(const Packet& x) {
  Lanes values;
  simd::store_unaligned(values.data(), x);
  return values;
}
Packet packet_of(const Lanes& values) { return simd::load_unaligned(values.data()); }

// exp2 of the packet that holds x in lane `lane` and other values beside it.
float exp2_in_lane(float x, int lane) {
  Lanes values;
  for (int i = 0; i < lanes; ++i) values[uz(i)] = -1.5f - static_cast<float>(i);
  values[uz(lane)] = x;
  return lanes_of(simd::exp2(packet_of(values)))[uz(lane)];
}

// [exp2_least, 0]: every 2^-13, both ends, and the floats around each integer and half.
std::vector<float> exp2_arguments() {
  std::vector<float> xs;
  for (float x = simd::exp2_least; x <= 0.0f; x += 0x1p-13f) xs.push_back(x);
  for (float x = simd::exp2_least; x <= 0.0f; x += 0.5f)
    for (float near : {std::nextafter(x, -1e9f), x, std::nextafter(x, 1e9f)})
      if (near >= simd::exp2_least && near <= 0.0f) xs.push_back(near);
  for (float x = 1.0f; x > 0.0f; x *= 0.37f) xs.push_back(-x);  // down to the denormals
  while (xs.size() % width != 0) xs.push_back(-0.0f);
  return xs;
}

// ---- exp2 ---------------------------------------------------------------------------------------

TEST(Exp2, IsWithinItsDeclaredErrorOverItsRange) {
  const std::vector<float> xs = exp2_arguments();
  double largest = 0;
  float worst = 0;
  for (std::size_t at = 0; at < xs.size(); at += width) {
    const Lanes y = lanes_of(simd::exp2(simd::load_unaligned(&xs[at])));
    for (std::size_t i = 0; i < width; ++i) {
      const double exact = std::exp2(static_cast<double>(xs[at + i]));
      const double error = std::abs(static_cast<double>(y[i]) - exact) / exact;
      if (!(error <= largest)) largest = error, worst = xs[at + i];
    }
  }
  EXPECT_LE(largest, static_cast<double>(simd::exp2_max_error)) << "at " << worst;
  RecordProperty("exp2_error", std::to_string(largest * 1e9) + "e-9");
}

TEST(Exp2, OfPacketsAndOfFloatsHasTheSameBits) {
  const std::vector<float> xs = exp2_arguments();
  for (std::size_t at = 0; at < xs.size(); at += width) {
    const Lanes y = lanes_of(simd::exp2(simd::load_unaligned(&xs[at])));
    for (std::size_t i = 0; i < width; ++i)
      ASSERT_EQ(bits(y[i]), bits(simd::exp2(xs[at + i]))) << xs[at + i];
  }
}

TEST(Exp2, OfZeroIsExactlyOne) {
  for (int lane = 0; lane < lanes; ++lane) {
    EXPECT_EQ(exp2_in_lane(0.0f, lane), 1.0f);
    EXPECT_EQ(exp2_in_lane(-0.0f, lane), 1.0f);
  }
  EXPECT_EQ(simd::exp2(0.0f), 1.0f);
  EXPECT_EQ(simd::exp2(-0.0f), 1.0f);
}

TEST(Exp2, OfIntegersIsExact) {
  for (float x = simd::exp2_least; x <= 0.0f; x += 1.0f)
    EXPECT_EQ(exp2_in_lane(x, lanes - 1), std::exp2(x)) << x;
}

TEST(Exp2, BelowItsRangeIsExactlyZero) {
  for (float x : {std::nextafter(simd::exp2_least, -1e9f), -126.0f, -127.0f, -149.0f, -150.0f,
                  -1e4f, -1e30f, std::numeric_limits<float>::lowest(), -infinity}) {
    EXPECT_EQ(bits(simd::exp2(x)), 0u) << x;
    for (int lane = 0; lane < lanes; ++lane) EXPECT_EQ(bits(exp2_in_lane(x, lane)), 0u) << x;
  }
}

TEST(Exp2, IsNeverDenormalNorAboveOne) {
  for (float x : exp2_arguments()) {
    const float y = simd::exp2(x);
    ASSERT_GE(y, std::numeric_limits<float>::min()) << x;
    ASSERT_LE(y, 1.0f) << x;
  }
}

TEST(Exp2, OfNanIsNan) {
  EXPECT_TRUE(std::isnan(simd::exp2(not_a_number)));
  EXPECT_TRUE(std::isnan(simd::exp2(-not_a_number)));
  for (int lane = 0; lane < lanes; ++lane) {
    EXPECT_TRUE(std::isnan(exp2_in_lane(not_a_number, lane)));
    EXPECT_TRUE(std::isnan(exp2_in_lane(-not_a_number, lane)));
  }
}

// Whatever its payload says: the low bits of x + magic are no exponent then.
TEST(Exp2, OfNanWithAPayloadIsNan) {
  for (std::uint32_t payload :
       {0x7fc00001u, 0x7fc000ffu, 0x7fc00155u, 0xffc00001u, 0xffc001ffu, 0x7fffffffu}) {
    const float nan = std::bit_cast<float>(payload);
    EXPECT_TRUE(std::isnan(simd::exp2(nan))) << std::hex << payload << ": " << simd::exp2(nan);
    EXPECT_TRUE(std::isnan(exp2_in_lane(nan, 0)))
        << std::hex << payload << ": " << exp2_in_lane(nan, 0);
  }
}

TEST(Exp2, LeavesTheOtherLanesAlone) {
  for (float odd : {not_a_number, -infinity, -1e30f})
    for (int lane = 0; lane < lanes; ++lane) {
      Lanes values;
      values.fill(-3.0f);
      values[uz(lane)] = odd;
      const Lanes y = lanes_of(simd::exp2(packet_of(values)));
      for (int i = 0; i < lanes; ++i)
        if (i != lane) {
          ASSERT_EQ(y[uz(i)], 0.125f);
        }
    }
}

// ---- other arithmetic ---------------------------------------------------------------------------

TEST(Simd, TanhKeepsNanAndSaturates) {
  for (int lane = 0; lane < lanes; ++lane) {
    Lanes values{};
    values[uz(lane)] = not_a_number;
    EXPECT_TRUE(std::isnan(lanes_of(simd::tanh(packet_of(values)))[uz(lane)]));
    for (float x : {-infinity, -1e30f, -9.0f, -0.3f, 0.0f, 1e-6f, 0.7f, 3.0f, 1e30f, infinity}) {
      values[uz(lane)] = x;
      EXPECT_NEAR(lanes_of(simd::tanh(packet_of(values)))[uz(lane)], std::tanh(x), 1e-6f) << x;
    }
  }
}

TEST(Simd, SelectLessComparesLaneByLaneAndNanIsNotLess) {
  for (int lane = 0; lane < lanes; ++lane) {
    Lanes a{};  // 0 < 0 is false
    a[uz(lane)] = -1.0f;
    const Packet chosen =
        simd::select_less(packet_of(a), simd::zero(), simd::broadcast(3.0f), simd::broadcast(7.0f));
    for (int i = 0; i < lanes; ++i) ASSERT_EQ(lanes_of(chosen)[uz(i)], i == lane ? 3.0f : 7.0f);
  }
  const Packet nan = simd::broadcast(not_a_number);
  EXPECT_EQ(lanes_of(simd::select_less(nan, simd::zero(), simd::broadcast(3.0f),
                                       simd::broadcast(7.0f)))[0],
            7.0f);
}

TEST(Simd, MaxIsTheFirstArgumentWhereItIsNan) {
  const Packet nan = simd::broadcast(not_a_number);
  EXPECT_TRUE(std::isnan(lanes_of(simd::max(nan, simd::zero()))[0]));
}

TEST(Simd, ReductionsSeeEveryLane) {
  for (int lane = 0; lane < lanes; ++lane) {
    Lanes values{};
    values[uz(lane)] = 3.0f;
    EXPECT_EQ(simd::reduce_max(packet_of(values)), 3.0f);
    EXPECT_EQ(simd::reduce_add(packet_of(values)), 3.0f);
  }
}

TEST(Simd, UnrollCallsInOrderWithConstants) {
  std::vector<int> seen;
  simd::unroll<7>([&](auto i) { seen.push_back(std::integral_constant<int, i>::value); });
  EXPECT_EQ(seen, (std::vector<int>{0, 1, 2, 3, 4, 5, 6}));
}

// ---- storage to float and back ------------------------------------------------------------------

template <class T>
class SimdStorage : public ::testing::Test {};
TYPED_TEST_SUITE(SimdStorage, AllStorageTypes, StorageNames);

// All 2^16 values of the 16-bit types; as many floats of every exponent.
template <class T>
std::vector<T> many_values() {
  std::vector<T> values;
  for (std::uint32_t i = 0; i < 0x10000u; ++i) {
    if constexpr (sizeof(T) == 2)
      values.push_back(std::bit_cast<T>(static_cast<std::uint16_t>(i)));
    else
      values.push_back(std::bit_cast<T>((i << 16) | (i * 2654435761u >> 16)));
  }
  return values;
}

TYPED_TEST(SimdStorage, LoadAsFloatIsExact) {
  const std::vector<TypeParam> values = many_values<TypeParam>();
  for (std::size_t at = 0; at < values.size(); at += width) {
    const Lanes wide = lanes_of(simd::load_as_float(&values[at]));
    for (std::size_t i = 0; i < width; ++i) {
      const float exact = static_cast<float>(values[at + i]);
      if (std::isnan(exact)) {
        ASSERT_TRUE(std::isnan(wide[i]));
      } else {
        ASSERT_EQ(bits(wide[i]), bits(exact)) << exact;
      }
    }
  }
}

TYPED_TEST(SimdStorage, LoadAsFloatNeedsNoAlignment) {
  std::vector<TypeParam> values(uz(2 * lanes + 1));
  for (int i = 0; i < 2 * lanes + 1; ++i) values[uz(i)] = stored<TypeParam>(i + 0.5);
  for (int shift = 0; shift <= lanes; ++shift)
    for (int i = 0; i < lanes; ++i)
      EXPECT_EQ(lanes_of(simd::load_as_float(&values[uz(shift)]))[uz(i)],
                static_cast<float>(shift + i) + 0.5f);
}

TYPED_TEST(SimdStorage, StoreFromFloatRoundsToNearest) {
  Random random(11);
  for (int round = 0; round < 501; ++round) {
    Lanes wide;
    for (float& x : wide)
      x = static_cast<float>(random.normal() * std::exp2(20.0 * random.uniform() - 10.0));
    std::array<TypeParam, width> narrow;
    simd::store_from_float(narrow.data(), packet_of(wide));
    for (std::size_t i = 0; i < width; ++i) {
      const double x = static_cast<double>(wide[i]);
      ASSERT_EQ(narrow[i], static_cast<TypeParam>(wide[i]));
      ASSERT_NEAR(static_cast<double>(static_cast<float>(narrow[i])), x,
                  std::abs(x) * rounding_error<TypeParam> + 1e-7);
    }
  }
}

TYPED_TEST(SimdStorage, StoreFromFloatBringsBackWhatWasLoaded) {
  const std::vector<TypeParam> values = many_values<TypeParam>();
  for (std::size_t at = 0; at < values.size(); at += width) {
    std::array<TypeParam, width> back;
    simd::store_from_float(back.data(), simd::load_as_float(&values[at]));
    for (std::size_t i = 0; i < width; ++i) {
      const float before = static_cast<float>(values[at + i]), after = static_cast<float>(back[i]);
      if (std::isnan(before)) {
        ASSERT_TRUE(std::isnan(after));
      } else {
        ASSERT_EQ(bits(after), bits(before)) << before;
      }
    }
  }
}

TYPED_TEST(SimdStorage, StoreFromFloatWritesItsLanesOnly) {
  std::vector<TypeParam> memory(uz(lanes + 2), stored<TypeParam>(7));
  simd::store_from_float(memory.data() + 1, simd::broadcast(3.0f));
  EXPECT_EQ(static_cast<float>(memory.front()), 7.0f);
  EXPECT_EQ(static_cast<float>(memory.back()), 7.0f);
  for (int i = 0; i < lanes; ++i) EXPECT_EQ(static_cast<float>(memory[uz(1 + i)]), 3.0f);
}

// ---- transpose ----------------------------------------------------------------------------------

TEST(Simd, TransposeSwapsRowsAndColumns) {
  simd::Square square;
  for (int i = 0; i < lanes; ++i) {
    Lanes row;
    for (int j = 0; j < lanes; ++j) row[uz(j)] = static_cast<float>(100 * i + j);
    square.packet[i] = packet_of(row);
  }
  simd::transpose(square);
  for (int i = 0; i < lanes; ++i)
    for (int j = 0; j < lanes; ++j)
      EXPECT_EQ(lanes_of(square.packet[i])[uz(j)], static_cast<float>(100 * j + i));
}

}  // namespace
QUOKA_PACKET_ARGUMENTS_END
