// The attention of a real model that selections keep: every selector and option set, at a list of
// budgets, chunk by chunk, on recorded queries, keys and values, or on generated ones of a known
// geometry. Per layer and overall: share of attention mass kept (all rows, and the worst), relative
// output error, overlap with the oracle's selection, and the cost of choosing. It takes your own dumps: README.md says
// how to make one.
//
// --rounds N: times whole prefills, too, of all methods and dense attention in turns.
// --calibrate FILE: instead, one selector's error per layer and KV head of a dump, with --budgets as the
// ladder, and the layer policy that follows (support/calibration.hpp).
// --policy FILE: layers of dumps are dense, or have budgets of their own, as such a policy says. All others
// have those of --budgets, and selectors are those of --methods: the policy's "budget" and "mode" are ignored.

#include "support/accuracy.hpp"
#include "support/calibrate_capture.hpp"
#include "support/capture_times.hpp"
#include "support/generators.hpp"
#include "support/program.hpp"
#include "support/progress.hpp"
#include "support/selector_flags.hpp"
#include "support/table.hpp"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>

namespace {

using namespace quoka_examples;

struct Flags {
  std::vector<std::string> files, layers, generated;
  std::string methods = "default";
  std::vector<std::string> budgets{"128", "256", "512"};
  std::vector<Index> keep_first;  // none: 0 and 4; with calibrate: 0
  Index chunk = 128, tokens = 4096, seeds = 2;
  double past_per_budget = 2.0;
  int threads = 2, rounds = 0;
  double tolerance = 0.1;
  std::string policy, calibrate;
};

// ablations: the paper's, and a few more, one switch at a time. default: every selector, and the option sets
// of QuoKA that are known to matter on a real model.
std::vector<std::string> method_names(const std::string& list) {
  if (list == "ablations")
    return parse_methods(
        "quoka,quoka.mean,quoka.queries4,quoka.queries8,quoka.queries32,quoka.queries64,"
        "quoka.queries128,quoka.per_head,quoka.mixed,quoka.kernel7,quoka.first4,oracle,sample_"
        "attention,"
        "sample_attention.logit,random");
  if (list != "default") return parse_methods(list);
  std::vector<std::string> names = parse_methods(
      "quoka,quoka.recommended,quoka.balanced,quoka.mixed,quoka.per_head,quoka.mean,quoka.kernel7,"
      "quoka.mixed.per_head.kernel7,quoka.mixed.softmax.mean,oracle,oracle.max");
  for (const std::string& name : parse_methods("all"))
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  return names;
}

// Layers to measure on: of one model, or generated, each on its own.
struct Data {
  std::string name;
  std::vector<LayerCapture> layers;
  quoka::AttentionOptions attention;
  bool one_sequence;
};

// The layers whose names are "6" or "layer6" for a wanted 6; all if none is wanted.
Data load(const std::string& path, const std::vector<std::string>& wanted) {
  const SafetensorsFile file(path);
  Data data{std::filesystem::path(path).stem().string(), {}, {}, true};
  data.attention.scale = softmax_scale(file);
  std::string names;
  for (const std::string& name : layer_names(file)) {
    names += (names.empty() ? "" : ", ") + (name.empty() ? "one without a name" : name);
    const bool is_wanted = std::any_of(wanted.begin(), wanted.end(), [&](const std::string& layer) {
      return name == layer || name == "layer" + layer;
    });
    if (wanted.empty() || is_wanted) data.layers.push_back(load_layer(file, name));
  }
  if (data.layers.empty())
    throw std::runtime_error(path + ": no layer of the names asked for; there are: " + names);
  return data;
}

// 8 query and 2 KV heads of 64 channels, a layer per seed.
Data generate(const std::string& name, const Flags& flags) {
  Data data{"generated: " + name, {}, {}, false};
  for (Index seed = 1; seed <= flags.seeds; ++seed) {
    Generator generator(geometry_named(name), 64, static_cast<unsigned>(seed));
    data.layers.push_back(generator.layer(2, 4, flags.tokens));
    data.layers.back().name = "seed" + std::to_string(seed);
  }
  return data;
}

struct Result {
  std::string budget, method;
  Index keep_first;
  std::vector<Accuracy> layers;  // and all of them together, last
  std::vector<double> of_oracle;
  double speedup = std::numeric_limits<double>::quiet_NaN();  // of a whole prefill, over dense
};

class Evaluation {
 public:
  Evaluation(const Data& data, const Flags& flags, const std::optional<LayerPolicy>& policy,
             quoka::ThreadPool& threads)
      : data_(data),
        flags_(flags),
        threads_(threads),
        rules_{.past_per_budget = flags.past_per_budget,
               .one_sequence = data.one_sequence,
               .policy = policy},
        reference_(data.layers, flags.chunk, data.attention, threads) {}

  const DenseReference& reference() const { return reference_; }

  std::vector<Result> run() {
    const std::vector<std::string> methods = method_names(flags_.methods);
    const Index runs =
        std::ssize(flags_.budgets) * (1 + std::ssize(methods) * std::ssize(flags_.keep_first));
    Progress bar(data_.name, runs);
    Index done = 0;
    std::vector<Result> results;
    for (const std::string& budget : flags_.budgets) {
      const Result oracle = measure("oracle", budget, 0);
      bar.update(++done);
      for (const Index keep_first : flags_.keep_first)
        for (const std::string& method : methods) {
          Result& result = results.emplace_back(measure(method, budget, keep_first));
          for (std::size_t i = 0; i < result.layers.size(); ++i)
            result.of_oracle.push_back(result.layers[i].mass_kept / oracle.layers[i].mass_kept);
          bar.update(++done);
        }
    }
    if (flags_.rounds > 0) time(results);
    return results;
  }

 private:
  static MethodOptions options_of(const std::string& budget, Index keep_first) {
    MethodOptions options{.budget = parse_budget(budget)};
    options.quoka.keep_first = keep_first;
    return options;
  }
  Result measure(const std::string& method, const std::string& budget, Index keep_first) {
    const MethodOptions options = options_of(budget, keep_first);
    const auto sums = AccuracyRun(method, options, reference_, rules_, threads_).run();
    Result result{budget, method, keep_first, {}, {}};
    for (const AccuracySums& layer : sums) result.layers.push_back(layer.result());
    result.layers.push_back(overall(sums));
    return result;
  }
  void time(std::vector<Result>& results) {
    std::vector<CaptureMethod> methods;
    for (const Result& r : results)
      methods.push_back({r.method, options_of(r.budget, r.keep_first)});
    const Index len = reference_.len();
    Progress bar(data_.name + ", times", len * (flags_.rounds + 1));
    const CaptureSeconds seconds =
        time_captures(data_.layers, methods, flags_.chunk, flags_.rounds, data_.attention, threads_,
                      [&](int round, Index at) { bar.update(round * len + at); });
    for (std::size_t i = 0; i < results.size(); ++i)
      results[i].speedup = median_ratio(seconds[0], seconds[i + 1]);
  }

  const Data& data_;
  const Flags& flags_;
  quoka::ThreadPool& threads_;
  AccuracyRules rules_;
  DenseReference reference_;
};

// A share in percent, or "-".
std::string percent(double share, int decimals = 1) {
  return std::isnan(share) ? "-" : fmt::format("{:.{}f} %", 100.0 * share, decimals);
}

void print_overall(const std::vector<Result>& results, const std::string& budget, bool targets,
                   bool timed) {
  Table table(
      "selector\tfirst\tmass kept\tof oracle\tworst row\tworst 1 %\toutput error\toverlap\tKV "
      "pairs\t"
      "MFLOP\tof dense\tms");
  if (targets) table.more("targets kept");
  if (timed) table.more("speedup");
  for (const Result& r : results) {
    if (r.budget != budget) continue;
    const Accuracy& a = r.layers.back();
    table.row("{}\t{}\t{}\t{}\t{}\t{}\t{:.3f}\t{}\t{}\t{:.2f}\t{}\t{:.2f}", r.method, r.keep_first,
              percent(a.mass_kept), percent(r.of_oracle.back()), percent(a.worst_mass, 2),
              percent(a.worst_percent_mass), a.output_error, percent(a.overlap),
              percent(a.kv_pairs), 1e-6 * a.flops, percent(a.flops / a.dense_flops, 2),
              1e3 * a.seconds);
    if (targets) table.more("{}", percent(a.hits));
    if (timed) table.more("{:.2f}x", r.speedup);
  }
  table.print();
}

void print_layers(const std::vector<Result>& results, const std::string& budget,
                  const std::vector<LayerCapture>& layers) {
  Table table("mass kept / error\tfirst");
  for (const LayerCapture& layer : layers) table.more("{}", layer.name);
  for (const Result& r : results) {
    if (r.budget != budget) continue;
    table.row("{}\t{}", r.method, r.keep_first);
    for (std::size_t i = 0; i < layers.size(); ++i)
      table.more("{} / {:.3f}", percent(r.layers[i].mass_kept), r.layers[i].output_error);
  }
  std::cout << '\n';
  table.print();
}

// To nine decimals: more would be noise. Null where there is no number.
nlohmann::json number(double x) {
  return std::isfinite(x) ? nlohmann::json(std::round(1e9 * x) / 1e9) : nlohmann::json();
}

void save(const Data& data, const DenseReference& reference, const std::vector<Result>& results,
          Report& report) {
  const quoka::LayerShape shape = shape_of(data.layers.front());
  nlohmann::json names;
  for (const LayerCapture& layer : data.layers) names.push_back(layer.name);
  report["data"].push_back({{"name", data.name},
                            {"layers", names},
                            {"tokens", reference.len()},
                            {"q_heads", shape.q_heads},
                            {"kv_heads", shape.kv_heads},
                            {"head_dim", shape.head_dim},
                            {"dense_attention_seconds", number(reference.seconds())}});
  names.push_back("all");
  for (const Result& r : results)  // of generated layers, which are samples, all of them together
    for (std::size_t i = data.one_sequence ? 0 : data.layers.size(); i < r.layers.size(); ++i) {
      const Accuracy& a = r.layers[i];
      nlohmann::json& records = report["results"];
      records.push_back({{"data", data.name},
                         {"layer", names[i]},
                         {"budget", r.budget},
                         {"selector", r.method},
                         {"keep_first", r.keep_first},
                         {"chunks", a.chunks},
                         {"rows", a.rows},
                         {"mass_kept", number(a.mass_kept)},
                         {"mass_of_oracle", number(r.of_oracle[i])},
                         {"worst_mass", number(a.worst_mass)},
                         {"worst_percent_mass", number(a.worst_percent_mass)},
                         {"output_error", number(a.output_error)},
                         {"overlap", number(a.overlap)},
                         {"kv_pairs", number(a.kv_pairs)},
                         {"targets_kept", number(a.hits)},
                         {"scoring_flops", number(a.flops)},
                         {"dense_flops", number(a.dense_flops)},
                         {"scoring_seconds", number(a.seconds)}});
      if (i + 1 == r.layers.size() && std::isfinite(r.speedup))  // of all layers
        records.back()["speedup"] = number(r.speedup);
    }
}

void print(const Data& data, const DenseReference& reference, const std::vector<Result>& results,
           const Flags& flags) {
  const quoka::LayerShape shape = shape_of(data.layers.front());
  const bool targets = data.layers.front().targets.size() > 0;
  for (const std::string& budget : flags.budgets) {
    const auto first = std::find_if(results.begin(), results.end(),
                                    [&](const Result& r) { return r.budget == budget; });
    fmt::print(
        "\n{}: {} layer{}, {} tokens, {} query heads, {} KV heads, head_dim {}; budget {}, chunk "
        "{}, {} chunks measured\n\n",
        data.name, data.layers.size(), data.layers.size() == 1 ? "" : "s", reference.len(),
        shape.q_heads, shape.kv_heads, shape.head_dim, budget, flags.chunk,
        first->layers.back().chunks);
    if (first->layers.back().chunks == 0) {
      std::cout << "No chunk has a past longer than " << flags.past_per_budget
                << " budgets: nothing was measured.\n";
      continue;
    }
    print_overall(results, budget, targets, flags.rounds > 0);
    if (data.layers.size() > 1) print_layers(results, budget, data.layers);
  }
}

constexpr const char* legend =
    "\nfirst: first keys that are kept whatever their score (first_recent and less_is_more always "
    "keep 4). Mass kept: share of\nthe past's softmax mass on the selected keys, mean over the "
    "rows (query, head) of layers that select; of oracle: against the\noracle's, without forced "
    "keys; worst row: the least; worst 1 %: mean of the worst hundredth. Output error: |out - "
    "dense| / |dense|.\nOverlap: share of the oracle's keys. KV pairs: (query, key) pairs "
    "attended, "
    "of dense attention's. MFLOP and ms: of choosing and of\nkeeping what it needs, per chunk and "
    "layer, in CPU time of one thread (support/scoring_flops.hpp); of dense: against dense\n"
    "attention's FLOPs. Targets kept: of the keys that queries were made to retrieve. Speedup: of "
    "a "
    "whole prefill over dense.\n";

// How many of these layers the policy speaks of. Throws std::invalid_argument for another model's policy, and
// for names without numbers.
std::string policy_of(const Data& data, const LayerPolicy& policy) {
  const quoka::LayerShape shape = shape_of(data.layers.front());
  policy.check_shape(shape.q_heads, shape.kv_heads, shape.head_dim);
  Index dense = 0, own = 0;
  for (const Index number : layer_numbers(data.layers)) {
    const bool is_dense = policy.dense.contains(number);
    dense += is_dense ? 1 : 0;
    own += !is_dense && policy.budgets.contains(number) ? 1 : 0;
  }
  return fmt::format("{} of {} layers dense, {} with a budget of their own", dense,
                     data.layers.size(), own);
}

int calibrate(const Flags& flags, Report& report) {
  if (flags.files.size() != 1 || !flags.generated.empty())
    refuse("--calibrate takes one dump, here are ", flags.files.size(), " and ",
           flags.generated.size(), " generated geometries");
  const auto methods = method_names(flags.methods);
  if (methods.size() != 1)
    refuse("--calibrate takes one selector, such as --methods quoka.recommended; \"", flags.methods,
           "\" is ", methods.size());
  if (flags.keep_first.size() > 1)
    refuse("--calibrate takes one number as --keep-first, here are ", flags.keep_first.size());
  const auto ladder = given_ladder(flags.budgets);
  const Data data = load(flags.files.front(), flags.layers);
  (void)layer_numbers(data.layers);  // refuses names before any work
  MethodOptions options;
  if (!flags.keep_first.empty()) options.quoka.keep_first = flags.keep_first.front();

  quoka::ThreadPool threads(flags.threads);
  const DenseReference reference(data.layers, flags.chunk, data.attention, threads);
  const Calibration calibration = [&] {
    Progress bar(data.name, std::ssize(data.layers));
    return calibrate_capture(reference, methods.front(), options, ladder, threads,
                             [&](Index done) { bar.update(done); });
  }();
  fmt::print("{}: {} tokens, chunk {}, {}, first keys kept {}, tolerance {}\n\n", data.name,
             reference.len(), flags.chunk, methods.front(), options.quoka.keep_first,
             flags.tolerance);
  calibration.print(std::cout, flags.tolerance);
  write_policy(flags.calibrate, calibration.policy(flags.tolerance), std::cout);
  std::cout << "A layer of the model that is not in the dump gets " << calibration.budget(0)
            << ", unmeasured.\n";
  report.add({{"data", data.name},
              {"selector", methods.front()},
              {"keep_first", options.quoka.keep_first},
              {"tokens", reference.len()},
              {"chunk", flags.chunk},
              {"tolerance", flags.tolerance},
              {"results", calibration.results()}});
  return 0;
}

int run(Flags& flags, Report& report) {
  if (!flags.calibrate.empty()) return calibrate(flags, report);
  if (flags.keep_first.empty()) flags.keep_first = {0, 4};
  if (flags.files.empty() && flags.generated.empty())
    flags.files.push_back(QUOKA_EXAMPLES_DATA "/tinyllama_passkey_2046_layer11.safetensors");
  if (flags.generated == std::vector<std::string>{"all"}) {
    flags.generated.clear();
    for (const auto& geometry : geometries()) flags.generated.push_back(geometry.name);
  }
  std::optional<LayerPolicy> policy;
  if (!flags.policy.empty()) {
    policy = read_policy(flags.policy);
    if (!flags.generated.empty()) refuse("--policy is for dumps: generated layers have no numbers");
    for (const std::string& method : method_names(flags.methods)) require_fits(method, *policy);
  }
  quoka::ThreadPool threads(flags.threads);
  report.add({{"chunk", flags.chunk},
              {"n_queries", quoka::QuokaOptions{}.n_queries},
              {"past_per_budget", flags.past_per_budget},
              {"threads", flags.threads}});
  if (flags.rounds > 0) report["rounds"] = flags.rounds;
  if (policy) {
    std::ifstream file(flags.policy);
    report.add({{"policy_file", flags.policy}, {"policy", nlohmann::json::parse(file)}});
  }
  const auto evaluate = [&](const Data& data) {
    const std::string by_policy = policy ? policy_of(data, *policy) : "";
    Evaluation evaluation(data, flags, policy, threads);
    const std::vector<Result> results = evaluation.run();
    if (policy) std::cout << "\nBy " << flags.policy << ": " << by_policy << ".\n";
    print(data, evaluation.reference(), results, flags);
    save(data, evaluation.reference(), results, report);
  };
  for (const std::string& file : flags.files) evaluate(load(file, flags.layers));
  for (const std::string& name : flags.generated) evaluate(generate(name, flags));
  std::cout << legend;
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  Flags flags;
  Program app(
      argc, argv,
      "Attention mass kept, output error, overlap with the oracle and cost of selectors, on "
      "recorded or generated queries, keys and values");
  app.add_option(
         "files", flags.files,
         "safetensors dumps with NAME.q, NAME.k, NAME.v per layer, or q, k, v; without any, "
         "and without --generated, the committed capture")
      ->check(CLI::ExistingFile);
  app.add_option("--methods", flags.methods,
                 "default, all, ablations, or names separated by commas (support/methods.hpp)")
      ->capture_default_str();
  app.add_option("--budgets", flags.budgets, "keys per KV head: counts (256) or fractions (0.125)")
      ->delimiter(',')
      ->capture_default_str();
  app.add_option("--keep-first", flags.keep_first,
                 "each method once with each: first keys that are always kept; without it 0 and 4, "
                 "with --calibrate 0")
      ->delimiter(',')
      ->check(CLI::NonNegativeNumber);
  app.add_option("--layers", flags.layers, "layers of the dumps: 6,11; all if absent")
      ->delimiter(',');
  app.add_option("--generated", flags.generated,
                 "all, or geometries: paper, heads, isotropic, adverse, norms, outliers")
      ->delimiter(',');
  app.add_option("--tokens", flags.tokens, "of each generated layer")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--seeds", flags.seeds, "generated layers per geometry")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--chunk", flags.chunk, "tokens per chunk")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--past-per-budget", flags.past_per_budget,
                 "measure chunks whose past is longer than this many budgets; 0: all chunks")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  add_threads(app, flags.threads);
  app.add_option("--rounds", flags.rounds,
                 "timed repetitions of whole prefills, whose speedups over dense are then reported")
      ->check(whole_number(0, 1000))
      ->capture_default_str();
  auto* const policy =
      app.add_option("--policy", flags.policy,
                     "a file of --calibrate: its dense layers and budgets of "
                     "single layers; --budgets and --methods hold in place of its budget and mode")
          ->check(CLI::ExistingFile);
  auto* const calibrate =
      app.add_option("--calibrate", flags.calibrate,
                     "measure the one selector of --methods on the layers of one dump, at the "
                     "ascending --budgets, over all chunks with a past, and write a policy there")
          ->excludes(policy);
  app.add_option("--tolerance", flags.tolerance, "error of a layer's output that is accepted")
      ->needs(calibrate)
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  return app.run([&] { return run(flags, app.report); });
}
