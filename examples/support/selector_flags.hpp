// QuokaOptions as command-line flags, the same in every program.
#pragma once

#include <quoka/select/quoka.hpp>

#include <CLI/CLI.hpp>

#include <map>
#include <string>

namespace quoka_examples {

// "1024" is a count, "0.25" (anything with a point) a fraction of the past.
inline quoka::Budget parse_budget(const std::string& text) {
  std::size_t used = 0;
  try {
    if (text.find('.') == std::string::npos) {
      const long long count = std::stoll(text, &used);
      if (used == text.size()) return quoka::Budget(count);
    } else {
      const double fraction = std::stod(text, &used);
      if (used == text.size()) return quoka::Budget(fraction);
    }
  } catch (const std::logic_error& error) {
    throw CLI::ValidationError("budget", text + ": " + error.what());
  }
  throw CLI::ValidationError("budget", text + " is neither a count (1024) nor a fraction (0.25)");
}

inline void add_quoka_flags(CLI::App& app, quoka::QuokaOptions& options) {
  using namespace quoka;
  const std::map<std::string, Scoring> scoring{{"cosine", Scoring::cosine}, {"dot", Scoring::dot}};
  const std::map<std::string, Aggregation> aggregation{{"max", Aggregation::max},
                                                       {"mean", Aggregation::mean}};
  const std::map<std::string, GroupMode> group_mode{
      {"rank", GroupMode::rank}, {"shared", GroupMode::shared}, {"per_head", GroupMode::per_head}};
  const std::map<std::string, QueryChoice> query_choice{
      {"dissimilar", QueryChoice::dissimilar},
      {"uniform", QueryChoice::uniform},
      {"last", QueryChoice::last},
      {"dissimilar_and_last", QueryChoice::dissimilar_and_last},
      {"mixed", QueryChoice::mixed}};
  app.add_option("--n-queries", options.n_queries, "queries kept for scoring")
      ->capture_default_str();
  app.add_option("--scoring", options.scoring, "cosine | dot")
      ->transform(CLI::CheckedTransformer(scoring));
  const std::map<std::string, Domain> domain{{"logit", Domain::logit},
                                             {"softmax", Domain::softmax}};
  app.add_option("--domain", options.domain, "logit | softmax: the kept queries' own attention")
      ->transform(CLI::CheckedTransformer(domain));
  app.add_option("--aggregation", options.aggregation, "max | mean")
      ->transform(CLI::CheckedTransformer(aggregation));
  app.add_option("--group-mode", options.group_mode, "rank | shared | per_head")
      ->transform(CLI::CheckedTransformer(group_mode));
  app.add_option("--query-choice", options.query_choice,
                 "dissimilar | uniform | last | dissimilar_and_last | mixed")
      ->transform(CLI::CheckedTransformer(query_choice));
  app.add_option("--window", options.window, "neighbouring keys kept together")
      ->capture_default_str();
  app.add_option("--keep-first", options.keep_first, "attention sinks inside the budget")
      ->capture_default_str();
  app.add_flag("--sketch,!--no-sketch", options.sketch,
               "score by 8-bit codes first (the selection is the same)");
  app.add_option("--keep-last", options.keep_last, "recent keys inside the budget")
      ->capture_default_str();
}

}  // namespace quoka_examples
