// decoder: runs Llama, Qwen and SmolLM models from GGUF files, with the attention of this library.
//
//   decoder generate   text from a prompt: tokens per second, time to first token, memory
//   decoder calibrate  what selection costs each layer and KV head, and a policy that follows
//   decoder compare    dense against a selector on one prompt: agreement, divergence, error, speed
//   decoder ttft       time to first token over prompt lengths, of a file or of a named shape
//   decoder needle     needle in a haystack: lengths x depths x selectors
//   decoder ruler      RULER's tasks on token ids: tasks x lengths x selectors x budgets
//   decoder logits     logits of given tokens, compared with those of another program
//
// `generate` runs under mpirun, too: every process has the model, and a part of each layer's keys.
#include "decoder/program/common.hpp"

#include <exception>
#include <stdexcept>

int main(int argc, char** argv) {
  const quoka_decoder::MpiJob job(&argc, &argv);
  CLI::App app("A decoder-only transformer that reads GGUF, with QuoKA as its attention");
  app.require_subcommand(1);
  const std::string command = quoka_decoder::command_line(argc, argv);
  quoka_decoder::add_generate(app, job);
  quoka_decoder::add_calibrate(app, command);
  quoka_decoder::add_compare(app, command);
  quoka_decoder::add_ttft(app, command);
  quoka_decoder::add_needle(app, command);
  quoka_decoder::add_ruler(app, command);
  quoka_decoder::add_logits(app);
  try {
    if (job.size() > 1)
      for (CLI::App* const other : app.get_subcommands({}))
        if (other->get_name() != "generate")
          other->parse_complete_callback([other] {
            throw std::invalid_argument(other->get_name() +
                                        " runs in one process: of several, only generate does");
          });
    CLI11_PARSE(app, argc, argv);
  } catch (const std::exception& error) {
    return job.failed("decoder", error);
  }
}
