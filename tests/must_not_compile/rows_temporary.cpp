// expect: deleted
// Rows of a temporary tensor would outlive it.
#include <quoka/rows/rows.hpp>
#include <quoka/rows/tensor.hpp>

#ifdef QUOKA_VALID
quoka::Tensor<float>& make();
#else
quoka::Tensor<float> make();
#endif

quoka::Index len_of_made() {
  const quoka::Rows rows(make());
  return rows.len();
}
