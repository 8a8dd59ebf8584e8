// Dense attention against a selector over whole prefills of one layer, paired and interleaved.
//
// For each prompt length, chunk steps (select, attend, append) of both are timed in turn at cache
// lengths spread over the prompt, round by round, and integrated to the whole prefill; ratios are
// taken within a round and their median is printed. The machine's FMA peak is measured between the
// rounds' positions. Keys, values and queries are generated (normal): selected keys are then
// scattered evenly over the cache, which is the hardest case for the memory system.

#include "machine.hpp"

#include "support/json_file.hpp"
#include "support/paired_steps.hpp"
#include "support/progress.hpp"
#include "support/selector_flags.hpp"
#include "support/table.hpp"

#include <quoka/quoka.hpp>

#include <CLI/CLI.hpp>

#include <iostream>

namespace {

using namespace quoka_examples;

struct Flags {
  std::string shape_name = "qwen3-4b";
  quoka::LayerShape shape;
  std::vector<Index> lengths{4096, 8192, 32768};
  std::string budget = "1024";
  Index chunk = 128;
  Index positions = 4;
  int threads = 1;
  int rounds = 5;
  std::string json, command;
  quoka::QuokaOptions quoka;
};

const std::map<std::string, quoka::LayerShape> shapes{
    {"qwen3-4b", {.q_heads = 32, .kv_heads = 8, .head_dim = 128}},
    {"llama-3.2-3b", {.q_heads = 24, .kv_heads = 8, .head_dim = 128}},
    {"qwen2.5-7b", {.q_heads = 28, .kv_heads = 4, .head_dim = 128}},
    {"tinyllama", {.q_heads = 32, .kv_heads = 4, .head_dim = 64}},
};

// Flags that are given overrule the named shape.
quoka::LayerShape resolve_shape(const Flags& flags) {
  quoka::LayerShape shape = shapes.at(flags.shape_name);
  if (flags.shape.q_heads > 0) shape.q_heads = flags.shape.q_heads;
  if (flags.shape.kv_heads > 0) shape.kv_heads = flags.shape.kv_heads;
  if (flags.shape.head_dim > 0) shape.head_dim = flags.shape.head_dim;
  if (flags.shape.v_dim > 0) shape.v_dim = flags.shape.v_dim;
  shape.batch = flags.shape.batch;
  return shape;
}

// Of a dense chunk step: 2 FLOPs per multiply-add of Q K^T and P V, causal within the chunk.
double dense_flops(const quoka::LayerShape& shape, Index kv_len, Index q_len) {
  const double keys = static_cast<double>(q_len) *
                      (static_cast<double>(kv_len) + static_cast<double>(q_len + 1) / 2.0);
  const Index v_dim = shape.v_dim > 0 ? shape.v_dim : shape.head_dim;
  return 2.0 * static_cast<double>(shape.batch * shape.q_heads * (shape.head_dim + v_dim)) * keys;
}

struct Result {
  Index length = 0;
  std::vector<Index> positions;
  StepSeconds seconds;
  double dense_seconds = 0.0, selected_seconds = 0.0, speedup = 0.0;
  double last_chunk_speedup = 0.0, dense_gflops = 0.0, fma_peak_gflops = 0.0;
  double scratch_mib = 0.0;
};

Result measure(Index length, const Flags& flags, quoka::ThreadPool& threads) {
  quoka::QuokaOptions options = flags.quoka;
  options.budget = parse_budget(flags.budget);
  quoka::ChunkedPrefill<quoka::DenseSelector> dense(flags.shape);
  quoka::ChunkedPrefill<quoka::QuokaSelector> selected(flags.shape, options);
  GeneratedPrompt prompt(flags.shape, flags.chunk);
  prompt.fill(dense, length - flags.chunk);
  prompt.fill(selected, length - flags.chunk);

  Result result;
  result.length = length;
  result.positions =
      measured_positions(length, flags.chunk, options.budget.keys(length), flags.positions);
  Progress bar(std::to_string(length) + " tokens",
               static_cast<std::int64_t>(result.positions.size()) * (flags.rounds + 1));
  result.fma_peak_gflops = quoka_bench::fma_peak_gflops();
  result.seconds = time_steps(
      {timed_step(dense, prompt, threads), timed_step(selected, prompt, threads)}, result.positions,
      flags.rounds, [&](std::size_t p, int round) {
        bar.update(static_cast<std::int64_t>(p) * (flags.rounds + 1) + round);
        if (round == flags.rounds)
          result.fma_peak_gflops = std::max(result.fma_peak_gflops, quoka_bench::fma_peak_gflops());
      });
  const auto dense_totals =
      prefill_seconds(result.positions, result.seconds[0], length, flags.chunk);
  const auto totals = prefill_seconds(result.positions, result.seconds[1], length, flags.chunk);
  result.dense_seconds = median(dense_totals);
  result.selected_seconds = median(totals);
  result.speedup = median_ratio(dense_totals, totals);
  result.last_chunk_speedup = median_ratio(result.seconds[0].front(), result.seconds[1].front());
  result.dense_gflops = dense_flops(flags.shape, result.positions.front(), flags.chunk) /
                        median(result.seconds[0].front()) * 1e-9;
  result.scratch_mib = static_cast<double>(selected.scratch_bytes()) / 1048576.0;
  return result;
}

nlohmann::json to_json(const std::vector<Result>& results, const Flags& flags) {
  nlohmann::json json{{"command", flags.command},
                      {"cpu", quoka_bench::cpu_name()},
                      {"build", quoka_bench::build_description()},
                      {"q_heads", flags.shape.q_heads},
                      {"kv_heads", flags.shape.kv_heads},
                      {"head_dim", flags.shape.head_dim},
                      {"batch", flags.shape.batch},
                      {"chunk", flags.chunk},
                      {"budget", flags.budget},
                      {"n_queries", flags.quoka.n_queries},
                      {"threads", flags.threads},
                      {"rounds", flags.rounds}};
  for (const Result& r : results)
    json["lengths"].push_back(
        {{"tokens", r.length},
         {"dense_seconds", r.dense_seconds},
         {"quoka_seconds", r.selected_seconds},
         {"speedup", r.speedup},
         {"last_chunk_speedup", r.last_chunk_speedup},
         {"dense_gflops", r.dense_gflops},
         {"fma_peak_gflops_1_core", r.fma_peak_gflops},
         {"scratch_mib", r.scratch_mib},
         {"positions", r.positions},
         {"step_seconds", {{"dense", r.seconds[0]}, {"quoka", r.seconds[1]}}}});
  return json;
}

int run(Flags& flags) {
  flags.shape = resolve_shape(flags);
  quoka::ThreadPool threads(flags.threads);
  std::cout << quoka_bench::cpu_name() << "; " << quoka_bench::build_description() << "\n"
            << "one layer, " << flags.shape.q_heads << " query heads, " << flags.shape.kv_heads
            << " KV heads, head_dim " << flags.shape.head_dim << ", batch " << flags.shape.batch
            << "; chunk " << flags.chunk << ", budget " << flags.budget << ", "
            << flags.quoka.n_queries << " queries, " << flags.threads
            << (flags.threads == 1 ? " thread" : " threads") << "; medians of " << flags.rounds
            << "\n\n";
  std::vector<Result> results;
  std::vector<std::vector<std::string>> rows;
  for (const Index length : flags.lengths) {
    quoka::detail::require_at_least("a prompt's length", length, flags.chunk);
    const Result& r = results.emplace_back(measure(length, flags, threads));
    rows.push_back({std::to_string(r.length), fixed(r.dense_seconds, 2) + " s",
                    fixed(r.selected_seconds, 2) + " s", fixed(r.speedup, 2) + "x",
                    fixed(r.last_chunk_speedup, 2) + "x", fixed(r.dense_gflops, 1),
                    fixed(100.0 * r.dense_gflops / (r.fma_peak_gflops * flags.threads), 1) + " %",
                    fixed(r.scratch_mib, 1) + " MiB"});
  }
  print_table(std::cout,
              {"tokens", "dense", "QuoKA", "prefill speedup", "last chunk", "dense GFLOP/s",
               "of FMA peak", "scratch"},
              rows);
  if (!flags.json.empty()) write_json(flags.json, to_json(results, flags));
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  Flags flags;
  for (int i = 0; i < argc; ++i) flags.command += (i == 0 ? "" : " ") + std::string(argv[i]);
  CLI::App app(
      "Whole prefills of one layer: dense attention against QuoKA, paired and interleaved");
  app.add_option("--shape", flags.shape_name, "qwen3-4b | llama-3.2-3b | qwen2.5-7b | tinyllama")
      ->check(CLI::IsMember(shapes))
      ->capture_default_str();
  app.add_option("--q-heads", flags.shape.q_heads, "instead of the shape's")
      ->check(CLI::PositiveNumber);
  app.add_option("--kv-heads", flags.shape.kv_heads, "instead of the shape's")
      ->check(CLI::PositiveNumber);
  app.add_option("--head-dim", flags.shape.head_dim, "instead of the shape's")
      ->check(CLI::PositiveNumber);
  app.add_option("--v-dim", flags.shape.v_dim, "channels of a value, if not head-dim")
      ->check(CLI::PositiveNumber);
  app.add_option("--batch", flags.shape.batch)->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--lengths", flags.lengths, "prompt lengths in tokens")
      ->delimiter(',')
      ->capture_default_str();
  app.add_option("--budget", flags.budget, "keys per KV head: a count (1024) or a fraction (0.25)")
      ->capture_default_str();
  app.add_option("--chunk", flags.chunk, "tokens per chunk")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--positions", flags.positions, "cache lengths measured beyond the budget")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--threads", flags.threads)->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--rounds", flags.rounds, "timed repetitions")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--json", flags.json, "write every measured time there");
  add_quoka_flags(app, flags.quoka);
  CLI11_PARSE(app, argc, argv);
  try {
    return run(flags);
  } catch (const std::exception& error) {
    std::cerr << "speedup: " << error.what() << '\n';
    return 1;
  }
}
