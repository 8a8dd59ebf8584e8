// QuokaOptions::rest: the selection is as without, and beside it stands for each query head what it leaves out, weighted as
// the mean query weighs it, on every way to a selection; against plain loops in double.

#include <quoka/engine/masked_attention.hpp>
#include <quoka/quoka.hpp>

#include "support/fixtures.hpp"

#include <numeric>

namespace quoka_test {
namespace {

using quoka::PastRest;
using quoka::QuokaOptions;
using quoka::QuokaSelector;
using quoka::SelectorInput;

constexpr Index q_heads = 6, kv_heads = 2, dim = 32, v_dim = 24;

std::vector<QuokaOptions> ways() {
  QuokaOptions balanced = QuokaOptions::balanced(Budget::keys(60)), in_float = balanced,
               paper = QuokaOptions::paper(Budget::share(0.2)), mass = balanced;
  in_float.sketch = quoka::Sketch::off;
  balanced.sketch = paper.sketch = quoka::Sketch::on;
  mass.budget = Budget::mass(0.5, 8, 200);
  std::vector<QuokaOptions> all{balanced, in_float, paper, mass};
  for (QuokaOptions& options : all) options.rest = true;
  return all;
}

oracle::Tensor in_double(const Rows& rows) {
  oracle::Tensor x(rows.batch(), rows.heads(), rows.len(), rows.dim());
  for (Index b = 0; b < x.batch; ++b)
    for (Index head = 0; head < x.heads; ++head)
      for (Index i = 0; i < x.len; ++i) {
        const float* const row = reinterpret_cast<const float*>(rows.row(b, head, i));
        std::copy_n(row, x.dim, &x.at(b, head, i, 0));
      }
  return x;
}

// One query head's, by plain loops in double: what stands for the keys of q's KV head that are not kept.
struct Wanted {
  double log_count = -std::numeric_limits<double>::infinity();
  std::vector<double> key, value;
};
Wanted wanted_rest(const oracle::Tensor& q, const oracle::Tensor& k, const oracle::Tensor& v,
                   Index b, Index head, std::span<const Position> kept, double scale, double cap) {
  Wanted rest{.key = std::vector<double>(uz(k.dim)), .value = std::vector<double>(uz(v.dim))};
  std::vector<double> mean(uz(q.dim));
  double rows = 0;
  for (Index i = 0; i < q.len; ++i)
    if (oracle::is_finite(q.row(b, head, i))) {
      rows += 1;
      for (Index c = 0; c < q.dim; ++c) mean[uz(c)] += q.at(b, head, i, c);
    }
  for (double& x : mean) x /= std::max(rows, 1.0);
  const Index kv_head = head / (q.heads / k.heads);
  std::vector<Index> left;
  std::vector<double> logits;
  for (Index t = 0; t < k.len; ++t) {
    if (std::find(kept.begin(), kept.end(), static_cast<Position>(t)) != kept.end()) continue;
    if (!oracle::is_finite(k.row(b, kv_head, t)) || !oracle::is_finite(v.row(b, kv_head, t)))
      continue;
    const double x = scale * oracle::dot(mean, k.row(b, kv_head, t));
    left.push_back(t);
    logits.push_back(cap > 0 ? cap * std::tanh(x / cap) : x);
  }
  if (left.empty()) return rest;
  const double most = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const double x : logits) sum += std::exp(x - most);
  rest.log_count = 0;
  for (std::size_t i = 0; i < left.size(); ++i) {
    const double weight = std::exp(logits[i] - most) / sum;
    if (weight > 0) rest.log_count -= weight * std::log(weight);
    for (Index c = 0; c < k.dim; ++c) rest.key[uz(c)] += weight * k.at(b, kv_head, left[i], c);
    for (Index c = 0; c < v.dim; ++c) rest.value[uz(c)] += weight * v.at(b, kv_head, left[i], c);
  }
  return rest;
}

// What stands for the keys that `keep` leaves out of these.
::testing::AssertionResult is_rest_of(const Selection& keep, const Rows& q, const Rows& k,
                                      const Rows& v, const quoka::LogitOptions& logits = {},
                                      double tolerance = 2e-5) {
  if (keep.rest().absent()) return ::testing::AssertionFailure() << "there is none";
  if (keep.rest().heads() != q.batch() * q.heads())
    return ::testing::AssertionFailure() << keep.rest().heads() << " heads";
  const oracle::Tensor queries = in_double(q), keys = in_double(k), values = in_double(v);
  const double scale = logits.scale ? static_cast<double>(*logits.scale)
                                    : 1.0 / std::sqrt(static_cast<double>(k.dim()));
  const auto off = [&](double got, double wanted) {
    return !(std::abs(got - wanted) <= tolerance);
  };
  for (Index head = 0; head < keep.rest().heads(); ++head) {
    const Index b = head / q.heads(), of = head % q.heads();
    const Wanted wanted =
        wanted_rest(queries, keys, values, b, of, keep.row(b, of / (q.heads() / k.heads())), scale,
                    static_cast<double>(logits.softcap));
    const PastRest::Head got = keep.rest().head(head);
    if (static_cast<double>(got.log_count) != wanted.log_count &&
        off(static_cast<double>(got.log_count), wanted.log_count))
      return ::testing::AssertionFailure() << "log_count of head " << head << " is "
                                           << got.log_count << ", not " << wanted.log_count;
    for (Index c = 0; c < k.dim(); ++c)
      if (off(static_cast<double>(got.key[c]), wanted.key[uz(c)]))
        return ::testing::AssertionFailure() << "key of head " << head << ", channel " << c;
    for (Index c = 0; c < v.dim(); ++c)
      if (off(static_cast<double>(got.value[c]), wanted.value[uz(c)]))
        return ::testing::AssertionFailure() << "value of head " << head << ", channel " << c;
  }
  return ::testing::AssertionSuccess();
}

TEST(LeftOut, StandsBesideTheSameSelection) {
  Random random(9341);
  const auto q = random.tensor<float>(2, q_heads, 40, dim),
             k = random.tensor<float>(2, kv_heads, 700, dim);
  const auto v = random.tensor<float>(2, kv_heads, 700, v_dim);
  for (const QuokaOptions& options : ways()) {
    QuokaOptions without = options;
    without.rest = false;
    const SelectorInput input{.q = q, .k = k, .logits = quoka::LogitOptions{}, .v = v};
    for_each_executor([&](ExecutorRef executor) {
      QuokaSelector::State state, other;
      Selection keep, plain;
      const QuokaSelector with(options), by(without);
      with.appended(input, state, executor), by.appended(input, other, executor);
      with.select(input, state, keep, executor);
      by.select(input, other, plain, executor);
      EXPECT_EQ(keep, plain);
      EXPECT_TRUE(plain.rest().absent());
      EXPECT_TRUE(is_rest_of(keep, q, k, v));
      SelectorInput keys_alone = input;
      keys_alone.v = {};
      with.select(keys_alone, state, keep, executor);
      EXPECT_TRUE(keep.rest().absent());
    });
  }
}

TEST(LeftOut, IsNothingWhereAllIsKeptAndAllWhereNothingIs) {
  Random random(9342);
  const auto q = random.tensor<float>(1, q_heads, 9, dim),
             k = random.tensor<float>(1, kv_heads, 50, dim);
  const auto v = random.tensor<float>(1, kv_heads, 50, v_dim);
  QuokaSelector::State state;
  Selection keep;
  const SelectorInput input{.q = q, .k = k, .logits = quoka::LogitOptions{}, .v = v};
  QuokaSelector({.budget = Budget::keys(0), .rest = true})
      .select(input, state, keep, SerialExecutor{});
  EXPECT_TRUE(is_rest_of(keep, q, k, v));
  QuokaSelector({.budget = Budget::keys(50), .rest = true})
      .select(input, state, keep, SerialExecutor{});
  EXPECT_TRUE(keep.is_all());
  EXPECT_TRUE(keep.rest().absent());
}

// Each chunk of a layer, by any number of workers, is what selection and attention give by themselves; and again after
// a truncation, over other keys.
TEST(LeftOut, OfALayer) {
  Random random(9343);
  constexpr Index len = 900, chunk = 90;
  const auto q = random.tensor<float>(1, q_heads, len, dim),
             k = random.tensor<float>(1, kv_heads, len, dim);
  const auto v = random.tensor<float>(1, kv_heads, len, v_dim);
  for (const QuokaOptions& options : ways()) {
    quoka::ThreadPool many(9);
    std::vector<ExecutorRef> executors{SerialExecutor{}, many};
    for (const ExecutorRef executor : executors) {
      quoka::ChunkedPrefill<QuokaSelector> layer(
          {.q_heads = q_heads, .kv_heads = kv_heads, .head_dim = dim, .v_dim = v_dim}, options);
      const auto forward = [&](Index begin, Index shift) {
        const Rows of_q = Rows(q).slice(begin, chunk),
                   of_k = Rows(k).slice((begin + shift) % len, chunk),
                   of_v = Rows(v).slice((begin + shift) % len, chunk);
        Tensor4<float> out(1, q_heads, chunk, v_dim), wanted = out;
        Tensor4<float> past_k(1, kv_heads, begin, dim), past_v(1, kv_heads, begin, v_dim);
        for (Index head = 0; head < kv_heads; ++head)
          for (Index i = 0; i < begin; ++i) {
            std::copy_n(reinterpret_cast<const float*>(layer.cache().k().row(0, head, i)), dim,
                        &past_k(0, head, i, 0));
            std::copy_n(reinterpret_cast<const float*>(layer.cache().v().row(0, head, i)), v_dim,
                        &past_v(0, head, i, 0));
          }
        layer.forward(of_q, of_k, of_v, out, executor);
        const Selection& keep = layer.selection();
        if (!keep.is_all()) {
          EXPECT_TRUE(is_rest_of(keep, of_q, past_k, past_v)) << begin;
        }
        quoka::attention(of_q, {past_k, past_v, keep}, {of_k, of_v}, wanted);
        EXPECT_TRUE(same_up_to_rounding(out, wanted, 1e-5)) << begin;
        EXPECT_EQ(keep.is_all(), begin == 0 || options.budget.least(begin) == begin) << begin;
      };
      for (Index at = 0; at < len; at += chunk) forward(at, 0);
      layer.truncate(450);
      for (Index at = 450; at < len; at += chunk) forward(at, 90);
    }
  }
}

// A sketch of the cache's owner: cells come and go without a word.
TEST(LeftOut, OfACacheThatOthersKeep) {
  Random random(9345);
  const auto q = random.tensor<float>(1, q_heads, 9, dim);
  auto k = random.tensor<float>(1, kv_heads, 600, dim),
       v = random.tensor<float>(1, kv_heads, 600, v_dim);
  quoka::KeySketch sketch;
  QuokaSelector::State state;
  Selection keep;
  const QuokaSelector selector(
      {.budget = Budget::keys(30), .sketch = quoka::Sketch::on, .rest = true});
  for (int turn = 0; turn < 2; ++turn) {
    sketch.update(Rows(k), 0, 600, SerialExecutor{});
    selector.select({.q = q, .k = k, .sketch = &sketch, .v = v}, state, keep, SerialExecutor{});
    EXPECT_TRUE(is_rest_of(keep, q, k, v));
    EXPECT_EQ(state.scorer.kept_len(), 0);
    for (Index i = 0; i < 600; ++i) k(0, 0, i, 1) += 1.0f, v(0, 1, i, 1) -= 1.0f;
  }
}

TEST(LeftOut, MeetsScaleAndSoftcap) {
  Random random(9349);
  const auto q = random.tensor<float>(2, q_heads, 20, dim, 4.0),
             k = random.tensor<float>(2, kv_heads, 300, dim);
  const auto v = random.tensor<float>(2, kv_heads, 300, v_dim);
  const quoka::LogitOptions logits{.scale = 0.9f, .softcap = 1.5f};
  for (const QuokaOptions& options : ways()) {
    QuokaSelector::State state;
    Selection keep;
    QuokaSelector(options).select({.q = q, .k = k, .logits = logits, .v = v}, state, keep,
                                  SerialExecutor{});
    EXPECT_TRUE(is_rest_of(keep, q, k, v, logits));
  }
}

// Logits that rise and fall by hundreds from block to block: weights are relative to the largest so far.
TEST(LeftOut, OfLogitsThatAreFarApart) {
  Random random(9350);
  const auto q = random.tensor<float>(1, q_heads, 4, dim);
  for (const double rise : {-3.0, 3.0}) {
    auto k = random.tensor<float>(1, kv_heads, 400, dim);
    const auto v = random.tensor<float>(1, kv_heads, 400, v_dim);
    for (Index head = 0; head < kv_heads; ++head)
      for (Index t = 0; t < 400; ++t)
        for (Index c = 0; c < dim; ++c)
          k(0, head, t, c) +=
              static_cast<float>(rise) * static_cast<float>(t) * q(0, head * 3, 0, c) * 0.1f;
    QuokaSelector::State state;
    Selection keep;
    QuokaSelector({.budget = Budget::keys(0), .rest = true})
        .select({.q = q, .k = k, .v = v}, state, keep, SerialExecutor{});
    EXPECT_TRUE(is_rest_of(keep, q, k, v, {}, 2e-3)) << rise;
  }
}

// Keys, values and queries that are not finite are no part of it.
TEST(LeftOut, OfWhatIsFinite) {
  Random random(9351);
  auto q = random.tensor<float>(1, q_heads, 9, dim);
  auto k = random.tensor<float>(1, kv_heads, 200, dim);
  auto v = random.tensor<float>(1, kv_heads, 200, v_dim);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  k(0, 0, 3, 5) = nan, k(0, 0, 70, 31) = infinity, k(0, 1, 199, 0) = -infinity;
  v(0, 0, 9, 23) = nan, v(0, 1, 64, 0) = infinity;
  q(0, 1, 4, 7) = nan, q(0, 4, 8, 0) = infinity;
  for (Index i = 0; i < 9; ++i) q(0, 5, i, 2) = nan;  // none is left: plain means
  QuokaSelector::State state;
  Selection keep;
  QuokaSelector({.budget = Budget::keys(0), .rest = true})
      .select({.q = q, .k = k, .v = v}, state, keep, SerialExecutor{});
  EXPECT_TRUE(is_rest_of(keep, q, k, v));
  EXPECT_NEAR(keep.rest().head(5).log_count, std::log(198.0f), 1e-5f);
  for (Index t = 0; t < 200; ++t) k(0, 0, t, t % dim) = nan;
  QuokaSelector::State other;
  QuokaSelector({.budget = Budget::keys(0), .rest = true})
      .select({.q = q, .k = k, .v = v}, other, keep, SerialExecutor{});
  EXPECT_TRUE(is_rest_of(keep, q, k, v));
  EXPECT_EQ(keep.rest().head(0).log_count, -infinity);
  EXPECT_EQ(keep.rest().head(0).key[0], 0.0f);
}

// For no query is it given more weight than all that it stands for has.
TEST(LeftOut, NeverWeighsMoreThanWhatItStandsFor) {
  Random random(9352);
  const auto q = random.tensor<float>(1, q_heads, 30, dim, 2.0),
             k = random.tensor<float>(1, kv_heads, 300, dim);
  const auto v = random.tensor<float>(1, kv_heads, 300, v_dim);
  QuokaSelector::State state;
  Selection keep;
  QuokaSelector({.budget = Budget::keys(40), .rest = true})
      .select({.q = q, .k = k, .v = v}, state, keep, SerialExecutor{});
  const oracle::Tensor queries = to_oracle(q), keys = to_oracle(k);
  const double scale = 1.0 / std::sqrt(static_cast<double>(dim));
  for (Index head = 0; head < q_heads; ++head) {
    const PastRest::Head rest = keep.rest().head(head);
    const std::vector<double> key(rest.key, rest.key + dim);
    const auto kept = keep.row(0, head / 3);
    for (Index i = 0; i < 30; ++i) {
      double sum = 0;
      for (Index t = 0; t < 300; ++t)
        if (!std::binary_search(kept.begin(), kept.end(), static_cast<Position>(t)))
          sum += std::exp(scale * oracle::dot(queries.row(0, head, i), keys.row(0, head / 3, t)));
      EXPECT_LE(
          scale * oracle::dot(queries.row(0, head, i), key) + static_cast<double>(rest.log_count),
          std::log(sum) + 1e-5);
    }
  }
}

TEST(LeftOut, OfCellsThatAllQueriesSee) {
  Random random(9346);
  constexpr Index len = 600, q_len = 20;
  const auto q = random.tensor<float>(1, q_heads, q_len, dim),
             k = random.tensor<float>(1, kv_heads, len, dim);
  const auto v = random.tensor<float>(1, kv_heads, len, v_dim);
  // Every third cell is hidden from all, and the last ten from the first half of the queries.
  std::vector<std::uint8_t> shown(uz(q_len * len));
  std::vector<Position> to_all;
  for (Index i = 0; i < q_len; ++i)
    for (Index t = 0; t < len; ++t)
      shown[uz(i * len + t)] = t % 3 != 0 && (t < len - 10 || i >= q_len / 2);
  for (Index t = 0; t < len - 10; ++t)
    if (t % 3 != 0) to_all.push_back(static_cast<Position>(t));
  Tensor4<float> mask(1, 1, q_len, len);
  for (Index i = 0; i < q_len * len; ++i) mask.data()[i] = shown[uz(i)] != 0 ? 0.0f : -infinity;
  QuokaSelector::State state;
  Selection keep, of_visible;
  const QuokaSelector selector({.budget = Budget::keys(40), .rest = true});
  const SelectorInput input{.q = q, .k = k, .v = v};
  select_visible(selector, input, quoka::Mask(Rows(mask)), state, keep);
  const Rows seen_k = Rows(k).listed(to_all), seen_v = Rows(v).listed(to_all);
  QuokaSelector::State other;
  selector.select({.q = q, .k = seen_k, .v = seen_v}, other, of_visible, SerialExecutor{});
  ASSERT_TRUE(is_rest_of(of_visible, q, seen_k, seen_v));
  for (Index head = 0; head < q_heads; ++head) {
    EXPECT_EQ(keep.rest().head(head).log_count, of_visible.rest().head(head).log_count);
    for (Index c = 0; c < dim; ++c)
      EXPECT_EQ(keep.rest().head(head).key[c], of_visible.rest().head(head).key[c]);
  }
}

// A head of 4,000 keys of which a few matter little: means of the others bring the output nearer to that over all.
TEST(LeftOut, BringsTheOutputNearer) {
  Random random(9347);
  const auto q = random.tensor<float>(1, q_heads, 64, dim),
             k = random.tensor<float>(1, kv_heads, 4000, dim, 0.5);
  auto v = random.tensor<float>(1, kv_heads, 4000, v_dim);
  for (Index i = 0; i < v.size(); ++i) v.data()[i] += 1.0f;
  const auto chunk_k = random.tensor<float>(1, kv_heads, 64, dim),
             chunk_v = random.tensor<float>(1, kv_heads, 64, v_dim);
  const auto attend = [&](const Selection& keep) {
    Tensor4<float> out(1, q_heads, 64, v_dim);
    quoka::attention(q, {k, v, keep}, {chunk_k, chunk_v}, out);
    return out;
  };
  const auto exact = attend(Selection::all(1, kv_heads, 4000));
  const auto error = [&](bool rest) {
    QuokaOptions options = QuokaOptions::balanced(Budget::keys(250));
    options.rest = rest;
    QuokaSelector::State state;
    Selection keep;
    QuokaSelector(options).select({.q = q, .k = k, .logits = quoka::LogitOptions{}, .v = v}, state,
                                  keep, SerialExecutor{});
    const auto out = attend(keep);
    double sum = 0;
    for (Index i = 0; i < out.size(); ++i)
      sum += std::pow(static_cast<double>(out.data()[i] - exact.data()[i]), 2);
    return std::sqrt(sum / static_cast<double>(out.size()));
  };
  EXPECT_LT(error(true), 0.5 * error(false));
}

TEST(LeftOut, IsRefusedForAlibiAndOtherValues) {
  Random random(9348);
  const auto q = random.tensor<float>(1, q_heads, 9, dim),
             k = random.tensor<float>(1, kv_heads, 60, dim);
  const auto v = random.tensor<float>(1, kv_heads, 59, v_dim);
  const std::vector<float> slopes(uz(q_heads), 0.5f);
  const QuokaSelector selector({.budget = Budget::keys(30), .rest = true});
  QuokaSelector::State state;
  Selection keep;
  expect_refused([&] { selector.select({.q = q, .k = k, .v = v}, state, keep, SerialExecutor{}); },
                 {"v", 59, 60});
  expect_refused(
      [&] {
        selector.select({.q = q,
                         .k = Rows(k).slice(0, 59),
                         .logits = quoka::LogitOptions{.alibi_slopes = slopes},
                         .v = v},
                        state, keep, SerialExecutor{});
      },
      {6, "alibi_slopes"});
}

}  // namespace
}  // namespace quoka_test
