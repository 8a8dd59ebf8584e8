// The input of `check`: a text with facts in it, and questions about them.
//
//   text ... The pass key of the red falcon is 48213. ... text ...      key: one of many alike
//   text ... One of the magic numbers of Lisbon is 51734. ... text ...  values: three, in their
//                                                                       order
//   text ... Let the variable ALPHA be 58123. ... text ...              chain: BETA is ALPHA, asked
//                                                                       for BETA
//
// Facts stand at even distances, so that every prefix has its own. A question is a text that goes
// on: its digits are the answer. No chat template is needed.
#pragma once

#include <llama.h>

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace quoka_ggml {

using Tokens = std::vector<llama_token>;

inline Tokens tokenize(const llama_vocab* vocab, std::string_view text, bool begins = false) {
  Tokens tokens(text.size() + 8);
  const auto call = [&] {
    return llama_tokenize(vocab, text.data(), static_cast<int>(text.size()), tokens.data(),
                          static_cast<int>(tokens.size()), begins, false);
  };
  int count = call();
  if (count < 0 && count != std::numeric_limits<int>::min()) {  // how many are needed
    tokens.resize(static_cast<std::size_t>(-count));
    count = call();
  }
  if (count < 0) throw std::runtime_error("llama.cpp's tokenizer refuses the text");
  tokens.resize(static_cast<std::size_t>(count));
  return tokens;
}
inline bool has_digit(const llama_vocab* vocab, llama_token token) {
  char piece[64];
  const int size = llama_token_to_piece(vocab, token, piece, sizeof piece, 0, false);
  return std::any_of(piece, piece + std::max(size, 0), [](char c) { return '0' <= c && c <= '9'; });
}

struct Question {
  std::string kind;                       // key, values, chain
  std::int64_t at, until;                 // tokens: of its first fact, and behind its last
  Tokens tokens;                          // with the answer
  std::vector<std::vector<int>> numbers;  // of the answer: where in `tokens` their digits are
};

struct Reading {
  Tokens tokens;
  std::vector<bool> is_text;  // of each token: not a fact's
  std::vector<Question> questions;
  std::size_t characters;  // of the text that were read
};

// One token after another, `length` of them, from the text's beginning; `facts` sentences among
// them.
// Throws std::invalid_argument where the text is too short.
class Reader {
 public:
  Reader(const llama_vocab* vocab, std::uint32_t seed) : vocab_(vocab), random_(seed) {}

  Reading read(std::string_view text, std::int64_t length, int facts) {
    Reading r{tokenize(vocab_, "", true), {}, {}, 0};
    r.is_text.assign(r.tokens.size(), false);
    const std::string_view first = text.substr(0, 4000);
    const double per_token =
        static_cast<double>(first.size()) /
        static_cast<double>(std::max<std::size_t>(1, tokenize(vocab_, first).size()));
    for (int fact = 0; std::ssize(r.tokens) < length; ++fact) {
      const std::int64_t next = fact < facts ? length * (2 * fact + 1) / (2 * facts) : length;
      while (std::ssize(r.tokens) < next) {
        const auto wanted =
            static_cast<std::size_t>(static_cast<double>(next - std::ssize(r.tokens)) * per_token) +
            1;
        const std::string_view rest = text.substr(r.characters);
        if (rest.empty())
          throw std::invalid_argument(
              fmt::format("the text has {} tokens with its facts, {} are wanted: more text, or "
                          "shorter --lengths",
                          std::ssize(r.tokens), length));
        const std::size_t end = rest.find('\n', wanted);
        const std::string_view part = rest.substr(0, end == rest.npos ? end : end + 1);
        r.characters += part.size();
        add(r, part, true);
      }
      if (fact < facts) state(r);
    }
    r.tokens.resize(static_cast<std::size_t>(length));
    r.is_text.resize(r.tokens.size());
    return r;
  }

 private:
  struct Asked {
    std::string kind, name, numbers;
    std::int64_t at;
    int facts = 0;
  };

  void add(Reading& r, std::string_view part, bool is_text) {
    const Tokens tokens = tokenize(vocab_, part);
    r.tokens.insert(r.tokens.end(), tokens.begin(), tokens.end());
    r.is_text.resize(r.tokens.size(), is_text);
  }
  std::string number() { return std::to_string(10000 + random_() % 90000); }
  // Six sentences state three things, over and over.
  void state(Reading& r) {
    static constexpr int turns[] = {1, 2, 0, 1, 2, 1};
    static constexpr const char* kinds[] = {"key", "values", "chain"};
    const int step = facts_ % 6, which = turns[step];
    Asked& asked = open_[static_cast<std::size_t>(which)];
    if (step == 0) open_ = {};
    if (asked.facts == 0) asked = {kinds[which], name(which, facts_ / 6), "", std::ssize(r.tokens)};
    ++facts_, ++asked.facts;
    const std::string x = number();
    if (which == 0) {
      asked.numbers = x;
      add(r, fmt::format("The pass key of the {} is {}. Remember it.\n", asked.name, x), false);
      ask(r, asked, fmt::format("\n\nThe pass key of the {} is {}", asked.name, x));
    } else if (which == 1) {
      asked.numbers += (asked.facts == 1 ? "" : asked.facts == 2 ? ", " : " and ") + x;
      add(r, fmt::format("One of the magic numbers of {} is {}.\n", asked.name, x), false);
      if (asked.facts == 3)
        ask(r, asked,
            fmt::format("\n\nThe three magic numbers of {}, in the order of the text, are {}",
                        asked.name, asked.numbers));
    } else if (asked.facts == 1) {
      asked.numbers = x;
      add(r, fmt::format("Let the variable {}A be {}.\n", asked.name, x), false);
    } else {
      add(r, fmt::format("Let the variable {0}B be equal to the variable {0}A.\n", asked.name),
          false);
      ask(r, asked,
          fmt::format("\n\nThe variable {0}B, which is equal to the variable {0}A, is {1}",
                      asked.name, asked.numbers));
    }
  }
  void ask(Reading& r, const Asked& asked, const std::string& text) {
    Question q{asked.kind, asked.at, std::ssize(r.tokens), tokenize(vocab_, text), {}};
    bool before = false;
    for (int i = 0; i < static_cast<int>(q.tokens.size()); ++i) {
      const bool digit = has_digit(vocab_, q.tokens[static_cast<std::size_t>(i)]);
      if (digit && !before) q.numbers.emplace_back();
      if (digit) q.numbers.back().push_back(i);
      before = digit;
    }
    r.questions.push_back(std::move(q));
  }
  static std::string name(int which, int i) {
    static constexpr std::array first{"red", "old", "tall", "shy", "blue", "wild", "calm", "proud"};
    static constexpr std::array second{"falcon", "miller", "otter", "baker", "heron", "sailor"};
    static constexpr std::array cities{"Lisbon", "Oslo",  "Cairo", "Lima",
                                       "Quito",  "Delhi", "Seoul", "Turin"};
    static constexpr std::array letters{"K", "M", "P", "R", "T", "V", "W", "Z"};
    const auto a = static_cast<std::size_t>(i) % 8, b = static_cast<std::size_t>(i) / 8;
    if (which == 0) return fmt::format("{} {}", first[a], second[(a + b) % 6]);
    if (which == 1) return b == 0 ? cities[a] : fmt::format("{} {}", first[b % 8], cities[a]);
    return fmt::format("{}{}", letters[a], letters[(a + b + 1) % 8]);
  }

  const llama_vocab* vocab_;
  std::mt19937 random_;
  std::array<Asked, 3> open_;
  int facts_ = 0;
};

}  // namespace quoka_ggml
