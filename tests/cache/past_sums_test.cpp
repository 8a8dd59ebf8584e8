// Means of what a selection leaves out: against plain sums in double precision, the same bits whatever was kept.

#include <quoka/cache/kv_cache.hpp>
#include <quoka/cache/past_sums.hpp>
#include <quoka/packing/byte_formats.hpp>

#include "support/fixtures.hpp"

namespace quoka_test {
namespace {

using quoka::PastRest;
using quoka::PastSums;

constexpr Index heads = 2, dim = 37, v_dim = 20;

// Each position by a chance of `share`.
std::vector<Position> some(Random& random, Index len, double share) {
  std::vector<Position> list;
  for (Index i = 0; i < len; ++i)
    if (random.uniform() < share) list.push_back(static_cast<Position>(i));
  return list;
}

PastRest left_out(PastSums& sums, const Rows& k, const Rows& v,
                  const std::vector<std::vector<Position>>& kept,
                  ExecutorRef executor = SerialExecutor{}) {
  PastRest rest;
  rest.reshape(k.batch() * k.heads(), k.dim(), v.dim());
  sums.begin(k, v, 0, executor.workers());
  executor.run(k.batch() * k.heads(), [&](Index head, int worker) {
    sums.rest(head, kept[uz(head)], rest.row(head), worker);
  });
  sums.finish();
  return rest;
}

// Keys and values [len] of head `head` that are finite and not kept, by plain sums. [1 + dim + v_dim]
std::vector<double> expected(const oracle::Tensor& k, const oracle::Tensor& v, Index head,
                             const std::vector<Position>& kept) {
  std::vector<double> sums(uz(1 + k.dim + v.dim), 0.0);
  const Index b = head / k.heads, h = head % k.heads;
  for (Index i = 0; i < k.len; ++i) {
    if (std::binary_search(kept.begin(), kept.end(), static_cast<Position>(i))) continue;
    if (!oracle::is_finite(k.row(b, h, i)) || !oracle::is_finite(v.row(b, h, i))) continue;
    sums[0] += 1;
    for (Index c = 0; c < k.dim; ++c) sums[uz(1 + c)] += k.at(b, h, i, c);
    for (Index c = 0; c < v.dim; ++c) sums[uz(1 + k.dim + c)] += v.at(b, h, i, c);
  }
  const double count = sums[0];
  for (double& x : sums) x = count > 0 ? x / count : 0.0;
  sums[0] = std::log(count);
  return sums;
}

void expect_means(const PastRest& rest, const Rows& k, const Rows& v,
                  const std::vector<std::vector<Position>>& kept, double tolerance = 1e-5) {
  const oracle::Tensor keys = to_oracle(k), values = to_oracle(v);
  for (Index head = 0; head < rest.heads(); ++head) {
    const auto wanted = expected(keys, values, head, kept[uz(head)]);
    const PastRest::Head got = rest.head(head);
    if (std::isinf(wanted[0]))
      EXPECT_EQ(got.log_count, -infinity);
    else
      EXPECT_NEAR(got.log_count, wanted[0], 1e-6);
    for (Index c = 0; c < k.dim(); ++c)
      EXPECT_NEAR(got.key[c], wanted[uz(1 + c)], tolerance) << head << ' ' << c;
    for (Index c = 0; c < v.dim(); ++c)
      EXPECT_NEAR(got.value[c], wanted[uz(1 + k.dim() + c)], tolerance) << head << ' ' << c;
  }
}

bool same_numbers(const PastRest& a, const PastRest& b) {
  bool same = a.heads() == b.heads();
  for (Index head = 0; head < a.heads() && same; ++head) {
    const PastRest::Head x = a.head(head), y = b.head(head);
    same = x.log_count == y.log_count && std::equal(x.key, x.key + a.k_dim(), y.key) &&
           std::equal(x.value, x.value + a.v_dim(), y.value);
  }
  return same;
}

TEST(PastSums, AreMeansOfWhatIsNotKept) {
  Random random(9301);
  for (const Index len : {1, 63, 255, 256, 257, 800})
    for (const double share : {0.0, 0.1, 0.49, 0.7, 1.0}) {
      SCOPED_TRACE(std::to_string(len) + " keys, kept " + std::to_string(share));
      const auto k = random.tensor<float>(2, heads, len, dim, 3.0);
      const auto v = random.tensor<float>(2, heads, len, v_dim);
      std::vector<std::vector<Position>> kept;
      for (Index head = 0; head < 2 * heads; ++head) kept.push_back(some(random, len, share));
      PastSums sums;
      expect_means(left_out(sums, k, v, kept), k, v, kept);
      EXPECT_EQ(sums.len(), len / PastSums::step * PastSums::step);
    }
}

TEST(PastSums, OfAnyFormatInPagesAndLists) {
  Random random(9302);
  const Index len = 600;
  const auto k = random.tensor<float>(1, heads, len, 64),
             v = random.tensor<float>(1, heads, len, 32);
  std::vector<std::vector<Position>> kept{some(random, len, 0.2), some(random, len, 0.3)};
  const std::pair<const quoka::Format*, const quoka::Format*> formats[] = {
      {&quoka::format_of<Eigen::half>(), &quoka::format_of<Eigen::bfloat16>()},
      {&quoka::q8_0_format(), &quoka::q8_0_format()},
      {&quoka::u8_format(), &quoka::float_format()}};
  for (const auto& [of_k, of_v] : formats) {
    SCOPED_TRACE(of_k->name);
    quoka::KvCache cache(1, heads, 64, 32, *of_k, *of_v);
    cache.append(k, v);
    PastSums sums;
    expect_means(left_out(sums, cache.k(), cache.v(), kept), cache.k(), cache.v(), kept);
  }
  std::vector<Position> cells;  // of which these are a list
  for (const Index i : random.permutation(len)) cells.push_back(static_cast<Position>(i));
  const Rows keys = Rows(k).listed(cells), values = Rows(v).listed(cells);
  PastSums sums;
  expect_means(left_out(sums, keys, values, kept), keys, values, kept);
}

TEST(PastSums, AreTheSameBitsWhateverWasKeptBefore) {
  Random random(9303);
  const Index len = 1500;
  const auto k = random.tensor<float>(1, heads, len, dim),
             v = random.tensor<float>(1, heads, len, v_dim);
  auto other_k = k;
  for (Index i = 700; i < len; ++i) other_k(0, 1, i, 5) += 1.0f;
  PastSums kept_sums;
  const auto expect_same = [&](const Tensor4<float>& keys, Index n) {
    const std::vector<std::vector<Position>> kept{some(random, n, 0.2), some(random, n, 0.8)};
    const Rows of_k = Rows(keys).slice(0, n), of_v = Rows(v).slice(0, n);
    PastSums fresh;
    const PastRest wanted = left_out(fresh, of_k, of_v, kept);
    for_each_executor([&](ExecutorRef executor) {
      EXPECT_TRUE(same_numbers(left_out(kept_sums, of_k, of_v, kept, executor), wanted)) << n;
    });
    expect_means(wanted, of_k, of_v, kept);
  };
  for (const Index n : {100, 256, 900, 1500}) expect_same(k, n);
  kept_sums.truncate(700);
  EXPECT_EQ(kept_sums.len(), 512);
  expect_same(other_k, 1500);
  expect_same(other_k, 300);  // shorter: what is known of more is forgotten
  EXPECT_EQ(kept_sums.len(), 256);
}

TEST(PastSums, AreNotReadTwice) {
  Random random(9304);
  auto k = random.tensor<float>(1, heads, 512, dim);
  const auto v = random.tensor<float>(1, heads, 512, v_dim);
  const std::vector<std::vector<Position>> kept(uz(heads));
  PastSums sums;
  const PastRest before = left_out(sums, k, v, kept);
  k(0, 0, 40, 3) += 100.0f;
  EXPECT_TRUE(same_numbers(left_out(sums, k, v, kept), before));
  sums.truncate(40);
  EXPECT_FALSE(same_numbers(left_out(sums, k, v, kept), before));
}

TEST(PastSums, LeaveOutWhatIsNotFinite) {
  Random random(9305);
  const Index len = 700;
  auto k = random.tensor<float>(1, heads, len, dim), v = random.tensor<float>(1, heads, len, v_dim);
  k(0, 0, 10, 0) = not_a_number, k(0, 0, 300, dim - 1) = infinity,
              v(0, 0, 500, v_dim - 1) = -infinity;
  v(0, 1, 690, 0) = not_a_number;
  for (const double share : {0.1, 0.9}) {  // chosen, and left out
    auto first = some(random, len, share);
    for (const Position i : {10, 500})
      if (!std::binary_search(first.begin(), first.end(), i))
        first.insert(std::lower_bound(first.begin(), first.end(), i), i);
    const std::vector<std::vector<Position>> kept{first, some(random, len, share)};
    PastSums sums;
    expect_means(left_out(sums, k, v, kept), k, v, kept);
  }
}

TEST(PastSums, OfNumbersWhoseSumIsNoFloat) {
  Random random(9306);
  auto k = random.tensor<float>(1, 1, 300, dim);
  const auto v = random.tensor<float>(1, 1, 300, v_dim);
  for (Index i = 0; i < 300; ++i) k(0, 0, i, 2) = 3e38f;
  PastSums sums;
  const std::vector<std::vector<Position>> kept{{3, 290}};
  const PastRest rest = left_out(sums, k, v, kept);
  EXPECT_NEAR(rest.head(0).log_count, std::log(298.0), 1e-6);
  EXPECT_NEAR(rest.head(0).key[2] / 3e38f, 1.0, 1e-5);
}

TEST(PastSums, TakeValuesOfAnotherSize) {
  Random random(9307);
  const auto k = random.tensor<float>(1, heads, 600, 24),
             v = random.tensor<float>(1, heads, 600, 40);
  const std::vector<std::vector<Position>> kept(uz(heads), {1, 2});
  PastSums sums;
  left_out(sums, k, v, kept);
  expect_means(left_out(sums, v, k, kept), v, k, kept);  // as many numbers in all
  expect_refused([&] { sums.begin(k, Rows(v).slice(0, 599), 0, 1); }, {"the values", 600, 599});
}

TEST(PastSums, OfAllThatIsKeptThereIsNothing) {
  Random random(9308);
  const auto k = random.tensor<float>(1, 1, 70, dim), v = random.tensor<float>(1, 1, 70, v_dim);
  PastSums sums;
  const PastRest rest = left_out(sums, k, v, {some(random, 70, 1.0)});
  EXPECT_EQ(rest.head(0).log_count, -infinity);
  for (Index c = 0; c < v_dim; ++c) EXPECT_EQ(rest.head(0).value[c], 0.0f);
}

}  // namespace
}  // namespace quoka_test
