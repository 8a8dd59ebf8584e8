// expect: elements must be float, Eigen::half or Eigen::bfloat16
// Results are not widened to double in silence.
#include <quoka/attention/attention.hpp>
#include <quoka/rows/tensor.hpp>

#ifdef QUOKA_VALID
using Scalar = Eigen::half;
#else
using Scalar = double;
#endif
using Output = Eigen::Tensor<Scalar, 4, Eigen::RowMajor>;

void attend(const quoka::Tensor<float>& q, const quoka::Tensor<float>& k, Output& out) {
  quoka::attention(q, {}, {k, k}, out);
}
