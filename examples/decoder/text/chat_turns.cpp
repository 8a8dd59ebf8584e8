#include "decoder/text/chat_turns.hpp"

namespace quoka_decoder {
namespace {

struct Kind {
  const char* marker;  // that no other kind has
  ChatTurns turns;
};

const Kind kinds[] = {
    {"<|im_start|>", {"<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"}},
    {"<|start_header_id|>",
     {"<|start_header_id|>user<|end_header_id|>\n\n",
      "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"}},
    {"<|user|>", {"<|user|>\n", "</s>\n<|assistant|>\n"}},
    {"[INST]", {"[INST] ", " [/INST]"}},
};

}  // namespace

std::optional<ChatTurns> chat_turns(const GgufFile& file) {
  const auto text = file.get_or<std::string>("tokenizer.chat_template", "");
  for (const Kind& kind : kinds)
    if (text.find(kind.marker) != std::string::npos) return kind.turns;
  return std::nullopt;
}

}  // namespace quoka_decoder
