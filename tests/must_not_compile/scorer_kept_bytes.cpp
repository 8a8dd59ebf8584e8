// expect: a State's kept_bytes.. must be Index kept_bytes.. const
// lines: 15
// Taken for absent, such a State would be handed the keys of another sequence.
#include <quoka/prefill/chunked_prefill.hpp>
#include <quoka/select/scored_selector.hpp>

struct Mine {
  struct Options {
    quoka::Budget budget = quoka::Budget::keys(1024);
  };
  struct State {
    static void truncate(quoka::Index) {}
    static quoka::Index bytes() { return 0; }
#ifdef QUOKA_VALID
    quoka::Index kept_bytes() const { return 0; }
    quoka::Index kept_len() const { return 0; }
#else
    quoka::Index kept_bytes() { return 0; }
#endif
  };
  explicit Mine(const Options&) {}
  void score(const quoka::SelectorInput&, State&, quoka::TensorView<float, 3>,
             quoka::ExecutorRef) const {}
};

quoka::Index len_of(const quoka::ChunkedPrefill<quoka::ScoredSelector<Mine>>& layer) {
  return layer.kv_len();
}
