// A layer over several ranks, which are threads here: the Selections of one machine to the bit, its outputs up to
// rounding, and what is sent.

#include "context_parallel/sharded_prefill.hpp"
#include "context_parallel/thread_ranks.hpp"

#include <quoka/layer/chunked_prefill.hpp>
#include <quoka/runtime/thread_pool.hpp>

#include "support/attention_fixtures.hpp"

#include <functional>
#include <thread>

namespace {

using namespace quoka_test;
using quoka::AttentionOptions;
using quoka::Budget;
using quoka::QuokaOptions;
using quoka_examples::Communicator;
using quoka_examples::ShardedPrefill;
using quoka_examples::ShardMap;
using quoka_examples::ThreadRanks;

// f(communicator) on every rank. An exception on one rank fails the test, once all are done.
void on_ranks(int count, const std::function<void(Communicator&)>& f) {
  ThreadRanks ranks(count);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < count; ++rank)
    threads.emplace_back([&, rank] {
      auto communicator = ranks.communicator(rank);
      EXPECT_NO_THROW(f(communicator));
    });
  for (std::thread& thread : threads) thread.join();
}

struct Step {
  enum class Is { forward, append, cut } is;
  Index n = 0;  // tokens; of cut: those that are left, in percent
};

// A layer, and what is done with it; drawn.
struct Draw {
  quoka::LayerShape shape;
  std::optional<QuokaOptions> selection;
  int ranks;
  Index block;
  AttentionOptions attention;
  std::vector<float> sinks;
  std::vector<Step> steps;
  Index len = 0;
  Tensor4<float> q, k, v;

  explicit Draw(Random& random) {
    shape.kv_heads = 1 + random.below(5);
    shape.q_heads = shape.kv_heads * (1 + random.below(4));
    shape.head_dim = 1 + random.below(24), shape.v_dim = 1 + random.below(24);
    ranks = static_cast<int>(1 + random.below(4));
    block = 3 + random.below(60);
    if (!random.seldom(8)) {
      const Index sizes[] = {0, 1, 126, 163, 1 + random.below(60), 1 + random.below(60)};
      selection =
          QuokaOptions{.budget = random.seldom(4) ? Budget::share(0.05 + 0.9 * random.uniform())
                                                  : Budget::keys(random.one_of(sizes))};
      selection->n_queries = 1 + random.below(20);
      if (random.seldom(3)) selection->keep_first = random.below(30);
      if (random.seldom(3)) selection->keep_last = random.below(9);
      selection->sketch = random.seldom(2) ? quoka::Sketch::on : quoka::Sketch::off;
    }
    for (Index h = 0; h < shape.q_heads; ++h) sinks.push_back(static_cast<float>(random.normal()));
    if (random.seldom(3)) attention.sinks = sinks;
    if (random.seldom(4)) attention.scale = 0.7f;
    for (Index count = 4 + random.below(4); count > 0; --count) {
      const auto is = random.one_of(Step::Is::forward, Step::Is::forward, Step::Is::append,
                                    Step::Is::forward, Step::Is::cut, Step::Is::forward);
      steps.push_back({is, random.seldom(3) ? 1 : 1 + random.below(130)});
      len += steps.back().n;
    }
    q = random.tensor<float>(1, shape.q_heads, len, shape.head_dim);
    k = random.tensor<float>(1, shape.kv_heads, len, shape.head_dim);
    v = random.tensor<float>(1, shape.kv_heads, len, shape.v_dim);
    // Equal scores: the earlier position is taken, whichever rank has it.
    if (random.seldom(6)) k.setConstant(0.5f);
  }
  Draw(const Draw&) = delete;
  Draw& operator=(const Draw&) = delete;
};

struct Result {
  Tensor4<float> out;  // rows that no step writes are 0
  std::vector<Selection> selections;
};

template <class Layer>
Result run_steps(const Draw& draw, Layer& layer, ExecutorRef executor) {
  Result result{Tensor4<float>(1, draw.shape.q_heads, draw.len, draw.shape.v_dim), {}};
  result.out.setZero();
  Index begin = 0;
  for (const Step& step : draw.steps) {
    const auto part = [&](const Tensor4<float>& x) {
      return quoka::view_of(x).slice(begin, step.n);
    };
    if (step.is == Step::Is::append) {
      layer.append(part(draw.k), part(draw.v), executor);
    } else if (step.is == Step::Is::cut) {
      layer.truncate(layer.kv_len() * std::min<Index>(step.n, 100) / 100);
    } else {
      layer.forward(part(draw.q), part(draw.k), part(draw.v),
                    TensorView<float>(result.out).slice(begin, step.n), executor);
      result.selections.push_back(layer.selection());
    }
    begin += step.n;
  }
  return result;
}

// Within a product's error of the largest value of the two.
void expect_near(const Tensor4<float>& a, const Tensor4<float>& b) {
  double most = 0.0, worst = 0.0;
  for (Index i = 0; i < a.size(); ++i) {
    const double x = static_cast<double>(a.data()[i]), y = static_cast<double>(b.data()[i]);
    most = std::max({most, std::abs(x), std::abs(y)});
    worst = std::max(worst, std::abs(x - y));
    ASSERT_FALSE(std::isnan(x) || std::isnan(y));
  }
  EXPECT_LE(worst, most * float_error);
}

template <class Selector>
Result on_one_machine(const Draw& draw, const typename Selector::Options& options) {
  quoka::ChunkedPrefill<Selector> layer(draw.shape, options, draw.attention);
  return run_steps(draw, layer, SerialExecutor{});
}

TEST(ShardedPrefill, IsOneMachine) {
  for_each_draw(300, [](Random& random) {
    const Draw draw(random);
    const Result expected = draw.selection
                                ? on_one_machine<quoka::QuokaSelector>(draw, *draw.selection)
                                : on_one_machine<quoka::DenseSelector>(draw, {});
    std::vector<Result> results(static_cast<std::size_t>(draw.ranks));
    on_ranks(draw.ranks, [&](Communicator& ranks) {
      Result& result = results[static_cast<std::size_t>(ranks.rank())];
      ShardedPrefill layer(draw.shape, draw.selection, ranks, draw.attention, draw.block),
          another(draw.shape, draw.selection, ranks, draw.attention, draw.block);
      result = run_steps(draw, layer, SerialExecutor{});
      EXPECT_EQ(layer.cache().len(),
                ShardMap(draw.block, ranks.rank(), ranks.ranks()).local_len(layer.kv_len()));
      quoka::ThreadPool threads(3);
      const Result again = run_steps(draw, another, threads);
      EXPECT_EQ(again.selections, result.selections);
      EXPECT_TRUE(same_bits(again.out, result.out));
    });
    for (const Result& result : results) {
      EXPECT_EQ(result.selections, expected.selections);
      EXPECT_TRUE(same_bits(result.out, results[0].out));
      expect_near(result.out, expected.out);
    }
  });
}

TEST(ShardedPrefill, RefusesWhatNeedsAllKeysInOnePlace) {
  ThreadRanks ranks(1);
  auto communicator = ranks.communicator(0);
  const quoka::LayerShape shape{.q_heads = 4, .kv_heads = 2, .head_dim = 8};
  const auto refuses = [&](const std::optional<QuokaOptions>& selection,
                           std::initializer_list<Fragment> fragments,
                           const AttentionOptions& attention = {}, Index block = 64) {
    expect_refused([&] { ShardedPrefill(shape, selection, communicator, attention, block); },
                   fragments);
  };
  refuses({}, {"block", 0}, {}, 0);
  refuses({}, {"sliding_window", 9, 0}, {.sliding_window = 9});
  refuses({}, {"causal"}, {.causal = false});
  const std::vector<float> slopes(4, 0.5f);
  refuses({}, {"slopes"}, {.alibi_slopes = slopes});
  refuses({}, {"q_offset"}, {.q_offset = 0});
  refuses(QuokaOptions{.keep_first = -5}, {"keep_first", -5});
  refuses(QuokaOptions{.n_queries = 0}, {"n_queries", 0});
  expect_refused([] { ThreadRanks none(0); }, {"ranks", 0, 1});
  expect_refused([&] { (void)ranks.communicator(1); }, {"rank", 1, 0});
}

// A wrong call is refused by every rank, and none takes anything over.
TEST(ShardedPrefill, IsAsItWasAfterARefusal) {
  Random random(932);
  const auto k = random.tensor<float>(1, 2, 100, 8), v = random.tensor<float>(1, 2, 100, 8),
             few = random.tensor<float>(1, 2, 99, 8);
  for (const int rank : {0, 1}) {
    ThreadRanks ranks(2);
    auto communicator = ranks.communicator(rank);
    ShardedPrefill layer({.q_heads = 4, .kv_heads = 2, .head_dim = 8}, {}, communicator, {}, 10);
    layer.append(quoka::view_of(k), quoka::view_of(v));
    const auto refuses = [&](const std::function<void()>& call,
                             std::initializer_list<Fragment> fragments) {
      expect_refused(call, fragments);
      EXPECT_EQ(layer.kv_len(), 100);
      EXPECT_EQ(layer.cache().len(), 50);
    };
    refuses([&] { layer.append(quoka::view_of(k), quoka::view_of(few)); }, {"v", 99, 100});
    refuses([&] { layer.append(quoka::view_of(k).slice(0, 4), quoka::view_of(few)); },
            {"v", 99, 4});
    refuses([&] { layer.truncate(-1); }, {"truncate", -1, 0});
    refuses([&] { layer.truncate(101); }, {"truncate", 101, 100});
  }
}

// Counts what this rank sends.
class Counting final : public Communicator {
 public:
  explicit Counting(Communicator& ranks) : ranks_(ranks) {}
  int rank() const override { return ranks_.rank(); }
  int ranks() const override { return ranks_.ranks(); }
  void allgather(std::span<const std::byte> mine, std::span<std::byte> all) override {
    bytes += std::ssize(mine), ++messages;
    ranks_.allgather(mine, all);
  }
  Index bytes = 0, messages = 0;

 private:
  Communicator& ranks_;
};

TEST(ShardedPrefill, SendsWhatItsHeaderSays) {
  constexpr Index n = 37, budget = 31, v_dim = 12, q_heads = 10, kv_heads = 5;
  Random random(930);
  for (const Index past : {300, 900})
    for (const bool selects : {false, true})
      on_ranks(3, [&](Communicator& ranks) {
        Counting counting(ranks);
        std::optional<QuokaOptions> selection;
        if (selects) selection = QuokaOptions{.budget = Budget::keys(budget)};
        ShardedPrefill layer(
            {.q_heads = q_heads, .kv_heads = kv_heads, .head_dim = 8, .v_dim = v_dim}, selection,
            counting);
        Random own(931);
        const auto q = own.tensor<float>(1, q_heads, past, 8),
                   k = own.tensor<float>(1, kv_heads, past, 8),
                   v = own.tensor<float>(1, kv_heads, past, v_dim);
        layer.append(quoka::view_of(k), quoka::view_of(v));
        EXPECT_EQ(counting.bytes, 0);
        Tensor4<float> out(1, q_heads, n, v_dim);
        layer.forward(quoka::view_of(q).slice(0, n), quoka::view_of(k).slice(0, n),
                      quoka::view_of(v).slice(0, n), out);
        EXPECT_EQ(counting.bytes,
                  4 * q_heads * n * (v_dim + 1) + (selects ? 8 * kv_heads * budget : 0));
        EXPECT_EQ(counting.messages, selects ? 2 : 1);
      });
}

TEST(ShardMap, GivesEachTokenToOneRankAndPlace) {
  for (const int ranks : {1, 2, 3, 4, 7}) {
    std::vector<int> owners(61, 0);
    for (int rank = 0; rank < ranks; ++rank) {
      const ShardMap map(5, rank, ranks);
      std::vector<Index> own;
      for (Index i = 0; i < map.local_len(61); ++i) own.push_back(map.position(i));
      EXPECT_TRUE(std::is_sorted(own.begin(), own.end()));
      for (Index len = 0; len <= 61; ++len)
        EXPECT_EQ(map.local_len(len),
                  std::count_if(own.begin(), own.end(), [&](Index p) { return p < len; }));
      std::vector<Index> listed, expected;
      map.for_own(3, 50, [&](Index begin, Index n) {
        for (Index i = begin; i < begin + n; ++i) listed.push_back(i);
      });
      for (const Index p : own)
        if (p >= 3 && p < 50) expected.push_back(p);
      EXPECT_EQ(listed, expected);
      for (std::size_t i = 0; i < own.size(); ++i) {
        ++owners[static_cast<std::size_t>(own[i])];
        EXPECT_TRUE(map.is_own(own[i]));
        EXPECT_EQ(map.place(own[i]), static_cast<Index>(i));
      }
    }
    EXPECT_EQ(owners, std::vector<int>(61, 1));
  }
}

}  // namespace
