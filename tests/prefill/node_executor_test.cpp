// examples/numa/node_executor.hpp, on machines that are made up: what is one KV head's runs on one node.

#include <quoka/prefill/chunked_prefill.hpp>
#include <quoka/select/quoka.hpp>

#include "numa/node_executor.hpp"
#include "support/attention_fixtures.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

using namespace quoka_test;
using quoka_examples::NodeExecutor;

thread_local int bound_to = -1;  // where this thread is

struct MadeUp {
  std::vector<int> of_node;
  int refuses = -1;  // a node that no thread can be bound to

  int nodes() const { return static_cast<int>(of_node.size()); }
  int cores(int node) const { return of_node[static_cast<std::size_t>(node)]; }
  void bind(int node) const {
    if (node == refuses) throw std::runtime_error("no such node");
    bound_to = node;
  }
};

TEST(NodeExecutor, HasAsManyWorkersAsTheSmallestNodeOnEach) {
  const NodeExecutor executor(MadeUp{{4, 2, 3}});
  EXPECT_EQ(executor.nodes(), 3);
  EXPECT_EQ(executor.workers(), 6);
  EXPECT_EQ(executor.node_of(3), 1);
  EXPECT_EQ(NodeExecutor(MadeUp{{4, 2}}, 3).workers(), 6);
}

// Tasks in ranges, node after node, each once, by a thread that is bound there, under a worker of its own.
TEST(NodeExecutor, DealsTasksOutInRanges) {
  NodeExecutor executor(MadeUp{{2, 2, 2}});
  for (const Index tasks : {0, 1, 2, 3, 7, 100}) {
    std::vector<std::atomic<int>> runs(static_cast<std::size_t>(tasks));
    std::vector<std::atomic<bool>> busy(6);
    std::atomic<int> wrong = 0;
    executor.run(tasks, [&](Index task, int worker) {
      Index node = 0;
      while (task >= tasks * (node + 1) / 3) ++node;
      wrong += bound_to == node && executor.node_of(worker) == node ? 0 : 1;
      wrong += busy[static_cast<std::size_t>(worker)].exchange(true) ? 1 : 0;
      ++runs[static_cast<std::size_t>(task)];
      busy[static_cast<std::size_t>(worker)] = false;
    });
    for (const auto& run : runs) EXPECT_EQ(run, 1);
    EXPECT_EQ(wrong, 0) << tasks << " tasks";
  }
}

// Every task of every chain, stage after stage; chains that share a slot on one node, one after the other.
TEST(NodeExecutor, KeepsAChainOnANode) {
  for (const auto& [chains, at_once] :
       {std::pair<Index, Index>{8, 64}, {8, 3}, {7, 4}, {1, 4}, {5, 1}}) {
    SCOPED_TRACE(std::to_string(chains) + " chains, " + std::to_string(at_once) + " at once");
    NodeExecutor executor(MadeUp{{2, 3}});
    quoka::Chains all(chains, at_once);
    const Index slots = all.slots();
    std::vector<std::atomic<int>> done(static_cast<std::size_t>(chains));
    std::atomic<int> wrong = 0;
    const auto stage = [&](int before) {  // so many tasks of the chain come before
      return [&, before](Index chain, Index, int worker) {
        const Index slot = chain % slots;
        const int node = slot < slots / 2 ? 0 : 1;
        wrong += bound_to == node && executor.node_of(worker) == node ? 0 : 1;
        wrong += done[static_cast<std::size_t>(chain)] >= before ? 0 : 1;
        if (chain >= slots) wrong += done[static_cast<std::size_t>(chain - slots)] == 9 ? 0 : 1;
        ++done[static_cast<std::size_t>(chain)];
      };
    };
    auto first = stage(0), second = stage(5), third = stage(6);
    all.add(5, first), all.add(1, second), all.add(3, third);
    quoka::ExecutorRef(executor).run_chains(all);
    for (const auto& of_chain : done) EXPECT_EQ(of_chain, 9);
    EXPECT_EQ(wrong, 0);
  }
}

TEST(NodeExecutor, ALayerHasTheBitsOfOneThread) {
  Random random(77);
  NodeExecutor executor(MadeUp{{2, 2}});
  for (const bool recommended : {false, true}) {
    const quoka::QuokaOptions options = recommended
                                            ? quoka::QuokaOptions::balanced(Budget::keys(64))
                                            : quoka::QuokaOptions{.budget = Budget::keys(64)};
    quoka::ChunkedPrefill<quoka::QuokaSelector> by_nodes({9, 3, 40}, options),
        alone({9, 3, 40}, options);
    by_nodes.reserve(1200);
    for (int chunk = 0; chunk < 12; ++chunk) {
      const auto q = random.tensor<float>(1, 9, 100, 40), k = random.tensor<float>(1, 3, 100, 40);
      Tensor4<float> out(1, 9, 100, 40), expected = out;
      by_nodes.forward(q, k, k, out, executor);
      alone.forward(q, k, k, expected);
      ASSERT_EQ(by_nodes.selection(), alone.selection());
      ASSERT_TRUE(same_bits(out, expected));
    }
  }
}

TEST(NodeExecutor, PassesOnWhatATaskThrowsAndWorksOn) {
  NodeExecutor executor(MadeUp{{2, 2}});
  for (const Index thrower : {0, 9}) {
    EXPECT_THROW(executor.run(10,
                              [&](Index task, int) {
                                if (task == thrower) throw std::runtime_error("task");
                              }),
                 std::runtime_error);
    std::atomic<int> runs = 0;
    executor.run(10, [&](Index, int) { ++runs; });
    EXPECT_EQ(runs, 10);
  }
}

TEST(NodeExecutor, RefusesWhatIsNoMachine) {
  EXPECT_THROW(NodeExecutor(MadeUp{{}}), std::invalid_argument);
  EXPECT_THROW(NodeExecutor(MadeUp{{2, 0}}), std::invalid_argument);
  EXPECT_THROW(NodeExecutor(MadeUp{{2, 2}}, -1), std::invalid_argument);
  EXPECT_THROW(NodeExecutor(MadeUp{{2, 2, 2}, 1}), std::runtime_error);
}

}  // namespace
