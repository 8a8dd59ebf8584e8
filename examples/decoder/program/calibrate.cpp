// What selection costs each layer and KV head of a model, and the layer policy that follows.
//
// The model runs with dense attention. Beside it, every layer attends to the same queries, keys and
// values by a selector, at a ladder of budgets b, 2 b, 4 b, ...:
//
//   error = |out_selected - out_dense| / |out_dense|      over the chunks that have a past
//
// of a layer's outputs before its output product, all heads together, and of the query heads of each KV
// head. An error is a layer's own: it does not contain what earlier layers would have added. The policy
// gives each layer the first budget of the ladder whose error is at most the tolerance, and all keys
// where none is.
#include "decoder/program/common.hpp"

#include "support/build_info.hpp"
#include "support/json_file.hpp"
#include "support/progress.hpp"
#include "support/table.hpp"

#include <quoka/views/tensor.hpp>

#include <algorithm>
#include <cmath>
#include <iostream>
#include <stdexcept>

namespace quoka_decoder {
namespace {

using quoka_examples::fixed;
using View = Session::View;

struct Flags {
  ModelFlags model;
  std::string file;
  std::string selector = "quoka.robust", budget = "0.125";
  quoka::QuokaOptions quoka;
  double tolerance = 0.1;
  int rungs = 3;
  Index max_tokens = 0;
  std::string out, json, command;
};

// One budget of the ladder: its layers, and sums of squares [layer][KV head].
struct Rung {
  nlohmann::json budget;
  quoka_examples::LayerStack layers;
  std::vector<std::vector<double>> difference, size;

  double error(Index layer, Index head) const {
    const auto l = static_cast<std::size_t>(layer), h = static_cast<std::size_t>(head);
    return ratio(difference[l][h], size[l][h]);
  }
  double error(Index layer) const {
    const auto l = static_cast<std::size_t>(layer);
    double d = 0.0, s = 0.0;
    for (std::size_t h = 0; h < size[l].size(); ++h) d += difference[l][h], s += size[l][h];
    return ratio(d, s);
  }
  double worst_head(Index layer) const {
    double worst = 0.0;
    for (Index h = 0; h < std::ssize(size.front()); ++h) worst = std::max(worst, error(layer, h));
    return worst;
  }

 private:
  static double ratio(double d, double s) { return s > 0.0 ? std::sqrt(d / s) : 0.0; }
};

std::vector<Rung> make_ladder(const Flags& flags, const ModelConfig& c) {
  if (quoka_examples::shares_layers(flags.selector))
    throw std::invalid_argument(flags.selector +
                                " shares a choice between layers: budgets of single layers are not "
                                "for it");
  const quoka::LayerShape shape{
      .q_heads = c.q_heads, .kv_heads = c.kv_heads, .head_dim = c.head_dim, .v_dim = c.v_dim};
  std::vector<Index> all(static_cast<std::size_t>(c.layers));
  for (Index layer = 0; layer < c.layers; ++layer) all[static_cast<std::size_t>(layer)] = layer;
  if (quoka_examples::parse_budget(flags.budget).by_scores())
    throw std::invalid_argument("a ladder doubles a count of keys or a fraction, not " +
                                flags.budget);
  const bool fraction = flags.budget.find('.') != std::string::npos;
  std::vector<Rung> ladder;
  for (int rung = 0; rung < flags.rungs; ++rung) {
    nlohmann::json budget;
    quoka_examples::MethodOptions options{.quoka = flags.quoka};
    if (fraction) {
      const double share = std::stod(flags.budget) * std::ldexp(1.0, rung);
      if (share >= 1.0) break;
      budget = share, options.budget = quoka::Budget(share);
    } else {
      const Index keys = static_cast<Index>(std::stoll(flags.budget)) << rung;
      budget = keys, options.budget = quoka::Budget(keys);
    }
    const std::vector<double> zeros(static_cast<std::size_t>(c.kv_heads));
    const std::vector<std::vector<double>> of_layers(static_cast<std::size_t>(c.layers), zeros);
    ladder.push_back(
        {budget, quoka_examples::make_layers(flags.selector, shape, options, {}, all, c.layers),
         of_layers, of_layers});
  }
  if (ladder.empty())
    throw std::invalid_argument("a budget of " + flags.budget + " of the past selects nothing");
  return ladder;
}

void add_errors(Rung& rung, Index layer, View dense, View selected, Index kv_heads) {
  const Index group = dense.heads() / kv_heads;
  for (Index head = 0; head < dense.heads(); ++head) {
    double d = 0.0, s = 0.0;
    for (Index i = 0; i < dense.len(); ++i)
      for (Index c = 0; c < dense.dim(); ++c) {
        const double x = static_cast<double>(dense.row(0, head, i)[c]);
        const double y = static_cast<double>(selected.row(0, head, i)[c]);
        d += (x - y) * (x - y), s += x * x;
      }
    const auto l = static_cast<std::size_t>(layer), h = static_cast<std::size_t>(head / group);
    rung.difference[l][h] += d, rung.size[l][h] += s;
  }
}

// The rung that a layer takes; the ladder's end: all keys.
std::vector<std::size_t> choose(const std::vector<Rung>& ladder, Index layers, double tolerance) {
  std::vector<std::size_t> chosen;
  for (Index layer = 0; layer < layers; ++layer) {
    std::size_t rung = 0;
    while (rung < ladder.size() && !(ladder[rung].error(layer) <= tolerance)) ++rung;
    chosen.push_back(rung);
  }
  return chosen;
}

nlohmann::json policy_of(const Flags& flags, const ModelConfig& c, const std::vector<Rung>& ladder,
                         const std::vector<std::size_t>& chosen) {
  const bool preset = flags.selector == "quoka.recommended" || flags.selector == "quoka.robust";
  const std::string mode = flags.selector.substr(preset ? sizeof "quoka." - 1 : 0);
  nlohmann::json policy{
      {"mode", mode},
      {"budget", ladder.front().budget},
      {"dense_layers", nlohmann::json::array()},
      {"layer_budgets", nlohmann::json::object()},
      {"model", {{"q_heads", c.q_heads}, {"kv_heads", c.kv_heads}, {"head_dim", c.head_dim}}}};
  for (std::size_t layer = 0; layer < chosen.size(); ++layer) {
    if (chosen[layer] == ladder.size())
      policy["dense_layers"].push_back(layer);
    else if (chosen[layer] > 0)
      policy["layer_budgets"][std::to_string(layer)] = ladder[chosen[layer]].budget;
  }
  return policy;
}

void calibrate(const Flags& flags) {
  const LoadedModel loaded = load(flags.model);
  const ModelConfig& c = loaded.model.config;
  auto prompt = loaded.tokenizer->encode(read_file(flags.file));
  if (flags.max_tokens > 0 && std::ssize(prompt) > flags.max_tokens)
    prompt.resize(static_cast<std::size_t>(flags.max_tokens));
  if (std::ssize(prompt) <= flags.model.chunk)
    throw std::invalid_argument("a prompt of " + std::to_string(prompt.size()) +
                                " tokens is one chunk of " + std::to_string(flags.model.chunk) +
                                ": nothing is selected from");
  quoka::ThreadPool threads(thread_count(flags.model));
  auto ladder = make_ladder(flags, c);
  Session session(loaded.model, session_options(flags.model, "dense", "1.0", flags.quoka), threads);
  session.watch = [&](Index layer, View q, View k, View v, View out) {
    quoka::Tensor<float> selected(1, c.q_heads, q.len(), c.v_dim);
    for (Rung& rung : ladder) {
      auto& attention = *rung.layers[static_cast<std::size_t>(layer)];
      const bool has_past = attention.kv_len() > 0;
      attention.forward(q, k, v, selected, threads);
      if (has_past) add_errors(rung, layer, out, selected, c.kv_heads);
    }
  };
  quoka_examples::Progress bar("calibrate", std::ssize(prompt));
  session.run(prompt, [&](Index done) { bar.update(done); });

  const auto chosen = choose(ladder, c.layers, flags.tolerance);
  std::vector<std::string> head{"layer"};
  for (const Rung& rung : ladder) head.push_back("error at " + rung.budget.dump());
  head.insert(head.end(), {"worst KV head", "policy"});
  std::vector<std::vector<std::string>> rows;
  nlohmann::json results = nlohmann::json::array();
  for (Index layer = 0; layer < c.layers; ++layer) {
    const std::size_t rung = chosen[static_cast<std::size_t>(layer)];
    std::vector<std::string> row{std::to_string(layer)};
    for (const Rung& r : ladder) {
      row.push_back(fixed(r.error(layer), 4));
      nlohmann::json heads = nlohmann::json::array();
      for (Index h = 0; h < c.kv_heads; ++h) heads.push_back(r.error(layer, h));
      results.push_back({{"layer", layer},
                         {"budget", r.budget},
                         {"error", r.error(layer)},
                         {"kv_head_error", heads}});
    }
    row.push_back(fixed(ladder.front().worst_head(layer), 4));
    row.push_back(rung == ladder.size() ? "dense" : ladder[rung].budget.dump());
    rows.push_back(row);
  }
  std::cout << prompt.size() << " tokens, chunk " << flags.model.chunk << ", " << flags.selector
            << ", tolerance " << flags.tolerance << '\n';
  quoka_examples::print_table(std::cout, head, rows);
  const auto policy = policy_of(flags, c, ladder, chosen);
  quoka_examples::write_json(flags.out, policy);
  std::cout << "\nwritten to " << flags.out << ": " << policy["dense_layers"].size()
            << " dense layers, " << policy["layer_budgets"].size()
            << " with a budget of their own\n";
  if (!flags.json.empty())
    quoka_examples::write_json(flags.json, {{"command", flags.command},
                                            {"model", flags.model.model},
                                            {"selector", flags.selector},
                                            {"tokens", prompt.size()},
                                            {"chunk", flags.model.chunk},
                                            {"tolerance", flags.tolerance},
                                            {"cpu", quoka_examples::cpu_name()},
                                            {"results", results}});
}

}  // namespace

void add_calibrate(CLI::App& app, const std::string& command) {
  auto flags = std::make_shared<Flags>();
  flags->command = command;
  CLI::App* sub =
      app.add_subcommand("calibrate", "what selection costs each layer, and a policy that follows");
  add_model_flags(*sub, flags->model);
  sub->add_option("-f,--file", flags->file, "a file with a prompt as the model is used with")
      ->required()
      ->check(CLI::ExistingFile);
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
  sub->add_option("--max-tokens", flags->max_tokens, "cut the prompt there; 0: all of it")
      ->capture_default_str();
  sub->add_option("--json", flags->json, "write every layer's and KV head's error there");
  quoka_examples::add_quoka_flags(*sub, flags->quoka);
  sub->callback([flags] { calibrate(*flags); });
}

}  // namespace quoka_decoder
