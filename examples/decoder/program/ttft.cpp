// Time to first token over prompt lengths, dense against selectors.
//
// One layer of the model (or of a named shape with random weights) runs whole batches, its matrix
// products included, at cache lengths spread over the prompt; the cache is filled with generated
// keys. Dense and selectors take turns at each, round by round; the batches are added up over the
// prompt, linear between the measured lengths, and multiplied by the number of layers. Embedding
// and the last token's logits are left out: less than one part in a thousand of a long prompt.
#include "decoder/file/gguf.hpp"
#include "decoder/program/common.hpp"

#include "support/machine.hpp"
#include "support/paired_steps.hpp"
#include "support/progress.hpp"
#include "support/table.hpp"

#include <map>

namespace quoka_decoder {
namespace {

struct Flags {
  ModelFlags model;
  std::string shape = "qwen3-4b";
  std::string weights = "q8_0";
  std::string selectors = "quoka", budget = "1024";
  std::vector<Index> lengths{4096, 16384, 50000, 131072};
  Index positions = 4;
  int rounds = 3;
  quoka::QuokaOptions quoka;
  Report report;
};

ModelConfig shape_of(Index layers, Index d_model, Index q_heads, Index kv_heads, Index head_dim,
                     Index ffn_dim, RopePairing pairing) {
  ModelConfig c;
  c.architecture = "random";
  c.layers = layers, c.d_model = d_model, c.q_heads = q_heads, c.kv_heads = kv_heads;
  c.head_dim = c.v_dim = head_dim, c.ffn_dim = ffn_dim, c.vocabulary = 64;
  c.rope = {.dim = head_dim, .base = 1e6f, .pairing = pairing};
  return c;
}

const std::map<std::string, ModelConfig>& shapes() {
  static const std::map<std::string, ModelConfig> all{
      {"qwen3-4b", shape_of(36, 2560, 32, 8, 128, 9728, RopePairing::halves)},
      {"llama-3.2-3b", shape_of(28, 3072, 24, 8, 128, 8192, RopePairing::adjacent)},
      {"qwen2.5-7b", shape_of(28, 3584, 28, 4, 128, 18944, RopePairing::halves)},
      {"tinyllama", shape_of(22, 2048, 32, 4, 64, 5632, RopePairing::adjacent)},
  };
  return all;
}

// A model of one layer that stands for `layers` of them.
struct OneLayer {
  std::string name;
  Index layers;
  Model model;
};

OneLayer one_layer(const Flags& flags) {
  if (!flags.model.model.empty()) {
    Model model = load_model(std::make_shared<const GgufFile>(flags.model.model));
    const Index layers = model.config.layers;
    model.layers.resize(1);
    model.config.layers = 1;
    return {flags.model.model, layers, std::move(model)};
  }
  static const std::map<std::string, TensorType> types{
      {"f32", TensorType::f32}, {"f16", TensorType::f16}, {"q8_0", TensorType::q8_0}};
  ModelConfig config = shapes().at(flags.shape);
  const Index layers = config.layers;
  config.layers = 1;
  return {flags.shape + ", random weights as " + name_of(types.at(flags.weights)), layers,
          random_model(config, types.at(flags.weights))};
}

// FLOPs of a batch's products, and of dense attention to kv_len keys and itself.
double product_flops(const ModelConfig& c, Index tokens) {
  const Index weights = c.d_model * (c.q_heads * c.head_dim + c.kv_heads * (c.head_dim + c.v_dim)) +
                        c.q_heads * c.v_dim * c.d_model + 3 * c.d_model * c.ffn_dim;
  return 2.0 * static_cast<double>(weights) * static_cast<double>(tokens);
}
double attention_flops(const ModelConfig& c, Index tokens, Index kv_len) {
  const double keys = static_cast<double>(kv_len) + 0.5 * static_cast<double>(tokens + 1);
  return 2.0 * static_cast<double>(c.q_heads * (c.head_dim + c.v_dim) * tokens) * keys;
}

struct Method {
  std::string name;
  std::unique_ptr<Session> session;
};

// Fills the caches of all up to `length` with the same keys.
void fill(std::vector<Method>& methods, const ModelConfig& c, Index length, Index batch) {
  GeneratedPrompt prompt(
      {.q_heads = c.q_heads, .kv_heads = c.kv_heads, .head_dim = c.head_dim, .v_dim = c.v_dim},
      batch);
  for (Method& method : methods) prompt.fill(method.session->layer(0), length);
}

struct Result {
  Index length;
  std::string method;
  double seconds, ratio;
};

void measure(const Flags& flags, const OneLayer& layer, quoka::ThreadPool& threads,
             std::vector<Result>& results, double& peak_gflops) {
  std::vector<Method> methods;
  auto names = parse_methods(flags.selectors);
  names.insert(names.begin(), "dense");
  for (const std::string& name : names) {
    if (shares_layers(name))
      throw std::runtime_error(name +
                               " shares a choice between layers: one layer cannot stand for all");
    methods.push_back(
        {name,
         std::make_unique<Session>(
             layer.model, session_options(flags.model, name, flags.budget, flags.quoka), threads)});
  }
  const Index batch = quoka::round_up(flags.model.batch, flags.model.chunk);

  std::vector<Token> tokens(static_cast<std::size_t>(batch));
  for (std::size_t i = 0; i < tokens.size(); ++i)
    tokens[i] =
        static_cast<Token>(i * 37 % static_cast<std::size_t>(layer.model.config.vocabulary));
  std::vector<TimedStep> steps;
  for (Method& method : methods)
    steps.push_back([&method, &tokens](Index kv_len) {
      method.session->truncate(kv_len);
      const double seconds = seconds_of([&] { method.session->run(tokens); });
      method.session->truncate(kv_len);
      return seconds;
    });

  for (const Index length : flags.lengths) {
    const Index budget = parse_budget(flags.budget).count(length);
    const auto positions = measured_positions(length, batch, budget, flags.positions);
    fill(methods, layer.model.config, positions.front(), batch);  // they descend
    const auto totals = time_prefills(steps, positions, length, batch, flags.rounds, [&] {
                          peak_gflops = std::max(peak_gflops, fma_peak_gflops());
                        }).totals;
    for (std::size_t m = 0; m < methods.size(); ++m)
      results.push_back({length, methods[m].name,
                         median(totals[m]) * static_cast<double>(layer.layers),
                         median_ratio(totals[0], totals[m])});
  }
}

void ttft(Flags& flags) {
  const OneLayer layer = one_layer(flags);
  quoka::ThreadPool threads(thread_count(flags.model));
  std::vector<Result> results;
  double peak_gflops = 0.0;
  measure(flags, layer, threads, results, peak_gflops);

  const ModelConfig& c = layer.model.config;
  const Index batch = quoka::round_up(flags.model.batch, flags.model.chunk);
  Table table("tokens\tattention\tTTFT\tGFLOP/s\tof peak\tdense / it");
  nlohmann::json records = nlohmann::json::array();
  for (const Result& r : results) {
    double flops = 0.0;  // of dense attention
    for (Index at = 0; at < r.length; at += batch)
      flops += static_cast<double>(layer.layers) *
               (product_flops(c, batch) + attention_flops(c, batch, at));
    const double gflops = flops / r.seconds * 1e-9;
    records.push_back({{"length", r.length},
                       {"selector", r.method},
                       {"seconds", r.seconds},
                       {"dense_over_it", r.ratio}});
    table.row("{}\t{}\t{:.1f} s", r.length, r.method, r.seconds);
    if (r.method == "dense") {
      records.back()["gflops"] = gflops;
      table.more("{:.0f}\t{:.0f} %", gflops, 100.0 * gflops / (peak_gflops * threads.workers()));
    } else {
      table.more("-\t-");
    }
    table.more("{:.2f}x", r.ratio);
  }
  fmt::print(
      "{}: one layer timed with its matrix products, times {}; chunk {}, batch {}, budget {}, {} "
      "threads, {}\n{}, FMA peak {:.1f} GFLOP/s a core\n",
      layer.name, layer.layers, flags.model.chunk, batch, flags.budget, threads.workers(),
      product_backend(), cpu_name(), peak_gflops);
  table.print();
  flags.report.add({{"model", layer.name},
                    {"layers", layer.layers},
                    {"chunk", flags.model.chunk},
                    {"batch", batch},
                    {"budget", flags.budget},
                    {"threads", threads.workers()},
                    {"rounds", flags.rounds},
                    {"products", product_backend()},
                    {"fma_peak_gflops_per_core", peak_gflops},
                    {"results", records}});
  flags.report.write();
}

}  // namespace

void add_ttft(CLI::App& app, const std::string& command) {
  auto flags = std::make_shared<Flags>();
  flags->report = Report(command);
  CLI::App* sub = app.add_subcommand("ttft", "time to first token over prompt lengths");
  add_model_flags(*sub, flags->model, false);
  std::vector<std::string> names;
  for (const auto& shape : shapes()) names.push_back(shape.first);
  sub->add_option(
         "--shape", flags->shape,
         fmt::format("{}: random weights, where no --model is given", fmt::join(names, " | ")))
      ->check(CLI::IsMember(names))
      ->capture_default_str();
  sub->add_option("--weights", flags->weights, "f32 | f16 | q8_0: the random weights' type")
      ->check(CLI::IsMember({"f32", "f16", "q8_0"}))
      ->capture_default_str();
  sub->add_option("--lengths", flags->lengths, "prompt lengths")
      ->delimiter(',')
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  sub->add_option("--selectors", flags->selectors, "a list of methods")->capture_default_str();
  sub->add_option("--budget", flags->budget, "past keys attended")->capture_default_str();
  sub->add_option("--positions", flags->positions, "cache lengths measured for each prompt")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  add_rounds(*sub, flags->rounds);
  flags->report.add_flag(*sub);
  add_quoka_flags(*sub, flags->quoka);
  sub->callback([flags] { ttft(*flags); });
}

}  // namespace quoka_decoder
