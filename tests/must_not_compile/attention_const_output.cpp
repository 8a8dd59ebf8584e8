// expect: an output must not be const
// Results cannot go into a const tensor.
#include <quoka/attention/attention.hpp>
#include <quoka/rows/tensor.hpp>

using Tensor = quoka::Tensor<float>;
#ifdef QUOKA_VALID
using Output = Tensor;
#else
using Output = const Tensor;
#endif

void attend(const Tensor& q, const Tensor& k, Output& out) { quoka::attention(q, {}, {k, k}, out); }
