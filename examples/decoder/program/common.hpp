// What the subcommands of `decoder` share: flags, a loaded model, and a clock.
#pragma once

#include "decoder/model/session.hpp"
#include "decoder/text/chat_turns.hpp"
#include "decoder/text/tokenizer.hpp"

#include "support/clock.hpp"
#include "support/program.hpp"
#include "support/selector_flags.hpp"

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace quoka_decoder {

using namespace quoka_examples;

struct ModelFlags {
  std::string model;
  int threads = 0;  // 0: one for each processor
  Index chunk = 128;
  Index batch = 512;
  Index dense_layers = 0;
  std::string policy;        // a file; empty: none
  std::string rope_scaling;  // empty: as the file says
  float rope_factor = 0.0f;
};

// --model, --threads, --chunk, --batch, --dense-layers, --policy, --rope-scaling, --rope-factor.
void add_model_flags(CLI::App& app, ModelFlags& flags, bool model_required = true);

struct LoadedModel {
  Model model;
  std::unique_ptr<Tokenizer> tokenizer;
  std::optional<ChatTurns> chat;
};

// Throws as load_model and make_tokenizer do. Says on stderr what it has loaded.
LoadedModel load(const ModelFlags& flags);

// Selectors to be compared, each with each budget.
struct SelectorList {
  std::string methods = "quoka";
  std::vector<std::string> budgets{"0.25"};
  quoka::QuokaOptions quoka = {};
  bool dense = true;  // dense attention first

  struct Choice {
    std::string method, budget;
  };
  std::vector<Choice> choices() const;
};

// --selectors, --budgets, and QuoKA's own options.
void add_selector_list(CLI::App& app, SelectorList& list);
// --file, and --max-tokens at which it is cut.
struct PromptFlags {
  std::string file;
  Index max_tokens = 0;
};
void add_prompt_flags(CLI::App& app, PromptFlags& flags);
std::vector<Token> read_prompt(const PromptFlags& flags, const Tokenizer& tokenizer);

int thread_count(const ModelFlags& flags);
SessionOptions session_options(const ModelFlags& flags, const std::string& method,
                               const std::string& budget, const quoka::QuokaOptions& quoka);

// A selector and a budget, and its session.
struct Contender {
  std::string method, budget;
  std::unique_ptr<Session> session;
};
std::vector<Contender> make_contenders(const ModelFlags& flags, const SelectorList& selectors,
                                       const Model& model, quoka::ThreadPool& threads);

// Says on stderr where the model was trained on fewer tokens.
void note_context(const ModelFlags& flags, const ModelConfig& config, Index tokens);

// A whole file. Throws std::runtime_error naming it.
std::string read_file(const std::string& path);

// Largest resident set of this process so far, in MiB; the mapped pages of the model among them.
double peak_memory_mib();

// Each adds its subcommand, which runs when the command line is parsed; `command`, the command line
// as typed, goes into its results file. Errors are thrown.
void add_generate(CLI::App& app);
void add_calibrate(CLI::App& app, const std::string& command);
void add_compare(CLI::App& app, const std::string& command);
void add_ttft(CLI::App& app, const std::string& command);
void add_needle(CLI::App& app, const std::string& command);
void add_ruler(CLI::App& app, const std::string& command);
void add_logits(CLI::App& app);

}  // namespace quoka_decoder
