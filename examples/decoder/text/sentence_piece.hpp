// tokenizer.ggml.model "llama": SentencePiece's BPE by scores.
//
// Spaces become U+2581, one more of them is put before a text (where the file says so), and the
// characters are merged: of all neighbours whose joint text is in the vocabulary, those with the
// highest score go first, the leftmost on ties. What ends without a token is written as byte tokens
// <0xXX>, or as the unknown token where a byte has none.
//
// Cost: O(n log n) for n characters; a lookup by text for at most 3 n pairs, none longer than the
// longest token.
// Source: Kudo and Richardson, "SentencePiece" (2018); github.com/google/sentencepiece.
// Deviations: an invalid byte is a symbol of its own (SentencePiece replaces it by U+FFFD,
// llama.cpp takes the bytes after it along); unused tokens count as normal ones, as in llama.cpp.
#pragma once

#include <array>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "decoder/text/tokenizer.hpp"

namespace quoka_decoder {

class SentencePiece : public Tokenizer {
 public:
  // Throws std::runtime_error as check() does, and if a byte token is not written as <0xXX>.
  explicit SentencePiece(Vocabulary vocabulary);

 private:
  void encode_text(std::string_view text, bool at_start, std::vector<Token>& tokens) const override;
  std::string bytes_of(Token token) const override;

  Token find(std::string_view text) const;
  void append_bytes(std::string_view bytes, std::vector<Token>& tokens) const;

  std::unordered_map<std::string_view, Token> tokens_by_text_;
  std::array<Token, 256> byte_tokens_;
  std::size_t longest_ = 0;  // bytes
};

}  // namespace quoka_decoder
