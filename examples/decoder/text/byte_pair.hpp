// tokenizer.ggml.model "gpt2": BPE over bytes, by ranked merges.
//
// A text is split into words (pre_tokenizer.hpp). The bytes of a word are its first symbols, and of
// all neighbours that the list of merges has, those that stand first in it are merged first, the
// leftmost on ties. All is done in bytes; the file spells each byte as a character that can be
// seen (the byte alphabet: printable ones as themselves, the others from U+0100 on), which is undone
// when the vocabulary is read.
//
// Cost: one pass of the regular expressions, then O(n log n) for a word of n bytes.
// Source: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), 2.2;
// github.com/openai/gpt-2, src/encoder.py; the names of the keys are ggml's.
// Deviations: a merge whose parts or result are not tokens is refused (llama.cpp drops the text).
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "decoder/text/pre_tokenizer.hpp"
#include "decoder/text/tokenizer.hpp"

namespace quoka_decoder {

class PairMerger;

class BytePair : public Tokenizer {
 public:
  // Throws std::runtime_error as check() does, if vocabulary.pre is not known, or if a merge is not
  // two tokens that make a third.
  explicit BytePair(Vocabulary vocabulary);

 private:
  struct RankedMerge {
    Index rank;
    Token token;
  };

  void encode_text(std::string_view text, bool at_start, std::vector<Token>& tokens) const override;
  std::string bytes_of(Token token) const override {
    return bytes_[static_cast<std::size_t>(token)];
  }

  void read_tokens();
  void read_merges();
  void encode_word(std::string_view word, PairMerger& merger, std::vector<Token>& tokens) const;

  PreTokenizerRules rules_;
  PreTokenizer pre_tokenizer_;
  std::vector<std::string> bytes_;  // of each token
  std::unordered_map<std::string_view, Token> tokens_by_bytes_;
  std::array<Token, 256> byte_tokens_;
  std::unordered_map<std::uint64_t, RankedMerge> merges_;  // by the two tokens
};

}  // namespace quoka_decoder
