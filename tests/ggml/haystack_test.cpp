// Prompts with a needle in a haystack, in a vocabulary of bytes, so that tokens can be read.

#include "ggml/haystack.hpp"

#include <gtest/gtest.h>

#include <set>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

using namespace quoka_ggml;

// A token a byte, after <unk>, <s> and </s>.
Tokenizer bytes() {
  return {
      [](const std::string& text, Tokenizer::Options options) {
        std::vector<Token> tokens;
        if (options.add_bos) tokens.push_back(1);
        for (const char c : text) tokens.push_back(3 + static_cast<unsigned char>(c));
        return tokens;
      },
      [](Token token) { return token < 3 ? "" : std::string(1, static_cast<char>(token - 3)); }};
}

std::string text_of(const Tokenizer& tokenizer, const std::vector<Token>& tokens) {
  std::string text;
  for (const Token token : tokens) text += tokenizer.piece(token);
  return text;
}

constexpr const char* story = "One sentence.\nAnother one, a little longer.\nAnd a third.";
const ChatTurns turns{"[user] ", " [model] "};

TEST(Haystack, APromptHasItsLengthItsNeedleAndItsQuestion) {
  const auto tokenizer = bytes();
  const Haystack haystack(tokenizer, story, turns);
  for (const Index length : {700, 1300})
    for (const double depth : {0.0, 0.3, 0.5, 1.0}) {
      const NeedlePrompt prompt = haystack.prompt(length, depth, "71432");
      EXPECT_EQ(std::ssize(prompt.tokens), length);
      EXPECT_EQ(prompt.tokens.front(), 1);
      EXPECT_EQ(text_of(tokenizer, prompt.answer), "71432");
      const std::string text = text_of(tokenizer, prompt.tokens);
      const std::string needle = "\nThe pass key is 71432. Remember it. 71432 is the pass key.";
      const auto at = text.find(needle);
      ASSERT_NE(at, text.npos) << text;
      EXPECT_EQ(text.find("71432", at + needle.size()), text.npos);
      EXPECT_NE(text.find("[user] There is an important info"), text.npos);
      EXPECT_TRUE(text.ends_with("What is the pass key? [model] The pass key is ")) << text;
      // Its place among the lines of the story, by their letters.
      const auto begin = text.find("\nOne sentence."), end = text.find("\nWhat is the pass key?");
      const double room = static_cast<double>(end - std::min(begin, at) - needle.size());
      const double before = at < begin ? 0.0 : static_cast<double>(at - begin);
      EXPECT_LE(before, depth * room + 1);
      EXPECT_GE(before, depth * room - 60) << "the end of a paragraph, the longest has 29";
    }
}

TEST(Haystack, AShortTextBeginsAgain) {
  const auto tokenizer = bytes();
  const std::string text =
      text_of(tokenizer, Haystack(tokenizer, story, turns).prompt(1500, 1.0, "12345").tokens);
  std::size_t times = 0;
  const std::string first = "One sentence.";
  for (auto at = text.find(first); at != text.npos; at = text.find(first, at + 1)) ++times;
  EXPECT_GT(times, 3u);
}

TEST(Haystack, RefusesWhatHoldsNoPrompt) {
  const auto tokenizer = bytes();
  EXPECT_THROW(Haystack(tokenizer, "", turns), std::runtime_error);
  const Haystack haystack(tokenizer, story, turns);
  try {
    (void)haystack.prompt(100, 0.5, "12345");
    FAIL() << "not refused";
  } catch (const std::runtime_error& e) {
    const std::string what = e.what();
    EXPECT_NE(what.find("100 tokens"), what.npos);
    const Index least = std::stol(what.substr(what.rfind(' ') + 1));
    EXPECT_EQ(std::ssize(haystack.prompt(least, 0.5, "12345").tokens), least);
    EXPECT_THROW((void)haystack.prompt(least - 1, 0.5, "12345"), std::runtime_error);
  }
}

TEST(Haystack, KeysHaveFiveDigitsAndArePointsOwn) {
  std::set<std::string> keys;
  for (Index length : {512, 1024})
    for (Index depth = 0; depth < 5; ++depth)
      for (Index needle = 0; needle < 2; ++needle) {
        const std::string key = draw_key(1, length, depth, needle);
        EXPECT_EQ(key, draw_key(1, length, depth, needle));
        EXPECT_EQ(key.size(), 5u);
        keys.insert(key);
      }
  EXPECT_EQ(keys.size(), 20u);
  EXPECT_NE(draw_key(1, 512, 0, 0), draw_key(2, 512, 0, 0));
}

TEST(Haystack, ChunksThatPromptsShareAreWholeAndNeverAll) {
  const std::vector<Token> prompt{1, 2, 3, 4, 5, 6, 7};
  using Tokens = std::vector<Token>;
  EXPECT_EQ(shared_chunks(prompt, Tokens{}, 2), 0);
  EXPECT_EQ(shared_chunks(prompt, Tokens{9, 2, 3, 4}, 2), 0);
  EXPECT_EQ(shared_chunks(prompt, Tokens{1, 2, 3, 4, 5, 9, 7}, 2), 4);
  EXPECT_EQ(shared_chunks(prompt, Tokens{1, 2, 3, 4, 9}, 2), 4);
  EXPECT_EQ(shared_chunks(prompt, Tokens{1, 2, 3}, 2), 2);
  EXPECT_EQ(shared_chunks(prompt, prompt, 2), 6);
  EXPECT_EQ(shared_chunks(prompt, prompt, 7), 0);  // logits follow the last chunk
  EXPECT_EQ(shared_chunks(prompt, Tokens{1, 2, 3, 4, 5, 6, 7, 8}, 7), 0);
}

TEST(Haystack, DepthsAreEvenlySpaced) {
  EXPECT_EQ(depth_of(0, 1), 0.5);
  EXPECT_EQ(depth_of(0, 5), 0.0);
  EXPECT_EQ(depth_of(1, 5), 0.25);
  EXPECT_EQ(depth_of(4, 5), 1.0);
}

TEST(Haystack, ChatTurnsAreKnownByTheirMarkers) {
  EXPECT_EQ(chat_turns("{{'<|im_start|>' + role}}").user, "<|im_start|>user\n");
  EXPECT_EQ(chat_turns("{{'<|user|>'}}").assistant, "</s>\n<|assistant|>\n");
  EXPECT_EQ(chat_turns("[INST]").user, "[INST] ");
  EXPECT_EQ(chat_turns("another").user, "");
}

}  // namespace
