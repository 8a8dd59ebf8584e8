// The main job: prefill with QuoKA against dense attention, on the queries, keys and values of a
// real model. Prints what QuoKA costs in accuracy and what it gains in time, per budget; then the
// time alone for longer prompts of the same shape. Takes any dump of yours:
// examples/data/README.md.

#include <quoka/quoka.hpp>

#include "support/capture.hpp"
#include "support/json_file.hpp"
#include "support/paired_steps.hpp"
#include "support/progress.hpp"
#include "support/selector_flags.hpp"
#include "support/table.hpp"

#include <CLI/CLI.hpp>

#include <iostream>

namespace {

using namespace quoka_examples;
using quoka::TensorView;
using DenseLayer = quoka::ChunkedPrefill<quoka::DenseSelector>;
using QuokaLayer = quoka::ChunkedPrefill<quoka::QuokaSelector>;

struct Flags {
  std::string file = QUOKA_EXAMPLES_DATA "/tinyllama_passkey_2046_layer11.safetensors";
  std::vector<std::string> budgets{"128", "256", "512"};
  std::vector<Index> lengths{8192, 32768};
  std::string long_budget = "1024";
  Index chunk = 128;
  int threads = 2;
  int rounds = 3;
  std::string json;
  quoka::QuokaOptions quoka;
};

struct BudgetResult {
  std::string budget;
  double seconds = 0.0, dense_seconds = 0.0, speedup = 0.0;
  double output_error = 0.0;  // |out - dense| / |dense|, Frobenius, over the whole prompt
  double mass_kept = 0.0;  // of the past's attention mass, mean over rows that could not keep all
  double kv_pairs = 0.0;   // (query, key) pairs attended, as a share of dense
};

// Running sums over the chunks and layers of one budget.
struct Sums {
  double error = 0.0, norm = 0.0, mass = 0.0, pairs = 0.0, dense_pairs = 0.0;
  double rows = 0.0;
};

void add_error(const Tensor<float>& out, const Tensor<float>& dense, Sums& sums) {
  for (Index i = 0; i < out.size(); ++i) {
    const double x = static_cast<double>(out.data()[i]), y = static_cast<double>(dense.data()[i]);
    sums.error += (x - y) * (x - y);
    sums.norm += y * y;
  }
}

// Share of the past's softmax mass on the kept keys: exp(lse over the kept - lse over all).
template <class Layer>
void add_mass(const Layer& layer, const quoka::Selection& keep, TensorView<const float> q,
              const quoka::AttentionOptions& options, quoka::ThreadPool& threads, Sums& sums) {
  if (keep.is_all()) return;
  const TensorView<const float> past_k = layer.cache().k().slice(0, keep.kv_len()),
                                past_v = layer.cache().v().slice(0, keep.kv_len());
  Tensor<float> out(q.batch(), q.heads(), q.len(), past_v.dim());
  Eigen::Tensor<float, 3, Eigen::RowMajor> kept(q.batch(), q.heads(), q.len()), all = kept;
  quoka::attention(q, {past_k, past_v, keep}, {}, {out, kept}, options, threads);
  quoka::attention(q, {past_k, past_v}, {}, {out, all}, options, threads);
  for (Index i = 0; i < kept.size(); ++i)
    sums.mass += std::exp(static_cast<double>(kept.data()[i] - all.data()[i]));
  sums.rows += static_cast<double>(kept.size());
}

void add_pairs(const quoka::Selection& keep, Index q_len, Sums& sums) {
  const double n = static_cast<double>(q_len), own = n * (n + 1.0) / 2.0;
  sums.pairs += n * static_cast<double>(keep.count()) + own;
  sums.dense_pairs += n * static_cast<double>(keep.kv_len()) + own;
}

quoka::LayerShape shape_of(const LayerCapture& layer) {
  return {.q_heads = layer.q.dimension(1),
          .kv_heads = layer.k.dimension(1),
          .head_dim = layer.q.dimension(3),
          .v_dim = layer.v.dimension(3),
          .batch = layer.q.dimension(0)};
}

// One layer, one round: every chunk by dense and by each budget in turn. seconds[0] is dense.
void run_layer(const LayerCapture& capture, const Flags& flags,
               const quoka::AttentionOptions& attention, bool measure_accuracy,
               std::vector<double>& seconds, std::vector<Sums>& sums, quoka::ThreadPool& threads,
               const std::function<void(Index)>& progress) {
  const quoka::LayerShape shape = shape_of(capture);
  const Index len = capture.q.dimension(2);
  const TensorView<const float> q = capture.q, k = capture.k, v = capture.v;
  DenseLayer dense(shape, {}, attention);
  dense.reserve(len);
  std::vector<QuokaLayer> layers;
  for (const std::string& budget : flags.budgets) {
    quoka::QuokaOptions options = flags.quoka;
    options.budget = parse_budget(budget);
    layers.emplace_back(shape, options, attention);
    layers.back().reserve(len);
  }
  Tensor<float> out_dense(q.batch(), q.heads(), flags.chunk, v.dim()),
      out(q.batch(), q.heads(), flags.chunk, v.dim());
  for (Index begin = 0; begin < len; begin += flags.chunk) {
    const Index n = std::min(flags.chunk, len - begin);
    if (n < flags.chunk)
      out_dense.resize(q.batch(), q.heads(), n, v.dim()),
          out.resize(q.batch(), q.heads(), n, v.dim());
    const auto step = [&](auto& layer, Tensor<float>& to) {
      return seconds_of([&] {
        layer.forward(q.slice(begin, n), k.slice(begin, n), v.slice(begin, n), to, threads);
      });
    };
    seconds[0] += step(dense, out_dense);
    for (std::size_t i = 0; i < layers.size(); ++i) {
      seconds[i + 1] += step(layers[i], out);
      if (!measure_accuracy) continue;
      add_error(out, out_dense, sums[i]);
      add_pairs(layers[i].selection(), n, sums[i]);
      add_mass(dense, layers[i].selection(), q.slice(begin, n), attention, threads, sums[i]);
    }
    progress(begin + n);
  }
}

std::vector<BudgetResult> run_capture(const std::vector<LayerCapture>& layers, const Flags& flags,
                                      const quoka::AttentionOptions& attention,
                                      quoka::ThreadPool& threads) {
  std::vector<Sums> sums(flags.budgets.size());
  std::vector<std::vector<double>> rounds(flags.budgets.size() + 1);
  Index total = 0, done = 0;
  for (const LayerCapture& layer : layers) total += layer.q.dimension(2) * (flags.rounds + 1);
  Progress bar("prefill", total);
  for (int round = -1; round < flags.rounds; ++round) {  // the first warms up and measures accuracy
    std::vector<double> seconds(flags.budgets.size() + 1);
    for (const LayerCapture& layer : layers) {
      run_layer(layer, flags, attention, round < 0, seconds, sums, threads,
                [&](Index at) { bar.update(done + at); });
      done += layer.q.dimension(2);
    }
    if (round < 0) continue;
    for (std::size_t i = 0; i < seconds.size(); ++i) rounds[i].push_back(seconds[i]);
  }
  std::vector<BudgetResult> results;
  for (std::size_t i = 0; i < flags.budgets.size(); ++i) {
    const Sums& s = sums[i];
    results.push_back({.budget = flags.budgets[i],
                       .seconds = median(rounds[i + 1]),
                       .dense_seconds = median(rounds[0]),
                       .speedup = median_ratio(rounds[0], rounds[i + 1]),
                       .output_error = std::sqrt(s.error / s.norm),
                       .mass_kept = s.rows > 0.0 ? s.mass / s.rows : 1.0,
                       .kv_pairs = s.pairs / s.dense_pairs});
  }
  return results;
}

struct LengthResult {
  Index length;
  double dense_seconds, seconds, speedup;
};

std::vector<LengthResult> run_lengths(const quoka::LayerShape& shape, const Flags& flags,
                                      quoka::ThreadPool& threads) {
  std::vector<LengthResult> results;
  GeneratedPrompt prompt(shape, flags.chunk);
  quoka::QuokaOptions options = flags.quoka;
  options.budget = parse_budget(flags.long_budget);
  for (const Index length : flags.lengths) {
    DenseLayer dense(shape);
    QuokaLayer sparse(shape, options);
    prompt.fill(dense, length - flags.chunk);
    prompt.fill(sparse, length - flags.chunk);
    const auto positions = measured_positions(length, flags.chunk, options.budget.keys(length), 3);
    Progress bar(std::to_string(length) + " tokens",
                 static_cast<std::int64_t>(positions.size()) * (flags.rounds + 1));
    const auto seconds =
        time_steps({timed_step(dense, prompt, threads), timed_step(sparse, prompt, threads)},
                   positions, flags.rounds, [&](std::size_t p, int round) {
                     bar.update(static_cast<std::int64_t>(p) * (flags.rounds + 1) + round);
                   });
    const auto dense_totals = prefill_seconds(positions, seconds[0], length, flags.chunk);
    const auto totals = prefill_seconds(positions, seconds[1], length, flags.chunk);
    results.push_back(
        {length, median(dense_totals), median(totals), median_ratio(dense_totals, totals)});
  }
  return results;
}

void print(const std::vector<BudgetResult>& budgets, const std::vector<LengthResult>& lengths,
           const Flags& flags) {
  std::vector<std::vector<std::string>> rows;
  for (const BudgetResult& r : budgets)
    rows.push_back({r.budget, fixed(100.0 * r.kv_pairs, 1) + " %",
                    fixed(100.0 * r.mass_kept, 1) + " %", fixed(r.output_error, 3),
                    fixed(1e3 * r.dense_seconds, 1) + " ms", fixed(1e3 * r.seconds, 1) + " ms",
                    fixed(r.speedup, 2) + "x"});
  print_table(std::cout,
              {"budget", "KV pairs used", "mass kept", "output error", "dense", "QuoKA", "speedup"},
              rows);
  std::cout << "\nKV pairs used: (query, key) pairs attended, of dense. Mass kept: share of the "
               "past's softmax mass on the\n"
               "selected keys, mean over rows whose past is longer than the budget. Output error: "
               "|out - dense| / |dense|.\n";
  if (lengths.empty()) return;
  std::cout << "\nLonger prompts of the same shape (generated keys, budget " << flags.long_budget
            << "; chunk steps timed at positions over the prompt, integrated):\n\n";
  rows.clear();
  for (const LengthResult& r : lengths)
    rows.push_back({std::to_string(r.length), fixed(r.dense_seconds, 2) + " s",
                    fixed(r.seconds, 2) + " s", fixed(r.speedup, 2) + "x"});
  print_table(std::cout, {"tokens", "dense", "QuoKA", "speedup"}, rows);
}

void write_json(const std::vector<BudgetResult>& budgets, const std::vector<LengthResult>& lengths,
                const Flags& flags) {
  nlohmann::json json{{"file", std::filesystem::path(flags.file).filename().string()},
                      {"chunk", flags.chunk},
                      {"threads", flags.threads},
                      {"n_queries", flags.quoka.n_queries}};
  for (const BudgetResult& r : budgets)
    json["budgets"].push_back({{"budget", r.budget},
                               {"dense_seconds", r.dense_seconds},
                               {"quoka_seconds", r.seconds},
                               {"speedup", r.speedup},
                               {"output_error", r.output_error},
                               {"mass_kept", r.mass_kept},
                               {"kv_pairs_share", r.kv_pairs}});
  for (const LengthResult& r : lengths)
    json["generated"].push_back({{"tokens", r.length},
                                 {"budget", flags.long_budget},
                                 {"dense_seconds", r.dense_seconds},
                                 {"quoka_seconds", r.seconds},
                                 {"speedup", r.speedup}});
  write_json(flags.json, json);
}

int run(const Flags& flags) {
  const SafetensorsFile file(flags.file);
  const std::vector<LayerCapture> layers = load_layers(file);
  quoka::AttentionOptions attention;
  attention.scale = softmax_scale(file);
  quoka::ThreadPool threads(flags.threads);

  std::cout << std::filesystem::path(flags.file).filename().string() << ": " << layers.size()
            << (layers.size() == 1 ? " layer, " : " layers, ") << layers.front().q.dimension(2)
            << " tokens, " << layers.front().q.dimension(1) << " query heads, "
            << layers.front().k.dimension(1) << " KV heads, head_dim "
            << layers.front().q.dimension(3) << "; chunk " << flags.chunk << ", "
            << flags.quoka.n_queries << " queries, " << flags.threads
            << (flags.threads == 1 ? " thread\n\n" : " threads\n\n");
  const auto budgets = run_capture(layers, flags, attention, threads);
  const auto lengths = run_lengths(shape_of(layers.front()), flags, threads);
  print(budgets, lengths, flags);
  if (!flags.json.empty()) write_json(budgets, lengths, flags);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  Flags flags;
  CLI::App app("Prefill with QuoKA against dense attention, on recorded queries, keys and values");
  app.add_option("file", flags.file, "safetensors dump with NAME.q, NAME.k, NAME.v per layer")
      ->check(CLI::ExistingFile);
  app.add_option("--budgets", flags.budgets, "keys per KV head: counts (1024) or fractions (0.25)")
      ->delimiter(',')
      ->capture_default_str();
  app.add_option("--lengths", flags.lengths, "longer prompts to time, generated; 0: none")
      ->delimiter(',')
      ->capture_default_str();
  app.add_option("--long-budget", flags.long_budget, "budget for those")->capture_default_str();
  app.add_option("--chunk", flags.chunk, "tokens per chunk")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--threads", flags.threads)->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--rounds", flags.rounds, "timed repetitions; medians are printed")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--json", flags.json, "write the results there too");
  add_quoka_flags(app, flags.quoka);
  CLI11_PARSE(app, argc, argv);
  std::erase_if(flags.lengths, [&](Index length) { return length < flags.chunk; });
  try {
    return run(flags);
  } catch (const std::exception& error) {
    std::cerr << "prefill: " << error.what() << '\n';
    return 1;
  }
}
