#include "decoder/text/vocabulary.hpp"

#include <cstddef>
#include <stdexcept>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "decoder/file/gguf.hpp"
#include "decoder/text/pre_tokenizer.hpp"

namespace quoka_decoder {
namespace {

[[noreturn]] void refuse(const std::string& what) {
  throw std::runtime_error("tokenizer.ggml." + what);
}

void check_count(const char* key, std::size_t count, std::size_t tokens) {
  if (count != tokens) {
    refuse(std::string(key) + " has " + std::to_string(count) + " elements, but there are " +
           std::to_string(tokens) + " tokens");
  }
}

void check_id(const char* key, std::optional<Token> id, std::size_t tokens) {
  if (id && (*id < 0 || static_cast<std::size_t>(*id) >= tokens)) {
    refuse(std::string(key) + " is " + std::to_string(*id) + ", but there are " +
           std::to_string(tokens) + " tokens");
  }
}

void check_types(const std::vector<TokenType>& types) {
  for (std::size_t i = 0; i < types.size(); ++i) {
    if (types[i] < TokenType::undefined || types[i] > TokenType::byte) {
      refuse("token_type of token " + std::to_string(i) + " is " +
             std::to_string(static_cast<int>(types[i])) + ", but types end at 6");
    }
  }
}

void check_unique(const std::vector<std::string>& tokens) {
  std::unordered_map<std::string_view, std::size_t> seen(tokens.size());
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    const auto [place, is_new] = seen.emplace(tokens[i], i);
    if (!is_new && !tokens[i].empty()) {  // empty ones are holes, which no text reaches
      refuse("tokens: " + std::to_string(place->second) + " and " + std::to_string(i) +
             " are both '" + tokens[i] + "'");
    }
  }
}

// The id under this key, or the fallback if the vocabulary reaches so far.
std::optional<Token> read_id(const GgufFile& file, const char* name,
                             std::optional<Token> fallback = std::nullopt) {
  const std::string key = std::string("tokenizer.ggml.") + name;
  if (file.has(key)) {
    const auto id = file.get<std::int64_t>(key);
    if (id < 0 || id > INT32_MAX) {
      refuse(std::string(name) + " is " + std::to_string(id) + ", not a token");
    }
    return static_cast<Token>(id);
  }
  return fallback;
}

std::vector<TokenType> read_types(const GgufFile& file, std::size_t tokens) {
  const std::string key = "tokenizer.ggml.token_type";
  if (!file.has(key)) return std::vector<TokenType>(tokens, TokenType::normal);
  std::vector<TokenType> types;
  types.reserve(tokens);
  for (const std::int32_t type : file.get<std::vector<std::int32_t>>(key)) {
    types.push_back(static_cast<TokenType>(type));
  }
  return types;
}

}  // namespace

void check(const Vocabulary& vocabulary) {
  const std::size_t count = vocabulary.tokens.size();
  if (count > INT32_MAX) refuse("tokens has " + std::to_string(count) + " elements, over 2^31 - 1");
  check_count("token_type", vocabulary.types.size(), count);
  check_types(vocabulary.types);
  if (vocabulary.model == "llama") check_count("scores", vocabulary.scores.size(), count);
  check_id("bos_token_id", vocabulary.bos, count);
  check_id("eos_token_id", vocabulary.eos, count);
  check_id("eot_token_id", vocabulary.eot, count);
  check_id("eom_token_id", vocabulary.eom, count);
  check_id("unknown_token_id", vocabulary.unknown, count);
  if (vocabulary.add_bos && !vocabulary.bos) refuse("add_bos_token is true without bos_token_id");
  check_unique(vocabulary.tokens);
}

Vocabulary read_vocabulary(const GgufFile& file) {
  Vocabulary result;
  result.model = file.get<std::string>("tokenizer.ggml.model");
  const bool llama = result.model == "llama";
  if (!llama && result.model != "gpt2") {
    refuse("model is '" + result.model + "'; only 'llama' and 'gpt2' are known");
  }
  result.tokens = file.get<std::vector<std::string>>("tokenizer.ggml.tokens");
  result.types = read_types(file, result.tokens.size());
  if (llama) {
    result.scores = file.get<std::vector<float>>("tokenizer.ggml.scores");
    // A file that does not say has the ids of the first LLaMA, if it reaches so far.
    const bool reaches = result.tokens.size() > 2;
    result.unknown = read_id(file, "unknown_token_id", reaches ? std::optional(0) : std::nullopt);
    result.bos = read_id(file, "bos_token_id", reaches ? std::optional(1) : std::nullopt);
    result.eos = read_id(file, "eos_token_id", reaches ? std::optional(2) : std::nullopt);
    result.add_space_prefix = file.get_or<bool>("tokenizer.ggml.add_space_prefix", true);
  } else {
    result.pre = file.get_or<std::string>("tokenizer.ggml.pre", "default");
    result.merges = file.get<std::vector<std::string>>("tokenizer.ggml.merges");
    result.unknown = read_id(file, "unknown_token_id");
    result.bos = read_id(file, "bos_token_id");
    result.eos = read_id(file, "eos_token_id");
  }
  result.eot = read_id(file, "eot_token_id");
  result.eom = read_id(file, "eom_token_id");
  const bool begins_with_bos = llama || pre_tokenizer_rules(result.pre).add_bos;
  result.add_bos = file.get_or<bool>("tokenizer.ggml.add_bos_token", begins_with_bos);
  check(result);
  return result;
}

}  // namespace quoka_decoder
