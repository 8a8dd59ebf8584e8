#include "decoder/text/pre_tokenizer.hpp"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <memory>
#include <stdexcept>

#include "decoder/text/utf8.hpp"

namespace quoka_decoder {
namespace {

// {S} in a pattern, always between brackets, stands for what \s means to those who wrote it:
// Unicode's White_Space. PCRE2's own \s adds U+180E to it.
std::string with_spaces(std::string pattern) {
  for (auto at = pattern.find("{S}"); at != pattern.npos; at = pattern.find("{S}", at)) {
    pattern.replace(at, 3, R"(\p{Z}\t-\r\x{85})");
  }
  return pattern;
}

std::string gpt2_words() {
  return with_spaces(
      R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^{S}\p{L}\p{N}]+|[{S}]+(?![^{S}]))");
}

// digits: how many make a word, as a quantifier.
std::string llama3_words(const std::string& digits) {
  return with_spaces(
      R"('(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N})" + digits +
      R"(| ?[^{S}\p{L}\p{N}]+[\r\n]*|[{S}]*[\r\n]+)" + R"(|[{S}]+(?![^{S}])|[{S}]+)");
}

std::string message_of(int error) {
  PCRE2_UCHAR8 text[256] = {};
  pcre2_get_error_message_8(error, text, sizeof text);
  return reinterpret_cast<const char*>(text);
}

// The same text with every byte that is not UTF-8 replaced by a control character, which every
// expression here treats as it treats a symbol: the offsets stay.
std::string with_stand_ins(std::string_view text) {
  std::string result(text);
  for (std::size_t at = 0; at < text.size();) {
    const Utf8Sequence next = utf8_sequence(text, at);
    if (next.kind != Utf8::complete) std::fill_n(result.begin() + std::ptrdiff_t(at), next.size, 1);
    at += next.size;
  }
  return result;
}

}  // namespace

PreTokenizerRules pre_tokenizer_rules(std::string_view name) {
  const auto is = [&](std::initializer_list<std::string_view> names) {
    return std::ranges::find(names, name) != names.end();
  };
  if (is({"llama-bpe", "llama3", "llama-v3"})) {
    return {.patterns = {llama3_words("{1,3}")}, .whole_words = true, .add_bos = true};
  }
  if (is({"smaug-bpe", "dbrx"})) return {.patterns = {llama3_words("{1,3}")}};
  if (is({"qwen2", "deepseek-r1-qwen", "stablelm2", "megrez"})) {
    return {.patterns = {llama3_words("")}};
  }
  if (is({"gpt-2", "phi-2", "olmo", "mpt"})) return {.patterns = {gpt2_words()}};
  if (is({"smollm", "starcoder", "refact", "command-r", "codeshell"})) {
    return {.patterns = {R"(\p{N})", gpt2_words()}};
  }
  if (name == "default") {
    return {.patterns = {R"([\p{P}$+<=>^~|]+)", gpt2_words(), R"(\p{N}+)", "[0-9][0-9][0-9]"}};
  }
  throw std::runtime_error("tokenizer.ggml.pre is '" + std::string(name) +
                           "', for which no pre-tokenizer is known");
}

class PreTokenizer::Pattern {
 public:
  explicit Pattern(const std::string& pattern) {
    int error = 0;
    std::size_t offset = 0;
    code_.reset(pcre2_compile_8(reinterpret_cast<PCRE2_SPTR8>(pattern.data()), pattern.size(),
                                PCRE2_UTF | PCRE2_UCP, &error, &offset, nullptr));
    if (!code_) {
      throw std::runtime_error("PCRE2 does not compile '" + pattern + "': at byte " +
                               std::to_string(offset) + ": " + message_of(error));
    }
    // Where there is no JIT compiler the interpreter does the same, several times slower.
    pcre2_jit_compile_8(code_.get(), PCRE2_JIT_COMPLETE);
    // The patterns backtrack along one run of characters at most, so the limit only cuts off long
    // runs; its default is 10 million.
    context_.reset(pcre2_match_context_create_8(nullptr));
    if (!context_) throw std::runtime_error("PCRE2 has no memory for a match context");
    pcre2_set_match_limit_8(context_.get(), std::numeric_limits<std::uint32_t>::max());
  }

  // Appends the ends of the matches and of what lies between them, counted from `base`.
  // text: valid UTF-8.
  void split(std::string_view text, std::size_t base, std::vector<std::size_t>& ends) const {
    const std::unique_ptr<pcre2_match_data_8, Delete> match(pcre2_match_data_create_8(1, nullptr));
    if (!match) throw std::runtime_error("PCRE2 has no memory for a match");
    const std::size_t* range = pcre2_get_ovector_pointer_8(match.get());
    const auto subject = reinterpret_cast<PCRE2_SPTR8>(text.data());
    std::size_t at = 0;
    while (at < text.size()) {
      const int count =
          pcre2_match_8(code_.get(), subject, text.size(), at, PCRE2_NO_UTF_CHECK | PCRE2_NOTEMPTY,
                        match.get(), context_.get());
      if (count == PCRE2_ERROR_NOMATCH) break;
      if (count < 0) throw std::runtime_error("PCRE2 fails to match: " + message_of(count));
      if (range[0] > at) ends.push_back(base + range[0]);
      ends.push_back(base + range[1]);
      at = range[1];
    }
    if (at < text.size()) ends.push_back(base + text.size());
  }

 private:
  struct Delete {
    void operator()(pcre2_code_8* p) const { pcre2_code_free_8(p); }
    void operator()(pcre2_match_context_8* p) const { pcre2_match_context_free_8(p); }
    void operator()(pcre2_match_data_8* p) const { pcre2_match_data_free_8(p); }
  };
  std::unique_ptr<pcre2_code_8, Delete> code_;
  std::unique_ptr<pcre2_match_context_8, Delete> context_;
};

PreTokenizer::PreTokenizer(const std::vector<std::string>& patterns) {
  patterns_.reserve(patterns.size());
  for (const std::string& pattern : patterns) patterns_.emplace_back(pattern);
}

PreTokenizer::~PreTokenizer() = default;

std::vector<std::string_view> PreTokenizer::split(std::string_view text) const {
  const std::string valid = with_stand_ins(text);
  std::vector<std::size_t> ends(text.empty() ? 0 : 1, text.size());
  std::vector<std::size_t> finer;
  for (const Pattern& pattern : patterns_) {
    finer.clear();
    std::size_t begin = 0;
    for (const std::size_t end : ends) {
      pattern.split(std::string_view(valid).substr(begin, end - begin), begin, finer);
      begin = end;
    }
    ends.swap(finer);
  }
  std::vector<std::string_view> words;
  words.reserve(ends.size());
  std::size_t begin = 0;
  for (const std::size_t end : ends) {
    words.push_back(text.substr(begin, end - begin));
    begin = end;
  }
  return words;
}

}  // namespace quoka_decoder
