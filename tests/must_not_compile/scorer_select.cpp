// expect: a Scorer's select.. must be bool select
// lines: 15
// Taken for absent, the shorter way would never be gone.
#include <quoka/prefill/chunked_prefill.hpp>
#include <quoka/select/scored_selector.hpp>

struct Mine {
  struct Options {
    quoka::Budget budget = quoka::Budget::keys(1024);
  };
  using State = quoka::NoState;
  explicit Mine(const Options&) {}
  void score(const quoka::SelectorInput&, State&, quoka::TensorView<float, 3>,
             quoka::ExecutorRef) const {}
#ifdef QUOKA_VALID
  bool select(const quoka::SelectorInput&, quoka::Index, State&, quoka::Selection&,
              quoka::ExecutorRef) const {
    return false;
  }
#else
  bool select(const quoka::SelectorInput&, State&, quoka::Selection&, quoka::ExecutorRef) const {
    return false;
  }
#endif
};

quoka::Index len_of(const quoka::ChunkedPrefill<quoka::ScoredSelector<Mine>>& layer) {
  return layer.kv_len();
}
