// 16-bit fixed point against float: errors. Speed: speedup --arithmetic single,fixed16.
//
// Dense and selected attention against the library's own float kernels, whose error is a
// thousandth of what is measured here: on generated (normal) keys and values, and on every layer of
// recorded captures. The integers are the same on any machine, so these errors are, too.

#include <quoka/attention/attention_impl.hpp>
#include <quoka/select/quoka.hpp>
#include <quoka/views/tensor.hpp>

#include "support/capture.hpp"
#include "support/program.hpp"
#include "support/require.hpp"
#include "support/table.hpp"

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
};

// One chunk, its past, and what of it is kept.
struct Input {
  std::string data;
  TensorView<const float> q, past_k, past_v, k, v;
  float scale;
  quoka::Selection keep;  // empty: all
};

struct Row {
  std::string data;
  double largest = 0.0;   // largest |error| over the largest |output|
  double head = 0.0;      // the same of each head over its own: the worst head
  double relative = 0.0;  // |error| over |output|, Frobenius

  void admit(const Row& other) {
    largest = std::max(largest, other.largest);
    head = std::max(head, other.head);
    relative = std::max(relative, other.relative);
  }
};

Tensor4 attend(const Input& in, const quoka::detail::PanelArithmetic& panels) {
  Tensor4 out(in.q.batch(), in.q.heads(), in.q.len(), in.v.dim());
  quoka::Past past(in.past_k, in.past_v);
  if (in.keep.kv_len() > 0) past.keep = &in.keep;
  quoka::AttentionWorkspace workspace;
  quoka::detail::attend_by(
      panels, quoka::detail::checked_call(in.q, past, {in.k, in.v}, out, {.scale = in.scale}),
      quoka::SerialExecutor{}, workspace);
  return out;
}

// Adds what one chunk gives to the last row, or to a new one where the data is new: the worst chunk
// of a data set.
void measure(const Input& in, std::vector<Row>& rows) {
  const Tensor4 exact = attend(in, quoka::detail::float_panels());
  const Tensor4 out = attend(in, quoka::detail::fixed_panels<quoka::simd::PairSums>());
  double largest = 0.0, largest_error = 0.0, squares = 0.0, squared_errors = 0.0, worst = 0.0;
  for (Index head = 0; head < in.q.heads(); ++head) {
    double own = 0.0, own_error = 0.0;
    for (Index i = 0; i < in.q.len(); ++i)
      for (Index c = 0; c < in.v.dim(); ++c) {
        const double x = static_cast<double>(exact(0, head, i, c));
        const double error = static_cast<double>(out(0, head, i, c)) - x;
        own = std::max(own, std::abs(x));
        own_error = std::max(own_error, std::abs(error));
        squares += x * x, squared_errors += error * error;
      }
    largest = std::max(largest, own), largest_error = std::max(largest_error, own_error);
    worst = std::max(worst, own_error / own);
  }
  if (rows.empty() || rows.back().data != in.data) rows.push_back({.data = in.data});
  rows.back().admit({in.data, largest_error / largest, worst, std::sqrt(squared_errors / squares)});
}

// tensor(heads, len): [1, heads, len, head_dim] of normal numbers, the next ones each time.
class NormalTensors {
 public:
  explicit NormalTensors(Index head_dim) : head_dim_(head_dim) {}
  Tensor4 operator()(Index heads, Index len) {
    Tensor4 x(1, heads, len, head_dim_);
    std::generate_n(x.data(), x.size(), [&] { return normal_(random_); });
    return x;
  }

 private:
  Index head_dim_;
  std::mt19937 random_{1};
  std::normal_distribution<float> normal_;
};

// Four query heads on a KV head, 32 queries after kv_len keys.
void measure_normal(Index head_dim, Index kv_len, std::vector<Row>& rows) {
  NormalTensors tensor(head_dim);
  const Tensor4 q = tensor(4, 32), k = tensor(1, kv_len + 32), v = tensor(1, kv_len + 32);
  const TensorView<const float> keys = k, values = v;
  measure({.data = "normal, head_dim " + std::to_string(head_dim) + ", " + std::to_string(kv_len) +
                   " keys",
           .q = q,
           .past_k = keys.slice(0, kv_len),
           .past_v = values.slice(0, kv_len),
           .k = keys.slice(kv_len, 32),
           .v = values.slice(kv_len, 32),
           .scale = 1.0f / std::sqrt(static_cast<float>(head_dim)),
           .keep = {}},
          rows);
}

// Chunks of 128 in the middle and at the end of the recorded prompt, each layer by itself, over all
// keys and over those that QuoKA selects.
void measure_capture(const std::string& path, const Flags& flags, std::vector<Row>& rows) {
  const SafetensorsFile file(path);
  for (const LayerCapture& layer : load_layers(file)) {
    const TensorView<const float> q = layer.q, k = layer.k, v = layer.v;
    const float scale = softmax_scale(file).value_or(1.0f / std::sqrt(static_cast<float>(q.dim())));
    constexpr Index chunk = 128;
    require_at_least("a capture's tokens", q.len(), 2 * chunk);
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
          in.keep = quoka::QuokaSelector({.budget = quoka::Budget::keys(flags.budget)})
                        .select(in.q, in.past_k, {.scale = scale});
        measure(in, rows);
      }
  }
}

int run(const Flags& flags, Report& report) {
  fmt::print("{}; fixed point {}\n\n", machine(),
             quoka::simd::has_pair_sums ? "of the ISA" : "in plain C++");
  std::vector<Row> rows;
  for (const Index head_dim : {64, 128})
    for (const Index kv_len : flags.lengths) measure_normal(head_dim, kv_len, rows);
  for (const std::string& path : flags.captures) measure_capture(path, flags, rows);

  Table table("data\tlargest error\tworst head\trelative error");
  for (const Row& r : rows) {
    table.row("{}\t{:.2f}e-3\t{:.2f}e-3\t{:.2f}e-3", r.data, 1e3 * r.largest, 1e3 * r.head,
              1e3 * r.relative);
    report["errors"].push_back({{"data", r.data},
                                {"largest_error", r.largest},
                                {"largest_error_of_a_head", r.head},
                                {"relative_error", r.relative}});
  }
  table.print();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  Flags flags;
  Program app(argc, argv, "Errors of 16-bit fixed point against float");
  app.add_option("captures", flags.captures,
                 "safetensors dumps with NAME.q, NAME.k, NAME.v per layer")
      ->check(CLI::ExistingFile);
  app.add_option("--lengths", flags.lengths, "keys of the generated data")
      ->delimiter(',')
      ->capture_default_str();
  app.add_option("--budget", flags.budget, "keys per KV head that QuoKA selects of a capture")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  return app.run([&] { return run(flags, app.report); });
}
