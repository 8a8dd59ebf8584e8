// What attention() does not take. Each case changes one type of a call that compiles.
// expect COLUMN_MAJOR: tensors must be row-major: Eigen::Tensor<T, 4, Eigen::RowMajor>
// expect RANK_TWO: tensors must have rank 4, .batch, heads, len, dim., or rank 3, without batch
// expect DOUBLE: elements must be float, Eigen::half or Eigen::bfloat16
// expect DOUBLE_OUTPUT: elements must be float, Eigen::half or Eigen::bfloat16
// expect CONST_OUTPUT: an output must not be const
#include <quoka/attention/attention.hpp>
#include <quoka/rows/tensor.hpp>

#if defined(COLUMN_MAJOR)  // Eigen's default: read as [batch, heads, len, dim] it would be silently wrong
using Keys = Eigen::Tensor<float, 4>;
#else
using Keys = quoka::Tensor<float>;
#endif

#if defined(RANK_TWO)  // [len, dim] has no heads
using Queries = quoka::Tensor<float, 2>;
#elif defined(DOUBLE)  // nothing is converted in silence
using Queries = Eigen::Tensor<double, 4, Eigen::RowMajor>;
#else
using Queries = quoka::Tensor<float, 3>;
#endif

#if defined(DOUBLE_OUTPUT)
using Output = Eigen::Tensor<double, 4, Eigen::RowMajor>;
#elif defined(CONST_OUTPUT)
using Output = const quoka::Tensor<float>;
#else
using Output = Eigen::Tensor<Eigen::half, 4, Eigen::RowMajor>;
#endif

void attend(const Queries& q, const Keys& k, Output& out) { quoka::attention(q, {}, {k, k}, out); }
