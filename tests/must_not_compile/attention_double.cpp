// expect: elements must be float, Eigen::half or Eigen::bfloat16
// Nothing converts a tensor of double in silence.
#include <quoka/attention/attention.hpp>
#include <quoka/rows/tensor.hpp>

#ifdef QUOKA_VALID
using Scalar = float;
#else
using Scalar = double;
#endif
using Tensor = Eigen::Tensor<Scalar, 4, Eigen::RowMajor>;

void attend(const Tensor& q, const quoka::Tensor<float>& k, quoka::Tensor<float>& out) {
  quoka::attention(q, {}, {k, k}, out);
}
