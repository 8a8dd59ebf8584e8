// Settings of the backend: a JSON file that QUOKA_CONFIG names, and environment variables, which
// win.
// README.md has the table. A layer policy (support/layer_policy.hpp) is such a file.
#pragma once

#include "arithmetics.hpp"

#include "support/layer_policy.hpp"

#include <quoka/select/any_selector.hpp>

#include <optional>
#include <string>
#include <vector>

namespace quoka_ggml {

struct Settings {
  std::string mode = "exact";  // or a preset's name
  quoka_examples::LayerPolicy policy = {};
  // How many of the first layers that could select are dense (layer_order.hpp), beside those that
  // the policy lists by the model's numbers.
  Index first_dense = 0;
  Index chunk = 128;  // queries that select together
  Index queries = 0;  // of these, that score: of each KV head (paper: query head); 0: the preset's
  bool decode = false;    // select for single and few queries, too
  Index min_past = 0;     // fewer cells before a chunk: exact
  Index min_queries = 0;  // fewer are left to the CPU backend; 0: reason_to_refuse() decides
  int threads = 0;        // 0: as many as the engine says
  Arithmetic arithmetic = Arithmetic::automatic;  // asked for: arithmetics.hpp
  bool sketch = true;                             // keep one of the keys where that is faster
  std::string isa = {};  // of quoka::isa_levels(); empty: as the library chose
  bool stats = false;
  std::string stats_file = {};
  bool quiet = false;          // say nothing at the start but what is wrong
  std::string written = "{}";  // what was asked for, as one JSON object
  // The same with the defaults of `dense_layers` and of paper's `budget`.
  std::string in_full = "{}";
  // Where a file and variables were read: which setting came from which. Empty: one of them said
  // all.
  std::string sources = {};
  std::vector<std::string> notes = {};  // what was asked for and has no effect, a line each

  // How this layer selects, unless the mode is exact.
  quoka::SelectionOptions selection(int layer) const {
    const auto own = policy.budgets.find(layer);
    quoka::SelectionOptions options = quoka::selection_preset(
        mode, own != policy.budgets.end() ? std::optional(own->second) : policy.budget);
    if (queries > 0) quoka::set_queries(options, queries);
    return options;
  }
  std::string summary() const;       // one line
  std::string dense_layers() const;  // as it was set
  // The arithmetic in use, if it is not the one that was asked for: "in float: bf16 is no faster
  // here".
  // Empty where it is.
  std::string no_faster() const;
};

// Never throws: everything that cannot be understood is named in `problem`, one line, and the mode
// is exact then. So is a variable that begins with QUOKA_ and is not in README.md: a mode with a
// typo would be exact in silence. An empty variable is one that is not set.
Settings read_settings(std::string& problem);
// The same with what a JSON object says besides: the parameters of one backend. Throws, also where
// a setting of the whole program is among them.
Settings with_parameters(const Settings& settings, const char* json);

}  // namespace quoka_ggml
