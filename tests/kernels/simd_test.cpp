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
#include <functional>
#include <limits>
#include <random>
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
  return xs;
}
// Positive normal floats up to 16 in steps of their exponent's 1/512, and infinity.
std::vector<float> tanh_arguments() {
  std::vector<float> xs{infinity, 1e30f, simd::tanh_saturated};
  for (std::uint32_t i = bits(std::numeric_limits<float>::min()); i < bits(16.0f); i += 0x3fffu)
    xs.push_back(std::bit_cast<float>(i));
  for (float x = 0.0f; x < 10.0f; x += 0x1p-11f)
    if (x > 0.0f) xs.push_back(x);
  return xs;
}
std::vector<float> exp2_arguments() {
  std::vector<float> xs;
  for (double x = -126.0; x <= 126.0; x += 0.00917) xs.push_back(static_cast<float>(x));
  return xs;
}

// f of packets is f of floats, and off by its declared error(x) at most, of which it takes `used` somewhere.
template <class F>
void expect_within_error(std::vector<float> xs, F&& f, double (*exact)(double),
                         const std::function<double(float)>& error, double used) {
  while (xs.size() % width != 0) xs.push_back(xs.back());
  double most = 0;
  for (std::size_t at = 0; at < xs.size(); at += width) {
    const Lanes y = lanes_of(f(simd::load_unaligned(&xs[at])));
    for (std::size_t i = 0; i < width; ++i) {
      const float x = xs[at + i];
      const double relative = std::abs(double{y[i]} / exact(double{x}) - 1.0);
      ASSERT_LE(relative, error(x)) << x;
      ASSERT_EQ(bits(y[i]), bits(f(x))) << x;
      most = std::max(most, relative / error(x));
    }
  }
  EXPECT_GT(most, used);
}
#define QUOKA_FUNCTION(function) [](const auto& x) { return function(x); }

TEST(Simd, FunctionsAreWithinTheErrorsTheyDeclare) {
  const auto of_exp = [](float x) {
    return static_cast<double>(simd::exp_max_error - x * simd::exp_error_per_x);
  };
  const auto of_short = [&](float x) { return of_exp(x) + quoka::detail::short_exponential_error; };
  const auto all_alike = [](float error) { return [error](float) { return double{error}; }; };
  expect_within_error(exp_arguments(), QUOKA_FUNCTION(simd::exp), std::exp, of_exp, 0.3);
  expect_within_error(exp_arguments(), QUOKA_FUNCTION(simd::exp_short), std::exp, of_short, 0.8);
  expect_within_error(exp2_arguments(), QUOKA_FUNCTION(simd::exp2_rough), std::exp2,
                      all_alike(simd::exp2_rough_max_error), 0.9);
  expect_within_error(tanh_arguments(), QUOKA_FUNCTION(simd::tanh), std::tanh,
                      all_alike(simd::tanh_max_error), 0.5);
}

// Zero is exactly one, below the range exactly zero, NaN is NaN, and between them nothing is denormal, no product is, and
// nothing above one.
template <class F>
void expect_ends(F&& f, bool exact) {
  for (const float x : exp_arguments()) {
    ASSERT_GE(f(x) * 0x1p-26f, std::numeric_limits<float>::min()) << x;
    ASSERT_TRUE(f(x) <= 1.0f || !exact) << x;
  }
  for (const float zero : {0.0f, -0.0f}) EXPECT_TRUE(f(zero) == 1.0f || !exact);
  const float least = simd::exp_least;
  for (const float x :
       {std::nextafter(least, -1e9f), least - 0.5f, least - 1.0f, least - 3.0f, -149.0f, -150.0f,
        -1e4f, -1e30f, -2.4e38f, std::numeric_limits<float>::lowest(), -infinity})
    EXPECT_EQ(bits(f(x)), 0u) << x;
  // NaN with any payload: the low bits of x + magic are not an exponent then.
  for (std::uint32_t nan : {0x7fc00000u, 0xffc00000u, 0x7fc00001u, 0x7fc000ffu, 0x7fc00155u,
                            0xffc00001u, 0xffc001ffu, 0x7fffffffu})
    for (const float y : lanes_of(f(simd::broadcast(std::bit_cast<float>(nan)))))
      EXPECT_TRUE(std::isnan(y)) << nan;
}
TEST(Simd, ExponentialsEndWhereTheySay) {
  expect_ends(QUOKA_FUNCTION(simd::exp), true);
  expect_ends(QUOKA_FUNCTION(simd::exp_short), false);
}

TEST(Simd, TanhIsOddSaturatesAndKeepsNaN) {
  for (const float x : tanh_arguments()) {
    ASSERT_EQ(bits(simd::tanh(-x)), bits(-simd::tanh(x))) << x;
    ASSERT_TRUE(simd::tanh(x) == 1.0f || x < simd::tanh_saturated) << x;
    ASSERT_LE(simd::tanh(x), 1.0f) << x;
  }
  for (const float zero : {0.0f, -0.0f}) EXPECT_EQ(bits(simd::tanh(zero)), bits(zero));
  for (const float x : {not_a_number, -not_a_number}) EXPECT_TRUE(std::isnan(simd::tanh(x)));
}

TEST(Simd, WeightPairsAreReadBackWithinTheirError) {
  std::mt19937 random(701);
  alignas(64) std::uint32_t pairs[width];
  float worst = 0.0f;
  for (int turn = 0; turn < 500; ++turn) {
    Lanes weights[2];
    for (Lanes& of : weights)
      for (float& x : of) x = std::exp2(std::uniform_real_distribution<float>(-95, 85)(random));
    simd::store_weight_pairs(pairs, packet_of(weights[0]), packet_of(weights[1]));
    const Lanes read[] = {lanes_of(simd::first_weights(pairs)),
                          lanes_of(simd::second_weights(pairs))};
    for (const std::size_t of : {0u, 1u})
      for (std::size_t i = 0; i < width; ++i)
        worst = std::max(worst, std::abs(read[of][i] / weights[of][i] - 1.0f));
  }
  EXPECT_LE(worst, simd::weight_pair_max_error);
  EXPECT_GT(worst, 0.9f * simd::weight_pair_max_error);
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
  using Stored = std::uint16_t;
  using Eigen = ::Eigen::half;
  static Packet load(const std::uint16_t* p) { return simd::load_half(p); }
  static void store(std::uint16_t* p, const Packet& x) { simd::store_half(p, x); }
  static float widen(std::uint16_t x) { return simd::half_to_float(x); }
  static std::uint16_t narrow(float x) { return simd::float_to_half(x); }
};
struct Bfloat16 {
  using Stored = std::uint16_t;
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
struct Single {
  using Stored = float;
  static Packet load(const float* p) { return simd::load_unaligned(p); }
  static void store(float* p, const Packet& x) { simd::store_unaligned(p, x); }
  static float widen(float x) { return x; }
  static float narrow(float x) { return x; }
};
template <class T>
class Storage16 : public ::testing::Test {};
using Storages = ::testing::Types<Half, HalfInIntegers, Bfloat16>;
TYPED_TEST_SUITE(Storage16, Storages);

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
// (bit 15), half (bit 12) and half's denormals (bits 13 and more): overflow, infinities and NaNs are
// among them.
TYPED_TEST(Storage16, RoundsFloatsOfEveryExponentAsEigen) {
  std::array<std::uint16_t, width> narrow;
  for (std::uint32_t lower :
       {0x0000u, 0x0001u, 0x0fffu, 0x1000u, 0x1001u, 0x1fffu, 0x2000u, 0x2001u,
        0x3000u, 0x3fffu, 0x4000u, 0x4001u, 0x5000u, 0x5fffu, 0x6000u, 0x6001u,
        0x7000u, 0x7fffu, 0x8000u, 0x8001u, 0xc000u, 0xf000u, 0xffffu})
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

template <class T>
void expect_no_alignment_and_its_lanes_only() {
  std::vector<typename T::Stored> memory(2 * width + 2);
  for (std::size_t i = 0; i < memory.size(); ++i) memory[i] = T::narrow(static_cast<float>(i));
  for (std::size_t shift = 0; shift <= width; ++shift)
    for (std::size_t i = 0; i < width; ++i)
      EXPECT_EQ(lanes_of(T::load(&memory[shift]))[i], static_cast<float>(shift + i));
  memory.assign(width + 2, T::narrow(7.0f));
  T::store(memory.data() + 1, simd::broadcast(3.0f));
  EXPECT_EQ(T::widen(memory.front()), 7.0f);
  EXPECT_EQ(T::widen(memory.back()), 7.0f);
  for (std::size_t i = 1; i <= width; ++i) EXPECT_EQ(T::widen(memory[i]), 3.0f);
}
TEST(Simd, LoadAndStoreNeedNoAlignmentAndWriteTheirLanesOnly) {
  expect_no_alignment_and_its_lanes_only<Half>();
  expect_no_alignment_and_its_lanes_only<Bfloat16>();
  expect_no_alignment_and_its_lanes_only<Single>();
  alignas(64) float aligned[width];
  simd::store(aligned, simd::broadcast(5.0f));
  EXPECT_EQ(lanes_of(simd::load(aligned))[width - 1], 5.0f);
  EXPECT_EQ(simd::load<float>(aligned), 5.0f);
}

// ---- squares ------------------------------------------------------------------------------------

simd::Square square_of(float (*x)(int i, int j)) {
  simd::Square square;
  for (int i = 0; i < lanes; ++i) {
    Lanes row;
    for (int j = 0; j < lanes; ++j) row[uz(j)] = x(i, j);
    square.packet[i] = packet_of(row);
  }
  return square;
}

TEST(Simd, TransposeSwapsRowsAndColumns) {
  simd::Square square = square_of([](int i, int j) { return static_cast<float>(100 * i + j); });
  simd::transpose(square);
  for (int i = 0; i < lanes; ++i)
    for (int j = 0; j < lanes; ++j)
      EXPECT_EQ(lanes_of(square.packet[i])[uz(j)], static_cast<float>(100 * j + i));
}

// The largest one is in another lane of each.
TEST(Simd, SumsAndMaximaOfASquareAreEachPacketsOwn) {
  const simd::Square square = square_of(
      [](int i, int j) { return static_cast<float>(100 * i + (j * 7 + i) % lanes - 9000); });
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
