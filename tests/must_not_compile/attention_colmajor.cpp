// expect: tensors must be row-major: Eigen::Tensor<T, 4, Eigen::RowMajor>
// Eigen's default order is column-major; read as [batch, heads, len, dim] it would be silently wrong.
#include <quoka/attention/attention.hpp>
#include <quoka/rows/tensor.hpp>

using Tensor = quoka::Tensor<float>;
#ifdef QUOKA_VALID
using Keys = Tensor;
#else
using Keys = Eigen::Tensor<float, 4>;
#endif

void attend(const Tensor& q, const Keys& k, Tensor& out) { quoka::attention(q, {k, k}, {}, out); }
