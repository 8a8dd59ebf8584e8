// Dense attention against selectors over whole prefills of one layer, paired and interleaved.
//
// For each prompt length, chunk steps (select, attend, append) of all are timed in turn at cache
// lengths spread over the prompt, round by round, and integrated to the whole prefill; ratios are
// taken within a round and their median is printed. The machine's FMA peak is measured between the
// rounds' positions. Keys, values and queries are generated (normal): selected keys are then
// scattered evenly over the cache, which is the hardest case for the memory system.

#include "support/machine.hpp"

#include <quoka/packing/byte_formats.hpp>
#include <quoka/formats/element_rows.hpp>

#include "support/build_info.hpp"
#include "support/json_file.hpp"
#include "support/paired_steps.hpp"
#include "support/progress.hpp"
#include "support/require.hpp"
#include "support/run_program.hpp"
#include "support/selector_flags.hpp"
#include "support/table.hpp"

#include <CLI/CLI.hpp>

#include <iostream>
#include <span>

namespace {

using namespace quoka_examples;

struct Flags {
  std::string shape_name = "qwen3-4b";
  quoka::LayerShape shape;
  std::vector<Index> lengths{4096, 8192, 32768};
  std::string budget = "1024";
  std::string selectors = "quoka";
  std::vector<std::string> formats{"float"};
  Index layer_count = 36;
  Index chunk = 128;
  Index positions = 4;
  int threads = 1;
  int rounds = 5;
  quoka::Arithmetic arithmetic = quoka::Arithmetic::single;
  std::string json, command;
  quoka::QuokaOptions quoka;
};

const std::map<std::string, quoka::Arithmetic> arithmetics{{"single", quoka::Arithmetic::single},
                                                           {"fixed16", quoka::Arithmetic::fixed16}};

const std::map<std::string, quoka::LayerShape> shapes{
    {"qwen3-4b", {.q_heads = 32, .kv_heads = 8, .head_dim = 128}},
    {"llama-3.2-3b", {.q_heads = 24, .kv_heads = 8, .head_dim = 128}},
    {"qwen2.5-7b", {.q_heads = 28, .kv_heads = 4, .head_dim = 128}},
    {"tinyllama", {.q_heads = 32, .kv_heads = 4, .head_dim = 64}},
};

// What the cache keeps: keys and values alike.
const std::map<std::string, const quoka::Format*> formats{
    {"float", &quoka::format_of<float>()},
    {"half", &quoka::format_of<Eigen::half>()},
    {"bfloat16", &quoka::format_of<Eigen::bfloat16>()},
    {"q8_0", &quoka::q8_0_format()},
    {"u8", &quoka::u8_format()},
    {"i8", &quoka::i8_format()},
    {"i8_channel", &quoka::i8_channel_format()},
    {"e4m3", &quoka::e4m3_format()},
};

// Scales of formats that keep them apart, for normal keys and values of `dim` channels; good for the
// whole run.
std::span<const float> scales_for(const quoka::Format& format, Index dim) {
  static const std::vector<float> scales(4096, 6.0f / 127.0f);
  const Index count = format.scales_apart(dim);
  require_at_most("the channels of " + std::string(format.name), count, "what this has scales for",
                  std::ssize(scales));
  return std::span(scales).first(static_cast<std::size_t>(count));
}

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

// One method over a cache of one format, at one prompt length. The first of a length is dense over the
// first format: speedups are against it.
struct Result {
  Index length = 0;
  std::string method, format;
  std::vector<Index> positions;
  std::vector<std::vector<double>> seconds;  // [position][round]
  double prefill_seconds = 0.0, speedup = 1.0, last_chunk_seconds = 0.0, last_chunk_speedup = 1.0;
  double scratch_mib = 0.0, kept_mib = 0.0;
  double gflops = 0.0, fma_peak_gflops = 0.0;  // of dense
};

std::vector<Result> measure(Index length, const Flags& flags, quoka::ThreadPool& threads) {
  const MethodOptions options{.budget = parse_budget(flags.budget), .quoka = flags.quoka};
  const quoka::AttentionOptions attention{.arithmetic = flags.arithmetic};
  std::vector<TimedMethod> methods;
  std::vector<std::string> format_of;
  for (const std::string& format : flags.formats) {
    quoka::LayerShape shape = flags.shape;
    shape.k_format = shape.v_format = formats.at(format);
    shape.k_scales = scales_for(*shape.k_format, shape.head_dim);
    shape.v_scales = scales_for(*shape.v_format, shape.v_dim > 0 ? shape.v_dim : shape.head_dim);
    std::vector<std::string> names{"dense"};
    for (const std::string& name : parse_methods(flags.selectors)) names.push_back(name);
    for (const std::string& name : names) {
      methods.push_back(timed_method(name, shape, options, flags.layer_count, attention));
      format_of.push_back(format);
    }
  }
  GeneratedPrompt prompt(flags.shape, flags.chunk);
  std::vector<TimedStep> steps;
  for (TimedMethod& method : methods) {
    for (auto& layer : method.layers) prompt.fill(*layer, length - flags.chunk);
    steps.push_back(timed_step(method.layers, method.weights, prompt, threads));
  }
  const auto positions =
      measured_positions(length, flags.chunk, options.budget.least(length), flags.positions);
  Progress bar(std::to_string(length) + " tokens",
               static_cast<std::int64_t>(positions.size()) * (flags.rounds + 1));
  double peak = quoka_examples::fma_peak_gflops();
  const StepSeconds seconds =
      time_steps(steps, positions, flags.rounds, [&](std::size_t p, int round) {
        bar.update(static_cast<std::int64_t>(p) * (flags.rounds + 1) + round);
        if (round == flags.rounds) peak = std::max(peak, quoka_examples::fma_peak_gflops());
      });

  std::vector<Result> results;
  const auto dense = prefill_seconds(positions, seconds[0], length, flags.chunk);
  for (std::size_t m = 0; m < methods.size(); ++m) {
    const auto totals = prefill_seconds(positions, seconds[m], length, flags.chunk);
    Result& r =
        results.emplace_back(Result{length, methods[m].name, format_of[m], positions, seconds[m]});
    r.prefill_seconds = median(totals);
    r.speedup = median_ratio(dense, totals);
    r.last_chunk_seconds = median(seconds[m].front());
    r.last_chunk_speedup = median_ratio(seconds[0].front(), seconds[m].front());
    for (const auto& layer : methods[m].layers) {
      constexpr double mib = 1048576.0;
      r.scratch_mib = std::max(r.scratch_mib, static_cast<double>(layer->scratch_bytes()) / mib);
      r.kept_mib = std::max(r.kept_mib, static_cast<double>(layer->kept_bytes()) / mib);
    }
    r.fma_peak_gflops = peak;
    if (methods[m].name == "dense")
      r.gflops =
          dense_flops(flags.shape, positions.front(), flags.chunk) / r.last_chunk_seconds * 1e-9;
  }
  return results;
}

nlohmann::json to_json(const std::vector<Result>& results, const Flags& flags) {
  nlohmann::json json{{"command", flags.command},
                      {"cpu", cpu_name()},
                      {"build", build_description()},
                      {"q_heads", flags.shape.q_heads},
                      {"kv_heads", flags.shape.kv_heads},
                      {"head_dim", flags.shape.head_dim},
                      {"batch", flags.shape.batch},
                      {"layer_count", flags.layer_count},
                      {"chunk", flags.chunk},
                      {"budget", flags.budget},
                      {"n_queries", flags.quoka.n_queries},
                      {"threads", flags.threads},
                      {"arithmetic", arithmetic_name(flags.arithmetic)},
                      {"rounds", flags.rounds}};
  for (const Result& r : results) {
    nlohmann::json& entry =
        json["results"].emplace_back(nlohmann::json{{"tokens", r.length},
                                                    {"selector", r.method},
                                                    {"format", r.format},
                                                    {"prefill_seconds", r.prefill_seconds},
                                                    {"speedup", r.speedup},
                                                    {"last_chunk_seconds", r.last_chunk_seconds},
                                                    {"last_chunk_speedup", r.last_chunk_speedup},
                                                    {"scratch_mib", r.scratch_mib},
                                                    {"kept_mib", r.kept_mib},
                                                    {"fma_peak_gflops_1_core", r.fma_peak_gflops},
                                                    {"positions", r.positions},
                                                    {"step_seconds", r.seconds}});
    if (r.gflops > 0.0) entry["gflops"] = r.gflops;
  }
  return json;
}

int run(Flags& flags) {
  flags.shape = resolve_shape(flags);
  quoka::ThreadPool threads(flags.threads);
  std::cout << cpu_name() << "; " << build_description() << "\n"
            << "one layer, " << flags.shape.q_heads << " query heads, " << flags.shape.kv_heads
            << " KV heads, head_dim " << flags.shape.head_dim << ", batch " << flags.shape.batch
            << "; chunk " << flags.chunk << ", budget " << flags.budget << ", "
            << flags.quoka.n_queries << " queries, " << flags.threads
            << (flags.threads == 1 ? " thread" : " threads") << ", a cache of "
            << flags.formats.front() << (flags.formats.size() > 1 ? " and others" : "")
            << ", attention in " << arithmetic_name(flags.arithmetic) << "; medians of "
            << flags.rounds << "\n\n";
  std::vector<Result> results;
  std::vector<std::vector<std::string>> rows;
  for (const Index length : flags.lengths) {
    require_at_least("a prompt's length", length, flags.chunk);
    for (const Result& r : measure(length, flags, threads)) {
      const double peak = r.fma_peak_gflops * flags.threads;
      const std::string over = flags.formats.size() > 1 ? " over " + r.format : "";
      rows.push_back({std::to_string(r.length), r.method + over, fixed(r.prefill_seconds, 2) + " s",
                      fixed(r.speedup, 2) + "x", fixed(1e3 * r.last_chunk_seconds, 2) + " ms",
                      fixed(r.last_chunk_speedup, 2) + "x", fixed(r.scratch_mib, 1) + " MiB",
                      fixed(r.kept_mib, 1) + " MiB", r.gflops > 0.0 ? fixed(r.gflops, 1) : "",
                      r.gflops > 0.0 ? fixed(100.0 * r.gflops / peak, 1) + " %" : ""});
      results.push_back(r);
    }
  }
  print_table(std::cout,
              {"tokens", "selector", "prefill", "speedup", "last chunk", "speedup", "scratch",
               "kept", "GFLOP/s", "of FMA peak"},
              rows);
  if (!flags.json.empty()) write_json(flags.json, to_json(results, flags));
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  Flags flags;
  flags.command = command_line(argc, argv);
  CLI::App app(
      "Whole prefills of one layer: dense attention against selectors, paired and interleaved");
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
  app.add_option("--selectors", flags.selectors, "all, or names separated by commas")
      ->capture_default_str();
  app.add_option("--formats", flags.formats, "of the cache, one or several separated by commas")
      ->delimiter(',')
      ->check(CLI::IsMember(formats))
      ->capture_default_str();
  app.add_option("--layers", flags.layer_count,
                 "of the model, for methods that choose at some layers for the others")
      ->check(CLI::Range(5, 1000))
      ->capture_default_str();
  app.add_option("--chunk", flags.chunk, "tokens per chunk")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--positions", flags.positions, "cache lengths measured beyond the budget")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--threads", flags.threads, "workers, the calling thread included")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--arithmetic", flags.arithmetic, "of attention, dense's too: single or fixed16")
      ->transform(CLI::CheckedTransformer(arithmetics));
  app.add_option("--rounds", flags.rounds, "timed repetitions")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--json", flags.json, "write every measured time there");
  add_quoka_flags(app, flags.quoka);
  return run_program(app, argc, argv, [&] { return run(flags); });
}
