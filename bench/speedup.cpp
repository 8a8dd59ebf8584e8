// Dense attention against selectors over whole prefills of one layer, paired and interleaved.
//
// For each prompt length, chunk steps (select, attend, append) of all are timed in turn at cache
// lengths spread over the prompt, round by round, and integrated to the whole prefill; ratios are
// taken within a round and their median is printed. The machine's FMA peak is measured between the
// rounds' positions. Keys, values and queries are generated (normal): selected keys are then
// scattered evenly over the cache, which is the hardest case for the memory system.

#include "arithmetic.hpp"
#include "data.hpp"

#include <quoka/kernels/byte_formats.hpp>
#include <quoka/rows/element_rows.hpp>

#include "support/machine.hpp"
#include "support/paired_steps.hpp"
#include "support/program.hpp"
#include "support/require.hpp"
#include "support/selector_flags.hpp"
#include "support/table.hpp"

#include <span>

namespace {

using namespace quoka_bench;
using namespace quoka_examples;

struct Flags {
  std::string shape_name = "qwen3-4b";
  quoka::LayerShape shape;
  std::vector<Index> lengths{4096, 8192, 32768};
  std::string budget = "1024";
  std::string selectors = "quoka";
  std::vector<std::string> formats{"float"}, arithmetics{"float"};
  Index layer_count = 36;
  Index chunk = 128;
  Index positions = 4;
  int threads = 1;
  int rounds = 5;
  quoka::QuokaOptions quoka;
};

const std::map<std::string, quoka::LayerShape> shapes{{"qwen3-4b", qwen3_4b},
                                                      {"llama-3.2-3b", llama32_3b},
                                                      {"qwen2.5-7b", qwen25_7b},
                                                      {"tinyllama", tinyllama}};

// The cache's format, of keys and values alike.
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

// Scales of formats that keep them apart, for normal keys and values of `dim` channels; valid for the whole run.
std::span<const float> scales_for(const quoka::Format& format, Index dim) {
  static const std::vector<float> scales(4096, 6.0f / 127.0f);
  const Index count = format.separate_scales(dim);
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

// One method over a cache of one format, in one arithmetic.
struct Contender {
  std::string method, format, arithmetic;

  std::string name(const Flags& flags) const {
    return method + (flags.formats.size() > 1 ? " over " + format : "") +
           (flags.arithmetics.size() > 1 ? " in " + arithmetic : "");
  }
};

// The first is dense, and what the others are held against.
std::vector<Contender> contenders(const Flags& flags) {
  std::vector<std::string> names = parse_methods(flags.selectors);
  names.insert(names.begin(), "dense");
  std::vector<Contender> all;
  for (const std::string& format : flags.formats)
    for (const std::string& arithmetic : flags.arithmetics)
      for (const std::string& name : names) all.push_back({name, format, arithmetic});
  return all;
}

TimedMethod timed_method(const Contender& contender, const Flags& flags,
                         const MethodOptions& options) {
  quoka::LayerShape shape = flags.shape;
  shape.k_format = shape.v_format = formats.at(contender.format);
  shape.k_scales = scales_for(*shape.k_format, shape.head_dim);
  shape.v_scales = scales_for(*shape.v_format, shape.v_dim > 0 ? shape.v_dim : shape.head_dim);
  return quoka_examples::timed_method(contender.method, shape, options, flags.layer_count,
                                      {.arithmetic = arithmetics.at(contender.arithmetic)});
}

// Times all at one prompt length: a row of the table and a record for each.
void measure(Index length, const Flags& flags, quoka::ThreadPool& threads, Table& table,
             nlohmann::json& records) {
  const MethodOptions options{.budget = parse_budget(flags.budget), .quoka = flags.quoka};
  const std::vector<Contender> all = contenders(flags);
  std::vector<TimedMethod> methods;
  for (const Contender& contender : all) methods.push_back(timed_method(contender, flags, options));
  GeneratedPrompt prompt(flags.shape, flags.chunk);
  const auto steps = filled_steps(methods, prompt, length - flags.chunk, threads);
  const auto positions =
      measured_positions(length, flags.chunk, options.budget.count(length), flags.positions);
  double peak = fma_peak_gflops();
  const auto [seconds, totals] = time_prefills(steps, positions, length, flags.chunk, flags.rounds,
                                               [&] { peak = std::max(peak, fma_peak_gflops()); });

  for (std::size_t m = 0; m < methods.size(); ++m) {
    const double prefill = median(totals[m]), speedup = median_ratio(totals[0], totals[m]);
    const double last = median(seconds[m].front()),
                 last_speedup = median_ratio(seconds[0].front(), seconds[m].front());
    double scratch = 0.0, kept = 0.0;  // MiB
    for (const auto& layer : methods[m].layers) {
      scratch = std::max(scratch, static_cast<double>(layer->scratch_bytes()) / 1048576.0);
      kept = std::max(kept, static_cast<double>(layer->kept_bytes()) / 1048576.0);
    }
    table.row("{}\t{}\t{:.2f} s\t{:.2f}x\t{:.2f} ms\t{:.2f}x\t{:.1f} MiB\t{:.1f} MiB", length,
              all[m].name(flags), prefill, speedup, 1e3 * last, last_speedup, scratch, kept);
    records.push_back({{"tokens", length},
                       {"selector", all[m].method},
                       {"format", all[m].format},
                       {"arithmetic", used_arithmetic_name(arithmetics.at(all[m].arithmetic))},
                       {"prefill_seconds", prefill},
                       {"speedup", speedup},
                       {"last_chunk_seconds", last},
                       {"last_chunk_speedup", last_speedup},
                       {"scratch_mib", scratch},
                       {"kept_mib", kept},
                       {"fma_peak_gflops_1_core", peak},
                       {"positions", positions},
                       {"step_seconds", seconds[m]}});
    if (all[m].method != "dense") continue;
    const double gflops =
        attention_flops(flags.shape, flags.chunk, positions.front()) / last * 1e-9;
    table.more("{:.1f}\t{:.1f} %", gflops, 100.0 * gflops / (peak * flags.threads));
    records.back()["gflops"] = gflops;
  }
}

int run(Flags& flags, Report& report) {
  flags.shape = resolve_shape(flags);
  quoka::ThreadPool threads(flags.threads);
  const quoka::LayerShape& shape = flags.shape;
  const std::string arithmetic = used_arithmetic_name(arithmetics.at(flags.arithmetics.front()));
  fmt::print(
      "{}\none layer, {} query heads, {} KV heads, head_dim {}, batch {}; chunk {}, budget {}, "
      "{} queries, {} thread{}, a cache of {}{}, attention in {}{}; medians of {}\n\n",
      machine(), shape.q_heads, shape.kv_heads, shape.head_dim, shape.batch, flags.chunk,
      flags.budget, flags.quoka.n_queries, flags.threads, flags.threads == 1 ? "" : "s",
      flags.formats.front(), flags.formats.size() > 1 ? " and others" : "", arithmetic,
      flags.arithmetics.size() > 1 ? " and others" : "", flags.rounds);
  report.add({{"q_heads", shape.q_heads},
              {"kv_heads", shape.kv_heads},
              {"head_dim", shape.head_dim},
              {"batch", shape.batch},
              {"layer_count", flags.layer_count},
              {"chunk", flags.chunk},
              {"budget", flags.budget},
              {"n_queries", flags.quoka.n_queries},
              {"threads", flags.threads},
              {"arithmetic", arithmetic},
              {"rounds", flags.rounds}});
  Table table(
      "tokens\tselector\tprefill\tspeedup\tlast chunk\tspeedup\tscratch\tkept\tGFLOP/s\t"
      "of FMA peak");
  for (const Index length : flags.lengths) {
    require_at_least("a prompt's length", length, flags.chunk);
    measure(length, flags, threads, table, report["results"]);
  }
  table.print();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  Flags flags;
  Program app(
      argc, argv,
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
  app.add_option("--positions", flags.positions, "cache lengths measured beyond the budget")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--arithmetic", flags.arithmetics,
                 "of attention, dense's too, one or several: automatic, float, bf16 or int8")
      ->delimiter(',')
      ->check(CLI::IsMember(arithmetics))
      ->capture_default_str();
  add_run_flags(app, flags.chunk, flags.threads, flags.rounds);
  add_quoka_flags(app, flags.quoka);
  return app.run([&] { return run(flags, app.report); });
}
