// What a GGUF file says about its tokenizer, as plain data: the keys tokenizer.ggml.*, checked and
// with their defaults filled in.
//
// Source: the keys are those of docs/gguf.md of ggml; the defaults where a key is missing are those
// of llama.cpp (src/llama-vocab.cpp), by which files are made.
// Deviations: add_eos_token is not read, for a prompt that is to be continued must not end in it;
// an id out of range and a text that occurs twice are refused.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace quoka_decoder {

class GgufFile;

using Token = std::int32_t;  // a token's number in the vocabulary
inline constexpr Token no_token = -1;

enum class TokenType : std::int32_t {  // the numbers are those of the file
  undefined = 0,
  normal = 1,
  unknown = 2,       // stands for what the vocabulary cannot express
  control = 3,       // <s>, <|eot_id|>: never arises from text, unless asked for
  user_defined = 4,  // text that is always one token
  unused = 5,
  byte = 6  // <0x0A>: one byte of a character that has no token
};

struct Vocabulary {
  std::string model;                // "llama" or "gpt2"
  std::string pre;                  // how "gpt2" splits a text into words, such as "qwen2"
  std::vector<std::string> tokens;  // as they stand in the file: U+2581 or the byte alphabet inside
  std::vector<float> scores;        // "llama": one for each token; the highest merges first
  std::vector<TokenType> types;     // one for each token
  std::vector<std::string> merges;  // "gpt2": "LEFT RIGHT", the first merges first
  std::optional<Token> bos, eos, eot, eom, unknown;
  bool add_bos = false;           // texts begin with bos
  bool add_space_prefix = false;  // "llama": texts are read as if a space stood before them
};

// Throws std::runtime_error, naming the key, if a key that is needed is missing, the model is
// neither "llama" nor "gpt2", or numbers do not fit together.
Vocabulary read_vocabulary(const GgufFile& file);

// The same checks for a vocabulary from elsewhere. Throws std::runtime_error.
void check(const Vocabulary& vocabulary);

}  // namespace quoka_decoder
