// expect: (constraint failure|constraints not satisfied)
// A selector has a State that its caller holds, and select() is const: this one carries its own.
#include <quoka/layer/chunked_prefill.hpp>
#include <quoka/select/dense.hpp>

struct NoState {
  struct Options {};
  explicit NoState(const Options&) {}
  void select(const quoka::SelectorInput&, quoka::Selection&, quoka::ExecutorRef) {}
};

#ifdef QUOKA_VALID
using Selector = quoka::DenseSelector;
#else
using Selector = NoState;
#endif

quoka::Index len_of(const quoka::ChunkedPrefill<Selector>& layer) { return layer.kv_len(); }
