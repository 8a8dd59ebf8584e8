#include "support/calibration.hpp"

#include "support/json_file.hpp"
#include "support/layer_policy_file.hpp"
#include "support/require.hpp"
#include "support/table.hpp"

#include <quoka/rows/tensor.hpp>

#include <algorithm>
#include <cmath>
#include <ostream>
#include <utility>

namespace quoka_examples {
namespace {

double ratio(double difference, double size) {
  return size > 0.0 ? std::sqrt(difference / size) : 0.0;
}

// "256" as a whole number, "0.25" as one that is not.
nlohmann::json number_of(const std::string& text) {
  const bool fraction = text.find('.') != std::string::npos;
  Index count = 0;
  double share = 0.0;
  if (!(fraction ? read_number(text, share) : read_number(text, count)))
    refuse('"', text, "\" is not a count of keys or a fraction of the past");
  const nlohmann::json number = fraction ? nlohmann::json(share) : nlohmann::json(count);
  budget_from("a budget of the ladder", number);  // refuses what is out of range
  return number;
}

}  // namespace

std::vector<nlohmann::json> doubled_ladder(const std::string& first, int rungs) {
  const nlohmann::json start = number_of(first);
  std::vector<nlohmann::json> ladder;
  for (int rung = 0; rung < rungs; ++rung) {
    if (start.is_number_float()) {
      const double share = start.get<double>() * std::ldexp(1.0, rung);
      if (share >= 1.0) break;
      ladder.emplace_back(share);
    } else {
      ladder.emplace_back(start.get<Index>() << rung);
    }
  }
  if (ladder.empty()) refuse("a budget of ", first, " of the past selects nothing");
  return ladder;
}

std::vector<nlohmann::json> given_ladder(const std::vector<std::string>& budgets) {
  if (budgets.empty()) refuse("a ladder needs a budget");
  std::vector<nlohmann::json> ladder;
  for (const std::string& text : budgets) {
    const nlohmann::json next = number_of(text);
    if (!ladder.empty() && ladder.back().type() != next.type())
      refuse("the ladder mixes counts of keys and fractions of the past: ", ladder.back().dump(),
             " and ", text);
    if (!ladder.empty() && !(ladder.back() < next))
      refuse("the ladder is not ascending: ", text, " after ", ladder.back().dump());
    ladder.push_back(next);
  }
  return ladder;
}

Calibration::Calibration(std::string selector, const quoka::LayerShape& shape,
                         const MethodOptions& options, const std::vector<nlohmann::json>& ladder,
                         std::vector<Index> numbers, const quoka::AttentionOptions& attention)
    : selector_(std::move(selector)), shape_(shape), numbers_(std::move(numbers)) {
  if (shares_layers(selector_))
    refuse(selector_, " shares a choice between layers: budgets of single layers are not for it");
  std::vector<Index> all;
  for (Index layer = 0; layer < std::ssize(numbers_); ++layer) all.push_back(layer);
  const std::vector<std::vector<double>> zeros(
      numbers_.size(), std::vector<double>(static_cast<std::size_t>(shape.kv_heads)));
  for (const nlohmann::json& budget : ladder) {
    MethodOptions of_rung = options;
    of_rung.budget = budget_from("a budget of the ladder", budget);
    ladder_.push_back({budget,
                       make_layers(selector_, shape, of_rung, attention, all, std::ssize(numbers_)),
                       zeros, zeros});
  }
}

void Calibration::add(Index layer, View q, View k, View v, View dense_out,
                      quoka::ThreadPool& threads) {
  const Index group = shape_.q_heads / shape_.kv_heads;
  const auto l = static_cast<std::size_t>(layer);
  quoka::Tensor<float> out(q.batch(), q.heads(), q.len(), v.dim());
  const View selected = out;
  for (Rung& rung : ladder_) {
    const bool has_past = rung.layers[l]->kv_len() > 0;
    rung.layers[l]->forward(q, k, v, out, threads);
    if (!has_past) continue;
    for (Index b = 0; b < q.batch(); ++b)
      for (Index head = 0; head < q.heads(); ++head) {
        double difference = 0.0, size = 0.0;
        for (Index i = 0; i < q.len(); ++i)
          for (Index c = 0; c < v.dim(); ++c) {
            const double x = static_cast<double>(dense_out.row(b, head, i)[c]);
            const double y = static_cast<double>(selected.row(b, head, i)[c]);
            difference += (x - y) * (x - y), size += x * x;
          }
        const auto h = static_cast<std::size_t>(head / group);
        rung.difference[l][h] += difference, rung.size[l][h] += size;
      }
  }
}

double Calibration::error(Index rung, Index layer) const {
  const auto l = static_cast<std::size_t>(layer);
  double difference = 0.0, size = 0.0;
  for (const double d : at(rung).difference[l]) difference += d;
  for (const double s : at(rung).size[l]) size += s;
  return ratio(difference, size);
}

double Calibration::error(Index rung, Index layer, Index kv_head) const {
  const auto l = static_cast<std::size_t>(layer), h = static_cast<std::size_t>(kv_head);
  return ratio(at(rung).difference[l][h], at(rung).size[l][h]);
}

double Calibration::worst_kv_head(Index rung, Index layer) const {
  double worst = 0.0;
  for (Index h = 0; h < shape_.kv_heads; ++h) worst = std::max(worst, error(rung, layer, h));
  return worst;
}

std::vector<Index> Calibration::choose(double tolerance) const {
  std::vector<Index> chosen;
  for (Index layer = 0; layer < std::ssize(numbers_); ++layer) {
    Index rung = 0;
    while (rung < rungs() && !(error(rung, layer) <= tolerance)) ++rung;
    chosen.push_back(rung);
  }
  return chosen;
}

nlohmann::json Calibration::policy(double tolerance) const {
  const std::string mode = selector_ == "quoka"               ? "paper"
                           : selector_ == "quoka.recommended" ? "recommended"
                           : selector_ == "quoka.balanced"    ? "balanced"
                                                              : selector_;
  nlohmann::json policy{{"mode", mode},
                        {"budget", budget(0)},
                        {"dense_layers", nlohmann::json::array()},
                        {"layer_budgets", nlohmann::json::object()},
                        {"model",
                         {{"q_heads", shape_.q_heads},
                          {"kv_heads", shape_.kv_heads},
                          {"head_dim", shape_.head_dim}}}};
  const std::vector<Index> chosen = choose(tolerance);
  for (std::size_t layer = 0; layer < chosen.size(); ++layer) {
    if (chosen[layer] == rungs())
      policy["dense_layers"].push_back(numbers_[layer]);
    else if (chosen[layer] > 0)
      policy["layer_budgets"][std::to_string(numbers_[layer])] = budget(chosen[layer]);
  }
  return policy;
}

nlohmann::json Calibration::results() const {
  nlohmann::json results = nlohmann::json::array();
  for (Index layer = 0; layer < std::ssize(numbers_); ++layer)
    for (Index rung = 0; rung < rungs(); ++rung) {
      nlohmann::json heads = nlohmann::json::array();
      for (Index h = 0; h < shape_.kv_heads; ++h) heads.push_back(error(rung, layer, h));
      results.push_back({{"layer", numbers_[static_cast<std::size_t>(layer)]},
                         {"budget", budget(rung)},
                         {"error", error(rung, layer)},
                         {"kv_head_error", heads}});
    }
  return results;
}

void Calibration::print(std::ostream& out, double tolerance) const {
  Table table("layer");
  for (const Rung& rung : ladder_) table.more("error at {}", rung.budget.dump());
  table.more("worst KV head\tpolicy");
  const std::vector<Index> chosen = choose(tolerance);
  for (Index layer = 0; layer < std::ssize(numbers_); ++layer) {
    const auto l = static_cast<std::size_t>(layer);
    table.row("{}", numbers_[l]);
    for (Index rung = 0; rung < rungs(); ++rung) table.more("{:.4f}", error(rung, layer));
    table.more("{:.4f}\t{}", worst_kv_head(0, layer),
               chosen[l] == rungs() ? "dense" : budget(chosen[l]).dump());
  }
  table.print(out);
}

void write_policy(const std::string& path, const nlohmann::json& policy, std::ostream& out) {
  write_json(path, policy);
  out << "\nwritten to " << path << ": " << policy["dense_layers"].size() << " dense layers, "
      << policy["layer_budgets"].size() << " with a budget of their own\n";
}

}  // namespace quoka_examples
