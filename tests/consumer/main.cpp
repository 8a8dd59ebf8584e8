#include <quoka/quoka.hpp>
#include <quoka/rows/tensor.hpp>

int main() {
  Eigen::Tensor<float, 4, Eigen::RowMajor> q(1, 2, 3, 4), out(1, 2, 3, 4);
  const Eigen::Tensor<float, 4, Eigen::RowMajor> k = q.setRandom(), v = k.constant(2.0f);
  quoka::ThreadPool threads(2);
  quoka::attention(q, {k, v}, {}, out, {.causal = false}, threads);
  const float error = out.data()[0] - 2.0f;  // the mean of equal values
  return error < 1e-5f && error > -1e-5f ? 0 : 1;
}
