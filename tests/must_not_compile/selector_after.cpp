// expect: a selector's select.. of five arguments must be void select
// lines: 15
// Taken for absent, what follows a selection would never be taken along.
#include <quoka/prefill/chunked_prefill.hpp>
#include <quoka/views/tensor.hpp>

struct Everything {
  struct Options {};
  using State = quoka::NoState;
  explicit Everything(const Options&) {}
  void select(const quoka::SelectorInput& input, State&, quoka::Selection& chosen,
              quoka::ExecutorRef) const {
    chosen.select_all(input.k.batch(), input.k.heads(), input.k.len());
  }
#ifdef QUOKA_VALID
  void select(const quoka::SelectorInput& input, State& state, quoka::Selection& chosen,
              quoka::ExecutorRef executor, quoka::AfterSelection*) const {
    select(input, state, chosen, executor);
  }
#else
  void select(const quoka::SelectorInput& input, State& state, quoka::Selection& chosen,
              quoka::ExecutorRef executor, const quoka::Selection*) const {
    select(input, state, chosen, executor);
  }
#endif
  void appended(const quoka::SelectorInput&, State&, quoka::ExecutorRef) const {}
};

void attend(quoka::ChunkedPrefill<Everything>& layer, const quoka::Tensor<float>& x,
            quoka::Tensor<float>& out) {
  layer.forward(x, x, x, out);
}
