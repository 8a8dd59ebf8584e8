// expect: an executor's run_chains.. must be void run_chains.const quoka::Chains&.
// lines: 15
// Taken for absent, an executor's task graph would never be used.
#include <quoka/runtime/executor.hpp>

struct Pool {
  static int workers() { return 1; }
  template <class F>
  void run(quoka::Index tasks, F&& f) const {
    for (quoka::Index task = 0; task < tasks; ++task) f(task, 0);
  }
#ifdef QUOKA_VALID
  void run_chains(const quoka::Chains&) {}
#else
  void run_chains(quoka::Index, const quoka::Chains&) {}
#endif
};

int workers_of(Pool& pool) { return quoka::ExecutorRef(pool).workers(); }
