// Dense against selectors on one prompt, token by token.
//
// Both run the same tokens batch by batch, in turns, so that a slow moment of the machine falls on
// all. For every token after the first batch, the distribution p of what dense attention expects
// next is compared with a selector's q:
//
//   agreement   share of tokens where both hold the same token most probable
//   KL          sum of p ln(p / q), in nats, mean over the tokens
//   error       |h_selector - h_dense| / |h_dense| of the last token's state, per layer
//
// Time to first token is the sum of the batches and the last logits; nothing is generated, so what
// a selector changes is not hidden by what the text makes of it.
#include "decoder/program/common.hpp"
#include "decoder/sampling/sampler.hpp"

#include "support/build_info.hpp"
#include "support/json_file.hpp"
#include "support/progress.hpp"
#include "support/table.hpp"

#include <cmath>
#include <iostream>
#include <sstream>

namespace quoka_decoder {
namespace {

using quoka_examples::fixed;

struct Flags {
  ModelFlags model;
  std::string file;
  SelectorList selectors;
  Index max_tokens = 0;
  std::string json, command;
};

struct Contender {
  std::string method, budget;
  std::unique_ptr<Session> session;
  double seconds = 0.0;
  Index agreed = 0;
  double kl_nat = 0.0;
};

// Adds one token's comparison.
void compare_token(std::span<const float> dense, std::span<const float> other, Contender& result) {
  const auto p = log_probabilities(dense), q = log_probabilities(other);
  for (std::size_t i = 0; i < p.size(); ++i) result.kl_nat += std::exp(p[i]) * (p[i] - q[i]);
  result.agreed += most_probable(dense) == most_probable(other) ? 1 : 0;
}

double relative_error(std::span<const float> exact, std::span<const float> other) {
  double difference = 0.0, size = 0.0;
  for (std::size_t i = 0; i < exact.size(); ++i) {
    difference += std::pow(static_cast<double>(other[i]) - exact[i], 2);
    size += std::pow(static_cast<double>(exact[i]), 2);
  }
  return std::sqrt(difference / size);
}

std::vector<Contender> make_contenders(const Flags& flags, const Model& model,
                                       quoka::ThreadPool& threads) {
  std::vector<Contender> all;
  for (const auto& [method, budget] : flags.selectors.choices()) {
    const auto options = session_options(flags.model, method, budget, flags.selectors.quoka);
    all.push_back({method, budget, std::make_unique<Session>(model, options, threads)});
  }
  return all;
}

// Returns how many tokens were compared.
Index run_all(std::vector<Contender>& all, std::span<const Token> prompt, Index batch) {
  quoka_examples::Progress bar("compare", std::ssize(prompt));
  const Index vocabulary = all.front().session->model().config.vocabulary;
  Index compared = 0;
  for (Index begin = 0; begin < std::ssize(prompt); begin += batch) {
    const Index count = std::min(batch, std::ssize(prompt) - begin);
    const auto tokens =
        prompt.subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(count));
    const bool last = begin + count == std::ssize(prompt);
    Vector dense;
    for (Contender& c : all) {
      const Stopwatch clock;
      c.session->run(tokens);
      if (last) (void)c.session->logits();
      c.seconds += clock.seconds();
      if (begin == 0 && !last) continue;  // most of the first batch has no past to select from
      const Vector logits = c.session->logits(count);
      if (&c == &all.front()) dense = logits;
      for (Index t = 0; t < count; ++t) {
        const auto at = static_cast<std::size_t>(t * vocabulary);
        const auto size = static_cast<std::size_t>(vocabulary);
        compare_token({dense.data() + at, size}, {logits.data() + at, size}, c);
      }
    }
    if (begin > 0 || last) compared += count;
    bar.update(begin + count);
  }
  return compared;
}

std::vector<double> layer_errors(const Session& dense, const Session& other) {
  std::vector<double> errors;
  for (Index layer = 0; layer < dense.model().config.layers; ++layer)
    errors.push_back(relative_error(dense.hidden(layer), other.hidden(layer)));
  return errors;
}

void compare(const Flags& flags) {
  const LoadedModel loaded = load(flags.model);
  auto prompt = loaded.tokenizer->encode(read_file(flags.file));
  if (flags.max_tokens > 0 && std::ssize(prompt) > flags.max_tokens)
    prompt.resize(static_cast<std::size_t>(flags.max_tokens));
  quoka::ThreadPool threads(thread_count(flags.model));
  auto all = make_contenders(flags, loaded.model, threads);
  const Index compared =
      run_all(all, prompt, quoka::round_up(flags.model.batch, flags.model.chunk));

  std::vector<std::vector<std::string>> rows;
  nlohmann::json results = nlohmann::json::array();
  const Contender& dense = all.front();
  for (const Contender& c : all) {
    const auto errors = layer_errors(*dense.session, *c.session);
    const double n = static_cast<double>(compared);
    const double agreement = static_cast<double>(c.agreed) / n;
    rows.push_back({c.method, &c == &dense ? "-" : c.budget, fixed(100.0 * agreement, 1) + " %",
                    fixed(c.kl_nat / n, 4), fixed(errors.front(), 4),
                    fixed(errors[errors.size() / 2], 4), fixed(errors.back(), 4),
                    fixed(c.seconds, 2) + " s", fixed(dense.seconds / c.seconds, 2) + "x"});
    results.push_back({{"selector", c.method},
                       {"budget", c.budget},
                       {"agreement", agreement},
                       {"kl_nat", c.kl_nat / n},
                       {"layer_error", errors},
                       {"ttft_s", c.seconds},
                       {"ttft_ratio", dense.seconds / c.seconds}});
  }
  std::cout << prompt.size() << " tokens, of which " << compared << " are compared; chunk "
            << flags.model.chunk << ", " << threads.workers() << " threads, " << product_backend()
            << ", " << quoka_examples::cpu_name() << '\n';
  quoka_examples::print_table(std::cout,
                              {"selector", "budget", "agreement", "KL [nat]", "error, layer 0",
                               "middle", "last", "TTFT", "dense / it"},
                              rows);
  if (!flags.json.empty())
    quoka_examples::write_json(flags.json, {{"command", flags.command},
                                            {"model", flags.model.model},
                                            {"tokens", prompt.size()},
                                            {"compared", compared},
                                            {"chunk", flags.model.chunk},
                                            {"threads", threads.workers()},
                                            {"cpu", quoka_examples::cpu_name()},
                                            {"products", product_backend()},
                                            {"results", results}});
}

}  // namespace

void add_compare(CLI::App& app, const std::string& command) {
  auto flags = std::make_shared<Flags>();
  flags->command = command;
  CLI::App* sub = app.add_subcommand("compare", "dense against selectors on one prompt");
  add_model_flags(*sub, flags->model);
  sub->add_option("-f,--file", flags->file, "a file with the prompt")
      ->required()
      ->check(CLI::ExistingFile);
  sub->add_option("--max-tokens", flags->max_tokens, "cut the prompt there; 0: all of it")
      ->capture_default_str();
  sub->add_option("--json", flags->json, "write the results there");
  add_selector_list(*sub, flags->selectors);
  sub->callback([flags] { compare(*flags); });
}

}  // namespace quoka_decoder
