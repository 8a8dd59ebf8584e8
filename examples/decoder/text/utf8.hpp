// UTF-8, one sequence at a time: what a tokenizer that takes any bytes, and a printer that gets a
// character in several tokens, have to know.
//
// A sequence is well-formed if table 3-7 of the Unicode Standard lists it: overlong forms,
// surrogates and values above U+10FFFF are not. A byte that begins none is invalid by itself, so
// that whatever follows is read again from its own first byte.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <utility>

namespace quoka_decoder {

enum class Utf8 {
  complete,   // a whole character
  truncated,  // the text ends within what may still become one
  invalid     // a byte that belongs to none
};

struct Utf8Sequence {
  Utf8 kind;
  std::size_t size;  // in bytes, at least 1; of a truncated one, those that are there
};

// The sequence that begins at byte `at`, which must be less than text.size().
inline Utf8Sequence utf8_sequence(std::string_view text, std::size_t at) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[at + i]); };
  const unsigned lead = byte(0);
  if (lead < 0x80) return {Utf8::complete, 1};
  if (lead < 0xC2 || lead > 0xF4) return {Utf8::invalid, 1};
  const std::size_t size = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  // Four leads narrow the range of their second byte.
  unsigned low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
  unsigned high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
  for (std::size_t i = 1; i < size; ++i) {
    if (at + i == text.size()) return {Utf8::truncated, i};
    if (byte(i) < low || byte(i) > high) return {Utf8::invalid, 1};
    low = 0x80;
    high = 0xBF;
  }
  return {Utf8::complete, size};
}

// Bytes in, whole characters out: holds back a character that is not complete yet (3 bytes at
// most). Invalid bytes pass as they are.
class Utf8Stream {
 public:
  // What can be printed by now.
  std::string feed(std::string_view bytes) {
    held_ += bytes;
    std::size_t end = 0;
    while (end < held_.size()) {
      const Utf8Sequence next = utf8_sequence(held_, end);
      if (next.kind == Utf8::truncated) break;
      end += next.size;
    }
    std::string ready = held_.substr(0, end);
    held_.erase(0, end);
    return ready;
  }

  // What is still held back: the text has ended.
  std::string finish() { return std::exchange(held_, {}); }

 private:
  std::string held_;
};

}  // namespace quoka_decoder
