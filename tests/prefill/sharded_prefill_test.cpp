// A layer over several ranks, which are threads here: the Selections of one machine to the bit, its
// outputs up to rounding, what is sent, and faults that end on all ranks.

#include <quoka/distributed/sharded_prefill.hpp>
#include <quoka/distributed/thread_communicator.hpp>
#include <quoka/packing/byte_formats.hpp>
#include <quoka/prefill/chunked_prefill.hpp>
#include <quoka/methods/all.hpp>

#include "support/attention_fixtures.hpp"
#include "support/selector_names.hpp"

#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <thread>

namespace {

using namespace quoka_test;
using quoka::AttentionOptions;
using quoka::Budget;
using quoka::ChunkedPrefill;
using quoka::Domain;
using quoka::LayerShape;
using quoka::QuokaOptions;
using quoka::QuokaSelector;
using quoka::RankError;
using quoka::ShardedPrefill;
using quoka::ShardLayout;
using quoka::ShardMap;
using quoka::ThreadRanks;
using quoka::TopKOptions;
using quoka::detail::Rounds;

// ---- ranks --------------------------------------------------------------------------------------

constexpr std::chrono::seconds limit(60);  // far beyond any of these calls

// f(communicator) on every rank; returns what each of them threw. Who waits longer than the limit fails.
std::vector<std::exception_ptr> on_ranks(int count,
                                         std::function<void(ThreadRanks::Communicator)> f,
                                         std::chrono::milliseconds wait = limit) {
  ThreadRanks ranks(count, wait);
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(count));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < count; ++rank)
    threads.emplace_back([&, rank] {
      try {
        f(ranks.communicator(rank));
      } catch (...) {
        errors[static_cast<std::size_t>(rank)] = std::current_exception();
      }
    });
  for (std::thread& thread : threads) thread.join();
  return errors;
}

std::string what(const std::exception_ptr& error) {
  if (error == nullptr) return "";
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    return e.what();
  }
}

void expect_no_errors(const std::vector<std::exception_ptr>& errors) {
  for (const std::exception_ptr& error : errors) EXPECT_EQ(what(error), "");
}

// All threw RankError, with this rank and one text that holds the fragment.
void expect_rank_error(const std::vector<std::exception_ptr>& errors, int rank,
                       const std::string& fragment) {
  for (const std::exception_ptr& error : errors) {
    ASSERT_NE(error, nullptr) << "a rank did not throw";
    EXPECT_EQ(what(error), what(errors[0]));
    EXPECT_NE(what(error).find(fragment), std::string::npos) << what(error);
    EXPECT_NE(what(error).find("rank " + std::to_string(rank)), std::string::npos) << what(error);
    try {
      std::rethrow_exception(error);
    } catch (const RankError& e) {
      EXPECT_EQ(e.rank(), rank);
    } catch (...) {
      ADD_FAILURE() << "not a RankError: " << what(error);
    }
  }
}

// ---- a prompt, on one machine and on several ------------------------------------------------------

struct Shape {
  Index batch = 1, q_heads = 6, kv_heads = 2, head_dim = 20, v_dim = 20;
  std::vector<Index> chunks = {37, 37, 37, 1, 53, 1, 1};
  const quoka::Format *k_format = nullptr, *v_format = nullptr;  // of the cache
  std::vector<float> k_scales = {}, v_scales = {};

  Index len() const {
    Index sum = 0;
    for (const Index n : chunks) sum += n;
    return sum;
  }
  LayerShape layer() const {
    return {q_heads, kv_heads, head_dim, v_dim, batch, k_format, v_format, k_scales, v_scales};
  }
};

template <class T>
struct Prompt {
  Prompt(Random& random, const Shape& shape)
      : q(random.tensor<T>(shape.batch, shape.q_heads, shape.len(), shape.head_dim)),
        k(random.tensor<T>(shape.batch, shape.kv_heads, shape.len(), shape.head_dim)),
        v(random.tensor<T>(shape.batch, shape.kv_heads, shape.len(), shape.v_dim)) {}
  Tensor4<T> q, k, v;
};

template <class T>
struct Result {
  explicit Result(const Shape& shape)
      : out(shape.batch, shape.q_heads, shape.len(), shape.v_dim),
        lse(shape.batch, shape.q_heads, shape.len()) {}
  Tensor4<T> out;
  Tensor3<float> lse;
  std::vector<Selection> selections;
};

template <class T, class Layer>
void run_chunks(Layer& layer, const Shape& shape, const Prompt<T>& prompt, Result<T>& result,
                ExecutorRef executor = SerialExecutor{}) {
  Index begin = 0;
  for (const Index n : shape.chunks) {
    const auto part = [&](const Tensor4<T>& x) { return quoka::view_of(x).slice(begin, n); };
    layer.forward(part(prompt.q), part(prompt.k), part(prompt.v),
                  {TensorView<T>(result.out).slice(begin, n),
                   TensorView<float, 3>(result.lse).slice(begin, n)},
                  executor);
    result.selections.push_back(layer.selection());
    begin += n;
  }
}

// Within a float's or a product's error of the largest value of the two; infinities of a log-sum-exp alike.
template <class A, class B>
void expect_near(const A& a, const B& b) {
  double most = 0.0, worst = 0.0;
  for (Index i = 0; i < a.size(); ++i) {
    const double x = static_cast<double>(a.data()[i]), y = static_cast<double>(b.data()[i]);
    if (x == y) continue;
    most = std::max({most, std::abs(x), std::abs(y)});
    worst = std::max(worst, std::abs(x - y));
    ASSERT_FALSE(std::isnan(x) || std::isnan(y));
  }
  EXPECT_LE(worst, most * float_error);
}

// ---- every selector that can be sharded -----------------------------------------------------------

template <class Kept, class... Entries>
struct ShardableOf {
  using Types = Kept;
};
template <class... Kept, class Entry, class... Rest>
struct ShardableOf<::testing::Types<Kept...>, Entry, Rest...> {
  using Types = typename std::conditional_t<
      quoka::ShardableSelector<typename Entry::Type>,
      ShardableOf<::testing::Types<Kept..., typename Entry::Type>, Rest...>,
      ShardableOf<::testing::Types<Kept...>, Rest...>>::Types;
};
template <class List>
struct TypesOf;
template <class... Entries>
struct TypesOf<quoka::SelectorList<Entries...>> {
  using Types = typename ShardableOf<::testing::Types<>, Entries...>::Types;
};
using Selectors = TypesOf<quoka::AllSelectors>::Types;

std::shared_ptr<const quoka::LokiCalibration> calibration(Index kv_heads, Index head_dim) {
  Random random(900);
  const auto keys = random.tensor<float>(1, kv_heads, 4 * head_dim, head_dim);
  quoka::LokiFit fit(kv_heads, head_dim);
  fit.add(quoka::view_of(keys));
  return std::make_shared<const quoka::LokiCalibration>(fit.finish());
}

// All else by default, but for what would make the method exact at these sizes.
template <class S>
typename S::Options with_budget([[maybe_unused]] Budget budget,
                                [[maybe_unused]] const Shape& shape = {}) {
  typename S::Options options{};
  if constexpr (requires { options.budget = budget; }) options.budget = budget;
  if constexpr (requires { options.rank = 7; }) options.rank = 7;
  if constexpr (requires { options.calibration = nullptr; })
    options.calibration = calibration(shape.kv_heads, shape.head_dim);
  // Shards score in float: what one machine does without a sketch.
  if constexpr (requires { options.sketch; })
    if (!std::is_same_v<S, QuokaSelector>) options.sketch = quoka::Sketch::off;
  return options;
}

std::vector<QuokaOptions> quoka_options(Budget budget) {
  QuokaOptions balanced = QuokaOptions::balanced(budget);
  balanced.sketch = quoka::Sketch::off;
  QuokaOptions softmax_max = balanced;
  softmax_max.aggregation = quoka::Aggregation::max;
  return {
      {.budget = budget, .sketch = quoka::Sketch::on},
      {.budget = budget, .sketch = quoka::Sketch::off},
      {.budget = budget, .top_k = {.keep_first = 3, .keep_last = 9}, .sketch = quoka::Sketch::on},
      {.budget = budget, .aggregation = quoka::Aggregation::mean},
      {.budget = budget, .group_mode = quoka::GroupMode::per_head},
      balanced,
      softmax_max};
}

// ---- a history on one machine and on several, drawn at random ---------------------------------------

struct Step {
  enum class Is { forward, append, prompt, cut } is;
  Index n = 0;  // tokens; of cut: those that are left, in percent
};

// A call of every kind over one prompt, whose tokens are used up in order.
template <class S>
struct Draw {
  Shape shape;
  typename S::Options options;
  ShardLayout layout;
  int ranks;
  AttentionOptions attention;
  bool finite = true;
  std::vector<float> sinks, factors;
  std::vector<Step> steps;

  explicit Draw(Random& random) {
    const auto seldom = [&](Index n) { return random.below(n) == 0; };
    shape.batch = seldom(3) ? 2 : 1;
    shape.kv_heads = 1 + random.below(5);
    shape.q_heads = shape.kv_heads * (1 + random.below(4));
    shape.head_dim = 1 + random.below(24), shape.v_dim = 1 + random.below(24);
    ranks = static_cast<int>(1 + random.below(4));
    choose_options(random);
    Index keys = 1;
    if constexpr (requires(const S& s) { s.scorer(); }) keys = S(options).scorer().shard_keys();
    const Index block = keys > 1 ? keys : 7 + random.below(60);
    layout = seldom(2) ? ShardLayout::round_robin(block) : ShardLayout::contiguous(2 * block);
    for (Index h = 0; h < shape.q_heads; ++h)
      sinks.push_back(static_cast<float>(random.normal())), factors.push_back(1.0f);
    if (seldom(3)) attention.sink_logits = sinks;
    if (seldom(4)) attention.mask_factors = factors;  // without a mask they are factors of nothing
    if (seldom(4)) attention.scale = 0.7f;
    if (seldom(4) && takes_softcap()) attention.softcap = 3.0f;
    if (seldom(6)) {
      shape.k_format = &quoka::i8_channel_format(), shape.v_format = &quoka::e4m3_format();
      for (Index c = 0; c < shape.head_dim; ++c)
        shape.k_scales.push_back(0.02f + 0.001f * static_cast<float>(c));
      shape.v_scales.assign(uz(shape.kv_heads), 0.01f);
      // Other arithmetics round a chunk of floats as they do a cache of 8 bits that it meets in one call.
      attention.arithmetic = quoka::Arithmetic::single;
    } else if (seldom(4)) {
      attention.arithmetic = quoka::Arithmetic::bfloat16_x3;
    }
    finite = !seldom(8);
    for (Index count = 4 + random.below(4); count > 0; --count) {
      const Index kind = random.below(8);
      steps.push_back({kind == 0   ? Step::Is::append
                       : kind == 1 ? Step::Is::prompt
                       : kind == 2 ? Step::Is::cut
                                   : Step::Is::forward,
                       seldom(3) ? 1 : 1 + random.below(130)});
    }
    shape.chunks.clear();
    for (const Step& step : steps) shape.chunks.push_back(step.n);
  }
  // A prompt in the chunks of its shape.
  Draw(const Shape& of, const typename S::Options& by, const ShardLayout& where, int on)
      : shape(of), options(by), layout(where), ranks(on) {
    for (const Index n : shape.chunks) steps.push_back({Step::Is::forward, n});
  }
  Draw(const Draw&) = delete;
  Draw& operator=(const Draw&) = delete;

  // Shards score the softmax domain in float, whatever is asked for.
  typename S::Options on_one_machine() const {
    typename S::Options of = options;
    if constexpr (std::is_same_v<S, QuokaSelector>)
      if (of.domain == Domain::softmax) of.sketch = quoka::Sketch::off;
    return of;
  }
  static constexpr bool takes_softcap() {
    return std::is_same_v<S, QuokaSelector> || std::is_same_v<S, quoka::DenseSelector>;
  }
  void choose_options(Random& random) {
    const Index sizes[] = {0, 1, 126, 163, 1 + random.below(60), 1 + random.below(60)};
    const Budget budget = random.below(4) == 0 ? Budget::share(0.05 + 0.9 * random.uniform())
                                               : Budget::keys(sizes[random.below(6)]);
    if constexpr (std::is_same_v<S, QuokaSelector>) {
      const std::vector<QuokaOptions> all = quoka_options(budget);
      options = all[uz(random.below(std::ssize(all)))];
      options.n_queries = 1 + random.below(20);
      if (random.below(3) == 0) options.sketch = quoka::Sketch::on;
    } else {
      options = with_budget<S>(budget, shape);
    }
    if constexpr (requires { options.top_k; })
      if (random.below(3) == 0)
        options.top_k = {1 + random.below(7), random.below(30), random.below(9)};
  }
  std::string describe() const {
    return std::to_string(ranks) + " ranks, " +
           (layout.is_contiguous ? "contiguous " : "round robin ") + std::to_string(layout.block) +
           ", batch " + std::to_string(shape.batch) + ", heads " + std::to_string(shape.q_heads) +
           "/" + std::to_string(shape.kv_heads) + (finite ? "" : ", not finite");
  }
};

// Rows that no step writes are 0.
template <class S, class Layer>
Result<float> run_steps(const Draw<S>& draw, Layer& layer, const Prompt<float>& prompt,
                        ExecutorRef executor = SerialExecutor{}) {
  Result<float> result(draw.shape);
  result.out.setZero(), result.lse.setZero();
  Index begin = 0;
  for (const Step& step : draw.steps) {
    const auto part = [&](const Tensor4<float>& x) {
      return quoka::view_of(x).slice(begin, step.n);
    };
    const auto out = TensorView<float>(result.out).slice(begin, step.n);
    if (step.is == Step::Is::append)
      layer.append(part(prompt.k), part(prompt.v), executor);
    else if (step.is == Step::Is::prompt)
      layer.prefill(part(prompt.q), part(prompt.k), part(prompt.v), out, 40, executor);
    else if (step.is == Step::Is::cut)
      layer.truncate(layer.kv_len() * std::min<Index>(step.n, 100) / 100);
    else
      layer.forward(part(prompt.q), part(prompt.k), part(prompt.v),
                    {out, TensorView<float, 3>(result.lse).slice(begin, step.n)}, executor);
    if (step.is == Step::Is::forward || step.is == Step::Is::prompt)
      result.selections.push_back(layer.selection());
    begin += step.n;
  }
  return result;
}

// The selections of one machine to the bit, its outputs up to rounding, which all ranks have; and the same bits
// by several threads as by one.
template <class S>
void expect_as_one_machine(const Draw<S>& draw, Prompt<float> prompt) {
  SCOPED_TRACE(draw.describe());
  if (!draw.finite) {
    for (Index i = 0; i < prompt.k.dimension(2); i += 5) prompt.k(0, 0, i, 0) = not_a_number;
    for (Index i = 0; i < prompt.q.dimension(2); i += 7) prompt.q(0, 0, i, 0) = infinity;
    for (Index i = 0; i < prompt.k.dimension(2); i += 2)
      for (Index c = 0; c < draw.shape.head_dim; ++c)
        prompt.k(0, draw.shape.kv_heads - 1, i, c) = 0.0f;  // ties
  }
  ChunkedPrefill<S> alone(draw.shape.layer(), draw.on_one_machine(), draw.attention);
  const Result<float> expected = run_steps(draw, alone, prompt);
  std::vector<Result<float>> results(static_cast<std::size_t>(draw.ranks),
                                     Result<float>(draw.shape));
  expect_no_errors(on_ranks(draw.ranks, [&](auto communicator) {
    Result<float>& result = results[static_cast<std::size_t>(communicator.rank())];
    ShardedPrefill<S> layer(draw.shape.layer(), draw.options, communicator, draw.layout,
                            draw.attention),
        another(draw.shape.layer(), draw.options, communicator, draw.layout, draw.attention);
    result = run_steps(draw, layer, prompt);
    EXPECT_EQ(layer.kv_len(), alone.kv_len());
    EXPECT_EQ(layer.cache().len(), layer.shard().local_len(alone.kv_len()));
    quoka::ThreadPool threads(3);
    const Result<float> again = run_steps(draw, another, prompt, threads);
    EXPECT_EQ(again.selections, result.selections);
    EXPECT_TRUE(same_bits(again.out, result.out));
    EXPECT_TRUE(
        same_bits(TensorView<const float, 3>(again.lse), TensorView<const float, 3>(result.lse)));
  }));
  for (const Result<float>& result : results) {
    EXPECT_EQ(result.selections, expected.selections);
    EXPECT_TRUE(same_bits(result.out, results[0].out));
    if (draw.finite) {
      expect_near(result.out, expected.out);
      expect_near(result.lse, expected.lse);
    }
    if (draw.ranks == 1 && draw.finite) {
      EXPECT_TRUE(same_bits(result.out, expected.out));
    }
  }
}

template <class S>
class Sharded : public ::testing::Test {};
TYPED_TEST_SUITE(Sharded, Selectors, SelectorNames);

TYPED_TEST(Sharded, IsOneMachine) {
  const int rounds = std::is_same_v<TypeParam, QuokaSelector> ? 300 : 50;
  for (int round = 0; round < rounds && !::testing::Test::HasFailure(); ++round) {
    Random random(static_cast<std::uint64_t>(9000 + round));
    const Draw<TypeParam> draw(random);
    expect_as_one_machine<TypeParam>(draw, Prompt<float>(random, draw.shape));
  }
}

// ---- QuoKA's options ------------------------------------------------------------------------------

TEST(ShardedQuoka, KeepsTheSketchOfItsOwnKeys) {
  Random random(915);
  Shape shape;
  shape.chunks = {130};
  const Prompt<float> prompt(random, shape);
  expect_no_errors(on_ranks(2, [&](auto communicator) {
    ShardedPrefill<QuokaSelector> layer(shape.layer(), {.sketch = quoka::Sketch::on}, communicator,
                                        ShardLayout::round_robin(130));
    Result<float> result(shape);
    run_chunks(layer, shape, prompt, result);
    EXPECT_EQ(layer.kept_bytes() > 0, communicator.rank() == 0);
    QuokaOptions in_float = QuokaOptions::balanced(Budget::keys(31));
    in_float.sketch = quoka::Sketch::on;
    ShardedPrefill<QuokaSelector> without(shape.layer(), in_float, communicator);
    run_chunks(without, shape, prompt, result);
    EXPECT_EQ(without.kept_bytes(), 0) << "no sketch that nothing looks at";
  }));
}

// Ranks propose what the last chunk took of each, and a little more: no key is lost when all of the best lie
// on one rank from one chunk to the next, or where a rank has fewer keys than that.
TEST(ShardedQuoka, BestKeysThatMoveToOneRankAreAllFound) {
  constexpr Index chunk = 64, chunks = 12, budget = 128;
  Random random(916);
  Shape shape;
  shape.q_heads = shape.kv_heads = 2;
  shape.chunks.assign(static_cast<std::size_t>(chunks), chunk);
  Prompt<float> prompt(random, shape);
  // Of one KV head, the keys of even chunks, which rank 0 of 2 keeps, answer the queries of chunk 9; to all
  // other queries they are as those of odd chunks.
  for (Index i = 0; i < chunks * chunk; ++i) {
    const Index at = i / chunk;
    prompt.k(0, 1, i, at % 2) += 3.0f;
    prompt.q(0, 1, i, 0) = at == 9 ? 20.0f : 0.0f;
    prompt.q(0, 1, i, 1) = 0.0f;
  }
  for (const Index sinks : {0, 5}) {
    const QuokaOptions options{.budget = Budget::keys(budget), .top_k = {.keep_first = sinks}};
    for (const ShardLayout& layout :
         {ShardLayout::round_robin(chunk), ShardLayout::contiguous(700)})
      expect_as_one_machine<QuokaSelector>({shape, options, layout, 2}, prompt);
    // What each chunk asked for.
    expect_no_errors(on_ranks(2, [&](auto communicator) {
      ShardedPrefill<QuokaSelector> layer(shape.layer(), options, communicator,
                                          ShardLayout::round_robin(chunk));
      const Index all = budget - sinks;
      for (Index i = 0; i < chunks; ++i) {
        const auto part = [&](const Tensor4<float>& x) {
          return quoka::view_of(x).slice(i * chunk, chunk);
        };
        Tensor4<float> out(1, 2, chunk, shape.v_dim);
        layer.forward(part(prompt.q), part(prompt.k), part(prompt.v), {TensorView<float>(out)});
        if (i == 9) {
          EXPECT_EQ(layer.proposed(), all);
        } else if (i > 3 && i != 10) {
          EXPECT_LT(layer.proposed(), all);
          EXPECT_GE(layer.proposed(), all / 2);
        }
        if (i == 7) layer.truncate(layer.kv_len() - 1);  // knows nothing any more
        if (i == 7) {
          layer.forward(part(prompt.q).slice(chunk - 1, 1), part(prompt.k).slice(chunk - 1, 1),
                        part(prompt.v).slice(chunk - 1, 1), {TensorView<float>(out).slice(0, 1)});
          EXPECT_EQ(layer.proposed(), all);
        }
      }
    }));
  }
}

TEST(ShardedSoftmax, OfSeveralGroupsOfPanelsHasTheBitsOfOneMachine) {  // the order of sums
  Random random(912);
  Shape shape;
  shape.q_heads = 24, shape.kv_heads = 1, shape.head_dim = shape.v_dim = 3;
  shape.chunks = {250, 250};
  const Prompt<float> prompt(random, shape);
  const quoka::OracleOptions options{.budget = Budget::keys(31)};
  expect_as_one_machine<quoka::OracleSelector>(
      {shape, options, ShardLayout::round_robin(quoka::softmax_shard_keys()), 2}, prompt);
}

// A shard of keys [first, ...) of kv_len.
class TestShard final : public quoka::KeyShard {
 public:
  TestShard(Index kv_len, Index first, const ThreadRanks::Communicator& communicator)
      : kv_len_(kv_len), first_(first), communicator_(communicator) {}
  Index kv_len() const override { return kv_len_; }
  Index position(Index i) const override { return first_ + i; }
  void maximum(std::span<float> x) const override { communicator_.allreduce_max(x); }
  void sum(std::span<std::int64_t> x) const override { communicator_.allreduce_sum(x); }

 private:
  Index kv_len_, first_;
  const ThreadRanks::Communicator& communicator_;
};

// By the oracle, which all softmax_scores() of the library is like.
void expect_scores_of_shards_have_the_bits_of_all(const Shape& shape, Index kv_len, Index cut,
                                                  quoka::Aggregation over) {
  Random random(914);
  Prompt<float> prompt(random, shape);
  prompt.k(0, 0, 3, 1) = not_a_number;
  const Rows q = quoka::view_of(prompt.q).slice(kv_len, shape.len() - kv_len);
  const quoka::OracleScorer scorer({.aggregation = over});
  const auto score = [&](Index first, Index n, const quoka::KeyShard* shard) {
    quoka::SelectorInput input{q, quoka::view_of(prompt.k).slice(first, n), LogitOptions{}};
    input.shard = shard;
    Tensor3<float> scores(1, shape.kv_heads, n);
    quoka::QueryScoreState state;
    scorer.score(input, state, scores, SerialExecutor{});
    return scores;
  };
  const Tensor3<float> all = score(0, kv_len, nullptr);
  expect_no_errors(on_ranks(2, [&](auto communicator) {
    const Index first = communicator.rank() == 0 ? 0 : cut,
                n = communicator.rank() == 0 ? cut : kv_len - cut;
    const TestShard shard(kv_len, first, communicator);
    const Tensor3<float> scores = score(first, n, &shard);
    EXPECT_TRUE(same_bits(TensorView<const float, 3>(scores),
                          TensorView<const float, 3>(all).slice(first, n)));
  }));
}

TEST(ShardedSoftmax, ScoresHaveTheBitsOfOneMachine) {
  Shape shape;
  const Index block = quoka::softmax_shard_keys();
  shape.chunks = {5 * block + 3, 37};
  for (const quoka::Aggregation over : {quoka::Aggregation::mean, quoka::Aggregation::max})
    for (const Index cut : {Index{0}, block, 4 * block, 5 * block})
      expect_scores_of_shards_have_the_bits_of_all(shape, shape.chunks[0], cut, over);
}

// All keys' weights take two groups of panels, a shard's would fit one.
TEST(ShardedSoftmax, ScoresOfManyKeysHaveTheBitsOfOneMachine) {
  Shape shape;
  shape.q_heads = 4, shape.kv_heads = 1, shape.head_dim = shape.v_dim = 3;
  constexpr Index n = 16 * quoka::tuning::panel_rows / 4,
                  past = quoka::tuning::mass_weight_bytes / (n * 4 * Index{sizeof(float)}) + 777;
  shape.chunks = {past, n};
  expect_scores_of_shards_have_the_bits_of_all(shape, past, 40 * quoka::softmax_shard_keys(),
                                               quoka::Aggregation::mean);
}

// ---- where tokens lie -------------------------------------------------------------------------------

TEST(ShardMapOf, AnyLayoutGivesEachTokenToOneRankAndPlace) {
  for (const ShardLayout& layout : {ShardLayout::round_robin(5), ShardLayout::contiguous(7)})
    for (const int ranks : {1, 2, 3, 4, 7}) {
      std::vector<int> owners(61, 0);
      for (int rank = 0; rank < ranks; ++rank) {
        const ShardMap map(layout, 1, rank, ranks);
        std::vector<Index> own;
        for (Index i = 0; i < map.local_len(61); ++i) own.push_back(map.position(i));
        for (Index len = 0; len <= 61; ++len) {
          const auto below =
              std::count_if(own.begin(), own.end(), [&](Index p) { return p < len; });
          EXPECT_EQ(map.local_len(len), below);
        }
        std::vector<Index> listed;
        map.for_own(3, 50, [&](Index begin, Index n) {
          for (Index i = begin; i < begin + n; ++i) listed.push_back(i);
        });
        std::vector<Index> expected;
        for (const Index p : own)
          if (p >= 3 && p < 50) expected.push_back(p);
        EXPECT_EQ(listed, expected);
        for (std::size_t i = 0; i < own.size(); ++i) {
          ++owners[static_cast<std::size_t>(own[i])];
          const ShardMap::Block block = map.block_at(own[i]);
          EXPECT_TRUE(block.is_own);
          EXPECT_EQ(own[i] - block.shift, static_cast<Index>(i));
        }
        EXPECT_TRUE(std::is_sorted(own.begin(), own.end()));
      }
      EXPECT_EQ(owners, std::vector<int>(61, 1));
    }
}

// ---- what is sent -----------------------------------------------------------------------------------

// Counts what this rank sends.
struct Counting {
  ThreadRanks::Communicator communicator;
  Index bytes = 0, messages = 0;

  int rank() const { return communicator.rank(); }
  int ranks() const { return communicator.ranks(); }
  void add(std::size_t n) { bytes += static_cast<Index>(n), ++messages; }
  void allgather(std::span<const std::byte> mine, std::span<std::byte> all) {
    add(mine.size());
    communicator.allgather(mine, all);
  }
  void allreduce_max(std::span<float> x) { add(x.size_bytes()), communicator.allreduce_max(x); }
  void allreduce_sum(std::span<std::int64_t> x) {
    add(x.size_bytes()), communicator.allreduce_sum(x);
  }
  void broadcast(std::span<std::byte> x, int root) {
    add(rank() == root ? x.size() : 0), communicator.broadcast(x, root);
  }
  void sendrecv(std::span<const std::byte> sent, int to, std::span<std::byte> got, int from) {
    add(sent.size()), communicator.sendrecv(sent, to, got, from);
  }
};

struct Sent {
  Index bytes, messages;
  bool operator==(const Sent&) const = default;
};

// By a rank for one chunk of n tokens after `past` cached ones.
Sent sent(const Shape& shape, const QuokaOptions& options, int ranks, int rank, Index past,
          Index n) {
  Random random(930);
  Shape rest = shape;
  rest.chunks = {past + n};
  const Prompt<float> prompt(random, rest);
  Sent result{};
  expect_no_errors(on_ranks(ranks, [&](auto communicator) {
    Counting counting{communicator};
    ShardedPrefill<QuokaSelector> layer(shape.layer(), options, counting);
    layer.append(quoka::view_of(prompt.k).slice(0, past), quoka::view_of(prompt.v).slice(0, past));
    counting.bytes = counting.messages = 0;
    Tensor4<float> out(shape.batch, shape.q_heads, n, shape.v_dim);
    layer.forward(quoka::view_of(prompt.q).slice(past, n), quoka::view_of(prompt.k).slice(past, n),
                  quoka::view_of(prompt.v).slice(past, n), out);
    if (counting.rank() == rank) result = {counting.bytes, counting.messages};
  }));
  return result;
}

TEST(Sent, IsWhatTheHeaderSays) {
  Shape shape;
  shape.batch = 2, shape.kv_heads = 5, shape.q_heads = 10, shape.v_dim = 12;
  constexpr Index n = 37, k = 31, past = 700;
  for (const int ranks : {2, 3, 4, 7, 11}) {
    for (int rank = 0; rank < ranks; ++rank) {
      const Index ranges = ranks == 11 ? 2 : 1, r = ranges == 2 ? 19 : n;  // of a head's rows
      const Index c = quoka::ceil_div(5, ranks),
                  heads =
                      std::clamp<Index>(5 - rank / ranges * c, 0, c) * 2,  // query heads at home
          rows = rank % ranges == 0 ? r : n - r;
      const Index partial = 4 * (10 * n - heads * rows) * 2 * (12 + 1),
                  merged = 4 * (c * 2) * r * 2 * (12 + 1);
      const Index candidates = 8 * 2 * 5 * k;
      EXPECT_EQ(sent(shape, {.budget = Budget::keys(k)}, ranks, rank, past, n),
                (Sent{candidates + partial + merged + 5 * Rounds::header_bytes,
                      1 + (ranks - 1) + 1 + 5}));
      EXPECT_EQ(
          sent(shape, {.budget = Budget::keys(past)}, ranks, rank, past, n),  // nothing to select
          (Sent{partial + merged + 4 * Rounds::header_bytes, (ranks - 1) + 1 + 4}));
    }
  }
  QuokaOptions options = QuokaOptions::balanced(Budget::keys(k));
  options.top_k.window = 1;
  const Index rows = quoka::round_up(options.n_queries.per_head(2) * 2, quoka::tuning::panel_rows);
  const Index plain = sent(shape, {.budget = Budget::keys(k)}, 2, 1, past, n).bytes;
  EXPECT_EQ(sent(shape, options, 2, 1, past, n),
            (Sent{plain + 12 * 2 * 5 * rows + 2 * Rounds::header_bytes, 1 + 1 + 1 + 5 + 4}));
  options = {.budget = Budget::keys(k), .top_k = {.window = 4}};
  EXPECT_EQ(
      sent(shape, options, 2, 1, past, n),  // 700 keys in blocks of 64: at most 6 runs on each
      (Sent{plain + 4 * 2 * 5 * 3 * 6 + Rounds::header_bytes, 1 + 1 + 1 + 5 + 2}));
}

TEST(Sent, DoesNotDependOnTheLengthOfTheCache) {
  Shape shape;
  shape.q_heads = 2, shape.kv_heads = 1, shape.head_dim = shape.v_dim = 8;
  const QuokaOptions options{.budget = Budget::keys(512)};
  const Sent at_8k = sent(shape, options, 2, 0, 8192, 128);
  EXPECT_EQ(sent(shape, options, 2, 0, 131072, 128), at_8k);
  EXPECT_EQ(sent(shape, options, 2, 0, 32768, 128), at_8k);
}

// ---- faults -------------------------------------------------------------------------------------------

// Throws in the n-th run of tasks from now on.
struct FailingExecutor {
  mutable Index runs_left;
  static constexpr int workers() { return 1; }
  template <class F>
  void run(Index tasks, F&& f) const {
    if (runs_left-- == 0) throw std::runtime_error("a worker went away");
    for (Index task = 0; task < tasks; ++task) f(task, 0);
  }
};

template <class S>
void expect_faults_leave_all_as_it_was(const typename S::Options& options) {
  Random random(940);
  Shape shape;
  shape.chunks = {130, 129, 37};
  const Prompt<float> prompt(random, shape);
  Result<float> expected(shape);
  expect_no_errors(on_ranks(3, [&](auto communicator) {
    ShardedPrefill<S> layer(shape.layer(), options, communicator);
    Result<float> result(shape);
    run_chunks(layer, shape, prompt, result);
    if (communicator.rank() == 0) expected = result;
  }));
  int faults = 0;
  for (Index runs = 0;; ++runs) {
    bool threw = false;
    const int bad = static_cast<int>(runs % 3);
    std::vector<std::exception_ptr> inner(3);
    expect_no_errors(on_ranks(3, [&](auto communicator) {
      ShardedPrefill<S> layer(shape.layer(), options, communicator);
      const int rank = communicator.rank();
      Result<float> result(shape);
      Shape begin = shape, rest = shape;
      begin.chunks = {130}, rest.chunks = {129, 37};
      run_chunks(layer, begin, prompt, result);
      const auto part = [&](auto& x) { return quoka::view_of(x).slice(130, 129); };
      const auto forward = [&](ExecutorRef executor) {
        layer.forward(part(prompt.q), part(prompt.k), part(prompt.v),
                      TensorView<float>(result.out).slice(130, 129), executor);
      };
      const Index before = layer.cache().len();
      try {
        if (rank == bad)
          forward(FailingExecutor{runs});
        else
          forward(SerialExecutor{});
      } catch (const RankError&) {
        inner[static_cast<std::size_t>(rank)] = std::current_exception();
      }
      if (inner[static_cast<std::size_t>(rank)] == nullptr) return;  // past the last run
      if (rank == 0) threw = true;
      EXPECT_EQ(layer.kv_len(), 130);
      EXPECT_EQ(layer.cache().len(), before);
      forward(SerialExecutor{});  // as if it had never been
      EXPECT_EQ(layer.selection(), expected.selections[1]);
      for (Index head = 0; head < 6; ++head)
        for (Index i = 130; i < 259; ++i)
          for (Index c = 0; c < 20; ++c)
            ASSERT_EQ(result.out(0, head, i, c), expected.out(0, head, i, c));
    }));
    if (!threw) break;
    ++faults;
    expect_rank_error(inner, bad, "a worker went away");
  }
  EXPECT_GE(faults, 5);
}
TEST(Fault, OfOneRankAnywhereEndsTheCallOnAllAndLeavesTheCaches) {
  QuokaOptions softmax = QuokaOptions::balanced(quoka::Budget::keys(31));
  softmax.top_k.window = 1;
  for (const QuokaOptions& options :
       {QuokaOptions{.budget = quoka::Budget::keys(31)}, softmax,
        QuokaOptions{.budget = quoka::Budget::keys(31), .top_k = {.window = 3}}})
    expect_faults_leave_all_as_it_was<QuokaSelector>(options);
}
// Whatever a method keeps of a rank's keys.
TEST(Fault, LeavesWhatAMethodKeeps) {
  expect_faults_leave_all_as_it_was<quoka::SampleAttentionSelector>(
      {.budget = quoka::Budget::keys(31)});
  expect_faults_leave_all_as_it_was<quoka::SparqSelector>(
      {.budget = quoka::Budget::keys(31), .rank = 7});
  expect_faults_leave_all_as_it_was<quoka::QuestSelector>({.budget = quoka::Budget::keys(31)});
  Random random(942);
  const Shape shape;
  quoka::LokiFit fit(shape.layer().kv_heads, shape.layer().head_dim);
  const auto keys = random.tensor<float>(1, shape.layer().kv_heads, 64, shape.layer().head_dim);
  fit.add(keys);
  expect_faults_leave_all_as_it_was<quoka::LokiSelector>(
      {.budget = quoka::Budget::keys(31),
       .rank = 7,
       .calibration = std::make_shared<const quoka::LokiCalibration>(fit.finish())});
}

TEST(Fault, OfSizesThatDifferNamesTheRankAndBothNumbers) {
  Random random(941);
  Shape shape;
  shape.chunks = {200};
  const Prompt<float> prompt(random, shape);
  const auto forward = [&](auto& layer, Index begin, Index n) {
    Tensor4<float> out(1, 6, n, 20);
    const auto part = [&](const Tensor4<float>& x) { return quoka::view_of(x).slice(begin, n); };
    layer.forward(part(prompt.q), part(prompt.k), part(prompt.v), out);
  };
  const auto differs = [&](std::function<void(int, ShardedPrefill<QuokaSelector>&)> f, int rank,
                           const std::string& fragment) {
    expect_rank_error(on_ranks(3,
                               [&](auto communicator) {
                                 ShardedPrefill<QuokaSelector> layer(
                                     shape.layer(), {.budget = Budget::keys(7)}, communicator,
                                     ShardLayout::round_robin(13));
                                 forward(layer, 0, 60);
                                 f(communicator.rank(), layer);
                               }),
                      rank, fragment);
  };
  differs([&](int rank, auto& layer) { forward(layer, 60, rank == 2 ? 7 : 5); }, 2,
          "q_len is 7, but 5 on rank 0");
  differs(
      [&](int rank, auto& layer) {
        if (rank == 1) layer.truncate(59);
        forward(layer, 60, 5);
      },
      1, "kv_len is 59, but 60 on rank 0");
  differs(
      [&](int rank, auto& layer) {
        const auto part = [&](const Tensor4<float>& x) { return quoka::view_of(x).slice(60, 5); };
        if (rank == 1)
          layer.append(part(prompt.k), part(prompt.v));
        else
          forward(layer, 60, 5);
      },
      1, "another step");
  // A rank's own refusal reaches all.
  differs(
      [&](int rank, auto& layer) {
        Tensor4<float> out(1, 6, rank == 2 ? 4 : 5, 20);
        const auto part = [&](const Tensor4<float>& x) { return quoka::view_of(x).slice(60, 5); };
        layer.forward(part(prompt.q), part(prompt.k), part(prompt.v), out);
      },
      2, "out's len is 4");
}

// A layer of S on two ranks, of which rank 1 has what change() makes of the other's.
template <class S>
void expect_settings_told(const std::function<void(typename S::Options&, LayerShape&,
                                                   AttentionOptions&, ShardLayout&)>& change,
                          const std::string& fragment) {
  Random random(942);
  const Shape shape;
  const Prompt<float> prompt(random, shape);
  const auto options = with_budget<S>(Budget::keys(9));
  expect_rank_error(on_ranks(2,
                             [&](auto communicator) {
                               typename S::Options own = options;
                               LayerShape sizes = shape.layer();
                               AttentionOptions attention;
                               // Of any method: Quest's pages, and blocks of a softmax.
                               ShardLayout layout = ShardLayout::round_robin(
                                   std::lcm(Index{16}, quoka::softmax_shard_keys()));
                               if (communicator.rank() == 1) change(own, sizes, attention, layout);
                               ShardedPrefill<S> layer(sizes, own, communicator, layout, attention);
                               Result<float> result(shape);
                               run_chunks(layer, shape, prompt, result);
                             }),
                    1, fragment);
}

TEST(Fault, OfSettingsThatDifferNamesTheRankAndBothNumbers) {
  using quoka::LokiSelector, quoka::OracleSelector, quoka::QuestSelector, quoka::RandomSelector,
      quoka::SampleAttentionSelector, quoka::SparqSelector;
  const auto quoka_told = [](std::function<void(QuokaOptions&)> change,
                             const std::string& fragment) {
    expect_settings_told<QuokaSelector>([&](auto& o, auto&, auto&, auto&) { change(o); }, fragment);
  };
  quoka_told([](auto& o) { o.budget = Budget::keys(7); }, "the budget is 7, but 9 on rank 0");
  quoka_told([](auto& o) { o.n_queries = 5; }, "n_queries is 5, but 16 on rank 0");
  quoka_told([](auto& o) { o.aggregation = quoka::Aggregation::mean; }, "aggregation is 1, but 0");
  quoka_told([](auto& o) { o.group_mode = quoka::GroupMode::per_head; }, "group_mode is 1, but 0");
  quoka_told([](auto& o) { o.query_choice = quoka::QueryChoice::mixed; }, "query_choice is 1, but");
  quoka_told([](auto& o) { o.domain = Domain::softmax; }, "domain is 0, but 1");
  quoka_told([](auto& o) { o.top_k.window = 3; }, "top_k.window is 3, but 1");
  quoka_told([](auto& o) { o.top_k.keep_first = 2; }, "top_k.keep_first is 2, but 0");
  quoka_told([](auto& o) { o.top_k.keep_last = 2; }, "top_k.keep_last is 2, but 0");

  const auto layer_told =
      [](std::function<void(LayerShape&, AttentionOptions&, ShardLayout&)> change,
         const std::string& fragment) {
        expect_settings_told<QuokaSelector>([&](auto&, auto& shape, auto& attention,
                                                auto& layout) { change(shape, attention, layout); },
                                            fragment);
      };
  const std::vector<float> sinks{0, 1, 2, 3, 4, 5};
  layer_told([](auto&, auto& a, auto&) { a.scale = 0.25f; }, "attention's scale is 0.25, but 0");
  layer_told([](auto&, auto& a, auto&) { a.softcap = 30.0f; }, "softcap is 30, but 0 on rank 0");
  layer_told([](auto&, auto& a, auto&) { a.arithmetic = quoka::Arithmetic::bfloat16; },
             "attention's arithmetic is 2, but 0");
  layer_told([&](auto&, auto& a, auto&) { a.sink_logits = sinks; }, "the hash of sink_logits is");
  layer_told([](auto& s, auto&, auto&) { s.k_format = &quoka::format_of<Eigen::half>(); },
             "the hash of k_format is");
  layer_told([](auto& s, auto&, auto&) { s.v_format = &quoka::format_of<Eigen::half>(); },
             "the hash of v_format is");
  layer_told([](auto&, auto&, auto& layout) { layout = ShardLayout::round_robin(99); },
             "block is 99, but");

  expect_settings_told<SampleAttentionSelector>(
      [](auto& o, auto&, auto&, auto&) { o.n_queries = 3; }, "n_queries is 3, but 16");
  expect_settings_told<SampleAttentionSelector>(
      [](auto& o, auto&, auto&, auto&) { o.domain = Domain::logit; }, "domain is 1, but 0");
  expect_settings_told<SparqSelector>([](auto& o, auto&, auto&, auto&) { o.rank = 3; },
                                      "rank is 3, but 7");
  expect_settings_told<SparqSelector>(
      [](auto& o, auto&, auto&, auto&) { o.domain = Domain::logit; }, "domain is 1, but 0");
  expect_settings_told<LokiSelector>([](auto& o, auto&, auto&, auto&) { o.rank = 3; },
                                     "rank is 3, but 7");
  expect_settings_told<LokiSelector>([](auto& o, auto&, auto&, auto&) { o.domain = Domain::logit; },
                                     "domain is 1, but 0");
  expect_settings_told<LokiSelector>(
      [](auto& o, auto& shape, auto&, auto&) {
        std::vector<Eigen::MatrixXf> axes;
        for (Index head = 0; head < shape.kv_heads; ++head)
          axes.push_back(Eigen::MatrixXf::Identity(shape.head_dim, shape.head_dim));
        o.calibration = std::make_shared<const quoka::LokiCalibration>(axes);
      },
      "the calibration's hash is");
  expect_settings_told<OracleSelector>(
      [](auto& o, auto&, auto&, auto&) { o.aggregation = quoka::Aggregation::max; },
      "aggregation is 0, but 1");
  expect_settings_told<QuestSelector>([](auto& o, auto&, auto&, auto&) { o.page = 8; },
                                      "page is 8, but 16");
  expect_settings_told<RandomSelector>([](auto& o, auto&, auto&, auto&) { o.seed = 3; },
                                       "seed is 3, but 0");
}

TEST(Fault, OfMethodsThatDifferNamesTheRank) {
  Random random(945);
  const Shape shape;
  const Prompt<float> prompt(random, shape);
  const auto run = [&]<class S>(S, auto& communicator) {
    ShardedPrefill<S> layer(shape.layer(), {.budget = Budget::keys(9)}, communicator);
    Result<float> result(shape);
    run_chunks(layer, shape, prompt, result);
  };
  expect_rank_error(on_ranks(2,
                             [&](auto communicator) {
                               if (communicator.rank() == 1)
                                 run(quoka::RandomSelector(), communicator);
                               else
                                 run(QuokaSelector(), communicator);
                             }),
                    1, "another method");
}

TEST(Fault, OfARankThatNeverComesEndsInTime) {
  const Shape shape;
  Random random(943);
  const Prompt<float> prompt(random, shape);
  const auto errors = on_ranks(
      2,
      [&](auto communicator) {
        if (communicator.rank() == 1) return;
        ShardedPrefill<QuokaSelector> layer(shape.layer(), {.budget = Budget::keys(7)},
                                            communicator);
        Result<float> result(shape);
        run_chunks(layer, shape, prompt, result);
      },
      std::chrono::milliseconds(50));
  EXPECT_NE(what(errors[0]).find("1 of 2 ranks came within the limit of 50 ms"), std::string::npos)
      << what(errors[0]);
  EXPECT_EQ(errors[1], nullptr);
}

// ---- refused ------------------------------------------------------------------------------------------

static_assert(quoka::ShardableSelector<quoka::DenseSelector>);
static_assert(quoka::ShardableSelector<QuokaSelector>);
static_assert(!quoka::ShardableSelector<quoka::SnapKvSelector>);
static_assert(!quoka::ShardableSelector<quoka::XAttentionSelector>);
static_assert(!quoka::ShardableSelector<quoka::TidalDecodeSelector>);

TEST(ShardedPrefillRefuses, WhatNeedsAllKeysInOnePlace) {
  ThreadRanks ranks(1);
  auto communicator = ranks.communicator(0);
  const LayerShape shape = Shape().layer();
  const auto refuses =
      [&]<class S>(S, const typename S::Options& options, std::initializer_list<Fragment> fragments,
                   const ShardLayout& layout = {}, const AttentionOptions& attention = {}) {
        expect_refused([&] { ShardedPrefill<S>(shape, options, communicator, layout, attention); },
                       fragments);
      };
  refuses(quoka::LokiSelector(), {}, {"all keys"});
  refuses(quoka::QuestSelector(), {.domain = Domain::softmax}, {"all keys"});
  refuses(QuokaSelector(), {.top_k = {.window = 0}}, {"window", 0});
  refuses(quoka::QuestSelector(), {}, {"block", 24, 16}, ShardLayout::round_robin(24));
  refuses(quoka::OracleSelector(), {}, {"block", 7}, ShardLayout::contiguous(7));
  refuses(QuokaSelector(), {}, {"block", 0}, ShardLayout::contiguous(0));
  AttentionOptions attention;
  attention.sliding_window = 9;
  refuses(QuokaSelector(), {}, {"sliding_window", 9, "over shards", 0}, {}, attention);
  attention = {};
  attention.causal = false;
  refuses(QuokaSelector(), {}, {"over shards causal"}, {}, attention);
  attention = {};
  const std::vector<float> slopes(uz(shape.q_heads), 0.5f);
  attention.alibi_slopes = slopes;
  refuses(QuokaSelector(), {}, {"alibi_slopes", shape.q_heads, "over shards", 0}, {}, attention);
  attention = {};
  const std::uint8_t seen = 1;
  attention.mask = quoka::Mask::bytes(&seen, {1, 1, 1, 1}, {1, 1, 1});
  refuses(QuokaSelector(), {}, {"mask", "one call's"}, {}, attention);
  attention = {};
  attention.query_position = 0;
  refuses(QuokaSelector(), {}, {"query_position", 0, "have none"}, {}, attention);
}

// A scorer may make up the names of its options, which are compared as long as the layer lives.
TEST(ShardedSettings, HaveTheirOwnNames) {
  quoka::detail::Settings settings;
  std::string name = "an option of the caller's";
  settings.add({name.c_str(), 3});
  std::fill(name.begin(), name.end(), '?');
  const quoka::detail::Settings copy = settings;
  settings = {};
  ASSERT_EQ(copy.size(), 1u);
  EXPECT_STREQ(copy[0].name, "an option of the caller's");
  EXPECT_EQ(copy[0].bits, 3);
  for (std::size_t i = 0; i < quoka::detail::Settings::most; ++i) settings.add({"one", 1});
  expect_refused([&] { settings.add({"one more", 1}); }, {"settings", 21, 20});
}

TEST(ShardedPrefillRefuses, AWindowLongerThanABlock) {
  const Shape shape;
  Random random(944);
  const Prompt<float> prompt(random, shape);
  expect_rank_error(on_ranks(2,
                             [&](auto communicator) {
                               ShardedPrefill<QuokaSelector> layer(
                                   shape.layer(),
                                   {.budget = Budget::keys(7), .top_k = {.window = 14}},
                                   communicator, ShardLayout::round_robin(13));
                               Result<float> result(shape);
                               run_chunks(layer, shape, prompt, result);
                             }),
                    0, "window");
}

TEST(ThreadRanks, RefusesRanksThatThereAreNot) {
  expect_refused([] { ThreadRanks ranks(0); }, {"ranks", 0, 1});
  ThreadRanks ranks(2);
  expect_refused([&] { ranks.communicator(2); }, {"rank", 2, 1});
  expect_refused([&] { ranks.communicator(-1); }, {"rank", -1});
}

TEST(ThreadRanks, RefusesANegativeLimit) {
  expect_refused([] { ThreadRanks ranks(2, std::chrono::milliseconds(-5)); }, {"limit", -5, 0});
}

// Who comes later is told of the same meeting.
TEST(ThreadRanks, TheOneThatIsLateIsToldWhoCame) {
  ThreadRanks ranks(3, std::chrono::milliseconds(20));
  for (const int rank : {0, 2}) {
    try {
      std::int64_t one = 1;
      ranks.communicator(rank).allreduce_sum(std::span(&one, 1));
      ADD_FAILURE() << "nobody was missed";
    } catch (const std::runtime_error& error) {
      EXPECT_STREQ(error.what(), "quoka: 1 of 3 ranks came within the limit of 20 ms");
    }
  }
}

}  // namespace
