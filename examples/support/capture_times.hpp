// Times whole prefills of captured layers by several methods, interleaved. In each of `rounds`
// rounds, after one that warms up, all chunks of all layers run by dense and by each method in
// turn. A machine that slows down slows all of them; ratios are taken within a round.
#pragma once

#include "support/dense_reference.hpp"
#include "support/methods.hpp"

namespace quoka_examples {

struct CaptureMethod {
  std::string method;
  MethodOptions options;
};

// Seconds of all layers and chunks, a number per round; [0] is dense, then the methods.
using CaptureSeconds = std::vector<std::vector<double>>;

// The layers are one sequence's: what a method shares between layers it shares among these.
// progress(round, tokens) is called after each chunk.
template <class Progress>
CaptureSeconds time_captures(const std::vector<LayerCapture>& captures,
                             const std::vector<CaptureMethod>& methods, Index chunk, int rounds,
                             const quoka::AttentionOptions& attention, quoka::ThreadPool& threads,
                             Progress&& progress) {
  const Index len = captures.front().q.dimension(2), count = std::ssize(captures);
  std::vector<Index> which;
  for (Index i = 0; i < count; ++i) which.push_back(i);
  CaptureSeconds seconds(methods.size() + 1);
  for (int round = -1; round < rounds; ++round) {
    std::vector<LayerStack> stacks;
    const auto add_stack = [&](const std::string& method, const MethodOptions& options) {
      LayerStack& stack = stacks.emplace_back();
      stack = make_layers(method, shape_of(captures.front()), options, attention, which, count);
      for (auto& layer : stack) layer->reserve(len);
    };
    add_stack("dense", {.ranks = methods.empty() ? nullptr : methods.front().options.ranks});
    for (const CaptureMethod& method : methods) add_stack(method.method, method.options);
    std::vector<double> of_round(stacks.size());
    for (Index begin = 0; begin < len; begin += chunk) {
      const Index n = std::min(chunk, len - begin);
      for (std::size_t l = 0; l < captures.size(); ++l) {
        const quoka::TensorView<const float> q = captures[l].q, k = captures[l].k,
                                             v = captures[l].v;
        Tensor<float> out(q.batch(), q.heads(), n, v.dim());
        for (std::size_t s = 0; s < stacks.size(); ++s)
          of_round[s] += seconds_of([&] {
            stacks[s][l]->forward(q.slice(begin, n), k.slice(begin, n), v.slice(begin, n), out,
                                  threads);
          });
      }
      progress(round + 1, begin + n);
    }
    for (std::size_t s = 0; s < stacks.size() && round >= 0; ++s) seconds[s].push_back(of_round[s]);
  }
  return seconds;
}

}  // namespace quoka_examples
