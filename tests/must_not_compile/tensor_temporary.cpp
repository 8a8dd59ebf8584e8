// expect: deleted
// A view of a temporary tensor would outlive it.
#include <quoka/rows/tensor.hpp>

using Tensor = Eigen::Tensor<float, 4, Eigen::RowMajor>;
#ifdef QUOKA_VALID
Tensor& make();
#else
Tensor make();
#endif

void view_of_made() {
  const quoka::TensorView<const float> view(make());
  static_cast<void>(view);
}
