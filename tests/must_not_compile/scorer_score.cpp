// expect: a Scorer needs void score.const SelectorInput&, State&, TensorView<float, 3> scores, ExecutorRef. const
// lines: 15
// One scorer serves all threads: score() is const.
#include <quoka/prefill/chunked_prefill.hpp>
#include <quoka/select/scored_selector.hpp>

struct Mine {
  struct Options {
    quoka::Budget budget = quoka::Budget::keys(1024);
  };
  using State = quoka::NoState;
  explicit Mine(const Options&) {}
#ifdef QUOKA_VALID
  void score(const quoka::SelectorInput&, State&, quoka::TensorView<float, 3>,
             quoka::ExecutorRef) const {}
#else
  void score(const quoka::SelectorInput&, State&, quoka::TensorView<float, 3>, quoka::ExecutorRef) {
  }
#endif
};

quoka::Index len_of(const quoka::ChunkedPrefill<quoka::ScoredSelector<Mine>>& layer) {
  return layer.kv_len();
}
