// expect: no matching (function|constructor)
// Eigen's default order is column-major; read as [batch, heads, len, head_dim] it would be silently wrong.
#include <quoka/rows/tensor.hpp>

#ifdef QUOKA_VALID
using Tensor = Eigen::Tensor<float, 4, Eigen::RowMajor>;
#else
using Tensor = Eigen::Tensor<float, 4>;
#endif

void view_of(const Tensor& tensor) {
  const quoka::TensorView<const float> view(tensor);
  static_cast<void>(view);
}
