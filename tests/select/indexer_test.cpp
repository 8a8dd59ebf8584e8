// A model's own chooser: its scores and its order against plain loops in double. Data are small whole numbers, so that
// sums are exact in float and equal scores are common; one test has normal ones.

#include <quoka/attention/attention.hpp>
#include <quoka/packing/byte_formats.hpp>
#include <quoka/runtime/thread_pool.hpp>
#include <quoka/select/indexer.hpp>

#include "support/attention_case.hpp"
#include "support/fenced.hpp"

#include <gtest/gtest.h>

#include <numeric>

namespace {

using namespace quoka_test;
using quoka::Indexer;
using quoka::IndexerInput;
using quoka::IndexerOptions;
using quoka::IndexLists;

using List = std::vector<Position>;

// A model's index heads: whole numbers from -3 to 3, of T.
template <class T>
Tensor4<T> whole_numbers(Random& random, Index batch, Index heads, Index len, Index dim) {
  Tensor4<T> x(batch, heads, len, dim);
  for (Index i = 0; i < x.size(); ++i)
    x.data()[i] = static_cast<T>(static_cast<float>(random.below(7) - 3));
  return x;
}

struct Case {
  Index batch = 1, index_heads = 4, k_heads = 1, q_len = 5, kv_len = 40, dim = 8;
  bool weighted = true, masked = false;
  IndexerOptions options;
};

template <class T>
struct Heads {
  Case shape;
  Tensor4<float> q;
  Tensor4<T> k;
  Tensor3<float> weights;
  Tensor4<float> biases;
  std::shared_ptr<StoredMask> mask;

  Heads(Random& random, const Case& c)
      : shape(c),
        q(whole_numbers<float>(random, c.batch, c.index_heads, c.q_len, c.dim)),
        k(whole_numbers<T>(random, c.batch, c.k_heads, c.kv_len, c.dim)),
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
    IndexerInput in{.q = q, .k = k};
    if (shape.weighted) in.weights = weights;
    if (shape.masked) in.mask = mask->mask();
    return in;
  }

  bool sees(Index list_head, Index i, Index t) const {
    if (shape.options.causal && t > shape.kv_len - shape.q_len + i) return false;
    return !shape.masked || biases(0, list_head, i, t) == 0.0f;
  }
  double score(Index b, Index list_head, Index i, Index t) const {
    const Index group = shape.index_heads / shape.options.lists_heads;
    double score = shape.weighted ? 0.0 : -std::numeric_limits<double>::infinity();
    for (Index h = list_head * group; h < (list_head + 1) * group; ++h) {
      double product = 0;
      for (Index c = 0; c < shape.dim; ++c)
        product += static_cast<double>(q(b, h, i, c)) *
                   static_cast<double>(k(b, shape.k_heads > 1 ? list_head : 0, t, c));
      score = shape.weighted
                  ? score + static_cast<double>(weights(b, h, i)) * std::max(product, 0.0)
                  : std::max(score, product);
    }
    return score;
  }
  // What a query's list must be.
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
    for (Index n = 0; n < std::min<Index>(o.keep_last, std::ssize(seen)); ++n)
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

template <class T>
void expect_expected(const Heads<T>& heads, const IndexLists& lists) {
  const Case& c = heads.shape;
  ASSERT_EQ(lists.batch(), c.batch);
  ASSERT_EQ(lists.heads(), c.options.lists_heads);
  ASSERT_EQ(lists.q_len(), c.q_len);
  ASSERT_EQ(lists.block(), c.options.block);
  for (Index b = 0; b < c.batch; ++b)
    for (Index head = 0; head < c.options.lists_heads; ++head)
      for (Index i = 0; i < c.q_len; ++i)
        EXPECT_EQ(stored(lists, b, head, i), heads.expected(b, head, i))
            << "batch " << b << ", head " << head << ", query " << i;
}

Case random_case(Random& random) {
  Case c;
  const Index group = 1 + random.below(random.below(3) == 0 ? 70 : 6);
  c.options.lists_heads = 1 + random.below(3);
  c.index_heads = group * c.options.lists_heads;
  c.k_heads = random.below(2) == 0 ? 1 : c.options.lists_heads;
  c.batch = 1 + random.below(2);
  c.q_len = 1 + random.below(random.below(2) == 0 ? 3 : 60);
  c.kv_len = c.q_len + random.below(random.below(2) == 0 ? 40 : 700);
  // Whole packets half the time: few rows of these are read where they lie.
  c.dim = random.below(2) == 0 ? 16 * (1 + random.below(4)) : 1 + random.below(70);
  c.weighted = random.below(3) > 0, c.masked = random.below(3) == 0;
  c.options.block = random.below(2) == 0 ? 1 : 1 + random.below(50);
  c.options.k = 1 + random.below(random.below(2) == 0 ? 20 : 300);
  c.options.keep_first = random.below(3) == 0 ? random.below(4) : 0;
  c.options.keep_last = random.below(3) == 0 ? random.below(4) : 0;
  c.options.causal = random.below(4) > 0;
  return c;
}

TEST(Indexer, ChoosesTheBestByScoreThenByPosition) {
  for (std::uint64_t seed = 0; seed < 100; ++seed) {
    Random random(seed);
    const Heads<float> heads(random, random_case(random));
    Indexer indexer(heads.shape.options);
    ASSERT_NO_FATAL_FAILURE(expect_expected(heads, indexer.choose(heads.input())));
  }
}

// A single query, and two, of whole packets: read where they lie.
TEST(Indexer, FewRowsChooseAlike) {
  for (const bool weighted : {true, false})
    for (const Index q_len : {1, 2})
      for (const Index index_heads : {1, 3, 4}) {
        Random random(80);
        const Heads<float> heads(random, {.index_heads = index_heads,
                                          .q_len = q_len,
                                          .kv_len = 333,
                                          .dim = 32,
                                          .weighted = weighted,
                                          .options = {.k = 40}});
        Indexer indexer(heads.shape.options);
        expect_expected(heads, indexer.choose(heads.input()));
      }
}

TEST(Indexer, ReadsKeysOfAnyFormatAndLayout) {
  for_each_storage([]<class T>() {
    for (const Index q_len : {9, 1}) {  // 36 rows, and 4
      Random random(70);
      const Case c{
          .q_len = q_len, .kv_len = 300, .dim = q_len == 1 ? 32 : 33, .options = {.k = 37}};
      const Heads<T> heads(random, c);
      const Strided<T> strided(heads.k);
      IndexerInput input = heads.input();
      input.k = strided.view();
      Indexer indexer(heads.shape.options);
      expect_expected(heads, indexer.choose(input));
    }
  });
  // In pages, the last one first.
  for (const Index q_len : {9, 1}) {
    const Index dim = q_len == 1 ? 32 : 33;
    Random random(71);
    const Heads<float> heads(random,
                             {.q_len = q_len, .kv_len = 300, .dim = dim, .options = {.k = 37}});
    std::vector<Position> table(10);
    std::iota(table.begin(), table.end(), 0);
    std::reverse(table.begin(), table.end());
    Tensor4<float> pool(10, 1, 30, dim);
    for (Index page = 0; page < 10; ++page)
      std::copy_n(&heads.k(0, 0, 30 * (9 - page), 0), 30 * dim, &pool(page, 0, 0, 0));
    IndexerInput input = heads.input();
    input.k = quoka::paged(pool, table, 300);
    Indexer indexer(heads.shape.options);
    expect_expected(heads, indexer.choose(input));
  }
}

// Queries of bytes with a scale for each head: the scale is its head's own.
TEST(Indexer, ScalesOfQueriesAreTheirHeads) {
  Random random(72);
  Heads<float> heads(random,
                     {.index_heads = 3, .q_len = 4, .kv_len = 90, .dim = 16, .options = {.k = 11}});
  std::vector<std::int8_t> codes(uz(heads.q.size()));
  for (Index i = 0; i < heads.q.size(); ++i)
    codes[uz(i)] = static_cast<std::int8_t>(heads.q.data()[i]);
  const float scales[] = {1.0f, 4.0f, 0.5f};
  for (Index h = 0; h < 3; ++h)
    for (Index i = 0; i < 4; ++i)
      for (Index c = 0; c < 16; ++c) heads.q(0, h, i, c) *= scales[h];
  IndexerInput input = heads.input();
  input.q = Rows(reinterpret_cast<const std::byte*>(codes.data()), quoka::i8_format(),
                 {1, 3, 4, 16}, {192, 64, 16})
                .with_scales(scales, 1);
  Indexer indexer(heads.shape.options);
  expect_expected(heads, indexer.choose(input));
}

TEST(Indexer, AnyExecutorGivesTheSameLists) {
  Random random(73);
  // Normal numbers, whose sums round; one query alone is cut into ranges of keys, by lanes and where they lie.
  for (const auto& [q_len, dim] : {std::pair<Index, Index>{1, 24}, {1, 32}, {50, 24}}) {
    Heads<float> heads(
        random,
        {.index_heads = 8, .q_len = q_len, .kv_len = 5000, .dim = dim, .options = {.k = 100}});
    heads.q = random.tensor<float>(1, 8, q_len, dim),
    heads.k = random.tensor<float>(1, 1, 5000, dim);
    Indexer first(heads.shape.options);
    const IndexLists expected = first.choose(heads.input());
    Heads<float> others = heads;
    for (Index c = 0; c < others.q.size(); ++c) others.q.data()[c] = -heads.q.data()[c];
    const auto expect_same = [&, queries = q_len](ExecutorRef executor) {
      Indexer indexer(heads.shape.options);
      indexer.choose(others.input());  // its memory has other scores
      const IndexLists lists = indexer.choose(heads.input(), executor);
      for (Index i = 0; i < queries; ++i)
        EXPECT_EQ(stored(lists, 0, 0, i), stored(expected, 0, 0, i));
    };
    for_each_executor(expect_same);
    ShuffledExecutor shuffled(5, 7);
    expect_same(shuffled);
  }
}

// More scores than are kept at once: queries come in several turns, and one object serves calls of other shapes.
TEST(Indexer, ManyScoresComeInTurns) {
  Random random(74);
  Case c{.index_heads = 1, .q_len = 300, .kv_len = 20000, .dim = 2, .options = {.k = 3}};
  static_assert(300 * 20000 * 4 > quoka::tuning::indexer_score_bytes);
  const Heads<float> many(random, c);
  Indexer indexer(c.options);
  expect_expected(many, indexer.choose(many.input()));
  c.kv_len = 400;
  const Heads<float> few(random, c);
  expect_expected(few, indexer.choose(few.input()));
  EXPECT_LT(indexer.bytes(), 2 * quoka::tuning::indexer_score_bytes);
}

TEST(Indexer, NumbersThatAreNotFiniteRankLast) {
  for (const int which : {0, 1, 2, 3})
    for (const float bad : {not_a_number, infinity, -infinity}) {
      const bool weighted = which % 2 == 0;
      const Index dim = which < 2 ? 7 : 64;  // by lanes, and where they lie
      Random random(75);
      Heads<float> heads(
          random,
          {.q_len = 3, .kv_len = 50, .dim = dim, .weighted = weighted, .options = {.k = 20}});
      heads.k(0, 0, 7, 3) = bad, heads.k(0, 0, 30, 0) = bad;
      for (Index i = 0; i < heads.q.size(); ++i)
        if (heads.q.data()[i] == 0.0f) heads.q.data()[i] = 1.0f;
      for (Index i = 0; i < heads.weights.size(); ++i) heads.weights.data()[i] = 1.0f;
      Indexer indexer(heads.shape.options);
      IndexLists lists = indexer.choose(heads.input());
      for (Index i = 0; i < 3; ++i)
        for (const Position key : lists.list(0, 0, i)) EXPECT_TRUE(key != 7 && key != 30) << i;
      // All that it sees are listed, and none that it does not see.
      Indexer all(IndexerOptions{.k = 49});
      lists = all.choose(heads.input());
      for (Index i = 0; i < 2; ++i) {
        const List list = stored(lists, 0, 0, i);
        EXPECT_EQ(std::ssize(list), 48 + i);
        EXPECT_EQ(list.back(), 47 + i);
      }
      // A query that is not: the first keys that it sees, whatever hides others.
      heads.q(0, 2, 1, 0) = bad;
      Tensor4<float> biases(1, 1, 3, 50);
      biases.setZero();
      for (Index t = 0; t < 10; ++t) biases(0, 0, 1, t) = -infinity;
      IndexerInput input = heads.input();
      input.mask = quoka::Mask(biases);
      lists = indexer.choose(input);
      List first(20);
      std::iota(first.begin(), first.end(), 10);
      EXPECT_EQ(stored(lists, 0, 0, 1), first);
    }
}

// A layer whole: index heads choose, attention heeds, and nothing else is looked at.
TEST(Indexer, AttentionOverItsListsIsThatOverTheChosenKeys) {
  Random random(76);
  const Heads<float> heads(
      random, {.index_heads = 6, .q_len = 7, .kv_len = 200, .dim = 16, .options = {.k = 25}});
  const Index past = 193, dim = 32;
  Tensor4<float> q = random.tensor<float>(1, 4, 7, dim), k = random.tensor<float>(1, 2, 200, dim),
                 v = random.tensor<float>(1, 2, 200, dim), out(1, 4, 7, dim);
  Indexer indexer(heads.shape.options);
  const IndexLists lists = indexer.choose(heads.input());
  const quoka::TensorView<const float> keys(k), values(v);
  quoka::attention(q, {keys.slice(0, past), values.slice(0, past)},
                   {keys.slice(past, 7), values.slice(past, 7)}, out, {.lists = lists});
  for (Index h = 0; h < 4; ++h)
    for (Index i = 0; i < 7; ++i) {
      std::vector<double> expected(uz(dim));
      double sum = 0;
      for (const Position t : heads.expected(0, 0, i)) {
        double logit = 0;
        for (Index c = 0; c < dim; ++c)
          logit += static_cast<double>(q(0, h, i, c)) * static_cast<double>(k(0, h / 2, t, c));
        const double weight = std::exp(logit / std::sqrt(static_cast<double>(dim)));
        sum += weight;
        for (Index c = 0; c < dim; ++c)
          expected[uz(c)] += weight * static_cast<double>(v(0, h / 2, t, c));
      }
      for (Index c = 0; c < dim; ++c)
        EXPECT_NEAR(static_cast<double>(out(0, h, i, c)), expected[uz(c)] / sum, 1e-5);
    }
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

// Keys end where memory ends, and so does the last panel of them.
TEST(Indexer, ReadsNoKeyBesideThem) {
  for (const Index dim : {5, 64}) {
    Random random(77);
    const Heads<float> heads(random, {.q_len = 2, .kv_len = 131, .dim = dim, .options = {.k = 9}});
    const Index bytes = heads.k.size() * 4;
    const Fenced memory(bytes);
    std::byte* const at = memory.end() - bytes;
    std::memcpy(at, heads.k.data(), uz(bytes));
    IndexerInput input = heads.input();
    input.k = Rows(at, quoka::float_format(), {1, 1, 131, dim}, {bytes, bytes, 4 * dim});
    Indexer indexer(heads.shape.options);
    expect_expected(heads, indexer.choose(input));
  }
}

TEST(Indexer, RefusesWhatDoesNotFit) {
  expect_refused([] { Indexer({.k = 0}); }, {"k is 0", 1});
  expect_refused([] { Indexer({.block = 0}); }, {"block", 0, 1});
  expect_refused([] { Indexer({.keep_first = -1}); }, {"keep_first", -1, 0});
  expect_refused([] { Indexer({.keep_last = -2}); }, {"keep_last", -2, 0});
  expect_refused([] { Indexer({.lists_heads = 0}); }, {"lists_heads", 0, 1});
  Random random(78);
  const Heads<float> heads(random,
                           {.index_heads = 4, .q_len = 5, .kv_len = 40, .options = {.k = 4}});
  const auto refuse = [&](const IndexerOptions& options, const IndexerInput& input,
                          const std::vector<Fragment>& message) {
    Indexer indexer(options);
    expect_refused([&] { indexer.choose(input); }, message);
  };
  refuse({.lists_heads = 3}, heads.input(), {"index_heads", 4, "lists_heads", 3});
  IndexerInput input = heads.input();
  const Tensor4<float> wide(1, 1, 40, 9), two(1, 3, 40, 8), few(1, 1, 4, 8), more(2, 1, 40, 8);
  input.k = wide;
  refuse({}, input, {"dim", 9, 8});
  input.k = two;
  refuse({.lists_heads = 2}, input, {"k's heads", 3, 2});
  input.k = few;
  refuse({}, input, {"q_len", 5, 4});
  input.k = more;
  refuse({}, input, {"batch", 2, 1});
  input = heads.input();
  const Tensor3<float> weights(1, 4, 6);
  input.weights = weights;
  refuse({}, input, {"weights", 6, 5});
  input = heads.input();
  const Tensor4<float> biases(1, 1, 5, 41);
  input.mask = quoka::Mask(biases);
  refuse({}, input, {"mask", 41, 40});
}

// A call that is refused leaves the lists of the one before as they were.
TEST(Indexer, ARefusedCallChangesNothing) {
  Random random(79);
  const Heads<float> heads(random, {.options = {.k = 6}});
  Indexer indexer(heads.shape.options);
  const IndexLists lists = indexer.choose(heads.input());
  IndexerInput input = heads.input();
  const Tensor4<float> wide(1, 1, 40, 9);
  input.k = wide;
  EXPECT_THROW(indexer.choose(input), std::invalid_argument);
  expect_expected(heads, lists);
}

}  // namespace
