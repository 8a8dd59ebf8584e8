// A selector that is chosen while the program runs, by its preset's name or options: MassSelector
// or QuokaSelector.
//
//   SelectionOptions how = selection_preset("balanced", Budget::keys(512));
//   AnySelector selector(how);     // a Selector as any other, as in ChunkedPrefill<AnySelector>
#pragma once

#include <quoka/select/mass_selector.hpp>
#include <quoka/select/quoka.hpp>

#include <optional>
#include <string>
#include <string_view>
#include <variant>

namespace quoka {
inline namespace QUOKA_ABI {

// Options of the one or the other. By default MassOptions::recommended().
using SelectionOptions = std::variant<MassOptions, QuokaOptions>;

// "recommended" and "balanced" are MassOptions, "paper" is QuokaOptions. budget: absent: the
// preset's own. Throws std::invalid_argument for another name.
inline SelectionOptions selection_preset(std::string_view name, std::optional<Budget> budget = {}) {
  if (name == "recommended")
    return budget ? MassOptions::recommended(*budget) : MassOptions::recommended();
  if (name == "balanced") return budget ? MassOptions::balanced(*budget) : MassOptions::balanced();
  if (name == "paper") return QuokaOptions{.budget = budget.value_or(QuokaOptions().budget)};
  detail::fail_because("the preset is \"" + std::string(name) +
                       "\", but must be paper, balanced or recommended");
}
// The budget of either.
inline const Budget& budget_of(const SelectionOptions& options) {
  return std::visit([](const auto& of) -> const Budget& { return of.budget; }, options);
}
// Is a past of kv_len keys kept whole, whatever the queries?
inline bool keeps_all(const SelectionOptions& options, Index kv_len) {
  if (const auto* const mass = std::get_if<MassOptions>(&options))
    return mass->least_keys(kv_len) == kv_len;
  return std::get<QuokaOptions>(options).budget.count(kv_len) == kv_len;
}
// How many queries of a chunk score: MassOptions::queries of each KV head, QuokaOptions::n_queries
// of each query head.
inline void set_queries(SelectionOptions& options, Index queries) {
  if (auto* const mass = std::get_if<MassOptions>(&options))
    mass->queries = queries;
  else
    std::get<QuokaOptions>(options).n_queries = queries;
}

class AnySelector {
 public:
  using Options = SelectionOptions;

  // States of both; the one that is not used stays empty.
  struct State {
    MassSelector::State mass;
    QuokaSelector::State quoka;

    void truncate(Index kv_len) { mass.truncate(kv_len), quoka.truncate(kv_len); }
    Index kept_len() const { return std::max(mass.kept_len(), quoka.kept_len()); }
    Index kept_bytes() const { return mass.kept_bytes() + quoka.kept_bytes(); }
  };

  // Throws what the selector's own constructor throws.
  explicit AnySelector(const Options& options = {}) : of_(made(options)) {}

  // As ScoredSelector has them.
  void select(const SelectorInput& input, State& state, Selection& selection,
              ExecutorRef executor) const {
    if (const auto* const mass = std::get_if<MassSelector>(&of_))
      mass->select(input, state.mass, selection, executor);
    else
      std::get<QuokaSelector>(of_).select(input, state.quoka, selection, executor);
  }
  void appended(const SelectorInput& input, State& state, ExecutorRef executor) const {
    if (const auto* const mass = std::get_if<MassSelector>(&of_))
      mass->appended(input, state.mass, executor);
    else
      std::get<QuokaSelector>(of_).appended(input, state.quoka, executor);
  }
  // Queries that a Selection of its should serve, at most: longer chunks are cut.
  Index most_queries() const {
    return std::visit([](const auto& selector) { return most_queries_of(selector); }, of_);
  }
  // Throws std::invalid_argument where the selector refuses the input.
  void check(const SelectorInput& input) const {
    std::visit([&](const auto& selector) { selector.check(input); }, of_);
  }

 private:
  static std::variant<MassSelector, QuokaSelector> made(const Options& options) {
    if (const auto* const mass = std::get_if<MassOptions>(&options)) return MassSelector(*mass);
    return QuokaSelector(std::get<QuokaOptions>(options));
  }

  std::variant<MassSelector, QuokaSelector> of_;
};

static_assert(Selector<AnySelector>);

}  // namespace QUOKA_ABI
}  // namespace quoka
