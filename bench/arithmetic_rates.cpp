// The speed of each arithmetic of attention on this machine, beside the peak of its instruction.
//
//   peaks      products held in registers, no memory: float FMA, vdpbf16ps, vpdpbusd or usdot, tiles
//   kernels    a causal chunk over cached keys, every unit that is compiled, whether it pays or not:
//              time against float (interleaved, medians of ratios), share of its peak, error
//   captures   errors on a real model's layers (--capture)
//   shapes     rates of other heads and chunks, beside that of the kernels' (--shapes)
//   counts     the tile instructions of one chunk, by the emulation: what a machine with AMX would run
//
// Time is that of one thread. Errors are of sampled rows against sums in double, relative to the
// largest output.

#include <quoka/attention/attention.hpp>
#include <quoka/kernels/bfloat16_panels.hpp>
#include <quoka/kernels/arithmetics.hpp>
#include <quoka/kernels/int8_panels.hpp>

#include "../tests/support/emulated_tiles.hpp"
#include "normal.hpp"

#include "support/capture.hpp"
#include "support/clock.hpp"
#include "support/machine.hpp"
#include "support/program.hpp"
#include "support/statistics.hpp"
#include "support/table.hpp"

#include <Eigen/Core>

namespace {

using namespace quoka_examples;
using quoka::Index;
using quoka::TensorView;
using quoka::detail::PanelArithmetic;
namespace detail = quoka::detail;
namespace simd = quoka::simd;

struct Flags {
  Index kv_len = 8192, chunk = 128, q_heads = 32, kv_heads = 8, head_dim = 128,
        emulated_kv_len = 512;
  int rounds = 7;
  std::string capture;
  std::vector<std::string> shapes;
};

// ---- peaks --------------------------------------------------------------------------------------

struct Peak {
  std::string instruction;
  double gflops;  // a product and its sum count 2
};

// Best GFLOP/s of run(steps), which does `flops` for each step.
template <class Run>
double best_rate(double flops, Run&& run) {
  constexpr Index steps = 20000;
  double best = 0.0;
  for (int i = 0; i < 40; ++i) {
    const double start = thread_seconds();
    run(steps);
    best = std::max(best, flops * static_cast<double>(steps) / (thread_seconds() - start) / 1e9);
  }
  return best;
}

// Independent sums of what Sums multiply: `flops` an instruction.
template <class Sums, class Element>
double sums_peak(double flops) {
  constexpr int chains = 16;
  alignas(64) Element elements[simd::lanes] = {};
  const Sums a = Sums::load(elements), b = Sums::load(elements);
  float sum = 0.0f;
  const double rate = best_rate(flops * chains, [&](Index steps) {
    Sums acc[chains];  // in registers: not captured
    simd::unroll<chains>([&](auto i) QUOKA_INLINE_LAMBDA { acc[i] = Sums{}; });
    for (Index s = 0; s < steps; ++s)
      simd::unroll<chains>([&](auto i) QUOKA_INLINE_LAMBDA { acc[i] = fma(a, b, acc[i]); });
    simd::unroll<chains>([&](auto i)
                             QUOKA_INLINE_LAMBDA { sum += simd::reduce_add(acc[i].to_float()); });
  });
  return sum == 0.0f ? rate : 0.0;
}

template <class Tiles>
double tile_peak(bool codes) {
  simd::TileShapes before;
  detail::TileUnit<Tiles>::enter(before);
  Tiles::template zero<0>(), Tiles::template zero<1>(), Tiles::template zero<2>();
  Tiles::template zero<3>(), Tiles::template zero<4>(), Tiles::template zero<5>();
  Tiles::template zero<6>(), Tiles::template zero<7>();
  const double depth = codes ? 64.0 : 32.0;
  const double rate = best_rate(4 * 2.0 * 16 * 16 * depth, [&](Index steps) {
    for (Index s = 0; s < steps; ++s) {
      if (codes) {
        Tiles::template dot_signed_codes<0, 4, 6>(), Tiles::template dot_signed_codes<1, 4, 7>();
        Tiles::template dot_signed_codes<2, 5, 6>(), Tiles::template dot_signed_codes<3, 5, 7>();
      } else {
        Tiles::template dot_bfloat16<0, 4, 6>(), Tiles::template dot_bfloat16<1, 4, 7>();
        Tiles::template dot_bfloat16<2, 5, 6>(), Tiles::template dot_bfloat16<3, 5, 7>();
      }
    }
  });
  detail::TileUnit<Tiles>::leave(before);
  return rate;
}

// Has the machine tiles of its own, not the emulated ones?
inline constexpr bool own_tiles =
    simd::has_tiles && !std::is_same_v<simd::Tiles, simd::EmulatedTiles>;

template <bool sums = simd::has_bfloat16_sums, bool quads = simd::has_quad_sums,
          bool tiles = own_tiles, class QuadSums = simd::QuadSums>
std::vector<Peak> peaks() {
  std::vector<Peak> all{{"float FMA", fma_peak_gflops()}};
  if constexpr (sums)
    all.push_back(
        {"vdpbf16ps", sums_peak<simd::DotBfloat16Sums, simd::Bfloat16Pair>(4.0 * simd::lanes)});
  if constexpr (quads)
    all.push_back({QuadSums::instruction, sums_peak<QuadSums, simd::Quad>(8.0 * simd::lanes)});
  if constexpr (tiles)
    if (detail::tiles_work()) {
      all.push_back({"tdpbf16ps", tile_peak<simd::Tiles>(false)});
      all.push_back({"tdpbsud", tile_peak<simd::Tiles>(true)});
    }
  return all;
}

// ---- kernels ------------------------------------------------------------------------------------

// One chunk and its past, in float and rounded to bfloat16.
struct Data {
  Data(const Flags& flags, Index kv_len)
      : q(normal(flags.q_heads * flags.chunk * flags.head_dim, 1)),
        k(normal(flags.kv_heads * (kv_len + flags.chunk) * flags.head_dim, 2)),
        v(normal(flags.kv_heads * (kv_len + flags.chunk) * flags.head_dim, 3)),
        short_k(rounded(k)),
        short_v(rounded(v)) {}

  static std::vector<float> normal(Index count, std::uint64_t seed) {
    std::vector<float> x(static_cast<std::size_t>(count));
    quoka_bench::fill_normal(x.data(), count, seed);
    return x;
  }
  static std::vector<Eigen::bfloat16> rounded(const std::vector<float>& x) {
    std::vector<Eigen::bfloat16> y(x.size());
    std::transform(x.begin(), x.end(), y.begin(),
                   [](float one) { return static_cast<Eigen::bfloat16>(one); });
    return y;
  }

  std::vector<float> q, k, v;
  std::vector<Eigen::bfloat16> short_k, short_v;
};

struct Contender {
  std::string arithmetic, instruction;
  const PanelArithmetic* panels;
  int products;  // of the instruction for one of the method's
  bool bfloat16_cache;
};

template <class Unit>
void add_unit(std::vector<Contender>& all, const std::string& instruction) {
  all.push_back({"bfloat16", instruction, &detail::bfloat16_panels<Unit, 1>(), 1, true});
  all.push_back({"bfloat16_x2", instruction, &detail::bfloat16_panels<Unit, 2>(), 2, true});
  all.push_back({"bfloat16", instruction, &detail::bfloat16_panels<Unit, 1>(), 1, false});
  all.push_back({"bfloat16_x3", instruction, &detail::bfloat16_panels<Unit, 3>(), 3, false});
}

template <bool sums = simd::has_bfloat16_sums, bool quads = simd::has_quad_sums,
          bool tiles = own_tiles, bool squares = simd::has_bfloat16_squares,
          class QuadSums = simd::QuadSums>
std::vector<Contender> contenders() {
  std::vector<Contender> all{{"float", "float FMA", &detail::float_panels(), 1, false},
                             {"float", "float FMA", &detail::float_panels(), 1, true}};
  if constexpr (sums) add_unit<detail::PairUnit<simd::DotBfloat16Sums>>(all, "vdpbf16ps");
  if constexpr (quads)
    for (const bool cache : {false, true})
      all.push_back({"int8", QuadSums::instruction, &detail::int8_panels<QuadSums>(), 1, cache});
  if constexpr (squares)
    add_unit<detail::SquareUnit<simd::Bfloat16Square, simd::Bfloat16Eight>>(all, "bfmmla");
  if constexpr (tiles)
    if (detail::tiles_work()) add_unit<detail::TileUnit<simd::Tiles>>(all, "tdpbf16ps");
  return all;
}

// [1, heads, len, dim] of `x`, whose heads are `stride` rows apart, from row `first` on.
template <class T>
TensorView<const T> rows(const std::vector<T>& x, const Flags& flags, Index stride, Index first,
                         Index len) {
  return TensorView<const T>(x.data() + first * flags.head_dim,
                             {1, flags.kv_heads, len, flags.head_dim},
                             {0, stride * flags.head_dim, flags.head_dim, 1});
}

// One call, by these panels.
void attend_by(const PanelArithmetic& panels, const quoka::AttentionSequence& x,
               quoka::AttentionWorkspace& workspace) {
  detail::AttentionCall call = detail::checked_call(x, {});
  call.arithmetic = &panels;
  detail::run_calls({&call, 1}, workspace.state(), quoka::SerialExecutor{});
}

void attend(const Flags& flags, const Data& data, Index kv_len, const Contender& by,
            quoka::AttentionWorkspace& workspace, std::vector<float>& out) {
  const std::array<Index, 4> sizes{1, flags.q_heads, flags.chunk, flags.head_dim};
  const TensorView<const float> q(data.q.data(), sizes);
  const Index all = kv_len + flags.chunk;
  const auto over = [&](const auto& k, const auto& v) {
    quoka::Past past(rows(k, flags, all, 0, kv_len), rows(v, flags, all, 0, kv_len));
    attend_by(*by.panels,
              {q,
               past,
               {rows(k, flags, all, kv_len, flags.chunk), rows(v, flags, all, kv_len, flags.chunk)},
               {TensorView<float>(out.data(), sizes)}},
              workspace);
  };
  if (by.bfloat16_cache)
    over(data.short_k, data.short_v);
  else
    over(data.k, data.v);
}

// The largest error of some rows, relative to the largest output.
double error_of(const Flags& flags, const Data& data, Index kv_len, bool bfloat16_cache,
                const std::vector<float>& out) {
  const Index dim = flags.head_dim, all = kv_len + flags.chunk;
  const auto at = [&](const std::vector<float>& x, const std::vector<Eigen::bfloat16>& y, Index i) {
    const auto n = static_cast<std::size_t>(i);
    return static_cast<double>(bfloat16_cache ? static_cast<float>(y[n]) : x[n]);
  };
  double worst = 0.0, largest = 0.0;
  for (const float x : out) largest = std::max(largest, static_cast<double>(std::abs(x)));
  for (Index sample = 0; sample < 8; ++sample) {
    const Index head = sample * (flags.q_heads - 1) / 7, i = sample * (flags.chunk - 1) / 7;
    const Index kv = head / (flags.q_heads / flags.kv_heads) * all, row = head * flags.chunk + i;
    std::vector<double> sum(static_cast<std::size_t>(dim)), logits;
    double top = -1e300, total = 0.0;
    for (Index t = 0; t <= kv_len + i; ++t) {
      double logit = 0.0;
      for (Index c = 0; c < dim; ++c)
        logit += static_cast<double>(data.q[static_cast<std::size_t>(row * dim + c)]) *
                 at(data.k, data.short_k, (kv + t) * dim + c);
      logits.push_back(logit / std::sqrt(static_cast<double>(dim)));
      top = std::max(top, logits.back());
    }
    for (Index t = 0; t <= kv_len + i; ++t) {
      const double weight = std::exp(logits[static_cast<std::size_t>(t)] - top);
      total += weight;
      for (Index c = 0; c < dim; ++c)
        sum[static_cast<std::size_t>(c)] += weight * at(data.v, data.short_v, (kv + t) * dim + c);
    }
    for (Index c = 0; c < dim; ++c)
      worst = std::max(worst,
                       std::abs(sum[static_cast<std::size_t>(c)] / total -
                                static_cast<double>(out[static_cast<std::size_t>(row * dim + c)])));
  }
  return worst / largest;
}

double flops(const Flags& flags, Index kv_len) {
  const double pairs = static_cast<double>(flags.chunk * kv_len) +
                       0.5 * static_cast<double>(flags.chunk * (flags.chunk + 1));
  return 4.0 * static_cast<double>(flags.q_heads * flags.head_dim) * pairs;
}

void measure_kernels(const Flags& flags, const std::vector<Peak>& limits, Report& report) {
  const Data data(flags, flags.kv_len);
  const std::vector<Contender> all = contenders();
  std::vector<std::vector<double>> seconds(all.size()), ratios(all.size());
  std::vector<double> errors(all.size());
  quoka::AttentionWorkspace workspace;
  std::vector<float> out(data.q.size());
  const auto time_of = [&](std::size_t i) {
    const double start = thread_seconds();
    attend(flags, data, flags.kv_len, all[i], workspace, out);
    return thread_seconds() - start;
  };
  for (int round = 0; round <= flags.rounds; ++round)  // the first one warms up
    for (std::size_t i = 0; i < all.size(); ++i) {
      const double took = time_of(i);
      if (round == 0) {
        errors[i] = error_of(flags, data, flags.kv_len, all[i].bfloat16_cache, out);
        continue;
      }
      seconds[i].push_back(took);
      ratios[i].push_back(seconds[0].back() / took);
    }
  Table table(
      "arithmetic\tcache\tinstruction\tspeed against float\tGFLOP/s\tof its "
      "peak\terror");
  for (std::size_t i = 0; i < all.size(); ++i) {
    const Contender& x = all[i];
    const double rate = flops(flags, flags.kv_len) / median(seconds[i]) / 1e9;
    const auto peak = std::find_if(limits.begin(), limits.end(), [&](const Peak& one) {
      return one.instruction == x.instruction;
    });
    const double share = peak == limits.end() ? 0.0 : rate * x.products / peak->gflops;
    const std::string cache = x.bfloat16_cache ? "bfloat16" : "float";
    table.row("{}\t{}\t{}\t{:.2f}x\t{:.0f}\t{:.2f}\t{:.1e}", x.arithmetic, cache, x.instruction,
              median(ratios[i]), rate, share, errors[i]);
    report["kernels"].push_back({{"arithmetic", x.arithmetic},
                                 {"cache", cache},
                                 {"instruction", x.instruction},
                                 {"speed", median(ratios[i])},
                                 {"gflops", rate},
                                 {"share_of_peak", share},
                                 {"error", errors[i]}});
  }
  table.print();
}

// ---- shapes -------------------------------------------------------------------------------------

// `text`: q_heads/kv_heads/head_dim/chunk. Throws std::invalid_argument for anything else.
Flags with_shape(Flags flags, const std::string& text) {
  int end = 0;
  const int found = std::sscanf(text.c_str(), "%ld/%ld/%ld/%ld%n", &flags.q_heads, &flags.kv_heads,
                                &flags.head_dim, &flags.chunk, &end);
  if (found != 4 || static_cast<std::size_t>(end) != text.size())
    throw std::invalid_argument("the shape is \"" + text +
                                "\", but must be q_heads/kv_heads/head_dim/chunk");
  if (std::min({flags.q_heads, flags.kv_heads, flags.head_dim, flags.chunk}) < 1 ||
      flags.q_heads % flags.kv_heads != 0)
    throw std::invalid_argument("the shape is \"" + text +
                                "\": all must be at least 1, and q_heads a multiple of kv_heads");
  return flags;
}

// Arithmetics over a cache of floats, by shape: GFLOP/s, and times as fast as float of the same shape.
void measure_shapes(const Flags& flags, Report& report) {
  std::vector<Contender> all = contenders();
  std::erase_if(all, [](const Contender& x) { return x.bfloat16_cache; });
  Table table("heads, channels, queries\tarithmetic\tinstruction\tspeed against float\tGFLOP/s");
  for (const std::string& text : flags.shapes) {
    const Flags shape = with_shape(flags, text);
    const Data data(shape, shape.kv_len);
    quoka::AttentionWorkspace workspace;
    std::vector<float> out(data.q.size());
    std::vector<std::vector<double>> seconds(all.size()), ratios(all.size());
    for (int round = 0; round <= flags.rounds; ++round)  // the first one warms up
      for (std::size_t i = 0; i < all.size(); ++i) {
        const double start = thread_seconds();
        attend(shape, data, shape.kv_len, all[i], workspace, out);
        const double took = thread_seconds() - start;
        if (round == 0) continue;
        seconds[i].push_back(took);
        ratios[i].push_back(seconds[0].back() / took);
      }
    for (std::size_t i = 0; i < all.size(); ++i) {
      const double rate = flops(shape, shape.kv_len) / median(seconds[i]) / 1e9;
      table.row("{}\t{}\t{}\t{:.2f}x\t{:.0f}", text, all[i].arithmetic, all[i].instruction,
                median(ratios[i]), rate);
      report["shapes"].push_back({{"shape", text},
                                  {"arithmetic", all[i].arithmetic},
                                  {"instruction", all[i].instruction},
                                  {"speed", median(ratios[i])},
                                  {"gflops", rate}});
    }
  }
  table.print();
}

// ---- counts -------------------------------------------------------------------------------------

// Tile instructions of one chunk, and how many products of the floor's they are: the floor multiplies
// nothing but what is needed.
void count_tiles(const Flags& flags, Report& report) {
  using Unit = detail::TileUnit<simd::EmulatedTiles>;
  const Index kv_len = flags.emulated_kv_len;
  const Data data(flags, kv_len);
  quoka::AttentionWorkspace workspace;
  std::vector<float> out(data.q.size());
  Table table("arithmetic\ttile products\tof the floor\tloads\tstores\terror");
  const auto count = [&](const Contender& by) {
    simd::EmulatedTiles::counts() = {};
    attend(flags, data, kv_len, by, workspace, out);
    const auto counts = simd::EmulatedTiles::counts();
    const double floor = flops(flags, kv_len) * by.products / (2.0 * 16 * 16 * 32);
    const double error = error_of(flags, data, kv_len, by.bfloat16_cache, out);
    table.row("{}\t{}\t{:.2f}\t{}\t{}\t{:.1e}", by.arithmetic, counts.dot,
              static_cast<double>(counts.dot) / floor, counts.load, counts.store, error);
    report["tiles"].push_back({{"arithmetic", by.arithmetic},
                               {"kv_len", kv_len},
                               {"products", counts.dot},
                               {"of_the_floor", static_cast<double>(counts.dot) / floor},
                               {"loads", counts.load},
                               {"stores", counts.store},
                               {"error", error}});
  };
  count({"bfloat16", "", &detail::bfloat16_panels<Unit, 1>(), 1, true});
  count({"bfloat16_x2", "", &detail::bfloat16_panels<Unit, 2>(), 2, true});
  count({"bfloat16_x3", "", &detail::bfloat16_panels<Unit, 3>(), 3, false});
  table.print();
}

// ---- a real model's layers ----------------------------------------------------------------------

// Errors of the outputs of each captured layer's last queries, root mean squares, against float.
void measure_captures(const Flags& flags, Report& report) {
  Table table("layer\tarithmetic\terror of the output, rms / rms");
  for (const quoka_examples::LayerCapture& layer :
       quoka_examples::load_layers(quoka_examples::SafetensorsFile(flags.capture))) {
    const TensorView<const float> q(layer.q), k(layer.k), v(layer.v);
    const Index len = q.len(), chunk = std::min(flags.chunk, len), past = len - chunk;
    quoka::AttentionWorkspace workspace;
    const auto outputs = [&](const PanelArithmetic& panels) {
      quoka::Tensor<float> out(q.batch(), q.heads(), chunk, v.dim());
      attend_by(panels,
                {q.slice(past, chunk),
                 {k.slice(0, past), v.slice(0, past)},
                 {k.slice(past, chunk), v.slice(past, chunk)},
                 {TensorView<float>(out)}},
                workspace);
      return out;
    };
    const quoka::Tensor<float> exact = outputs(detail::float_panels());
    for (const Contender& by : contenders()) {
      if (by.bfloat16_cache || by.arithmetic == "float") continue;
      const quoka::Tensor<float> out = outputs(*by.panels);
      double error = 0.0, size = 0.0;
      for (Index i = 0; i < out.size(); ++i) {
        const auto a = static_cast<double>(out.data()[i]), b = static_cast<double>(exact.data()[i]);
        error += (a - b) * (a - b), size += b * b;
      }
      table.row("{}\t{}\t{:.1e}", layer.name, by.arithmetic, std::sqrt(error / size));
      report["captures"].push_back({{"layer", layer.name},
                                    {"arithmetic", by.arithmetic},
                                    {"error", std::sqrt(error / size)}});
    }
  }
  table.print();
}

int run(const Flags& flags, Report& report) {
  for (const std::string& shape : flags.shapes) with_shape(flags, shape);
  fmt::print("{}\n\n", machine());
  const std::vector<Peak> limits = peaks();
  Table table("instruction\tpeak GFLOP/s\tof float FMA");
  for (const Peak& peak : limits) {
    table.row("{}\t{:.0f}\t{:.2f}", peak.instruction, peak.gflops,
              peak.gflops / limits.front().gflops);
    report["peaks"].push_back({{"instruction", peak.instruction},
                               {"gflops", peak.gflops},
                               {"of_float", peak.gflops / limits.front().gflops}});
  }
  table.print();
  fmt::print("\nA chunk of {} over {} keys, {}/{}/{} heads and channels, medians of {} rounds\n\n",
             flags.chunk, flags.kv_len, flags.q_heads, flags.kv_heads, flags.head_dim,
             flags.rounds);
  report["shape"] = {{"chunk", flags.chunk},       {"kv_len", flags.kv_len},
                     {"q_heads", flags.q_heads},   {"kv_heads", flags.kv_heads},
                     {"head_dim", flags.head_dim}, {"rounds", flags.rounds}};
  measure_kernels(flags, limits, report);
  if (!flags.capture.empty()) {
    fmt::print("\nThe last {} queries of {}\n\n", flags.chunk, flags.capture);
    measure_captures(flags, report);
  }
  if (!flags.shapes.empty()) {
    fmt::print("\nOther shapes over {} keys\n\n", flags.kv_len);
    measure_shapes(flags, report);
  }
  if (flags.emulated_kv_len == 0) return 0;
  fmt::print("\nAMX emulated, the same chunk over {} keys\n\n", flags.emulated_kv_len);
  count_tiles(flags, report);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  Flags flags;
  Program app(argc, argv, "Rates and errors of every arithmetic of attention, one thread");
  app.add_option("--kv-len", flags.kv_len, "cached keys")->capture_default_str();
  app.add_option("--chunk", flags.chunk, "queries")->capture_default_str();
  app.add_option("--rounds", flags.rounds, "timed calls of each")->capture_default_str();
  app.add_option("--capture", flags.capture, "safetensors with q, k and v of a model's layers")
      ->check(CLI::ExistingFile);
  app.add_option("--shapes", flags.shapes, "others: q_heads/kv_heads/head_dim/chunk,...")
      ->delimiter(',');
  app.add_option("--emulated-kv-len", flags.emulated_kv_len,
                 "cached keys of the emulated chunk; 0: none")
      ->capture_default_str();
  return app.run([&] { return run(flags, app.report); });
}
