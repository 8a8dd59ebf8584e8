// A GGUF model by llama.cpp as it is, and with this backend: time to first token, tokens per second,
// text, and how far the logits differ for the same tokens.
//
//     side_by_side MODEL.gguf [--prompt FILE] [--tokens 2000] [--new 32] [--ubatch 512] [--threads 2]
//                  [--cache f16|q8_0] [--rounds 1] [--out results.json]
//
// QUOKA_MODE, QUOKA_BUDGET and the others say what the backend does. Rounds alternate.
#include "llama_session.hpp"

#include "support/clock.hpp"
#include "support/json_file.hpp"
#include "support/statistics.hpp"

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include <cmath>
#include <cstdio>
#include <fstream>
#include <iterator>

namespace {

using namespace quoka_ggml;
using quoka_examples::median, quoka_examples::process_seconds, quoka_examples::wall_seconds;

struct Run {
  double first_token = 0, per_second = 0;  // seconds, and tokens for each of them
  double prompt_cpu = 0, token_cpu = 0;    // processor seconds: with one thread, whatever else runs
  std::vector<llama_token> tokens;
  std::vector<std::vector<float>> logits;  // of the prompt's last token, then of each new one
};

// Writes `count` tokens, or takes those of `forced`, so that logits can be compared.
Run run(Session& session, const std::vector<llama_token>& prompt, int count,
        const std::vector<llama_token>& forced) {
  llama_memory_clear(session.memory(), true);
  Run result;
  std::vector<TokenAt> batch;
  for (const llama_token token : prompt)
    batch.push_back({token, static_cast<llama_pos>(batch.size())});
  batch.back().logits = true;
  const double begin = wall_seconds(), cpu_begin = process_seconds();
  session.decode(batch);
  auto logits = session.logits(static_cast<int>(batch.size()) - 1);
  result.first_token = wall_seconds() - begin;
  result.prompt_cpu = process_seconds() - cpu_begin;
  const double written = wall_seconds(), cpu_written = process_seconds();
  for (int i = 0; i < count; ++i) {
    result.logits.emplace_back(logits.begin(), logits.end());
    result.tokens.push_back(best(logits));
    const llama_token next =
        forced.empty() ? result.tokens.back() : forced[static_cast<std::size_t>(i)];
    const TokenAt one{next, static_cast<llama_pos>(prompt.size()) + i, 0, true};
    session.decode({&one, 1});
    logits = session.logits(0);
  }
  result.per_second = count / (wall_seconds() - written);
  result.token_cpu = (process_seconds() - cpu_written) / count;
  return result;
}

std::vector<llama_token> tokenise(const llama_vocab* vocab, const std::string& text) {
  std::vector<llama_token> tokens(text.size() + 8);
  const int n = llama_tokenize(vocab, text.data(), static_cast<int>(text.size()), tokens.data(),
                               static_cast<int>(tokens.size()), true, false);
  tokens.resize(static_cast<std::size_t>(std::max(n, 0)));
  return tokens;
}

std::string text_of(const llama_vocab* vocab, const std::vector<llama_token>& tokens) {
  std::string text;
  for (const llama_token token : tokens) {
    char piece[256];
    const int n = llama_token_to_piece(vocab, token, piece, sizeof piece, 0, false);
    text.append(piece, static_cast<std::size_t>(std::max(n, 0)));
  }
  return text;
}

}  // namespace

int main(int argc, char** argv) try {
  CLI::App app("llama.cpp with and without the QuoKA backend");
  std::string model_path, prompt_path = QUOKA_GGML_PROMPT, cache = "f16", out;
  int tokens = 2000, count = 32, ubatch = 512, threads = 2, rounds = 1;
  app.add_option("model", model_path)->required();
  app.add_option("--prompt", prompt_path, "a text file");
  app.add_option("--tokens", tokens, "of the prompt")->check(CLI::PositiveNumber);
  app.add_option("--new", count, "tokens to write")->check(CLI::PositiveNumber);
  app.add_option("--ubatch", ubatch)->check(CLI::PositiveNumber);
  app.add_option("--threads", threads)->check(CLI::PositiveNumber);
  app.add_option("--cache", cache)->check(CLI::IsMember({"f16", "q8_0"}));
  app.add_option("--rounds", rounds)->check(CLI::PositiveNumber);
  app.add_option("--out", out);
  CLI11_PARSE(app, argc, argv);

  llama_log_set(only_errors, nullptr);
  const llama_model_ptr model = load_model(model_path);
  const llama_vocab* const vocab = llama_model_get_vocab(model.get());
  std::ifstream file(prompt_path);
  std::string text(std::istreambuf_iterator<char>(file), {});
  text.resize(std::min(text.size(), static_cast<std::size_t>(tokens) * 16));
  std::vector<llama_token> prompt = tokenise(vocab, text);
  if (std::ssize(prompt) < tokens)
    throw std::invalid_argument(prompt_path + " has " + std::to_string(prompt.size()) + " tokens");
  prompt.resize(static_cast<std::size_t>(tokens));

  llama_context_params parameters = context_params(tokens + count + 1, ubatch, threads, cache);
  if (const int trained = llama_model_n_ctx_train(model.get());
      static_cast<int>(parameters.n_ctx) > trained)  // for time's sake: positions squeezed
    parameters.rope_freq_scale = static_cast<float>(trained) / static_cast<float>(parameters.n_ctx);
  Session as_it_is(model.get(), parameters);
  load_quoka();
  Session with_quoka(model.get(), parameters);

  std::vector<double> first_ratio, speed_ratio;
  nlohmann::json results{{"model", model_path},
                         {"tokens", tokens},
                         {"ubatch", ubatch},
                         {"threads", threads},
                         {"cache", cache}};
  for (int round = 0; round < rounds; ++round) {
    const Run theirs = run(as_it_is, prompt, count, {});
    const Run ours = run(with_quoka, prompt, count, {});
    for (const auto& [name, x] : {std::pair("llama.cpp ", &theirs), std::pair("with QuoKA", &ours)})
      fmt::print("{}  first token {:7.2f} s (CPU {:7.2f})   {:6.2f} tokens/s (CPU {:.3f} s each)\n",
                 name, x->first_token, x->prompt_cpu, x->per_second, x->token_cpu);
    std::fflush(stdout);
    first_ratio.push_back(theirs.first_token / ours.first_token);
    speed_ratio.push_back(ours.per_second / theirs.per_second);
    for (const auto& [name, x] : {std::pair("llama.cpp", &theirs), std::pair("quoka", &ours)})
      results[name].push_back({{"first_token_s", x->first_token},
                               {"first_token_cpu_s", x->prompt_cpu},
                               {"tokens_per_second", x->per_second},
                               {"token_cpu_s", x->token_cpu}});
    if (round + 1 < rounds) continue;
    fmt::print("llama.cpp:  {}\nwith QuoKA: {}\n", text_of(vocab, theirs.tokens),
               text_of(vocab, ours.tokens));
    const Run same = run(with_quoka, prompt, count, theirs.tokens);
    double largest = 0, squares = 0;
    int agreed = 0;
    for (std::size_t i = 0; i < same.logits.size(); ++i) {
      agreed += same.tokens[i] == theirs.tokens[i] ? 1 : 0;
      for (std::size_t t = 0; t < same.logits[i].size(); ++t) {
        const double difference = std::abs(same.logits[i][t] - theirs.logits[i][t]);
        largest = std::max(largest, difference);
        squares += difference * difference;
      }
    }
    const double rms =
        std::sqrt(squares / static_cast<double>(same.logits.size() * same.logits[0].size()));
    fmt::print(
        "logits, same tokens: largest difference {:.3f}, rms {:.4f}, top token the same {} of {}\n",
        largest, rms, agreed, count);
    results["logits"] = {{"largest", largest}, {"rms", rms}, {"same_top", agreed}, {"of", count}};
  }
  fmt::print(
      "first token {:.2f} times as soon, {:.2f} times the tokens per second (medians of {})\n",
      median(first_ratio), median(speed_ratio), rounds);
  results["first_token_ratio"] = median(first_ratio), results["speed_ratio"] = median(speed_ratio);
  if (!out.empty()) quoka_examples::write_json(out, results);
} catch (const std::exception& e) {
  std::fprintf(stderr, "side_by_side: %s\n", e.what());
  return 1;
}
