// Attention over a list of keys for each query: the meaning of lists, refusals, and the paths that the random cases of
// attention_suite_test.cpp are too small for.

#include <quoka/attention/attention.hpp>
#include <quoka/runtime/thread_pool.hpp>
#include <quoka/kernels/kernels.hpp>

#include "support/attention_case.hpp"

#include <gtest/gtest.h>

namespace {

using namespace quoka_test;
using quoka::AttentionWorkspace;
using quoka::IndexLists;
using quoka::Past;

using List = std::vector<Position>;
using Lists = std::vector<List>;  // of each query, the same for all KV heads

// Memory of lists, padded with -1.
struct Stored {
  std::vector<Position> memory;
  Index queries, most = 0;

  explicit Stored(const Lists& lists) : queries(std::ssize(lists)) {
    for (const List& list : lists) most = std::max(most, std::ssize(list));
    for (const List& list : lists) {
      memory.insert(memory.end(), list.begin(), list.end());
      memory.resize(uz(std::ssize(memory) + most - std::ssize(list)), -1);
    }
    memory.push_back(0);
  }
  IndexLists lists() const {
    return IndexLists(TensorView<const Position>(memory.data(), {1, 1, queries, most}));
  }
};

List random_list(Random& random, Index keys, Index count) {
  List list;
  for (const Index i : random.permutation(keys)) list.push_back(static_cast<Position>(i));
  list.resize(uz(count));
  return list;
}

// Lists of 32 queries: 150 of 1,500 keys each, and `shared` keys that all of them list. Every fourth query lists key
// 700, beginning with the second.
Lists neighbours_lists(Random& random, Index shared) {
  Lists lists;
  const List common = random_list(random, 1500, shared);
  for (Index i = 0; i < 32; ++i) {
    lists.push_back(random_list(random, 1500, 150));
    lists.back().insert(lists.back().end(), common.begin(), common.end());
    std::erase(lists.back(), 700);
    if (i % 4 == 1) lists.back().push_back(700);
  }
  return lists;
}

template <class T>
struct Layer {
  Tensor4<T> k, v;
  Tensor4<float> q;

  Layer(Random& random, Index q_heads, Index kv_heads, Index queries, Index keys, Index dim,
        Index v_dim)
      : k(random.tensor<T>(1, kv_heads, keys, dim)),
        v(random.tensor<T>(1, kv_heads, keys, v_dim)),
        q(random.tensor<float>(1, q_heads, queries, dim)) {}

  Output<float> attend(const AttentionOptions& options,
                       ExecutorRef executor = SerialExecutor{}) const {
    Output<float> output{Tensor4<float>(1, q.dimension(1), q.dimension(2), v.dimension(3)),
                         Tensor3<float>(1, q.dimension(1), q.dimension(2))};
    output.out.setConstant(-12345.0f), output.lse.setConstant(-12345.0f);
    AttentionOptions all = options;
    all.causal = false, all.arithmetic = quoka::Arithmetic::float_;
    AttentionWorkspace workspace;
    quoka::attention(q, Past(k, v), {}, {output.out, output.lse}, all, executor, workspace);
    return output;
  }

  // By the oracle, whose mask hides what is not listed.
  void expect(const Output<float>& output, const Lists& lists) const {
    const Index keys = k.dimension(2);
    std::vector<std::uint8_t> listed(uz(q.dimension(2) * keys));
    for (Index i = 0; i < q.dimension(2); ++i)
      for (const Position key : lists[uz(i)]) listed[uz(i * keys + key)] = 1;
    oracle::AttentionOptions options;
    options.causal = false;
    options.mask = [&](Index, Index, Index i, Index key) {
      return listed[uz(i * keys + key)] != 0 ? 0.0 : -oracle::infinity;
    };
    const auto expected =
        oracle::attention(to_oracle(q), to_oracle(k), to_oracle(v), nullptr, {}, {}, options);
    for (Index i = 0; i < output.out.size(); ++i)
      ASSERT_NEAR(output.out.data()[i], expected.out.data[uz(i)], 1e-5);
    for (Index i = 0; i < output.lse.size(); ++i) {
      const double lse = expected.lse[uz(i)];
      if (lse == -oracle::infinity) {
        ASSERT_EQ(output.lse.data()[i], -infinity);
      } else {
        ASSERT_NEAR(output.lse.data()[i], lse, 1e-5);
      }
    }
  }
};

// ---- what lists mean ----------------------------------------------------------------------------

TEST(ListedAttention, IsTheOraclesOfWhatIsListed) {
  struct Shape {
    Index q_heads, kv_heads, queries, keys, dim, v_dim;
  };
  // With this many heads a query's rows fill sixteen panels and end in one where the next query's begin.
  const Index panels = 16 * quoka::detail::kernel_sizes().panel_rows;
  for (const Shape& s :
       {Shape{panels + 2, 1, 3, 300, 16, 16}, Shape{8, 2, 33, 2500, 32, 32},
        Shape{16, 1, 9, 700, 72, 64}, Shape{130, 1, 3, 300, 40, 24}, Shape{3, 3, 130, 400, 16, 16},
        Shape{10, 2, 40, 1100, 24, 17}, Shape{6, 2, 1, 4000, 64, 64}}) {
    SCOPED_TRACE(::testing::Message()
                 << s.q_heads << "/" << s.kv_heads << ", dims " << s.dim << "/" << s.v_dim);
    Random random(1);
    const Layer<Eigen::half> layer(random, s.q_heads, s.kv_heads, s.queries, s.keys, s.dim,
                                   s.v_dim);
    Lists lists;
    for (Index i = 0; i < s.queries; ++i) {
      lists.push_back(random_list(random, s.keys, s.keys / (i % 5 == 4 ? 1 : 3 + i % 7)));
      if (i % 3 == 1) lists[uz(i)] = lists[uz(i - 1)];  // a neighbour's
      if (i % 11 == 10) lists[uz(i)] = {static_cast<Position>(i)};
      if (i % 13 == 12) lists[uz(i)].clear();
    }
    const Stored stored(lists);
    layer.expect(layer.attend({.lists = stored.lists()}), lists);
  }
}

TEST(ListedAttention, WithoutAnyKeyOutputsAreZero) {
  Random random(2);
  const Layer<float> layer(random, 4, 2, 5, 0, 16, 24);
  const Lists lists(5);
  const Stored stored({List{-1, -1}, {}, {}, {}, {}});
  layer.expect(layer.attend({.lists = stored.lists()}), lists);
  const Tensor4<float> mask(1, 1, 5, 0);
  layer.expect(layer.attend({.mask = quoka::Mask(mask).as_lists()}), lists);
}

// A list is a set: order, repetition and padding change no bit, where keys are more than fit one range, too.
TEST(ListedAttention, OrderRepetitionAndPaddingChangeNoBit) {
  Random random(12);
  const Index keys = 8000, queries = 32;
  const Layer<Eigen::half> layer(random, 4, 1, queries, keys, 128, 128);
  Lists own, one(uz(queries), random_list(random, keys, 1280));
  for (Index i = 0; i < queries; ++i) own.push_back(random_list(random, keys, 64));
  for (const Lists& lists : {own, one}) {
    Lists repeated = lists, padded = lists, turned = lists;
    for (List& list : repeated) {
      const List once = list;
      for (int n = 0; n < 19; ++n) list.insert(list.end(), once.begin(), once.end());
    }
    for (List& list : padded) list.resize(list.size() * 20, -1);
    std::reverse(turned[5].begin(), turned[5].end());
    turned[9].push_back(turned[9].front());
    const Stored memory(lists);
    const Output<float> expected = layer.attend({.lists = memory.lists()});
    for (const Lists& same : {repeated, padded, turned}) {
      const Stored other(same);
      expect_same(layer.attend({.lists = other.lists()}), expected);
    }
  }
}

// More keys than are looked at in one go.
TEST(ListedAttention, AStretchEndsAndAnotherBegins) {
  Random random(5);
  const Index keys = 2 * 65536 + 777;
  const Layer<Eigen::half> layer(random, 8, 1, 18, keys, 8, 8);
  Lists lists;
  for (Index i = 0; i < 18; ++i) {
    lists.emplace_back();
    for (int n = 0; n < 300; ++n) lists.back().push_back(static_cast<Position>(random.below(keys)));
    for (const Position x : {65535, 65536, 131071, 131072, 131848})
      if (random.below(2) == 0) lists.back().push_back(x);
  }
  const Stored memory(lists);
  const Output<float> alone = layer.attend({.lists = memory.lists()});
  layer.expect(alone, lists);
  quoka::ThreadPool pool(3);
  expect_same(layer.attend({.lists = memory.lists()}, pool), alone);
}

// An infinity or a NaN that a mask adds to the logit of a key that is not listed is not seen; at a listed key it is its
// row's alone, even if no other bias of the call changes anything.
TEST(ListedAttention, ABiasThatIsNotFiniteIsSeenWhereItsKeyIsListed) {
  for (const Index shared : {0, 900})  // by rows; by tiles
    for (const float usual : {0.0f, 0.5f}) {
      SCOPED_TRACE(shared);
      Random random(9);
      const Layer<float> layer(random, 8, 2, 32, 1500, 32, 32);
      const Stored stored(neighbours_lists(random, shared));
      Tensor4<float> bias(1, 1, 32, 1500);
      bias.setConstant(usual);
      AttentionOptions options{.lists = stored.lists()};
      options.mask = quoka::Mask(TensorView<const float>(bias));
      const Output<float> finite = layer.attend(options);
      if (usual != 0.0f) {
        for (const float x : {infinity, not_a_number}) {
          for (Index i = 0; i < 32; ++i)
            if (i % 4 != 1) bias(0, 0, i, 700) = x;
          expect_same(layer.attend(options), finite);
        }
        continue;
      }
      bias(0, 0, 1, 700) = not_a_number;
      const Output<float> output = layer.attend(options);
      for (Index head = 0; head < 8; ++head)
        for (Index i = 0; i < 32; ++i) {
          EXPECT_EQ(row_is_nan(output, 0, head, i), i == 1) << head << ", " << i;
          if (i != 1) {
            EXPECT_EQ(output.lse(0, head, i), finite.lse(0, head, i));
          }
        }
    }
}

// ---- what is refused ------------------------------------------------------------------------------

struct Call {
  Random random{8};
  Layer<float> layer{random, 6, 3, 5, 40, 8, 8};
  std::vector<Position> memory = std::vector<Position>(uz(3 * 5 * 10), 1);
  std::vector<Position> counts = std::vector<Position>(15, 10);
  std::array<Index, 4> sizes{1, 3, 5, 10};
  Index block = 1;
  bool counted = false;
  const Selection* keep = nullptr;
  Tensor4<float> out = Tensor4<float>(1, 6, 5, 8).setConstant(-12345.0f);

  void attend() {
    const TensorView<const Position> entries(memory.data(), sizes);
    const IndexLists lists =
        counted ? IndexLists(entries, block,
                             TensorView<const Position, 3>(counts.data(), {1, sizes[1], sizes[2]}))
                : IndexLists(entries, block);
    Past past(layer.k, layer.v);
    past.selection = keep;
    quoka::attention(layer.q, past, {}, out, {.causal = false, .lists = lists});
  }
};

// Nothing is written then.
TEST(ListedAttention, RefusesListsThatDoNotFit) {
  const Selection some = Selection::from_lists(1, 3, 40, std::vector<List>(3, List{1, 2})),
                  all = Selection::all(1, 3, 40);
  const struct {
    std::function<void(Call&)> wrong;
    std::vector<Fragment> says;
  } table[] = {
      {[](Call& c) { c.memory[uz((1 * 5 + 2) * 10 + 3)] = 40; },
       {"KV head 1", "query 2", "40", "keys, which is 40"}},
      {[](Call& c) { c.memory[7] = -2; }, {"is -2", "at least", "-1"}},
      {[](Call& c) { c.block = 8, c.memory[7] = 5; }, {"is 5", "the number of blocks, which is 5"}},
      {[](Call& c) { c.counted = true, c.counts[4] = 11; }, {"query 4", "is 11", "which is 10"}},
      {[](Call& c) { c.counted = true, c.counts[4] = -1; }, {"is -1", "at least"}},
      {[](Call& c) {
         c.sizes = {1, 3, 4, 10};
       },
       {"q_len is 4", "which is 5"}},
      {[](Call& c) {
         c.sizes = {1, 2, 5, 10};
       },
       {"heads is 2", "which is 3"}},
      {[](Call& c) {
         c.sizes = {2, 1, 5, 10};
       },
       {"batch is 2", "which is 1"}},
      {[](Call& c) { c.block = 0; }, {"the keys of a block is 0", "1"}},
      {[&](Call& c) { c.keep = &some; }, {"lists", "Selection"}},
  };
  for (const auto& row : table) {
    Call call;
    row.wrong(call);
    expect_refused([&] { call.attend(); }, row.says);
    for (Index i = 0; i < call.out.size(); ++i) ASSERT_EQ(call.out.data()[i], -12345.0f);
  }
  Call call;
  call.keep = &all;
  EXPECT_NO_THROW(call.attend());
  EXPECT_THROW(IndexLists(TensorView<const Position>(call.memory.data(), {1, 3, 5, 10}), 1,
                          TensorView<const Position, 3>(call.counts.data(), {1, 3, 4})),
               std::invalid_argument);
}

TEST(ListedAttention, RefusesToWriteOverTheLists) {
  Call call;
  call.memory.resize(uz(6 * 5 * 8 + 8), 1);
  const TensorView<float> over(reinterpret_cast<float*>(call.memory.data() + 1), {1, 6, 5, 8});
  const IndexLists lists(TensorView<const Position>(call.memory.data(), {1, 1, 5, 10}));
  EXPECT_THROW(quoka::attention(call.layer.q, Past(call.layer.k, call.layer.v), {}, over,
                                {.causal = false, .lists = lists}),
               std::invalid_argument);
}

TEST(ListedAttention, OptionsThatAreKeptHaveNone) {
  const Stored stored(Lists(2, List{1}));
  EXPECT_THROW(quoka::OwnedAttentionOptions(AttentionOptions{.lists = stored.lists()}),
               std::invalid_argument);
}

}  // namespace
