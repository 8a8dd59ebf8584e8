// What selection costs each layer and KV head of a model, and the layer policy that follows.
//
// The model runs with dense attention. Beside it, every layer attends to the same queries, keys and
// values by a selector, at a ladder of budgets b, 2 b, 4 b, ...: support/calibration.hpp.
#include "decoder/program/common.hpp"

#include "support/calibration.hpp"
#include "support/progress.hpp"

#include <iostream>
#include <stdexcept>

namespace quoka_decoder {
namespace {

using View = Session::View;

struct Flags {
  ModelFlags model;
  PromptFlags prompt;
  std::string selector = "quoka.recommended", budget = "0.125";
  quoka::QuokaOptions quoka;
  double tolerance = 0.1;
  int rungs = 3;
  std::string out;
  Report report;
};

void calibrate(Flags& flags) {
  const LoadedModel loaded = load(flags.model);
  const ModelConfig& c = loaded.model.config;
  const auto prompt = read_prompt(flags.prompt, *loaded.tokenizer);
  if (std::ssize(prompt) <= flags.model.chunk)
    throw std::invalid_argument(
        fmt::format("a prompt of {} tokens is one chunk of {}: nothing is selected from",
                    prompt.size(), flags.model.chunk));
  quoka::ThreadPool threads(thread_count(flags.model));
  (void)parse_budget(flags.budget);
  std::vector<Index> numbers;
  for (Index layer = 0; layer < c.layers; ++layer) numbers.push_back(layer);
  Calibration calibration(
      flags.selector,
      {.q_heads = c.q_heads, .kv_heads = c.kv_heads, .head_dim = c.head_dim, .v_dim = c.v_dim},
      {.quoka = flags.quoka}, doubled_ladder(flags.budget, flags.rungs), numbers);
  Session session(loaded.model, session_options(flags.model, "dense", "1.0", flags.quoka), threads);
  session.watch = [&](Index layer, View q, View k, View v, View out) {
    calibration.add(layer, q, k, v, out, threads);
  };
  Progress bar("calibrate", std::ssize(prompt));
  session.run(prompt, [&](Index done) { bar.update(done); });

  fmt::print("{} tokens, chunk {}, {}, tolerance {}\n", prompt.size(), flags.model.chunk,
             flags.selector, flags.tolerance);
  calibration.print(std::cout, flags.tolerance);
  write_policy(flags.out, calibration.policy(flags.tolerance), std::cout);
  flags.report.add({{"model", flags.model.model},
                    {"selector", flags.selector},
                    {"tokens", prompt.size()},
                    {"chunk", flags.model.chunk},
                    {"tolerance", flags.tolerance},
                    {"results", calibration.results()}});
  flags.report.write();
}

}  // namespace

void add_calibrate(CLI::App& app, const std::string& command) {
  auto flags = std::make_shared<Flags>();
  flags->report = Report(command);
  CLI::App* sub =
      app.add_subcommand("calibrate", "what selection costs each layer, and a policy that follows");
  add_model_flags(*sub, flags->model);
  add_prompt_flags(*sub, flags->prompt);
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
  flags->report.add_flag(*sub);
  add_quoka_flags(*sub, flags->quoka);
  sub->callback([flags] { calibrate(*flags); });
}

}  // namespace quoka_decoder
