// expect: a Scorer needs struct Options with a member Budget budget
// lines: 15
// Without a budget there is nothing to select.
#include <quoka/prefill/chunked_prefill.hpp>
#include <quoka/select/scored_selector.hpp>

struct Mine {
  struct Options {
#ifdef QUOKA_VALID
    quoka::Budget budget = quoka::Budget::keys(1024);
#else
    quoka::Index keys = 1024;
#endif
  };
  using State = quoka::NoState;
  explicit Mine(const Options&) {}
  void score(const quoka::SelectorInput&, State&, quoka::TensorView<float, 3>,
             quoka::ExecutorRef) const {}
};

quoka::Index len_of(const quoka::ChunkedPrefill<quoka::ScoredSelector<Mine>>& layer) {
  return layer.kv_len();
}
