// softmax_scores() against the oracle, in float (select/float_mass.hpp) and by 8-bit codes (select/code_mass.hpp), over
// drawn calls: any number of rows, keys, heads and channels, rows of any format and layout, numbers as real models have
// them, keys and rows that are not finite, keys of a chunk that rows see beside those that get scores, memory of
// earlier calls. Codes lie within the stated bound, which is what the formula says. By example: the bound is tight and
// decides between codes and float, the ends of float, and calls that take several passes.

#include <quoka/select/code_mass.hpp>
#include <quoka/select/float_mass.hpp>
#include <quoka/select/softmax_scores.hpp>
#include <quoka/simd/code_dots.hpp>

#include "kernels/whole_bound.hpp"
#include "support/baseline_oracle.hpp"
#include "support/float_bounds.hpp"
#include "support/emulated_tiles.hpp"
#include "support/world.hpp"

#include <cmath>
#include <limits>
#include <numeric>

namespace {

using namespace quoka_test;
using quoka::Aggregation;
using quoka::KeySketch;
using quoka::RowWriter;
using quoka::SoftmaxScoreState;
namespace detail = quoka::detail;
namespace simd = quoka::simd;

detail::MassShape shape_of(Index rows, Index keys) {
  detail::MassShape shape{};
  shape.lists = 1, shape.list_rows = rows, shape.keys = keys;
  return shape;
}

// By emulated tiles.
const detail::CodeKernels& emulated_kernels() {
  return detail::code_kernels_of<simd::EmulatedTiles>;
}

constexpr Aggregation mean = Aggregation::mean, most = Aggregation::max;
constexpr Index tile = quoka::tuning::tile_rows, block = quoka::tuning::block_keys,
                panel = quoka::tuning::panel_rows;

// ---- one call, and the same in double -----------------------------------------------------------

// Scores of keys [batch, kv_heads, len, dim] by rows [batch, heads, rows, dim], whose logits are q.k, and of a chunk
// [batch, kv_heads, chunk_len, dim], of which row i of each head sees the first ends[i]. Without ends there is no
// chunk.
struct Scoring {
  Tensor4<float> q;
  Rows k;
  Tensor4<float> chunk = {};
  std::vector<Index> ends = {};
  Index capacity = 0;

  Index heads() const { return q.dimension(0) * q.dimension(1); }
  bool has_chunk() const { return !ends.empty(); }
};

struct Masses {
  Tensor3<float> scores;        // [batch, heads, kv_len]
  std::vector<float> chunk;     // [batch * heads]
  std::vector<double> error{};  // by codes: eps of each KV head in nats; infinity: in float

  bool by_codes() const {
    return std::all_of(error.begin(), error.end(), [](double e) { return std::isfinite(e); });
  }
};

// turn: of a cache's sketch, which has its keys looked up.
Masses masses(const Scoring& x, Aggregation over, const KeySketch* sketch, SoftmaxScoreState& state,
              std::uint64_t* turn = nullptr) {
  Masses result{Tensor3<float>(x.k.batch(), x.q.dimension(1), x.k.len()),
                std::vector<float>(uz(x.heads()), -1.0f)};
  result.scores.setConstant(-12345.0f);
  const auto fill = [&](Index b, Index head, RowWriter& rows) {
    for (Index m = 0; m < x.q.dimension(2); ++m)
      rows.add(&x.q(b, head, m, 0), 1.0f, x.has_chunk() ? x.ends[uz(m)] : 0);
  };
  quoka::SoftmaxScoring scoring{.rows = {x.q.dimension(2), x.k.dim()},
                                .fill = fill,
                                .keys = x.k,
                                .capacity = x.capacity,
                                .rule = {.over = over},
                                .chunk_k = x.has_chunk() ? Rows(x.chunk) : Rows(),
                                .chunk_scores = x.has_chunk() ? result.chunk.data() : nullptr};
  if (sketch != nullptr)
    scoring.codes = turn != nullptr ? quoka::SketchedKeys(x.k, *sketch, *turn)
                                    : quoka::SketchedKeys(x.k, *sketch);
  quoka::softmax_scores(scoring, result.scores, state, SerialExecutor{});
  result.error.assign(state.errors.begin(), state.errors.end());
  return result;
}
Masses in_float(const Scoring& x, Aggregation over = mean) {
  SoftmaxScoreState state;
  return masses(x, over, nullptr, state);
}
// Emulated tiles give the same bits.
Masses by_codes(const Scoring& x, SoftmaxScoreState& state) {
  KeySketch sketch, for_tiles;
  sketch.append(x.k, x.k.len(), SerialExecutor{});
  for_tiles.append(x.k, x.k.len(), SerialExecutor{});
  for_tiles.coded_phases = detail::softmax_mass<emulated_kernels>;
  Masses result = masses(x, mean, &sketch, state);
  const Masses by_tiles = masses(x, mean, &for_tiles, state);
  EXPECT_TRUE(same_bits(by_tiles.scores, result.scores));
  EXPECT_EQ(by_tiles.chunk, result.chunk);
  return result;
}
Masses by_codes(const Scoring& x) {
  SoftmaxScoreState state;
  return by_codes(x, state);
}

// Row by row in double.
struct Exact {
  oracle::Scores mean, largest;  // over the rows
  std::vector<double> chunk;     // [batch * heads], of the means
  double size = 0;               // the largest |q| |k|
};
Exact exact_masses(const Scoring& x) {
  const oracle::Tensor q = to_oracle(x.q), k = to_oracle(x.k), own = to_oracle(x.chunk);
  Exact result{oracle::Scores(uz(q.batch)), oracle::Scores(uz(q.batch)), {}};
  for (Index b = 0; b < q.batch; ++b)
    for (Index head = 0; head < q.heads; ++head) {
      const Index kv_head = head * k.heads / q.heads;
      const auto of = oracle::row_masses(
          oracle::rows_of(q, b, head), oracle::rows_of(k, b, kv_head),
          oracle::rows_of(own, b, kv_head), x.ends, [&](oracle::Row row, oracle::Row key) {
            result.size = std::max(result.size, oracle::norm(row) * oracle::norm(key));
            return oracle::dot(row, key);
          });
      result.mean[uz(b)].push_back(of.mean), result.largest[uz(b)].push_back(of.largest);
      result.chunk.push_back(of.chunk);
    }
  return result;
}

// Every mass within `relative` of itself, below least_mass only below it; without a row that counts 0, or nearly.
constexpr double least_mass = 1e-15;
void expect_masses(const Masses& got, const oracle::Scores& exact, Index b, Index head,
                   double relative) {
  const std::vector<double>& wanted = exact[uz(b)][uz(head)];
  const bool none = std::none_of(wanted.begin(), wanted.end(), [](double x) { return x > 0; });
  for (Index t = 0; t < got.scores.dimension(2); ++t) {
    const double mass = double{got.scores(b, head, t)}, expected = wanted[uz(t)];
    SCOPED_TRACE("key " + std::to_string(t) + " of head " + std::to_string(head));
    if (expected == -oracle::infinity)
      ASSERT_EQ(mass, expected);
    else if (expected > least_mass)
      ASSERT_NEAR(mass, expected, relative * expected);
    else
      ASSERT_TRUE(mass >= 0.0 && mass <= (none ? 1e-30 : least_mass * (1 + relative))) << mass;
  }
}
void expect_chunks(const Scoring& x, const Masses& got, const Exact& exact, Index head,
                   double relative) {
  if (x.has_chunk()) {
    ASSERT_NEAR(double{got.chunk[uz(head)]}, exact.chunk[uz(head)],
                relative * exact.chunk[uz(head)] + 1e-30);
  }
}

// In float. Masses that are compared are least_mass or more.
void expect_in_float(const Scoring& x, const Exact& exact, Aggregation over, const Masses& got) {
  const double bound =
      drawn_mass_error(x.k.len() + x.chunk.dimension(2), x.q.dimension(2), exact.size, least_mass);
  for (Index i = 0; i < x.heads(); ++i) {
    const Index heads = x.q.dimension(1);
    ASSERT_NO_FATAL_FAILURE(
        expect_masses(got, over == mean ? exact.mean : exact.largest, i / heads, i % heads, bound));
    if (over == mean) {
      ASSERT_NO_FATAL_FAILURE(expect_chunks(x, got, exact, i, bound));
    }
  }
}
// By codes within exp(+-a), or in float where they would be further off.
double bound_of(double eps) {
  return std::isinf(eps) ? 1e-3 : std::expm1(2.0 * eps + static_cast<double>(detail::weight_error));
}
void expect_by_codes(const Scoring& x, const Exact& exact, const Masses& got) {
  for (Index i = 0; i < x.heads(); ++i) {
    const Index heads = x.q.dimension(1), group = heads / x.k.heads();
    const double bound = bound_of(got.error[uz(i / group)]);
    ASSERT_NO_FATAL_FAILURE(expect_masses(got, exact.mean, i / heads, i % heads, bound));
    ASSERT_NO_FATAL_FAILURE(expect_chunks(x, got, exact, i, bound));
  }
}
Masses expect_by_codes(const Scoring& x) {
  const Masses got = by_codes(x);
  expect_by_codes(x, exact_masses(x), got);
  return got;
}

// eps of a head, by the formula, of what is finite.
double eps_of(const Scoring& x, Index b, Index kv_head) {
  const oracle::Tensor q = to_oracle(x.q), k = to_oracle(x.k);
  const auto missed = [](oracle::Row row, float least_unit) {
    double largest = 0.0, sum = 0.0;
    for (const double c : row) largest = std::max(largest, std::abs(c));
    const double unit = std::max(largest / 127.0, static_cast<double>(least_unit));
    for (const double c : row)
      sum += unit > 0 ? std::pow(c - unit * std::nearbyint(c / unit), 2) : 0.0;
    return std::sqrt(sum);
  };
  double longest = 0.0, most_missed = 0.0, eps = 0.0;
  for (Index t = 0; t < k.len; ++t) {
    if (!oracle::is_finite(k.row(b, kv_head, t))) continue;
    longest = std::max(longest, oracle::norm(k.row(b, kv_head, t)));
    most_missed = std::max(most_missed, missed(k.row(b, kv_head, t), 0.0f));
  }
  const Index group = q.heads / k.heads;
  for (Index head = kv_head * group; head < (kv_head + 1) * group; ++head)
    for (Index m = 0; m < q.len; ++m) {
      if (!oracle::is_finite(q.row(b, head, m))) continue;
      const double length = oracle::norm(q.row(b, head, m)),
                   e = missed(q.row(b, head, m), simd::run_scale(&x.q(b, head, m, 0), q.dim));
      eps = std::max(eps, e * longest + (length + e) * most_missed +
                              static_cast<double>(2 * q.dim + 32) * 0x1p-24 * length * longest);
    }
  return eps;
}

// ---- against the oracle -------------------------------------------------------------------------

// Rows and keys with exact codes, whose lengths allow logits of +-`longest` nats, and whose logits lie
// within 5 nats of `at`: weights must be taken against the largest logit that occurs. The bound depends on lengths
// alone and is 0 here, except for rounding.
struct FarLogits {
  FarLogits(Random& random, Index rows, Index len, double longest, double at)
      : q(1, 1, rows, 4), k(1, 1, len, 4) {
    q.setZero(), k.setZero();
    const double unit = std::sqrt(longest) / 127.0;
    for (Index m = 0; m < rows; ++m) {
      q(0, 0, m, 0) = static_cast<float>(127.0 * unit);
      q(0, 0, m, 1) = static_cast<float>(static_cast<double>(m % 3 + 1) * unit);
    }
    const double step = 127.0 * unit * unit;  // of a logit
    for (Index t = 0; t < len; ++t) {
      k(0, 0, t, 2) = static_cast<float>(127.0 * unit);
      const double logit = std::round((at + 10.0 * random.uniform() - 5.0) / step);
      k(0, 0, t, 0) = static_cast<float>(std::clamp(logit, -127.0, 127.0) * unit);
    }
  }
  Tensor4<float> q, k;
};

// Numbers of keys and rows, normal ones or adverse.
enum class Kind {
  normal,
  outlier,
  sink,
  offset,
  equal,
  zeros,
  odd_keys,
  odd_rows,
  no_row,
  no_key,
  far,
  sizes,
  none
};

void change(Random& random, Kind kind, Tensor4<float>& q, Tensor4<float>& k) {
  const Index dim = k.dimension(3), len = k.dimension(2);
  const auto odd = [&] { return random.one_of(not_a_number, infinity, -infinity); };
  const double size = std::exp2(60 * (random.uniform() - 0.5));
  for (Index head = 0; head < k.dimension(0) * k.dimension(1); ++head)
    for (Index t = 0; t < len; ++t) {
      float* const row = k.data() + (head * len + t) * dim;
      if (kind == Kind::outlier) row[dim / 2] = 20.0f + 3.0f * row[dim / 2];
      if (kind == Kind::sink && t == 0)
        for (Index c = 0; c < dim; ++c) row[c] = 3.0f * q.data()[c];
      if (kind == Kind::offset)
        for (Index c = 0; c < dim; ++c) row[c] += 2.0f;
      if (kind == Kind::equal && t % 3 != 0) std::copy_n(k.data(), dim, row);
      if (kind == Kind::zeros && t % 3 != 1) std::fill_n(row, dim, 0.0f);
      // Two blocks of nothing, and keys here and there.
      if (kind == Kind::no_key || (kind == Kind::odd_keys && (t % 3 == 1 || (t >= 64 && t < 96))))
        row[random.below(dim)] = odd();
      if (kind == Kind::far) row[0] += 30.0f * static_cast<float>(t / block % 3);
      if (kind == Kind::sizes)
        for (Index c = 0; c < dim; ++c) row[c] = static_cast<float>(double{row[c]} / size);
    }
  for (Index i = 0; i < q.size(); ++i) {
    float& x = q.data()[i];
    const Index row = i / dim;
    if (kind == Kind::zeros && row % 2 == 1) x = 0.0f;
    if (kind == Kind::odd_rows && row % 3 == 1 && i % dim == dim / 2) x = odd();
    if (kind == Kind::no_row && i % dim == dim / 2) x = odd();
    if (kind == Kind::sizes) x = static_cast<float>(double{x} * size);
  }
}

// Sizes around a tile, a block, a panel and what one task takes; several heads of scores for each KV head.
TEST(SoftmaxMass, IsTheOraclesInFloatAndByCodes) {
  for_each_draw("DRAW", 200, [](Random& random, std::uint64_t) {
    constexpr Index at_once = quoka::tuning::max_panels_per_task * panel;
    Index rows = random.one_of<Index>(
              {1, 2, 3, 7, 8, 13, simd::lanes + 1, panel - 1, panel, panel + 1, 3 * panel + 1}),
          dim = random.one_of<Index>({1, 3, 15, 16, 17, 37, 64, 100, 128}), heads = 1, batch = 1,
          kv_len = random.one_of<Index>({0, 1, 3, tile - 1, tile, tile + 1, 31, 33, block - 1,
                                         block + 1, block + tile, 2 * block + 3, 501, 1300});
    if (random.seldom(20)) rows = 0;
    if (random.seldom(10))
      rows = at_once + random.one_of<Index>({0, 1, panel + 3}), dim = 3, kv_len = 137;
    else if (random.seldom(3))
      heads = 2, batch = 2;
    const Index lists = heads * (random.seldom(4) ? 3 : 1);
    const Kind kind = static_cast<Kind>(random.below(16));
    SCOPED_TRACE("rows " + std::to_string(rows) + ", keys " + std::to_string(kv_len) + ", dim " +
                 std::to_string(dim) + ", kind " + std::to_string(static_cast<int>(kind)));
    const double scale = 2.0 / std::sqrt(static_cast<double>(dim));
    auto q = random.tensor<float>(batch, lists, rows, dim, scale),
         floats = random.tensor<float>(batch, heads, kv_len, dim);
    if (q.size() > 0) change(random, kind, q, floats);
    const StoredRows k(floats, *every_format()[uz(random.below(3))],
                       StoredRows::layouts[random.below(batch == 1 ? 6 : 3)], random);
    Scoring x{q, k.rows()};
    if (random.seldom(2) && rows > 0) {
      x.chunk = random.tensor<float>(batch, heads,
                                     random.one_of<Index>({1, tile - 1, block, block + tile}), dim);
      for (Index i = 0; i < rows; ++i) x.ends.push_back(random.below(x.chunk.dimension(2) + 1));
      // Logits of the first row of each KV head that are far from those of the past.
      const float far = random.one_of(0.0f, 0.0f, 2000.0f, -2000.0f);
      for (Index at = 0; far != 0.0f && at < x.chunk.size(); ++at) {
        const Index head = at / dim / x.chunk.dimension(2);
        const float* const row = q.data() + head * (lists / heads) * rows * dim;
        const double square = std::inner_product(row, row + dim, row, 0.0);
        if (std::isnormal(square))
          x.chunk.data()[at] = static_cast<float>(double{far} * double{row[at % dim]} / square);
      }
      // What no row sees does not count, whatever it holds.
      for (Index t = *std::max_element(x.ends.begin(), x.ends.end()); t < x.chunk.dimension(2); ++t)
        x.chunk.chip(t, 2).setConstant(t % 2 == 0 ? 1e10f : not_a_number);
    }
    const Exact exact = exact_masses(x);
    // Memory of a call of another shape.
    const auto other_k = random.tensor<float>(1, 2, random.one_of<Index>({1, 90, 700}), 9);
    const Scoring other{random.tensor<float>(1, 2, panel + 1, 9), other_k};
    SoftmaxScoreState used;
    for (const Aggregation over : {mean, most}) {
      const Masses got = in_float(x, over);
      ASSERT_NO_FATAL_FAILURE(expect_in_float(x, exact, over, got));
      x.capacity = random.one_of<Index>({1, kv_len + 1, 50000});
      (void)masses(other, over, nullptr, used);
      EXPECT_TRUE(same_bits(masses(x, over, nullptr, used).scores, got.scores));
    }
    (void)by_codes(other, used);
    const Masses got = by_codes(x, used);
    ASSERT_NO_FATAL_FAILURE(expect_by_codes(x, exact, got));
    for (Index i = 0; i < std::ssize(got.error) && dim > 1; ++i)
      if (std::isfinite(got.error[uz(i)])) {
        const double eps = eps_of(x, i / heads, i % heads);
        EXPECT_GE(got.error[uz(i)], 0.9999 * eps);
        EXPECT_LE(got.error[uz(i)], 1.002 * eps);
      }
  });
}

// One key may decide, wherever it lies: in a pair of blocks that is looked at first, in another one, or alone in the last
// one; in the first range of keys, or in another one. Ranges of few rows are longer by codes than in float.
TEST(SoftmaxMass, ByCodesOfLogitsFarBelowWhatLengthsAllow) {
  for_each_draw("DRAW", 60, [](Random& random, std::uint64_t) {
    const double longest = random.one_of(30.0, 60.0, 90.0, 200.0, 300.0, 500.0),
                 at = longest * random.one_of(-1.0, -0.9, -0.6, -0.2, 0.0, 0.4, 0.95);
    const Index len = random.one_of<Index>({3, 97, 700, 4993, 10'000}), rows = random.one_of(3, 14);
    SCOPED_TRACE(std::to_string(longest) + " nats by lengths, at " + std::to_string(at));
    FarLogits far(random, rows, len, longest, at);
    if (random.seldom(2)) {
      const Index best = std::min(
          random.one_of<Index>({0, 31, 40, 511, 512, 530, 699, 2047, 2080, 4999}), len - 1);
      far.k(0, 0, best, 0) = -far.k(0, 0, best, 0);
    }
    Scoring x{far.q, far.k};
    if (random.seldom(2)) {
      x.chunk = FarLogits(random, rows, 33, longest, std::min(at + 7.0, longest)).k;
      x.ends.assign(uz(rows), 33);
    }
    EXPECT_TRUE(expect_by_codes(x).by_codes());
  });
}

// ---- the ends of float --------------------------------------------------------------------------

// Logits of 2.36e38 and more would overflow in units of log2, and their differences overflow anyway.
TEST(SoftmaxMass, LogitsUpToTheLastFloatHaveTheirMass) {
  constexpr float last = std::numeric_limits<float>::max();
  constexpr Index rows = 5, len = 2 * block + 3;
  Tensor4<float> q(1, 1, rows, 3), k(1, 1, len, 3);
  q.setZero(), k.setZero();
  q.chip(0, 3).setConstant(1.0f);
  for (const float top : {2.35e38f, 2.37e38f, last}) {
    for (Index t = 0; t < len; ++t) k(0, 0, t, 0) = t % 2 == 0 ? -top : 0.5f * top;
    k(0, 0, 7, 0) = k(0, 0, block + 4, 0) = top;
    const Masses mass = in_float({q, k});
    for (Index t = 0; t < len; ++t)
      ASSERT_EQ(mass.scores(0, 0, t), t == 7 || t == block + 4 ? 0.5f : 0.0f) << top << " " << t;
    k.chip(0, 3).setConstant(-top);
    const Masses even = in_float({q, k}, most);
    for (Index t = 0; t < len; ++t) ASSERT_NEAR(even.scores(0, 0, t) * len, 1.0f, 1e-5f);
  }
}

TEST(SoftmaxMass, ARowWithALogitBeyondFloatDoesNotCount) {
  Tensor4<float> q(1, 1, 3, 1), k(1, 1, block + 5, 1);
  for (const Index at : {Index{3}, block + 2}) {
    q.setZero(), k.setZero();
    q(0, 0, 1, 0) = 1e30f, k(0, 0, at, 0) = 1e30f;
    const Masses mass = in_float({q, k});
    for (Index t = 0; t < block + 5; ++t)
      EXPECT_NEAR(mass.scores(0, 0, t), 2.0f / 3.0f / static_cast<float>(block + 5), 1e-6f) << at;
  }
}

// Keys that are too short or too long for codes, except zeros; rows, too, and keys that bring their products back. One
// head of several: the others are done by codes all the same.
TEST(SketchedMass, LengthsBeyondCodesAreForFloat) {
  Random random(708);
  auto q = random.tensor<float>(1, 3, 7, 20);
  q.chip(0, 3).setConstant(-1.0f);
  const auto normal = random.tensor<float>(1, 3, 50, 20);
  const auto in_float = [&](const Masses& got, bool is) {
    EXPECT_TRUE(std::isfinite(got.error[0]) && std::isfinite(got.error[2]));
    EXPECT_EQ(std::isinf(got.error[1]), is);
  };
  const auto times = [](float x, double size) {
    return static_cast<float>(static_cast<double>(x) * size);
  };
  for (const double size : {1e-60, 1e-45, 1e-38, 1e-20, 1e20, 1e30}) {
    SCOPED_TRACE(size);
    auto k = normal;
    bool zero = true;
    for (Index c = 0; c < 20; ++c) {
      float& x = k(0, 1, 37, c);  // a long one is far below the others, whatever the row
      x = size < 1.0 ? times(x, size) : c == 0 ? static_cast<float>(size) : 0.0f;
      zero = zero && x == 0.0f;
    }
    in_float(expect_by_codes({q, k}), !zero);
    if (zero || size == 1e30) continue;
    auto rows = q;
    k = normal;
    for (Index m = 0; m < 7; ++m)
      for (Index c = 0; c < 20; ++c) rows(0, 1, m, c) = times(rows(0, 1, m, c), size);
    for (Index t = 0; t < 50; ++t)
      for (Index c = 0; c < 20; ++c) k(0, 1, t, c) = times(k(0, 1, t, c), 1e-11);
    in_float(size < 1.0 ? expect_by_codes({rows, k}) : by_codes({rows, k}), true);
  }
}

// ---- the bound ----------------------------------------------------------------------------------

// One key of many `eps` nats below 0, the others as much above: its mass is exp(-2 eps) of theirs, and by the codes,
// for which all logits are 0, it is as large. Beyond most_logit_error a head is done in float: as exact as the oracle,
// where codes are off by exp(8).
TEST(SketchedMass, BoundIsUsedUpAndDecidesBetweenCodesAndFloat) {
  Random random(713);
  constexpr double limit = static_cast<double>(detail::most_logit_error);
  constexpr Index odd = 200;
  for (const bool coarse_keys : {true, false})
    for (const double eps : {0.1, 0.5, 1.0, 2.0, 0.98 * limit, 1.01 * limit}) {
      SCOPED_TRACE(std::to_string(eps) + (coarse_keys ? " nats of keys" : " nats of the row"));
      // If products are added in 16 bits, rows have a larger unit, and these rows have no exact codes.
      if (coarse_keys && simd::code_run != 0) continue;
      const WholeBound x(random);
      const auto of_keys = [&](double side) {
        return coarse_keys ? x.coarse(side) : x.signs(side);
      };
      std::vector<WholeBound::Vector> keys(400, of_keys(1));
      keys[uz(odd)] = of_keys(-1);
      const double size = std::sqrt(eps / (127.0 * 0.499));
      const auto q = rows_of({coarse_keys ? x.signs(1) : x.coarse(1)}, size),
                 k = rows_of(keys, size);
      const Masses got = expect_by_codes({q, k});
      if (simd::code_run == 0) {
        ASSERT_EQ(got.by_codes(), eps < limit);
      }
      if (!got.by_codes()) continue;
      const double off =
          std::log(double{got.scores(0, 0, odd)} / exact_masses({q, k}).mean[0][0][uz(odd)]);
      EXPECT_GE(off, 0.99 * 2.0 * got.error[0] - 0.01) << "the bound is wider than it need be";
    }
}

// A call that throws leaves no errors, neither its own nor those of the call before.
TEST(SketchedMass, SaysNothingOfLogitsAfterAnException) {
  Random random(737);
  auto k = random.tensor<float>(1, 1, 40, 4);
  const Scoring x{random.tensor<float>(1, 1, 3, 4), k};
  KeySketch sketch;
  sketch.update(x.k, 0, 40, SerialExecutor{});
  SoftmaxScoreState state;
  std::uint64_t turn = 0;
  EXPECT_TRUE(masses(x, mean, &sketch, state, &turn).by_codes());
  for (Index i = 0; i < k.size(); ++i) k.data()[i] += 5.0f;  // without an update()
  EXPECT_THROW(masses(x, mean, &sketch, state, &turn), std::invalid_argument);
  EXPECT_EQ(state.logit_error(0), infinity);
}

// ---- more weights than memory is meant for: rows in several passes ------------------------------

TEST(SoftmaxMassPasses, InFloatOfOnePanel) {
  Random random(405);
  constexpr Index kv_len = quoka::tuning::mass_weight_bytes / (panel * Index{sizeof(float)}) + 1;
  constexpr Index rows = 2 * panel + 1;
  ASSERT_EQ(detail::FloatMass::panels_at_once(shape_of(rows, kv_len)), 1);
  const auto k = random.tensor<float>(1, 1, kv_len, 1);
  const Scoring x{random.tensor<float>(1, 1, rows, 1), k};
  expect_in_float(x, exact_masses(x), mean, in_float(x));
}

// Weights of a few lists stay in the caches, and no list's sums are split while its weights fit.
TEST(SoftmaxMassPasses, ByCodesOfWholeLists) {
  const struct {
    Index lists, list_rows, pass_rows;
  } all[] = {{4, 64, 64}, {4, 32, 64},   {3, 86, 86},
             {2, 16, 32}, {1, 256, 256}, {6400, 2, 200}};  // the last: 64 passes
  for (const auto& [lists, list_rows, pass_rows] : all) {
    detail::MassShape shape = shape_of(list_rows, 8192);
    shape.lists = lists;
    EXPECT_EQ(detail::CodeMass::pass_rows(shape), pass_rows) << lists << " of " << list_rows;
  }
}

// Also where weights must be taken against each row's largest logit, and rows of the last pass have theirs at the other
// end of what lengths allow.
TEST(SoftmaxMassPasses, ByCodesWithLogitsFarApart) {
  Random random(729);
  const Index kv_len = 70'000;
  const Index rows = quoka::tuning::mass_weight_bytes / (2 * kv_len) + 9;
  const Index at_once = detail::CodeMass::pass_rows(shape_of(rows, kv_len));
  ASSERT_LT(at_once, rows);
  FarLogits far(random, rows, kv_len, 300.0, -270.0);
  for (Index m = at_once; m < rows; ++m)
    for (Index c = 0; c < 4; ++c) far.q(0, 0, m, c) *= -1.0f;
  EXPECT_TRUE(expect_by_codes({far.q, far.k}).by_codes());
}

// A head of so many keys that codes take more passes than floats, and whose rows codes cannot serve.
TEST(SoftmaxMassPasses, InFloatOfFewerThanByCodes) {
  Random random(733);
  const Index kv_len = quoka::tuning::mass_weight_bytes / 24 + 1, rows = 26;
  const detail::MassShape shape = shape_of(rows, kv_len);
  if (detail::FloatMass::passes(shape) >= detail::CodeMass::passes(shape))
    GTEST_SKIP() << "panels of few rows: float takes as many passes";
  const auto k = random.tensor<float>(1, 1, kv_len, 1);
  Scoring x{random.tensor<float>(1, 1, rows, 1), k};
  x.q(0, 0, 0, 0) = 1e13f;  // longer than what codes stand for
  const Masses codes = by_codes(x);
  EXPECT_TRUE(std::isinf(codes.error[0]));
  EXPECT_TRUE(same_bits(codes.scores, in_float(x).scores));
}

}  // namespace
