// Half arithmetic: its error and its price against the length of its chains.
//
// Dense and selected attention with half multiply-adds in chains of several lengths, against the
// library's own float kernels, whose error is a thousandth of what is measured here: on generated
// (normal) keys and values, and on every layer of recorded captures. Where the ISA has no half
// arithmetic it is emulated, so that the errors can be measured on any machine (core/simd.hpp says
// how exactly); speed cannot, and the price is a count of vector instructions.

#include <quoka/attention/attention.hpp>
#include <quoka/select/quoka.hpp>

#include "support/build_info.hpp"
#include "support/capture.hpp"
#include "support/json_file.hpp"
#include "support/table.hpp"

#include <CLI/CLI.hpp>

#include <filesystem>
#include <iostream>
#include <random>

namespace {

using namespace quoka_examples;
using quoka::TensorView;
using Tensor4 = quoka::Tensor<float>;

struct Flags {
  std::vector<std::string> captures{QUOKA_EXAMPLES_DATA
                                    "/tinyllama_passkey_2046_layer11.safetensors"};
  std::vector<Index> lengths{1024, 4096, 32768};
  Index budget = 256;
  std::string json, command;
};

// One chunk, its past, and what of it is kept.
struct Input {
  std::string data;
  TensorView<const float> q, past_k, past_v, k, v;
  float scale;
  quoka::Selection keep;  // empty: all
};

struct Error {
  double largest;   // largest |error| over the largest |output|
  double relative;  // |error| over |output|, Frobenius
};

struct Row {
  std::string data;
  int chain, chains;
  double instructions;
  Error error;
};

template <class Panels>
Tensor4 attend(const Input& in) {
  Tensor4 out(in.q.batch(), in.q.heads(), in.q.len(), in.v.dim());
  quoka::Past<float> past(in.past_k, in.past_v);
  if (in.keep.count() > 0) past.keep = &in.keep;
  quoka::AttentionWorkspace<float> workspace;
  quoka::detail::attention_in<Panels>(in.q, past, quoka::Chunk<float>{in.k, in.v}, out,
                                      {.scale = in.scale}, quoka::SerialExecutor{}, workspace);
  return out;
}

Error error_of(const Tensor4& out, const Tensor4& exact) {
  double largest = 0.0, largest_error = 0.0, squares = 0.0, squared_errors = 0.0;
  for (Index i = 0; i < exact.size(); ++i) {
    const double x = static_cast<double>(exact.data()[i]);
    const double error = static_cast<double>(out.data()[i]) - x;
    largest = std::max(largest, std::abs(x));
    largest_error = std::max(largest_error, std::abs(error));
    squares += x * x, squared_errors += error * error;
  }
  return {largest_error / largest, std::sqrt(squared_errors / squares)};
}

// Vector instructions per multiply-add of a packet: itself, an addition per chain but the first of
// Chains, and two conversions and two multiply-adds where their sum is widened; over a block of
// keys, where the last chains may be shorter. A multiply-add of float counts 2: half the lanes.
double instructions(int chain, int chains) {
  const Index block = quoka::tuning::block_keys, per_sum = Index{chain} * chains;
  const double sums = static_cast<double>(quoka::ceil_div(block, per_sum));
  const double additions = static_cast<double>(quoka::ceil_div(block, chain)) - sums;
  return 1.0 + (additions + 4.0 * sums) / static_cast<double>(block);
}

template <int Chain, int Chains>
void add_row(const Input& in, const Tensor4& exact, std::vector<Row>& rows) {
  using Panels = quoka::detail::HalfPanels<quoka::simd::HalfPacket, Chain, Chains>;
  rows.push_back(
      {in.data, Chain, Chains, instructions(Chain, Chains), error_of(attend<Panels>(in), exact)});
}

void measure(const Input& in, std::vector<Row>& rows) {
  const Tensor4 exact = attend<quoka::detail::SinglePanels>(in);
  add_row<8, 1>(in, exact, rows);
  add_row<8, 4>(in, exact, rows);
  add_row<16, 1>(in, exact, rows);
  add_row<16, 2>(in, exact, rows);
  add_row<16, 4>(in, exact, rows);
  add_row<32, 1>(in, exact, rows);
  add_row<64, 1>(in, exact, rows);
  add_row<128, 1>(in, exact, rows);
}

// The larger of both errors, row by row: the worst chunk of a data set.
void worst_of(std::vector<Row>& all, const std::vector<Row>& more) {
  if (all.empty() || all.back().data != more.back().data) {
    all.insert(all.end(), more.begin(), more.end());
    return;
  }
  Row* const last = &all[all.size() - more.size()];
  for (std::size_t i = 0; i < more.size(); ++i) {
    last[i].error.largest = std::max(last[i].error.largest, more[i].error.largest);
    last[i].error.relative = std::max(last[i].error.relative, more[i].error.relative);
  }
}

// Four query heads on a KV head, 32 queries after kv_len keys.
void measure_normal(Index head_dim, Index kv_len, std::vector<Row>& rows) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  const auto tensor = [&](Index heads, Index len) {
    Tensor4 x(1, heads, len, head_dim);
    std::generate_n(x.data(), x.size(), [&] { return normal(random); });
    return x;
  };
  const Tensor4 q = tensor(4, 32), k = tensor(1, kv_len + 32), v = tensor(1, kv_len + 32);
  const TensorView<const float> keys = k, values = v;
  std::vector<Row> more;
  measure({.data = "normal, head_dim " + std::to_string(head_dim) + ", " + std::to_string(kv_len) +
                   " keys",
           .q = q,
           .past_k = keys.slice(0, kv_len),
           .past_v = values.slice(0, kv_len),
           .k = keys.slice(kv_len, 32),
           .v = values.slice(kv_len, 32),
           .scale = 1.0f / std::sqrt(static_cast<float>(head_dim)),
           .keep = {}},
          more);
  worst_of(rows, more);
}

// Chunks of 128 in the middle and at the end of the recorded prompt, each layer by itself, over all
// keys and over those that QuoKA selects.
void measure_capture(const std::string& path, const Flags& flags, std::vector<Row>& rows) {
  const SafetensorsFile file(path);
  for (const LayerCapture& layer : load_layers(file)) {
    const TensorView<const float> q = layer.q, k = layer.k, v = layer.v;
    const float scale = softmax_scale(file).value_or(1.0f / std::sqrt(static_cast<float>(q.dim())));
    constexpr Index chunk = 128;
    quoka::detail::require_at_least("a capture's tokens", q.len(), 2 * chunk);
    for (const bool selected : {false, true})
      for (const Index begin : {(q.len() - chunk) / 2, q.len() - chunk}) {
        Input in{.data = layer.name + (selected ? ", selected" : ", dense"),
                 .q = q.slice(begin, chunk),
                 .past_k = k.slice(0, begin),
                 .past_v = v.slice(0, begin),
                 .k = k.slice(begin, chunk),
                 .v = v.slice(begin, chunk),
                 .scale = scale,
                 .keep = {}};
        if (selected)
          in.keep = quoka::QuokaSelector({.budget = flags.budget}).select(in.q, in.past_k);
        std::vector<Row> more;
        measure(in, more);
        worst_of(rows, more);
      }
  }
}

int run(const Flags& flags) {
  std::cout << cpu_name() << "; " << build_description() << "; half arithmetic "
            << (quoka::simd::has_half_arithmetic ? "of the ISA" : "emulated") << "\n\n";
  std::vector<Row> rows;
  for (const Index head_dim : {64, 128})
    for (const Index kv_len : flags.lengths) measure_normal(head_dim, kv_len, rows);
  for (const std::string& path : flags.captures) measure_capture(path, flags, rows);

  nlohmann::json json{{"command", flags.command},
                      {"cpu", cpu_name()},
                      {"build", build_description()},
                      {"emulated", !quoka::simd::has_half_arithmetic}};
  std::vector<std::vector<std::string>> lines;
  for (const Row& r : rows) {
    lines.push_back({r.data, std::to_string(r.chain), std::to_string(r.chains),
                     fixed(r.instructions, 3), fixed(1e3 * r.error.largest, 2) + "e-3",
                     fixed(1e3 * r.error.relative, 2) + "e-3"});
    json["results"].push_back({{"data", r.data},
                               {"chain", r.chain},
                               {"chains", r.chains},
                               {"instructions", r.instructions},
                               {"largest_error", r.error.largest},
                               {"relative_error", r.error.relative}});
  }
  print_table(
      std::cout,
      {"data", "chain", "chains in half", "instructions", "largest error", "relative error"},
      lines);
  if (!flags.json.empty()) write_json(flags.json, json);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  Flags flags;
  flags.command = command_line(argc, argv);
  CLI::App app("Half arithmetic: error and price against the length of its chains");
  app.add_option("captures", flags.captures,
                 "safetensors dumps with NAME.q, NAME.k, NAME.v per layer")
      ->check(CLI::ExistingFile);
  app.add_option("--lengths", flags.lengths, "keys of the generated data")
      ->delimiter(',')
      ->capture_default_str();
  app.add_option("--budget", flags.budget, "keys per KV head that QuoKA selects of a capture")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--json", flags.json, "write the results there too");
  CLI11_PARSE(app, argc, argv);
  try {
    return run(flags);
  } catch (const std::exception& error) {
    std::cerr << "half_chain_length: " << error.what() << '\n';
    return 1;
  }
}
