#include "decoder/text/byte_pair.hpp"

#include <cstddef>
#include <optional>
#include <stdexcept>
#include <utility>

#include "decoder/text/pair_merging.hpp"
#include "decoder/text/utf8.hpp"

namespace quoka_decoder {
namespace {

constexpr bool shown_as_itself(int byte) {
  return (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte != 0xAD);
}

// The byte alphabet: the byte that each code point below U+0144 spells, or -1.
constexpr std::array<int, 0x144> make_alphabet() {
  std::array<int, 0x144> bytes{};
  bytes.fill(-1);
  std::size_t next = 0x100;
  for (int byte = 0; byte < 256; ++byte) {
    bytes[shown_as_itself(byte) ? static_cast<std::size_t>(byte) : next++] = byte;
  }
  return bytes;
}
constexpr std::array<int, 0x144> alphabet = make_alphabet();

// What the text of a token spells; nothing if it has a character outside the alphabet.
std::optional<std::string> spelled_bytes(std::string_view text) {
  std::string bytes;
  for (std::size_t at = 0; at < text.size();) {
    const Utf8Sequence next = utf8_sequence(text, at);
    if (next.kind != Utf8::complete || next.size > 2) return std::nullopt;
    auto point = static_cast<std::size_t>(static_cast<unsigned char>(text[at]));
    if (next.size == 2) {
      point = (point & 0x1F) << 6 | (static_cast<unsigned char>(text[at + 1]) & 0x3F);
    }
    if (point >= alphabet.size() || alphabet[point] < 0) return std::nullopt;
    bytes += static_cast<char>(alphabet[point]);
    at += next.size;
  }
  return bytes;
}

std::uint64_t key_of(Token left, Token right) {
  return std::uint64_t{static_cast<std::uint32_t>(left)} << 32 | static_cast<std::uint32_t>(right);
}

}  // namespace

BytePair::BytePair(Vocabulary vocabulary)
    : Tokenizer(std::move(vocabulary)),
      rules_(pre_tokenizer_rules(this->vocabulary().pre)),
      pre_tokenizer_(rules_.patterns) {
  read_tokens();
  read_merges();
}

void BytePair::read_tokens() {
  byte_tokens_.fill(no_token);
  bytes_.reserve(static_cast<std::size_t>(size()));
  tokens_by_bytes_.reserve(static_cast<std::size_t>(size()));
  for (Token token = 0; token < size(); ++token) {
    std::optional<std::string> bytes = spelled_bytes(text(token));
    const bool found = bytes && arises_from_text(token);
    bytes_.push_back(bytes ? *std::move(bytes) : text(token));
    const std::string& own = bytes_.back();
    if (!found) continue;
    tokens_by_bytes_.emplace(own, token);
    if (own.size() == 1) byte_tokens_[static_cast<unsigned char>(own[0])] = token;
  }
}

void BytePair::read_merges() {
  const std::vector<std::string>& list = vocabulary().merges;
  merges_.reserve(list.size());
  const auto find = [&](std::string_view text) {
    const auto bytes = spelled_bytes(text);
    const auto place = bytes ? tokens_by_bytes_.find(*bytes) : tokens_by_bytes_.end();
    return place == tokens_by_bytes_.end() ? no_token : place->second;
  };
  for (std::size_t rank = 0; rank < list.size(); ++rank) {
    const std::string_view line = list[rank];
    const std::size_t middle = line.find(' ');
    if (middle == line.npos) {
      throw std::runtime_error("tokenizer.ggml.merges: " + std::to_string(rank) + " is '" +
                               list[rank] + "', which is not two tokens");
    }
    const Token left = find(line.substr(0, middle));
    const Token right = find(line.substr(middle + 1));
    const Token both = find(list[rank].substr(0, middle) + list[rank].substr(middle + 1));
    if (left == no_token || right == no_token || both == no_token) {
      throw std::runtime_error("tokenizer.ggml.merges: " + std::to_string(rank) + " is '" +
                               list[rank] +
                               "', but its parts and what they make are not all among " +
                               std::to_string(size()) + " tokens");
    }
    merges_.emplace(key_of(left, right), RankedMerge{static_cast<Index>(rank), both});
  }
}

void BytePair::encode_text(std::string_view text, bool /*at_start*/,
                           std::vector<Token>& tokens) const {
  PairMerger merger;
  for (const std::string_view word : pre_tokenizer_.split(text)) {
    if (rules_.whole_words) {
      const auto place = tokens_by_bytes_.find(word);
      if (place != tokens_by_bytes_.end()) {
        tokens.push_back(place->second);
        continue;
      }
    }
    encode_word(word, merger, tokens);
  }
}

void BytePair::encode_word(std::string_view word, PairMerger& merger,
                           std::vector<Token>& tokens) const {
  merger.clear();
  for (const char c : word) merger.append(1, byte_tokens_[static_cast<unsigned char>(c)]);
  merger.merge([&](const Symbol& left, const Symbol& right) -> std::optional<Merge> {
    if (left.token == no_token || right.token == no_token) return std::nullopt;
    const auto place = merges_.find(key_of(left.token, right.token));
    if (place == merges_.end()) return std::nullopt;
    return Merge{static_cast<double>(place->second.rank), place->second.token};
  });
  merger.for_each([&](const Symbol& symbol) {
    const std::size_t begin = static_cast<std::size_t>(symbol.begin);
    tokens.push_back(symbol.token != no_token ? symbol.token : unknown_for(word.substr(begin, 1)));
  });
}

}  // namespace quoka_decoder
