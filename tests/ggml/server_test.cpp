// llama-server with the backend, asked by a real HTTP client (server_test.py), on a tiny random model that reads bytes.
// One thread: those of llama.cpp wait for each other without a pause, which costs all of a core where another program
// has theirs.

#include "ggml/tiny_llama.hpp"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>

#include <unistd.h>

namespace {

// One part of server_test.py, then so many minutes of mixed requests.
void ask_server(const std::string& part, const char* minutes = nullptr) {
  const std::filesystem::path server = std::filesystem::path(GGML_LIBRARIES) / "llama-server";
  if (!std::filesystem::exists(server))
    GTEST_SKIP() << "no llama-server: bash examples/bindings/ggml/get_llama_server.sh";
  const auto model = std::filesystem::path(::testing::TempDir()) /
                     ("quoka_server_" + std::to_string(::getpid()) + ".gguf");
  quoka_test::TinyLlama(true).write(model.string());
  const std::string command = "python3 " QUOKA_SERVER_TEST " --server " + server.string() +
                              " --backend " QUOKA_GGML_BACKEND " --text " QUOKA_SERVER_TEXT
                              " --bytes --threads 1 --part " +
                              part + " --model " + model.string() +
                              (minutes != nullptr ? std::string(" --minutes ") + minutes : "");
  EXPECT_EQ(std::system(command.c_str()), 0);
  std::filesystem::remove(model);
}

TEST(LlamaServer, ExactAnswers) { ask_server("exact_mode"); }
TEST(LlamaServer, Neighbours) { ask_server("neighbours"); }
TEST(LlamaServer, CancelledReusedAndShifted) {
  ask_server("cancelled_reused_shifted", std::getenv("QUOKA_SERVER_MINUTES"));
}

}  // namespace
