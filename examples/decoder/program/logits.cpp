// The logits of a list of tokens, to check this program against another: written as plain floats
// [tokens, vocabulary], or compared with such a file.
#include "decoder/program/common.hpp"
#include "decoder/sampling/sampler.hpp"

#include "support/layer_policy_file.hpp"
#include "support/mapped_file.hpp"

#include <cmath>
#include <cstring>
#include <fstream>
#include <iostream>

namespace quoka_decoder {
namespace {

struct Flags {
  ModelFlags model;
  std::string tokens, out, against;
};

// A JSON list of token ids, or an object that has one as "tokens". Throws std::invalid_argument, which names the
// file and the id, for anything but whole numbers of the vocabulary.
std::vector<Token> read_tokens(const std::string& path, Index vocabulary) try {
  nlohmann::json json = parse_json("it", read_file(path));
  if (json.is_object() && json.contains("tokens")) json = nlohmann::json(json["tokens"]);
  if (!json.is_array()) throw std::invalid_argument("there is no list of tokens in it");
  std::vector<Token> tokens;
  for (const auto& id : json)
    tokens.push_back(static_cast<Token>(
        whole_from("token " + std::to_string(tokens.size()), id, 0, vocabulary - 1)));
  if (tokens.empty()) throw std::invalid_argument("its list has no token");
  return tokens;
} catch (const std::invalid_argument& error) {
  throw std::invalid_argument(path + ": " + error.what());
}

Vector dense_logits(const LoadedModel& loaded, const Flags& flags, std::span<const Token> tokens) {
  quoka::ThreadPool threads(thread_count(flags.model));
  SessionOptions options = session_options(flags.model, "dense", "1.0", {});
  Session session(loaded.model, options, threads);
  Vector logits;
  const Index batch = quoka::round_up(options.batch, options.chunk);
  for (Index begin = 0; begin < std::ssize(tokens); begin += batch) {
    const Index n = std::min(batch, std::ssize(tokens) - begin);
    session.run(tokens.subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(n)));
    const Vector some = session.logits(n);
    logits.insert(logits.end(), some.begin(), some.end());
  }
  return logits;
}

void compare_with(const std::string& path, const Vector& logits, Index vocabulary) {
  const MappedFile file(path);
  if (file.size() != logits.size() * sizeof(float))
    throw std::runtime_error(path + " has " + std::to_string(file.size()) +
                             " bytes, these logits " +
                             std::to_string(logits.size() * sizeof(float)));
  Vector other(logits.size());
  std::memcpy(other.data(), file.data(), file.size());

  double largest = 0.0, difference = 0.0, size = 0.0;
  Index same_top = 0, positions = std::ssize(logits) / vocabulary;
  for (Index t = 0; t < positions; ++t) {
    const auto at = static_cast<std::size_t>(t * vocabulary),
               n = static_cast<std::size_t>(vocabulary);
    const std::span<const float> a(logits.data() + at, n), b(other.data() + at, n);
    same_top += most_probable(a) == most_probable(b) ? 1 : 0;
    for (std::size_t i = 0; i < n; ++i) {
      const double d = static_cast<double>(a[i]) - b[i];
      largest = std::max(largest, std::abs(d));
      difference += d * d;
      size += static_cast<double>(b[i]) * b[i];
    }
  }
  std::cout << "the same most probable token at " << same_top << " of " << positions
            << " positions; largest difference " << largest << ", relative to the rms "
            << std::sqrt(difference / size) << '\n';
}

void run(const Flags& flags) {
  const LoadedModel loaded = load(flags.model);
  const auto tokens = read_tokens(flags.tokens, loaded.model.config.vocabulary);
  const Vector logits = dense_logits(loaded, flags, tokens);
  if (!flags.out.empty()) {
    std::ofstream file(flags.out, std::ios::binary);
    file.write(reinterpret_cast<const char*>(logits.data()),
               static_cast<std::streamsize>(logits.size() * sizeof(float)));
    file.close();
    if (!file) throw std::runtime_error("could not write " + flags.out);
  }
  if (!flags.against.empty()) compare_with(flags.against, logits, loaded.model.config.vocabulary);
}

}  // namespace

void add_logits(CLI::App& app) {
  auto flags = std::make_shared<Flags>();
  CLI::App* sub =
      app.add_subcommand("logits", "the logits of given tokens, dense; a check against others");
  add_model_flags(*sub, flags->model);
  sub->add_option("--tokens", flags->tokens, "a JSON list of token ids")
      ->required()
      ->check(CLI::ExistingFile);
  sub->add_option("--out", flags->out, "write them there as floats [tokens, vocabulary]");
  sub->add_option("--against", flags->against, "compare them with such a file")
      ->check(CLI::ExistingFile);
  sub->callback([flags] { run(*flags); });
}

}  // namespace quoka_decoder
