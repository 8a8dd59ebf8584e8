// One pass of `check`: contenders read the same text side by side, a ubatch each in turn, the first
// of them is what the others are compared with.
//
//   first ubatch, read once and forgotten
//   ubatch ─▶ times, logits at samples ─▶ at each length: questions, whose tokens leave the cache
//   again
//
// A measurement at a position is that of a prompt of that length: a prefix does not depend on
// what follows.
#pragma once

#include "check_text.hpp"
#include "llama_session.hpp"

#include "support/clock.hpp"

#include <quoka/base/index.hpp>

#include <cmath>
#include <functional>
#include <memory>
#include <span>

namespace quoka_ggml {

using quoka::Index;

struct Contender {
  std::string name;
  std::unique_ptr<Session> session;
};

// Results of one contender.
struct Readings {
  std::vector<double> seconds;  // of each ubatch
  std::vector<double> nll, kl;  // of each sample: of the next token; from the first contender's
  std::vector<bool> agrees;     // the most probable token is the first contender's
  std::vector<std::vector<double>> right;  // [length][question]: share of the answer's numbers
};

struct Pass {
  std::vector<Index> ends;                      // of ubatches, in tokens
  std::vector<Index> samples;                   // positions
  std::vector<std::vector<std::size_t>> asked;  // [length]: questions of the reading
  std::vector<Readings> of;                     // [contender]
};

// log of the sum of exponentials
inline double log_sum(std::span<const float> x) {
  const double top = *std::max_element(x.begin(), x.end());
  double sum = 0;
  for (const float value : x) sum += std::exp(static_cast<double>(value) - top);
  return top + std::log(sum);
}
// Kullback-Leibler divergence of softmax(b) from softmax(a), in nats. Throws std::runtime_error for
// a NaN.
inline double divergence(std::span<const float> a, std::span<const float> b) {
  const double log_a = log_sum(a), log_b = log_sum(b);
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double p = static_cast<double>(a[i]) - log_a, q = static_cast<double>(b[i]) - log_b;
    if (const double share = std::exp(p); share > 0) sum += share * (p - q);
  }
  if (!std::isfinite(sum)) throw std::runtime_error("logits hold a NaN or an infinity");
  return std::max(0.0, sum);
}

// Positions whose next token is the text's, evenly spaced, at most `count`.
inline std::vector<Index> sample_positions(const Reading& reading, Index count) {
  std::vector<Index> all, some;
  for (Index i = 31; i + 1 < std::ssize(reading.tokens); ++i)
    if (reading.is_text[static_cast<std::size_t>(i)] &&
        reading.is_text[static_cast<std::size_t>(i + 1)])
      all.push_back(i);
  const Index size = std::ssize(all);
  count = std::min(count, size);
  for (Index i = 0; i < count; ++i) some.push_back(all[static_cast<std::size_t>(i * size / count)]);
  return some;
}

// Questions whose facts a prefix holds, evenly spaced, at most `count`.
inline std::vector<std::size_t> questions_within(const Reading& reading, Index length,
                                                 Index count) {
  std::vector<std::size_t> all, some;
  for (std::size_t i = 0; i < reading.questions.size(); ++i)
    if (reading.questions[i].until <= length) all.push_back(i);
  const std::size_t size = all.size(), most = std::min(size, static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < most; ++i) some.push_back(all[i * size / most]);
  return some;
}

// The share of an answer's numbers of which every token is the most probable one after the right
// ones before it.
inline double answers(Session& session, Index length, const Question& question) {
  std::vector<TokenAt> batch;
  for (std::size_t i = 0; i + 1 < question.tokens.size(); ++i)
    batch.push_back(
        {question.tokens[i], static_cast<llama_pos>(length) + static_cast<llama_pos>(i)});
  for (const auto& number : question.numbers)
    for (const int i : number) batch[static_cast<std::size_t>(i - 1)].logits = true;
  session.decode(batch);
  double right = 0;
  for (const auto& number : question.numbers)
    right += std::all_of(number.begin(), number.end(), [&](int i) {
      return best(session.logits(i - 1)) == question.tokens[static_cast<std::size_t>(i)];
    });
  session.cut(length);
  return right / static_cast<double>(question.numbers.size());
}

struct PassShape {
  std::vector<Index> lengths;  // ascending
  Index ubatch, samples, questions;
};

// done(tokens) is called after every ubatch of every contender.
inline Pass run_pass(const Reading& reading, const PassShape& shape,
                     std::vector<Contender>& contenders, const std::function<void(Index)>& done) {
  Pass pass;
  pass.samples = sample_positions(reading, shape.samples);
  pass.of.resize(contenders.size());
  auto sample = pass.samples.begin();
  std::size_t turn = 0;
  Index begin = 0;
  // Nothing that is paid once counts: pages of the model, threads, scratch memory.
  for (Contender& one : contenders) {
    std::vector<TokenAt> batch;
    for (Index i = 0; i < std::min(shape.ubatch, shape.lengths.front()); ++i)
      batch.push_back({reading.tokens[static_cast<std::size_t>(i)], static_cast<llama_pos>(i)});
    batch.back().logits = true;
    one.session->decode(batch);
    one.session->cut(0);
  }
  for (const Index length : shape.lengths) {
    for (; begin < length; begin = pass.ends.back()) {
      const Index end = std::min({begin + shape.ubatch, length});
      std::vector<TokenAt> batch;
      for (Index i = begin; i < end; ++i)
        batch.push_back({reading.tokens[static_cast<std::size_t>(i)], static_cast<llama_pos>(i)});
      const auto first = sample;
      for (; sample != pass.samples.end() && *sample < end; ++sample)
        batch[static_cast<std::size_t>(*sample - begin)].logits = true;
      batch.back().logits = true;
      // The first contender changes, so that none always finds the caches that another left.
      for (std::size_t i = 0; i < contenders.size(); ++i) {
        const std::size_t c = (turn + i) % contenders.size();
        const double start = quoka_examples::wall_seconds();
        contenders[c].session->decode(batch);
        (void)contenders[c].session->logits(static_cast<int>(end - begin) - 1);
        pass.of[c].seconds.push_back(quoka_examples::wall_seconds() - start);
        done(end - begin);
      }
      ++turn;
      for (auto at = first; at != sample; ++at) {
        const int row = static_cast<int>(*at - begin);
        const auto next =
            static_cast<std::size_t>(reading.tokens[static_cast<std::size_t>(*at + 1)]);
        const std::span<const float> reference = contenders[0].session->logits(row);
        for (std::size_t c = 0; c < contenders.size(); ++c) {
          const std::span<const float> own = contenders[c].session->logits(row);
          pass.of[c].nll.push_back(log_sum(own) - static_cast<double>(own[next]));
          pass.of[c].kl.push_back(c == 0 ? 0 : divergence(reference, own));
          pass.of[c].agrees.push_back(best(own) == best(reference));
        }
      }
      pass.ends.push_back(end);
    }
    pass.asked.push_back(questions_within(reading, length, shape.questions));
    for (std::size_t c = 0; c < contenders.size(); ++c) {
      std::vector<double>& right = pass.of[c].right.emplace_back();
      for (const std::size_t question : pass.asked.back())
        right.push_back(answers(*contenders[c].session, length, reading.questions[question]));
    }
  }
  return pass;
}

}  // namespace quoka_ggml
