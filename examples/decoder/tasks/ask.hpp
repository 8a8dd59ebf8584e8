// Asks a model the samples of a task: prefill, and the logits of the answers.
#pragma once

#include "decoder/model/session.hpp"
#include "decoder/tasks/tasks.hpp"

#include <cstdint>
#include <vector>

namespace quoka_decoder {

// The logits of the sample's answers after its prompt, [answers, vocabulary]. The session is empty
// and has this chunk; what stands before the question's first chunk is filled, not run.
Vector answer_logits(Session& session, const TaskSample& sample, Index chunk);

// Which samples of an evaluation.
struct Questions {
  Task task;
  Index length;
  Index first = 0, count = 1;
  std::uint32_t seed = 1;
};

struct Asked {
  TaskScore score;
  // Past keys that a KV head attended to, mean over heads, layers and the chunks that were run and had a past.
  double kept = 0.0;
};

// What these samples gave. They run beside each other, each in a session of its own on one
// thread, since the heads of small models are too small to divide: they are the same for any number
// of threads. Throws as Session, make_sample and score do.
std::vector<Asked> ask(const Model& model, const SessionOptions& options,
                       const Questions& questions, quoka::ThreadPool& threads);

}  // namespace quoka_decoder
