// Times FLASH_ATTN_EXT alone: ggml's CPU backend against this one, by default exact and both presets.
//
//     ggml_bench [--rounds 7] [--type f16,q8_0,q4_0,...] [--threads 1] [--modes exact,paper,balanced,recommended]
//                [--no-ggml]
//                [--biased 1] [--own KEYS] [--block 64] [--out results.json] [SHAPE...]
//
// A shape is q_heads/kv_heads/head_dim/queries/cached. Each mode computes the same node twice between two runs of
// ggml's; the chunk's keys are other ones each time. Printed are ggml's time and the medians of its ratios to the
// modes'. A mode may have settings of its own (settings_text.hpp): exact:threads=2, balanced:sketch=0. --no-ggml: in
// place of ggml's the first mode's. --biased: each mode once more, as `exact+bias`, with -0.001 in the given number of
// entries of the mask, of as many queries, evenly spaced. --own: each query sees the given number of cached cells,
// drawn for it alone, in blocks of --block, as in a model that chooses keys by itself.
//
//     ggml_bench --errors [--type f32,f16,...] [--logits 0.3,1,3,10]
//                [--modes exact:arithmetic=float,exact:arithmetic=bf16] [--out ...] [SHAPE...]
//
// In place of times the errors: root of the mean square of the difference from attention in double over the numbers
// that the cache holds, by that of the output. --logits: their standard deviation; the larger, the fewer keys carry
// the weight.
#include "graph_of_one.hpp"
#include "settings_text.hpp"

#include "support/clock.hpp"
#include "support/json_file.hpp"
#include "support/statistics.hpp"

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>

namespace {

using quoka_examples::median;
using quoka_ggml::Backends, quoka_ggml::GraphOfOne, quoka_ggml::NodeShape;

double seconds(GraphOfOne& graph, std::int64_t cached, ggml_backend_t backend) {
  graph.write_keys(cached, cached + graph.s.n_q);
  return quoka_examples::seconds_of([&] {
    if (graph.run(backend) != GGML_STATUS_SUCCESS) throw std::runtime_error("a backend failed");
  });
}

// Errors of a backend's results.
double error_of(GraphOfOne& graph, ggml_backend_t backend, const std::vector<double>& reference) {
  const std::vector<float> x = graph.computed_by(backend);
  if (x.size() != reference.size()) throw std::runtime_error("a backend failed");
  double error = 0, size = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double off = static_cast<double>(x[i]) - reference[i];
    error += off * off, size += reference[i] * reference[i];
  }
  return std::sqrt(error / size);
}

}  // namespace

int main(int argc, char** argv) try {
  std::map<std::string, ggml_type> types;  // those of llama.cpp's --cache-type-k
  for (const ggml_type t :
       {GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0,
        GGML_TYPE_Q4_1, GGML_TYPE_IQ4_NL, GGML_TYPE_Q5_0, GGML_TYPE_Q5_1})
    types[ggml_type_name(t)] = t;
  CLI::App app("FLASH_ATTN_EXT by ggml's CPU backend and by this one");
  int rounds = 7, threads = 1;
  std::int64_t biased = 0, own = 0, block = 1;
  bool no_ggml = false, errors = false;
  std::vector<std::string> modes, cache_types{"f16"}, shapes;
  std::vector<double> logit_sizes{3.0};
  std::string out;
  app.add_option("--rounds", rounds)->check(CLI::PositiveNumber);
  app.add_option("--type", cache_types)
      ->delimiter(',')
      ->allow_extra_args(false)
      ->check(CLI::IsMember(types));
  app.add_option("--biased", biased)->check(CLI::NonNegativeNumber);
  app.add_option("--own", own)->check(CLI::PositiveNumber)->excludes("--biased");
  app.add_option("--block", block)->check(CLI::PositiveNumber);
  app.add_option("--threads", threads)->check(CLI::PositiveNumber);
  app.add_option("--modes", modes)->delimiter(',')->allow_extra_args(false);  // shapes may follow
  app.add_flag("--no-ggml", no_ggml);
  app.add_flag("--errors", errors);
  app.add_option("--logits", logit_sizes)
      ->delimiter(',')
      ->allow_extra_args(false)
      ->check(CLI::PositiveNumber);
  app.add_option("--out", out);
  app.add_option("shapes", shapes);
  CLI11_PARSE(app, argc, argv);

  if (modes.empty())
    modes = errors ? std::vector<std::string>{"exact:arithmetic=float", "exact:arithmetic=bf16",
                                              "exact:arithmetic=int8"}
                   : std::vector<std::string>{"exact", "paper", "balanced", "recommended"};
  if (shapes.empty())
    shapes = errors
                 ? std::vector<std::string>{"8/2/128/1/2047", "8/2/128/8/2040", "8/2/128/63/1985",
                                            "8/2/128/64/1984", "8/2/128/512/1536"}
                 : std::vector<std::string>{"32/8/128/128/1024",  "32/8/128/128/7936",
                                            "32/8/128/128/16256", "32/8/128/512/7680",
                                            "32/4/64/128/16256",  "32/8/128/1/2048"};

  Backends backends;
  Backends::set_threads(backends.cpu.get(), threads);
  struct Mode {
    std::string name;
    ggml_backend_ptr backend;
    bool biased;
  };
  std::vector<Mode> ours;
  for (const std::string& mode : modes) {
    nlohmann::json parameters = quoka_ggml::settings_of_mode(mode);
    parameters.emplace("dense_layers", 0);
    for (const bool bias : {false, true}) {
      if (bias && biased == 0) continue;
      ours.push_back(
          {mode + (bias ? "+bias" : ""), Backends::quoka(parameters.dump(), threads), bias});
      if (!ours.back().backend) throw std::invalid_argument(mode + " is not a mode");
    }
  }
  ggml_backend_t const reference = no_ggml ? ours.front().backend.get() : backends.cpu.get();
  nlohmann::json results = nlohmann::json::array();
  const std::string first = no_ggml ? "first" : "ggml";
  fmt::print("{:6} {:18}{} {:>13}", "cache", "shape", errors ? " logits" : "",
             first + (errors ? "" : " ms"));
  for (const Mode& mode : ours)
    fmt::print(" {:>{}}", mode.name, std::max<std::size_t>(13, mode.name.size()));
  fmt::print("\n");
  const auto report = [&](nlohmann::json row, const auto& numbers, const char* format) {
    fmt::print("{:6} {:18}", row["cache"].get<std::string>(), row["shape"].get<std::string>());
    if (errors) fmt::print(" {:6}", row["logits"].get<double>());
    for (std::size_t i = 0; i < numbers.size(); ++i)
      fmt::print(" {:>{}}", fmt::format(fmt::runtime(format), numbers[i]),
                 i == 0 ? 13 : std::max<std::size_t>(13, ours[i - 1].name.size()));
    fmt::print("\n");
    std::fflush(stdout);
    for (std::size_t i = 0; i < numbers.size(); ++i)
      row[i > 0 ? ours[i - 1].name : first + (errors ? "" : "_ms")] = numbers[i];
    results.push_back(row);
  };
  for (const std::string& type : cache_types)
    for (const std::string& text : shapes) {
      NodeShape s;
      std::int64_t cached = 0;
      if (std::sscanf(text.c_str(), "%ld/%ld/%ld/%ld/%ld", &s.q_heads, &s.kv_heads, &s.head_dim,
                      &s.n_q, &cached) != 5)
        throw std::invalid_argument(text + " is not q_heads/kv_heads/head_dim/queries/cached");
      s.v_dim = s.head_dim, s.k_type = s.v_type = types.at(type);
      s.cells = (cached + s.n_q + 255) / 256 * 256;
      GraphOfOne graph(s);
      if (own > cached) throw std::invalid_argument("--own is more than the cached cells");
      if (own > 0)
        graph.see_own(own, cached, block);
      else
        graph.see_causally(cached);
      nlohmann::json row{{"shape", text}, {"cache", type}, {"threads", threads}};
      if (own > 0) row["own"] = own, row["block"] = block;
      std::vector<double> numbers;
      if (errors) {
        for (const double size : logit_sizes) {
          graph.fill(graph.q_rows, static_cast<float>(size));
          const std::vector<double> exact = in_double(graph, cached);
          numbers = {error_of(graph, reference, exact)};
          for (const Mode& mode : ours)
            numbers.push_back(error_of(graph, mode.backend.get(), exact));
          nlohmann::json of_size = row;
          of_size["logits"] = size;
          report(of_size, numbers, "{:.1e}");
        }
        continue;
      }
      const auto see = [&](bool bias) {  // entries of the past, each a query's
        const std::int64_t count = std::min(biased, s.n_q);
        for (std::int64_t i = 0; i < count; ++i)
          graph.mask_at((2 * i + 1) * cached / (2 * count), (2 * i + 1) * s.n_q / (2 * count)) =
              ggml_fp32_to_fp16(bias ? -0.001f : 0.0f);
      };
      std::map<std::string, std::vector<double>> ratio;
      std::vector<double> theirs;
      for (int round = -1; round < rounds; ++round) {  // the first is not counted
        double before = seconds(graph, cached, reference);
        for (const auto& [name, backend, bias] : ours) {
          see(bias);
          const double x = seconds(graph, cached, backend.get()),
                       again = seconds(graph, cached, backend.get());
          see(false);
          const double after = seconds(graph, cached, reference);
          if (round >= 0) ratio[name].push_back((before + after) / (x + again));
          if (round >= 0) theirs.push_back(before);
          before = after;
        }
      }
      numbers.push_back(1e3 * median(theirs));
      for (const Mode& mode : ours) numbers.push_back(median(ratio[mode.name]));
      report(row, numbers, "{:.2f}");
    }
  if (!out.empty()) quoka_examples::write_json(out, results);
} catch (const std::exception& e) {
  std::fprintf(stderr, "ggml_bench: %s\n", e.what());
  return 1;
}
