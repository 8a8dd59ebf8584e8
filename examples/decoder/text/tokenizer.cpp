#include "decoder/text/tokenizer.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <stdexcept>
#include <utility>

#include "decoder/text/byte_pair.hpp"
#include "decoder/text/sentence_piece.hpp"

namespace quoka_decoder {
namespace {

// Files often name one end only, and the others are known by their text.
constexpr std::array<std::string_view, 9> end_texts = {
    "</s>",       "<eos>",      "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>",
    "<|eom_id|>", "<|im_end|>", "<|end|>",       "<end_of_turn>"};

}  // namespace

Tokenizer::Tokenizer(Vocabulary vocabulary) : vocabulary_(std::move(vocabulary)) {
  check(vocabulary_);
  for (const auto id : {vocabulary_.eos, vocabulary_.eot, vocabulary_.eom}) {
    if (id) ends_.push_back(*id);
  }
  for (Token token = 0; token < size(); ++token) {
    const TokenType kind = type(token);
    const bool special = kind == TokenType::control || kind == TokenType::user_defined;
    if ((special || kind == TokenType::unknown) && !text(token).empty()) special_.push_back(token);
    if (special && std::ranges::count(end_texts, text(token)) > 0) ends_.push_back(token);
  }
  std::ranges::stable_sort(special_, std::greater{}, [&](Token t) { return text(t).size(); });
  std::ranges::sort(ends_);
}

std::vector<Token> Tokenizer::encode(std::string_view text, EncodeOptions options) const {
  std::vector<Token> tokens;
  if (options.add_bos && vocabulary_.add_bos) tokens.push_back(*vocabulary_.bos);
  bool at_start = true;
  for (const Fragment& fragment : cut_at_special(text, options.parse_special)) {
    if (fragment.token == no_token) {
      encode_text(fragment.text, at_start, tokens);
    } else {
      tokens.push_back(fragment.token);
    }
    at_start = fragment.token != no_token;
  }
  return tokens;
}

std::vector<Tokenizer::Fragment> Tokenizer::cut_at_special(std::string_view text,
                                                           bool parse_special) const {
  std::vector<Fragment> fragments;
  if (!text.empty()) fragments.push_back({text, no_token});
  std::vector<Fragment> cut;
  for (const Token token : special_) {
    if (!parse_special && type(token) != TokenType::user_defined) continue;
    const std::string& mark = this->text(token);
    if (text.find(mark) == text.npos) continue;  // most of them, in most texts
    cut.clear();
    for (const Fragment& fragment : fragments) {
      std::string_view rest = fragment.text;
      for (auto at = rest.find(mark); fragment.token == no_token && at != rest.npos;
           at = rest.find(mark)) {
        if (at > 0) cut.push_back({rest.substr(0, at), no_token});
        cut.push_back({{}, token});
        rest.remove_prefix(at + mark.size());
      }
      if (fragment.token != no_token || !rest.empty()) cut.push_back({rest, fragment.token});
    }
    fragments.swap(cut);
  }
  return fragments;
}

std::string Tokenizer::decode(std::span<const Token> tokens) const {
  std::string result;
  bool at_start = true;
  for (const Token token : tokens) {
    const std::string bytes = piece(token);
    const bool special =
        type(token) == TokenType::control || type(token) == TokenType::user_defined;
    const bool drop =
        at_start && !special && vocabulary_.add_space_prefix && bytes.starts_with(' ');
    result.append(bytes, drop ? 1 : 0);
    at_start = special;
  }
  return result;
}

std::string Tokenizer::piece(Token token) const {
  if (token < 0 || token >= size()) {
    throw std::invalid_argument("token " + std::to_string(token) +
                                " is outside the vocabulary of " + std::to_string(size()));
  }
  switch (type(token)) {
    case TokenType::control:
      return {};
    case TokenType::user_defined:
    case TokenType::unknown:
      return text(token);
    default:
      return bytes_of(token);
  }
}

bool Tokenizer::is_end(Token token) const { return std::ranges::binary_search(ends_, token); }

bool Tokenizer::arises_from_text(Token token) const {
  const TokenType kind = type(token);
  return kind != TokenType::control && kind != TokenType::unknown && kind != TokenType::byte &&
         !text(token).empty();
}

Token Tokenizer::unknown_for(std::string_view bytes) const {
  if (vocabulary_.unknown) return *vocabulary_.unknown;
  std::string shown;
  for (const char c : bytes) {
    const unsigned value = static_cast<unsigned char>(c);
    shown += {' ', "0123456789ABCDEF"[value / 16], "0123456789ABCDEF"[value % 16]};
  }
  throw std::runtime_error("the vocabulary has no token for the bytes" + shown +
                           " and no unknown token");
}

std::unique_ptr<Tokenizer> make_tokenizer(const GgufFile& file) {
  return make_tokenizer(read_vocabulary(file));
}

std::unique_ptr<Tokenizer> make_tokenizer(Vocabulary vocabulary) {
  if (vocabulary.model == "llama") return std::make_unique<SentencePiece>(std::move(vocabulary));
  if (vocabulary.model == "gpt2") return std::make_unique<BytePair>(std::move(vocabulary));
  throw std::runtime_error("tokenizer.ggml.model is '" + vocabulary.model +
                           "'; only 'llama' and 'gpt2' are known");
}

}  // namespace quoka_decoder
