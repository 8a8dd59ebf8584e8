// How each method's selection grows: time and scratch against kv_len, n_queries and q_heads, one at
// a time, for the paper's complexity table. Fits the exponents (least squares on logarithms) and
// prints them beside the formula's.
//
// Selection alone (all stages, no attention), one layer of 32 query and 8 KV heads of 128 channels,
// chunk 128, unless it is what varies. Methods take turns at each point; medians over rounds. A
// fixed cost per call flattens an exponent at the small end, memory bandwidth steepens it at the
// large.

#include "support/paired_steps.hpp"
#include "support/program.hpp"
#include "support/selector_flags.hpp"
#include "support/table.hpp"

#include <cmath>

namespace {

using namespace quoka_examples;

struct Flags {
  std::string selectors =
      "quoka,quoka.float,sample_attention,sparq,loki,tidal_decode,quest.softmax,quest,xattention,"
      "flash_prefill";
  Index kv_len = 8192;
  int threads = 1;
  int rounds = 5;
};

// Exponents in the paper's complexity table, or in the method's own where the paper has none: what
// dominates for large kv_len.
struct Formula {
  std::string method, time;
  double exponents[3];  // of the axes
};
const std::vector<Formula> formulas{
    {"quoka", "kv_heads n_queries kv_len d", {1, 1, 0}},
    {"quoka.float", "kv_heads n_queries kv_len d", {1, 1, 0}},
    {"sample_attention", "q_heads n_queries kv_len d", {1, 1, 1}},
    {"sparq", "q_heads chunk kv_len r", {1, 0, 1}},
    {"loki", "q_heads chunk kv_len r", {1, 0, 1}},
    {"tidal_decode", "q_heads chunk kv_len d, at 2 layers", {1, 0, 1}},
    {"quest.softmax", "q_heads chunk kv_len/16 d", {1, 0, 1}},
    {"quest", "q_heads chunk d + kv_heads kv_len/16 d", {1, 0, 1}},
    {"xattention", "q_heads chunk kv_len d / 8", {1, 0, 1}},
    {"flash_prefill", "q_heads chunk kv_len/128 d", {1, 0, 1}},
};

struct Axis {
  std::string name;
  std::vector<Index> values;
};
const std::vector<Axis> axes{{"kv_len", {4096, 8192, 16384, 32768, 65536}},
                             {"n_queries", {16, 32, 64, 128}},
                             {"q_heads", {16, 32, 64, 128}}};

// What one method takes at each value of an axis.
struct Costs {
  std::vector<double> seconds, memory_mib;
};

// Adds a value's costs to each method's.
void measure(const std::string& axis, Index value, const std::vector<std::string>& methods,
             const Flags& flags, quoka::ThreadPool& threads, std::vector<Costs>& costs) {
  quoka::LayerShape shape{.q_heads = 32, .kv_heads = 8, .head_dim = 128};
  MethodOptions options;
  Index kv_len = flags.kv_len;
  if (axis == "kv_len") kv_len = value;
  if (axis == "n_queries") options.quoka.n_queries = value;
  if (axis == "q_heads") shape.q_heads = value;
  GeneratedPrompt prompt(shape, 128);
  std::vector<LayerStack> layers;
  for (const std::string& method : methods) {
    layers.push_back(make_layers(method, shape, options));
    prompt.fill(*layers.back().front(), kv_len);
  }
  Progress bar(axis + " " + std::to_string(value), flags.rounds + 1);
  const auto seconds = time_in_turns(
      methods.size(), flags.rounds,
      [&](std::size_t m) {
        return seconds_of([&] { layers[m].front()->select(prompt.q, threads); });
      },
      [&](int done) { bar.update(done); });
  for (std::size_t m = 0; m < methods.size(); ++m) {
    const AnyLayer& layer = *layers[m].front();
    costs[m].seconds.push_back(median(seconds[m]));
    costs[m].memory_mib.push_back(static_cast<double>(layer.scratch_bytes() + layer.kept_bytes()) /
                                  1048576.0);
  }
}

int run(const Flags& flags, Report& report) {
  quoka::ThreadPool threads(flags.threads);
  const std::vector<std::string> methods = parse_methods(flags.selectors);
  std::vector<std::vector<Costs>> costs;  // [axis][method]
  for (const Axis& axis : axes) {
    costs.emplace_back(methods.size());
    for (const Index value : axis.values)
      measure(axis.name, value, methods, flags, threads, costs.back());
  }
  Table table("selector\ttime\tkv_len\tmemory\tn_queries\tmemory\tq_heads\tmemory");
  for (std::size_t m = 0; m < methods.size(); ++m) {
    const auto formula = std::find_if(formulas.begin(), formulas.end(),
                                      [&](const Formula& f) { return f.method == methods[m]; });
    const bool known = formula != formulas.end();
    table.row("{}\t{}", methods[m], known ? formula->time : "");
    for (std::size_t a = 0; a < axes.size(); ++a) {
      const std::vector<double> values(axes[a].values.begin(), axes[a].values.end());
      const Costs& c = costs[a][m];
      const double time = exponent(values, c.seconds), memory = exponent(values, c.memory_mib),
                   expected = known ? formula->exponents[a] : std::nan("");
      table.more("{:.2f} ({:.0f})\t{:.2f}", time, expected, memory);
      report["exponents"].push_back({{"selector", methods[m]},
                                     {"axis", axes[a].name},
                                     {"time", time},
                                     {"scratch", memory},
                                     {"formula", expected}});
      for (std::size_t i = 0; i < values.size(); ++i)
        report["points"].push_back({{"axis", axes[a].name},
                                    {"value", axes[a].values[i]},
                                    {"selector", methods[m]},
                                    {"seconds", c.seconds[i]},
                                    {"scratch_mib", c.memory_mib[i]}});
    }
  }
  fmt::print(
      "{}\nfitted exponents of selection time (and the formula's), and of memory: scratch and "
      "what is kept per key\n\n",
      machine());
  table.print();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  Flags flags;
  Program app(argc, argv,
              "Selection time and scratch against kv_len, n_queries and q_heads, exponents fitted");
  app.add_option("--selectors", flags.selectors, "all, or names separated by commas")
      ->capture_default_str();
  app.add_option("--kv-len", flags.kv_len, "cached keys where something else varies")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  add_threads(app, flags.threads);
  add_rounds(app, flags.rounds);
  return app.run([&] { return run(flags, app.report); });
}
