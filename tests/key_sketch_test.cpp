// core/int8_dot.hpp, cache/key_sketch.hpp, select/sketched_top_k.hpp: whatever the keys, the sketch
// leads to the Selection of float scores, and its bound holds.

#include <quoka/prefill/chunked_prefill.hpp>
#include <quoka/select/quoka.hpp>

#include "support/selector_fixtures.hpp"

#include <cmath>
#include <limits>

namespace {

using namespace quoka_test;
using quoka::KeySketch;
using quoka::KvCache;
using quoka::QuokaSelector;
using quoka::SelectorInput;
namespace detail = quoka::detail;

// ---- dot products of codes ----------------------------------------------------------------------

template <detail::CodeScores Over>
void expect_exact_dots(Random& random, Index steps, Index rows) {
  alignas(64) std::uint8_t keys[2][64 * 40];
  std::vector<std::int32_t> queries(uz(steps * rows + 1)), offset(uz(rows));
  for (auto& block : keys)
    for (auto& x : block) x = static_cast<std::uint8_t>(random.below(256));
  auto* bytes = reinterpret_cast<std::int8_t*>(queries.data());
  for (Index i = 0; i < 4 * steps * rows; ++i)
    bytes[i] = static_cast<std::int8_t>(random.below(255) - 127);
  for (auto& x : offset) x = static_cast<std::int32_t>(random.below(1000)) - 500;
  const bool sum_of_all = Over == detail::CodeScores::sum;
  const std::int32_t start = sum_of_all ? 7 : -100;
  alignas(64) std::int32_t best[32];
  std::fill_n(best, 32, start);
  const std::uint8_t* const blocks[2] = {keys[0], keys[1]};
  detail::int8_dots<Over>(blocks, queries.data(), rows, steps, offset.data(), best, keys[0]);
  for (Index i = 0; i < 32; ++i) {
    std::int32_t expected = start;
    for (Index m = 0; m < rows; ++m) {
      std::int32_t dot = offset[uz(m)];
      for (Index s = 0; s < steps; ++s)
        for (Index c = 0; c < 4; ++c)
          dot += keys[i / 16][(s * 16 + i % 16) * 4 + c] * bytes[(s * rows + m) * 4 + c];
      expected = sum_of_all ? expected + dot : std::max(expected, dot);
    }
    EXPECT_EQ(best[i], expected) << "key " << i << ", " << rows << " rows, " << steps << " steps";
  }
}

TEST(Int8Dots, AreExactForAnyCodes) {
  Random random(300);
  for (Index steps : {0, 1, 7, 32, 40})
    for (Index rows : {1, 3, 4, 8, 13, 16, 20}) {
      expect_exact_dots<detail::CodeScores::max>(random, steps, rows);
      expect_exact_dots<detail::CodeScores::sum>(random, steps, rows);
    }
}

// ---- the same Selection -------------------------------------------------------------------------

// Selects with and without the sketch, the caches fed in chunks.
template <class T>
void expect_same_selection(const Tensor4<T>& q, const Tensor4<T>& k, QuokaOptions options,
                           Index chunk = 37) {
  KvCache<T> cache(k.dimension(0), k.dimension(1), k.dimension(3), 1);
  options.sketch = true;
  const QuokaSelector sketched(options);
  options.sketch = false;
  const QuokaSelector exact(options);
  QuokaSelector::State state, exact_state;
  Tensor4<T> v(k.dimension(0), k.dimension(1), k.dimension(2), 1);
  v.setZero();
  for (Index begin = 0; begin < k.dimension(2); begin += chunk) {
    const Index n = std::min(chunk, k.dimension(2) - begin);
    cache.append(quoka::view_of(k).slice(begin, n), quoka::view_of(v).slice(begin, n));
    sketched.appended(SelectorInput<T>{{}, cache.k(), cache.inverse_norms(), cache.capacity()},
                      state, SerialExecutor{});
  }
  const bool used = options.scoring == Scoring::cosine;  // a dot product has no sketch
  ASSERT_EQ(state.scorer.sketch.keys.len(), used ? k.dimension(2) : 0);
  const SelectorInput<T> input{q, cache.k(), cache.inverse_norms(), cache.capacity()};
  Selection a, b;
  sketched.select(input, state, a, SerialExecutor{});
  exact.select(input, exact_state, b, SerialExecutor{});
  EXPECT_EQ(a, b) << name_of(options);
  sketched.select(SelectorInput<T>{q, cache.k()}, state, a, SerialExecutor{});
  EXPECT_EQ(a, b) << "without inverse norms";
}

template <class T>
class Sketch : public ::testing::Test {};
TYPED_TEST_SUITE(Sketch, StorageTypes, StorageNames);

TYPED_TEST(Sketch, SelectsWhatFloatScoresSelect) {
  Random random(301);
  for (Index dim : {1, 3, 16, 37, 64, 128})
    for (Index kv_len : {5, 127, 501}) {
      const auto q = random.tensor<TypeParam>(2, 4, 37, dim);
      const auto k = random.tensor<TypeParam>(2, 2, kv_len, dim);
      for (Index budget : {1, 4, 100}) expect_same_selection(q, k, {.budget = budget});
    }
}

TYPED_TEST(Sketch, SelectsTheSameWithEverySwitch) {
  Random random(302);
  const auto q = random.tensor<TypeParam>(1, 6, 37, 24);
  const auto k = random.tensor<TypeParam>(1, 2, 401, 24);
  for (QuokaOptions options : every_switch()) {
    options.budget = 63;
    expect_same_selection(q, k, options);
  }
}

TYPED_TEST(Sketch, SelectsTheSameOfTiesAndNearTies) {
  Random random(303);
  const auto q = random.tensor<TypeParam>(1, 2, 17, 32);
  auto k = random.tensor<TypeParam>(1, 1, 300, 32);
  for (Index t = 100; t < 200; ++t)  // one key again and again, some with one channel off by little
    for (Index c = 0; c < 32; ++c)
      k(0, 0, t, c) = stored<TypeParam>(static_cast<double>(k(0, 0, 99, c)) *
                                        (t % 3 == 0 && c == t % 32 ? 1.002 : 1.0));
  for (Index budget : {1, 50, 120, 250})
    for (Index window : {1, 5}) expect_same_selection(q, k, {.budget = budget, .window = window});
}

TYPED_TEST(Sketch, SelectsTheSameWithOneHugeChannel) {
  Random random(304);
  auto q = random.tensor<TypeParam>(1, 2, 17, 64);
  auto k = random.tensor<TypeParam>(1, 1, 300, 64);
  for (Index t = 0; t < 300; ++t)
    k(0, 0, t, 5) = stored<TypeParam>(200.0 + 0.5 * static_cast<double>(t % 7));
  expect_same_selection(q, k, {.budget = 20});
  for (Index i = 0; i < 17; ++i) q(0, 1, i, 5) = stored<TypeParam>(-500.0);
  expect_same_selection(q, k, {.budget = 20});
}

TYPED_TEST(Sketch, SelectsTheSameOfZeroKeysAndZeroQueries) {
  Random random(305);
  auto q = random.tensor<TypeParam>(1, 2, 17, 20);
  auto k = random.tensor<TypeParam>(1, 1, 130, 20);
  for (Index t = 0; t < 130; t += 2)
    for (Index c = 0; c < 20; ++c) k(0, 0, t, c) = stored<TypeParam>(0.0);
  expect_same_selection(q, k, {.budget = 90});
  q.setZero();
  expect_same_selection(q, k, {.budget = 90});
}

TYPED_TEST(Sketch, SelectsTheSameAmongKeysThatAreNotFinite) {
  Random random(306);
  for (float odd : {not_a_number, infinity, -infinity}) {
    const auto q = random.tensor<TypeParam>(1, 2, 17, 20);
    auto k = random.tensor<TypeParam>(1, 1, 130, 20);
    for (Index t = 0; t < 130; t += 3) k(0, 0, t, t % 20) = stored<TypeParam>(odd);
    for (Index budget : {10, 80, 100, 129})  // 86 keys are finite
      for (Index window : {1, 7}) expect_same_selection(q, k, {.budget = budget, .window = window});
  }
}

TEST(SketchExtremes, SelectsTheSameOfKeysNearTheEndsOfFloat) {
  Random random(307);
  const auto q = random.tensor<float>(1, 2, 17, 20);
  auto k = random.tensor<float>(1, 1, 130, 20);
  const double sizes[] = {1e-45, 1e-38, 1e-31, 1e-20, 1.0, 1e20, 1e31, 1e37};
  for (Index t = 0; t < 130; ++t)
    for (Index c = 0; c < 20; ++c)
      k(0, 0, t, c) = static_cast<float>(static_cast<double>(k(0, 0, t, c)) * sizes[t % 8]);
  for (Index budget : {1, 10, 64, 120}) expect_same_selection(q, k, {.budget = budget});
}

// Sums of so many products of codes do not fit 32 bits.
TEST(SketchExtremes, SelectsTheSameByTheMeanOfVeryManyQueries) {
  Random random(312);
  auto q = random.tensor<float>(1, 16, 128, 128), k = random.tensor<float>(1, 1, 96, 128);
  for (Index head = 0; head < 16; ++head)  // all alike, every channel at the end of the codes
    for (Index i = 0; i < 128; ++i)
      for (Index c = 0; c < 128; ++c) q(0, head, i, c) = c % 2 == 0 ? 1.0f : -1.0f;
  for (Index t = 0; t < 48; ++t)
    for (Index c = 0; c < 128; ++c)
      k(0, 0, t, c) = (c % 2 == 0 ? 1.0f : -1.0f) + 0.001f * k(0, 0, t, c);
  expect_same_selection(q, k,
                        {.budget = 20,
                         .n_queries = 128,
                         .aggregation = quoka::Aggregation::mean,
                         .group_mode = quoka::GroupMode::per_head});
}

TEST(SketchThreads, AnyNumberOfThreadsGivesTheSame) {
  Random random(308);
  const Index kv_len = quoka::tuning::sketch_task_keys + 127;
  const auto q = random.tensor<float>(1, 4, 37, 16), k = random.tensor<float>(1, 2, kv_len, 16);
  const SelectorInput<float> input{q, k};
  const QuokaSelector selector({.budget = 501, .sketch = true});
  QuokaSelector::State alone;
  Selection expected;
  selector.appended(input, alone, SerialExecutor{});
  selector.select(input, alone, expected, SerialExecutor{});
  for_each_executor([&](ExecutorRef executor) {
    QuokaSelector::State state;
    Selection selection;
    selector.appended(input, state, executor);
    selector.select(input, state, selection, executor);
    EXPECT_EQ(selection, expected);
  });
}

TEST(SketchedCache, FollowsTheCacheThroughTruncateAndAnotherBranch) {
  Random random(309);
  const auto q = random.tensor<float>(1, 4, 16, 24), k = random.tensor<float>(1, 2, 300, 24),
             other = random.tensor<float>(1, 2, 100, 24), v = random.tensor<float>(1, 2, 300, 8);
  const quoka::LayerShape shape{.q_heads = 4, .kv_heads = 2, .head_dim = 24, .v_dim = 8};
  quoka::ChunkedPrefill<QuokaSelector> layer(shape, {.budget = 31, .sketch = true}),
      fresh(shape, {.budget = 31, .sketch = false});
  const TensorView<const float> keys(k), values(v), branch(other);
  layer.append(keys, values);
  layer.truncate(203);
  layer.append(branch, values.slice(0, 100));
  fresh.append(keys.slice(0, 203), values.slice(0, 203));
  fresh.append(branch, values.slice(0, 100));
  EXPECT_EQ(layer.select(q), fresh.select(q));
}

// ---- the bound ----------------------------------------------------------------------------------

TYPED_TEST(Sketch, MissesACosineByNoMoreThanItsBound) {
  Random random(310);
  for (Index dim : {3, 16, 37, 128})
    for (double spread : {0.0, 2.0}) {  // channels alike, or of very different size
      auto k = random.tensor<TypeParam>(1, 1, 200, dim);
      auto q_bar = random.tensor<float>(1, 1, 16, dim, 0.3);
      for (Index t = 0; t < 200; ++t)
        for (Index c = 0; c < dim; ++c)
          k(0, 0, t, c) = stored<TypeParam>(static_cast<double>(k(0, 0, t, c)) *
                                            std::exp(spread * std::sin(static_cast<double>(c))));
      detail::SketchState s;
      s.keys.append(quoka::view_of(k), 200, SerialExecutor{});
      s.queries.reserve(1, 16, dim);
      s.queries.encode_head(q_bar.data(), 0, 16, dim);
      const float e = *s.queries.error.data(), longest = *s.queries.length.data();
      std::vector<float> scores(200);
      detail::sketch_range<detail::CodeScores::max>(s.keys, s.queries, 0, 1, 16, dim, 0, 200,
                                                    scores.data());
      const oracle::Tensor keys = to_oracle(k), queries = to_oracle(q_bar);
      double closest = 1.0;
      for (Index t = 0; t < 200; ++t) {
        double exact = -std::numeric_limits<double>::infinity();
        for (Index m = 0; m < 16; ++m)
          exact = std::max(exact, oracle::dot(queries.row(0, 0, m), keys.row(0, 0, t)) /
                                      oracle::norm(keys.row(0, 0, t)));
        const double bound = static_cast<double>(e + (longest + e) * s.keys.errors(0, 0)[t]) +
                             static_cast<double>(dim + 32) * 0x1p-23 * static_cast<double>(longest);
        const double missed = std::abs(static_cast<double>(scores[uz(t)]) - exact);
        ASSERT_LE(missed, bound) << "key " << t << " of " << dim << " channels";
        closest = std::min(closest, 1.0 - missed / bound);
      }
      EXPECT_LT(closest, 0.95) << "the bound is far too wide to be tested";
      EXPECT_LT(e, 0.02f * longest);
    }
}

TEST(KeySketch, TakesAnEighthOfTheBytesOfKeysAndValues) {
  Random random(311);
  const auto k = random.tensor<float>(1, 8, 1024, 128);
  KeySketch sketch;
  sketch.append(quoka::view_of(k), 1024, SerialExecutor{});
  EXPECT_EQ(sketch.len(), 1024);
  EXPECT_EQ(sketch.bytes(), 8 * 1024 * (128 + 8));
}

}  // namespace
