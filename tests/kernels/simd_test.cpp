// The vector unit: exp2, exp and tanh within the errors they declare, max and min as in std, conversions
// of half and bfloat16 as Eigen's, transposes and reductions, whatever the ISA.

#include <quoka/kernels/error_bounds.hpp>
#include <quoka/simd/simd.hpp>

#include <gtest/gtest.h>

#include <Eigen/Core>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

QUOKA_PACKET_ARGUMENTS_BEGIN
namespace {

namespace simd = quoka::simd;
using simd::lanes;
using simd::Packet;

inline constexpr float infinity = std::numeric_limits<float>::infinity();
inline constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();
inline constexpr std::size_t width = std::size_t{lanes};
using Lanes = std::array<float, width>;

constexpr std::size_t uz(int i) { return static_cast<std::size_t>(i); }
std::uint32_t bits(float x) { return std::bit_cast<std::uint32_t>(x); }

Lanes lanes_of(const Packet& x) {
  Lanes values;
  simd::store_unaligned(values.data(), x);
  return values;
}
Packet packet_of(const Lanes& values) { return simd::load_unaligned(values.data()); }

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

// [exp_least, 0], as exp2_arguments().
std::vector<float> exp_arguments() {
  std::vector<float> xs;
  for (float x : exp2_arguments()) xs.push_back(std::max(x * 0.6931472f, simd::exp_least));
  for (float x : exp2_arguments())
    if (x >= simd::exp_least) xs.push_back(x);
  while (xs.size() % width != 0) xs.push_back(-0.0f);
  return xs;
}
double exp_error(float x) {
  return static_cast<double>(simd::exp2_max_error - x * simd::exp_error_per_x);
}

// ---- exponentials -------------------------------------------------------------------------------

struct Exp2 {
  static constexpr float least = simd::exp2_least;
  static std::vector<float> arguments() { return exp2_arguments(); }
  static double exact(float x) { return std::exp2(static_cast<double>(x)); }
  static double error(float) { return static_cast<double>(simd::exp2_max_error); }
  template <class P>
  static P of(P x) {
    return simd::exp2(x);
  }
};
struct Exp {
  static constexpr float least = simd::exp_least;
  static std::vector<float> arguments() { return exp_arguments(); }
  static double exact(float x) { return std::exp(static_cast<double>(x)); }
  static double error(float x) { return exp_error(x); }
  template <class P>
  static P of(P x) {
    return simd::exp(x);
  }
};
// Exact where exp is exact; AreShortWithinTheirError tests its error.
struct ExpShort : Exp {
  static double error(float x) {
    return exp_error(x) + quoka::detail::short_exponential_error;
  }
  template <class P>
  static P of(P x) {
    return simd::exp_short(x);
  }
};
struct ExponentialNames {
  template <class E>
  static std::string GetName(int) {
    return std::is_same_v<E, Exp2> ? "exp2" : std::is_same_v<E, Exp> ? "exp" : "exp_short";
  }
};
template <class E>
class Exponential : public ::testing::Test {};
using Exponentials = ::testing::Types<Exp2, Exp, ExpShort>;
TYPED_TEST_SUITE(Exponential, Exponentials, ExponentialNames);

TYPED_TEST(Exponential, IsWithinItsDeclaredErrorAndTheSameOfPacketsAndFloats) {
  const std::vector<float> xs = TypeParam::arguments();
  double most = 0;
  for (std::size_t at = 0; at < xs.size(); at += width) {
    const Lanes y = lanes_of(TypeParam::of(simd::load_unaligned(&xs[at])));
    for (std::size_t i = 0; i < width; ++i) {
      const float x = xs[at + i];
      const double exact = TypeParam::exact(x);
      const double error = std::abs(static_cast<double>(y[i]) - exact) / exact;
      ASSERT_LE(error, TypeParam::error(x)) << x;
      ASSERT_EQ(bits(y[i]), bits(TypeParam::of(x))) << x;
      // Neither denormal nor above 1, and its products are not either.
      ASSERT_GE(y[i] * 0x1p-26f, std::numeric_limits<float>::min()) << x;
      if (!std::is_same_v<TypeParam, ExpShort>) {
        ASSERT_LE(y[i], 1.0f) << x;
      }
      most = std::max(most, error / TypeParam::error(x));
    }
  }
  EXPECT_GT(most, 0.3);
}

// In each lane, and beside any other number, the result is that of the single float.
template <class E>
void expect_in_each_lane(float x, const std::function<bool(float)>& is_right) {
  EXPECT_TRUE(is_right(E::of(x))) << x << ": " << E::of(x);
  for (int lane = 0; lane < lanes; ++lane) {
    Lanes values;
    for (int i = 0; i < lanes; ++i) values[uz(i)] = -1.5f - static_cast<float>(i);
    values[uz(lane)] = x;
    const float y = lanes_of(E::of(packet_of(values)))[uz(lane)];
    EXPECT_TRUE(is_right(y)) << x << ": " << y;
  }
}

TYPED_TEST(Exponential, OfZeroIsExactlyOneBelowItsRangeZeroAndOfNanNan) {
  if (!std::is_same_v<TypeParam, ExpShort>)
    for (const float zero : {0.0f, -0.0f})
      expect_in_each_lane<TypeParam>(zero, [](float y) { return y == 1.0f; });
  const float least = TypeParam::least;
  for (const float x :
       {std::nextafter(least, -1e9f), least - 0.5f, least - 1.0f, least - 3.0f, -149.0f, -150.0f,
        -1e4f, -1e30f, -2.4e38f, std::numeric_limits<float>::lowest(), -infinity})
    expect_in_each_lane<TypeParam>(x, [](float y) { return bits(y) == 0u; });
  // NaN with any payload: the low bits of x + magic are not an exponent then.
  for (std::uint32_t nan : {0x7fc00000u, 0xffc00000u, 0x7fc00001u, 0x7fc000ffu, 0x7fc00155u,
                            0xffc00001u, 0xffc001ffu, 0x7fffffffu})
    expect_in_each_lane<TypeParam>(std::bit_cast<float>(nan),
                                   [](float y) { return std::isnan(y); });
}

TEST(Exponentials, OfTwoAreExactForIntegers) {
  for (float x = simd::exp2_least; x <= 0.0f; x += 1.0f)
    for (const float lane : lanes_of(simd::exp2(simd::broadcast(x))))
      EXPECT_EQ(lane, std::exp2(x)) << x;
}

TEST(Exponentials, LeaveTheOtherLanesAlone) {
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

TEST(Exponentials, AreShortWithinTheirError) {
  double largest = 0;
  for (const float x : exp_arguments()) {
    const double exact = std::exp(static_cast<double>(x));
    const Lanes y = lanes_of(simd::exp_short(simd::broadcast(x)));
    for (const float lane : y) ASSERT_EQ(bits(lane), bits(simd::exp_short(x))) << x;
    largest = std::max(largest, std::abs(static_cast<double>(y[0]) / exact - 1.0) - exp_error(x));
  }
  EXPECT_LE(largest, quoka::detail::short_exponential_error);
  EXPECT_GT(largest, 0.8 * quoka::detail::short_exponential_error);
}

// ---- opaque -------------------------------------------------------------------------------------

TEST(Opaque, ReturnsItsArgument) {
  EXPECT_EQ(simd::opaque(3.5f), 3.5f);
  Lanes values;
  for (int i = 0; i < lanes; ++i) values[uz(i)] = static_cast<float>(i) - 1.5f;
  EXPECT_EQ(lanes_of(simd::opaque(packet_of(values))), values);
}

// Sums without an order in the functions that carry this: without opaque(), x + magic - magic is x.
#if defined(__GNUC__) && !defined(__clang__)
#define QUOKA_TEST_UNORDERED_SUMS \
  __attribute__((noinline,        \
                 optimize("O2", "associative-math", "no-signed-zeros", "no-trapping-math")))
QUOKA_TEST_UNORDERED_SUMS float unordered_exp2(float x) { return simd::exp2(x); }
QUOKA_TEST_UNORDERED_SUMS float unordered_exp(float x) { return simd::exp(x); }
QUOKA_TEST_UNORDERED_SUMS void unordered_exp(const float* x, float* y) {
  simd::store_unaligned(y, simd::exp(simd::load_unaligned(x)));
}

TEST(Opaque, KeepsExponentialsFromReassociation) {
  for (float x = simd::exp2_least; x <= 0.0f; x += 0x1p-7f) {
    const float of_two = static_cast<float>(std::exp2(static_cast<double>(x)));
    ASSERT_NEAR(unordered_exp2(x), of_two, of_two * 3e-7f) << x;
    if (x < simd::exp_least) continue;
    const auto exact = static_cast<float>(std::exp(static_cast<double>(x)));
    const float error = 3e-7f - 2 * x * simd::exp_error_per_x;
    ASSERT_NEAR(unordered_exp(x), exact, exact * error) << x;
    Lanes values, y;
    values.fill(x);
    unordered_exp(values.data(), y.data());
    ASSERT_NEAR(y[width - 1], exact, exact * error) << x;
  }
}
#endif

// ---- tanh ---------------------------------------------------------------------------------------

// Positive normal floats up to 16 in steps of their exponent's 1/512, and infinity.
std::vector<float> tanh_arguments() {
  std::vector<float> xs{infinity, 1e30f, simd::tanh_saturated};
  for (std::uint32_t i = bits(std::numeric_limits<float>::min()); i < bits(16.0f); i += 0x3fffu)
    xs.push_back(std::bit_cast<float>(i));
  for (float x = 0.0f; x < 10.0f; x += 0x1p-11f)
    if (x > 0.0f) xs.push_back(x);
  while (xs.size() % width != 0) xs.push_back(1.0f);
  return xs;
}

TEST(Tanh, IsWithinItsDeclaredErrorAndNeverBeyondOne) {
  const std::vector<float> xs = tanh_arguments();
  double largest = 0;
  for (std::size_t at = 0; at < xs.size(); at += width) {
    const Lanes y = lanes_of(simd::tanh(simd::load_unaligned(&xs[at])));
    for (std::size_t i = 0; i < width; ++i) {
      const double exact = std::tanh(static_cast<double>(xs[at + i]));
      largest = std::max(largest, std::abs(static_cast<double>(y[i]) - exact) / exact);
      ASSERT_LE(y[i], 1.0f) << xs[at + i];
      ASSERT_EQ(bits(y[i]), bits(simd::tanh(xs[at + i]))) << xs[at + i];
      if (xs[at + i] >= simd::tanh_saturated) {
        ASSERT_EQ(y[i], 1.0f) << xs[at + i];
      }
    }
  }
  EXPECT_LE(largest, static_cast<double>(simd::tanh_max_error));
  RecordProperty("tanh_error", std::to_string(largest * 1e9) + "e-9");
}

TEST(Tanh, IsOdd) {
  for (float x : tanh_arguments()) ASSERT_EQ(bits(simd::tanh(-x)), bits(-simd::tanh(x))) << x;
  EXPECT_EQ(bits(simd::tanh(0.0f)), bits(0.0f));
  EXPECT_EQ(bits(simd::tanh(-0.0f)), bits(-0.0f));
  for (float x : {1e-6f, 0.3f, 2.0f, 8.9f, 20.0f, infinity})
    EXPECT_EQ(lanes_of(simd::tanh(simd::broadcast(-x)))[0], -simd::tanh(x)) << x;
}

TEST(Tanh, OfNanIsNanInItsLaneOnly) {
  EXPECT_TRUE(std::isnan(simd::tanh(not_a_number)));
  EXPECT_TRUE(std::isnan(simd::tanh(-not_a_number)));
  for (int lane = 0; lane < lanes; ++lane) {
    Lanes values;
    values.fill(20.0f);
    values[uz(lane)] = not_a_number;
    const Lanes y = lanes_of(simd::tanh(packet_of(values)));
    for (int i = 0; i < lanes; ++i) {
      if (i == lane)
        EXPECT_TRUE(std::isnan(y[uz(i)]));
      else
        EXPECT_EQ(y[uz(i)], 1.0f);
    }
  }
}

// ---- other arithmetic ---------------------------------------------------------------------------

TEST(Simd, ArithmeticOfPacketsAndOfFloatsIsTheSame) {
  Lanes a, b, c;
  for (int i = 0; i < lanes; ++i) {
    const float x = static_cast<float>(i);
    a[uz(i)] = 0.7f + x, b[uz(i)] = 3.1f - 0.9f * x, c[uz(i)] = -0.01f * x;
  }
  const Packet p = packet_of(a), q = packet_of(b), r = packet_of(c);
  const Lanes sum = lanes_of(simd::add(p, q)), difference = lanes_of(simd::sub(p, q)),
              product = lanes_of(simd::mul(p, q)), quotient = lanes_of(simd::div(p, q)),
              fused = lanes_of(simd::fma(p, q, r)), larger = lanes_of(simd::max(p, q)),
              smaller = lanes_of(simd::min(p, q)), root = lanes_of(simd::sqrt(p)),
              zeros = lanes_of(simd::zero());
  for (std::size_t i = 0; i < width; ++i) {
    EXPECT_EQ(sum[i], simd::add(a[i], b[i]));
    EXPECT_EQ(difference[i], simd::sub(a[i], b[i]));
    EXPECT_EQ(product[i], simd::mul(a[i], b[i]));
    EXPECT_EQ(quotient[i], simd::div(a[i], b[i]));
    EXPECT_EQ(fused[i], simd::fma(a[i], b[i], c[i]));
    EXPECT_EQ(larger[i], std::max(a[i], b[i]));
    EXPECT_EQ(smaller[i], std::min(a[i], b[i]));
    EXPECT_EQ(larger[i], simd::max(a[i], b[i]));
    EXPECT_EQ(smaller[i], simd::min(a[i], b[i]));
    EXPECT_EQ(root[i], std::sqrt(a[i]));
    EXPECT_EQ(root[i], simd::sqrt(a[i]));
    EXPECT_EQ(bits(zeros[i]), 0u);
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

TEST(Simd, MaxAndMinAreTheFirstArgumentWhereItIsNan) {
  const Packet nan = simd::broadcast(not_a_number);
  EXPECT_TRUE(std::isnan(lanes_of(simd::max(nan, simd::zero()))[0]));
  EXPECT_TRUE(std::isnan(lanes_of(simd::min(nan, simd::zero()))[0]));
  EXPECT_TRUE(std::isnan(simd::max(not_a_number, 0.0f)));
  EXPECT_TRUE(std::isnan(simd::min(not_a_number, 0.0f)));
  EXPECT_EQ(simd::max(0.0f, not_a_number), 0.0f);
  EXPECT_EQ(simd::min(0.0f, not_a_number), 0.0f);
#if !QUOKA_ISA_NEON
  EXPECT_EQ(lanes_of(simd::max(simd::zero(), nan))[0], 0.0f);
  EXPECT_EQ(lanes_of(simd::min(simd::zero(), nan))[0], 0.0f);
#endif
}

// A mask's lanes side by side, of packets where the ISA has masks, and of floats.
template <class P>
void expect_masks_and_compression() {
  constexpr int n = std::is_same_v<P, float> ? 1 : lanes;
  std::array<float, uz(n)> values;
  for (unsigned wanted = 0; wanted < 1u << n; wanted = wanted * 5 / 4 + 1) {
    for (int i = 0; i < n; ++i)
      values[uz(i)] = wanted >> i & 1u ? -1.0f - static_cast<float>(i) : 0;
    P x;
    if constexpr (n == 1)
      x = values[0];
    else
      x = simd::load_unaligned(values.data());
    ASSERT_EQ(simd::less(x, simd::zero<P>()), wanted);
    ASSERT_EQ(simd::not_less(x, simd::zero<P>()), ~wanted & ((1u << n) - 1u));
    std::array<float, uz(n)> kept;
    std::array<std::int32_t, uz(n)> positions;
    const int count = simd::store_compressed(kept.data(), wanted, x);
    ASSERT_EQ(count, std::popcount(wanted));
    ASSERT_EQ(simd::store_compressed<n>(positions.data(), wanted, 70), count);
    for (int i = 0, at = 0; i < n; ++i)
      if (wanted >> i & 1u) {
        ASSERT_EQ(kept[uz(at)], values[uz(i)]);
        ASSERT_EQ(positions[uz(at++)], 70 + i);
      }
  }
  const P nan = simd::broadcast<P>(not_a_number);
  EXPECT_EQ(simd::less(nan, simd::zero<P>()), 0u);
  EXPECT_EQ(simd::not_less(nan, simd::zero<P>()), (1u << n) - 1u);
}

TEST(Simd, MasksOfFloatsAndCompression) { expect_masks_and_compression<float>(); }
#if QUOKA_ISA_AVX512
TEST(Simd, MasksOfPacketsAndCompression) { expect_masks_and_compression<Packet>(); }
#endif

TEST(Simd, ReductionsSeeEveryLane) {
  for (int lane = 0; lane < lanes; ++lane) {
    Lanes values{};
    values[uz(lane)] = 3.0f;
    EXPECT_EQ(simd::reduce_max(packet_of(values)), 3.0f);
    EXPECT_EQ(simd::reduce_add(packet_of(values)), 3.0f);
  }
}

TEST(Simd, ReduceMaxSeesNegativeLanes) {
  Lanes values;
  for (int i = 0; i < lanes; ++i) values[uz(i)] = -2.0f - static_cast<float>(i);
  EXPECT_EQ(simd::reduce_max(packet_of(values)), -2.0f);
}

TEST(Simd, UnrollCallsInOrder) {
  std::vector<int> seen;
  simd::unroll<7>([&](auto i) { seen.push_back(i); });
  EXPECT_EQ(seen, (std::vector<int>{0, 1, 2, 3, 4, 5, 6}));
  seen.clear();
  simd::unroll<2, 3>([&](auto i, auto j) { seen.push_back(10 * i + j); });
  EXPECT_EQ(seen, (std::vector<int>{0, 1, 2, 10, 11, 12}));
}

// ---- half and bfloat16 --------------------------------------------------------------------------

// The library's conversions of a 16-bit type, and Eigen's.
struct Half {
  using Eigen = ::Eigen::half;
  static Packet load(const std::uint16_t* p) { return simd::load_half(p); }
  static void store(std::uint16_t* p, const Packet& x) { simd::store_half(p, x); }
  static float widen(std::uint16_t x) { return simd::half_to_float(x); }
  static std::uint16_t narrow(float x) { return simd::float_to_half(x); }
};
struct Bfloat16 {
  using Eigen = ::Eigen::bfloat16;
  static Packet load(const std::uint16_t* p) { return simd::load_bfloat16(p); }
  static void store(std::uint16_t* p, const Packet& x) { simd::store_bfloat16(p, x); }
  static float widen(std::uint16_t x) { return simd::bfloat16_to_float(x); }
  static std::uint16_t narrow(float x) { return simd::float_to_bfloat16(x); }
};
struct HalfInIntegers : Half {
  static float widen(std::uint16_t x) { return simd::half_to_float_in_integers(x); }
  static std::uint16_t narrow(float x) { return simd::float_to_half_in_integers(x); }
};
struct StorageNames {
  template <class T>
  static std::string GetName(int) {
    if constexpr (std::is_same_v<T, Half>) return "half";
    if constexpr (std::is_same_v<T, HalfInIntegers>) return "half_in_integers";
    if constexpr (std::is_same_v<T, Bfloat16>) return "bfloat16";
  }
};
template <class T>
class Storage16 : public ::testing::Test {};
using Storages = ::testing::Types<Half, HalfInIntegers, Bfloat16>;
TYPED_TEST_SUITE(Storage16, Storages, StorageNames);

template <class T>
float eigen_widen(std::uint16_t x) {
  return static_cast<float>(std::bit_cast<typename T::Eigen>(x));
}
template <class T>
std::uint16_t eigen_narrow(float x) {
  return std::bit_cast<std::uint16_t>(static_cast<typename T::Eigen>(x));
}

TYPED_TEST(Storage16, WidensAll65536ValuesAsEigen) {
  std::array<std::uint16_t, width> narrow;
  for (std::uint32_t first = 0; first < 0x10000u; first += std::uint32_t{lanes}) {
    for (std::size_t i = 0; i < width; ++i)
      narrow[i] = static_cast<std::uint16_t>(first + static_cast<std::uint32_t>(i));
    const Lanes wide = lanes_of(TypeParam::load(narrow.data()));
    for (std::size_t i = 0; i < width; ++i) {
      const float exact = eigen_widen<TypeParam>(narrow[i]), one = TypeParam::widen(narrow[i]);
      if (std::isnan(exact)) {
        ASSERT_TRUE(std::isnan(wide[i]) && std::isnan(one)) << narrow[i];
      } else {
        ASSERT_EQ(bits(wide[i]), bits(exact)) << narrow[i];
        ASSERT_EQ(bits(one), bits(exact)) << narrow[i];
      }
    }
  }
}

// Every upper half of a float, with lower halves that lie at, below and above the ties of bfloat16
// (bit 15) and half (bit 12): denormals, overflow, infinities and NaNs are among them.
TYPED_TEST(Storage16, RoundsFloatsOfEveryExponentAsEigen) {
  std::array<std::uint16_t, width> narrow;
  for (std::uint32_t lower : {0x0000u, 0x0001u, 0x0fffu, 0x1000u, 0x1001u, 0x2000u, 0x3000u,
                              0x5000u, 0x7000u, 0x7fffu, 0x8000u, 0x8001u, 0xf000u, 0xffffu})
    for (std::uint32_t upper = 0; upper < 0x10000u; upper += std::uint32_t{lanes}) {
      Lanes wide;
      for (std::size_t i = 0; i < width; ++i)
        wide[i] = std::bit_cast<float>((upper + static_cast<std::uint32_t>(i)) << 16 | lower);
      TypeParam::store(narrow.data(), packet_of(wide));
      for (std::size_t i = 0; i < width; ++i) {
        const std::uint16_t one = TypeParam::narrow(wide[i]);
        if (std::isnan(wide[i])) {
          ASSERT_TRUE(std::isnan(eigen_widen<TypeParam>(narrow[i])));
          ASSERT_TRUE(std::isnan(eigen_widen<TypeParam>(one)));
        } else {
          ASSERT_EQ(narrow[i], eigen_narrow<TypeParam>(wide[i])) << wide[i];
          ASSERT_EQ(one, eigen_narrow<TypeParam>(wide[i])) << wide[i];
        }
      }
    }
}

// Between two halves, near the ties of denormals too.
TYPED_TEST(Storage16, RoundsTheMiddleOfNeighboursToEven) {
  for (std::uint32_t i = 0; i + 1 < 0x7c00u; ++i) {
    const std::uint16_t low = static_cast<std::uint16_t>(i),
                        high = static_cast<std::uint16_t>(i + 1);
    const double middle =
        (static_cast<double>(TypeParam::widen(low)) + static_cast<double>(TypeParam::widen(high))) /
        2.0;
    const float x = static_cast<float>(middle);
    ASSERT_EQ(TypeParam::narrow(x), i % 2 == 0 ? low : high) << x;
    ASSERT_EQ(TypeParam::narrow(std::nextafter(x, -infinity)), low) << x;
    ASSERT_EQ(TypeParam::narrow(std::nextafter(x, infinity)), high) << x;
    std::array<std::uint16_t, width> narrow;
    TypeParam::store(narrow.data(), simd::broadcast(-x));
    ASSERT_EQ(narrow[width - 1], (i % 2 == 0 ? low : high) | 0x8000u) << x;
  }
}

TYPED_TEST(Storage16, NeedsNoAlignmentAndWritesItsLanesOnly) {
  std::vector<std::uint16_t> memory(uz(2 * lanes + 2));
  for (int i = 0; i < 2 * lanes + 2; ++i) memory[uz(i)] = TypeParam::narrow(static_cast<float>(i));
  for (int shift = 0; shift <= lanes; ++shift)
    for (int i = 0; i < lanes; ++i)
      EXPECT_EQ(lanes_of(TypeParam::load(&memory[uz(shift)]))[uz(i)],
                static_cast<float>(shift + i));
  memory.assign(uz(lanes + 2), TypeParam::narrow(7.0f));
  TypeParam::store(memory.data() + 1, simd::broadcast(3.0f));
  EXPECT_EQ(TypeParam::widen(memory.front()), 7.0f);
  EXPECT_EQ(TypeParam::widen(memory.back()), 7.0f);
  for (int i = 0; i < lanes; ++i) EXPECT_EQ(TypeParam::widen(memory[uz(1 + i)]), 3.0f);
}

TEST(Simd, LoadAndStoreUnalignedNeedNoAlignmentAndWriteTheirLanesOnly) {
  std::vector<float> memory(uz(lanes + 2), 7.0f);
  simd::store_unaligned(memory.data() + 1, simd::broadcast(3.0f));
  EXPECT_EQ(memory.front(), 7.0f);
  EXPECT_EQ(memory.back(), 7.0f);
  EXPECT_EQ(lanes_of(simd::load_unaligned(memory.data() + 2))[0], lanes == 1 ? 7.0f : 3.0f);
  EXPECT_EQ(lanes_of(simd::load_unaligned(memory.data() + 2))[width - 1], 7.0f);
  alignas(64) float aligned[width];
  simd::store(aligned, simd::broadcast(5.0f));
  EXPECT_EQ(lanes_of(simd::load(aligned))[width - 1], 5.0f);
  EXPECT_EQ(simd::load<float>(aligned), 5.0f);
}

// ---- 8 bits -------------------------------------------------------------------------------------

// The value of an e4m3 by its definition; NaN for 0x7f and 0xff.
double e4m3_value(unsigned code) {
  const int exponent = static_cast<int>(code >> 3 & 15u), mantissa = static_cast<int>(code & 7u);
  if (exponent == 15 && mantissa == 7) return std::numeric_limits<double>::quiet_NaN();
  const double size =
      exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 7 - 3);
  return code >= 128 ? -size : size;
}

// Every code in every lane, at every address modulo a packet; nothing beyond the last one is read
// (one CI leg watches the heap).
TEST(Bytes, AreWidenedExactlyWhateverTheAddress) {
  for (unsigned shift = 0; shift <= width; ++shift) {
    std::vector<std::uint8_t> codes;
    for (unsigned i = 0; i < 256 + shift; ++i)
      codes.push_back(static_cast<std::uint8_t>(i - shift + 256));
    for (std::size_t at = shift; at + width <= codes.size(); at += width) {
      const std::vector<std::uint8_t> some(codes.begin() + static_cast<std::ptrdiff_t>(at - shift),
                                           codes.begin() + static_cast<std::ptrdiff_t>(at + width));
      const std::uint8_t* const p = some.data() + shift;
      const Lanes u = lanes_of(simd::load_uint8(p)),
                  s = lanes_of(simd::load_int8(reinterpret_cast<const std::int8_t*>(p))),
                  f = lanes_of(simd::load_e4m3(p));
      for (std::size_t i = 0; i < width; ++i) {
        const unsigned code = p[i];
        ASSERT_EQ(u[i], static_cast<float>(code));
        ASSERT_EQ(s[i], static_cast<float>(code) - (code >= 128 ? 256.0f : 0.0f));
        const double exact = e4m3_value(code);
        const float one = simd::e4m3_to_float(p[i]);
        if (std::isnan(exact)) {
          ASSERT_TRUE(std::isnan(f[i]) && std::isnan(one)) << code;
        } else {
          ASSERT_EQ(bits(f[i]), bits(static_cast<float>(exact))) << code;
          ASSERT_EQ(bits(one), bits(static_cast<float>(exact))) << code;
        }
      }
    }
  }
}

TEST(E4m3, EveryCodeIsItsOwnRounding) {
  for (unsigned code = 0; code < 256; ++code) {
    const std::uint8_t back =
        simd::float_to_e4m3(simd::e4m3_to_float(static_cast<std::uint8_t>(code)));
    if (std::isnan(e4m3_value(code)))
      EXPECT_EQ(back & 0x7f, 0x7f);
    else
      EXPECT_EQ(back, code);
  }
}

TEST(E4m3, RoundsTheMiddleOfNeighboursToEven) {
  for (unsigned low = 0; low < 0x7e; ++low) {
    const float middle = static_cast<float>((e4m3_value(low) + e4m3_value(low + 1)) / 2);
    ASSERT_EQ(simd::float_to_e4m3(middle), low + low % 2) << middle;
    ASSERT_EQ(simd::float_to_e4m3(-middle), (low + low % 2) | 0x80u) << middle;
    ASSERT_EQ(simd::float_to_e4m3(std::nextafter(middle, 0.0f)), low) << middle;
    ASSERT_EQ(simd::float_to_e4m3(std::nextafter(middle, infinity)), low + 1) << middle;
  }
}

TEST(E4m3, IsAtMost448AndNanStaysNan) {
  for (float x : {448.0f, 464.0f, 465.0f, 1e30f, infinity}) {
    EXPECT_EQ(simd::float_to_e4m3(x), 0x7e) << x;
    EXPECT_EQ(simd::float_to_e4m3(-x), 0xfe) << x;
  }
  EXPECT_EQ(simd::float_to_e4m3(not_a_number) & 0x7f, 0x7f);
  EXPECT_EQ(simd::float_to_e4m3(-not_a_number) & 0x7f, 0x7f);
  EXPECT_EQ(simd::float_to_e4m3(-0.0f), 0x80);
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

TEST(Simd, SumsAndMaximaOfASquareAreEachPacketsOwn) {
  simd::Square square;
  for (int i = 0; i < lanes; ++i) {
    Lanes row;
    for (int j = 0; j < lanes; ++j) row[uz(j)] = static_cast<float>(100 * i + (j * 7 + i) % lanes);
    square.packet[i] = packet_of(row);
  }
  const Lanes sum = lanes_of(simd::sums(square)), most = lanes_of(simd::maxima(square));
  for (int i = 0; i < lanes; ++i) {
    EXPECT_EQ(sum[uz(i)], static_cast<float>(100 * i * lanes + lanes * (lanes - 1) / 2));
    EXPECT_EQ(most[uz(i)], static_cast<float>(100 * i + lanes - 1));
    EXPECT_EQ(simd::reduce_add(square.packet[i]), sum[uz(i)]);
    EXPECT_EQ(simd::reduce_max(square.packet[i]), most[uz(i)]);
  }
}

}  // namespace
QUOKA_PACKET_ARGUMENTS_END
