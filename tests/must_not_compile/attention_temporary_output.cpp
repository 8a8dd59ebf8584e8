// expect: (no matching function|could not convert|no viable conversion|cannot convert|deleted)
// Results in a tensor made for the call would be lost.
#include <quoka/attention/attention.hpp>
#include <quoka/rows/tensor.hpp>

using Tensor = quoka::Tensor<float>;
#ifdef QUOKA_VALID
Tensor& make();
#else
Tensor make();
#endif

void attend(const Tensor& q, const Tensor& k) { quoka::attention(q, {}, {k, k}, make()); }
