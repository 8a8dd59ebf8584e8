#include <quoka/quoka.hpp>

int main() {
  const Eigen::Tensor<float, 4, Eigen::RowMajor> keys(1, 2, 3, 4);
  const quoka::TensorView<const float> view = keys;  // [batch, kv_heads, kv_len, head_dim]
  quoka::ThreadPool threads(2);
  quoka::Index heads_seen[2] = {};
  threads.run(view.heads(), [&](quoka::Index kv_head, int) { heads_seen[kv_head] = 1; });
  return heads_seen[0] + heads_seen[1] == view.heads() ? 0 : 1;
}
