// How each method's selection grows: time and scratch against kv_len, n_queries and q_heads, one at
// a time, for the paper's complexity table. Fits the exponents (least squares on logarithms) and
// prints them beside the formula's.
//
// Selection alone (all stages, no attention), one layer of 32 query and 8 KV heads of 128 channels,
// chunk 128, unless it is what varies. Methods take turns at each point; medians over rounds. A
// fixed cost per call flattens an exponent at the small end, memory bandwidth steepens it at the
// large.

#include "support/build_info.hpp"
#include "support/json_file.hpp"
#include "support/paired_steps.hpp"
#include "support/progress.hpp"
#include "support/run_program.hpp"
#include "support/selector_flags.hpp"
#include "support/table.hpp"

#include <CLI/CLI.hpp>

#include <cmath>
#include <iostream>

namespace {

using namespace quoka_examples;

struct Flags {
  std::string selectors =
      "quoka,quoka.float,sample_attention,sparq,loki,tidal_decode,quest.softmax,quest,xattention,"
      "flash_prefill";
  Index kv_len = 8192;
  int threads = 1;
  int rounds = 5;
  std::string json, command;
};

// Exponents of {kv_len, n_queries, q_heads} in the paper's complexity table, or in the method's own
// where the paper has none: what dominates for large kv_len.
struct Formula {
  std::string method, time;
  double kv_len, n_queries, q_heads;
};
const std::vector<Formula> formulas{
    {"quoka", "kv_heads n_queries kv_len d", 1, 1, 0},
    {"quoka.float", "kv_heads n_queries kv_len d", 1, 1, 0},
    {"sample_attention", "q_heads n_queries kv_len d", 1, 1, 1},
    {"sparq", "q_heads chunk kv_len r", 1, 0, 1},
    {"loki", "q_heads chunk kv_len r", 1, 0, 1},
    {"tidal_decode", "q_heads chunk kv_len d, at 2 layers", 1, 0, 1},
    {"quest.softmax", "q_heads chunk kv_len/16 d", 1, 0, 1},
    {"quest", "q_heads chunk d + kv_heads kv_len/16 d", 1, 0, 1},
    {"xattention", "q_heads chunk kv_len d / 8", 1, 0, 1},
    {"flash_prefill", "q_heads chunk kv_len/128 d", 1, 0, 1},
};

struct Point {
  std::string axis;
  Index value;
  std::string method;
  double seconds, scratch_mib;
};

std::vector<Point> measure(const std::string& axis, Index value, const Flags& flags,
                           quoka::ThreadPool& threads) {
  quoka::LayerShape shape{.q_heads = 32, .kv_heads = 8, .head_dim = 128};
  MethodOptions options;
  Index kv_len = flags.kv_len;
  if (axis == "kv_len") kv_len = value;
  if (axis == "n_queries") options.quoka.n_queries = value;
  if (axis == "q_heads") shape.q_heads = value;
  GeneratedPrompt prompt(shape, 128);
  std::vector<LayerStack> layers;
  const std::vector<std::string> names = parse_methods(flags.selectors);
  for (const std::string& name : names) {
    layers.push_back(make_layers(name, shape, options));
    prompt.fill(*layers.back().front(), kv_len);
    layers.back().front()->select(prompt.q, threads);  // warms up
  }
  std::vector<std::vector<double>> seconds(names.size());
  for (int round = 0; round < flags.rounds; ++round)
    for (std::size_t m = 0; m < names.size(); ++m)
      seconds[m].push_back(seconds_of([&] { layers[m].front()->select(prompt.q, threads); }));
  std::vector<Point> points;
  for (std::size_t m = 0; m < names.size(); ++m)
    points.push_back(
        {axis, value, names[m], median(seconds[m]),
         static_cast<double>(layers[m].front()->scratch_bytes() + layers[m].front()->kept_bytes()) /
             1048576.0});
  return points;
}

// Slope of log(y) over log(x).
double exponent(const std::vector<Point>& points, const std::string& axis,
                const std::string& method, double Point::*y) {
  double n = 0.0, sx = 0.0, sy = 0.0, sxx = 0.0, sxy = 0.0;
  for (const Point& point : points) {
    if (point.axis != axis || point.method != method) continue;
    const double lx = std::log(static_cast<double>(point.value)), ly = std::log(point.*y);
    n += 1.0, sx += lx, sy += ly, sxx += lx * lx, sxy += lx * ly;
  }
  return (n * sxy - sx * sy) / (n * sxx - sx * sx);
}

int run(const Flags& flags) {
  quoka::ThreadPool threads(flags.threads);
  const std::vector<std::pair<std::string, std::vector<Index>>> axes{
      {"kv_len", {4096, 8192, 16384, 32768, 65536}},
      {"n_queries", {16, 32, 64, 128}},
      {"q_heads", {16, 32, 64, 128}}};
  std::vector<Point> points;
  for (const auto& [axis, values] : axes)
    for (const Index value : values) {
      Progress bar(axis + " " + std::to_string(value), 1);
      for (Point& point : measure(axis, value, flags, threads)) points.push_back(std::move(point));
    }
  std::vector<std::vector<std::string>> rows;
  nlohmann::json json{
      {"command", flags.command}, {"cpu", cpu_name()}, {"build", build_description()}};
  for (const std::string& method : parse_methods(flags.selectors)) {
    const auto formula = std::find_if(formulas.begin(), formulas.end(),
                                      [&](const Formula& f) { return f.method == method; });
    std::vector<std::string> row{method, formula == formulas.end() ? "" : formula->time};
    for (const auto& [axis, values] : axes) {
      const double time = exponent(points, axis, method, &Point::seconds);
      const double scratch = exponent(points, axis, method, &Point::scratch_mib);
      const double expected = formula == formulas.end() ? std::nan("")
                              : axis == "kv_len"        ? formula->kv_len
                              : axis == "n_queries"     ? formula->n_queries
                                                        : formula->q_heads;
      row.push_back(fixed(time, 2) + " (" + fixed(expected, 0) + ")");
      row.push_back(fixed(scratch, 2));
      json["exponents"].push_back({{"selector", method},
                                   {"axis", axis},
                                   {"time", time},
                                   {"scratch", scratch},
                                   {"formula", expected}});
    }
    rows.push_back(row);
  }
  for (const Point& p : points)
    json["points"].push_back({{"axis", p.axis},
                              {"value", p.value},
                              {"selector", p.method},
                              {"seconds", p.seconds},
                              {"scratch_mib", p.scratch_mib}});
  std::cout << cpu_name() << "; " << build_description() << "\n"
            << "fitted exponents of selection time (and the formula's), and of memory: scratch and "
               "what is "
               "kept per key\n\n";
  print_table(std::cout,
              {"selector", "time", "kv_len", "memory", "n_queries", "memory", "q_heads", "memory"},
              rows);
  if (!flags.json.empty()) write_json(flags.json, json);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  Flags flags;
  flags.command = command_line(argc, argv);
  CLI::App app(
      "Selection time and scratch against kv_len, n_queries and q_heads, exponents fitted");
  app.add_option("--selectors", flags.selectors, "all, or names separated by commas")
      ->capture_default_str();
  app.add_option("--kv-len", flags.kv_len, "cached keys where something else varies")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--threads", flags.threads, "workers, the calling thread included")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--rounds", flags.rounds, "timed repetitions; medians count")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--json", flags.json, "write the results there too");
  return run_program(app, argc, argv, [&] { return run(flags); });
}
