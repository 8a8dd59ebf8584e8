// The main job: prefill with QuoKA against dense attention, on the queries, keys and values of a
// real model. Prints what QuoKA costs in accuracy and what it gains in time, per budget; then the
// time alone for longer prompts of the same shape. Takes any dump of yours:
// examples/data/README.md.
//
// Under mpirun the keys of each layer are spread over the processes, for the times; what selection costs
// in accuracy is the same on one. There is quoka alone then (context_parallel/sharded_prefill.hpp).

#include "support/accuracy.hpp"
#include "support/capture_times.hpp"
#include "support/mpi_job.hpp"
#include "support/paired_steps.hpp"
#include "support/program.hpp"
#include "support/progress.hpp"
#include "support/selector_flags.hpp"
#include "support/table.hpp"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <stdexcept>

namespace {

using namespace quoka_examples;

struct Flags {
  std::string file = QUOKA_EXAMPLES_DATA "/tinyllama_passkey_2046_layer11.safetensors";
  std::string budgets = "128,256,512";
  std::vector<Index> lengths{8192, 32768};
  std::string long_budget = "1024";
  std::string selectors = "quoka,quoka.balanced,quoka.recommended";
  Index chunk = 128;
  int threads = 2;
  int rounds = 3;
  quoka::QuokaOptions quoka;
  Communicator* ranks = nullptr;
};

struct CaptureResult {
  std::string budget, method;
  Accuracy accuracy;
  double dense_seconds, seconds, speedup;
};

MethodOptions method_options(const Flags& flags, const std::string& budget) {
  return {.budget = parse_budget(budget), .quoka = flags.quoka, .ranks = flags.ranks};
}

// Finite numbers may still be too large for attention in float: its result is NaN then. Throws
// std::runtime_error in that case.
void require_numbers(const Accuracy& accuracy, const std::vector<LayerCapture>& layers) {
  if (!std::isnan(accuracy.output_error) && !std::isnan(accuracy.mass_kept)) return;
  const auto largest = [&](Tensor<float> LayerCapture::*part) {
    float most = 0.0f;
    for (const LayerCapture& layer : layers)
      for (Index i = 0; i < (layer.*part).size(); ++i)
        most = std::max(most, std::abs((layer.*part).data()[i]));
    return most;
  };
  throw std::runtime_error(
      fmt::format("attention overflows float: |q| is up to {:g}, |k| up to {:g}, |v| up to {:g}",
                  largest(&LayerCapture::q), largest(&LayerCapture::k), largest(&LayerCapture::v)));
}

std::vector<CaptureResult> run_capture(const std::vector<LayerCapture>& layers, const Flags& flags,
                                       const quoka::AttentionOptions& attention,
                                       quoka::ThreadPool& threads) {
  std::vector<CaptureMethod> methods;
  std::vector<CaptureResult> results;
  for (const std::string& budget : parse_budgets(flags.budgets))
    for (const std::string& method : parse_methods(flags.selectors)) {
      methods.push_back({method, method_options(flags, budget)});
      results.push_back({budget, method, {}, 0.0, 0.0, 0.0});
    }
  const Index len = layers.front().q.dimension(2);
  DenseReference reference(layers, flags.chunk, attention, threads);
  const AccuracyRules whole_prompt{.past_per_budget = 0.0, .overlap = false};
  for (std::size_t i = 0; i < methods.size(); ++i) {
    MethodOptions options = methods[i].options;
    options.ranks = nullptr;
    results[i].accuracy =
        overall(AccuracyRun(methods[i].method, options, reference, whole_prompt, threads).run());
    require_numbers(results[i].accuracy, layers);
  }
  Progress bar("prefill", len * (flags.rounds + 1));
  const CaptureSeconds seconds =
      time_captures(layers, methods, flags.chunk, flags.rounds, attention, threads,
                    [&](int round, Index at) { bar.update(round * len + at); });
  for (std::size_t i = 0; i < methods.size(); ++i) {
    results[i].dense_seconds = median(seconds[0]);
    results[i].seconds = median(seconds[i + 1]);
    results[i].speedup = median_ratio(seconds[0], seconds[i + 1]);
  }
  return results;
}

struct LengthResult {
  Index length;
  std::string method;
  double dense_seconds, seconds, speedup;
};

std::vector<LengthResult> run_lengths(const quoka::LayerShape& shape, const Flags& flags,
                                      quoka::ThreadPool& threads) {
  std::vector<LengthResult> results;
  GeneratedPrompt prompt(shape, flags.chunk);
  const MethodOptions options = method_options(flags, flags.long_budget);
  for (const Index length : flags.lengths) {
    std::vector<TimedMethod> methods;
    methods.push_back(timed_method("dense", shape, options));
    for (const std::string& name : parse_methods(flags.selectors))
      methods.push_back(timed_method(name, shape, options));
    const auto steps = filled_steps(methods, prompt, length - flags.chunk, threads);
    const auto positions = measured_positions(length, flags.chunk, options.budget.count(length), 3);
    const auto totals = time_prefills(steps, positions, length, flags.chunk, flags.rounds).totals;
    for (std::size_t m = 1; m < methods.size(); ++m)
      results.push_back({length, methods[m].name, median(totals[0]), median(totals[m]),
                         median_ratio(totals[0], totals[m])});
  }
  return results;
}

void print(const std::vector<CaptureResult>& captures, const std::vector<LengthResult>& lengths,
           const Flags& flags) {
  Table table("budget\tselector\tKV pairs used\tmass kept\toutput error\tdense\ttime\tspeedup");
  for (const CaptureResult& r : captures)
    table.row("{}\t{}\t{:.1f} %\t{:.1f} %\t{:.3f}\t{:.1f} ms\t{:.1f} ms\t{:.2f}x", r.budget,
              r.method, 100.0 * r.accuracy.kv_pairs, 100.0 * r.accuracy.mass_kept,
              r.accuracy.output_error, 1e3 * r.dense_seconds, 1e3 * r.seconds, r.speedup);
  table.print();
  std::cout << "\nKV pairs used: (query, key) pairs attended, of dense. Mass kept: share of the "
               "past's softmax mass on the\n"
               "selected keys, mean over rows whose past is longer than the budget. Output error: "
               "|out - dense| / |dense|.\n";
  if (lengths.empty()) return;
  std::cout << "\nLonger prompts of the same shape (generated keys, budget " << flags.long_budget
            << "; chunk steps timed at positions over the prompt, integrated):\n\n";
  Table longer("tokens\tselector\tdense\ttime\tspeedup");
  for (const LengthResult& r : lengths)
    longer.row("{}\t{}\t{:.2f} s\t{:.2f} s\t{:.2f}x", r.length, r.method, r.dense_seconds,
               r.seconds, r.speedup);
  longer.print();
}

void save(const std::vector<CaptureResult>& captures, const std::vector<LengthResult>& lengths,
          const Flags& flags, Report& report) {
  report.add({{"file", std::filesystem::path(flags.file).filename().string()},
              {"chunk", flags.chunk},
              {"threads", flags.threads},
              {"processes", flags.ranks ? flags.ranks->ranks() : 1},
              {"n_queries", flags.quoka.n_queries}});
  for (const CaptureResult& r : captures)
    report["capture"].push_back({{"budget", r.budget},
                                 {"selector", r.method},
                                 {"dense_seconds", r.dense_seconds},
                                 {"seconds", r.seconds},
                                 {"speedup", r.speedup},
                                 {"output_error", r.accuracy.output_error},
                                 {"mass_kept", r.accuracy.mass_kept},
                                 {"worst_mass", r.accuracy.worst_mass},
                                 {"kv_pairs_share", r.accuracy.kv_pairs}});
  for (const LengthResult& r : lengths)
    report["generated"].push_back({{"tokens", r.length},
                                   {"budget", flags.long_budget},
                                   {"selector", r.method},
                                   {"dense_seconds", r.dense_seconds},
                                   {"seconds", r.seconds},
                                   {"speedup", r.speedup}});
}

int run(const Flags& flags, Report& report) {
  const SafetensorsFile file(flags.file);
  const std::vector<LayerCapture> layers = load_layers(file);
  quoka::AttentionOptions attention;
  attention.scale = softmax_scale(file);
  quoka::ThreadPool threads(flags.threads);

  const quoka::LayerShape shape = shape_of(layers.front());
  fmt::print(
      "{}: {} layer{}, {} tokens, {} query heads, {} KV heads, head_dim {}; chunk {}, {} queries, "
      "{}{} thread{}\n\n",
      std::filesystem::path(flags.file).filename().string(), layers.size(),
      layers.size() == 1 ? "" : "s", layers.front().q.dimension(2), shape.q_heads, shape.kv_heads,
      shape.head_dim, flags.chunk, flags.quoka.n_queries,
      flags.ranks ? fmt::format("{} processes of ", flags.ranks->ranks()) : "", flags.threads,
      flags.threads == 1 ? "" : "s");
  const auto captures = run_capture(layers, flags, attention, threads);
  const auto lengths = run_lengths(shape, flags, threads);
  print(captures, lengths, flags);
  save(captures, lengths, flags, report);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const MpiJob job(&argc, &argv);
  Flags flags;
  flags.ranks = job.ranks();
  if (flags.ranks) flags.threads = job.threads(), flags.selectors = "quoka";
  Program app(argc, argv,
              "Prefill with QuoKA against dense attention, on recorded queries, keys and values");
  app.add_option("file", flags.file,
                 "safetensors dump with NAME.q, NAME.k, NAME.v per layer, or q, k, v")
      ->check(CLI::ExistingFile);
  app.add_option("--budgets", flags.budgets, "keys per KV head: counts (1024) or fractions (0.25)")
      ->check(accepted_by(parse_budgets))
      ->capture_default_str();
  app.add_option("--lengths", flags.lengths, "longer prompts to time, generated; 0: none")
      ->delimiter(',')
      ->allow_extra_args(false)  // a file may follow
      ->check(whole_number(0, 10'000'000))
      ->capture_default_str();
  app.add_option("--long-budget", flags.long_budget, "budget for those")
      ->check(accepted_by(parse_budget))
      ->capture_default_str();
  app.add_option("--selectors", flags.selectors, "all, or names separated by commas")
      ->capture_default_str();
  add_run_flags(app, flags.chunk, flags.threads, flags.rounds);
  add_quoka_flags(app, flags.quoka);
  return app.run(
      [&] {
        std::erase_if(flags.lengths, [&](Index length) { return length < flags.chunk; });
        if (!job.is_first()) app.report.discard();
        return run(flags, app.report);
      },
      [&](const std::string& name, const std::exception& error) {
        return job.failed(name, error);
      });
}
