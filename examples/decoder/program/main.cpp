// decoder: runs Llama, Qwen and SmolLM models from GGUF files, with the attention of this library.
//
//   decoder generate   text from a prompt: tokens per second, time to first token, memory
//   decoder calibrate  what selection costs each layer and KV head, and a policy that follows
//   decoder compare    dense against a selector on one prompt: agreement, divergence, error, speed
//   decoder ttft       time to first token over prompt lengths, of a file or of a named shape
//   decoder needle     needle in a haystack: lengths x depths x selectors
//   decoder ruler      RULER's tasks on token ids: tasks x lengths x selectors x budgets
//   decoder logits     logits of given tokens, compared with those of another program
#include "decoder/program/common.hpp"

#include <cstdio>
#include <exception>

int main(int argc, char** argv) {
  CLI::App app("A decoder-only transformer that reads GGUF, with QuoKA as its attention");
  app.require_subcommand(1);
  const std::string command = quoka_decoder::command_line(argc, argv);
  quoka_decoder::add_generate(app);
  quoka_decoder::add_calibrate(app, command);
  quoka_decoder::add_compare(app, command);
  quoka_decoder::add_ttft(app, command);
  quoka_decoder::add_needle(app, command);
  quoka_decoder::add_ruler(app, command);
  quoka_decoder::add_logits(app);
  try {
    CLI11_PARSE(app, argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "decoder: %s\n", error.what());
    return 1;
  }
}
