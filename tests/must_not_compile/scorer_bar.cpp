// expect: a Scorer's bar.. must be float bar.. const
// lines: 15
// Taken for absent, a budget by scores would be refused.
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
  float bar() const { return 0.5f; }
#else
  float bar(quoka::Index) const { return 0.5f; }
#endif
};

quoka::Index len_of(const quoka::ChunkedPrefill<quoka::ScoredSelector<Mine>>& layer) {
  return layer.kv_len();
}
