#include <quoka/rows/tensor.hpp>
#include <quoka/runtime/thread_pool.hpp>

int main() {
  Eigen::Tensor<float, 4, Eigen::RowMajor> x(1, 2, 3, 4);
  quoka::ThreadPool threads(2);
  return threads.workers() == 2 && quoka::TensorView<float>(x).len() == 3 ? 0 : 1;
}
