// expect: a Scorer's State needs Index bytes.. const
// lines: 15
// What a State holds is counted: layers add it up.
#include <quoka/prefill/chunked_prefill.hpp>
#include <quoka/select/scored_selector.hpp>

struct Mine {
  struct Options {
    quoka::Budget budget = quoka::Budget::keys(1024);
  };
  struct State {
    static void truncate(quoka::Index) {}
#ifdef QUOKA_VALID
    static quoka::Index bytes() { return 0; }
#endif
  };
  explicit Mine(const Options&) {}
  void score(const quoka::SelectorInput&, State&, quoka::TensorView<float, 3>,
             quoka::ExecutorRef) const {}
};

quoka::Index len_of(const quoka::ChunkedPrefill<quoka::ScoredSelector<Mine>>& layer) {
  return layer.kv_len();
}
