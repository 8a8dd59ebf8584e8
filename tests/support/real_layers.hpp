// Layers that a real model's attention received: the example's, and those of shared/data where
// there are any. A test that includes this includes support/capture.hpp, too: the build finds by it
// that the test reads files.
#pragma once

#include "support/capture.hpp"

#include <filesystem>

namespace quoka_test {

// f(layer) for each of them: const quoka_examples::LayerCapture&.
template <class F>
void for_each_real_layer(F&& f) {
  const auto of_file = [&](const std::filesystem::path& path) {
    const quoka_examples::SafetensorsFile file(path.string());
    for (const auto& layer : quoka_examples::load_layers(file)) f(layer);
  };
  of_file(std::filesystem::path(QUOKA_EXAMPLES_DATA) /
          "tinyllama_passkey_2046_layer11.safetensors");
  if (std::filesystem::is_directory(QUOKA_SHARED_DATA))
    for (const auto& entry : std::filesystem::directory_iterator(QUOKA_SHARED_DATA))
      if (entry.path().extension() == ".safetensors") of_file(entry.path());
}

}  // namespace quoka_test
