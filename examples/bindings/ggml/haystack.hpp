// The prompts of a needle in a haystack (Kamradt 2023; passkey form of Mohtashami & Jaggi 2023): a sentence
// with a five-digit pass key stands at a given depth of a long text, and the prompt ends by asking for it.
//
//   introduction, the text up to the end of a paragraph, needle, more of the text, question, each on a
//   new line, and the answer's beginning: "The pass key is"
#pragma once

#include <quoka/base/index.hpp>

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

namespace quoka_ggml {

using quoka::Index;
using Token = std::int32_t;

// A model's vocabulary.
struct Tokenizer {
  struct Options {
    bool add_bos = true;         // false: no begin token even if the model asks for one
    bool parse_special = false;  // "</s>" in the text becomes that control token
  };
  std::function<std::vector<Token>(const std::string& text, Options options)> encode;
  std::function<std::string(Token)> piece;  // the bytes that a token stands for
};

// How a chat model's turns are marked.
struct ChatTurns {
  std::string user;       // before the user's words
  std::string assistant;  // between them and the model's
};
// By the markers in a chat template (a Jinja program, which is not run); {"", " "} for a template of another kind and
// for none. Source: the model cards of TinyLlama-Chat, Qwen2.5, Llama 2 and Llama 3.
ChatTurns chat_turns(const std::string& chat_template);

struct NeedlePrompt {
  std::vector<Token> tokens;  // as many as the length says
  std::vector<Token> answer;  // from the first digit on
  std::string key;
};

class Haystack {
 public:
  // A text that is too short begins again. Throws std::runtime_error for an empty one.
  Haystack(const Tokenizer& tokenizer, const std::string& text, const ChatTurns& turns);

  // depth 0: right after the introduction; 1: right before the question. Throws
  // std::runtime_error if `length` does not hold introduction, needle and question.
  NeedlePrompt prompt(Index length, double depth, const std::string& key) const;

 private:
  std::vector<Token> line(const std::string& text, Tokenizer::Options options) const;
  Index paragraph_end(const std::vector<Token>& hay, Index at) const;

  const Tokenizer& tokenizer_;
  std::vector<Token> introduction_, newline_, text_;
  std::string question_;
};

// "71432", drawn; its own for each point, whatever else is run.
std::string draw_key(std::uint32_t seed, Index length, Index depth, Index needle);

// How many tokens of a prompt need not run again in a cache that holds `cached`: the whole chunks that both
// begin with, never all of the prompt, since logits follow its last chunk.
Index shared_chunks(std::span<const Token> prompt, std::span<const Token> cached, Index chunk);

// The i-th of `depths` from 0 to 1, evenly spaced; the middle where there is one.
double depth_of(Index i, Index depths);

}  // namespace quoka_ggml
