// Text from a prompt.
#include "decoder/program/common.hpp"
#include "decoder/sampling/sampler.hpp"
#include "decoder/text/utf8.hpp"

#include "support/progress.hpp"

#include <cstdio>

namespace quoka_decoder {
namespace {

struct Flags {
  ModelFlags model;
  std::string prompt, file;
  std::string selector = "quoka", budget = "0.25";
  quoka::QuokaOptions quoka;
  SamplingOptions sampling;
  Index max_tokens = 128;
  bool special = false, chat = false;
};

void print(const std::string& text) {
  std::fwrite(text.data(), 1, text.size(), stdout);
  std::fflush(stdout);
}

std::vector<Token> encode_prompt(const Flags& flags, const LoadedModel& loaded) {
  const std::string text = flags.file.empty() ? flags.prompt : read_file(flags.file);
  if (!flags.chat) return loaded.tokenizer->encode(text, {.parse_special = flags.special});
  if (!loaded.chat)
    throw std::runtime_error("--chat: " + flags.model.model +
                             " has no chat template that is known");
  return loaded.tokenizer->encode(loaded.chat->user + text + loaded.chat->assistant,
                                  {.parse_special = true});
}

void generate(const Flags& flags) {
  const LoadedModel loaded = load(flags.model);
  const auto prompt = encode_prompt(flags, loaded);
  note_context(flags.model, loaded.model.config, std::ssize(prompt) + flags.max_tokens);

  quoka::ThreadPool threads(thread_count(flags.model));
  SessionOptions options = session_options(flags.model, flags.selector, flags.budget, flags.quoka);
  Session session(loaded.model, options, threads);
  session.reserve(std::ssize(prompt) + flags.max_tokens);
  Sampler sample(flags.sampling);

  const Stopwatch prefill;
  {
    Progress bar("prefill", std::ssize(prompt));
    session.run(prompt, [&](Index done) { bar.update(done); });
  }
  const auto next_token = [&] { return sample(session.logits()); };
  Token token = next_token();
  const double first_token_s = prefill.seconds();

  Utf8Stream characters;
  const Stopwatch decode;
  Index steps = 0, made = 0;
  while (made < flags.max_tokens && !loaded.tokenizer->is_end(token)) {
    ++made;
    print(characters.feed(loaded.tokenizer->piece(token)));
    if (made == flags.max_tokens) break;
    session.run({&token, 1});
    token = next_token();
    ++steps;
  }
  print(characters.finish() + '\n');
  const double decode_s = decode.seconds();
  fmt::print(
      stderr,
      "{} prompt tokens: time to first token {:.2f} s, {:.1f} tokens/s; {} tokens after it: {:.1f} "
      "tokens/s; peak memory {:.0f} MiB; {} threads, {}, {}\n",
      prompt.size(), first_token_s, static_cast<double>(prompt.size()) / first_token_s, steps,
      steps > 0 ? static_cast<double>(steps) / decode_s : 0.0, peak_memory_mib(),
      threads.workers(), flags.selector, product_backend());
}

}  // namespace

void add_generate(CLI::App& app) {
  auto flags = std::make_shared<Flags>();
  CLI::App* sub = app.add_subcommand("generate", "text from a prompt");
  add_model_flags(*sub, flags->model);
  auto* input = sub->add_option_group("input")->require_option(1);
  input->add_option("-p,--prompt", flags->prompt, "the prompt");
  input->add_option("-f,--file", flags->file, "a file with the prompt")->check(CLI::ExistingFile);
  sub->add_flag("--special", flags->special,
                "read control tokens such as <|im_start|> in the prompt");
  sub->add_flag("--chat", flags->chat, "as a user's turn, marked as the model's template says");
  sub->add_option("-n,--max-tokens", flags->max_tokens, "tokens to generate at most")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  sub->add_option("--selector", flags->selector, "dense, quoka or another method")
      ->capture_default_str();
  sub->add_option("--budget", flags->budget, "past keys attended: 1024, or 0.25 of the past")
      ->capture_default_str();
  sub->add_option("--temperature", flags->sampling.temperature, "0: the most probable token")
      ->capture_default_str();
  sub->add_option("--top-k", flags->sampling.top_k, "0: all")->capture_default_str();
  sub->add_option("--top-p", flags->sampling.top_p)->capture_default_str();
  sub->add_option("--seed", flags->sampling.seed)->capture_default_str();
  add_quoka_flags(*sub, flags->quoka);
  sub->callback([flags] { generate(*flags); });
}

}  // namespace quoka_decoder
