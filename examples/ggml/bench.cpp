// Times FLASH_ATTN_EXT alone: ggml's CPU backend against this one, by default exact, QuoKA and robust.
//
//     ggml_bench [--rounds 7] [--type f16|q8_0|q4_0|...] [--threads 1] [--modes exact,quoka,robust] [--no-ggml]
//                [--biased 1] [--out results.json] [SHAPE...]
//
// A shape is q_heads/kv_heads/head_dim/queries/cached. Each mode computes the same node twice between two runs of
// ggml's; the chunk's keys are other ones each time. Printed are ggml's time and the medians of its ratios to the
// modes'. A mode may have its own number of threads, exact:2, and may score in float, robust:float. --no-ggml: in
// place of ggml's the first mode's. --biased: each mode once more, as `exact+bias`, with -0.001 in so many entries of
// the mask, of as many queries, evenly spaced: what they cost.
#include "graph_of_one.hpp"

#include "support/clock.hpp"
#include "support/json_file.hpp"
#include "support/statistics.hpp"

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include <algorithm>
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

}  // namespace

int main(int argc, char** argv) try {
  std::map<std::string, ggml_type> types;  // those of llama.cpp's --cache-type-k
  for (const ggml_type t :
       {GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0,
        GGML_TYPE_Q4_1, GGML_TYPE_IQ4_NL, GGML_TYPE_Q5_0, GGML_TYPE_Q5_1})
    types[ggml_type_name(t)] = t;
  CLI::App app("FLASH_ATTN_EXT by ggml's CPU backend and by this one");
  int rounds = 7, threads = 1;
  std::int64_t biased = 0;
  bool no_ggml = false;
  std::vector<std::string> modes{"exact", "quoka", "robust"};
  std::string type = "f16", out;
  std::vector<std::string> shapes{"32/8/128/128/1024", "32/8/128/128/7936", "32/8/128/128/16256",
                                  "32/8/128/512/7680", "32/4/64/128/16256", "32/8/128/1/2048"};
  app.add_option("--rounds", rounds)->check(CLI::PositiveNumber);
  app.add_option("--type", type)->check(CLI::IsMember(types));
  app.add_option("--biased", biased)->check(CLI::NonNegativeNumber);
  app.add_option("--threads", threads)->check(CLI::PositiveNumber);
  app.add_option("--modes", modes)->delimiter(',')->allow_extra_args(false);  // shapes may follow
  app.add_flag("--no-ggml", no_ggml);
  app.add_option("--out", out);
  app.add_option("shapes", shapes);
  CLI11_PARSE(app, argc, argv);

  Backends backends;
  Backends::set_threads(backends.cpu.get(), threads);
  struct Mode {
    std::string name;
    ggml_backend_ptr backend;
    bool biased;
  };
  std::vector<Mode> ours;
  for (const std::string& mode : modes) {
    const std::string name = mode.substr(0, mode.find(':')),
                      more = mode.substr(std::min(mode.find(':') + 1, mode.size()));
    const bool in_float = more == "float", own = mode != name && !in_float;
    nlohmann::json parameters{{"dense_layers", 0}, {"mode", name}};
    if (in_float) parameters["sketch"] = 0;
    for (const bool bias : {false, true}) {
      if (bias && biased == 0) continue;
      ours.push_back({mode + (bias ? "+bias" : ""),
                      Backends::quoka(parameters.dump(), own ? std::stoi(more) : threads), bias});
      if (!ours.back().backend) throw std::invalid_argument(mode + " is no mode");
    }
  }
  ggml_backend_t const reference = no_ggml ? ours.front().backend.get() : backends.cpu.get();
  nlohmann::json results = nlohmann::json::array();
  fmt::print("{:22} {:>13}", "shape", no_ggml ? "the first, ms" : "ggml ms");
  for (const Mode& mode : ours) fmt::print(" {:>13}", mode.name);
  fmt::print("\n");
  for (const std::string& text : shapes) {
    NodeShape s;
    std::int64_t cached = 0;
    if (std::sscanf(text.c_str(), "%ld/%ld/%ld/%ld/%ld", &s.q_heads, &s.kv_heads, &s.head_dim,
                    &s.n_q, &cached) != 5)
      throw std::invalid_argument(text + " is no q_heads/kv_heads/head_dim/queries/cached");
    s.v_dim = s.head_dim, s.k_type = s.v_type = types.at(type);
    s.cells = (cached + s.n_q + 255) / 256 * 256;
    GraphOfOne graph(s);
    graph.see_causally(cached);
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
    nlohmann::json row{{"shape", text},
                       {"cache", type},
                       {"threads", threads},
                       {no_ggml ? "first_ms" : "ggml_ms", 1e3 * median(theirs)}};
    for (const auto& [name, of_mode] : ratio) row[name] = median(of_mode);
    fmt::print("{:22} {:13.2f}", text, 1e3 * median(theirs));
    for (const Mode& mode : ours) fmt::print(" {:13.2f}", median(ratio[mode.name]));
    fmt::print("\n");
    std::fflush(stdout);
    results.push_back(row);
  }
  if (!out.empty()) quoka_examples::write_json(out, results);
} catch (const std::exception& e) {
  std::fprintf(stderr, "ggml_bench: %s\n", e.what());
  return 1;
}
