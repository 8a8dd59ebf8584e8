// Text to tokens and back, as the GGUF file of a model says.
//
//   const auto tokenizer = make_tokenizer(file);
//   const std::vector<Token> prompt = tokenizer->encode("Once upon a time");
//
// A text is first cut at special tokens (user-defined ones always, control tokens only if asked
// for; the longest first), and what lies between goes through the model's own algorithm:
// sentence_piece.hpp or byte_pair.hpp. A text may hold any bytes: what is not UTF-8 is encoded byte
// by byte, never lost and never an error. Tokenizers are immutable: any number of threads may share
// one.
// Source: the ids are those of llama.cpp's llama_tokenize, on which tests/decoder/goldens rests.
// Deviations: control, unknown and byte tokens never arise from the text of a prompt by merging;
// nothing is stripped or cleaned up when decoding but the space that encoding put there.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <quoka/base/index.hpp>

#include "decoder/text/vocabulary.hpp"

namespace quoka_decoder {

using quoka::Index;

struct EncodeOptions {
  bool add_bos = true;         // false: no bos even if the file asks for one
  bool parse_special = false;  // "<|eot_id|>" in the text becomes that control token
};

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  Tokenizer(const Tokenizer&) = delete;
  Tokenizer& operator=(const Tokenizer&) = delete;

  // Throws std::runtime_error if the vocabulary lacks a byte of the text and has no unknown token.
  std::vector<Token> encode(std::string_view text, EncodeOptions options = {}) const;

  // The pieces one after the other, without the space that encode() puts before a text. So
  // decode(encode(text)) == text, but where the unknown token had to be used and, with "llama", for
  // the character U+2581, which is that model's space.
  // Throws std::invalid_argument if a token is outside the vocabulary.
  std::string decode(std::span<const Token> tokens) const;

  // The bytes a token stands for: nothing for a control token, and perhaps a part of a character
  // (see Utf8Stream). Throws std::invalid_argument if it is outside the vocabulary.
  std::string piece(Token token) const;

  // Does generation end here: eos, end of turn or end of message?
  bool is_end(Token token) const;

  std::optional<Token> bos() const { return vocabulary_.bos; }
  std::optional<Token> eos() const { return vocabulary_.eos; }
  Index size() const { return std::ssize(vocabulary_.tokens); }
  const Vocabulary& vocabulary() const { return vocabulary_; }

 protected:
  explicit Tokenizer(Vocabulary vocabulary);  // throws as check() does

  // Appends the tokens of a text without special tokens; at_start: at the beginning of the whole
  // text, or right after a special token.
  virtual void encode_text(std::string_view text, bool at_start,
                           std::vector<Token>& tokens) const = 0;
  // piece() of a token that is neither control, user-defined nor unknown.
  virtual std::string bytes_of(Token token) const = 0;

  TokenType type(Token token) const { return vocabulary_.types[static_cast<std::size_t>(token)]; }
  const std::string& text(Token token) const {
    return vocabulary_.tokens[static_cast<std::size_t>(token)];
  }
  // May text be encoded to this token, other than by writing a special one?
  bool arises_from_text(Token token) const;
  // The unknown token, for bytes that the vocabulary lacks. Throws std::runtime_error naming the
  // bytes if there is none.
  Token unknown_for(std::string_view bytes) const;

 private:
  struct Fragment {
    std::string_view text;
    Token token;  // no_token: text
  };
  std::vector<Fragment> cut_at_special(std::string_view text, bool parse_special) const;

  const Vocabulary vocabulary_;
  std::vector<Token> special_;  // the longest text first
  std::vector<Token> ends_;     // ascending
};

// Throws std::runtime_error naming what is wrong: tokenizer.ggml.model or tokenizer.ggml.pre is not
// known, a key is missing, or numbers do not fit together.
std::unique_ptr<Tokenizer> make_tokenizer(const GgufFile& file);
std::unique_ptr<Tokenizer> make_tokenizer(Vocabulary vocabulary);

}  // namespace quoka_decoder
