// QuokaOptions::rest: the selection is as without, and beside it stand the means of what it leaves out, on every way to a
// selection.

#include <quoka/engine/masked_attention.hpp>
#include <quoka/quoka.hpp>

#include "support/fixtures.hpp"

#include <numeric>

namespace quoka_test {
namespace {

using quoka::PastRest;
using quoka::PastSums;
using quoka::QuokaOptions;
using quoka::QuokaSelector;
using quoka::SelectorInput;

constexpr Index q_heads = 6, kv_heads = 2, dim = 32, v_dim = 24;

std::vector<QuokaOptions> ways() {
  QuokaOptions recommended = QuokaOptions::recommended(Budget::keys(60)), in_float = recommended,
               paper = QuokaOptions::paper(Budget::share(0.2)), mass = recommended;
  in_float.sketch = quoka::Sketch::off;
  recommended.sketch = paper.sketch = quoka::Sketch::on;
  mass.budget = Budget::mass(0.5, 8, 200);
  std::vector<QuokaOptions> all{recommended, in_float, paper, mass};
  for (QuokaOptions& options : all) options.rest = true;
  return all;
}

// What stands for the keys that `keep` leaves out of these.
::testing::AssertionResult is_rest_of(const Selection& keep, const Rows& k, const Rows& v) {
  if (keep.rest().absent()) return ::testing::AssertionFailure() << "there is none";
  PastSums sums;
  PastRest wanted;
  wanted.reshape(k.batch() * k.heads(), k.dim(), v.dim());
  sums.begin(k, v, 0, 1);
  for (Index head = 0; head < wanted.heads(); ++head) {
    sums.rest(head, keep.row(head / k.heads(), head % k.heads()), wanted.row(head), 0);
    const PastRest::Head got = keep.rest().head(head), of = wanted.head(head);
    if (got.log_count != of.log_count || !std::equal(got.key, got.key + k.dim(), of.key) ||
        !std::equal(got.value, got.value + v.dim(), of.value))
      return ::testing::AssertionFailure() << "another one of head " << head;
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
      EXPECT_TRUE(is_rest_of(keep, k, v));
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
  EXPECT_TRUE(is_rest_of(keep, k, v));
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
          EXPECT_TRUE(is_rest_of(keep, past_k, past_v)) << begin;
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

TEST(LeftOut, AStateThatKeepsSumsRefusesOtherKeys) {
  Random random(9344);
  const auto q = random.tensor<float>(1, q_heads, 9, dim);
  auto k = random.tensor<float>(1, kv_heads, 600, dim);
  const auto v = random.tensor<float>(1, kv_heads, 600, v_dim);
  const QuokaSelector selector(
      {.budget = Budget::keys(30), .sketch = quoka::Sketch::off, .rest = true});
  QuokaSelector::State state;
  Selection keep;
  const SelectorInput input{.q = q, .k = k, .v = v};
  selector.select(input, state, keep, SerialExecutor{});
  EXPECT_EQ(state.kept_bytes() > 0, true);
  for (Index head = 0; head < kv_heads; ++head)
    for (Index i = 0; i < 512; ++i) k(0, head, i, 0) += 1.0f;
  expect_refused([&] { selector.select(input, state, keep, SerialExecutor{}); }, {"truncate"});
  state.truncate(0);
  selector.select(input, state, keep, SerialExecutor{});
  EXPECT_TRUE(is_rest_of(keep, k, v));
}

// A sketch of the cache's owner: cells come and go without a word, so sums are kept by the owner or not at all.
TEST(LeftOut, OfACacheThatOthersKeep) {
  Random random(9345);
  const auto q = random.tensor<float>(1, q_heads, 9, dim);
  auto k = random.tensor<float>(1, kv_heads, 600, dim),
       v = random.tensor<float>(1, kv_heads, 600, v_dim);
  quoka::KeySketch sketch;
  PastSums sums;
  QuokaSelector::State state;
  Selection keep;
  const QuokaSelector selector(
      {.budget = Budget::keys(30), .sketch = quoka::Sketch::on, .rest = true});
  const auto select = [&](PastSums* of_owner) {
    selector.select({.q = q, .k = k, .sketch = &sketch, .v = v, .sums = of_owner}, state, keep,
                    SerialExecutor{});
    return is_rest_of(keep, k, v);
  };
  for (int turn = 0; turn < 2; ++turn) {
    sketch.update(Rows(k), 0, 600, SerialExecutor{});
    EXPECT_TRUE(select(nullptr));
    EXPECT_EQ(state.scorer.kept_len(), 0);
    EXPECT_TRUE(select(&sums));
    EXPECT_EQ(sums.len(), 512);
    for (Index i = 0; i < 600; ++i) k(0, 0, i, 1) += 1.0f, v(0, 1, i, 1) -= 1.0f;
    sums.truncate(0);
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
  PastSums sums;
  Selection keep, of_visible;
  const QuokaSelector selector({.budget = Budget::keys(40), .rest = true});
  const SelectorInput input{.q = q, .k = k, .v = v, .sums = &sums};
  select_visible(selector, input, quoka::Mask(Rows(mask)), state, keep);
  const Rows seen_k = Rows(k).listed(to_all), seen_v = Rows(v).listed(to_all);
  QuokaSelector::State other;
  selector.select({.q = q, .k = seen_k, .v = seen_v}, other, of_visible, SerialExecutor{});
  ASSERT_TRUE(is_rest_of(of_visible, seen_k, seen_v));
  for (Index head = 0; head < kv_heads; ++head) {
    EXPECT_EQ(keep.rest().head(head).log_count, of_visible.rest().head(head).log_count);
    for (Index c = 0; c < dim; ++c)
      EXPECT_EQ(keep.rest().head(head).key[c], of_visible.rest().head(head).key[c]);
  }
  EXPECT_EQ(sums.len(), 0);  // they are of all cells
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
    QuokaOptions options = QuokaOptions::recommended(Budget::keys(250));
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
