// The paper's ablations, and a few more, one switch at a time: what each choice of QuoKA's costs in
// accuracy and in time, on recorded queries, keys and values and on generated ones
// (support/generators.hpp).
//
// Every variant of one ablation runs in the same rounds, chunk by chunk, beside dense attention:
// share of the past's attention mass kept (mean, and the worst row), relative output error, speedup
// over dense (median of ratios). Prints tables in Markdown.

#include "support/accuracy.hpp"
#include "support/build_info.hpp"
#include "support/capture_times.hpp"
#include "support/generators.hpp"
#include "support/json_file.hpp"
#include "support/progress.hpp"
#include "support/run_program.hpp"
#include "support/selector_flags.hpp"
#include "support/table.hpp"

#include <CLI/CLI.hpp>

#include <filesystem>
#include <iostream>

namespace {

using namespace quoka_examples;

struct Flags {
  std::vector<std::string> captures{QUOKA_EXAMPLES_DATA
                                    "/tinyllama_passkey_2046_layer11.safetensors"};
  Index tokens = 4096;
  std::string budget = "256";
  int threads = 2;
  int rounds = 3;
  std::string json, command;
};

struct Data {
  std::string name;
  std::vector<LayerCapture> layers;
  quoka::AttentionOptions attention;
};

struct Variant {
  std::string ablation, value;
  Index chunk = 128;
  MethodOptions options;
  std::string method = "quoka";
};

std::vector<Variant> variants(const quoka::Budget& budget, Index len) {
  std::vector<Variant> all;
  const auto add = [&](const std::string& ablation, const std::string& value, auto&& set) {
    Variant& variant = all.emplace_back(Variant{ablation, value, 128, {}});
    variant.options.budget = budget;
    set(variant);
  };
  using quoka::Aggregation, quoka::GroupMode, quoka::QueryChoice, quoka::Scoring;
  add("paper's defaults", "", [](Variant&) {});
  add("scoring", "dot", [](Variant& v) { v.options.quoka.scoring = Scoring::dot; });
  add("aggregation", "mean", [](Variant& v) { v.options.quoka.aggregation = Aggregation::mean; });
  for (const Index n : {4, 8, 32, 64, 128})
    add("n_queries", std::to_string(n), [&](Variant& v) { v.options.quoka.n_queries = n; });
  add("group_mode", "shared", [](Variant& v) { v.options.quoka.group_mode = GroupMode::shared; });
  add("group_mode", "per_head",
      [](Variant& v) { v.options.quoka.group_mode = GroupMode::per_head; });
  add("query_choice", "uniform",
      [](Variant& v) { v.options.quoka.query_choice = QueryChoice::uniform; });
  add("query_choice", "last", [](Variant& v) { v.options.quoka.query_choice = QueryChoice::last; });
  add("query_choice", "dissimilar_and_last",
      [](Variant& v) { v.options.quoka.query_choice = QueryChoice::dissimilar_and_last; });
  add("window", "7", [](Variant& v) { v.options.quoka.top_k.window = 7; });
  add("keep_first", "4", [](Variant& v) { v.options.quoka.top_k.keep_first = 4; });
  for (const Index keys : {128, 256, 512, 1024, 2048, 4096})
    if (keys < len)
      add("budget", std::to_string(keys), [&](Variant& v) { v.options.budget = keys; });
  for (const Index chunk : {256, 512})
    add("chunk, n_queries a quarter of it", std::to_string(chunk), [&](Variant& v) {
      v.chunk = chunk;
      v.options.quoka.n_queries = chunk / 4;
    });
  add("other methods", "oracle", [](Variant& v) { v.method = "oracle"; });
  add("other methods", "sample_attention", [](Variant& v) { v.method = "sample_attention"; });
  add("other methods", "sample_attention.logit",
      [](Variant& v) { v.method = "sample_attention.logit"; });
  add("other methods", "random", [](Variant& v) { v.method = "random"; });
  return all;
}

struct Result {
  Variant variant;
  Accuracy accuracy;
  double speedup;
};

std::vector<Result> run_data(const Data& data, const Flags& flags, quoka::ThreadPool& threads) {
  const Index len = data.layers.front().q.dimension(2);
  const std::vector<Variant> all = variants(parse_budget(flags.budget), len);
  std::vector<Result> results;
  for (const Index chunk : {128, 256, 512}) {
    std::vector<CaptureMethod> methods;
    std::vector<Result> here;
    DenseReference reference(data.layers, chunk, data.attention, threads);
    const AccuracyRules whole_prompt{.past_per_budget = 0.0, .overlap = false};
    for (const Variant& variant : all) {
      if (variant.chunk != chunk) continue;
      methods.push_back({variant.method, variant.options});
      here.push_back(
          {variant,
           overall(AccuracyRun(variant.method, variant.options, reference, whole_prompt, threads)
                       .run()),
           0.0});
    }
    Progress bar(data.name + ", chunk " + std::to_string(chunk), len * (flags.rounds + 1));
    const CaptureSeconds seconds =
        time_captures(data.layers, methods, chunk, flags.rounds, data.attention, threads,
                      [&](int round, Index at) { bar.update(round * len + at); });
    for (std::size_t i = 0; i < here.size(); ++i) {
      here[i].speedup = median_ratio(seconds[0], seconds[i + 1]);
      results.push_back(here[i]);
    }
  }
  return results;
}

std::vector<Data> load_data(const Flags& flags) {
  std::vector<Data> all;
  for (const std::string& path : flags.captures) {
    const SafetensorsFile file(path);
    Data& data =
        all.emplace_back(Data{std::filesystem::path(path).stem().string(), load_layers(file), {}});
    data.attention.scale = softmax_scale(file);
  }
  if (flags.tokens > 0)
    for (const Geometry& geometry : geometries())
      all.push_back({"generated: " + geometry.name,
                     {Generator(geometry, 64, 1).layer(2, 4, flags.tokens)},
                     {}});
  return all;
}

int run(const Flags& flags) {
  quoka::ThreadPool threads(flags.threads);
  nlohmann::json json{
      {"command", flags.command}, {"cpu", cpu_name()}, {"build", build_description()}};
  for (const Data& data : load_data(flags)) {
    const LayerCapture& first = data.layers.front();
    std::cout << "\n### " << data.name << "\n\n"
              << data.layers.size() << (data.layers.size() == 1 ? " layer, " : " layers, ")
              << first.q.dimension(2) << " tokens, " << first.q.dimension(1) << " query heads, "
              << first.k.dimension(1) << " KV heads, head_dim " << first.q.dimension(3)
              << "; budget " << flags.budget << ", chunk 128, 16 queries unless said.\n\n"
              << "| ablation | value | mass kept | worst row | output error | speedup |\n"
              << "|---|---|---:|---:|---:|---:|\n";
    for (const Result& r : run_data(data, flags, threads)) {
      std::cout << "| " << r.variant.ablation << " | " << r.variant.value << " | "
                << fixed(100.0 * r.accuracy.mass_kept, 1) << " % | "
                << fixed(100.0 * r.accuracy.worst_mass, 1) << " % | "
                << fixed(r.accuracy.output_error, 3) << " | " << fixed(r.speedup, 2) << "x |\n";
      json["results"].push_back({{"data", data.name},
                                 {"ablation", r.variant.ablation},
                                 {"value", r.variant.value},
                                 {"mass_kept", r.accuracy.mass_kept},
                                 {"worst_mass", r.accuracy.worst_mass},
                                 {"output_error", r.accuracy.output_error},
                                 {"speedup", r.speedup}});
    }
    std::cout.flush();
  }
  if (!flags.json.empty()) write_json(flags.json, json);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  Flags flags;
  flags.command = command_line(argc, argv);
  CLI::App app("QuoKA's choices, one at a time: attention mass kept, output error, speedup");
  app.add_option("captures", flags.captures,
                 "safetensors dumps with NAME.q, NAME.k, NAME.v per layer")
      ->check(CLI::ExistingFile);
  app.add_option("--tokens", flags.tokens, "tokens of each generated layer; 0: none")
      ->capture_default_str();
  app.add_option("--budget", flags.budget, "keys per KV head: a count (256) or a fraction (0.125)")
      ->capture_default_str();
  app.add_option("--threads", flags.threads, "workers, the calling thread included")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--rounds", flags.rounds, "timed repetitions; medians are printed")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--json", flags.json, "write the results there too");
  return run_program(app, argc, argv, [&] { return run(flags); });
}
