// The backend's lines on stderr.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <sstream>
#include <string>

namespace quoka_test {

// Its lines while run() runs, without what ggml says.
inline std::string said_while(const std::function<void()>& run) {
  ::testing::internal::CaptureStderr();
  run();
  std::istringstream all(::testing::internal::GetCapturedStderr());
  std::string said;
  for (std::string line; std::getline(all, line);)
    if (line.starts_with("quoka: ")) said += line + "\n";
  return said;
}

}  // namespace quoka_test
