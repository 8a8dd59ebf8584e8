// expect: (deleted|invalid use of void)
// A view of a temporary tensor would outlive it.
#include <quoka/rows/tensor.hpp>

#ifdef QUOKA_VALID
quoka::Tensor<float>& make();
#else
quoka::Tensor<float> make();
#endif

quoka::Index len_of_made() { return quoka::view_of(make()).len(); }
