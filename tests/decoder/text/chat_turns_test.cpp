// The turns of chat models, known by what their templates hold.

#include <gtest/gtest.h>

#include <map>
#include <optional>
#include <string>

#include "decoder/file/gguf.hpp"
#include "decoder/text/chat_turns.hpp"
#include "decoder/file/gguf_writer.hpp"

namespace {

using namespace quoka_decoder;

using Keys = std::map<std::string, std::string>;

std::optional<ChatTurns> turns_of(const Keys& keys) {
  GgufWriter writer;
  for (const auto& [key, value] : keys) writer.add(key, value);
  const auto bytes = writer.bytes();
  return chat_turns(GgufFile::parse(bytes, "a file"));
}
std::optional<ChatTurns> turns_of(const std::string& chat_template) {
  return turns_of(Keys{{"tokenizer.chat_template", chat_template}});
}

// A user's turn and the beginning of the model's.
std::string asked(const std::string& chat_template, const std::string& words) {
  const auto turns = turns_of(chat_template);
  return turns ? turns->user + words + turns->assistant : "not known";
}

TEST(ChatTurns, AreThoseOfTheTemplate) {
  EXPECT_EQ(asked("{% for m in messages %}{{ '<|user|>\n' + m['content'] + eos_token }}", "Who?"),
            "<|user|>\nWho?</s>\n<|assistant|>\n");
  EXPECT_EQ(asked("{{'<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>'}}", "Who?"),
            "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n");
  EXPECT_EQ(asked("{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' }}", "Who?"),
            "<|start_header_id|>user<|end_header_id|>\n\nWho?<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n");
  EXPECT_EQ(asked("{{ bos_token + '[INST] ' + m['content'] + ' [/INST]' }}", "Who?"),
            "[INST] Who? [/INST]");
}

TEST(ChatTurns, AreNoneForOtherTemplatesAndWithoutOne) {
  EXPECT_FALSE(turns_of("{{ 'Human: ' + m['content'] }}").has_value());
  EXPECT_FALSE(turns_of("").has_value());
  EXPECT_FALSE(turns_of(Keys{{"general.architecture", "llama"}}).has_value());
}

}  // namespace
