// expect: (no matching function|could not convert|no viable conversion|cannot convert|deleted)
// The keys of a Past are borrowed: a tensor made for the call would be gone.
#include <quoka/attention/attention.hpp>
#include <quoka/rows/tensor.hpp>

using Tensor = quoka::Tensor<float>;
#ifdef QUOKA_VALID
Tensor& make();
#else
Tensor make();
#endif

quoka::Past past_of_made(const Tensor& v) { return {make(), v}; }
