// Texts that are hard on a tokenizer, for property tests.
#pragma once

#include <random>
#include <string>
#include <vector>

namespace quoka_decoder {

// Random bytes, ASCII, and characters of all lengths, some of them cut short.
inline std::string random_text(std::mt19937& random) {
  const std::vector<std::string> characters = {"é",  "ж", "ي",      "द",      "界", "ン",
                                               "한", "😀", "\u200d", "\u00a0", "\n", " "};
  std::string text;
  for (auto length = random() % 61; length > 0; --length) {
    switch (random() % 4) {
      case 0:
        text += static_cast<char>(random() % 256);
        break;
      case 1:
        text += static_cast<char>(random() % 128);
        break;
      case 2:
        text += characters[random() % characters.size()];
        break;
      default:
        text += "aeiou lt\r\n'10"[random() % 13];
    }
    if (random() % 17 == 0) text.pop_back();
  }
  return text;
}

}  // namespace quoka_decoder
