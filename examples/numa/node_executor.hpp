// An executor for machines with several memories: what belongs to a KV head stays on one NUMA node.
//
//   HwlocTopology topology;                // hwloc_topology.hpp, or anything else with these three members:
//   NodeExecutor executor(topology);       //   nodes(), cores(node), bind(node): the calling thread, to a node
//   layer.reserve(tokens);                 // of a ChunkedPrefill: memory that nobody has touched
//   layer.forward(q, k, v, out, executor);
//
// Each node has a ThreadPool of its own, whose threads are bound to it. A chain (runtime/chains.hpp) is a KV head's
// work, and all of it is one node's; tasks of a run() are dealt out in ranges, as the library counts them by
// KV heads. So the keys, values and sketch of a head are written and read by the threads of one node, and Linux
// gives a page to the node whose thread touches it first. What crosses nodes: queries, outputs, and the chunk's own
// keys and values as the caller has them.
//
// No node helps another. With fewer KV heads than nodes some have nothing to do; where there are fewer workers than KV
// heads, heads that share scratch memory share a node. A cache that grows is copied by the calling thread, which
// moves it: reserve ahead.
#pragma once

#include <quoka/runtime/thread_pool.hpp>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace quoka_examples {

using quoka::Index;

class NodeExecutor {
 public:
  // workers: of each node; 0: as many as the node with the fewest cores has. Throws std::invalid_argument for
  // fewer than one node or worker, and what bind() throws.
  template <class Topology>
  explicit NodeExecutor(const Topology& topology, int workers = 0) : each_(workers) {
    const int count = topology.nodes();
    quoka::detail::require_at_least("the topology's nodes", count, 1);
    if (each_ == 0) {
      each_ = topology.cores(0);
      for (int node = 1; node < count; ++node) each_ = std::min(each_, topology.cores(node));
    }
    quoka::detail::require_at_least("the workers of a node", each_, 1);
    errors_.resize(static_cast<std::size_t>(count));
    busy_ = count;
    try {
      for (int node = 0; node < count; ++node)
        threads_.emplace_back([this, topology, node] { serve(topology, node); });
    } catch (...) {
      busy_ -= count - static_cast<int>(threads_.size());
      wait();
      stop();
      throw;
    }
    wait();
    try {
      rethrow();
    } catch (...) {
      stop();
      throw;
    }
  }
  ~NodeExecutor() { stop(); }
  NodeExecutor(const NodeExecutor&) = delete;
  NodeExecutor& operator=(const NodeExecutor&) = delete;

  int nodes() const { return static_cast<int>(errors_.size()); }
  int workers() const { return nodes() * each_; }
  // The node of a worker.
  int node_of(int worker) const { return worker / each_; }

  template <class F>
  void run(Index tasks, F&& f) {
    on_each_node([&](int node, quoka::ThreadPool& pool) {
      const Index begin = tasks * node / nodes(), end = tasks * (node + 1) / nodes();
      pool.run(end - begin,
               [&](Index task, int worker) { f(begin + task, node * each_ + worker); });
    });
  }

  void run_chains(const quoka::Chains& chains) {
    on_each_node([&](int node, quoka::ThreadPool& pool) {
      Part part{chains, chains.slots() * node / nodes(), 0, node * each_};
      part.slots = chains.slots() * (node + 1) / nodes() - part.slot;
      if (part.slots == 0) return;
      quoka::Chains own(part.count(), part.slots);
      for (int stage = 0; stage < chains.stages(); ++stage)
        own.add_member<&Part::run>(chains.tasks(stage), part);
      quoka::ExecutorRef(pool).run_chains(own);
    });
  }

 private:
  // The chains whose slots are a node's: their memory is in nobody else's use.
  struct Part {
    const quoka::Chains& chains;
    Index slot, slots;  // the first one, and how many
    int worker;         // the first one

    Index count() const {
      const Index rounds = chains.count() / chains.slots(), rest = chains.count() % chains.slots();
      return rounds * slots + std::clamp<Index>(rest - slot, 0, slots);
    }
    void run(Index own, int stage, Index task, int own_worker) {
      const Index chain = own / slots * chains.slots() + slot + own % slots;
      chains(chain, stage, task, worker + own_worker);
    }
  };

  template <class Topology>
  void serve(const Topology& topology, int node) {
    std::exception_ptr& error = errors_[static_cast<std::size_t>(node)];
    unsigned seen = 0;
    try {
      topology.bind(node);
      quoka::ThreadPool pool(each_);
      // Each thread of the pool comes here once, since none leaves before all have come.
      std::barrier all(each_);
      pool.run(each_, [&](Index, int) {
        all.arrive_and_wait();
        topology.bind(node);
      });
      for (;;) {
        done();
        posted_.wait(seen);
        ++seen;
        if (stopping_) return;
        try {
          (*job_)(node, pool);
        } catch (...) {
          error = std::current_exception();
        }
      }
    } catch (...) {
      error = std::current_exception();
      done();
    }
  }

  void on_each_node(const std::function<void(int, quoka::ThreadPool&)>& job) {
    const std::lock_guard one_at_a_time(mutex_);
    job_ = &job;
    busy_ = nodes();
    ++posted_;
    posted_.notify_all();
    wait();
    rethrow();
  }
  void done() {
    if (--busy_ == 0) busy_.notify_one();
  }
  void wait() {
    for (int busy = busy_; busy != 0; busy = busy_) busy_.wait(busy);
  }
  // What a node threw, the first one's; it is forgotten with the others'.
  void rethrow() {
    std::exception_ptr first;
    for (std::exception_ptr& error : errors_) {
      const std::exception_ptr mine = std::exchange(error, nullptr);
      if (first == nullptr) first = mine;
    }
    if (first != nullptr) std::rethrow_exception(first);
  }
  void stop() {
    stopping_ = true;
    ++posted_;
    posted_.notify_all();
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }

  int each_;
  std::mutex mutex_;
  const std::function<void(int, quoka::ThreadPool&)>* job_ = nullptr;
  std::atomic<unsigned> posted_{0};  // jobs so far
  std::atomic<int> busy_{0};         // nodes
  std::atomic<bool> stopping_{false};
  std::vector<std::exception_ptr> errors_;  // of each node
  std::vector<std::thread> threads_;
};

static_assert(quoka::Executor<NodeExecutor>);

}  // namespace quoka_examples
