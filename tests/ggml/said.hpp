// The backend's lines on stderr, variables that it is loaded with, and files of a test's own.
#pragma once

#include "ggml/llama_session.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <sstream>
#include <string>

#include <unistd.h>

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

// Loads the backend with these variables, for later contexts.
inline void restart_with(const std::map<std::string, std::string>& variables) {
  for (const auto& [name, value] : variables) setenv(name.c_str(), value.c_str(), 1);
  quoka_ggml::restart_quoka();
  for (const auto& one : variables) unsetenv(one.first.c_str());
}

// A folder for files, which are removed with it.
class Folder {
 public:
  Folder() {
    static std::atomic<int> count = 0;
    path_ = std::filesystem::path(::testing::TempDir()) /
            ("quoka_" + std::to_string(::getpid()) + "_" + std::to_string(++count));
    std::filesystem::create_directories(path_);
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  const std::filesystem::path& path() const { return path_; }
  std::string operator/(const std::string& name) const { return (path_ / name).string(); }
  // The path of a file of this text.
  std::string written(const std::string& name, const std::string& text) const {
    std::ofstream(path_ / name) << text;
    return *this / name;
  }

 private:
  std::filesystem::path path_;
};

inline std::string text_of(const std::filesystem::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

}  // namespace quoka_test
