// What the tokenizers stand on: UTF-8 sequence by sequence, and the words of the pre-tokenizers.

#include <gtest/gtest.h>

#include <cstddef>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "decoder/text/pre_tokenizer.hpp"
#include "decoder/text/utf8.hpp"
#include "decoder/random_text.hpp"

namespace {

using namespace quoka_decoder;
using Words = std::vector<std::string>;

// ---- words ---------------------------------------------------------------------------------------

Words words_of(const std::string& pre, std::string_view text) {
  Words words;
  for (const auto word : PreTokenizer(pre_tokenizer_rules(pre).patterns).split(text)) {
    words.emplace_back(word);
  }
  return words;
}

constexpr std::string_view sample = "I'LL  go:\n\n 12345 'tis";

TEST(PreTokenizer, Llama3TakesThreeDigits) {
  EXPECT_EQ(words_of("llama-bpe", sample),
            (Words{"I", "'LL", " ", " go", ":\n\n", " ", "123", "45", " '", "tis"}));
}

TEST(PreTokenizer, Qwen2TakesOneDigit) {
  EXPECT_EQ(words_of("qwen2", sample),
            (Words{"I", "'LL", " ", " go", ":\n\n", " ", "1", "2", "3", "4", "5", " '", "tis"}));
}

TEST(PreTokenizer, Gpt2TakesAllDigitsAndSmallContractions) {
  EXPECT_EQ(words_of("gpt-2", sample),
            (Words{"I", "'", "LL", " ", " go", ":", "\n\n", " 12345", " '", "tis"}));
}

TEST(PreTokenizer, SmollmTakesOneDigitFirst) {
  EXPECT_EQ(words_of("smollm", sample), (Words{"I", "'", "LL", " ", " go", ":", "\n\n ", "1", "2",
                                               "3", "4", "5", " '", "tis"}));
}

TEST(PreTokenizer, DefaultCutsDigitsByThree) {
  EXPECT_EQ(words_of("default", sample),
            (Words{"I", "'", "LL", " ", " go", ":", "\n\n", " ", "123", "45", " ", "'", "tis"}));
}

TEST(PreTokenizer, SpacesAreThoseOfUnicode) {
  // No-break, em, ideographic, line separator, next line: spaces. U+180E and U+200B are none.
  EXPECT_EQ(words_of("gpt-2", "\u00a0\u2003\u3000\u2028\u0085x"),
            (Words{"\u00a0\u2003\u3000\u2028", "\u0085", "x"}));
  EXPECT_EQ(words_of("gpt-2", "a\u180e\u200b b"), (Words{"a", "\u180e\u200b", " b"}));
}

TEST(PreTokenizer, AnInvalidByteSplitsAsASymbol) {
  EXPECT_EQ(words_of("gpt-2", "ab\xFF\xC3 cd 1\xF0\x9F!"),
            (Words{"ab", "\xFF\xC3", " cd", " 1", "\xF0\x9F!"}));
  EXPECT_EQ(words_of("qwen2", "\xFFword"), words_of("qwen2", "\xFFword"));
  EXPECT_EQ(words_of("qwen2", "\xFFword"), (Words{"\xFFword"}));  // as "!word" and "\uFFFDword" are
  EXPECT_EQ(words_of("qwen2", "\uFFFDword"), (Words{"\uFFFDword"}));
}

TEST(PreTokenizer, WordsAreTheTextWithoutGaps) {
  std::mt19937 random(17);
  for (const char* pre : {"llama-bpe", "qwen2", "gpt-2", "smollm", "default"}) {
    const PreTokenizer pre_tokenizer(pre_tokenizer_rules(pre).patterns);
    for (int i = 0; i < 500; ++i) {
      const std::string text = random_text(random);
      std::string joined;
      for (const auto word : pre_tokenizer.split(text)) {
        ASSERT_FALSE(word.empty());
        joined += word;
      }
      ASSERT_EQ(joined, text);
    }
  }
}

// ---- UTF-8 ---------------------------------------------------------------------------------------

TEST(Utf8, WellFormedSequencesAreThoseOfTheStandard) {
  const auto kind = [](std::string_view text) { return utf8_sequence(text, 0).kind; };
  for (const char* good :
       {"a", "\u0080", "\u07ff", "\u0800", "\ud7ff", "\ue000", "\U00010000", "\U0010ffff"}) {
    EXPECT_EQ(kind(good), Utf8::complete) << good;
    EXPECT_EQ(utf8_sequence(good, 0).size, std::string_view(good).size());
  }
  for (const char* bad : {"\x80", "\xBF", "\xC0\x80", "\xC1\xBF", "\xE0\x9F\xBF", "\xED\xA0\x80",
                          "\xF0\x8F\xBF\xBF", "\xF4\x90\x80\x80", "\xF5\x80\x80\x80", "\xC3("}) {
    EXPECT_EQ(kind(bad), Utf8::invalid);
    EXPECT_EQ(utf8_sequence(bad, 0).size, 1u);
  }
  for (const char* cut : {"\xC3", "\xE4", "\xE4\xB8", "\xF0\x9F\x98"}) {
    EXPECT_EQ(kind(cut), Utf8::truncated);
    EXPECT_EQ(utf8_sequence(cut, 0).size, std::string_view(cut).size());
  }
}

TEST(Utf8, TheStreamHoldsBackWhatIsNotComplete) {
  Utf8Stream stream;
  EXPECT_EQ(stream.feed("a\xF0\x9F"), "a");
  EXPECT_EQ(stream.feed("\x98"), "");
  EXPECT_EQ(stream.feed("\x80z\xC3"), "😀z");
  EXPECT_EQ(stream.finish(), "\xC3");
  EXPECT_EQ(stream.finish(), "");
}

TEST(Utf8, TheStreamLosesNothingHoweverATextIsCut) {
  std::mt19937 random(23);
  for (int i = 0; i < 500; ++i) {
    const std::string text = random_text(random);
    Utf8Stream stream;
    std::string joined;
    for (std::size_t at = 0; at < text.size();) {
      const std::size_t size = 1 + random() % 5;
      joined += stream.feed(std::string_view(text).substr(at, size));
      at += size;
    }
    const std::string rest = stream.finish();
    EXPECT_LT(rest.size(), 4u);
    EXPECT_EQ(joined + rest, text);
  }
}

}  // namespace
