// The tokenizers: the ids of llama.cpp over small vocabularies (goldens/tokenizer.py), naive merging
// over random ones, round trips of any bytes, and files that must be refused.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <memory>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "decoder/file/gguf.hpp"
#include "decoder/text/tokenizer.hpp"
#include "decoder/file/gguf_writer.hpp"
#include "decoder/random_text.hpp"

namespace {

using namespace quoka_decoder;
using nlohmann::json;
using Tokens = std::vector<Token>;
using Words = std::vector<std::string>;

// ---- vocabularies --------------------------------------------------------------------------------

const json& golden() {
  static const json file =
      json::parse(std::ifstream(std::string(QUOKA_DECODER_GOLDENS) + "/tokenizer.json"));
  return file;
}

std::vector<std::string> texts() { return golden().at("texts").get<std::vector<std::string>>(); }

// The keys of the golden vocabulary of this model, with some changed.
json keys_of(const std::string& model, const json& changes = json::object()) {
  for (json keys : golden().at("vocabularies")) {
    if (keys.at("tokenizer.ggml.model") != model) continue;
    keys.update(changes);
    return keys;
  }
  throw std::logic_error("no vocabulary " + model);
}

void add(GgufWriter& writer, const std::string& key, const json& value) {
  if (value.is_string()) return writer.add(key, value.get<std::string>());
  if (value.is_boolean()) return writer.add(key, value.get<bool>());
  if (value.is_number_float()) return writer.add(key, value.get<float>());
  if (value.is_number()) return writer.add(key, value.get<std::uint32_t>());
  if (value.empty() || value[0].is_string()) return writer.add(key, value.get<Words>());
  if (value[0].is_number_float()) return writer.add(key, value.get<std::vector<float>>());
  writer.add(key, value.get<std::vector<std::int32_t>>());
}

std::unique_ptr<Tokenizer> tokenizer_of(const json& keys) {
  GgufWriter writer;
  for (const auto& [key, value] : keys.items()) add(writer, key, value);
  const std::vector<std::byte> bytes = writer.bytes();
  return make_tokenizer(GgufFile::parse(bytes, "test.gguf"));
}

std::unique_ptr<Tokenizer> golden_tokenizer(const std::string& model, const std::string& pre = "") {
  const json changes = pre.empty() ? json::object() : json{{"tokenizer.ggml.pre", pre}};
  return tokenizer_of(keys_of(model, changes));
}

// A "llama" vocabulary of these texts, with scores and types.
Vocabulary llama(std::vector<std::string> tokens, std::vector<float> scores,
                 std::vector<TokenType> types) {
  Vocabulary v;
  v.model = "llama";
  v.tokens = std::move(tokens);
  v.scores = std::move(scores);
  v.types = std::move(types);
  return v;
}

Token id_of(const Tokenizer& tokenizer, const std::string& text) {
  const auto& tokens = tokenizer.vocabulary().tokens;
  const auto place = std::find(tokens.begin(), tokens.end(), text);
  return place == tokens.end() ? -1 : static_cast<Token>(place - tokens.begin());
}

template <class F>
std::string error_of(const F& f) {
  try {
    f();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "no error";
}

testing::AssertionResult contains(const std::string& text, const std::string& part) {
  if (text.find(part) != text.npos) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "'" << text << "' does not contain '" << part << "'";
}

// ---- the ids of llama.cpp ------------------------------------------------------------------------

void expect_golden_ids(const std::string& model) {
  int cases = 0;
  for (const json& expected : golden().at("cases")) {
    if (expected.at("vocabulary") != model) continue;
    const auto tokenizer = tokenizer_of(keys_of(model, expected.at("keys")));
    const bool parse_special = expected.at("parse_special").get<bool>();
    const std::vector<std::string> all = texts();
    ASSERT_EQ(expected.at("ids").size(), all.size());
    for (std::size_t i = 0; i < all.size(); ++i) {
      EXPECT_EQ(tokenizer->encode(all[i], {.parse_special = parse_special}),
                expected.at("ids")[i].get<Tokens>())
          << expected.at("keys") << " parse_special " << parse_special << ": " << json(all[i]);
      ++cases;
    }
  }
  EXPECT_GT(cases, 100);
}

TEST(SentencePiece, GivesTheIdsOfLlamaCpp) { expect_golden_ids("llama"); }

TEST(BytePair, GivesTheIdsOfLlamaCpp) { expect_golden_ids("gpt2"); }

// ---- round trips ---------------------------------------------------------------------------------

const std::vector<std::pair<std::string, std::string>> models = {
    {"llama", ""},     {"gpt2", "llama-bpe"}, {"gpt2", "smaug-bpe"}, {"gpt2", "qwen2"},
    {"gpt2", "gpt-2"}, {"gpt2", "smollm"},    {"gpt2", "default"}};

TEST(Tokenizer, TextsComeBack) {
  for (const auto& [model, pre] : models) {
    const auto tokenizer = golden_tokenizer(model, pre);
    for (const std::string& text : texts()) {
      if (model == "llama" && text.find("▁") != text.npos) continue;  // that model's space
      EXPECT_EQ(tokenizer->decode(tokenizer->encode(text)), text) << model << " " << pre;
    }
  }
}

TEST(Tokenizer, AnyBytesComeBack) {
  for (const auto& [model, pre] : models) {
    const auto tokenizer = golden_tokenizer(model, pre);
    std::mt19937 random(7);
    for (int i = 0; i < 3000; ++i) {
      const std::string text = random_text(random);
      const Tokens tokens = tokenizer->encode(text);
      ASSERT_EQ(tokenizer->decode(tokens), text) << model << " " << pre << " " << i;
      for (std::size_t t = tokenizer->vocabulary().add_bos ? 1 : 0; t < tokens.size(); ++t) {
        ASSERT_NE(tokenizer->vocabulary().types[static_cast<std::size_t>(tokens[t])],
                  TokenType::control);
      }
    }
  }
}

TEST(SentencePiece, AnInvalidByteIsAByteToken) {
  const auto tokenizer = golden_tokenizer("llama");
  Tokens expected = tokenizer->encode("a", {.add_bos = false});
  expected.push_back(id_of(*tokenizer, "<0xF0>"));  // begins a character that does not go on
  const auto without_prefix =
      tokenizer_of(keys_of("llama", {{"tokenizer.ggml.add_space_prefix", false}}));
  for (const Token token : without_prefix->encode("jump", {.add_bos = false})) {
    expected.push_back(token);
  }
  EXPECT_EQ(tokenizer->encode("a\xF0jump", {.add_bos = false}), expected);
}

TEST(Tokenizer, LongTextsOfOneKindAreNoTrouble) {
  constexpr std::size_t n = 30'011;
  for (const auto& [model, pre] : models) {
    const auto tokenizer = golden_tokenizer(model, pre);
    for (const char c : {'a', ' ', '\n', '7', '!', '\xFF'}) {
      const std::string text(n, c);
      EXPECT_EQ(tokenizer->decode(tokenizer->encode(text)), text)
          << model << " " << pre << " " << c;
    }
  }
}

// ---- merging -------------------------------------------------------------------------------------

// All pairs are looked at before each merge, and the first of the best is taken.
Tokens merge_naively(Tokens symbols, const auto& cost_and_token) {
  for (;;) {
    std::optional<std::pair<double, Token>> best;
    std::size_t at = 0;
    for (std::size_t i = 0; i + 1 < symbols.size(); ++i) {
      const auto merge = cost_and_token(symbols[i], symbols[i + 1]);
      if (merge && (!best || merge->first < best->first)) {
        best = merge;
        at = i;
      }
    }
    if (!best) return symbols;
    symbols[at] = best->second;
    symbols.erase(symbols.begin() + static_cast<std::ptrdiff_t>(at) + 1);
  }
}

// Words over "abc", all of length 1 and some of up to 6.
Words random_words(std::mt19937& random) {
  Words words = {"a", "b", "c"};
  for (int i = 0; i < 60; ++i) {
    std::string word;
    for (auto length = 2 + random() % 5; length > 0; --length) word += "abc"[random() % 3];
    if (std::find(words.begin(), words.end(), word) == words.end()) words.push_back(word);
  }
  return words;
}

std::string random_word(std::mt19937& random) {
  std::string text;
  for (auto length = random() % 90; length > 0; --length) text += "abc"[random() % 3];
  return text;
}

Tokens letters_of(const std::string& text) {
  Tokens letters;
  for (const char c : text) letters.push_back(c - 'a');
  return letters;
}

TEST(SentencePiece, MergesTheHighestScoreAndThenTheLeftmost) {
  std::mt19937 random(11);
  for (int round = 0; round < 20; ++round) {
    const Words words = random_words(random);
    std::vector<float> scores;
    for (std::size_t i = 0; i < words.size(); ++i) {
      scores.push_back(static_cast<float>(random() % 12));  // many ties
    }
    const auto tokenizer =
        make_tokenizer(llama(words, scores, std::vector(words.size(), TokenType::normal)));
    const auto merge = [&](Token left, Token right) -> std::optional<std::pair<double, Token>> {
      const Token both = id_of(*tokenizer, words[static_cast<std::size_t>(left)] +
                                               words[static_cast<std::size_t>(right)]);
      if (both < 0) return std::nullopt;
      return std::pair<double, Token>{-scores[static_cast<std::size_t>(both)], both};
    };
    for (int i = 0; i < 20; ++i) {
      const std::string text = random_word(random);
      EXPECT_EQ(tokenizer->encode(text), merge_naively(letters_of(text), merge)) << text;
    }
  }
}

TEST(BytePair, MergesTheLowestRankAndThenTheLeftmost) {
  std::mt19937 random(13);
  for (int round = 0; round < 20; ++round) {
    Words words = {"a", "b", "c"};
    Words merges;
    std::vector<std::pair<Token, Token>> ranked;
    while (words.size() < 70) {
      const auto left = random() % words.size();
      const auto right = random() % words.size();
      const std::string both = words[left] + words[right];
      if (both.size() > 9 || std::find(words.begin(), words.end(), both) != words.end()) continue;
      merges.push_back(words[left] + " " + words[right]);
      ranked.emplace_back(static_cast<Token>(left), static_cast<Token>(right));
      words.push_back(both);
    }
    Vocabulary vocabulary;
    vocabulary.model = "gpt2";
    vocabulary.pre = "gpt-2";
    vocabulary.tokens = words;
    vocabulary.types.assign(words.size(), TokenType::normal);
    vocabulary.merges = merges;
    const auto tokenizer = make_tokenizer(vocabulary);
    const auto merge = [&](Token left, Token right) -> std::optional<std::pair<double, Token>> {
      const auto place = std::find(ranked.begin(), ranked.end(), std::pair(left, right));
      if (place == ranked.end()) return std::nullopt;
      const auto rank = place - ranked.begin();
      return std::pair<double, Token>{static_cast<double>(rank), static_cast<Token>(rank + 3)};
    };
    for (int i = 0; i < 20; ++i) {
      const std::string text = random_word(random);
      EXPECT_EQ(tokenizer->encode(text), merge_naively(letters_of(text), merge)) << text;
    }
  }
}

TEST(SentencePiece, ControlTokensDoNotArise) {
  // "<s" and ">" would make the text of the control token.
  const auto tokenizer =
      make_tokenizer(llama({"<s>", "<s", "<", "s", ">"}, {9, 1, 0, 0, 0},
                           {TokenType::control, TokenType::normal, TokenType::normal,
                            TokenType::normal, TokenType::normal}));
  EXPECT_EQ(tokenizer->encode("<s>"), (Tokens{1, 4}));
  EXPECT_EQ(tokenizer->encode("<s>", {.parse_special = true}), (Tokens{0}));
}

TEST(SentencePiece, WithoutByteTokensACharacterIsUnknown) {
  Vocabulary vocabulary = llama({"<unk>", "a"}, {0, 0}, {TokenType::unknown, TokenType::normal});
  vocabulary.unknown = 0;
  EXPECT_EQ(make_tokenizer(vocabulary)->encode("aéa\xFF"), (Tokens{1, 0, 1, 0}));
  vocabulary.unknown.reset();
  const auto tokenizer = make_tokenizer(vocabulary);
  const std::string error = error_of([&] { tokenizer->encode("aéa"); });
  EXPECT_TRUE(contains(error, "no token for the bytes C3 A9"));
}

TEST(BytePair, TakesAWholeWordOnlyWhereThePreTokenizerSaysSo) {
  const auto llama3 = golden_tokenizer("gpt2", "llama-bpe");
  const auto smaug = golden_tokenizer("gpt2", "smaug-bpe");
  const Token word = id_of(*llama3, "jump");
  ASSERT_GE(word, 0);
  EXPECT_EQ(llama3->encode("jump", {.add_bos = false}), (Tokens{word}));
  EXPECT_GT(smaug->encode("jump", {.add_bos = false}).size(), 1u);
}

// ---- options and special tokens ------------------------------------------------------------------

TEST(Tokenizer, BosIsAddedIfTheFileSaysSoAndTheCallerAgrees) {
  const auto ids = [](const json& keys, bool add_bos) {
    return tokenizer_of(keys)->encode("", {.add_bos = add_bos});
  };
  const Token bos = keys_of("gpt2").at("tokenizer.ggml.bos_token_id").get<Token>();
  EXPECT_EQ(ids(keys_of("llama"), true), (Tokens{1}));
  EXPECT_EQ(ids(keys_of("llama"), false), (Tokens{}));
  EXPECT_EQ(ids(keys_of("llama", {{"tokenizer.ggml.add_bos_token", false}}), true), (Tokens{}));
  EXPECT_EQ(ids(keys_of("gpt2", {{"tokenizer.ggml.pre", "llama-bpe"}}), true), (Tokens{bos}));
  EXPECT_EQ(ids(keys_of("gpt2", {{"tokenizer.ggml.pre", "qwen2"}}), true), (Tokens{}));
  const json asked = {{"tokenizer.ggml.pre", "qwen2"}, {"tokenizer.ggml.add_bos_token", true}};
  EXPECT_EQ(ids(keys_of("gpt2", asked), true), (Tokens{bos}));
}

TEST(Tokenizer, GenerationEndsAtEosAndAtTokensKnownByTheirText) {
  const auto tokenizer = golden_tokenizer("llama");
  ASSERT_TRUE(tokenizer->eos().has_value());
  EXPECT_TRUE(tokenizer->is_end(*tokenizer->eos()));
  EXPECT_TRUE(tokenizer->is_end(id_of(*tokenizer, "<|end|>")));
  EXPECT_FALSE(tokenizer->is_end(id_of(*tokenizer, "<|im_start|>")));
  EXPECT_FALSE(tokenizer->is_end(*tokenizer->bos()));
  const auto other = tokenizer_of(keys_of("llama", {{"tokenizer.ggml.eot_token_id", 77}}));
  EXPECT_TRUE(other->is_end(77));
}

TEST(Tokenizer, PiecesAreBytes) {
  const auto llama = golden_tokenizer("llama");
  EXPECT_EQ(llama->piece(id_of(*llama, "<0xE4>")), "\xE4");
  EXPECT_EQ(llama->piece(id_of(*llama, "<tool>")), "<tool>");
  EXPECT_EQ(llama->piece(1), "");
  EXPECT_EQ(llama->piece(id_of(*llama, "▁")), " ");
  const auto gpt2 = golden_tokenizer("gpt2", "qwen2");
  EXPECT_EQ(gpt2->piece(id_of(*gpt2, "Ġhello")), " hello");
  EXPECT_EQ(gpt2->piece(id_of(*gpt2, "ĊĊĊ")), "\n\n\n");
  EXPECT_EQ(gpt2->piece(0), std::string(1, '\0'));
  EXPECT_EQ(gpt2->piece(0xAD), "\xAD");
}

TEST(Tokenizer, SpecialTokensLeaveNothingButTheirNeighbours) {
  for (const auto& [model, pre] : models) {
    const auto tokenizer = golden_tokenizer(model, pre);
    const Tokens tokens = tokenizer->encode("<|end|>a <tool>b<|end|>", {.parse_special = true});
    EXPECT_EQ(tokenizer->decode(tokens), "a <tool>b") << model << " " << pre;
    EXPECT_EQ(std::ranges::count(tokens, id_of(*tokenizer, "<|end|>")), 2) << model << " " << pre;
    EXPECT_EQ(std::ranges::count(tokens, id_of(*tokenizer, "<tool>")), 1) << model << " " << pre;
  }
}

TEST(Tokenizer, ThreadsMayShareOne) {
  const auto tokenizer = golden_tokenizer("gpt2", "llama-bpe");
  const auto all = texts();
  std::vector<Tokens> results[2];
  const auto work = [&](std::vector<Tokens>& result) {
    for (const std::string& text : all) result.push_back(tokenizer->encode(text));
  };
  std::thread other([&] { work(results[0]); });
  work(results[1]);
  other.join();
  EXPECT_EQ(results[0], results[1]);
}

// ---- files that are refused ----------------------------------------------------------------------

std::string error_with(const std::string& model, const json& changes) {
  return error_of([&] { tokenizer_of(keys_of(model, changes)); });
}

TEST(Tokenizer, UnknownKindsAreRefusedByName) {
  EXPECT_TRUE(contains(error_with("llama", {{"tokenizer.ggml.model", "t5"}}), "model is 't5'"));
  EXPECT_TRUE(contains(error_with("gpt2", {{"tokenizer.ggml.pre", "tekken"}}), "pre is 'tekken'"));
}

TEST(Tokenizer, ListsOfDifferentLengthsAreRefused) {
  const auto size = std::to_string(keys_of("llama").at("tokenizer.ggml.tokens").size());
  EXPECT_TRUE(contains(error_with("llama", {{"tokenizer.ggml.scores", {0.0, 1.0}}}),
                       "scores has 2 elements, but there are " + size));
  EXPECT_TRUE(contains(error_with("llama", {{"tokenizer.ggml.token_type", {1, 1, 1}}}),
                       "token_type has 3 elements, but there are " + size));
}

TEST(Tokenizer, IdsOutsideTheVocabularyAreRefused) {
  const std::size_t size = keys_of("llama").at("tokenizer.ggml.tokens").size();
  const auto message = error_with("llama", {{"tokenizer.ggml.eos_token_id", size}});
  EXPECT_TRUE(contains(message, "eos_token_id is " + std::to_string(size) + ", but there are " +
                                    std::to_string(size)));
  const auto tokenizer = golden_tokenizer("llama");
  EXPECT_THROW(tokenizer->piece(-1), std::invalid_argument);
  EXPECT_THROW(tokenizer->decode(Tokens{static_cast<Token>(size)}), std::invalid_argument);
}

TEST(Tokenizer, BosThatIsAskedForMustBeNamed) {
  json keys = keys_of("gpt2", {{"tokenizer.ggml.pre", "llama-bpe"}});
  keys.erase("tokenizer.ggml.bos_token_id");
  EXPECT_TRUE(contains(error_of([&] { tokenizer_of(keys); }), "without bos_token_id"));
}

TEST(Tokenizer, ATextMayOccurOnce) {
  json keys = keys_of("llama");
  keys["tokenizer.ggml.tokens"][300] = keys["tokenizer.ggml.tokens"][299];
  EXPECT_TRUE(contains(error_of([&] { tokenizer_of(keys); }), "299 and 300 are both"));
}

TEST(Tokenizer, TypesAreThoseThatAreDefined) {
  json keys = keys_of("llama");
  keys["tokenizer.ggml.token_type"][5] = 9;
  EXPECT_TRUE(contains(error_of([&] { tokenizer_of(keys); }), "token 5 is 9"));
}

TEST(SentencePiece, AByteTokenNamesItsByte) {
  json keys = keys_of("llama");
  keys["tokenizer.ggml.tokens"][7] = "<0x4G>";
  EXPECT_TRUE(
      contains(error_of([&] { tokenizer_of(keys); }), "7 is a byte, but is written '<0x4G>'"));
}

TEST(BytePair, AMergeMustMakeAToken) {
  const json pre = {{"tokenizer.ggml.pre", "qwen2"}};
  json keys = keys_of("gpt2", pre);
  keys["tokenizer.ggml.merges"][3] = "q zz";
  EXPECT_TRUE(contains(error_of([&] { tokenizer_of(keys); }), "merges: 3 is 'q zz'"));
  keys = keys_of("gpt2", pre);
  keys["tokenizer.ggml.merges"][2] = "qz";
  EXPECT_TRUE(
      contains(error_of([&] { tokenizer_of(keys); }), "2 is 'qz', which is not two tokens"));
}

TEST(BytePair, ABytesWithoutATokenIsNamed) {
  Vocabulary vocabulary;
  vocabulary.model = "gpt2";
  vocabulary.pre = "gpt-2";
  vocabulary.tokens = {"a"};
  vocabulary.types = {TokenType::normal};
  const auto tokenizer = make_tokenizer(vocabulary);
  EXPECT_TRUE(contains(error_of([&] { tokenizer->encode("ab"); }), "no token for the bytes 62"));
}

}  // namespace
