// attention/attention.hpp over numbers from one end of float to the other, by every path: chunks, few rows, one
// token, lists, masks, windows, formats of the cache, arithmetics, and parts that are merged.
//
// The oracle takes logits in float, as IEEE arithmetic has them, and all that follows in long double. Keys and
// queries have one channel that is not zero, so that a logit is two roundings whatever the order of sums: then a
// row's class (finite, NaN, nothing seen) is known exactly, and its error follows from that of its logits.

#include <quoka/attention/attention.hpp>
#include <quoka/attention/merge.hpp>
#include <quoka/kernels/byte_formats.hpp>

#include "support/fixtures.hpp"

#include <gtest/gtest.h>

#include <cfloat>
#include <optional>
#include <vector>

namespace {

using namespace quoka_test;
using quoka::Arithmetic;
using quoka::AttentionOptions;
using quoka::Format;
using quoka::Mask;
using Real = long double;

constexpr Index dim = 32;

constexpr Real may_vanish = quoka::negligible_below;

struct Case {
  Index batch = 1, kv_heads = 1, group = 1, q_len = 1, kv_len = 0, v_dim = 3;
  bool chunk = true, causal = true, listed = false, merged = false;
  const Format* format = nullptr;
  Arithmetic arithmetic = Arithmetic::float_;
  float scale = 1, softcap = 0;
  Index window = 0;
  std::vector<float> sinks, slopes, factors;
  std::vector<std::vector<Position>> keep;  // [kv_heads], empty: all
  Tensor4<float> q, k, v, mask;             // past and chunk side by side; as the formats hold them

  Index heads() const { return kv_heads * group; }
  Index keys() const { return kv_len + (chunk ? q_len : 0); }
  bool masked() const { return mask.size() > 0; }
  bool keeps(Index kv_head, Index t) const {
    if (keep.empty() || t >= kv_len) return true;
    const auto& of = keep[uz(kv_head)];
    return std::binary_search(of.begin(), of.end(), static_cast<Position>(t));
  }
};

// ---- the oracle ---------------------------------------------------------------------------------

struct Logit {
  float value;  // in float, except the soft-cap's tanh
  Real error;   // of the library's, at most
};

struct RowResult {
  enum class Is { finite, nothing, not_a_number } is = Is::nothing;
  std::vector<Real> out, out_error;
  Real lse = 0, lse_error = 0;
};

// int8_error() (kernels/error_bounds.hpp), written out.
constexpr Real int8_row_error = 5.6568543L / 254;  // sqrt(dim)
constexpr Real int8_logit_error = 2 * int8_row_error + int8_row_error * int8_row_error + 1e-5L;
constexpr Real int8_codes_error = 8.0L / 254;  // 8 of at most 48 channels are rotated together
constexpr Real int8_value_error = 2 * int8_codes_error + 1.0L + 2e-4L;

// The error of a logit by its products alone, relative to scale * sum |q| |k|, and the error of a
// weight.
Real product_error(const Case& c) {
  const Arithmetic used = quoka::arithmetic_used(c.arithmetic, *c.format, *c.format);
  if (c.q_len == 1) {  // a token's are in float, or by queries of 15 bits
    const bool codes =
        c.arithmetic == Arithmetic::automatic && c.group > 2 && c.format == &quoka::q8_0_format();
    return codes ? 0x1p-14L : 0x1p-22L;
  }
  if (used == Arithmetic::float_) return 0x1p-22L;
  if (used == Arithmetic::bf16) return 0x1p-5L;
  if (used == Arithmetic::int8) return int8_logit_error;
  // By products of bfloat16: three, or two where the cache has rounded as much already.
  const bool as_it_is =
      c.format->rounding < 0x1p-8f || c.format == &quoka::format_of<Eigen::bfloat16>();
  return as_it_is ? 0x1p-12L : 0x1p-7L;
}

std::optional<Logit> logit_of(const Case& c, Index b, Index head, Index i, Index t) {
  const Index kv_head = head / c.group;
  if (!c.keeps(kv_head, t)) return {};
  const Index position = t;  // nothing is shifted
  const Index query = c.kv_len + i;
  if (c.causal && position > query) return {};
  if (c.window > 0 && query - position >= c.window) return {};
  float bias = 0;
  if (c.masked()) {
    bias = c.mask(0, 0, i, t);
    if (bias <= -60000.0f) return {};  // NaN is added
  }
  volatile float x = 0;
  float size = 0;
  for (Index channel = 0; channel < dim; ++channel) {
    const volatile float scaled = c.q(b, head, i, channel) * c.scale;
    x = x + scaled * c.k(b, kv_head, t, channel);
    size += std::abs(scaled * c.k(b, kv_head, t, channel));
  }
  Real error = std::isfinite(size) ? product_error(c) * static_cast<Real>(size) : 0;
  if (c.softcap > 0) {
    const Real cap = c.softcap;
    error = std::min(error, 2 * cap);
    x = static_cast<float>(cap * std::tanh(static_cast<Real>(x) / cap));
    error += static_cast<Real>(2e-6) * std::abs(static_cast<Real>(x));
  }
  float more = 0, most = 0;
  const auto add = [&](float added) { more += added, most += std::abs(added); };
  if (!c.slopes.empty()) add(c.slopes[uz(head)] * static_cast<float>(position - query));
  if (bias != 0) add(bias * (c.factors.empty() ? 1.0f : c.factors[uz(head)]));
  if (most != 0) {
    error += 0x1p-22L * (static_cast<Real>(most) + std::abs(static_cast<Real>(x)));
    x = x + more;
  }
  return Logit{x, std::isnan(error) ? 0 : error};
}

RowResult row_of(const Case& c, Index b, Index head, Index i) {
  RowResult row;
  const Index kv_head = head / c.group, width = c.v_dim;
  row.out.assign(uz(width), 0), row.out_error.assign(uz(width), 0);
  std::vector<Logit> logits;
  std::vector<Index> at;
  Real top = -HUGE_VALL;
  bool broken = false;
  for (Index t = 0; t < c.keys(); ++t)
    if (const auto logit = logit_of(c, b, head, i, t)) {
      logits.push_back(*logit), at.push_back(t);
      broken = broken || std::isnan(logit->value) || logit->value == infinity;
      if (!std::isnan(logit->value)) top = std::max(top, static_cast<Real>(logit->value));
    }
  if (!c.sinks.empty()) top = std::max(top, static_cast<Real>(c.sinks[uz(head)]));
  if (broken) {
    row.is = RowResult::Is::not_a_number;
    return row;
  }
  if (top == -HUGE_VALL) return row;
  row.is = RowResult::Is::finite;
  Real sum = 0, worst = 0x1p-20L, lost = 0;
  if (!c.sinks.empty()) sum += std::exp(static_cast<Real>(c.sinks[uz(head)]) - top);
  std::vector<Real> most(uz(width), 0), missed(uz(width), 0);
  for (std::size_t n = 0; n < at.size(); ++n) {
    const Real below = top - static_cast<Real>(logits[n].value);
    const Real weight = std::exp(-below);
    const Real error = logits[n].error;
    // An uncertain logit counts for as much as it may weigh.
    const bool small = below - error > may_vanish;
    if (below - 2 * error < 80) worst = std::max(worst, error);
    sum += weight;
    if (small) lost += weight;
    for (Index channel = 0; channel < width; ++channel) {
      const Real v = c.v(b, kv_head, at[n], channel);
      row.out[uz(channel)] += weight * v;
      most[uz(channel)] = std::max(most[uz(channel)], std::abs(v));
      if (small) missed[uz(channel)] += weight * std::abs(v);
    }
  }
  // Weights off by exp(+-2 worst) between them; and a weight by its exponential and rounding.
  const bool narrow = c.q_len > 1 && quoka::arithmetic_used(c.arithmetic, *c.format, *c.format) !=
                                         Arithmetic::float_;
  const bool int8 =
      narrow && quoka::arithmetic_used(c.arithmetic, *c.format, *c.format) == Arithmetic::int8;
  const Real of_weight = std::expm1(std::min<Real>(4 * worst, 60)) + (int8     ? int8_value_error
                                                                      : narrow ? 0x1p-5L
                                                                               : 0x1p-20L);
  if (int8)  // a value has one scale for all channels
    std::fill(most.begin(), most.end(), *std::max_element(most.begin(), most.end()));
  for (Index channel = 0; channel < width; ++channel) {
    row.out[uz(channel)] /= sum;
    row.out_error[uz(channel)] =
        std::min<Real>(of_weight, 2.001L) * most[uz(channel)] + missed[uz(channel)] / sum + 1e-37L;
  }
  row.lse = top + std::log(sum);
  row.lse_error =
      2 * worst + lost / sum + 0x1p-21L + std::abs(row.lse) * 0x1p-22L + (narrow ? 0x1p-5L : 0);
  return row;
}

// ---- cases --------------------------------------------------------------------------------------

// x as the format holds it.
Tensor4<float> held(const Tensor4<float>& x, const Format& format, std::vector<std::byte>& bytes) {
  const Index width = x.dimension(3), row = format.row_bytes({width});
  bytes.assign(uz(row * (x.size() / width)), std::byte{0});
  Tensor4<float> to(x.dimensions());
  for (Index i = 0; i < x.size() / width; ++i) {
    format.narrow(x.data() + i * width, {width}, bytes.data() + i * row);
    format.widen(bytes.data() + i * row, {width}, to.data() + i * width);
  }
  return to;
}
Rows rows_of(const std::vector<std::byte>& bytes, const Tensor4<float>& x, const Format& format,
             Index begin, Index count) {
  const Index row = format.row_bytes({x.dimension(3)}), len = x.dimension(2);
  return Rows(bytes.data(), format, {x.dimension(0), x.dimension(1), len, x.dimension(3)},
              {x.dimension(1) * len * row, len * row, row})
      .slice(begin, count);
}

Case random_case(Random& random, std::vector<std::byte>& k, std::vector<std::byte>& v) {
  const auto one_of = [&](auto... x) {
    const std::common_type_t<decltype(x)...> all[] = {x...};
    return all[random.below(std::ssize(all))];
  };
  const auto seldom = [&](Index n) { return random.below(n) == 0; };
  Case c;
  c.kv_heads = one_of(1, 2), c.group = one_of(1, 2, 3, 4, 7), c.q_len = one_of(1, 1, 2, 5, 37);
  c.kv_len = one_of(0, 1, 7, 40, 130, 300, 900);
  c.v_dim = one_of(1, 3, 16, 33);
  c.chunk = c.kv_len == 0 || !seldom(4);
  c.causal = !seldom(5);
  c.format = one_of(&quoka::float_format(), &quoka::float_format(), &quoka::q8_0_format(),
                    &quoka::u8_format(), &quoka::format_of<Eigen::half>(),
                    &quoka::format_of<Eigen::bfloat16>());
  c.arithmetic =
      one_of(Arithmetic::float_, Arithmetic::automatic, Arithmetic::bf16, Arithmetic::int8);
  c.listed = seldom(4);
  c.window = seldom(5) ? one_of(1, 3, 50, 500) : 0;

  // Logits of this size, by a scale, queries and keys of any that make it.
  const Real size = one_of(0.0L, 1e-44L, 1e-30L, 1.0L, 8.0L, 60.0L, 300.0L, 1e6L, 1e20L, 1e30L,
                           2.3e38L, 2.4e38L, 3.39e38L, 1e39L);
  c.scale = static_cast<float>(one_of(1.0, 0.125, -1.0, 1e30, 1e-30, 1e-38, 1e-41));
  const bool small_cache =
      c.format == &quoka::q8_0_format() || c.format == &quoka::format_of<Eigen::half>();
  const Real key_size =
      small_cache ? one_of(1.0L, 1e-3L, 3e4L) : one_of(1.0L, 1e-30L, 1e30L, 1e-41L);
  const auto of_query = static_cast<float>(
      std::min<Real>(size / key_size / std::abs(static_cast<Real>(c.scale)), 3e38L));
  const Index channel = random.below(dim);
  const Index keys = c.keys();
  c.q = Tensor4<float>(c.batch, c.heads(), c.q_len, dim);
  c.k = Tensor4<float>(c.batch, c.kv_heads, keys, dim);
  c.v = Tensor4<float>(c.batch, c.kv_heads, keys, c.v_dim);
  c.q.setZero(), c.k.setZero();
  const Real value_size = one_of(1.0L, 1.0L, 1e4L, 1e-4L);
  for (Index h = 0; h < c.heads(); ++h)
    for (Index i = 0; i < c.q_len; ++i)
      c.q(0, h, i, channel) = of_query * static_cast<float>(one_of(1.0, 1.0, -1.0, 0.5, 0.0));
  for (Index h = 0; h < c.kv_heads; ++h)
    for (Index t = 0; t < keys; ++t) {
      const double part =
          one_of(1.0, 1.0, -1.0, 0.5, 0.0, 1 - 2 * random.uniform(), random.normal());
      c.k(0, h, t, channel) = static_cast<float>(key_size * static_cast<Real>(part));
      for (Index to = 0; to < c.v_dim; ++to)
        c.v(0, h, t, to) = static_cast<float>(value_size * static_cast<Real>(random.normal()) *
                                              (seldom(20) && !small_cache ? 1e30L : 1.0L));
    }
  if (seldom(6) && !small_cache)
    c.k(0, 0, random.below(keys), random.below(dim)) = one_of(infinity, -infinity, not_a_number);
  if (seldom(8))
    c.q(0, 0, random.below(c.q_len), random.below(dim)) = one_of(infinity, not_a_number);
  if (seldom(4)) c.softcap = static_cast<float>(one_of(1e-30, 1e-3, 1.0, 30.0, 1e4, 1e20, 1e30));
  const bool moderate = size < 1e20L || c.softcap > 0;
  if (seldom(4))
    for (Index h = 0; h < c.heads(); ++h)
      c.sinks.push_back(static_cast<float>(
          one_of(0.0, -5.0, 70.0, -1e30, 1e30, -3e38, 3.4e38, -HUGE_VAL, double(size))));
  for (float& sink : c.sinks) sink = std::min(sink, FLT_MAX);
  if (seldom(5) && moderate)
    for (Index h = 0; h < c.heads(); ++h)
      c.slopes.push_back(static_cast<float>(one_of(0.0, 0.25, 1e-40, 1e30, -0.5)));
  if (seldom(4) && keys > 0) {
    c.mask = Tensor4<float>(1, 1, c.q_len, keys);
    const bool hides_all = seldom(5), infinite = seldom(5);
    for (Index i = 0; i < c.q_len; ++i)
      for (Index t = 0; t < keys; ++t)
        c.mask(0, 0, i, t) = hides_all && i == 0 ? -infinity
                             : seldom(3) ? one_of(-1.0f, 2.5f, -infinity, -65504.0f, -FLT_MAX,
                                                  -59999.0f, moderate ? 1e30f : 1.0f,
                                                  !infinite || !seldom(30) ? 2.0f
                                                  : seldom(2)              ? infinity
                                                                           : not_a_number)
                                         : 0.0f;
    if (seldom(2))
      for (Index h = 0; h < c.heads(); ++h)
        c.factors.push_back(one_of(0.0f, 1.0f, -1.0f, 1e-40f, moderate ? 1e5f : 1.0f));
  }
  if (c.kv_len > 0 && seldom(4)) {
    c.keep.resize(uz(c.kv_heads));
    for (auto& of : c.keep)
      for (Index t = 0; t < c.kv_len; ++t)
        if (!seldom(3)) of.push_back(static_cast<Position>(t));
  }
  c.merged = c.kv_len > 1 && c.keep.empty() && !c.masked() && seldom(3);
  c.k = held(c.k, *c.format, k), c.v = held(c.v, *c.format, v);
  return c;
}

struct Got {
  Tensor4<float> out;
  Tensor3<float> lse;
};

Got attend(const Case& c, const std::vector<std::byte>& k, const std::vector<std::byte>& v) {
  Got got{Tensor4<float>(c.batch, c.heads(), c.q_len, c.v_dim),
          Tensor3<float>(c.batch, c.heads(), c.q_len)};
  std::vector<Position> cells(uz(c.kv_len));
  for (Index t = 0; t < c.kv_len; ++t) cells[uz(t)] = static_cast<Position>(t);
  const auto past_rows = [&](const std::vector<std::byte>& bytes, const Tensor4<float>& x,
                             Index begin, Index count) {
    const Rows all = rows_of(bytes, x, *c.format, 0, c.kv_len);
    return (c.listed ? all.gathered(cells) : all).slice(begin, count);
  };
  const Index chunk = c.chunk ? c.q_len : 0;
  AttentionOptions options{.scale = c.scale,
                           .softcap = c.softcap,
                           .sinks = c.sinks,
                           .sliding_window = c.window,
                           .arithmetic = c.arithmetic,
                           .q_offset = c.kv_len,
                           .causal = c.causal,
                           .mask = c.masked() ? Mask(c.mask) : Mask(),
                           .mask_factors = c.factors,
                           .alibi_slopes = c.slopes};
  const quoka::Chunk own{rows_of(k, c.k, *c.format, c.kv_len, chunk),
                         rows_of(v, c.v, *c.format, c.kv_len, chunk)};
  if (!c.merged) {
    Selection keep;
    quoka::Past past(past_rows(k, c.k, 0, c.kv_len), past_rows(v, c.v, 0, c.kv_len));
    if (!c.keep.empty()) {
      keep = Selection::from_lists(c.batch, c.kv_heads, c.kv_len, c.keep);
      past.selection = &keep;
    }
    quoka::attention(c.q, past, own, {got.out, got.lse}, options);
    return got;
  }
  const Index half = c.kv_len / 2;
  quoka::Past second(past_rows(k, c.k, half, c.kv_len - half),
                     past_rows(v, c.v, half, c.kv_len - half));
  second.first_position = half;
  quoka::attention(c.q, second, own, {got.out, got.lse}, options);
  Got first{got.out, got.lse};
  options.sinks = {};
  quoka::attention(c.q, {past_rows(k, c.k, 0, half), past_rows(v, c.v, 0, half)}, {},
                   {first.out, first.lse}, options);
  quoka::merge(got.out, got.lse, first.out, first.lse);
  return got;
}

std::string shape_of(const Case& c, Index seed) {
  std::string text = "case " + std::to_string(seed) + ": " + c.format->name + " " +
                     arithmetic_name(c.arithmetic) + ", group " + std::to_string(c.group) +
                     ", q_len " + std::to_string(c.q_len) + ", kv_len " + std::to_string(c.kv_len) +
                     ", scale " + std::to_string(std::log10(std::abs(c.scale))) + ", cap " +
                     std::to_string(c.softcap);
  for (const auto& [on, name] : {std::pair{c.masked(), " mask"},
                                 {c.merged, " merged"},
                                 {c.listed, " listed"},
                                 {!c.keep.empty(), " selection"},
                                 {c.window > 0, " window"},
                                 {!c.sinks.empty(), " sinks"},
                                 {!c.slopes.empty(), " alibi"},
                                 {c.chunk, " chunk"},
                                 {c.causal, " causal"}})
    if (on) text += name;
  return text;
}

void expect_as_oracle(const Case& c, const Got& got) {
  for (Index head = 0; head < c.heads(); ++head)
    for (Index i = 0; i < c.q_len; ++i) {
      const RowResult expected = row_of(c, 0, head, i);
      const float lse = got.lse(0, head, i);
      const std::string where = "head " + std::to_string(head) + ", row " + std::to_string(i);
      switch (expected.is) {
        case RowResult::Is::not_a_number:
          ASSERT_TRUE(std::isnan(lse)) << where << ": " << lse;
          for (Index x = 0; x < c.v_dim; ++x)
            ASSERT_TRUE(std::isnan(got.out(0, head, i, x))) << where;
          break;
        case RowResult::Is::nothing:
          ASSERT_EQ(lse, -infinity) << where;
          for (Index x = 0; x < c.v_dim; ++x) ASSERT_EQ(got.out(0, head, i, x), 0.0f) << where;
          break;
        case RowResult::Is::finite:
          ASSERT_LE(std::abs(static_cast<Real>(lse) - expected.lse), expected.lse_error)
              << where << ": " << lse << " for " << static_cast<double>(expected.lse);
          for (Index x = 0; x < c.v_dim; ++x)
            ASSERT_LE(std::abs(static_cast<Real>(got.out(0, head, i, x)) - expected.out[uz(x)]),
                      expected.out_error[uz(x)])
                << where << ", channel " << x << ": " << got.out(0, head, i, x) << " for "
                << static_cast<double>(expected.out[uz(x)]);
      }
    }
}

TEST(AttentionNumbers, AreTheOraclesFromOneEndOfFloatToTheOther) {
  const char* const asked = std::getenv("QUOKA_NUMBERS_CASES");
  const Index cases = asked != nullptr ? std::atol(asked) : 300;
  for (Index seed = 0; seed < cases; ++seed) {
    Random random(static_cast<std::uint64_t>(seed));
    std::vector<std::byte> k, v;
    const Case c = random_case(random, k, v);
    SCOPED_TRACE(shape_of(c, seed));
    expect_as_oracle(c, attend(c, k, v));
    if (::testing::Test::HasFatalFailure() && asked == nullptr) return;
  }
}

}  // namespace
