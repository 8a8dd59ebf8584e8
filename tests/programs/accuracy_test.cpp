// The figures of `evaluate`, against sums in double over every row and key; and the names of
// methods that it accepts.

#include "support/ablation.hpp"
#include "support/accuracy.hpp"
#include "support/baseline_oracle.hpp"
#include "support/fixtures.hpp"

#include <quoka/select/mass_selector.hpp>
#include <quoka/select/stages.hpp>

#include <numeric>

namespace {

using namespace quoka_test;
using quoka_examples::Accuracy;
using quoka_examples::AccuracyRules;
using quoka_examples::AccuracyRun;
using quoka_examples::DenseReference;
using quoka_examples::LayerCapture;
using quoka_examples::MethodOptions;

constexpr Index q_heads = 4, kv_heads = 2, dim = 20, len = 137, chunk = 20;
constexpr double scale = 0.25;

std::vector<LayerCapture> random_layers(Random& random, Index count) {
  std::vector<LayerCapture> layers;
  for (Index i = 0; i < count; ++i)
    layers.push_back({"layer" + std::to_string(i), random.tensor<float>(1, q_heads, len, dim, 2.0),
                      random.tensor<float>(1, kv_heads, len, dim),
                      random.tensor<float>(1, kv_heads, len, dim)});
  return layers;
}

// By the definitions, for lists of kept keys that are the same for every head.
struct Naive {
  std::vector<double> shares;
  double difference = 0.0, norm = 0.0, common = 0.0, compared = 0.0, pairs = 0.0, all_pairs = 0.0;
  double hits = 0.0, sought = 0.0;
  Index chunks = 0;

  void add_chunk(const LayerCapture& layer, Index begin, const std::vector<Index>& kept) {
    const Index n = std::min(chunk, len - begin);
    const auto part = [](const Tensor4<float>& x, Index first, Index count) {
      return to_oracle(rows<float>(x, first, count));
    };
    const oracle::Tensor q = part(layer.q, begin, n), past_k = part(layer.k, 0, begin),
                         past_v = part(layer.v, 0, begin), k = part(layer.k, begin, n),
                         v = part(layer.v, begin, n), none;
    const oracle::Positions keep(1, {uz(kv_heads), kept});
    const oracle::AttentionOptions options{.scale = scale};
    const auto all = oracle::attention(q, past_k, past_v, nullptr, k, v, options),
               some = oracle::attention(q, past_k, past_v, &keep, k, v, options),
               past = oracle::attention(q, past_k, past_v, nullptr, none, none, options),
               of_kept = oracle::attention(q, past_k, past_v, &keep, none, none, options);
    for (std::size_t i = 0; begin > 0 && i < past.lse.size(); ++i)
      shares.push_back(std::exp(of_kept.lse[i] - past.lse[i]));
    for (std::size_t i = 0; i < all.out.data.size(); ++i) {
      const double dense = all.out.data[i], off = some.out.data[i] - dense;
      difference += off * off, norm += dense * dense;
    }
    const oracle::Positions best = oracle::top_k(
        oracle::exact_scores(q, past_k, oracle::Domain::softmax, scale), std::ssize(kept), 0, 0);
    for (const auto& list : best[0])
      for (const Index t : list) {
        common += std::binary_search(kept.begin(), kept.end(), t) ? 1.0 : 0.0;
        compared += 1.0;
      }
    for (Index i = 0; i < n && layer.targets.size() > 0; ++i)
      for (Index head = 0; head < q_heads; ++head) {
        const Position target = layer.targets(0, head, begin + i);
        if (target < 0 || target >= begin) continue;  // keys of its own chunk are always attended
        hits += std::binary_search(kept.begin(), kept.end(), target) ? 1.0 : 0.0;
        sought += 1.0;
      }
    const double own = static_cast<double>(n * (n + 1) / 2);
    pairs += static_cast<double>(n * std::ssize(kept)) + own;
    all_pairs += static_cast<double>(n * begin) + own;
    ++chunks;
  }
};

void expect_as(const Accuracy& got, Naive naive) {
  std::sort(naive.shares.begin(), naive.shares.end());
  const double rows = static_cast<double>(naive.shares.size());
  EXPECT_EQ(got.rows, std::ssize(naive.shares));
  EXPECT_EQ(got.chunks, naive.chunks);
  if (naive.chunks == 0) return;
  EXPECT_NEAR(got.mass_kept, std::accumulate(naive.shares.begin(), naive.shares.end(), 0.0) / rows,
              1e-6);
  EXPECT_NEAR(got.worst_mass, naive.shares[0], 1e-6);
  const auto worst = static_cast<std::ptrdiff_t>(std::ceil(0.01 * rows));
  EXPECT_NEAR(got.worst_percent_mass,
              std::accumulate(naive.shares.begin(), naive.shares.begin() + worst, 0.0) /
                  static_cast<double>(worst),
              1e-6);
  EXPECT_NEAR(got.output_error, std::sqrt(naive.difference / naive.norm), 1e-5);
  EXPECT_NEAR(got.overlap, naive.common / naive.compared, 1e-12);
  EXPECT_NEAR(got.kv_pairs, naive.pairs / naive.all_pairs, 1e-12);
  if (naive.sought > 0.0)
    EXPECT_NEAR(got.hits, naive.hits / naive.sought, 1e-12);
  else
    EXPECT_TRUE(std::isnan(got.hits));
}

// first_recent with a budget of 10 keeps 0..3 and the last six, whatever the data.
std::vector<Index> first_and_recent(Index begin) {
  std::vector<Index> kept = oracle::range(0, std::min<Index>(begin, 4));
  for (Index t = std::max<Index>(begin - 6, 4); t < begin; ++t) kept.push_back(t);
  return kept;
}

// Over the chunks whose past is longer than past_per_budget budgets (0: over all chunks). One layer has target keys.
TEST(Accuracy, IsWhatItsDefinitionsSayLayerByLayerAndOverall) {
  Random random(921);
  quoka::ThreadPool threads(2);
  auto layers = random_layers(random, 2);
  layers[0].targets = Tensor3<Position>(1, q_heads, len);
  for (Index i = 0; i < layers[0].targets.size(); ++i)
    layers[0].targets.data()[i] =
        random.seldom(3) ? static_cast<Position>(random.below(len)) : Position{-1};
  DenseReference reference(layers, chunk, {.scale = static_cast<float>(scale)}, threads);
  for (const double budgets : {0.0, 1.0, 2.0, 7.0, 14.0}) {
    const auto sums = AccuracyRun("first_recent", {.budget = Budget::keys(10)}, reference,
                                  {.past_per_budget = budgets}, threads)
                          .run();
    Naive all;
    ASSERT_EQ(sums.size(), 2u);
    for (std::size_t i = 0; i < 2; ++i) {
      SCOPED_TRACE(layers[i].name + ", " + std::to_string(budgets) + " budgets");
      Naive naive;
      for (Index begin = 0; begin < len; begin += chunk)
        if (budgets == 0.0 || static_cast<double>(begin) > 10 * budgets)
          for (Naive* to : {&naive, &all}) to->add_chunk(layers[i], begin, first_and_recent(begin));
      expect_as(sums[i].result(), naive);
    }
    expect_as(quoka_examples::overall(sums), all);
  }
}

TEST(Accuracy, OfTheOracleIsFullOverlapAndTheMostMassOfAll) {
  Random random(923);
  quoka::ThreadPool threads(1);
  const auto layers = random_layers(random, 2);
  DenseReference reference(layers, chunk, {}, threads);
  const auto accuracy = [&](const std::string& method) {
    return quoka_examples::overall(
        AccuracyRun(method, {.budget = Budget::keys(13)}, reference, {}, threads).run());
  };
  const Accuracy best = accuracy("oracle");
  EXPECT_EQ(best.overlap, 1.0);
  for (const std::string& method : quoka_examples::parse_methods("all")) {
    const Accuracy other = accuracy(method);
    EXPECT_LE(other.mass_kept, best.mass_kept + 1e-6) << method;
    EXPECT_LE(other.overlap, 1.0) << method;
    EXPECT_GE(other.worst_percent_mass, other.worst_mass) << method;
    EXPECT_GT(other.output_error, 0.0) << method;
  }
}

TEST(Accuracy, OfDenseIsPerfect) {
  Random random(924);
  quoka::ThreadPool threads(1);
  const auto layers = random_layers(random, 1);
  DenseReference reference(layers, chunk, {}, threads);
  const Accuracy dense =
      AccuracyRun("dense", {}, reference, {.past_per_budget = 0.0}, threads).run()[0].result();
  EXPECT_EQ(dense.mass_kept, 1.0);
  EXPECT_EQ(dense.output_error, 0.0);
  EXPECT_EQ(dense.kv_pairs, 1.0);
  EXPECT_EQ(dense.flops, 0.0);
  EXPECT_EQ(dense.dense_flops, 4.0 * q_heads * dim * (len * (len + 1) / 2) / 7);
}

TEST(Accuracy, OfGeneratedLayersIsThatOfEachOnItsOwn) {  // no choice is shared
  Random random(926);
  quoka::ThreadPool threads(1);
  const auto layers = random_layers(random, 2);
  DenseReference together(layers, chunk, {}, threads);
  const AccuracyRules alone{.one_sequence = false};
  const auto sums =
      AccuracyRun("tidal_decode", {.budget = Budget::keys(9)}, together, alone, threads).run();
  for (std::size_t i = 0; i < 2; ++i) {
    const std::vector<LayerCapture> one{layers[i]};
    DenseReference reference(one, chunk, {}, threads);
    const auto expected =
        AccuracyRun("tidal_decode", {.budget = Budget::keys(9)}, reference, {}, threads).run();
    EXPECT_EQ(sums[i].result().mass_kept, expected[0].result().mass_kept);
  }
}

TEST(Accuracy, RefusesLayersOfDifferentLength) {
  Random random(927);
  quoka::ThreadPool threads(1);
  auto layers = random_layers(random, 2);
  layers[1].q = random.tensor<float>(1, q_heads, 99, dim);
  expect_refused([&] { DenseReference(layers, chunk, {}, threads); }, {"layer1", 99, len});
  expect_refused([&] { DenseReference(layers, 0, {}, threads); }, {0, "tokens"});
}

// ---- methods by name ----------------------------------------------------------------------------

// The selection of the last of two chunks.
Selection selection_of(const std::string& method, const MethodOptions& options) {
  Random random(931);
  quoka::ThreadPool threads(1);
  const LayerCapture layer = random_layers(random, 1).front();
  const auto layers = quoka_examples::make_layers(method, quoka_examples::shape_of(layer), options);
  const quoka::TensorView<const float> q = layer.q, k = layer.k, v = layer.v;
  layers[0]->append(q.slice(0, 100), k.slice(0, 100), v.slice(0, 100), threads);
  return layers[0]->select(q.slice(100, 37), threads);
}

TEST(Methods, AComposedNameSetsEachOfItsOptions) {
  using namespace quoka;
  Random random(931);
  const LayerCapture layer = random_layers(random, 1).front();
  const TensorView<const float> q = TensorView<const float>(layer.q).slice(100, 37),
                                k = TensorView<const float>(layer.k).slice(0, 100);
  const MethodOptions options{.budget = Budget::keys(11)};
  EXPECT_EQ(
      selection_of("quoka.first2.recent1.queries6", options),
      QuokaSelector({.budget = Budget::keys(11), .n_queries = 6, .keep_first = 2, .keep_last = 1})
          .select(q, k, {}));
  const auto mass = [&](Index queries, Index kernel_size) {
    return MassSelector({.budget = Budget::keys(11),
                         .queries = queries,
                         .kernel_size = kernel_size,
                         .keep_last = 1,
                         .sketch = Sketch::off})
        .select(q, k, {});
  };
  EXPECT_EQ(selection_of("quoka.balanced.float.recent1", options), mass(128, 3));
  EXPECT_EQ(selection_of("quoka.kernel5.recommended.float.recent1", options), mass(256, 5));
  EXPECT_EQ(selection_of("quoka.balanced.group8.float.recent1", options), mass(8, 3));
  EXPECT_FALSE(mass(128, 3) == mass(128, 5));
}

// Variants that are not options of the library, by its stages.
TEST(Methods, AblationsAreTheStagesWithOneChoiceChanged) {
  using namespace quoka;
  Random random(931);
  const LayerCapture layer = random_layers(random, 1).front();
  const TensorView<const float> q = TensorView<const float>(layer.q).slice(100, 37),
                                k = TensorView<const float>(layer.k).slice(0, 100);
  const MethodOptions options{.budget = Budget::keys(11)};
  const TopKOptions best{.kernel_size = 3, .keep_first = 2, .keep_last = 1};
  const auto rows = pre_aggregate(subselect_queries(q, 6), q.heads());  // normalised
  const Tensor<float> of_kv_heads(
      rows.reshape(Eigen::array<Index, 4>{1, k.heads(), q.heads() / k.heads() * 6, q.dim()}));
  EXPECT_EQ(selection_of("quoka.per_head.kernel3.mean.first2.recent1.queries6", options),
            top_k(score_keys(of_kv_heads, k, Aggregation::mean), 11, best));
  // Of 37 queries the last two, three of the first 35, and the most dissimilar of what is left.
  const Index group = q.heads() / k.heads();
  const auto mixed = quoka_examples::mixed_queries(q, 6, group, SerialExecutor{});
  const auto most_dissimilar = subselect_query_positions(q, 6);
  for (Index head = 0; head < q.heads(); ++head) {
    std::vector<Index> kept;
    for (Index m = 0; m < 3; ++m) kept.push_back((m * group + head % group) * 35 / (3 * group));
    kept.insert(kept.end(), {35, 36});
    Index first = 0;
    while (std::count(kept.begin(), kept.end(), most_dissimilar(0, head, first)) > 0) ++first;
    kept.insert(kept.begin(), most_dissimilar(0, head, first));
    for (Index m = 0; m < 6; ++m)
      for (Index c = 0; c < q.dim(); ++c)
        ASSERT_EQ(mixed(0, head, m, c), q.row(0, head, kept[static_cast<std::size_t>(m)])[c]);
  }
  EXPECT_EQ(selection_of("quoka.mixed.kernel3.first2.recent1.queries6", options),
            top_k(score_keys(pre_aggregate(mixed, k.heads()), k), 11, best));
  EXPECT_EQ(selection_of("quoka.dissimilar", options), selection_of("quoka", options));
  // An average of a group's raw queries, and each query's own attention.
  const Selection averaged = selection_of("quoka.softmax.mean", options);
  EXPECT_EQ(averaged.max_count(), 11);
  EXPECT_FALSE(averaged == selection_of("quoka.softmax.mean.per_head", options));
}

TEST(Methods, EachKeepsFirstKeysWhereAskedTo) {
  MethodOptions options{.budget = Budget::keys(17)};
  options.quoka.keep_first = 5;
  for (const std::string& method : quoka_examples::all_methods()) {
    const Selection keep = selection_of(method, options);
    if (method == "dense") continue;
    const bool by_threshold = method.ends_with(".threshold") || method.ends_with(".compact");
    const bool shared = method == "quoka.recommended" || method == "quoka.balanced";
    EXPECT_TRUE(!shared || keep.sum_of_counts() == 17 * keep.heads());
    for (Index head = 0; head < keep.heads(); ++head) {
      const auto row = keep.row(0, head);
      if (by_threshold || shared)
        ASSERT_GE(std::ssize(row), 5) << method;
      else
        ASSERT_EQ(std::ssize(row), 17) << method;
      EXPECT_EQ(std::vector<Index>(row.begin(), row.begin() + 5), oracle::range(0, 5)) << method;
    }
  }
}

TEST(Methods, ThatAreNoneAreRefusedWithThoseThatAre) {
  for (const char* name : {"quokka", "quoka.kernel", "quoka.kernelx", "quoka.best", "quoka.uniform",
                           "quoka.balanced.mean", "sparq.kernel7"})
    expect_refused([&] { quoka_examples::parse_methods(name); },
                   {name, "sample_attention", "quoka.mixed.per_head.kernel7"});
}

}  // namespace
