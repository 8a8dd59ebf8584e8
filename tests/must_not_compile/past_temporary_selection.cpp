// expect: deleted
// A Past borrows its Selection.
#include <quoka/attention/attention.hpp>
#include <quoka/rows/tensor.hpp>

#ifdef QUOKA_VALID
const quoka::Selection& selection();
#else
quoka::Selection selection();
#endif

quoka::Past past_of(const quoka::Tensor<float>& k, const quoka::Tensor<float>& v) {
  return quoka::Past(k, v, selection());
}
