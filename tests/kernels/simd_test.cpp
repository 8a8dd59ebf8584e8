// The vector unit: a packet's functions are those of its floats, and these are exact, or within the errors they declare;
// conversions of half and bfloat16 as Eigen's, transposes and reductions, whatever the ISA. Bytes are widened and written
// by tests/rows/byte_formats_test.cpp.

#include <quoka/kernels/error_bounds.hpp>
#include <quoka/simd/simd.hpp>

#include <gtest/gtest.h>

#include <Eigen/Core>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
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

// ---- packets and floats -------------------------------------------------------------------------

// A normal number, one of any bits, or one at an end of float.
float any_float(std::mt19937& random) {
  constexpr float ends[] = {0.0f,      -0.0f,    1.0f,      -1.0f,        1e-45f,        -1e-40f,
                            0x1p-126f, infinity, -infinity, not_a_number, -not_a_number, -3.4e38f};
  switch (random() % 4) {
    case 0:
      return ends[random() % std::size(ends)];
    case 1:
      return std::bit_cast<float>(static_cast<std::uint32_t>(random()));
    default:
      return std::normal_distribution<float>(0.0f, 5.0f)(random);
  }
}

template <class P>
P zero_of(const P&) {
  if constexpr (std::is_same_v<P, float>)
    return 0.0f;
  else
    return simd::zero();
}

// f(a, b, c) of packets and of floats is exact(a, b, c), whatever lies in the other lanes.
template <class F, class Exact>
void expect_of_packets_and_floats(const char* name, F&& f, Exact&& exact) {
  std::mt19937 random(1);
  const auto same = [](float x, float y) {  // a sum's zero has any sign
    return bits(x) == bits(y) || (std::isnan(x) && std::isnan(y)) || (x == 0 && y == 0);
  };
  for (int turn = 0; turn < 2000; ++turn) {
    Lanes in[3];
    for (Lanes& values : in)
      for (float& x : values) x = any_float(random);
    const Lanes out = lanes_of(f(packet_of(in[0]), packet_of(in[1]), packet_of(in[2])));
    for (std::size_t i = 0; i < width; ++i) {
      const float a = in[0][i], b = in[1][i], c = in[2][i], expected = exact(a, b, c);
#if QUOKA_ISA_NEON
      if (std::isnan(b)) continue;  // max and min
#endif
      ASSERT_TRUE(same(out[i], expected)) << name << " of packets: " << a << ", " << b << ", " << c;
      ASSERT_TRUE(same(f(a, b, c), expected)) << name << ": " << a << ", " << b << ", " << c;
    }
  }
}
#define QUOKA_EXPECT(of_packets, exact)                                                  \
  expect_of_packets_and_floats(                                                          \
      #of_packets,                                                                       \
      []([[maybe_unused]] const auto& a, [[maybe_unused]] const auto& b,                 \
         [[maybe_unused]] const auto& c) { return of_packets; },                         \
      []([[maybe_unused]] float a, [[maybe_unused]] float b, [[maybe_unused]] float c) { \
        return exact;                                                                    \
      })

TEST(Simd, PacketsAreTheirFloats) {
  QUOKA_EXPECT(simd::add(a, b), a + b);
  QUOKA_EXPECT(simd::sub(a, b), a - b);
  QUOKA_EXPECT(simd::mul(a, b), a * b);
  QUOKA_EXPECT(simd::div(a, b), a / b);
  QUOKA_EXPECT(simd::fma(a, b, c), simd::fma(a, b, c));
  QUOKA_EXPECT(simd::max(a, b), std::max(a, b));  // the first if one is NaN
  QUOKA_EXPECT(simd::min(a, b), std::min(a, b));
  QUOKA_EXPECT(simd::select_less(a, b, c, b), a < b ? c : b);
  QUOKA_EXPECT(simd::opaque(a), a);
  QUOKA_EXPECT(simd::tanh(a), simd::tanh(a));
  QUOKA_EXPECT(simd::exp(simd::min(a, zero_of(a))), simd::exp(std::min(a, 0.0f)));
  QUOKA_EXPECT(simd::exp_short(simd::min(a, zero_of(a))), simd::exp_short(std::min(a, 0.0f)));
  for (const float x : lanes_of(simd::zero())) EXPECT_EQ(bits(x), 0u);
}

// [exp_least, 0]: every 2^-13 of x and of x log2(e), both ends, and the floats around each integer
// and half.
std::vector<float> exp_arguments() {
  std::vector<float> of_two;
  for (float x = -100.0f; x <= 0.0f; x += 0x1p-13f) of_two.push_back(x);
  for (float x = -100.0f; x <= 0.0f; x += 0.5f)
    for (float near : {std::nextafter(x, -1e9f), x, std::nextafter(x, 1e9f)})
      if (near <= 0.0f) of_two.push_back(near);
  for (float x = 1.0f; x > 0.0f; x *= 0.37f) of_two.push_back(-x);  // down to the denormals
  std::vector<float> xs;
  for (float x : of_two) xs.push_back(std::max(x * 0.6931472f, simd::exp_least));
  for (float x : of_two)
    if (x >= simd::exp_least) xs.push_back(x);
  while (xs.size() % width != 0) xs.push_back(-0.0f);
  return xs;
}
double exp_error(float x) {
  return static_cast<double>(simd::exp_max_error - x * simd::exp_error_per_x);
}

// ---- exponentials -------------------------------------------------------------------------------

struct Exp {
  static double error(float x) { return exp_error(x); }
  template <class P>
  static P of(P x) {
    return simd::exp(x);
  }
};
// Exact where exp is exact; AreShortWithinTheirError tests its error.
struct ExpShort : Exp {
  static double error(float x) { return exp_error(x) + quoka::detail::short_exponential_error; }
  template <class P>
  static P of(P x) {
    return simd::exp_short(x);
  }
};
struct ExponentialNames {
  template <class E>
  static std::string GetName(int) {
    return std::is_same_v<E, Exp> ? "exp" : "exp_short";
  }
};
template <class E>
class Exponential : public ::testing::Test {};
using Exponentials = ::testing::Types<Exp, ExpShort>;
TYPED_TEST_SUITE(Exponential, Exponentials, ExponentialNames);

TYPED_TEST(Exponential, IsWithinItsDeclaredErrorAndTheSameOfPacketsAndFloats) {
  const std::vector<float> xs = exp_arguments();
  double most = 0;
  for (std::size_t at = 0; at < xs.size(); at += width) {
    const Lanes y = lanes_of(TypeParam::of(simd::load_unaligned(&xs[at])));
    for (std::size_t i = 0; i < width; ++i) {
      const float x = xs[at + i];
      const double exact = std::exp(static_cast<double>(x));
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

TYPED_TEST(Exponential, OfZeroIsExactlyOneBelowItsRangeZeroAndOfNanNan) {
  for (const float zero : {0.0f, -0.0f})
    EXPECT_TRUE((TypeParam::of(zero) == 1.0f || std::is_same_v<TypeParam, ExpShort>));
  const float least = simd::exp_least;
  for (const float x :
       {std::nextafter(least, -1e9f), least - 0.5f, least - 1.0f, least - 3.0f, -149.0f, -150.0f,
        -1e4f, -1e30f, -2.4e38f, std::numeric_limits<float>::lowest(), -infinity})
    EXPECT_EQ(bits(TypeParam::of(x)), 0u) << x;
  // NaN with any payload: the low bits of x + magic are not an exponent then.
  for (std::uint32_t nan : {0x7fc00000u, 0xffc00000u, 0x7fc00001u, 0x7fc000ffu, 0x7fc00155u,
                            0xffc00001u, 0xffc001ffu, 0x7fffffffu})
    for (const float y : lanes_of(TypeParam::of(simd::broadcast(std::bit_cast<float>(nan)))))
      EXPECT_TRUE(std::isnan(y)) << nan;
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

// Sums without an order in the functions that carry this: without opaque(), x + magic - magic is x.
#if defined(__GNUC__) && !defined(__clang__)
#define QUOKA_TEST_UNORDERED_SUMS \
  __attribute__((noinline,        \
                 optimize("O2", "associative-math", "no-signed-zeros", "no-trapping-math")))
QUOKA_TEST_UNORDERED_SUMS float unordered_exp(float x) { return simd::exp(x); }
QUOKA_TEST_UNORDERED_SUMS void unordered_exp(const float* x, float* y) {
  simd::store_unaligned(y, simd::exp(simd::load_unaligned(x)));
}

TEST(Opaque, KeepsExponentialsFromReassociation) {
  for (float x = simd::exp_least; x <= 0.0f; x += 0x1p-7f) {
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

TEST(Tanh, IsOddAndKeepsNaN) {
  for (float x : tanh_arguments()) ASSERT_EQ(bits(simd::tanh(-x)), bits(-simd::tanh(x))) << x;
  EXPECT_EQ(bits(simd::tanh(0.0f)), bits(0.0f));
  EXPECT_EQ(bits(simd::tanh(-0.0f)), bits(-0.0f));
  for (float x : {not_a_number, -not_a_number}) EXPECT_TRUE(std::isnan(simd::tanh(x)));
}

// ---- masks, reductions --------------------------------------------------------------------------

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

// The largest one is in another lane of each.
TEST(Simd, SumsAndMaximaOfASquareAreEachPacketsOwn) {
  simd::Square square;
  for (int i = 0; i < lanes; ++i) {
    Lanes row;
    for (int j = 0; j < lanes; ++j)
      row[uz(j)] = static_cast<float>(100 * i + (j * 7 + i) % lanes - 9000);
    square.packet[i] = packet_of(row);
  }
  const Lanes sum = lanes_of(simd::sums(square)), most = lanes_of(simd::maxima(square));
  for (int i = 0; i < lanes; ++i) {
    EXPECT_EQ(sum[uz(i)], static_cast<float>((100 * i - 9000) * lanes + lanes * (lanes - 1) / 2));
    EXPECT_EQ(most[uz(i)], static_cast<float>(100 * i + lanes - 1 - 9000));
    EXPECT_EQ(simd::reduce_add(square.packet[i]), sum[uz(i)]);
    EXPECT_EQ(simd::reduce_max(square.packet[i]), most[uz(i)]);
  }
}

}  // namespace
QUOKA_PACKET_ARGUMENTS_END
