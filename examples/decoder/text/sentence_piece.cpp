#include "decoder/text/sentence_piece.hpp"

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <stdexcept>
#include <utility>

#include "decoder/text/pair_merging.hpp"
#include "decoder/text/utf8.hpp"

namespace quoka_decoder {
namespace {

constexpr std::string_view space = "\xE2\x96\x81";  // U+2581, lower one eighth block

std::string replace_all(std::string_view text, std::string_view from, std::string_view to) {
  std::string result;
  for (auto at = text.find(from); at != text.npos; at = text.find(from)) {
    result.append(text, 0, at).append(to);
    text.remove_prefix(at + from.size());
  }
  return result.append(text);
}

// The byte that <0xXX> names, or -1.
int byte_named(std::string_view text) {
  if (text.size() != 6 || !text.starts_with("<0x") || text.back() != '>') return -1;
  int value = -1;
  const auto [end, error] = std::from_chars(text.data() + 3, text.data() + 5, value, 16);
  return error == std::errc() && end == text.data() + 5 ? value : -1;
}

}  // namespace

SentencePiece::SentencePiece(Vocabulary vocabulary) : Tokenizer(std::move(vocabulary)) {
  byte_tokens_.fill(no_token);
  tokens_by_text_.reserve(static_cast<std::size_t>(size()));
  for (Token token = 0; token < size(); ++token) {
    if (type(token) == TokenType::byte) {
      const int byte = byte_named(text(token));
      if (byte < 0) {
        throw std::runtime_error("tokenizer.ggml.tokens: " + std::to_string(token) +
                                 " is a byte, but is written '" + text(token) + "', not <0xXX>");
      }
      byte_tokens_[static_cast<std::size_t>(byte)] = token;
    } else if (arises_from_text(token)) {
      tokens_by_text_.emplace(text(token), token);
      longest_ = std::max(longest_, text(token).size());
    }
  }
}

Token SentencePiece::find(std::string_view text) const {
  if (text.size() > longest_) return no_token;
  const auto place = tokens_by_text_.find(text);
  return place == tokens_by_text_.end() ? no_token : place->second;
}

void SentencePiece::encode_text(std::string_view text, bool at_start,
                                std::vector<Token>& tokens) const {
  std::string escaped(at_start && vocabulary().add_space_prefix ? space : "");
  escaped += replace_all(text, " ", space);
  const auto slice = [&](Index begin, Index size) {
    return std::string_view(escaped).substr(static_cast<std::size_t>(begin),
                                            static_cast<std::size_t>(size));
  };

  PairMerger merger;
  for (std::size_t at = 0; at < escaped.size();) {
    const Utf8Sequence next = utf8_sequence(escaped, at);
    const std::size_t size = next.kind == Utf8::complete ? next.size : 1;
    merger.append(static_cast<Index>(size), find(std::string_view(escaped).substr(at, size)));
    at += size;
  }
  merger.merge([&](const Symbol& left, const Symbol& right) -> std::optional<Merge> {
    const Token token = find(slice(left.begin, left.size + right.size));
    if (token == no_token) return std::nullopt;
    return Merge{-double{vocabulary().scores[static_cast<std::size_t>(token)]}, token};
  });
  merger.for_each([&](const Symbol& symbol) {
    if (symbol.token != no_token) {
      tokens.push_back(symbol.token);
    } else {
      append_bytes(slice(symbol.begin, symbol.size), tokens);
    }
  });
}

void SentencePiece::append_bytes(std::string_view bytes, std::vector<Token>& tokens) const {
  const auto token_of = [&](char c) { return byte_tokens_[static_cast<unsigned char>(c)]; };
  if (std::ranges::any_of(bytes, [&](char c) { return token_of(c) == no_token; })) {
    tokens.push_back(unknown_for(bytes));
  } else {
    for (const char c : bytes) tokens.push_back(token_of(c));
  }
}

std::string SentencePiece::bytes_of(Token token) const {
  if (type(token) == TokenType::byte) return {static_cast<char>(byte_named(text(token)))};
  return replace_all(text(token), space, " ");
}

}  // namespace quoka_decoder
