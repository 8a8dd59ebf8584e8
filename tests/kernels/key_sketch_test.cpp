// select/key_sketch.hpp, sketched_cosines.hpp: the sketch's bound holds and is tight. For any keys it gives the
// Selection of float scores: selection_fuzz_test.cpp.

#include <quoka/select/quoka.hpp>
#include <quoka/select/sketched_cosines.hpp>

#include "kernels/whole_bound.hpp"
#include "support/selector_fixtures.hpp"

#include <cmath>
#include <limits>

namespace {

using namespace quoka_test;
using quoka::KeySketch;
using quoka::QuokaSelector;
using quoka::SelectorInput;
using quoka::Sketch;
namespace detail = quoka::detail;
namespace simd = quoka::simd;

KeySketch sketch_of(const Rows& k) {
  KeySketch sketch;
  sketch.append(k, k.len(), SerialExecutor{});
  return sketch;
}

// ---- the bound ----------------------------------------------------------------------------------

// Coded rows, and their memory.
struct CodedRowsOf {
  quoka::Arenas arenas;
  detail::CodedRows rows;

  CodedRowsOf(Index count, Index dim, Index pass_rows)
      : rows(made(arenas, count, dim, pass_rows)) {}
  static detail::CodedRows made(quoka::Arenas& arenas, Index count, Index dim, Index pass_rows) {
    arenas.reserve(1, [&](quoka::Arena& all) { detail::CodedRows(all, count, dim, pass_rows); });
    quoka::Arena arena = arenas[0];
    return {arena, count, dim, pass_rows};
  }
};

TEST(SketchOf, MissesACosineByNoMoreThanItsBound) {
  Random random(310);
  for (Index dim : {3, 16, 37, 128})
    for (double spread : {0.0, 2.0}) {  // channels alike, or of very different size
      auto k = random.tensor<Element>(1, 1, 200, dim);
      auto q_bar = random.tensor<float>(1, 1, 16, dim, 0.3);
      for (Index t = 0; t < 200; ++t)
        for (Index c = 0; c < dim; ++c)
          k(0, 0, t, c) = stored<Element>(static_cast<double>(k(0, 0, t, c)) *
                                          std::exp(spread * std::sin(static_cast<double>(c))));
      const KeySketch sketch = sketch_of(k);
      CodedRowsOf of(16, dim, 16);
      detail::CodedRows& coded = of.rows;
      ASSERT_TRUE(coded.encode(q_bar.data(), 16, detail::RowUnits::shared, detail::code_kernels()));
      const float e = *std::max_element(coded.missed(), coded.missed() + 16),
                  longest = *std::max_element(coded.lengths(), coded.lengths() + 16);
      std::vector<float> scores(200);
      const Rows rows = k;
      const quoka::SketchedKeys sketched(rows, sketch);
      const detail::CodeBlocks blocks(sketched, 0, 0);
      quoka::Buffer<std::uint8_t> gathered;
      gathered.reserve(2 * simd::code_block_bytes(dim));
      detail::CodeScope scope(detail::code_kernels(), coded.codes(0), coded.packed(0));
      for (Index t = 0; t < 200; t += detail::CodeBlocks::pair) {
        const detail::KeyPair pair = blocks.at(t, 200, gathered.data());
        alignas(64) float room[detail::CodeBlocks::pair];
        scope->best(pair, blocks.numbers(sketch.scales(0, 0), t, pair.count, room),
                    coded.units()[0], scores.data() + t);
      }
      const oracle::Tensor keys = to_oracle(k), queries = to_oracle(q_bar);
      double closest = 1.0;
      for (Index t = 0; t < 200; ++t) {
        double exact = -std::numeric_limits<double>::infinity();
        for (Index m = 0; m < 16; ++m)
          exact = std::max(exact, oracle::dot(queries.row(0, 0, m), keys.row(0, 0, t)) /
                                      oracle::norm(keys.row(0, 0, t)));
        const double bound = static_cast<double>(e + (longest + e) * sketch.errors(0, 0)[t]) +
                             static_cast<double>(dim + 32) * 0x1p-23 * static_cast<double>(longest);
        const double missed = std::abs(static_cast<double>(scores[uz(t)]) - exact);
        ASSERT_LE(missed, bound) << "key " << t << " of " << dim << " channels";
        closest = std::min(closest, 1.0 - missed / bound);
      }
      EXPECT_LT(closest, 0.95) << "the bound is far too wide to be tested";
      EXPECT_LT(e, 0.02f * longest);
    }
}

// Vectors that are integers times one number: quotients round to integers, and nothing seems to be missed.
TEST(SketchOf, CountsWhatTheRoundingOfQuotientsHides) {
  Random random(311);
  int hidden = 0;
  for (const Index dim : {1, 16, 37, 64, 128})
    for (int round = 0; round < 200; ++round) {
      const float unit = static_cast<float>(std::exp(random.normal()));
      std::vector<float> x(uz(dim));
      for (float& one : x) one = (static_cast<float>(random.below(255)) - 127.0f) * unit;
      x[uz(random.below(dim))] = 127.0f * unit;
      const float scale = detail::code_scale(x.data(), dim);
      double square = 0.0;
      const float bound =
          detail::encode(x.data(), dim, scale, [&](Index first, Index n, const std::int8_t* codes) {
            for (Index c = 0; c < n; ++c) {
              const double missed = static_cast<double>(x[uz(first + c)]) -
                                    static_cast<double>(codes[c]) * static_cast<double>(scale);
              square += missed * missed;
            }
          });
      hidden += square > 0.0 ? 1 : 0;
      ASSERT_LE(std::sqrt(square), static_cast<double>(bound)) << dim << " channels";
      ASSERT_LE(static_cast<double>(bound),
                1e-3 * static_cast<double>(scale * std::sqrt(static_cast<float>(dim))));
    }
  EXPECT_GT(hidden, 100);
}

void expect_same_selection(const Tensor4<float>& q, const Tensor4<float>& k, QuokaOptions options) {
  options.sketch = Sketch::on;
  const QuokaSelector by_sketch(options);
  QuokaSelector::State state;
  Selection keep;
  by_sketch.appended({q, k, LogitOptions{}}, state, SerialExecutor{});
  by_sketch.select({q, k, LogitOptions{}}, state, keep, SerialExecutor{});
  options.sketch = Sketch::off;
  EXPECT_EQ(keep, QuokaSelector(options).select(q, k, {})) << name_of(options);
}

// 97 keys: `odd` at 50, every third one `near`, the others `far`. contains_odd: does float's
// Selection of 20 contain the odd key? The sketch's Selection is the same.
void expect_bound_is_kept(const Tensor4<float>& q, const WholeBound::Vector& odd,
                          const WholeBound::Vector& near, const WholeBound::Vector& far,
                          bool contains_odd) {
  std::vector<WholeBound::Vector> keys;
  for (Index t = 0; t < 97; ++t) keys.push_back(t == 50 ? odd : t % 3 == 0 ? near : far);
  const auto k = rows_of(keys);
  const QuokaOptions options{.budget = Budget::keys(20), .sketch = Sketch::off};
  const auto list = QuokaSelector(options).select(q, k, {}).positions(0, 0);
  ASSERT_EQ(std::binary_search(list.begin(), list.end(), Position{50}), contains_odd);
  expect_same_selection(q, k, options);
}
// By one query, and by several that are equal.
void expect_bound_is_kept(const WholeBound::Vector& query, const WholeBound::Vector& odd,
                          const WholeBound::Vector& near, const WholeBound::Vector& far,
                          bool contains_odd) {
  for (std::size_t n : {std::size_t{1}, std::size_t{3}})
    expect_bound_is_kept(rows_of(std::vector<WholeBound::Vector>(n, query)), odd, near, far,
                         contains_odd);
}

// Codes miss a part of a key, or a part of the query, which the other one raises or lowers.
TEST(SketchBound, FindsOrLeavesAKeyByWhatCodesMiss) {
  for (std::uint64_t seed = 313; seed < 317; ++seed) {
    Random random(seed);
    const WholeBound x(random);
    const auto of_keys = [&](double steps) { return x.rival_of_coarse_keys(steps); };
    const auto of_query = [&](double steps) { return x.rival_of_coarse_query(steps); };
    // Cosines 0.0442 by float and 0 by codes; rivals 0.0438 and 0.035 by both. And all of them negative.
    expect_bound_is_kept(x.signs(1), x.coarse(1), of_keys(72), of_keys(54), true);
    expect_bound_is_kept(x.signs(1), x.coarse(-1), of_keys(-54), of_keys(-72), false);
    expect_bound_is_kept(x.coarse(1), x.signs(1), of_query(7), of_query(5), true);
    expect_bound_is_kept(x.coarse(1), x.signs(-1), of_query(-6), of_query(-7), false);
  }
}

// Keys whose codes are exact, of which the query's codes miss nearly all that they may: in units of
// the query's error, `by_codes` 0.0158 * steps, and by float 1 - 2 * flipped / 127 more than that.
//
//             sketch   float    others that the sketch ranks
//   5 sure    1.30     0.31     above the level for certain
//   10 near   0        0.98     the rest of the 15 best
//   3 far    -0.11     0.86     below; they belong before the sure ones
TEST(SketchBound, TakesAKeyBeforeOneThatIsSureToBeAboveTheLevel) {
  Random random(327);
  const WholeBound x(random);
  const auto key = [&](double steps, std::size_t flipped) {
    auto k = x.signs(127);
    k[0] = steps;
    for (std::size_t c = 1; c <= flipped; ++c) k[c] = -k[c];
    return k;
  };
  std::vector<WholeBound::Vector> keys(40, key(-127, 127));
  for (std::size_t i = 0; i < 5; ++i) keys[2 * i] = key(82, 126);
  for (std::size_t i = 0; i < 10; ++i) keys[12 + 2 * i] = key(0, 1);
  for (std::size_t i = 0; i < 3; ++i) keys[34 + 2 * i] = key(-7, 2);
  const auto q = rows_of({x.coarse(1)}), k = rows_of(keys);
  const QuokaOptions options{.budget = Budget::keys(15), .sketch = Sketch::off};
  const auto list = QuokaSelector(options).select(q, k, {}).positions(0, 0);
  EXPECT_EQ(list[0], 0);
  EXPECT_EQ(list[1], 2);
  EXPECT_EQ(list[2], 12);
  EXPECT_EQ(list.back(), 38);
  expect_same_selection(q, k, options);
}

// Two heads cancel in channel 0; of what is left, squares are too small for float.
TEST(SketchBound, FindsAKeyByAQueryOfWhichLittleIsLeft) {
  Random random(326);
  const WholeBound x(random);
  for (double size : {1e-10, 1e-16, 1e-20, 1e-24, 1e-30}) {
    SCOPED_TRACE(std::to_string(std::log10(size)));
    Tensor4<float> q(1, 2, 1, 128);
    for (Index head : {0, 1}) {
      auto query = x.signs(size);
      query[0] = head == 0 ? 1.0 : -1.0;
      q.chip(head, 1) = rows_of({query}).chip(0, 1);
    }
    expect_bound_is_kept(q, x.coarse(1), x.rival_of_coarse_keys(72), x.rival_of_coarse_keys(54),
                         true);
  }
}

// ---- other keys, no keys ---------------------------------------------------------------------------------

TEST(KeySketch, RefusesKeysOfAnotherShape) {
  Random random(321);
  const auto k = random.tensor<float>(1, 2, 37, 30), wider = random.tensor<float>(1, 2, 37, 32);
  ASSERT_EQ(simd::code_block_bytes(30), simd::code_block_bytes(32));  // padded to one width
  const KeySketch sketch = sketch_of(k);
  expect_refused([&] { sketch.require_shape_of(Rows(k).slice(0, 36)); }, {"len", 36, 37});
  expect_refused([&] { sketch.require_shape_of(wider); }, {"dim", 32, 30});
}

TEST(KeySketch, MayBeToldOfNoKeysAndOfNoHeads) {
  KeySketch sketch;
  sketch.append(Rows(), 0, SerialExecutor{});
  EXPECT_EQ(sketch.len(), 0);
  Random random(31);
  const auto k = random.tensor<float>(1, 8, 1024, 128);
  for (int times = 0; times < 2; ++times) sketch.append(Rows(k), 1024, SerialExecutor{});
  EXPECT_EQ(sketch.len(), 1024);
  EXPECT_EQ(sketch.bytes(), 8 * 1024 * (128 + 12));  // an eighth of the keys and values
}

// Also of another head_dim of the same padded width.
TEST(KeySketch, AppendForgetsKeysOfAnotherShape) {
  Random random(324);
  const auto k = random.tensor<float>(2, 3, 37, 30);
  for (const auto& [batch, heads, dim] :
       {std::array<Index, 3>{3, 2, 30}, {1, 3, 30}, {2, 2, 30}, {3, 3, 30}, {2, 3, 32}}) {
    const auto other = random.tensor<float>(batch, heads, 37, dim);
    KeySketch sketch = sketch_of(k);
    sketch.append(other, 37, SerialExecutor{});
    EXPECT_NO_THROW(sketch.require_shape_of(other)) << batch << ", " << heads << ", " << dim;
    EXPECT_TRUE(sketch.holds(batch - 1, heads - 1, 36, &other(batch - 1, heads - 1, 36, 0)));
    const KeySketch fresh = sketch_of(other);
    for (Index head = 0; head < heads; ++head)
      EXPECT_TRUE(
          std::equal(fresh.scales(0, head), fresh.scales(0, head) + 37, sketch.scales(0, head)) &&
          std::equal(fresh.errors(0, head), fresh.errors(0, head) + 37, sketch.errors(0, head)));
  }
}

// ---- queries ------------------------------------------------------------------------------------

TEST(CodedRows, RefuseWhatCodesCannotStandFor) {
  using detail::RowUnits;
  CodedRowsOf of(3, 5, 4);
  detail::CodedRows& rows = of.rows;
  const auto encodes = [&](const std::vector<float>& x, RowUnits units) {
    return rows.encode(x.data(), 3, units, detail::code_kernels());
  };
  for (const RowUnits units : {RowUnits::shared, RowUnits::own}) {
    for (float odd : {not_a_number, infinity, -infinity, 1e13f, 1e30f})
      for (Index row : {0, 1, 2}) {  // one row spoils all of its KV head
        std::vector<float> x(15, 1.0f);
        EXPECT_TRUE(encodes(x, units));
        x[uz(5 * row + 3)] = odd;
        EXPECT_FALSE(encodes(x, units)) << odd << " in row " << row;
      }
    EXPECT_FALSE(encodes(std::vector<float>(15, 1e-14f), units));
    EXPECT_TRUE(encodes(std::vector<float>(15, 0.0f), units));
    for (Index m = 0; m < 3; ++m) {
      EXPECT_EQ(rows.lengths()[m], 0.0f);
      EXPECT_EQ(rows.missed()[m], 0.0f);
    }
  }
  std::vector<float> tiny_row(15, 1.0f);  // beside longer ones it is but coarsely coded
  std::fill_n(tiny_row.begin() + 5, 5, 1e-14f);
  EXPECT_TRUE(encodes(tiny_row, RowUnits::shared));
  EXPECT_GE(rows.missed()[1], rows.lengths()[1] * 0.99f);
  EXPECT_FALSE(encodes(tiny_row, RowUnits::own));
}

}  // namespace
