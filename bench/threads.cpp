// What a second thread brings, and what this machine lets it bring.
//
// Each path three ways, taking turns in one process: a call by one thread, the same call by all of them, and
// as many calls at once, each by one thread over a cache of its own. The third shares nothing but the machine
// (its clock, its caches, its memory, its other tenants): what it gains is the most that the second can.
// Wall clock; medians of the ratios of a round. One layer of Qwen3-4B's shape, float, generated data.

#include "support/machine.hpp"
#include "support/paired_steps.hpp"
#include "support/program.hpp"
#include "support/selector_flags.hpp"
#include "support/table.hpp"

#include <deque>
#include <iterator>

namespace {

using namespace quoka_examples;

constexpr quoka::LayerShape shape{.q_heads = 32, .kv_heads = 8, .head_dim = 128};

struct Flags {
  int threads = 2;
  int rounds = 21;
};

// A layer's call: a chunk of tokens, or its selection alone.
struct Path {
  std::string name, method;
  Index tokens, kv_len;
  bool selection_alone = false;
};
const Path paths[]{
    {"dense chunk", "dense", 128, 8192},
    {"dense token", "dense", 1, 32768},
    {"QuoKA chunk", "quoka", 128, 32768},
    {"QuoKA chunk, selection", "quoka", 128, 32768, true},
    {"QuoKA token", "quoka", 1, 32768},
    {"recommended chunk", "quoka.recommended", 128, 32768},
    {"recommended chunk, selection", "quoka.recommended", 128, 32768, true},
    {"float scores, selection", "quoka.float", 128, 32768, true},
};

// A layer with its cache, and a chunk for it.
class Call {
 public:
  explicit Call(const Path& path)
      : path_(path), prompt_(shape, path.tokens), layers_(make_layers(path.method, shape, {})) {
    GeneratedPrompt(shape, 128).fill(layer(), path.kv_len);
    layer().reserve(path.kv_len + path.tokens);
  }
  void operator()(quoka::ThreadPool& threads) {
    if (path_.selection_alone) {
      layer().select(prompt_.q, threads);
      return;
    }
    layer().truncate(path_.kv_len);
    layer().forward(prompt_.q, prompt_.k, prompt_.v, prompt_.out, threads);
  }

 private:
  AnyLayer& layer() { return *layers_.front(); }

  Path path_;
  GeneratedPrompt prompt_;
  LayerStack layers_;
};

struct Result {
  double ms;      // of one call by one thread
  double shared;  // times as fast by all threads
  double apart;   // calls at once, each by its own thread: times as many in the same time
  double share;   // shared / apart
};

Result measure(const Path& path, const Flags& flags) {
  std::deque<Call> calls;
  for (int i = 0; i < flags.threads; ++i) calls.emplace_back(path);
  quoka::ThreadPool all(flags.threads);
  std::vector<std::unique_ptr<quoka::ThreadPool>> single;
  for (int i = 0; i < flags.threads; ++i) single.push_back(std::make_unique<quoka::ThreadPool>(1));
  std::vector<double> ms, shared, apart, share;
  for (int round = -1; round < flags.rounds; ++round) {
    const double one = seconds_of([&] { calls[0](*single[0]); });
    const double by_all = seconds_of([&] { calls[0](all); });
    const double at_once = seconds_of([&] {
      all.run(flags.threads, [&](Index i, int) {
        const auto which = static_cast<std::size_t>(i);
        calls[which](*single[which]);
      });
    });
    const double again = seconds_of([&] { calls[0](*single[0]); });
    if (round < 0) continue;  // warms up
    const double alone = 0.5 * (one + again);
    ms.push_back(1e3 * alone), shared.push_back(alone / by_all);
    apart.push_back(flags.threads * alone / at_once);
    share.push_back(at_once / (flags.threads * by_all));
  }
  return {median(ms), median(shared), median(apart), median(share)};
}

int run(const Flags& flags, Report& report) {
  const double gflops = fma_peak_gflops(), gbs = read_bandwidth_gbs();
  report.add({{"threads", flags.threads},
              {"rounds", flags.rounds},
              {"fma_peak_gflops_1_core", gflops},
              {"read_gbs_1_core", gbs}});
  Table table("path\tkeys\t1 thread, ms\tone call shared\tcalls apart\tof that");
  Progress bar("threads", static_cast<Index>(std::size(paths)));
  Index done = 0;
  for (const Path& path : paths) {
    const Result r = measure(path, flags);
    table.row("{}\t{}\t{:.2f}\t{:.2f}x\t{:.2f}x\t{:.2f}", path.name, path.kv_len, r.ms, r.shared,
              r.apart, r.share);
    report["results"].push_back({{"path", path.name},
                                 {"kv_len", path.kv_len},
                                 {"one_thread_ms", r.ms},
                                 {"shared", r.shared},
                                 {"apart", r.apart},
                                 {"shared_of_apart", r.share}});
    bar.update(++done);
  }
  fmt::print(
      "{}; one core: {:.0f} GFLOP/s of multiply-adds, {:.0f} GB/s read\n"
      "{} threads, medians of {} rounds\n\n",
      machine(), gflops, gbs, flags.threads, flags.rounds);
  table.print();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  Flags flags;
  Program app(argc, argv, "What a second thread brings, beside what the machine lets it bring");
  add_threads(app, flags.threads);
  app.get_option("--threads")->check(CLI::Range(2, 1024));
  add_rounds(app, flags.rounds);
  return app.run([&] { return run(flags, app.report); });
}
