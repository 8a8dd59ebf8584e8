// softmax_scores() against the oracle, in float (select/float_mass.hpp) and by 8-bit codes (select/code_mass.hpp): any number
// of rows, keys and channels, numbers as real models have them, keys and rows that are not finite, several passes of
// rows, keys of a chunk that rows see beside those that get scores. Codes lie within the stated bound, which is tight, and
// which decides between codes and float. Then the scores that both mass methods compute from it.

#include <quoka/select/code_mass.hpp>
#include <quoka/select/float_mass.hpp>
#include <quoka/select/softmax_scores.hpp>
#include <quoka/simd/code_dots.hpp>

#include "support/baseline_fixtures.hpp"
#include "support/emulated_tiles.hpp"

#include <cmath>
#include <cstring>
#include <limits>

namespace {

using namespace quoka_test;
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
Index panels_at_once(Index rows, Index keys) {
  return detail::FloatMass::panels_at_once(shape_of(rows, keys));
}

// By emulated tiles.
struct EmulatedMass {
  static const detail::CodeKernels& kernels() {
    return detail::code_kernels_of<simd::EmulatedTiles>;
  }
  static constexpr detail::CodedWork work = {detail::softmax_mass<true>, kernels};
};

constexpr Aggregation mean = Aggregation::mean, most = Aggregation::max;
constexpr Index tile = quoka::tuning::tile_rows, block = quoka::tuning::block_keys,
                panel = quoka::tuning::panel_rows;

// ---- weights in pairs, a rough exponential ------------------------------------------------------

TEST(WeightPairs, AreReadBackWithinTheirError) {
  Random random(701);
  alignas(64) float a[simd::lanes], b[simd::lanes], x[simd::lanes], y[simd::lanes];
  alignas(64) std::uint32_t pairs[simd::lanes];
  float worst = 0.0f;
  for (int turn = 0; turn < 500; ++turn) {
    for (int i = 0; i < simd::lanes; ++i) {
      a[i] = static_cast<float>(std::exp2(180.0 * random.uniform() - 95.0));
      b[i] = static_cast<float>(std::exp2(180.0 * random.uniform() - 95.0));
    }
    simd::store_weight_pairs(pairs, simd::load(a), simd::load(b));
    simd::store(x, simd::first_weights(pairs)), simd::store(y, simd::second_weights(pairs));
    for (int i = 0; i < simd::lanes; ++i)
      worst = std::max({worst, std::abs(x[i] / a[i] - 1.0f), std::abs(y[i] / b[i] - 1.0f)});
  }
  EXPECT_LE(worst, simd::weight_pair_max_error);
  EXPECT_GT(worst, 0.9f * simd::weight_pair_max_error);
}

TEST(RoughExp2, IsWithinItsError) {
  double worst = 0.0;
  for (double at = -126.0; at <= 126.0; at += 0.00917) {
    const float x = static_cast<float>(at);
    const double exact = std::exp2(static_cast<double>(x));
    worst = std::max(worst, std::abs(static_cast<double>(simd::exp2_rough(x)) / exact - 1.0));
    alignas(64) float lanes[simd::lanes];
    simd::store(lanes, simd::exp2_rough(simd::broadcast(x)));
    for (const float y : lanes)
      worst = std::max(worst, std::abs(static_cast<double>(y) / exact - 1.0));
  }
  EXPECT_LE(worst, static_cast<double>(simd::exp2_rough_max_error));
  EXPECT_GT(worst, 0.9 * static_cast<double>(simd::exp2_rough_max_error));
}

// ---- one call, and the same in double -----------------------------------------------------------

// Scores of keys [batch, kv_heads, len, dim] by rows [batch, heads, rows, dim], whose logits are q.k, and those of a chunk
// [1, 1, len, dim], of which row i sees the first ends[i] keys.
struct Scoring {
  Tensor4<float> q;
  Rows k;
  Aggregation over = mean;
  Tensor4<float> chunk{1, 1, 0, 1};
  std::vector<Index> ends{};

  bool has_chunk() const { return chunk.dimension(2) > 0; }
};

struct Masses {
  Tensor3<float> scores;        // [batch, heads, kv_len]
  float chunk = -1.0f;          // the score of the chunk
  std::vector<double> error{};  // by codes: eps of each head in nats; infinity: in float

  bool by_codes() const {
    return std::all_of(error.begin(), error.end(), [](double e) { return std::isfinite(e); });
  }
};

// By codes emulated tiles give the same bits.
Masses masses(const Scoring& x, bool by_codes) {
  KeySketch sketch;
  if (by_codes) sketch.append(x.k, x.k.len(), SerialExecutor{});
  Masses result{Tensor3<float>(x.k.batch(), x.q.dimension(1), x.k.len())};
  result.scores.setConstant(-12345.0f);
  const auto fill = [&](Index b, Index head, RowWriter& rows) {
    for (Index m = 0; m < x.q.dimension(2); ++m)
      rows.add(&x.q(b, head, m, 0), 1.0f, x.has_chunk() ? x.ends[uz(m)] : 0);
  };
  quoka::SoftmaxScoring scoring{.rows = {x.q.dimension(2), x.k.dim()},
                                .fill = fill,
                                .keys = x.k,
                                .over = x.over,
                                .chunk_k = x.has_chunk() ? Rows(x.chunk) : Rows(),
                                .chunk_scores = x.has_chunk() ? &result.chunk : nullptr};
  if (by_codes) scoring.codes = quoka::SketchedKeys(x.k, sketch);
  SoftmaxScoreState state;
  quoka::softmax_scores(scoring, result.scores, state, SerialExecutor{});
  if (!by_codes) return result;
  result.error.assign(state.errors.begin(), state.errors.end());
  Tensor3<float> by_tiles(result.scores.dimensions());
  KeySketch for_tiles;
  for_tiles.append<EmulatedMass>(x.k, x.k.len(), SerialExecutor{});
  scoring.codes = quoka::SketchedKeys(x.k, for_tiles);
  quoka::softmax_scores(scoring, by_tiles, state, SerialExecutor{});
  if (by_tiles.size() > 0)  // an empty tensor has no address to compare
    EXPECT_EQ(
        std::memcmp(by_tiles.data(), result.scores.data(), uz(by_tiles.size()) * sizeof(float)), 0);
  return result;
}

// Row by row in double. A row that is not finite does not count, a key that is not has NaN.
struct Exact {
  oracle::Scores scores;
  double chunk = 0, largest_logit = 0;
};
Exact exact_masses(const Scoring& x) {
  const oracle::Tensor q = to_oracle(x.q), k = to_oracle(x.k), own = to_oracle(x.chunk);
  Exact result{oracle::Scores(uz(q.batch), {uz(q.heads), std::vector<double>(uz(k.len), 0.0)})};
  for (Index b = 0; b < q.batch; ++b)
    for (Index head = 0; head < q.heads; ++head) {
      const Index kv_head = head * k.heads / q.heads;
      std::vector<double>& mass = result.scores[uz(b)][uz(head)];
      std::vector<Index> finite, rows;
      for (Index t = 0; t < k.len; ++t) {
        if (oracle::is_finite(k.row(b, kv_head, t)))
          finite.push_back(t);
        else
          mass[uz(t)] = oracle::not_a_number;
      }
      for (Index m = 0; m < q.len; ++m)
        if (oracle::is_finite(q.row(b, head, m))) rows.push_back(m);
      for (const Index m : rows) {
        std::vector<double> logits;
        for (const Index t : finite)
          logits.push_back(oracle::dot(q.row(b, head, m), k.row(b, kv_head, t)));
        for (Index t = 0; x.has_chunk() && t < x.ends[uz(m)]; ++t)
          logits.push_back(oracle::dot(q.row(b, head, m), own.row(0, 0, t)));
        if (logits.empty()) continue;
        for (const double logit : logits)
          result.largest_logit = std::max(result.largest_logit, std::abs(logit));
        const std::vector<double> p = oracle::softmax(logits);
        for (std::size_t n = 0; n < p.size(); ++n) {
          double& of_key = n < finite.size() ? mass[uz(finite[n])] : result.chunk;
          of_key = x.over == mean ? of_key + p[n] / static_cast<double>(rows.size())
                                  : std::max(of_key, p[n]);
        }
      }
    }
  return result;
}

// Every mass within `relative` of itself, below least_mass only below it.
constexpr double least_mass = 1e-15;
void expect_masses(const Masses& got, const Exact& exact,
                   const std::function<double(Index b, Index head)>& relative) {
  for (Index b = 0; b < got.scores.dimension(0); ++b)
    for (Index head = 0; head < got.scores.dimension(1); ++head) {
      const double bound = relative(b, head);
      for (Index t = 0; t < got.scores.dimension(2); ++t) {
        const double mass = double{got.scores(b, head, t)},
                     expected = exact.scores[uz(b)][uz(head)][uz(t)];
        if (std::isnan(expected))
          ASSERT_EQ(mass, -infinity) << "key " << t << " of head " << head;
        else if (expected > least_mass)
          ASSERT_LE(std::abs(mass / expected - 1.0), bound)
              << "key " << t << " of head " << head << ": " << mass << " for " << expected;
        else
          ASSERT_LE(mass, least_mass * (1 + bound)) << "key " << t << " of head " << head;
      }
    }
}
// In float: logits are rounded to float, and the mass has their absolute error.
void expect_in_float(const Scoring& x) {
  const Exact exact = exact_masses(x);
  const Masses got = masses(x, false);
  const double bound = 1e-5 + 2e-7 * exact.largest_logit;
  ASSERT_NO_FATAL_FAILURE(expect_masses(got, exact, [&](Index, Index) { return bound; }));
  if (x.has_chunk() && x.over == mean) {
    ASSERT_NEAR(double{got.chunk}, exact.chunk, bound * exact.chunk + 1e-30);
  }
}
// By codes within exp(+-a), or in float where they would be further off.
Masses expect_by_codes(const Tensor4<float>& q, const Rows& k) {
  const Scoring x{q, k};
  const Masses got = masses(x, true);
  expect_masses(got, exact_masses(x), [&](Index b, Index head) {
    const double eps = got.error[uz(b * k.heads() + head)];
    return std::isinf(eps) ? 1e-3
                           : std::expm1(2.0 * eps + static_cast<double>(detail::weight_error));
  });
  return got;
}

// ---- against the oracle -------------------------------------------------------------------------

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
  far,
  sizes,
  none
};

void change(Random& random, Kind kind, Tensor4<float>& q, Tensor4<float>& k) {
  const Index dim = k.dimension(3), len = k.dimension(2);
  const float odd[] = {not_a_number, infinity, -infinity};
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
      if (kind == Kind::odd_keys && (t % 3 == 1 || (t >= 64 && t < 96)))
        row[random.below(dim)] = odd[random.below(3)];
      if (kind == Kind::far) row[0] += 30.0f * static_cast<float>(t / block % 3);
      if (kind == Kind::sizes)
        for (Index c = 0; c < dim; ++c) row[c] = static_cast<float>(double{row[c]} / size);
    }
  for (Index i = 0; i < q.size(); ++i) {
    float& x = q.data()[i];
    const Index row = i / dim;
    if (kind == Kind::zeros && row % 2 == 1) x = 0.0f;
    if (kind == Kind::odd_rows && row % 3 == 1 && i % dim == dim / 2) x = odd[random.below(3)];
    if (kind == Kind::sizes) x = static_cast<float>(double{x} * size);
  }
}

// Sizes around a tile, a block, a panel and what one task takes; several heads of scores for each KV head.
template <class T>
void expect_drawn(std::uint64_t seed) {
  Random random(seed);
  const auto one_of = [&](std::initializer_list<Index> all) {
    return all.begin()[random.below(std::ssize(all))];
  };
  constexpr Index at_once = quoka::tuning::max_panels_per_task * panel;
  Index rows = one_of(
            {1, 2, 3, 7, 8, 13, simd::lanes + 1, panel - 1, panel, panel + 1, 3 * panel + 1}),
        dim = one_of({1, 3, 15, 16, 17, 37, 64, 100, 128}), heads = 1, batch = 1,
        kv_len = one_of({1, 3, tile - 1, tile, tile + 1, 31, 33, block - 1, block + 1, block + tile,
                         2 * block + 3, 501});
  if (random.below(10) == 0)
    rows = at_once + one_of({0, 1, panel + 3}), dim = 3, kv_len = 137;
  else if (random.below(4) == 0)
    heads = 2, batch = 2;
  const Kind kind = static_cast<Kind>(random.below(14));
  SCOPED_TRACE("rows " + std::to_string(rows) + ", keys " + std::to_string(kv_len) + ", dim " +
               std::to_string(dim) + ", kind " + std::to_string(static_cast<int>(kind)));
  const double scale = 2.0 / std::sqrt(static_cast<double>(dim));
  auto q = random.tensor<float>(batch, heads, rows, dim, scale),
       floats = random.tensor<float>(batch, heads, kv_len, dim);
  change(random, kind, q, floats);
  const auto k = quoka_test::rows<T>(floats, 0, kv_len);
  Scoring x{q, k};
  if (heads == 1 && random.below(2) == 0) {
    x.chunk = random.tensor<float>(1, 1, one_of({1, tile - 1, block, block + tile}), dim);
    for (Index i = 0; i < rows; ++i) x.ends.push_back(random.below(x.chunk.dimension(2) + 1));
  }
  for (const Aggregation over : {mean, most}) {
    x.over = over;
    ASSERT_NO_FATAL_FAILURE(expect_in_float(x));
  }
  ASSERT_NO_FATAL_FAILURE((void)expect_by_codes(q, k));
}

TEST(SoftmaxMass, IsTheOraclesInFloatAndByCodes) {
  for (std::uint64_t seed = 0; seed < 160 && !::testing::Test::HasFailure(); ++seed)
    expect_drawn<Element>(seed);
  for_each_storage([]<class T>() {
    for (std::uint64_t seed = 400; seed < 412; ++seed) expect_drawn<T>(seed);
  });
}

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
    const Masses mass = masses({q, k}, false);
    for (Index t = 0; t < len; ++t)
      ASSERT_EQ(mass.scores(0, 0, t), t == 7 || t == block + 4 ? 0.5f : 0.0f) << top << " " << t;
    k.chip(0, 3).setConstant(-top);
    const Masses even = masses({q, k, most}, false);
    for (Index t = 0; t < len; ++t) ASSERT_NEAR(even.scores(0, 0, t) * len, 1.0f, 1e-5f);
  }
}

TEST(SoftmaxMass, ARowWithALogitBeyondFloatDoesNotCount) {
  Tensor4<float> q(1, 1, 3, 1), k(1, 1, block + 5, 1);
  for (const Index at : {Index{3}, block + 2}) {
    q.setZero(), k.setZero();
    q(0, 0, 1, 0) = 1e30f, k(0, 0, at, 0) = 1e30f;
    const Masses mass = masses({q, k}, false);
    for (Index t = 0; t < block + 5; ++t)
      EXPECT_NEAR(mass.scores(0, 0, t), 2.0f / 3.0f / static_cast<float>(block + 5), 1e-6f) << at;
  }
}

TEST(SoftmaxMass, OfNoRowsIsNone) {
  Random random(411);
  const Tensor4<float> none(1, 1, 0, 17);
  Tensor4<float> odd(1, 1, 3, 17);
  odd.setConstant(not_a_number);
  const auto k = random.tensor<float>(1, 1, 37, 17);
  for (const Tensor4<float>& q : {none, odd})
    for (const Aggregation over : {mean, most}) {
      const Masses in_float = masses({q, k, over}, false);
      for (Index t = 0; t < 37; ++t) EXPECT_EQ(in_float.scores(0, 0, t), 0.0f);
    }
  const Masses by_codes = masses({odd, k}, true);
  for (Index t = 0; t < 37; ++t) EXPECT_LT(by_codes.scores(0, 0, t), 1e-30f);
}

// To the bit.
TEST(SoftmaxMass, HidesWhatRowsDoNotSeeOfAChunkWhateverItHolds) {
  Random random(413);
  const auto k = random.tensor<float>(1, 1, block + 3, 17);
  Scoring x{random.tensor<float>(1, 1, 7, 17),
            k,
            mean,
            random.tensor<float>(1, 1, 2 * block + 3, 17),
            {1, tile, block - 1, block, block + 1, 3, 0}};
  const Masses before = masses(x, false);
  for (Index t = block + 1; t < x.chunk.dimension(2); ++t)
    for (Index c = 0; c < 17; ++c) x.chunk(0, 0, t, c) = t % 2 == 0 ? 1e10f : not_a_number;
  EXPECT_TRUE(same_bits(masses(x, false).scores, before.scores));
}

// The keys of a KV head serve several heads of scores, each as if it were alone.
// The weight of a chunk's key against the past's, e^2,000, is beyond double.
TEST(SoftmaxMass, OfAChunkFarAboveThePast) {
  Random random(735);
  Scoring x{random.tensor<float>(1, 1, 3, 4), Rows()};
  const auto k = random.tensor<float>(1, 1, 100, 4);
  x.k = k, x.chunk = Tensor4<float>(1, 1, 1, 4), x.ends = {1, 1, 0};
  for (Index c = 0; c < 4; ++c) x.chunk(0, 0, 0, c) = 2000.0f * x.q(0, 0, 0, c);
  for (Index c = 0; c < 4; ++c) x.q(0, 0, 1, c) = 0.5f * x.q(0, 0, 0, c);
  const Exact exact = exact_masses(x);
  EXPECT_NEAR(exact.chunk, 2.0 / 3.0, 1e-6);
  for (const bool by_codes : {false, true}) {
    const Masses got = masses(x, by_codes);
    EXPECT_NEAR(double{got.chunk}, exact.chunk, 1e-5) << "by codes: " << by_codes;
    ASSERT_NO_FATAL_FAILURE(expect_masses(got, exact, [](Index, Index) { return 0.2; }));
  }
}

// Without keys a chunk's are all that rows see, by codes too.
TEST(SoftmaxMass, OfAChunkAlone) {
  Random random(736);
  Scoring x{random.tensor<float>(1, 1, 3, 4), Rows()};
  const Tensor4<float> k(1, 1, 0, 4);
  x.k = k, x.chunk = random.tensor<float>(1, 1, 2, 4), x.ends = {2, 1, 2};
  for (const bool by_codes : {false, true}) EXPECT_NEAR(masses(x, by_codes).chunk, 1.0f, 1e-6f);
}

TEST(SoftmaxMass, OfSeveralHeadsOfScoresIsThatOfEach) {
  Random random(414);
  for (const Index rows : {Index{3}, panel, panel + 1}) {
    const auto k = random.tensor<float>(2, 2, block + 3, 20);
    ASSERT_NO_FATAL_FAILURE(expect_in_float({random.tensor<float>(2, 6, rows, 20, 0.5), k}));
  }
}

// ---- what codes cannot stand for ----------------------------------------------------------------

TEST(SketchedMassExtremes, LengthsBeyondCodesAreForFloat) {
  Random random(708);
  const auto q_bar = random.tensor<float>(1, 1, 7, 20);
  for (double size : {1e-45, 1e-38, 1e-20, 1e20, 1e30}) {
    auto k = random.tensor<float>(1, 1, 50, 20);
    for (Index c = 0; c < 20; ++c)
      k(0, 0, 37, c) = static_cast<float>(static_cast<double>(k(0, 0, 37, c)) * size);
    if (size > 1.0)  // whatever the row, this key's logit is far below the others
      for (Index c = 0; c < 20; ++c) k(0, 0, 37, c) = c == 0 ? static_cast<float>(size) : 0.0f;
    auto rows = q_bar;
    for (Index m = 0; m < 7; ++m) rows(0, 0, m, 0) = -1.0f;
    bool zero = true;
    for (Index c = 0; c < 20; ++c) zero = zero && k(0, 0, 37, c) == 0.0f;
    EXPECT_EQ(expect_by_codes(rows, k).by_codes(), zero) << size;
  }
  for (double size : {1e-38, 1e-20, 1e20}) {  // rows, and keys that bring their products back
    auto rows = q_bar;
    auto k = random.tensor<float>(1, 1, 50, 20, 1.0);
    for (Index i = 0; i < rows.size(); ++i)
      rows.data()[i] = static_cast<float>(static_cast<double>(rows.data()[i]) * size);
    for (Index i = 0; i < k.size(); ++i)
      k.data()[i] = static_cast<float>(static_cast<double>(k.data()[i]) * 1e-11);
    EXPECT_FALSE(masses({rows, k}, true).by_codes()) << size;
    if (size < 1.0) (void)expect_by_codes(rows, k);
  }
}

// Rows and keys with exact codes, whose lengths allow logits of +-`longest` nats, and whose logits lie
// within 5 nats of `at`: weights must be taken against the largest logit that occurs. The bound depends on lengths
// alone and is 0 here, except for rounding.
struct FarLogits {
  FarLogits(Random& random, Index len, double longest, double at) : q(1, 1, 3, 4), k(1, 1, len, 4) {
    q.setZero(), k.setZero();
    const double unit = std::sqrt(longest) / 127.0;
    for (Index m = 0; m < 3; ++m) {
      q(0, 0, m, 0) = static_cast<float>(127.0 * unit);
      q(0, 0, m, 1) = static_cast<float>(static_cast<double>(m + 1) * unit);
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

TEST(SketchedMassExtremes, LogitsMayLieFarBelowWhatLengthsAllow) {
  Random random(710);
  for (double longest : {30.0, 60.0, 90.0, 200.0, 500.0})
    for (double at : {-1.0, -0.6, -0.2, 0.0, 0.4, 0.95})
      for (Index len : {3, 100, 700}) {
        SCOPED_TRACE(std::to_string(longest) + " nats by lengths, at " + std::to_string(at));
        const FarLogits x(random, len, longest, at * longest);
        EXPECT_TRUE(expect_by_codes(x.q, x.k).by_codes());
      }
}

// One key decides, wherever it lies: in a pair of blocks that is looked at first, or in another one; in the
// first range of keys, or in another one.
TEST(SketchedMassExtremes, OneKeyFarAboveAllOthers) {
  Random random(711);
  for (Index best : {0, 31, 40, 511, 512, 530, 699, 2047, 2080, 4999}) {
    FarLogits x(random, best < 700 ? 700 : 5000, 300.0, -280.0);
    x.k(0, 0, best, 0) = -x.k(0, 0, best, 0);
    EXPECT_TRUE(expect_by_codes(x.q, x.k).by_codes());
  }
}

// ---- the bound ----------------------------------------------------------------------------------

// eps is the formula's.
TEST(SketchedMass, SaysHowFarItsLogitsMayBeOff) {
  Random random(712);
  for (Index dim : {3, 37, 128}) {
    const auto q_bar = random.tensor<float>(1, 1, 6, dim, 0.4);
    const auto k = random.tensor<Element>(1, 1, 90, dim);
    const oracle::Tensor rows = to_oracle(q_bar), keys = to_oracle(k);
    const auto missed = [](oracle::Row x, float least_unit) {
      double largest = 0.0, sum = 0.0;
      for (const double c : x) largest = std::max(largest, std::abs(c));
      const double unit = std::max(largest / 127.0, static_cast<double>(least_unit));
      for (const double c : x) sum += std::pow(c - unit * std::nearbyint(c / unit), 2);
      return std::sqrt(sum);
    };
    double longest = 0.0, most_missed = 0.0, eps = 0.0;
    for (Index t = 0; t < 90; ++t) {
      longest = std::max(longest, oracle::norm(keys.row(0, 0, t)));
      most_missed = std::max(most_missed, missed(keys.row(0, 0, t), 0.0f));
    }
    for (Index m = 0; m < 6; ++m) {
      const double length = oracle::norm(rows.row(0, 0, m)),
                   e = missed(rows.row(0, 0, m), simd::run_scale(&q_bar(0, 0, m, 0), dim));
      eps = std::max(eps, e * longest + (length + e) * most_missed +
                              static_cast<double>(2 * dim + 32) * 0x1p-24 * length * longest);
    }
    const double said = masses({q_bar, k}, true).error[0];
    EXPECT_GE(said, 0.9999 * eps);
    EXPECT_LE(said, 1.002 * eps);
  }
}

// Vectors for which eps is tight: the part that codes miss is parallel to the other side, whose codes are exact. As
// keys, coarse(+-1): 127 in channel 0, +-0.499 sign[c] elsewhere; as the row, sign[c] in channels 1 and up. By the
// codes all logits are 0, in truth they are +-eps. And the other way round.
struct WholeBound {
  static constexpr Index dim = 128;

  explicit WholeBound(Random& random) {
    for (double& s : sign) s = random.below(2) == 0 ? -1.0 : 1.0;
  }
  void coarse(double side, double size, float* x) const {
    x[0] = static_cast<float>(127.0 * size);
    for (Index c = 1; c < dim; ++c) x[c] = static_cast<float>(0.499 * side * size * sign[uz(c)]);
  }
  void signs(double size, float* x) const {
    x[0] = 0.0f;
    for (Index c = 1; c < dim; ++c) x[c] = static_cast<float>(size * sign[uz(c)]);
  }
  std::array<double, 128> sign;
};

// One key `eps` nats below 0, the others as much above. Its mass is exp(-2 eps) of theirs; by the codes it
// is as large.
struct OneAgainstMany {
  Tensor4<float> q{1, 1, 1, WholeBound::dim}, k{1, 1, 400, WholeBound::dim};

  // Coarse keys.
  OneAgainstMany(const WholeBound& x, double eps, Index odd) {
    const double size = std::sqrt(eps / (127.0 * 0.499));
    x.signs(size, q.data());
    for (Index t = 0; t < 400; ++t) x.coarse(t == odd ? -1.0 : 1.0, size, &k(0, 0, t, 0));
  }
};

// If products are added in 16 bits, rows have a larger unit, and these rows have no exact codes.
constexpr bool rows_have_exact_codes = simd::code_run == 0;

TEST(SketchedMassBound, IsUsedUp) {
  if (!rows_have_exact_codes) GTEST_SKIP() << "rows have a larger unit on this ISA";
  Random random(713);
  const WholeBound x(random);
  for (double eps : {0.1, 0.5, 1.0, 2.0, 3.9}) {
    const OneAgainstMany one(x, eps, 200);
    const Masses got = expect_by_codes(one.q, one.k);
    ASSERT_TRUE(got.by_codes()) << eps;
    const auto expected = exact_masses({one.q, one.k}).scores;
    const double off = std::log(static_cast<double>(got.scores(0, 0, 200)) / expected[0][0][200]);
    const double a = 2.0 * got.error[0] + static_cast<double>(detail::weight_error);
    EXPECT_LE(off, a);
    EXPECT_GE(off, 0.99 * 2.0 * got.error[0] - 0.01) << "the bound is wider than it need be";
  }
}

// The row's codes miss a part: keys are +-signs, the row is coarse. By the codes all logits are 0.
TEST(SketchedMassBound, IsUsedUpByWhatTheRowMisses) {
  Random random(714);
  const WholeBound x(random);
  for (double eps : {0.5, 2.0}) {
    const double size = std::sqrt(eps / (127.0 * 0.499));
    Tensor4<float> q(1, 1, 1, x.dim), k(1, 1, 400, x.dim);
    x.coarse(1.0, size, q.data());
    for (Index t = 0; t < 400; ++t) x.signs(t == 200 ? -size : size, &k(0, 0, t, 0));
    const Masses got = expect_by_codes(q, k);
    ASSERT_TRUE(got.by_codes());
    const auto expected = exact_masses({q, k}).scores;
    const double off = std::log(static_cast<double>(got.scores(0, 0, 200)) / expected[0][0][200]);
    EXPECT_GE(off, 0.99 * 2.0 * got.error[0] - 0.01);
  }
}

// Beyond most_logit_error a head is done in float: as exact as the oracle, where codes are off by
// exp(8).
TEST(SketchedMassBound, DecidesBetweenCodesAndFloat) {
  if (!rows_have_exact_codes) GTEST_SKIP() << "rows have a larger unit on this ISA";
  Random random(715);
  const WholeBound x(random);
  const auto limit = static_cast<double>(detail::most_logit_error);
  const OneAgainstMany within(x, 0.98 * limit, 50), beyond(x, 1.01 * limit, 50);
  const Masses codes = masses({within.q, within.k}, true),
               in_float = expect_by_codes(beyond.q, beyond.k);
  EXPECT_TRUE(codes.by_codes());
  EXPECT_FALSE(in_float.by_codes());
  EXPECT_LT(in_float.scores(0, 0, 50), 1e-3f * in_float.scores(0, 0, 51));
  EXPECT_GT(codes.scores(0, 0, 50), 0.9f * codes.scores(0, 0, 51));
}

// One head of several: the others are done by codes all the same.
TEST(SketchedMassBound, IsOfEachHead) {
  Random random(716);
  auto q = random.tensor<float>(1, 3, 5, 32), k = random.tensor<float>(1, 3, 90, 32);
  for (Index m = 0; m < 5; ++m)
    for (Index c = 0; c < 32; ++c) q(0, 1, m, c) *= 300.0f;
  const Masses got = expect_by_codes(q, k);
  EXPECT_TRUE(std::isfinite(got.error[0]));
  EXPECT_TRUE(std::isinf(got.error[1]));
  EXPECT_TRUE(std::isfinite(got.error[2]));
}

// A call that throws leaves no errors, neither its own nor those of the call before.
TEST(SketchedMass, SaysNothingOfLogitsAfterAnException) {
  Random random(737);
  const auto q = random.tensor<float>(1, 1, 3, 4);
  auto k = random.tensor<float>(1, 1, 40, 4);
  KeySketch sketch;
  std::vector<quoka::Position> all(40);
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<quoka::Position>(i);
  sketch.update(Rows(k), all, SerialExecutor{});
  const auto fill = [&](Index, Index, RowWriter& rows) {
    for (Index m = 0; m < 3; ++m) rows.add(&q(0, 0, m, 0), 1.0f);
  };
  Tensor3<float> scores(1, 1, 40);
  SoftmaxScoreState state;
  std::uint64_t turn = 0;
  const auto score = [&] {
    quoka::softmax_scores(
        {.rows = {3, 4}, .fill = fill, .keys = k, .codes = quoka::SketchedKeys(k, sketch, turn)},
        scores, state, SerialExecutor{});
  };
  score();
  EXPECT_TRUE(std::isfinite(state.logit_error(0)));
  for (Index i = 0; i < k.size(); ++i) k.data()[i] += 5.0f;  // without an update()
  EXPECT_THROW(score(), std::invalid_argument);
  EXPECT_EQ(state.logit_error(0), infinity);
}

// ---- more weights than memory is meant for: rows in several groups ----------------------------------

TEST(SoftmaxMassGroups, InFloatOfOnePanel) {
  Random random(405);
  constexpr Index kv_len = quoka::tuning::mass_weight_bytes / (panel * Index{sizeof(float)}) + 1;
  constexpr Index rows = 2 * panel + 1;
  ASSERT_EQ(panels_at_once(rows, kv_len), 1);
  const auto k = random.tensor<float>(1, 1, kv_len, 1);
  expect_in_float({random.tensor<float>(1, 1, rows, 1), k});
}

// Weights of a few lists stay in the caches, and no list's sums are split while its weights fit.
TEST(SoftmaxMassGroups, ByCodesOfWholeLists) {
  const auto rows_of_pass = [](Index lists, Index list_rows) {
    detail::MassShape shape = shape_of(list_rows, 8192);
    shape.lists = lists;
    return detail::CodeMass::pass_rows(shape);
  };
  EXPECT_EQ(rows_of_pass(4, 64), 64);
  EXPECT_EQ(rows_of_pass(4, 32), 64);
  EXPECT_EQ(rows_of_pass(3, 86), 86);
  EXPECT_EQ(rows_of_pass(2, 16), 32);
  EXPECT_EQ(rows_of_pass(1, 256), 256);
  EXPECT_EQ(rows_of_pass(6400, 2), 200) << "64 passes";
}

// By codes, also where weights must be taken against each row's largest logit, and rows of the last group have theirs at
// the other end of what lengths allow.
TEST(SoftmaxMassGroups, ByCodesWithLogitsFarApart) {
  Random random(729);
  const Index kv_len = 70'000;
  const Index rows = quoka::tuning::mass_weight_bytes / (2 * kv_len) + 9;
  const Index at_once = detail::CodeMass::pass_rows(shape_of(rows, kv_len));
  ASSERT_LT(at_once, rows);
  const FarLogits far(random, kv_len, 300.0, -270.0);
  Tensor4<float> q(1, 1, rows, 4);
  for (Index m = 0; m < rows; ++m)
    for (Index c = 0; c < 4; ++c)
      q(0, 0, m, c) = (m < at_once ? 1.0f : -1.0f) * far.q(0, 0, m % 3, c);
  EXPECT_TRUE(expect_by_codes(q, far.k).by_codes());
}

// Ranges of few rows are longer by codes than in float. Those beyond a head's last leave its numbers alone: what its rows
// are taken against, and what their chunk's weights are, too.
TEST(SoftmaxMassGroups, ByCodesOfFewerRangesThanInFloat) {
  Random random(734);
  const Index kv_len = 10'000, rows = 14;
  ASSERT_LT(detail::CodeMass::ranges(shape_of(rows, kv_len)).count,
            detail::FloatMass::ranges(shape_of(rows, kv_len)).count);
  const FarLogits far(random, kv_len, 300.0, -270.0), own(random, 33, 300.0, -263.0);
  Tensor4<float> q(1, 1, rows, 4);
  for (Index m = 0; m < rows; ++m)
    for (Index c = 0; c < 4; ++c) q(0, 0, m, c) = far.q(0, 0, m % 3, c);
  const Scoring x{q, far.k, mean, own.k, std::vector<Index>(uz(rows), 33)};
  const Masses got = masses(x, true);
  ASSERT_TRUE(got.by_codes());
  const Exact exact = exact_masses(x);
  const double bound = std::expm1(2.0 * got.error[0] + static_cast<double>(detail::weight_error));
  expect_masses(got, exact, [&](Index, Index) { return bound; });
  EXPECT_GT(exact.chunk, 0.1);
  EXPECT_NEAR(double{got.chunk}, exact.chunk, bound * exact.chunk);
}

// A head of so many keys that codes take more passes than floats, and whose rows codes cannot serve.
TEST(SoftmaxMassGroups, InFloatOfFewerPassesThanByCodes) {
  Random random(733);
  const Index kv_len = quoka::tuning::mass_weight_bytes / 24 + 1, rows = 26;
  const detail::MassShape shape = shape_of(rows, kv_len);
  if (detail::FloatMass::passes(shape) >= detail::CodeMass::passes(shape))
    GTEST_SKIP() << "panels of few rows: float takes as many passes";
  auto q = random.tensor<float>(1, 1, rows, 1);
  q(0, 0, 0, 0) = 1e13f;  // longer than what codes stand for
  const auto k = random.tensor<float>(1, 1, kv_len, 1);
  const Masses codes = masses({q, k}, true), floats = masses({q, k}, false);
  EXPECT_TRUE(std::isinf(codes.error[0]));
  EXPECT_EQ(std::memcmp(codes.scores.data(), floats.scores.data(), uz(kv_len) * sizeof(float)), 0);
}

// ---- scores of a chunk's queries ----------------------------------------------------------------

// Reused memory of either domain.
struct ScoreState {
  quoka::SoftmaxScoreState softmax;
  quoka::Buffer<float> means;
  quoka::Arenas workers;
};

// Scores of the queries at position_of(m), m < n, of every head of the group, by softmax or by mean logits.
void score_queries(const SelectorInput& input, Index n,
                   quoka::FunctionRef<Index(Index m)> position_of, Domain domain, Aggregation over,
                   TensorView<float, 3> scores, ScoreState& state, quoka::ExecutorRef executor) {
  const Index group = input.group();
  const auto fill = [&](Index b, Index kv_head, quoka::RowWriter& rows) {
    for (Index r = 0; r < group; ++r)
      for (Index m = 0; m < n; ++m)
        rows.add(input.q, b, kv_head * group + r, position_of(m), input.logit_scale());
  };
  const quoka::RowRoom shape{group * n, input.k.dim(), input.q.dim()};
  if (domain == Domain::logit)
    return quoka::mean_logit_scores(shape, fill, input.k, scores, state.means, state.workers,
                                    executor);
  quoka::softmax_scores(
      {.rows = shape, .fill = fill, .keys = input.k, .capacity = input.capacity, .over = over},
      scores, state.softmax, executor);
}

// The mean is over the finite queries of the group that are asked for; a key's logit is not finite if the key is not. The
// bits are the same in a cache with room for more, and with memory that served any call before.
TEST(QueryScores, AreTheOraclesOfTheFiniteQueriesAskedFor) {
  ScoreState used;
  for (std::uint64_t seed = 0; seed < 80; ++seed) {
    Random random(seed);
    const Index batch = 1 + random.below(2), heads = 1 + random.below(2),
                group = 1 + random.below(3), q_len = 1 + random.below(40),
                kv_len = 1 + random.below(2 * block), dim = 1 + random.below(40),
                stride = 1 + random.below(5), asked = quoka::ceil_div(q_len, stride);
    const Domain domain = domains[uz(random.below(std::ssize(domains)))];
    SCOPED_TRACE(name_of(domain) + ", " + std::to_string(q_len) + " queries, every " +
                 std::to_string(stride));
    auto q = random.tensor<Element>(batch, heads * group, q_len, dim),
         k = random.tensor<Element>(batch, heads, kv_len, dim);
    const auto spoil = [&](Tensor4<Element>& x) {
      const float odd[] = {not_a_number, infinity, -infinity};
      x.data()[random.below(x.size())] = stored<Element>(odd[random.below(3)]);
    };
    for (Index rows = random.below(2) * random.below(group * q_len + 1); rows > 0; --rows) spoil(q);
    if (domain == Domain::logit && random.below(2) == 0) spoil(k);
    const oracle::Tensor q_exact = to_oracle(q), k_exact = to_oracle(k);
    oracle::Scores expected(uz(batch));
    for (Index b = 0; b < batch; ++b)
      for (Index head = 0; head < heads; ++head) {
        std::vector<Index> list;
        for (Index i = 0; i < q_len; i += stride) list.push_back(i);
        std::vector<oracle::Row> rows = oracle::group_rows(q_exact, b, head, heads, list);
        std::erase_if(rows, [](oracle::Row row) { return !oracle::is_finite(row); });
        std::vector<double> scores(uz(kv_len), 0.0);
        if (!rows.empty())
          scores = oracle::aggregate(
              oracle::scaled_dots(rows, oracle::rows_of(k_exact, b, head), 0), domain);
        expected[uz(b)].push_back(scores);
      }
    const auto scored = [&](ScoreState& state, Index capacity) {
      Tensor3<float> scores(batch, heads, kv_len);
      scores.setConstant(-12345.0f);
      score_queries(
          SelectorInput{q, k, LogitOptions{}, {}, capacity}, asked,
          [&](Index m) { return m * stride; }, domain, mean, scores, state,
          quoka::SerialExecutor{});
      return scores;
    };
    ScoreState fresh;
    const auto scores = scored(fresh, kv_len);
    expect_scores(scores, expected, domain);
    const Index capacities[] = {1, kv_len + 1, 50000};
    EXPECT_TRUE(same_bits(scored(used, capacities[random.below(3)]), scores));
    if (::testing::Test::HasFailure()) return;
  }
}

}  // namespace
