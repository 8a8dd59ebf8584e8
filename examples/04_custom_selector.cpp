// A selector of your own: a score per key is all there is to write. This one asks the mean query of
// the chunk for the keys it likes best, which is what every method comes to that averages logits.

#include <quoka/quoka.hpp>

#include <iostream>

struct MeanQueryOptions {
  quoka::Budget budget = 1024;
  quoka::Index window = 1, keep_first = 4, keep_last = 0;  // used by ScoredSelector
};

struct MeanQueryScorer {
  using Options = MeanQueryOptions;
  using State = quoka::NoState;  // nothing is carried from chunk to chunk

  explicit MeanQueryScorer(const Options& = {}) {}

  // scores [batch, kv_heads, kv_len]; more is better.
  template <class T>
  void score(const quoka::SelectorInput<T>& input, State&, float* scores,
             quoka::ExecutorRef executor) const {
    const auto& [q, k, norms, capacity, scale] = input;
    quoka::Tensor<float> mean(k.batch(), k.heads(), 1, k.dim());
    mean.setZero();
    for (quoka::Index b = 0; b < q.batch(); ++b)
      for (quoka::Index head = 0; head < q.heads(); ++head)
        for (quoka::Index i = 0; i < q.len(); ++i)
          for (quoka::Index c = 0; c < q.dim(); ++c)
            mean(b, head / input.group(), 0, c) += static_cast<float>(q.row(b, head, i)[c]);
    const auto likes = quoka::score_keys(mean, k, {quoka::Scoring::dot}, {}, executor);
    std::copy_n(likes.data(), likes.size(), scores);
  }
};
using MeanQuerySelector = quoka::ScoredSelector<MeanQueryScorer>;

int main() {
  quoka::Tensor<float> q(1, 8, 128, 64), k(1, 2, 128, 64), v(1, 2, 128, 64), out = q;
  const quoka::LayerShape shape{.q_heads = 8, .kv_heads = 2, .head_dim = 64};
  quoka::ChunkedPrefill<MeanQuerySelector> mine(shape, {.budget = 256});
  quoka::ChunkedPrefill<quoka::QuokaSelector> quoka_layer(shape, {.budget = 256});

  for (int chunk = 0; chunk < 16; ++chunk) {
    q.setRandom(), k.setRandom(), v.setRandom();
    mine.forward(q, k, v, out);
    quoka_layer.forward(q, k, v, out);
  }
  quoka::Index common = 0;
  const auto a = mine.selection().row(0, 0), b = quoka_layer.selection().row(0, 0);
  for (const quoka::Position key : a) common += std::binary_search(b.begin(), b.end(), key);
  std::cout << "KV head 0 keeps " << a.size() << " of " << mine.selection().kv_len() << " keys, "
            << common << " of them are QuoKA's too\n";
}
