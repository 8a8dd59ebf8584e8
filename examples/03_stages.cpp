// The paper's Algorithm 1, stage by stage, on Eigen tensors; then the same by QuokaSelector.

#include <quoka/quoka.hpp>
#include <quoka/select/stages.hpp>

#include <iostream>

using Tensor = quoka::Tensor<float>;  // a row-major Eigen::Tensor

namespace {

template <class T>
void print_shape(const char* name, const T& tensor) {
  std::cout << name << " [";
  const char* separator = "";
  for (const auto size : tensor.dimensions()) {
    std::cout << separator << size;
    separator = ", ";
  }
  std::cout << "]\n";
}

}  // namespace

int main() {
  const quoka::Index kv_heads = 8;
  Tensor q(1, 32, 128, 128), past_k(1, kv_heads, 8192, 128);
  q.setRandom();
  past_k.setRandom();

  const auto kept = quoka::subselect_queries(q, 16);        // most dissimilar first
  const auto q_bar = quoka::pre_aggregate(kept, kv_heads);  // normalised, averaged over the group
  const auto scores = quoka::score_keys(q_bar, past_k);     // maximum cosine over the 16
  const quoka::Selection selection = quoka::top_k(scores, 1024);  // ascending positions
  const auto k_star = quoka::gather(past_k, selection);           // for another attention kernel

  print_shape("q      ", q);
  print_shape("kept   ", kept);
  print_shape("q_bar  ", q_bar);
  print_shape("scores ", scores);
  print_shape("k_star ", k_star);
  const auto row = selection.row(0, 0);
  std::cout << "KV head 0 keeps keys " << row[0] << ", " << row[1] << ", " << row[2] << ", ... "
            << row.back() << "\n";

  const bool same =
      selection ==
      quoka::QuokaSelector({.budget = quoka::Budget::keys(1024)}).select(q, past_k, {});
  std::cout << "QuokaSelector selects " << (same ? "the same" : "OTHER KEYS") << "\n";
  return same ? 0 : 1;
}
