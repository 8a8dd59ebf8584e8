// expect: (could not convert|no matching function|no viable conversion|cannot convert)
// Results cannot go into a const tensor.
#include <quoka/attention/attention.hpp>

using Tensor = Eigen::Tensor<float, 4, Eigen::RowMajor>;
#ifdef QUOKA_VALID
using Output = Tensor;
#else
using Output = const Tensor;
#endif

void attend(const Tensor& q, const Tensor& k, const Tensor& v, Output& out) { quoka::attention(q, {}, {k, v}, out); }
