// The stages of QuokaSelector on Eigen tensors: sub-selection, pre-aggregation and key scores of drawn calls against the oracle,
// in every element type. By example the order of kept queries, also on ties, and queries whose sum overflows. Selection as a
// whole: selection_fuzz_test.cpp; top-k: top_k_test.cpp.

#include <quoka/layer/kv_cache.hpp>
#include <quoka/select/stages.hpp>

#include "support/drawn_rows.hpp"
#include "support/selector_fixtures.hpp"

namespace {

using namespace quoka_test;
using quoka::pre_aggregate;
using quoka::score_keys;
using quoka::subselect_queries;
using quoka::subselect_query_positions;

// ---- against the oracle -------------------------------------------------------------------------

// Positions and rows of sub-selection: all queries in their order, or the oracle's except for near ties, to the last
// bit.
template <class T>
Tensor4<T> expect_kept(const Tensor4<T>& q, Index n) {
  const auto positions = subselect_query_positions(q, n);
  const Tensor4<T> kept = subselect_queries(q, n);
  EXPECT_EQ(kept.dimension(2), std::min(n, q.dimension(2)));
  if (n >= q.dimension(2)) {
    EXPECT_EQ(to_positions(positions),
              oracle::all_positions(q.dimension(0), q.dimension(1), q.dimension(2)));
  }
  const oracle::Tensor exact = to_oracle(q);
  const auto wanted = oracle::subselect_queries(exact, n);
  const auto cosines = oracle::query_cosines(exact);
  Tensor4<T> expected(kept.dimensions());
  for (Index b = 0; b < kept.dimension(0); ++b)
    for (Index head = 0; head < kept.dimension(1); ++head)
      for (Index m = 0; m < kept.dimension(2); ++m) {
        const Index is = positions(b, head, m), should = wanted[uz(b)][uz(head)][uz(m)];
        std::copy_n(&q(b, head, is, 0), q.dimension(3), &expected(b, head, m, 0));
        if (is != should) {
          EXPECT_NEAR(cosines[uz(b)][uz(head)][uz(is)], cosines[uz(b)][uz(head)][uz(should)], 1e-5)
              << "query " << is << " of head " << head << " is kept, not " << should;
        }
      }
  EXPECT_TRUE(same_bits(kept, expected));
  return kept;
}

// Element by element, within 1e-6 of the longest row, and what float rounds of unit vectors that cancel.
template <class T>
Tensor4<float> expect_aggregated(const Tensor4<T>& kept, Index kv_heads) {
  const Tensor4<float> q_bar = pre_aggregate(kept, kv_heads);
  const oracle::Tensor exact = oracle::pre_aggregate(to_oracle(kept), kv_heads);
  double largest = 0;
  for (const double x : exact.data) largest = std::max(largest, std::abs(x));
  EXPECT_EQ(q_bar.size(), std::ssize(exact.data));
  for (Index i = 0; i < q_bar.size(); ++i)
    EXPECT_NEAR(double{q_bar.data()[i]}, exact.data[uz(i)], 1e-6 * largest + 0x1p-23) << i;
  return q_bar;
}

// Within 2e-6 of |q|; of a zero key 0, and not finite where the oracle's is not. Of equal keys the same, to the last
// bit: top-k keeps the earlier ones.
template <class T>
void expect_scores(const Tensor4<float>& q_bar, const Tensor4<T>& keys, Aggregation over) {
  const oracle::Tensor q = to_oracle(q_bar), k = to_oracle(keys);
  const oracle::Scores exact = oracle::score_keys(q, k, to_oracle(over));
  const Tensor3<float> scores = score_keys(q_bar, keys, over);
  for (Index b = 0; b < k.batch; ++b)
    for (Index head = 0; head < k.heads; ++head) {
      double longest = 0;
      for (Index m = 0; m < q.len; ++m)
        longest = std::max(longest, oracle::norm(q.row(b, head, m)));
      for (Index t = 0; t < k.len; ++t) {
        const double expected = exact[uz(b)][uz(head)][uz(t)], score = double{scores(b, head, t)};
        const bool is_repeated = t >= 5 && std::isfinite(score) &&
                                 std::ranges::equal(k.row(b, head, t), k.row(b, head, t - 5));
        if (is_repeated) {
          EXPECT_EQ(score, double{scores(b, head, t - 5)}) << "key " << t;
        }
        if (std::isnan(expected))
          EXPECT_FALSE(std::isfinite(score)) << "key " << t;
        else if (oracle::norm(k.row(b, head, t)) == 0)
          EXPECT_EQ(score, 0.0) << "key " << t;
        else
          EXPECT_NEAR(score, expected, 2e-6 * longest)
              << "[" << b << ", " << head << ", " << t << "]";
      }
    }
}

TEST(Stages, AreTheOracles) {
  for_each_storage([]<class T>() {
    for_each_draw("STAGES", 80, [](Random& random, std::uint64_t) {
      const Index tile = quoka::detail::kernel_sizes().tile_rows;
      const Index batch = 1 + random.below(2), kv_heads = 1 + random.below(3),
                  group = random.one_of(1, 4, 5, 7, 8),
                  q_len = random.one_of(1, 3, 7, 9, 15, 16, 17, 31, 33, 49, 127, 128),
                  n = random.one_of(16, 1, 3, 7, 8, 9, 17, 48, 128);
      Index dim = random.one_of(1, 3, 15, 16, 17, 56, 64, 80, 100, 128, 192),
            kv_len = random.one_of<Index>({37, 1, 3, tile - 1, tile, tile + 1, 3 * tile + 1, 501});
      if (random.seldom(20)) dim = 3, kv_len = quoka::tuning::score_task_keys + 1;
      while (batch * kv_heads * kv_len * dim * std::min(n, q_len) > 2'000'000) kv_len /= 2;
      const Values values = drawn_values(random);
      const float size = std::is_same_v<T, Eigen::half> || values.wide || random.below(2) == 0
                             ? 1.0f
                             : random.one_of(1e30f, 1e15f, 1e-15f, 1e-30f);
      const Tensor4<float> floats_q = drawn_queries(random, values, batch, kv_heads * group, group,
                                                    q_len, dim),
                           floats_k =
                               drawn_keys(random, values, batch, kv_heads, kv_len, dim) * size;
      auto q = rows<T>(floats_q, 0, q_len);
      const auto k = rows<T>(floats_k, 0, kv_len);
      if (random.seldom(10)) q.setZero();
      SCOPED_TRACE(::testing::Message()
                   << batch << ", " << kv_heads << " heads of " << group << ", dim " << dim << ", "
                   << n << " of " << q_len << " queries, " << kv_len << " keys" << values);
      const Tensor4<float> q_bar = expect_aggregated(expect_kept(q, n), kv_heads);
      for (const Aggregation over : aggregations) expect_scores(q_bar, k, over);
      quoka::KvCache cache(batch, kv_heads, dim, dim, quoka::format_of<T>(), quoka::format_of<T>());
      cache.append(k, k);
      const auto norms = quoka::inverse_norms(k);
      EXPECT_TRUE(same_bits(TensorView<const float, 3>(norms), cache.inverse_norms()));
    });
  });
}

// ---- by example ---------------------------------------------------------------------------------

// [1, 1, len, dim] whose row i is pattern[i % pattern.size()].
template <class T>
Tensor4<T> repeated(const std::vector<std::vector<double>>& pattern, Index len) {
  Tensor4<T> q(1, 1, len, std::ssize(pattern[0]));
  for (Index i = 0; i < len; ++i)
    for (Index c = 0; c < q.dimension(3); ++c)
      q(0, 0, i, c) = stored<T>(pattern[uz(i) % pattern.size()][uz(c)]);
  return q;
}

TEST(Subselect, KeepsThese) {
  const double nan = std::nan("");
  const struct {
    const char* what;
    std::vector<std::vector<double>> pattern;
    Index len;
    std::vector<Index> kept;
  } all[] = {
      // Mean (16, 1): cosines are about 1, -1 and 0.06.
      {"the most dissimilar one first", {{8, 0}, {8, 0}, {8, 0}, {-8, 0}, {0, 1}}, 5, {3, 4, 0}},
      {"the earlier one of equals", {{1, 2, 3}}, 37, {0, 1, 2, 3, 4, 5, 6}},
      {"equals of two kinds", {{1, 2, 4}, {1, 2, 4}, {-4, 1, 0}}, 12, {2, 5, 8, 11, 0, 1, 3}},
      // By powers of two: the cosines have the same bits.
      {"equals but for a factor", {{4, 2, 1}, {8, 4, 2}, {1, 0.5, 0.25}}, 37, {0, 1, 2, 3}},
      // Mean along (1, 0): cosines 1, 0, 0 and, for the last, below 0.
      {"zeros as if orthogonal", {{4, 0}, {0, 0}, {4, 0}, {0, 0}, {-1, 0}}, 5, {4, 1, 3, 0}},
      {"the first ones of a mean of zero", {{1, 2}, {-1, -2}}, 16, {0, 1, 2, 3, 4, 5, 6}},
      {"the first ones where none is finite", {{nan, 1}}, 37, {0, 1, 2, 3, 4, 5, 6}},
  };
  for (const auto& [what, pattern, len, kept] : all)
    EXPECT_EQ(to_positions(subselect_query_positions(repeated<Element>(pattern, len),
                                                     std::ssize(kept)))[0][0],
              kept)
        << what;
}

// Each of them is finite, their sum in float is not.
TEST(Subselect, QueriesWhoseSumOverflowsAreRankedBeforeNan) {
  const double huge =
      0.9 * static_cast<double>(static_cast<float>(std::numeric_limits<Element>::max()));
  auto q = repeated<Element>({{huge, huge / 2}, {huge, huge}, {huge, -huge}}, 37);
  q(0, 0, 4, 0) = stored<Element>(std::nan(""));
  const auto kept = to_positions(subselect_query_positions(q, 36));
  EXPECT_EQ(std::set<Index>(kept[0][0].begin(), kept[0][0].end()).size(), 36u);
  EXPECT_EQ(std::count(kept[0][0].begin(), kept[0][0].end(), 4), 0);
}

}  // namespace
