// Dense against selectors on one prompt, token by token.
//
// Both run the same tokens batch by batch, in turns, so that a slow moment of the machine falls on
// all. For every token after the first batch, the distribution p of what dense attention expects
// next is compared with a selector's q:
//
//   agreement   share of tokens where both hold the same token most probable
//   KL          sum of p ln(p / q), in nats, mean over the tokens
//   error       |h_selector - h_dense| / |h_dense| of the last token's state, per layer
//   perplexity  exp of the mean of -ln q(the token that follows in the prompt), for each batch's positions
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
  std::vector<double> loss_nat = {};  // of each batch that is compared, the sum over its tokens
};

// Positions that are compared, and those of them that another token follows.
struct Bucket {
  Index begin, end;
  Index predicted;
};

// Adds one token's comparison; next: the token that follows, if there is one.
void compare_token(std::span<const float> dense, std::span<const float> other, const Token* next,
                   Contender& result) {
  const auto p = log_probabilities(dense), q = log_probabilities(other);
  for (std::size_t i = 0; i < p.size(); ++i) result.kl_nat += std::exp(p[i]) * (p[i] - q[i]);
  result.agreed += most_probable(dense) == most_probable(other) ? 1 : 0;
  if (next != nullptr) result.loss_nat.back() -= q[static_cast<std::size_t>(*next)];
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

// Returns which tokens were compared.
std::vector<Bucket> run_all(std::vector<Contender>& all, std::span<const Token> prompt,
                            Index batch) {
  quoka_examples::Progress bar("compare", std::ssize(prompt));
  const Index vocabulary = all.front().session->model().config.vocabulary;
  std::vector<Bucket> compared;
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
      c.loss_nat.push_back(0.0);
      if (&c == &all.front()) dense = logits;
      for (Index t = 0; t < count; ++t) {
        const auto at = static_cast<std::size_t>(t * vocabulary);
        const auto size = static_cast<std::size_t>(vocabulary);
        const Index next = begin + t + 1;
        compare_token({dense.data() + at, size}, {logits.data() + at, size},
                      next < std::ssize(prompt) ? &prompt[static_cast<std::size_t>(next)] : nullptr,
                      c);
      }
    }
    if (begin > 0 || last) compared.push_back({begin, begin + count, last ? count - 1 : count});
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
  const std::vector<Bucket> buckets =
      run_all(all, prompt, quoka::round_up(flags.model.batch, flags.model.chunk));
  Index compared = 0;
  for (const Bucket& bucket : buckets) compared += bucket.end - bucket.begin;

  std::vector<std::vector<std::string>> rows, losses;
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
    std::vector<std::string> perplexities = {c.method, rows.back()[1]};
    nlohmann::json loss = nlohmann::json::array();
    for (std::size_t i = 0; i < buckets.size(); ++i) {
      if (buckets[i].predicted == 0) continue;
      const double mean = c.loss_nat[i] / static_cast<double>(buckets[i].predicted);
      perplexities.push_back(fixed(std::exp(mean), 3));
      loss.push_back({{"begin", buckets[i].begin}, {"end", buckets[i].end}, {"loss_nat", mean}});
    }
    losses.push_back(perplexities);
    results.push_back({{"selector", c.method},
                       {"budget", c.budget},
                       {"agreement", agreement},
                       {"kl_nat", c.kl_nat / n},
                       {"losses", loss},
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
  std::vector<std::string> head = {"perplexity of positions", "budget"};
  for (const Bucket& bucket : buckets)
    if (bucket.predicted > 0)
      head.push_back(std::to_string(bucket.begin) + " - " + std::to_string(bucket.end - 1));
  std::cout << '\n';
  quoka_examples::print_table(std::cout, head, losses);
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
