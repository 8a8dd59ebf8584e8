// A model's own index heads: scores and order against plain loops in double, of keys in any format and layout. Data
// are small whole numbers, so that sums are exact in float and equal scores are common, or normal ones.

#include <quoka/kernels/byte_formats.hpp>
#include <quoka/methods/indexer.hpp>
#include <quoka/runtime/thread_pool.hpp>

#include "support/world.hpp"

#include <gtest/gtest.h>

#include <numeric>

namespace {

using namespace quoka_test;
using quoka::Indexer;
using quoka::IndexerInput;
using quoka::IndexerOptions;
using quoka::IndexLists;

using List = std::vector<Position>;

// A model's index heads: whole numbers from -3 to 3.
Tensor4<float> whole_numbers(Random& random, Index batch, Index heads, Index len, Index dim) {
  Tensor4<float> x(batch, heads, len, dim);
  for (Index i = 0; i < x.size(); ++i) x.data()[i] = static_cast<float>(random.below(7) - 3);
  return x;
}

struct Case {
  Index batch = 1, index_heads = 4, k_heads = 1, q_len = 5, kv_len = 40, dim = 8;
  bool weighted = true, masked = false;
  IndexerOptions options;
};

struct Heads {
  Case shape;
  Tensor4<float> q, k;
  std::optional<StoredRows> elsewhere;  // the same keys, of another format and layout
  Tensor3<float> weights;
  Tensor4<float> biases;
  std::shared_ptr<StoredMask> mask;
  std::vector<std::int8_t> codes;  // of queries that have scales
  std::vector<float> scales;

  Heads(Random& random, const Case& c)
      : shape(c),
        q(whole_numbers(random, c.batch, c.index_heads, c.q_len, c.dim)),
        k(whole_numbers(random, c.batch, c.k_heads, c.kv_len, c.dim)),
        weights(c.batch, c.index_heads, c.q_len) {
    for (Index i = 0; i < weights.size(); ++i)
      weights.data()[i] = static_cast<float>(random.below(9) - 4) / 2;
    if (!c.masked) return;
    biases = Tensor4<float>(1, c.options.lists_heads, c.q_len, c.kv_len);
    for (Index i = 0; i < biases.size(); ++i)
      biases.data()[i] = random.below(3) == 0 ? -infinity : 0.0f;
    for (Index t = 0; t < c.kv_len && c.q_len > 1; ++t) biases(0, 0, 1, t) = -infinity;
    mask = std::make_shared<StoredMask>(biases, static_cast<StoredMask::Kind>(random.below(5)));
  }

  IndexerInput input() const {
    IndexerInput in{.q = q, .k = elsewhere ? elsewhere->rows() : Rows(k)};
    if (shape.weighted) in.weights = weights;
    if (shape.masked) in.mask = mask->mask();
    if (!codes.empty()) {
      const Index head = shape.q_len * shape.dim;
      in.q = Rows(reinterpret_cast<const std::byte*>(codes.data()), quoka::i8_format(),
                  {shape.batch, shape.index_heads, shape.q_len, shape.dim},
                  {shape.index_heads * head, head, shape.dim})
                 .with_scales(scales.data(), 1);
    }
    return in;
  }

  // Some keys and queries are not finite.
  void spoil(Random& random) {
    for (Tensor4<float>* const x : {&q, &k})
      for (Index odd = random.below(4); odd > 0; --odd)
        x->data()[random.below(x->size())] = random.one_of(not_a_number, infinity, -infinity);
  }
  // Queries of bytes with a scale for each head: the scale is its head's own.
  void scale_queries(Random& random) {
    for (Index i = 0; i < q.size(); ++i) codes.push_back(static_cast<std::int8_t>(q.data()[i]));
    for (Index h = 0; h < shape.index_heads; ++h) {
      scales.push_back(random.one_of(1.0f, 4.0f, 0.5f));
      q.chip(h, 1) = q.chip(h, 1) * scales.back();
    }
  }
  // Keys in memory that ends where they do, with NaN beside them.
  void move_keys(Random& random) {
    elsewhere.emplace(k, *every_format()[uz(random.below(3))],
                      StoredRows::layouts[random.below(shape.batch == 1 ? 6 : 3)], random);
  }

  bool sees(Index list_head, Index i, Index t) const {
    if (shape.options.causal && t > shape.kv_len - shape.q_len + i) return false;
    return !shape.masked || biases(0, list_head, i, t) == 0.0f;
  }
  // What is not finite ranks last.
  double score(Index b, Index list_head, Index i, Index t) const {
    const Index group = shape.index_heads / shape.options.lists_heads;
    constexpr double least = -std::numeric_limits<double>::infinity();
    double score = shape.weighted ? 0.0 : least;
    for (Index h = list_head * group; h < (list_head + 1) * group; ++h) {
      double product = 0;
      for (Index c = 0; c < shape.dim; ++c) {
        const float x = q(b, h, i, c), y = k(b, shape.k_heads > 1 ? list_head : 0, t, c);
        if (!std::isfinite(x) || !std::isfinite(y)) return least;
        product += double{x} * double{y};
      }
      score = shape.weighted
                  ? score + static_cast<double>(weights(b, h, i)) * std::max(product, 0.0)
                  : std::max(score, product);
    }
    return score;
  }
  // The expected list of a query.
  List expected(Index b, Index list_head, Index i) const {
    const IndexerOptions& o = shape.options;
    struct Entry {
      Index number;
      double score;
      bool forced = false;
    };
    std::vector<Entry> seen;
    for (Index first = 0; first < shape.kv_len; first += o.block) {
      double best = -std::numeric_limits<double>::infinity();
      bool any = false;
      for (Index t = first; t < std::min(first + o.block, shape.kv_len); ++t)
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

// Looks at the last query and at each `step` queries before it.
void expect_expected(const Heads& heads, const IndexLists& lists, Index step = 1) {
  const Case& c = heads.shape;
  ASSERT_EQ(lists.batch(), c.batch);
  ASSERT_EQ(lists.heads(), c.options.lists_heads);
  ASSERT_EQ(lists.q_len(), c.q_len);
  ASSERT_EQ(lists.block(), c.options.block);
  for (Index b = 0; b < c.batch; ++b)
    for (Index head = 0; head < c.options.lists_heads; ++head)
      for (Index i = c.q_len - 1; i >= 0; i -= step)
        EXPECT_EQ(stored(lists, b, head, i), heads.expected(b, head, i))
            << "batch " << b << ", head " << head << ", query " << i;
}

Case random_case(Random& random) {
  Case c;
  const Index group = 1 + random.below(random.below(4) == 0 ? 40 : 6);
  c.options.lists_heads = 1 + random.below(3);
  c.index_heads = group * c.options.lists_heads;
  c.k_heads = random.below(2) == 0 ? 1 : c.options.lists_heads;
  c.batch = 1 + random.below(2);
  c.q_len = 1 + random.below(random.below(2) == 0 ? 3 : 20);
  c.kv_len = c.q_len + random.below(random.below(2) == 0 ? 40 : 300);
  // Whole packets half the time: few rows of these are read where they lie.
  c.dim = random.below(2) == 0 ? 16 * (1 + random.below(4)) : 1 + random.below(70);
  c.weighted = random.below(3) > 0, c.masked = random.below(3) == 0;
  c.options.block = random.below(2) == 0 ? 1 : 1 + random.below(50);
  c.options.k = 1 + random.below(random.one_of(5, 20, 300));
  c.options.keep_first = random.below(3) == 0 ? random.below(4) : 0;
  c.options.keep_last = random.below(3) == 0 ? random.below(6) : 0;
  c.options.causal = random.below(4) > 0;
  return c;
}

// Keys and queries that are not finite rank last, by position; of forced keys that a list has no room for, the most
// recent stay. Any executor gives the same lists, also of normal numbers, whose sums round, and whatever an object's
// memory has of the call before; one query alone is cut into ranges of keys, by lanes and where they lie.
TEST(Indexer, ChoosesTheBestByScoreThenByPosition) {
  quoka::ThreadPool pool(3);
  for_each_draw("METHODS", 80, [&](Random& random, std::uint64_t) {
    Case c = random_case(random);
    const bool rounds = random.seldom(3);
    if (rounds && random.seldom(2)) c.q_len = random.one_of(1, 50), c.kv_len = 5000;
    Heads heads(random, c);
    if (rounds)
      heads.q = random.tensor<float>(c.batch, c.index_heads, c.q_len, c.dim),
      heads.k = random.tensor<float>(c.batch, c.k_heads, c.kv_len, c.dim);
    else if (random.seldom(3))
      heads.spoil(random);
    else if (random.seldom(3))
      heads.scale_queries(random);
    if (random.seldom(2)) heads.move_keys(random);
    Indexer indexer(c.options), lived(c.options);
    const IndexLists lists = indexer.choose(heads.input());
    if (!rounds) {
      ASSERT_NO_FATAL_FAILURE(expect_expected(heads, lists));
    }
    const Tensor4<float> negated = -heads.q;
    IndexerInput others = heads.input();
    others.q = negated;
    lived.choose(others);
    ShuffledExecutor shuffled(random.bits(), static_cast<int>(1 + random.below(7)));
    for (const ExecutorRef executor : {ExecutorRef(shuffled), ExecutorRef(pool)}) {
      const IndexLists again = lived.choose(heads.input(), executor);
      for (Index b = 0; b < c.batch; ++b)
        for (Index head = 0; head < c.options.lists_heads; ++head)
          for (Index i = 0; i < c.q_len; ++i)
            ASSERT_EQ(stored(again, b, head, i), stored(lists, b, head, i)) << i;
    }
  });
}

// More scores than are kept at once: queries come in several turns, and one object serves calls of other shapes.
TEST(Indexer, ManyScoresComeInTurns) {
  Random random(74);
  Case c{.index_heads = 1, .q_len = 300, .kv_len = 20000, .dim = 2, .options = {.k = 3}};
  static_assert(300 * 20000 * 4 > quoka::tuning::indexer_score_bytes);
  const Heads many(random, c);
  Indexer indexer(c.options);
  expect_expected(many, indexer.choose(many.input()), 23);
  c.kv_len = 400;
  const Heads few(random, c);
  expect_expected(few, indexer.choose(few.input()), 23);
  EXPECT_LT(indexer.bytes(), 2 * quoka::tuning::indexer_score_bytes);
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
  const Heads heads(random, {.index_heads = 4, .q_len = 5, .kv_len = 40, .options = {.k = 4}});
  const Tensor4<float> wide(1, 1, 40, 9), two(1, 3, 40, 8), few(1, 1, 4, 8), more(2, 1, 40, 8);
  const Tensor3<float> weights(1, 4, 6);
  const Tensor4<float> biases(1, 1, 5, 41);
  const auto with_k = [&](const Tensor4<float>& k) {
    IndexerInput input = heads.input();
    input.k = k;
    return input;
  };
  IndexerInput weighted = heads.input(), masked = heads.input();
  weighted.weights = weights, masked.mask = quoka::Mask(biases);
  const struct {
    IndexerOptions options;
    IndexerInput input;
    std::vector<Fragment> says;
  } all[] = {
      {{.k = 0}, heads.input(), {"k is 0", 1}},
      {{.block = 0}, heads.input(), {"block", 0, 1}},
      {{.keep_first = -1}, heads.input(), {"keep_first", -1, 0}},
      {{.keep_last = -2}, heads.input(), {"keep_last", -2, 0}},
      {{.lists_heads = 0}, heads.input(), {"lists_heads", 0, 1}},
      {{.lists_heads = 3}, heads.input(), {"index_heads", 4, "lists_heads", 3}},
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
  Indexer indexer(heads.shape.options);
  const IndexLists lists = indexer.choose(heads.input());
  EXPECT_THROW(indexer.choose(weighted), std::invalid_argument);
  expect_expected(heads, lists);
}

}  // namespace
