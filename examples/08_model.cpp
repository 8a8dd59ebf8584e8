// A trained model end to end: a GGUF file, a prompt in chunks with exact attention and with selection, and whether it
// answers.
//
//     08_model [MODEL.gguf] [TOKENS [SHARE]]      examples/data/trained/needles.gguf, 1,024 tokens, 1/8 of the past
//
// The prompts are needles in noise: MARK key value, four of them, between BOS and ASK key; the right answer is the
// key's value. The models of examples/data/trained were trained on such prompts, and answer them when attention is
// exact.
//
// The model's forward is support/small_model.hpp, some 150 lines: embedding, RMSNorm, projections, RoPE, SwiGLU. An
// engine replaces only its attention by this library. Here that is one call for each layer and chunk, in prefill()
// below.

#include "support/small_model.hpp"

#include <quoka/quoka.hpp>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <exception>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

using quoka::Index;
using quoka_examples::SmallModel;
using quoka_examples::Token;

// ---- prompts ------------------------------------------------------------------------------------

// Token ids, as data/trained/tasks.py has them.
constexpr Token bos = 1, mark = 3, ask = 4, first_key = 16, first_value = 208, first_noise = 336,
                vocabulary = 512;

struct Prompt {
  std::vector<Token> tokens;
  Token answer;
};

// Four needles at random places in noise, in which the r-th token comes 1 / r as often as the first; the first needle
// is asked.
Prompt needle_prompt(Index length, std::mt19937& random) {
  constexpr Index needles = 4;
  const auto below = [&](Index n) {
    return static_cast<Index>(random() % static_cast<std::uint32_t>(n));
  };
  std::vector<double> zipf;
  for (Token r = 0; r < vocabulary - first_noise; ++r) zipf.push_back(1.0 / (r + 1));
  std::discrete_distribution<Token> noise(zipf.begin(), zipf.end());

  Prompt prompt;
  prompt.tokens.push_back(bos);
  while (std::ssize(prompt.tokens) < length - 2)
    prompt.tokens.push_back(first_noise + noise(random));
  std::vector<Token> keys, values;
  for (Token key = first_key; key < first_value; ++key) keys.push_back(key);
  for (Token value = first_value; value < first_noise; ++value) values.push_back(value);
  std::shuffle(keys.begin(), keys.end(), random);
  std::shuffle(values.begin(), values.end(), random);
  // Each needle has a quarter of the context to itself, so that no two overlap.
  const Index quarter = (length - 3) / needles;
  for (Index i = 0; i < needles; ++i) {
    const auto n = static_cast<std::size_t>(i);
    const Index start = 1 + i * quarter + below(quarter - 2);
    const Token needle[] = {mark, keys[n], values[n]};
    std::copy(std::begin(needle), std::end(needle), prompt.tokens.begin() + start);
  }
  const auto asked = static_cast<std::size_t>(below(needles));
  prompt.tokens.push_back(ask), prompt.tokens.push_back(keys[asked]);
  prompt.answer = values[asked];
  return prompt;
}

// ---- the model with this library's attention ------------------------------------------------------

// A layer of one sequence: it keeps the keys and values, and attends.
template <class Selector>
using Layers = std::vector<quoka::ChunkedPrefill<Selector>>;

template <class Selector>
Layers<Selector> make_layers(const SmallModel& model, const typename Selector::Options& options) {
  Layers<Selector> layers;
  for (Index i = 0; i < model.layers(); ++i)
    layers.emplace_back(
        quoka::LayerShape{
            .q_heads = model.q_heads, .kv_heads = model.kv_heads, .head_dim = model.head_dim},
        options);
  return layers;
}

// The most probable token after the prompt, which goes through the model in chunks.
template <class Selector>
Token prefill(const SmallModel& model, Layers<Selector>& layers, std::span<const Token> prompt,
              Index chunk) {
  const auto attend = [&](Index layer, SmallModel::View q, SmallModel::View k, SmallModel::View v,
                          SmallModel::OutView out) {
    auto& l = layers[static_cast<std::size_t>(layer)];
    if (out.data() == nullptr)  // the last layer, for tokens whose logits are not needed
      l.append(k, v);
    else
      l.forward(q, k, v, out);  // selects from the past, attends to the selection and to the chunk
  };
  for (Index begin = 0;; begin += chunk) {
    const Index n = std::min(chunk, std::ssize(prompt) - begin);
    const bool is_last = begin + n == std::ssize(prompt);
    const auto tokens =
        prompt.subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(n));
    const SmallModel::Rows states = model.run(tokens, begin, attend, !is_last);
    if (!is_last) continue;
    Index best;
    model.logits(states.bottomRows(1)).row(0).maxCoeff(&best);
    return static_cast<Token>(best);
  }
}

struct Result {
  int right = 0;
  double seconds = 0;
};

template <class Selector>
Result answer_all(const SmallModel& model, const std::vector<Prompt>& prompts,
                  const typename Selector::Options& options) {
  constexpr Index chunk = 128;
  Result result;
  for (const Prompt& prompt : prompts) {
    auto layers = make_layers<Selector>(model, options);
    const auto begin = std::chrono::steady_clock::now();
    const Token answer = prefill<Selector>(model, layers, prompt.tokens, chunk);
    result.seconds +=
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    result.right += answer == prompt.answer ? 1 : 0;
  }
  return result;
}

}  // namespace

int main(int argc, char** argv) try {
  const std::string path = argc > 1 ? argv[1] : QUOKA_EXAMPLES_DATA "/trained/needles.gguf";
  const Index length = argc > 2 ? std::stol(argv[2]) : 1024;
  const double share = argc > 3 ? std::stod(argv[3]) : 0.125;
  if (length < 32)
    throw std::invalid_argument("a prompt has " + std::to_string(length) +
                                " tokens, but must have at least 32");
  const SmallModel model{quoka_examples::GgufFile(path)};
  if (model.vocabulary != vocabulary)
    throw std::runtime_error(path + ": a vocabulary of " + std::to_string(model.vocabulary) +
                             " tokens, not of " + std::to_string(vocabulary));
  std::printf("%s: %d layers, %d query and %d KV heads of %d channels\n", path.c_str(),
              static_cast<int>(model.layers()), static_cast<int>(model.q_heads),
              static_cast<int>(model.kv_heads), static_cast<int>(model.head_dim));

  constexpr int count = 20;
  std::mt19937 random(1);
  std::vector<Prompt> prompts;
  for (int i = 0; i < count; ++i) prompts.push_back(needle_prompt(length, random));

  const auto budget = quoka::Budget::share(share);
  const Result exact = answer_all<quoka::DenseSelector>(model, prompts, {});
  const Result selected =
      answer_all<quoka::MassSelector>(model, prompts, quoka::MassOptions::recommended(budget));
  std::printf("%d prompts of %d tokens, chunks of 128\n", count, static_cast<int>(length));
  std::printf("exact attention:          %2d answered, %.2f s\n", exact.right, exact.seconds);
  std::printf("recommended, %5.1f %% kept: %2d answered, %.2f s\n", 100 * share, selected.right,
              selected.seconds);
  // As a test: the trained model answers, and selection keeps nearly all of its answers.
  return exact.right >= count - 2 && selected.right >= exact.right - 2 ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "08_model: %s\n", error.what());
  return 1;
}
