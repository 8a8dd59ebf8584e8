// One layer's prefill with each KV head kept on a NUMA node, against a pool whose threads take any task: what
// crosses from node to node, on paper, and the time of both, chunk by chunk in turns.
//
//   build/examples/numa/numa --len 32768
//   build/examples/numa/numa --topology "numa:2 core:1 pu:1"     a machine that is described; nothing is bound
//
// Exits with 1 where a Selection or an output differs.

#include "numa/hwloc_topology.hpp"
#include "numa/node_executor.hpp"
#include "support/clock.hpp"
#include "support/program.hpp"
#include "support/selector_flags.hpp"
#include "support/statistics.hpp"

#include <quoka/prefill/chunked_prefill.hpp>
#include <quoka/select/quoka.hpp>
#include <quoka/views/tensor.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <vector>

namespace {

using namespace quoka_examples;

struct Flags : PrefillFlags {
  int workers = 0;
  std::string topology;
};

double megabytes(Index bytes) { return static_cast<double>(bytes) * 1e-6; }

// Of a chunk after `len` keys, in float, by the sketch.
void print_traffic(const Flags& flags, int nodes) {
  const Index codes = flags.kv_heads * flags.len * (flags.head_dim + 12),
              selected = flags.kv_heads * flags.budget * 2 * flags.head_dim * 4,
              own = flags.kv_heads * flags.chunk * 2 * flags.head_dim * 4,
              rows = 2 * flags.q_heads * flags.chunk * flags.head_dim * 4;
  const auto across = [&](Index bytes) { return megabytes(bytes) * (nodes - 1) / nodes; };
  fmt::print(
      "a chunk of {} over {} keys reads {:.1f} MB of codes, {:.1f} of selected rows, {:.1f} of its "
      "own; {:.1f} of queries and outputs\n",
      flags.chunk, flags.len, megabytes(codes), megabytes(selected), megabytes(own),
      megabytes(rows));
  fmt::print(
      "thereof from node to node: any worker any task {:.1f} MB, a head on its node {:.1f} MB\n",
      across(codes + selected + own + rows), across(own + rows));
}

int measure(const Flags& flags, Report& report) {
  const HwlocTopology topology(flags.topology);
  NodeExecutor nodes(topology, flags.workers);
  quoka::ThreadPool pool(nodes.workers());
  fmt::print("{} NUMA node(s), {} workers\n", nodes.nodes(), nodes.workers());
  print_traffic(flags, nodes.nodes());

  const quoka::LayerShape shape{flags.q_heads, flags.kv_heads, flags.head_dim};
  quoka::ChunkedPrefill<quoka::QuokaSelector> pinned(shape,
                                                     {.budget = quoka::Budget::keys(flags.budget)}),
      anywhere(shape, {.budget = quoka::Budget::keys(flags.budget)});
  pinned.reserve(flags.len), anywhere.reserve(flags.len);
  std::vector<double> ratios;
  for (Index begin = 0; begin < flags.len; begin += flags.chunk) {
    const Index n = std::min(flags.chunk, flags.len - begin);
    quoka::Tensor<float> q(1, flags.q_heads, n, flags.head_dim),
        k(1, flags.kv_heads, n, flags.head_dim), v = k, out = q, expected = q;
    q.setRandom(), k.setRandom(), v.setRandom();
    const double by_nodes = seconds_of([&] { pinned.forward(q, k, v, out, nodes); });
    const double by_pool = seconds_of([&] { anywhere.forward(q, k, v, expected, pool); });
    if (2 * begin > flags.len) ratios.push_back(by_pool / by_nodes);
    if (pinned.selection() != anywhere.selection() ||
        !std::equal(out.data(), out.data() + out.size(), expected.data())) {
      fmt::print("the two differ in the chunk after {} tokens\n", begin);
      return 1;
    }
  }
  const double ratio = median(ratios);
  fmt::print("a head on its node: {:.2f} times as fast, median of {} chunks; the same outputs\n",
             ratio, ratios.size());
  report.add({{"nodes", nodes.nodes()},
              {"workers", nodes.workers()},
              {"len", flags.len},
              {"ratio", ratio}});
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  Flags flags;
  Program app(argc, argv, "Each KV head on a NUMA node, against any worker for any task");
  add_prefill_flags(app, flags);
  app.add_option("--workers", flags.workers, "of each node; 0: its cores");
  app.add_option("--topology", flags.topology,
                 "one that is described, such as \"numa:2 core:1 pu:1\"");
  return app.run([&] { return measure(flags, app.report); });
}
