// kernels/softmax_state.hpp: the running {max, sum} as a value. A packet's rows are single rows, to the bit; raise() and
// update() are merges; and one row is compared with the softmax in double.

#include <quoka/kernels/softmax_state.hpp>

#include "support/fixtures.hpp"

#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

QUOKA_PACKET_ARGUMENTS_BEGIN
namespace {

using namespace quoka_test;
using quoka::PacketState;
namespace simd = quoka::simd;

using Row = quoka::SoftmaxState<float>;
using States = std::array<Row, std::size_t{simd::lanes}>;
using Values = std::array<float, std::size_t{simd::lanes}>;

constexpr float nan = not_a_number, last = std::numeric_limits<float>::max();

PacketState packed(const States& rows) {
  Values max, sum;
  for (std::size_t i = 0; i < rows.size(); ++i) max[i] = rows[i].max, sum[i] = rows[i].sum;
  return {simd::load_unaligned(max.data()), simd::load_unaligned(sum.data())};
}
Values values(const simd::Packet& packet) {
  Values values;
  simd::store_unaligned(values.data(), packet);
  return values;
}
bool alike(float x, float y) { return x == y || (std::isnan(x) && std::isnan(y)); }

// States and logits of any size, rows without a key among them; a NaN among the logits, but for the packets of NEON, whose
// maximum it becomes: of these the sum is asked for.
TEST(SoftmaxState, OfAPacketIsThatOfItsRowsAndAllOperationsAreMerges) {
  for_each_draw(400, [](Random& random) {
    States a, b;
    for (States* const rows : {&a, &b})
      for (Row& row : *rows) {
        const auto normal = static_cast<float>(random.normal());
        row.max = random.one_of(normal, 20 * normal, 1e30f * normal, -infinity, last, -last);
        row.sum = row.max == -infinity ? 0.0f : static_cast<float>(1 + 500 * random.uniform());
      }
    const auto expect_rows = [&](auto&& operation) {
      PacketState packet = packed(a);
      const Values result = values(operation(packet, packed(b))), max = values(packet.max),
                   sum = values(packet.sum);
      for (std::size_t i = 0; i < a.size(); ++i) {
        Row row = a[i];
        ASSERT_TRUE(alike(result[i], operation(row, b[i]))) << "row " << i;
        ASSERT_TRUE(alike(max[i], row.max) && alike(sum[i], row.sum)) << "row " << i;
      }
    };
    expect_rows([](auto& state, const auto&) { return state.reference(); });
    expect_rows([](auto& state, const auto&) { return state.inverse_sum(); });
    expect_rows([](auto& state, const auto& other) {
      return state.weight(simd::min(state.max, other.max));
    });
    expect_rows([](auto& state, const auto& other) { return state.raise(other.max); });
    expect_rows([](auto& state, const auto& other) { return state.update(other.max); });
    expect_rows([](auto& state, const auto& other) { return state.merge(other).self; });
    expect_rows([](auto& state, const auto& other) { return state.merge(other).other; });
    for (std::size_t i = 0; i < a.size(); ++i) {
      const float logit = b[i].max;
      Row raised = a[i], updated = a[i], of_none = a[i], of_one = a[i];
      ASSERT_EQ(raised.raise(logit), of_none.merge({logit, 0.0f}).self);
      ASSERT_EQ(updated.update(logit), of_one.merge({logit, 1.0f}).other);
      ASSERT_TRUE(raised.max == of_none.max && raised.sum == of_none.sum);
      ASSERT_TRUE(updated.max == of_one.max && updated.sum == of_one.sum);
    }
    PacketState odd = packed(a);
    odd.update(simd::broadcast(nan));
    for (const float inverse : values(odd.inverse_sum())) ASSERT_TRUE(std::isnan(inverse));
  });
}

TEST(SoftmaxState, IdentityHasNoMaximumAndNoSumAndAReferenceIsTheMaximumOnceThereIsOne) {
  for (const float max : {-last, -7.5f, 0.0f, 3.0f, last})
    EXPECT_EQ((Row{max, 1.0f}.reference()), max);
  States none;
  none.fill(Row::identity());
  const PacketState packet = PacketState::identity();
  EXPECT_EQ(values(packet.max), values(packed(none).max));
  EXPECT_EQ(values(packet.sum), values(packed(none).sum));
  EXPECT_TRUE(none[0].max == -infinity && none[0].sum == 0.0f && none[0].reference() == 0.0f);
}

// No key on either side, the same maximum, others far below: factors of 0 and 1, and no bit of a sum changes.
TEST(SoftmaxState, MergesThatAreExact) {
  const Row none = Row::identity(), some{-2.3f, 1.7f}, masked{-infinity, 0.0f};
  const struct {
    Row a, b;
    float of_a, of_b;
    Row merged;
  } all[] = {{some, none, 1, 0, some},
             {none, some, 0, 1, some},
             {none, none, 0, 0, none},
             {none, masked, 0, 0, none},
             {some, {-2.3f, 2.0f}, 1, 1, {-2.3f, 3.7f}},
             {some, {-1e30f, 1.0f}, 1, 0, some},
             {{1e-40f, 1.0f}, {1e-40f, 2.0f}, 1, 1, {1e-40f, 3.0f}},
             {{1e30f, 1.0f}, {1e30f, 2.0f}, 1, 1, {1e30f, 3.0f}},
             {{last, 3.0f}, {-last, 1.0f}, 1, 0, {last, 3.0f}},
             {{last, 3.0f}, {0.0f, 1.0f}, 1, 0, {last, 3.0f}}};
  for (const auto& one : all) {
    SCOPED_TRACE(&one - all);
    Row state = one.a;
    if (one.b.max <= one.a.max) {
      EXPECT_EQ(state.weight(one.b.max), one.of_b);
    }
    const auto [self, other] = state.merge(one.b);
    EXPECT_EQ(self, one.of_a);
    EXPECT_EQ(other, one.of_b);
    EXPECT_EQ(state.max, one.merged.max);
    EXPECT_EQ(state.sum, one.merged.sum);
  }
  for (const float max : {-infinity, 2.0f}) EXPECT_TRUE(std::isnan((Row{max, 1.0f}.weight(nan))));
}

// Logits of any size, masked ones and a NaN among them, in blocks of any length, by parts that are merged in any order:
// the maximum is exact, each of n weights is off by exp_max_error and an addition by 2^-24, relative to the running sum,
// and a raise or a merge multiplies once more by a factor as exact as a weight.
TEST(SoftmaxState, IsThatOfAllLogitsInBlocksAndPartsOfAnySize) {
  for_each_draw(1500, [](Random& random) {
    std::vector<float> logits(uz(1 + random.below(random.seldom(3) ? 600 : 40)));
    const Index count = std::ssize(logits), kind = random.below(10);
    const double spread = random.one_of(5.0, 20.0);
    for (float& x : logits) {
      x = static_cast<float>(spread * random.normal());
      if (kind == 1 || (kind < 4 && random.below(3) == 0)) x = -infinity;
    }
    if (kind == 4) logits[uz(random.below(count))] = nan;
    if (kind == 5) logits[uz(random.below(count))] = last;
    const Index cuts[] = {0, random.below(count + 1), count};
    Row parts[2] = {Row::identity(), quoka::empty_row};
    for (const std::size_t part : {0u, 1u}) {
      Row& state = parts[part];
      const Index block = random.seldom(3) ? 1 : 1 + random.below(100);
      for (Index first = cuts[part]; first < cuts[part + 1]; first += block) {
        const std::span<const float> some(logits.begin() + first,
                                          logits.begin() + std::min(first + block, cuts[part + 1]));
        if (block == 1) {
          state.update(some[0]);
          continue;
        }
        float top = -infinity;
        for (const float x : some) top = std::max(top, x);
        state.raise(top);
        for (const float x : some) state.sum += state.weight(x);
      }
    }
    Row state = parts[0];
    state.merge(parts[1]);
    double max = -HUGE_VAL, sum = 0;
    for (const float x : logits) max = x > max ? double{x} : max;
    for (const float x : logits) sum += x == -infinity ? 0 : std::exp(double{x} - max);
    const float inverse = state.inverse_sum(), lse = quoka::lse_nat(state.max, state.sum);
    if (std::isnan(sum)) {
      EXPECT_TRUE(std::isnan(inverse) && std::isnan(lse));
      return;
    }
    EXPECT_EQ(state.max, static_cast<float>(max));
    if (max == -HUGE_VAL) {
      EXPECT_TRUE(state.sum == 0.0f && inverse == 0.0f && lse == -infinity);
      return;
    }
    EXPECT_NEAR(state.sum / sum, 1.0, 4e-6);
    EXPECT_NEAR(inverse * double{state.sum}, 1.0, 1e-7);
    const double exact = double{state.max} + std::log(double{state.sum});
    EXPECT_NEAR(lse, exact, 0x1p-23 * std::abs(exact) + 1e-300);
  });
}

TEST(Constants, AreWhatTheyAreCalled) {
  EXPECT_EQ(quoka::simd::log2_e, static_cast<float>(std::log2(std::exp(1.0))));
  EXPECT_DOUBLE_EQ(quoka::ln_2, std::log(2.0));
}

}  // namespace
QUOKA_PACKET_ARGUMENTS_END
