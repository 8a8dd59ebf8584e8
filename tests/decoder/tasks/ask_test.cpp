// Asking a model a task's samples.
#include "decoder/tasks/ask.hpp"

#include "decoder/tiny_models.hpp"

#include "decoder/file/gguf.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <stdexcept>

namespace quoka_decoder {
namespace {

// A model with noise for weights, and a vocabulary for the tasks.
Model noise_model() {
  ModelConfig c;
  c.architecture = "llama";
  c.layers = 2, c.d_model = 32, c.q_heads = 4, c.kv_heads = 2, c.head_dim = c.v_dim = 16;
  c.ffn_dim = 48, c.vocabulary = 512, c.context = 1024, c.rope.dim = 16;
  return random_model(c, TensorType::f32);
}

SessionOptions choose(const std::string& method, quoka::Budget budget, Index chunk) {
  SessionOptions options;
  options.method = method;
  options.selector.budget = budget;
  options.chunk = chunk;
  return options;
}

// Whole chunks or not, a question within one chunk or across two: as if the prompt were run at once.
TEST(AnswerLogits, AreThoseOfTheWholePromptAtThePositions) {
  const Model model = noise_model();
  quoka::ThreadPool threads(1);
  for (const Task task : {Task::single, Task::multi_query, Task::vt, Task::cwe}) {
    for (const Index length : {128, 131, 133, 200}) {
      const TaskSample sample = evaluation_sample(task, length, 5, 1);
      const SessionOptions options = choose("quoka", quoka::Budget::keys(24), 32);
      Session asked(model, options, threads);
      const Vector logits = answer_logits(asked, sample, options.chunk);
      SessionOptions in_one_batch = options;
      in_one_batch.batch = 256;
      Session whole(model, in_one_batch, threads);
      whole.run(sample.tokens);
      const Vector all = whole.logits(length);
      ASSERT_EQ(std::ssize(logits), std::ssize(sample.positions) * 512);
      for (std::size_t a = 0; a < sample.positions.size(); ++a)
        for (Index t = 0; t < 512; ++t)
          ASSERT_NEAR(logits[a * 512 + static_cast<std::size_t>(t)],
                      all[static_cast<std::size_t>(sample.positions[a] * 512 + t)], 1e-4)
              << name_of(task) << ", length " << length << ", answer " << a;
    }
  }
}

TEST(Ask, GivesTheSameScoresForAnyNumberOfThreadsAndAnyPartOfTheSamples) {
  const Model model = noise_model();
  quoka::ThreadPool one(1), three(3);
  for (const std::string method : {"dense", "quoka", "random"}) {
    // cwe asks for ten words: noise is right about some.
    const auto rights = [&](Index first, Index count, quoka::ThreadPool& threads) {
      std::vector<Index> right;
      for (const Asked& asked : ask(model, choose(method, quoka::Budget::keys(16), 32),
                                    {Task::cwe, 150, first, count, 1}, threads))
        right.push_back(asked.score.right);
      return right;
    };
    const auto all = rights(0, 40, one);
    EXPECT_GT(std::ranges::max(all), 0);
    EXPECT_EQ(rights(0, 40, three), all);
    EXPECT_EQ(rights(30, 10, three), std::vector<Index>(all.end() - 10, all.end()));
  }
}

// 300 tokens in chunks of 64: pasts of 64, 128, 192 and 256 keys, in the first layer all, in the last one that
// of the question's chunk, which is the fifth.
TEST(Ask, TellsHowManyPastKeysAHeadAttendedTo) {
  const Model model = noise_model();
  quoka::ThreadPool threads(1);
  const auto kept = [&](const std::string& method, quoka::Budget budget) {
    return ask(model, choose(method, budget, 64), {Task::single, 300, 0, 1, 1}, threads)
        .front()
        .kept;
  };
  EXPECT_DOUBLE_EQ(kept("dense", quoka::Budget::keys(1)), (64 + 128 + 192 + 256 + 256) / 5.0);
  EXPECT_DOUBLE_EQ(kept("quoka", quoka::Budget::keys(100)), (64 + 4 * 100) / 5.0);
}

TEST(Ask, RefusesAModelWithoutTheTasksTokens) {
  const auto bytes = write_tiny_model("llama");
  const Model model = load_model(std::make_shared<const GgufFile>(GgufFile::parse(bytes, "llama")));
  quoka::ThreadPool threads(2);
  EXPECT_THROW((void)ask(model, {}, {Task::single, 64}, threads), std::invalid_argument);
}

}  // namespace
}  // namespace quoka_decoder
