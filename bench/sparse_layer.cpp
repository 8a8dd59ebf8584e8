// A layer that chooses its keys itself, whole: index heads score every key for each query, the best k become its list,
// attention reads the lists (methods/indexer.hpp). It is compared with attention to every key.
//
//   index      Indexer::choose: scores and top-k, and its products' share of the core's peak in float
//   attend     attention() over its lists
//   all        attention() over every key
//
// The three are called in turns, medians. One thread, its own time. The index cache and the caches are of half. Random
// keys: lists of neighbouring queries have less in common than a model's, which makes attention to them slower.

#include <quoka/attention/attention.hpp>
#include <quoka/methods/indexer.hpp>

#include "normal.hpp"

#include "support/clock.hpp"
#include "support/machine.hpp"
#include "support/program.hpp"
#include "support/statistics.hpp"
#include "support/table.hpp"

#include <Eigen/Core>

#include <algorithm>
#include <random>

namespace {

using namespace quoka_examples;
using quoka::Index;
using quoka::TensorView;
using quoka_bench::normals;

struct Flags {
  int rounds = 5;
};

struct Case {
  const char* model;  // whose shapes these are
  Index index_heads, index_dim;
  bool weighted;
  Index k, block, keep_last;
  Index q_heads, kv_heads, head_dim, v_dim;
  Index queries, keys;
};

constexpr Case cases[] = {
    {"DeepSeek-V3.2", 64, 128, true, 2048, 1, 0, 128, 1, 576, 512, 32, 8192},
    {"DeepSeek-V3.2", 64, 128, true, 2048, 1, 0, 128, 1, 576, 512, 32, 32768},
    {"DeepSeek-V3.2", 64, 128, true, 2048, 1, 0, 128, 1, 576, 512, 1, 32768},
    {"MiniMax-M3", 4, 128, false, 16, 128, 1, 32, 4, 128, 128, 128, 8192},
    {"MiniMax-M3", 4, 128, false, 16, 128, 1, 32, 4, 128, 128, 128, 32768},
    {"MiniMax-M3", 4, 128, false, 16, 128, 1, 32, 4, 128, 128, 1, 32768},
};

void measure(const Case& c, const Flags& flags, double peak, Table& table, Report& report) {
  std::mt19937 random(1);
  const auto index_q = normals<float>(c.index_heads * c.queries * c.index_dim, random());
  const auto index_k = normals<Eigen::half>(c.keys * c.index_dim, random());
  const auto weights = normals<float>(c.index_heads * c.queries, random());
  const auto q = normals<float>(c.q_heads * c.queries * c.head_dim, random());
  const auto k = normals<Eigen::half>(c.keys * c.kv_heads * c.head_dim, random());
  const auto v = normals<Eigen::half>(c.keys * c.kv_heads * c.v_dim, random());
  std::vector<float> out(static_cast<std::size_t>(c.q_heads * c.queries * c.v_dim));

  quoka::IndexerInput input{
      .q = TensorView<const float>(index_q.data(), {1, c.index_heads, c.queries, c.index_dim}),
      .k = TensorView<const Eigen::half>(index_k.data(), {1, 1, c.keys, c.index_dim})};
  if (c.weighted) input.weights = {weights.data(), {1, c.index_heads, c.queries}};
  const TensorView<const float> queries(q.data(), {1, c.q_heads, c.queries, c.head_dim});
  const auto cache = [&](const std::vector<Eigen::half>& x, Index dim) {
    return TensorView<const Eigen::half>(x.data(), {1, c.kv_heads, c.keys, dim},
                                         {0, dim, c.kv_heads * dim, 1});
  };
  const auto keys = cache(k, c.head_dim), values = cache(v, c.v_dim);
  quoka::Indexer indexer({.k = c.k, .block = c.block, .keep_last = c.keep_last});
  quoka::AttentionWorkspace workspace;
  const auto attend = [&](const quoka::AttentionOptions& options) {
    quoka::attention(queries, quoka::Past(keys, values), {},
                     TensorView<float>(out.data(), {1, c.q_heads, c.queries, c.v_dim}), options,
                     quoka::SerialExecutor{}, workspace);
  };
  std::vector<double> index, lists, all;
  for (int round = 0; round <= flags.rounds; ++round) {
    double at = thread_seconds();
    const auto lap = [&](std::vector<double>& to) {
      const double now = thread_seconds();
      if (round > 0) to.push_back(now - at);  // in the first one memory is new
      at = now;
    };
    const quoka::IndexLists chosen = indexer.choose(input);
    lap(index);
    attend({.causal = false, .lists = chosen});
    lap(lists);
    attend({.causal = false});
    lap(all);
  }
  const double pairs = static_cast<double>(c.queries) *
                       (static_cast<double>(c.keys) - static_cast<double>(c.queries - 1) / 2);
  const double gflops =
      2e-9 * static_cast<double>(c.index_heads * c.index_dim) * pairs / median(index);
  const double whole = median(index) + median(lists);
  table.row("{}\t{}\t{}\t{:.2f} ms\t{:.2f}\t{:.2f} ms\t{:.2f} ms\t{:.2f}x", c.model, c.queries,
            c.keys, 1e3 * median(index), gflops / peak, 1e3 * median(lists), 1e3 * median(all),
            median(all) / whole);
  report["results"].push_back({{"model", c.model},
                               {"index_heads", c.index_heads},
                               {"index_dim", c.index_dim},
                               {"k", c.k},
                               {"block", c.block},
                               {"q_heads", c.q_heads},
                               {"kv_heads", c.kv_heads},
                               {"head_dim", c.head_dim},
                               {"queries", c.queries},
                               {"keys", c.keys},
                               {"index_milliseconds", 1e3 * median(index)},
                               {"index_gflops", gflops},
                               {"index_of_peak", gflops / peak},
                               {"lists_milliseconds", 1e3 * median(lists)},
                               {"all_milliseconds", 1e3 * median(all)},
                               {"faster", median(all) / whole}});
}

int run(const Flags& flags, Report& report) {
  const double peak = fma_peak_gflops();
  fmt::print("{}\n\nhalf caches, one thread, medians of {} rounds; peak {:.0f} GFLOP/s\n\n",
             machine(), flags.rounds, peak);
  report["rounds"] = flags.rounds;
  report["peak_gflops"] = peak;
  Table table("layer of\tqueries\tkeys\tindex\tof peak\tattend\tevery key\tall / (index + attend)");
  for (const Case& c : cases) measure(c, flags, peak, table, report);
  table.print();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  Flags flags;
  Program app(argc, argv,
              "A layer that chooses its keys itself, beside attention to every key, one thread");
  app.add_option("--rounds", flags.rounds, "timed calls of each")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  return app.run([&] { return run(flags, app.report); });
}
