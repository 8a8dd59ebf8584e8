#include "haystack.hpp"

#include <algorithm>
#include <cmath>
#include <random>
#include <stdexcept>

namespace quoka_ggml {
namespace {

// The words of Mohtashami & Jaggi's prompt.
constexpr const char* introduction =
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it. I "
    "will quiz you about the important information there.";
constexpr const char* question = "What is the pass key?";
constexpr const char* answered = "The pass key is";
std::string needle_with(const std::string& key) {
  return "The pass key is " + key + ". Remember it. " + key + " is the pass key.";
}

struct Kind {
  const char* marker;  // that no other kind has
  ChatTurns turns;
};

const Kind kinds[] = {
    {"<|im_start|>", {"<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"}},
    {"<|start_header_id|>",
     {"<|start_header_id|>user<|end_header_id|>\n\n",
      "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"}},
    {"<|user|>", {"<|user|>\n", "</s>\n<|assistant|>\n"}},
    {"[INST]", {"[INST] ", " [/INST]"}},
};

constexpr Tokenizer::Options plain{.add_bos = false};

}  // namespace

ChatTurns chat_turns(const std::string& chat_template) {
  for (const Kind& kind : kinds)
    if (chat_template.find(kind.marker) != std::string::npos) return kind.turns;
  return {"", " "};
}

Haystack::Haystack(const Tokenizer& tokenizer, const std::string& text, const ChatTurns& turns)
    : tokenizer_(tokenizer),
      introduction_(tokenizer.encode(turns.user + introduction, {.parse_special = true})),
      question_(question + turns.assistant + answered) {
  const auto letter = tokenizer_.encode("a", plain);
  newline_ = tokenizer_.encode("a\n", plain);
  newline_.erase(newline_.begin(), newline_.begin() + std::ssize(letter));
  text_ = line(text, plain);
  if (std::ssize(text_) <= std::ssize(newline_)) throw std::runtime_error("the haystack is empty");
}

NeedlePrompt Haystack::prompt(Index length, double depth, const std::string& key) const {
  const auto needle = line(needle_with(key), plain);
  auto asked = line(question_ + ' ' + key, {.add_bos = false, .parse_special = true});
  const auto digits =
      std::find_if(asked.rbegin(), asked.rend(), [&](Token token) {
        return tokenizer_.piece(token).find_first_of("0123456789") == std::string::npos;
      }).base();
  const std::vector<Token> answer(digits, asked.end());
  asked.erase(digits, asked.end());
  const Index room = length - std::ssize(introduction_) - std::ssize(needle) - std::ssize(asked);
  if (room < 1)
    throw std::runtime_error("a prompt of " + std::to_string(length) +
                             " tokens has no room for a haystack; it needs " +
                             std::to_string(length - room + 1));
  std::vector<Token> hay;
  while (std::ssize(hay) < room)  // a short text begins again
    hay.insert(hay.end(), text_.begin(),
               text_.begin() + std::min(std::ssize(text_), room - std::ssize(hay)));
  const auto cut =
      hay.begin() +
      paragraph_end(hay, static_cast<Index>(std::lround(depth * static_cast<double>(room))));
  NeedlePrompt result{introduction_, answer, key};
  result.tokens.insert(result.tokens.end(), hay.begin(), cut);
  result.tokens.insert(result.tokens.end(), needle.begin(), needle.end());
  result.tokens.insert(result.tokens.end(), cut, hay.end());
  result.tokens.insert(result.tokens.end(), asked.begin(), asked.end());
  return result;
}

// A new line with this text, without the space that some tokenizers put before all text.
std::vector<Token> Haystack::line(const std::string& text, Tokenizer::Options options) const {
  auto tokens = tokenizer_.encode('\n' + text, options);
  tokens.erase(tokens.begin(),
               std::search(tokens.begin(), tokens.end(), newline_.begin(), newline_.end()));
  return tokens;
}

// The last end of a paragraph at or before `at`; `at` itself where none is near.
Index Haystack::paragraph_end(const std::vector<Token>& hay, Index at) const {
  constexpr Index near = 200;
  const auto end = hay.begin() + at;
  if (end == hay.end()) return at;
  const auto from = hay.begin() + std::max<Index>(0, at - near);
  const auto found = std::find_end(from, end, newline_.begin(), newline_.end());
  return found == end ? at : found - hay.begin();
}

std::string draw_key(std::uint32_t seed, Index length, Index depth, Index needle) {
  std::seed_seq seeds{static_cast<Index>(seed), length, depth, needle};
  std::mt19937 random(seeds);
  return std::to_string(10000 + random() % 90000);
}

Index shared_chunks(std::span<const Token> prompt, std::span<const Token> cached, Index chunk) {
  const auto shared = std::ranges::mismatch(prompt, cached).in1 - prompt.begin();
  return std::min<Index>(shared, std::ssize(prompt) - 1) / chunk * chunk;
}

double depth_of(Index i, Index depths) {
  return depths > 1 ? static_cast<double>(i) / static_cast<double>(depths - 1) : 0.5;
}

}  // namespace quoka_ggml
