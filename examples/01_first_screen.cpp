// The README's first screen: a layer that prefills a prompt chunk by chunk with QuoKA.
#include <quoka/quoka.hpp>
#include <quoka/views/tensor.hpp>

#include <iostream>

int main() {
  // [batch, heads, tokens, channels], row-major Eigen tensors; yours come from the model.
  quoka::Tensor<float> q(1, 32, 128, 128), k(1, 8, 128, 128), v(1, 8, 128, 128), out = q;
  quoka::ThreadPool threads(2);
  quoka::ChunkedPrefill<quoka::QuokaSelector> layer({.q_heads = 32, .kv_heads = 8, .head_dim = 128},
                                                    {.budget = quoka::Budget::keys(1024)});

  for (int chunk = 0; chunk < 24; ++chunk) {
    q.setRandom(), k.setRandom(), v.setRandom();
    layer.forward(q, k, v, out, threads);
  }
  std::cout << "prefilled " << layer.kv_len() << " tokens; the last chunk attended to "
            << layer.selection().max_count() << " of " << layer.selection().kv_len()
            << " cached keys per KV head, and to itself\n";
}
