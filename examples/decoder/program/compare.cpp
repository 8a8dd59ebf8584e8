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

#include "support/progress.hpp"
#include "support/table.hpp"

#include <cmath>

namespace quoka_decoder {
namespace {

struct Flags {
  ModelFlags model;
  PromptFlags prompt;
  SelectorList selectors;
  Report report;
};

struct Compared : Contender {
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
                   Compared& result) {
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

// Returns which tokens were compared.
std::vector<Bucket> run_all(std::vector<Compared>& all, std::span<const Token> prompt,
                            Index batch) {
  Progress bar("compare", std::ssize(prompt));
  const Index vocabulary = all.front().session->model().config.vocabulary;
  std::vector<Bucket> compared;
  for (Index begin = 0; begin < std::ssize(prompt); begin += batch) {
    const Index count = std::min(batch, std::ssize(prompt) - begin);
    const auto tokens =
        prompt.subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(count));
    const bool last = begin + count == std::ssize(prompt);
    Vector dense;
    for (Compared& c : all) {
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

void compare(Flags& flags) {
  const LoadedModel loaded = load(flags.model);
  const auto prompt = read_prompt(flags.prompt, *loaded.tokenizer);
  quoka::ThreadPool threads(thread_count(flags.model));
  std::vector<Compared> all;
  for (Contender& c : make_contenders(flags.model, flags.selectors, loaded.model, threads))
    all.push_back({std::move(c)});
  const std::vector<Bucket> buckets =
      run_all(all, prompt, quoka::round_up(flags.model.batch, flags.model.chunk));
  Index compared = 0;
  for (const Bucket& bucket : buckets) compared += bucket.end - bucket.begin;

  Table table(
      "selector\tbudget\tagreement\tKL [nat]\terror, layer 0\tmiddle\tlast\tTTFT\tdense / it");
  Table perplexity("perplexity of positions\tbudget");
  for (const Bucket& bucket : buckets)
    if (bucket.predicted > 0) perplexity.more("{} - {}", bucket.begin, bucket.end - 1);
  const Compared& dense = all.front();
  for (const Compared& c : all) {
    const auto errors = layer_errors(*dense.session, *c.session);
    const double n = static_cast<double>(compared);
    const double agreement = static_cast<double>(c.agreed) / n;
    const std::string budget = &c == &dense ? "-" : c.budget;
    table.row("{}\t{}\t{:.1f} %\t{:.4f}\t{:.4f}\t{:.4f}\t{:.4f}\t{:.2f} s\t{:.2f}x", c.method,
              budget, 100.0 * agreement, c.kl_nat / n, errors.front(), errors[errors.size() / 2],
              errors.back(), c.seconds, dense.seconds / c.seconds);
    perplexity.row("{}\t{}", c.method, budget);
    nlohmann::json losses = nlohmann::json::array();
    for (std::size_t i = 0; i < buckets.size(); ++i) {
      if (buckets[i].predicted == 0) continue;
      const double mean = c.loss_nat[i] / static_cast<double>(buckets[i].predicted);
      perplexity.more("{:.3f}", std::exp(mean));
      losses.push_back({{"begin", buckets[i].begin}, {"end", buckets[i].end}, {"loss_nat", mean}});
    }
    flags.report["results"].push_back({{"selector", c.method},
                                       {"budget", c.budget},
                                       {"agreement", agreement},
                                       {"kl_nat", c.kl_nat / n},
                                       {"losses", losses},
                                       {"layer_error", errors},
                                       {"ttft_s", c.seconds},
                                       {"ttft_ratio", dense.seconds / c.seconds}});
  }
  fmt::print("{} tokens, of which {} are compared; chunk {}, {} threads, {}, {}\n", prompt.size(),
             compared, flags.model.chunk, threads.workers(), product_backend(), cpu_name());
  table.print();
  std::cout << '\n';
  perplexity.print();
  flags.report.add({{"model", flags.model.model},
                    {"tokens", prompt.size()},
                    {"compared", compared},
                    {"chunk", flags.model.chunk},
                    {"threads", threads.workers()},
                    {"products", product_backend()}});
  flags.report.write();
}

}  // namespace

void add_compare(CLI::App& app, const std::string& command) {
  auto flags = std::make_shared<Flags>();
  flags->report = Report(command);
  CLI::App* sub = app.add_subcommand("compare", "dense against selectors on one prompt");
  add_model_flags(*sub, flags->model);
  add_prompt_flags(*sub, flags->prompt);
  flags->report.add_flag(*sub);
  add_selector_list(*sub, flags->selectors);
  sub->callback([flags] { compare(*flags); });
}

}  // namespace quoka_decoder
