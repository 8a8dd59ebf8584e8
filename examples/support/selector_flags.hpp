// Command-line flags that are the same in every program: QuokaOptions, budgets, those of a timed
// run, and of a prompt.
#pragma once

#include "support/budget_text.hpp"

#include <quoka/select/quoka.hpp>

#include <CLI/CLI.hpp>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <map>
#include <string>
#include <vector>

namespace quoka_examples {

using quoka::Index;

// As budget_text.hpp has it. Throws CLI::ValidationError, which quotes the text and says what is
// allowed.
inline quoka::Budget parse_budget(const std::string& text) {
  if (const auto budget = read_budget(text)) return *budget;
  throw CLI::ValidationError('"' + text + "\" is not a budget: give " + budget_rules());
}

// The items of "128,256,0.25", spaces around them dropped. Throws as parse_budget does for a bad
// one, an empty one too.
inline std::vector<std::string> parse_budgets(const std::string& list) {
  std::vector<std::string> items;
  for (std::size_t begin = 0; begin <= list.size();) {
    const std::size_t end = std::min(list.find(',', begin), list.size());
    std::string& item = items.emplace_back(list.substr(begin, end - begin));
    item.erase(0, item.find_first_not_of(' '));
    item.erase(item.find_last_not_of(' ') + 1);
    parse_budget(item);
    begin = end + 1;
  }
  return items;
}

// For check(): what parse(text) takes; what it throws is the answer.
template <class Parse>
CLI::Validator accepted_by(Parse parse) {
  return CLI::Validator(
      [parse](std::string& text) -> std::string {
        try {
          parse(text);
        } catch (const std::exception& error) {
          return error.what();
        }
        return {};
      },
      "");
}

// For check(): a whole number in [least, most].
inline CLI::Validator whole_number(Index least, Index most) {
  const std::string from = std::to_string(least), to = std::to_string(most);
  return CLI::Validator(
      [=](std::string& text) -> std::string {
        Index number = 0;
        if (read_number(text, number) && number >= least && number <= most) return {};
        return '"' + text + "\" is not a whole number from " + from + " to " + to;
      },
      from + ".." + to);
}

inline void add_threads(CLI::App& app, int& threads) {
  app.add_option("--threads", threads, "workers, the calling thread included")
      ->check(whole_number(1, 1024))
      ->capture_default_str();
}
inline void add_rounds(CLI::App& app, int& rounds) {
  app.add_option("--rounds", rounds, "timed repetitions; medians count")
      ->check(whole_number(1, 1000))
      ->capture_default_str();
}
inline void add_run_flags(CLI::App& app, Index& chunk, int& threads, int& rounds) {
  app.add_option("--chunk", chunk, "tokens per chunk")
      ->check(whole_number(1, 65536))
      ->capture_default_str();
  add_threads(app, threads);
  add_rounds(app, rounds);
}

inline void add_quoka_flags(CLI::App& app, quoka::QuokaOptions& options) {
  app.add_option("--n-queries", options.n_queries, "queries kept for scoring, of each query head")
      ->check(whole_number(1, 65536))
      ->capture_default_str();
  app.add_option("--keep-first", options.keep_first, "attention sinks inside the budget")
      ->check(whole_number(0, most_keys))
      ->capture_default_str();
  app.add_flag_function(
      "--sketch,!--no-sketch",
      [&options](std::int64_t count) {
        options.sketch = count > 0 ? quoka::Sketch::on : quoka::Sketch::off;
      },
      "score by 8-bit codes (the selection is the same; nearly so of recommended and balanced)");
  app.add_option("--keep-last", options.keep_last, "recent keys inside the budget")
      ->check(whole_number(0, most_keys))
      ->capture_default_str();
}

// A prompt through one layer, of random numbers.
struct PrefillFlags {
  Index len = 32768, chunk = 128, q_heads = 32, kv_heads = 8, head_dim = 128, budget = 1024;
};
inline void add_prefill_flags(CLI::App& app, PrefillFlags& flags) {
  app.add_option("--len", flags.len, "tokens of the prompt")->capture_default_str();
  app.add_option("--chunk", flags.chunk)->capture_default_str();
  app.add_option("--q-heads", flags.q_heads)->capture_default_str();
  app.add_option("--kv-heads", flags.kv_heads)->capture_default_str();
  app.add_option("--head-dim", flags.head_dim)->capture_default_str();
  app.add_option("--budget", flags.budget, "keys per KV head")->capture_default_str();
}

}  // namespace quoka_examples
