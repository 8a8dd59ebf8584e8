// A model's own index heads: scores and order against plain loops in double, of keys in any format and layout. Data
// are small whole numbers, so that sums are exact in float and equal scores are common, or normal ones.

#include <quoka/kernels/byte_formats.hpp>
#include <quoka/methods/indexer.hpp>
#include <quoka/runtime/thread_pool.hpp>

#include "support/world.hpp"

#include <gtest/gtest.h>

namespace {

using namespace quoka_test;
using quoka::Indexer;
using quoka::IndexerInput;
using quoka::IndexerOptions;
using quoka::IndexLists;

using List = std::vector<Position>;

// A model's index heads: queries, keys of any format and layout, and the lists that plain loops choose.
struct IndexCase {
  IndexerOptions options;
  bool weighted, masked;
  bool rounds;  // normal numbers, whose sums are rounded; else integers from -3 to 3
  Tensor4<float> q;
  StoredRows k;
  Tensor3<float> weights;
  Tensor4<float> biases;
  std::optional<StoredMask> mask;
  std::vector<std::int8_t> codes;  // of queries that have a scale for each head
  std::vector<float> scales;

  explicit IndexCase(Random& random)
      : weighted(random.below(3) > 0), masked(random.below(3) == 0), rounds(random.seldom(3)) {
    const Index group = 1 + random.below(random.below(4) == 0 ? 40 : 6);
    options.lists_heads = 1 + random.below(3);
    Index batch = 1 + random.below(2), heads = group * options.lists_heads,
          k_heads = random.below(2) == 0 ? 1 : options.lists_heads,
          q_len = 1 + random.below(random.below(2) == 0 ? 3 : 20),
          kv_len = q_len + random.below(random.below(2) == 0 ? 40 : 300);
    // Whole packets half the time: few rows of these are read where they lie.
    Index dim = random.below(2) == 0 ? 16 * (1 + random.below(4)) : 1 + random.below(70);
    if (rounds && random.seldom(2)) q_len = random.one_of(1, 50), kv_len = 5000;
    options.block = random.below(2) == 0 ? 1 : 1 + random.below(50);
    options.k = 1 + random.below(random.one_of(5, 20, 300));
    options.keep_first = random.below(3) == 0 ? random.below(4) : 0;
    options.keep_last = random.below(3) == 0 ? random.below(6) : 0;
    options.causal = random.below(4) > 0;
    if (random.seldom(40)) {  // more scores than are kept at once: several turns of queries
      static_assert(300 * 20000 * 4 > quoka::tuning::indexer_score_bytes);
      batch = heads = k_heads = options.lists_heads = 1;
      q_len = 300, kv_len = 20000, dim = 2, masked = false;
    }
    const auto numbers = [&](Index of_heads, Index len) {
      auto x = random.tensor<float>(batch, of_heads, len, dim);
      for (Index i = 0; i < x.size() && !rounds; ++i)
        x.data()[i] = static_cast<float>(random.below(7) - 3);
      return x;
    };
    q = numbers(heads, q_len);
    auto keys = numbers(k_heads, kv_len);
    if (!rounds && random.seldom(3)) {  // some are not finite
      for (Tensor4<float>* const x : {&q, &keys})
        for (Index odd = random.below(4); odd > 0; --odd)
          x->data()[random.below(x->size())] = random.one_of(not_a_number, infinity, -infinity);
    } else if (!rounds && random.seldom(3)) {
      for (Index i = 0; i < q.size(); ++i) codes.push_back(static_cast<std::int8_t>(q.data()[i]));
      for (Index h = 0; h < heads; ++h) {
        scales.push_back(random.one_of(1.0f, 4.0f, 0.5f));
        q.chip(h, 1) = q.chip(h, 1) * scales.back();
      }
    }
    k = StoredRows(keys, *every_format()[uz(random.below(3))],
                   StoredRows::layouts[random.below(batch == 1 ? 6 : 3)], random);
    weights = Tensor3<float>(batch, heads, q_len);
    for (Index i = 0; i < weights.size(); ++i)
      weights.data()[i] = static_cast<float>(random.below(9) - 4) / 2;
    if (!masked) return;
    biases = Tensor4<float>(1, options.lists_heads, q_len, kv_len);
    for (Index i = 0; i < biases.size(); ++i)
      biases.data()[i] = random.below(3) == 0 ? -infinity : 0.0f;
    for (Index t = 0; t < kv_len && q_len > 1; ++t) biases(0, 0, 1, t) = -infinity;
    mask.emplace(biases, static_cast<StoredMask::Kind>(random.below(5)));
  }

  Index q_len() const { return q.dimension(2); }
  Index kv_len() const { return k.rows().len(); }
  IndexerInput input() const {
    IndexerInput in{.q = q, .k = k.rows()};
    if (weighted) in.weights = weights;
    if (masked) in.mask = mask->mask();
    if (!codes.empty()) {
      const Index dim = q.dimension(3), head = q_len() * dim;
      in.q = Rows(reinterpret_cast<const std::byte*>(codes.data()), quoka::i8_format(),
                  q.dimensions(), {q.dimension(1) * head, head, dim})
                 .with_scales(scales.data(), 1);
    }
    return in;
  }

  bool sees(Index list_head, Index i, Index t) const {
    if (options.causal && t > kv_len() - q_len() + i) return false;
    return !masked || biases(0, list_head, i, t) == 0.0f;
  }
  // What is not finite ranks last.
  double score(Index b, Index list_head, Index i, Index t) const {
    const Index group = q.dimension(1) / options.lists_heads;
    constexpr double least = -std::numeric_limits<double>::infinity();
    const Tensor4<float>& keys = k.floats();
    double score = weighted ? 0.0 : least;
    for (Index h = list_head * group; h < (list_head + 1) * group; ++h) {
      double product = 0;
      for (Index c = 0; c < q.dimension(3); ++c) {
        const float x = q(b, h, i, c), y = keys(b, keys.dimension(1) > 1 ? list_head : 0, t, c);
        if (!std::isfinite(x) || !std::isfinite(y)) return least;
        product += double{x} * double{y};
      }
      score = weighted ? score + static_cast<double>(weights(b, h, i)) * std::max(product, 0.0)
                       : std::max(score, product);
    }
    return score;
  }
  // The expected list of a query.
  List expected(Index b, Index list_head, Index i) const {
    const IndexerOptions& o = options;
    struct Entry {
      Index number;
      double score;
      bool forced = false;
    };
    std::vector<Entry> seen;
    for (Index first = 0; first < kv_len(); first += o.block) {
      double best = -std::numeric_limits<double>::infinity();
      bool any = false;
      for (Index t = first; t < std::min(first + o.block, kv_len()); ++t)
        if (sees(list_head, i, t)) any = true, best = std::max(best, score(b, list_head, i, t));
      if (any) seen.push_back({first / o.block, best});
    }
    for (Index n = 0; n < std::min<Index>(o.keep_first, std::ssize(seen)); ++n)
      seen[uz(n)].forced = true;
    // The last ones in what the first ones leave of a list, the most recent before all.
    const Index left = o.k - std::min(o.keep_first, o.k);
    for (Index n = 0; n < std::min({o.keep_last, left, std::ssize(seen)}); ++n)
      seen[seen.size() - 1 - uz(n)].forced = true;
    std::stable_sort(seen.begin(), seen.end(), [](const Entry& x, const Entry& y) {
      return x.forced != y.forced ? x.forced : !x.forced && x.score > y.score;
    });
    List list;
    for (Index n = 0; n < std::min<Index>(o.k, std::ssize(seen)); ++n)
      list.push_back(static_cast<Position>(seen[uz(n)].number));
    std::sort(list.begin(), list.end());
    return list;
  }
};

// A query's list without what pads it.
List stored(const IndexLists& lists, Index b, Index head, Index i) {
  const auto all = lists.list(b, head, i);
  List list(all.begin(), all.end());
  while (!list.empty() && list.back() == -1) list.pop_back();
  return list;
}

// f(list, b, list head, query) for all lists; of very many, for queries at even steps from the last.
template <class F>
void for_each_list(const IndexCase& c, const IndexLists& lists, F&& f) {
  const Index step = 1 + c.q_len() * c.kv_len() / 300'000;
  for (Index b = 0; b < c.q.dimension(0); ++b)
    for (Index head = 0; head < c.options.lists_heads; ++head)
      for (Index i = c.q_len() - 1; i >= 0; i -= step) f(stored(lists, b, head, i), b, head, i);
}

// Keys and queries that are not finite rank last, by position; of forced keys that a list has no room for, the most
// recent stay. Any executor gives the same lists, also of normal numbers, and whatever an object's memory has of a call
// of another shape; one query alone is cut into ranges of keys, by lanes and where they lie.
TEST(Indexer, ChoosesTheBestByScoreThenByPosition) {
  quoka::ThreadPool pool(3);
  for_each_draw("METHODS", 80, [&](Random& random, std::uint64_t) {
    const IndexCase c(random);
    Indexer indexer(c.options), lived(c.options);
    const IndexLists lists = indexer.choose(c.input());
    ASSERT_EQ((std::array{lists.batch(), lists.heads(), lists.q_len(), lists.block()}),
              (std::array{c.q.dimension(0), c.options.lists_heads, c.q_len(), c.options.block}));
    EXPECT_LT(indexer.bytes(), 2 * quoka::tuning::indexer_score_bytes);
    if (!c.rounds)
      for_each_list(c, lists, [&](const List& list, Index b, Index head, Index i) {
        EXPECT_EQ(list, c.expected(b, head, i))
            << "batch " << b << ", head " << head << ", query " << i;
      });
    const Tensor4<float> negated = -c.q;
    IndexerInput others = c.input();
    others.q = negated, others.mask = {};
    others.k = c.k.rows(c.q_len() + random.below(c.kv_len() - c.q_len() + 1));
    lived.choose(others);
    ShuffledExecutor shuffled(random.bits(), static_cast<int>(1 + random.below(7)));
    for (const ExecutorRef executor : {ExecutorRef(shuffled), ExecutorRef(pool)})
      for_each_list(c, lived.choose(c.input(), executor),
                    [&](const List& list, Index b, Index head, Index i) {
                      EXPECT_EQ(list, stored(lists, b, head, i)) << i;
                    });
  });
}

TEST(Indexer, NothingToChooseIsAnEmptyList) {
  Indexer indexer;
  Tensor4<float> q(1, 2, 0, 8), k(1, 1, 12, 8);
  EXPECT_EQ(indexer.choose({.q = q, .k = k}).q_len(), 0);
  Tensor4<float> queries(1, 2, 3, 8), none(1, 1, 0, 8);
  queries.setZero();
  Indexer seen({.causal = false});
  EXPECT_EQ(seen.choose({.q = queries, .k = none}).most(), 0);
}

TEST(Indexer, RefusesWhatDoesNotFit) {
  Random random(78);
  const auto q = random.tensor<float>(1, 4, 5, 8), k = random.tensor<float>(1, 1, 40, 8);
  const Tensor4<float> wide(1, 1, 40, 9), two(1, 3, 40, 8), few(1, 1, 4, 8), more(2, 1, 40, 8);
  const Tensor3<float> weights(1, 4, 6);
  const Tensor4<float> biases(1, 1, 5, 41);
  const IndexerInput sound{.q = q, .k = k}, weighted{.q = q, .k = k, .weights = weights},
      masked{.q = q, .k = k, .mask = quoka::Mask(biases)};
  const auto with_k = [&](const Tensor4<float>& other) { return IndexerInput{.q = q, .k = other}; };
  const struct {
    IndexerOptions options;
    IndexerInput input;
    std::vector<Fragment> says;
  } all[] = {
      {{.k = 0}, sound, {"k is 0", 1}},
      {{.block = 0}, sound, {"block", 0, 1}},
      {{.keep_first = -1}, sound, {"keep_first", -1, 0}},
      {{.keep_last = -2}, sound, {"keep_last", -2, 0}},
      {{.lists_heads = 0}, sound, {"lists_heads", 0, 1}},
      {{.lists_heads = 3}, sound, {"index_heads", 4, "lists_heads", 3}},
      {{}, with_k(wide), {"dim", 9, 8}},
      {{.lists_heads = 2}, with_k(two), {"k's heads", 3, 2}},
      {{}, with_k(few), {"q_len", 5, 4}},
      {{}, with_k(more), {"batch", 2, 1}},
      {{}, weighted, {"weights", 6, 5}},
      {{}, masked, {"mask", 41, 40}},
  };
  for (const auto& one : all)
    expect_refused([&] { Indexer(one.options).choose(one.input); }, one.says);
  // The lists of the call before stay.
  Indexer indexer({.k = 4});
  const List before = stored(indexer.choose(sound), 0, 0, 4);
  const IndexLists lists = indexer.choose(sound);
  EXPECT_THROW(indexer.choose(weighted), std::invalid_argument);
  EXPECT_EQ(stored(lists, 0, 0, 4), before);
}

}  // namespace
