// The ggml backend's settings: any text is accepted whole, or refused in one line; accepted
// settings are accepted again.
#pragma once

#include "fuzz/bytes.hpp"
#include "ggml/settings.hpp"

#include <exception>

namespace quoka_fuzz {

inline void fuzz_settings(Input input) {
  const std::string text(reinterpret_cast<const char*>(input.data()), input.size());
  if (text.c_str()[0] == 0) return;  // nothing said
  quoka_ggml::Settings settings;
  try {
    settings = quoka_ggml::with_parameters({}, text.c_str());
  } catch (const std::exception& e) {
    if (std::string(e.what()).find('\n') != std::string::npos)
      broken(std::string("two lines: ") + e.what());
    return;
  }
  if (settings.chunk < 1 || settings.threads < 0 || settings.min_past < 0)
    broken("a setting out of range");
  if (settings.mode != "exact")
    for (int layer = 0; layer < 3; ++layer) (void)budget_of(settings.selection(layer)).count(1000);
  if (quoka_ggml::with_parameters({}, settings.in_full.c_str()).in_full != settings.in_full)
    broken("the settings in full are read as others");
}

}  // namespace quoka_fuzz
