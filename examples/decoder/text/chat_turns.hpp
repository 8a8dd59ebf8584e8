// How a chat model's turns are marked, as its file says.
//
// The file holds a template, a Jinja program, under tokenizer.chat_template. None is run here: those
// in use are known by the markers in them. Source: the model cards of TinyLlama-Chat, Qwen2.5,
// Llama 2 and Llama 3.
#pragma once

#include "decoder/file/gguf.hpp"

#include <optional>
#include <string>

namespace quoka_decoder {

// To be encoded with EncodeOptions::parse_special: markers are control tokens.
struct ChatTurns {
  std::string user;       // before the user's words
  std::string assistant;  // between them and the model's
};

// Nothing for a model without a template, and for a template of another kind.
std::optional<ChatTurns> chat_turns(const GgufFile& file);

}  // namespace quoka_decoder
