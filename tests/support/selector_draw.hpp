// Options of any selector, drawn at random.
#pragma once

#include <quoka/select/mass_selector.hpp>
#include <quoka/select/quoka.hpp>

#include "support/fixtures.hpp"

namespace quoka_test {

// Budgets of no key, of all, of a share and of few keys.
template <class Options>
Options selector_options(Random& random) {
  const auto budget = [&] {
    const Index kind = random.below(8);
    return kind == 0   ? Budget::keys(0)
           : kind == 1 ? Budget::keys(5000)
           : kind == 2 ? Budget::share(0.02 + 0.98 * random.uniform())
                       : Budget::keys(1 + random.below(90));
  };
  Options options{};
  if constexpr (std::is_same_v<Options, quoka::QuokaOptions> ||
                std::is_same_v<Options, quoka::MassOptions>) {
    if constexpr (std::is_same_v<Options, quoka::MassOptions>)
      options = random.seldom(2) ? Options::balanced() : Options::recommended();
    options.budget = budget();
    options.sketch = random.one_of(quoka::Sketch::on, quoka::Sketch::on, quoka::Sketch::off);
    if (random.seldom(4)) options.budget = Budget::keys(4500);  // lists as long as several parts
  } else {
    if constexpr (requires { options.budget = Budget::keys(1); }) options.budget = budget();
    if constexpr (requires { options.rank = 7; }) options.rank = 7;
    if constexpr (requires { options.block = Index{16}; })
      options.block = 16, options.budget = Budget::keys(130);  // some blocks are kept in any case
    if constexpr (requires { options.sketch = quoka::Sketch::on; })
      options.sketch = quoka::Sketch::on;
  }
  return options;
}

}  // namespace quoka_test
