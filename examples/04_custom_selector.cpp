// A selector of your own: you only write a score per key. This one scores keys by the chunk's mean
// query, as every method does that averages logits.

#include <quoka/quoka.hpp>
#include <quoka/rows/tensor.hpp>

#include <algorithm>
#include <functional>
#include <iostream>
#include <vector>

using quoka::Index;

struct MeanQueryScorer : quoka::ScorerDefaults {
  struct Options {
    quoka::Budget budget = quoka::Budget::keys(1024);
    Index keep_first = 4;
  };
  using State = quoka::NoState;  // nothing is carried from chunk to chunk

  explicit MeanQueryScorer(const Options&) {}

  // scores [batch, kv_heads, kv_len]; more is better.
  void score(const quoka::SelectorInput& input, State&, quoka::TensorView<float, 3> scores,
             quoka::ExecutorRef executor) const {
    const quoka::Rows &q = input.q, &k = input.k;
    quoka::for_each_kv_head(k, executor, [&](Index b, Index kv_head, int) {
      quoka::RowReader query, key;  // rows of any format, as floats
      std::vector<float> sum(static_cast<std::size_t>(q.dim()));
      for (Index head = kv_head * input.group(); head < (kv_head + 1) * input.group(); ++head)
        for (Index i = 0; i < q.len(); ++i)
          std::transform(sum.begin(), sum.end(), query.read(q, b, head, i), sum.begin(),
                         std::plus());
      for (Index t = 0; t < k.len(); ++t)
        scores.at(b, kv_head, t) = quoka::dot(key.read(k, b, kv_head, t), sum.data(), k.dim());
    });
  }
};
using MeanQuerySelector = quoka::ScoredSelector<MeanQueryScorer>;

int main() {
  quoka::Tensor<float> q(1, 8, 128, 64), k(1, 2, 128, 64), v(1, 2, 128, 64), out = q;
  const quoka::LayerShape shape{.q_heads = 8, .kv_heads = 2, .head_dim = 64};
  quoka::ChunkedPrefill<MeanQuerySelector> mine(shape, {.budget = quoka::Budget::keys(256)});
  quoka::ChunkedPrefill<quoka::QuokaSelector> quoka_layer(shape,
                                                          {.budget = quoka::Budget::keys(256)});

  for (int chunk = 0; chunk < 16; ++chunk) {
    q.setRandom(), k.setRandom(), v.setRandom();
    mine.forward(q, k, v, out);
    quoka_layer.forward(q, k, v, out);
  }
  Index common = 0;
  const auto a = mine.selection().row(0, 0), b = quoka_layer.selection().row(0, 0);
  for (const quoka::Position key : a) common += std::binary_search(b.begin(), b.end(), key);
  std::cout << "KV head 0 keeps " << a.size() << " of " << mine.selection().kv_len() << " keys, "
            << common << " of them are QuoKA's too\n";
}
