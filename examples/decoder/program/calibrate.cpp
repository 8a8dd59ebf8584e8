// What selection costs each layer and KV head of a model, and the layer policy that follows.
//
// The model runs with dense attention. Beside it, every layer attends to the same queries, keys and
// values by a selector, at a ladder of budgets b, 2 b, 4 b, ...: support/calibration.hpp.
#include "decoder/program/common.hpp"

#include "support/build_info.hpp"
#include "support/calibration.hpp"
#include "support/json_file.hpp"
#include "support/progress.hpp"

#include <iostream>
#include <stdexcept>

namespace quoka_decoder {
namespace {

using View = Session::View;

struct Flags {
  ModelFlags model;
  std::string file;
  std::string selector = "quoka.robust", budget = "0.125";
  quoka::QuokaOptions quoka;
  double tolerance = 0.1;
  int rungs = 3;
  Index max_tokens = 0;
  std::string out, json, command;
};

void calibrate(const Flags& flags) {
  const LoadedModel loaded = load(flags.model);
  const ModelConfig& c = loaded.model.config;
  auto prompt = loaded.tokenizer->encode(read_file(flags.file));
  if (flags.max_tokens > 0 && std::ssize(prompt) > flags.max_tokens)
    prompt.resize(static_cast<std::size_t>(flags.max_tokens));
  if (std::ssize(prompt) <= flags.model.chunk)
    throw std::invalid_argument("a prompt of " + std::to_string(prompt.size()) +
                                " tokens is one chunk of " + std::to_string(flags.model.chunk) +
                                ": nothing is selected from");
  quoka::ThreadPool threads(thread_count(flags.model));
  (void)quoka_examples::parse_budget(flags.budget);
  std::vector<Index> numbers;
  for (Index layer = 0; layer < c.layers; ++layer) numbers.push_back(layer);
  quoka_examples::Calibration calibration(
      flags.selector,
      {.q_heads = c.q_heads, .kv_heads = c.kv_heads, .head_dim = c.head_dim, .v_dim = c.v_dim},
      {.quoka = flags.quoka}, quoka_examples::doubled_ladder(flags.budget, flags.rungs), numbers);
  Session session(loaded.model, session_options(flags.model, "dense", "1.0", flags.quoka), threads);
  session.watch = [&](Index layer, View q, View k, View v, View out) {
    calibration.add(layer, q, k, v, out, threads);
  };
  quoka_examples::Progress bar("calibrate", std::ssize(prompt));
  session.run(prompt, [&](Index done) { bar.update(done); });

  std::cout << prompt.size() << " tokens, chunk " << flags.model.chunk << ", " << flags.selector
            << ", tolerance " << flags.tolerance << '\n';
  calibration.print(std::cout, flags.tolerance);
  quoka_examples::write_policy(flags.out, calibration.policy(flags.tolerance), std::cout);
  if (!flags.json.empty())
    quoka_examples::write_json(flags.json, {{"command", flags.command},
                                            {"model", flags.model.model},
                                            {"selector", flags.selector},
                                            {"tokens", prompt.size()},
                                            {"chunk", flags.model.chunk},
                                            {"tolerance", flags.tolerance},
                                            {"cpu", quoka_examples::cpu_name()},
                                            {"results", calibration.results()}});
}

}  // namespace

void add_calibrate(CLI::App& app, const std::string& command) {
  auto flags = std::make_shared<Flags>();
  flags->command = command;
  CLI::App* sub =
      app.add_subcommand("calibrate", "what selection costs each layer, and a policy that follows");
  add_model_flags(*sub, flags->model);
  sub->add_option("-f,--file", flags->file, "a file with a prompt as the model is used with")
      ->required()
      ->check(CLI::ExistingFile);
  sub->add_option("-o,--out", flags->out, "write the policy there (JSON)")->required();
  sub->add_option("--selector", flags->selector, "that is calibrated")->capture_default_str();
  sub->add_option("--budget", flags->budget, "the ladder's first: a count or a fraction")
      ->capture_default_str();
  sub->add_option("--rungs", flags->rungs, "budgets of the ladder, each twice the one before")
      ->check(CLI::Range(1, 8))
      ->capture_default_str();
  sub->add_option("--tolerance", flags->tolerance, "error of a layer's output that is accepted")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  sub->add_option("--max-tokens", flags->max_tokens, "cut the prompt there; 0: all of it")
      ->capture_default_str();
  sub->add_option("--json", flags->json, "write every layer's and KV head's error there");
  quoka_examples::add_quoka_flags(*sub, flags->quoka);
  sub->callback([flags] { calibrate(*flags); });
}

}  // namespace quoka_decoder
