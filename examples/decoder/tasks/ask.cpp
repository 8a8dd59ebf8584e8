#include "decoder/tasks/ask.hpp"

#include <algorithm>
#include <span>

namespace quoka_decoder {

Vector answer_logits(Session& session, const TaskSample& sample, Index chunk) {
  const std::span<const Token> tokens = sample.tokens;
  const Index vocabulary = session.model().config.vocabulary;
  // Chunks without an answer; the question may reach from one chunk into the next.
  const Index before = sample.positions.front() / chunk * chunk;
  if (before > 0) session.fill(tokens.first(static_cast<std::size_t>(before)));
  Vector answers;
  for (Index begin = before; begin < std::ssize(tokens); begin += chunk) {
    const Index n = std::min(chunk, std::ssize(tokens) - begin);
    session.run(tokens.subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(n)));
    const Index first = std::max(begin, sample.positions.front());
    const Vector logits = session.logits(begin + n - first);
    for (const Index position : sample.positions)
      if (position >= begin && position < begin + n) {
        const auto row = logits.begin() + (position - first) * vocabulary;
        answers.insert(answers.end(), row, row + vocabulary);
      }
  }
  return answers;
}

std::vector<Asked> ask(const Model& model, const SessionOptions& options,
                       const Questions& questions, quoka::ThreadPool& threads) {
  std::vector<Asked> asked(static_cast<std::size_t>(questions.count));
  threads.run(questions.count, [&](Index i, int) {
    const TaskSample sample =
        evaluation_sample(questions.task, questions.length, questions.first + i, questions.seed);
    quoka::ThreadPool one_thread(1);
    Session session(model, options, one_thread);
    session.reserve(questions.length);
    Index kept = 0, heads = 0;
    session.watch = [&](Index layer, auto&&...) {
      const quoka::Selection& selection = session.layer(layer).selection();
      if (selection.kv_len() == 0) return;
      kept += selection.sum_of_counts(), heads += selection.kv_heads();
    };
    Asked& result = asked[static_cast<std::size_t>(i)];
    result.score =
        score(sample, answer_logits(session, sample, options.chunk), model.config.vocabulary);
    if (heads > 0) result.kept = static_cast<double>(kept) / static_cast<double>(heads);
  });
  return asked;
}

}  // namespace quoka_decoder
