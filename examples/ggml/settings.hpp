// What the backend is told: environment variables, and a JSON file that QUOKA_CONFIG names. Variables
// win over the file. README.md has the table.
#pragma once

#include <quoka/select/quoka.hpp>

#include <map>
#include <set>
#include <string>

namespace quoka_ggml {

using quoka::Index;

enum class Mode { exact, quoka, robust };

struct Settings {
  Mode mode = Mode::exact;
  quoka::Budget budget = 1024;
  Index chunk = 128;          // queries that select together
  std::set<int> dense = {0};  // layers that attend to everything
  std::map<int, quoka::Budget> layer_budgets;
  bool decode = false;    // select for single queries, too
  Index min_queries = 0;  // fewer are left to the CPU backend; 0: support.hpp decides
  int threads = 0;        // 0: as many as the engine says
  bool stats = false;
  Index model_q_heads = 0, model_kv_heads = 0, model_head_dim = 0;  // 0: any

  quoka::Budget budget_of(int layer) const {
    const auto own = layer_budgets.find(layer);
    return own != layer_budgets.end() ? own->second : budget;
  }
  std::string summary() const;  // one line
};

// Never throws: what cannot be understood is named in `problem`, and the mode is exact then.
Settings read_settings(std::string& problem);
// The same with what a JSON object says besides: the parameters of one backend. Throws.
Settings with_parameters(Settings settings, const char* json);

}  // namespace quoka_ggml
