// expect: (constraints not satisfied|constraint failure|no matching function|Storage)
// Storage is float, half or bfloat16; nothing converts a tensor of double in silence.
#include <quoka/attention/attention.hpp>

#ifdef QUOKA_VALID
using Scalar = float;
#else
using Scalar = double;
#endif
using Tensor = Eigen::Tensor<Scalar, 4, Eigen::RowMajor>;

void attend(const Tensor& q, const Tensor& k, const Tensor& v, Tensor& out) { quoka::attention(q, {}, {k, v}, out); }
