// Asks a small model the samples of a task (ruler_tasks.hpp): prefill by any selector, and the
// logits of the answers.
#pragma once

#include "support/methods.hpp"
#include "support/ruler_tasks.hpp"
#include "support/small_model.hpp"

#include <quoka/runtime/thread_pool.hpp>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace quoka_examples {

// A sequence of a model, each layer with the selector of a name.
class SmallSession {
 public:
  // The model must outlive it. Throws std::invalid_argument as make_layers does.
  SmallSession(const SmallModel& model, const std::string& method, const MethodOptions& options)
      : model_(model) {
    std::vector<Index> which(static_cast<std::size_t>(model.layers()));
    std::iota(which.begin(), which.end(), Index{0});
    layers_ = make_layers(method,
                          {.q_heads = model.q_heads,
                           .kv_heads = model.kv_heads,
                           .head_dim = model.head_dim,
                           .v_dim = model.head_dim},
                          options, {}, which, model.layers());
  }

  // A chunk after those that were run; see SmallModel::run().
  SmallModel::Rows run(std::span<const Token> chunk, bool keys_only = false) {
    return model_.run(
        chunk, len(),
        [&](Index i, AnyLayer::View q, AnyLayer::View k, AnyLayer::View v,
            SmallModel::OutView out) {
          AnyLayer& layer = *layers_[static_cast<std::size_t>(i)];
          if (out.data() == nullptr) return layer.append(q, k, v, one_thread_);
          layer.forward(q, k, v, out, one_thread_);
          const quoka::Selection& selection = layer.selection();
          if (selection.kv_len() == 0) return;
          kept_ += static_cast<double>(selection.sum_of_counts()) /
                   static_cast<double>(selection.heads());
          ++chunks_;
        },
        keys_only);
  }

  // [answers, vocabulary] after the sample's prompt, of which nothing was run.
  SmallModel::Rows answers(const TaskSample& sample, Index chunk) {
    const std::span<const Token> tokens = sample.tokens;
    SmallModel::Rows result(std::ssize(sample.positions), model_.vocabulary);
    Index answer = 0;
    for (Index begin = 0; begin < std::ssize(tokens); begin += chunk) {
      const Index n = std::min(chunk, std::ssize(tokens) - begin);
      const auto part =
          tokens.subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(n));
      const bool asked = begin + n > sample.positions.front();  // chunks before have no answer
      const SmallModel::Rows states = run(part, !asked);
      for (; answer < result.rows(); ++answer) {
        const Index at = sample.positions[static_cast<std::size_t>(answer)] - begin;
        if (at >= n) break;
        result.row(answer) = model_.logits(states.row(at));
      }
    }
    return result;
  }

  Index len() const { return layers_.front()->kv_len(); }
  // Past keys that a KV head attended to, mean over heads, layers and the chunks that were run and
  // had a past.
  double kept() const { return chunks_ == 0 ? 0.0 : kept_ / static_cast<double>(chunks_); }

 private:
  const SmallModel& model_;
  LayerStack layers_;
  quoka::ThreadPool one_thread_{1};
  double kept_ = 0.0;
  Index chunks_ = 0;  // of all layers
};

// Which samples of an evaluation.
struct Questions {
  Task task;
  Index length;
  Index first = 0, count = 1;
  std::uint32_t seed = 1;
  Index chunk = 128;
};

struct Asked {
  TaskScore score;
  double kept = 0.0;
};

// The outcomes of these samples. They run in parallel, each in a session of its own on one thread,
// since the heads of small models are too small to divide. Answers are the same for any number of
// threads. Throws as SmallSession, make_sample and score do.
inline std::vector<Asked> ask(const SmallModel& model, const std::string& method,
                              const MethodOptions& options, const Questions& questions,
                              quoka::ThreadPool& threads) {
  require_at_least("chunk", questions.chunk, 1);
  std::vector<Asked> asked(static_cast<std::size_t>(questions.count));
  threads.run(questions.count, [&](Index i, int) {
    const TaskSample sample =
        evaluation_sample(questions.task, questions.length, questions.first + i, questions.seed);
    SmallSession session(model, method, options);
    const SmallModel::Rows logits = session.answers(sample, questions.chunk);
    asked[static_cast<std::size_t>(i)] = {
        score(sample, {logits.data(), static_cast<std::size_t>(logits.size())}, model.vocabulary),
        session.kept()};
  });
  return asked;
}

}  // namespace quoka_examples
