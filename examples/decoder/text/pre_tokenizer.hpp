// The first step of byte-level BPE: a text is split into words, across which nothing is merged.
//
// tokenizer.ggml.pre names a list of regular expressions. The first is run over the text; what it
// matches, and what lies between, are pieces, and over each of these the next one is run.
//
//   llama-bpe, smaug-bpe     words, digits by up to three, punctuation with the line ends after it
//   qwen2                    the same, digits one by one
//   gpt-2, smollm, default   the words of GPT-2; digits in one run, one by one, by three
//
// Source: the expressions stand in the models' tokenizer.json files (pre_tokenizer); which names
// share one, and the defaults, are those of llama.cpp (src/llama-vocab.cpp).
// A byte that is not UTF-8 splits as a symbol (as U+FFFD would) and stays what it is.
// Deviations: letters and digits are those that PCRE2 knows; in 10.42 the 5,010 that came with
// Unicode 15 still count as symbols. Qwen's normalisation to NFC is left out, as in llama.cpp.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace quoka_decoder {

struct PreTokenizerRules {
  std::vector<std::string> patterns;  // PCRE2, run one after the other
  bool whole_words = false;  // a word in the vocabulary is its token, wherever merging would lead
  bool add_bos = false;      // where the file does not say
};

// Throws std::runtime_error if this tokenizer.ggml.pre is not known.
PreTokenizerRules pre_tokenizer_rules(std::string_view name);

class PreTokenizer {
 public:
  // Throws std::runtime_error if a pattern does not compile.
  explicit PreTokenizer(const std::vector<std::string>& patterns);
  ~PreTokenizer();

  // The words: parts of `text`, in its order and without gaps. Threads may call it at once.
  // Throws std::runtime_error if PCRE2 fails, for which memory has to run out.
  std::vector<std::string_view> split(std::string_view text) const;

 private:
  class Pattern;
  std::vector<Pattern> patterns_;
};

}  // namespace quoka_decoder
