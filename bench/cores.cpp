// A simulation of calls on more cores than this machine has.
//
// A real call runs by an executor that claims `workers` threads and records parallel runs, their tasks, each task's
// time on one thread, and the caller's own work between runs. The record is then played on that many workers: a free
// one takes the next task. A run costs a barrier, a task a hand-over. Efficiency is the time of one worker over workers
// times theirs. Not simulated: caches and memory that workers share, clocks that fall, and sockets. --check: what real
// threads of this machine take.
//
// One layer of Qwen3-4B's shape in float, generated data: a whole step (select, attend, append).

#include "support/paired_steps.hpp"
#include "support/program.hpp"
#include "support/selector_flags.hpp"
#include "support/simulated_workers.hpp"
#include "support/table.hpp"

#include <quoka/runtime/thread_pool.hpp>

#include <algorithm>
#include <thread>

namespace {

using namespace quoka_examples;

constexpr quoka::LayerShape shape{.q_heads = 32, .kv_heads = 8, .head_dim = 128};

struct Flags {
  std::vector<Index> lengths{8192, 32768};
  std::vector<Index> chunks{128, 1};
  std::vector<int> workers{1, 2, 4, 8, 16, 32, 64, 128, 256};
  std::string methods = "quoka,quoka.balanced";
  std::string budget = "1024";
  double barrier_us = 5.0, hand_over_us = 0.2;
  int rounds = 5;
  bool check = false;
};

// A layer with its cache, and a chunk for it.
class Call {
 public:
  Call(const std::string& method, Index kv_len, Index tokens, const Flags& flags)
      : kv_len_(kv_len),
        prompt_(shape, tokens),
        layers_(make_layers(method, shape, {.budget = parse_budget(flags.budget)})) {
    GeneratedPrompt(shape, 128).fill(layer(), kv_len);
    layer().reserve(kv_len + tokens);
  }
  double seconds(quoka::ExecutorRef executor) {
    layer().truncate(kv_len_);
    return seconds_of([&] { forward(executor); });
  }
  // For as many workers, and for one; in turns, as the machine may change.
  std::pair<Recording, Recording> record(int workers, int rounds) {
    OtherThread worker;
    std::vector<Recording> by_all, by_one;
    for (int round = 0; round <= rounds; ++round)
      for (const bool all : {true, false}) {
        // Memory is for as many workers as the last call had: the first one takes it.
        for (const bool counts : {false, true}) {
          layer().truncate(kv_len_);
          Recorder recorder(all ? workers : 1, worker);
          forward(recorder);
          if (round > 0 && counts) (all ? by_all : by_one).push_back(recorder.finished());
        }
      }
    return {least_of(by_all), least_of(by_one)};
  }

 private:
  void forward(quoka::ExecutorRef executor) {
    layer().forward(prompt_.q, prompt_.k, prompt_.v, prompt_.out, executor);
  }
  AnyLayer& layer() { return *layers_.front(); }

  Index kv_len_;
  GeneratedPrompt prompt_;
  LayerStack layers_;
};

int run(const Flags& flags, Report& report) {
  const int threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  const Costs costs{1e-6 * flags.barrier_us, 1e-6 * flags.hand_over_us};
  std::vector<std::string> methods = parse_methods(flags.methods);
  methods.insert(methods.begin(), "dense");
  fmt::print(
      "{}\none layer, {} query heads, {} KV heads, head_dim {}, budget {}; a barrier {:.1f} us, a "
      "hand-over {:.2f} us; the least of {} rounds\n\n",
      machine(), shape.q_heads, shape.kv_heads, shape.head_dim, flags.budget, flags.barrier_us,
      flags.hand_over_us, flags.rounds);
  report.add({{"q_heads", shape.q_heads},
              {"kv_heads", shape.kv_heads},
              {"head_dim", shape.head_dim},
              {"budget", flags.budget},
              {"barrier_us", flags.barrier_us},
              {"hand_over_us", flags.hand_over_us},
              {"rounds", flags.rounds}});
  report["results"] = nlohmann::json::array();
  Table table("chunk\tkeys\tmethod\tworkers\ttime\tspeedup\tefficiency\tover dense\truns\ttasks");
  Progress bar("cores", std::ssize(flags.chunks) * std::ssize(flags.lengths) * std::ssize(methods) *
                            std::ssize(flags.workers));
  Index done = 0;
  for (const Index chunk : flags.chunks)
    for (const Index kv_len : flags.lengths) {
      std::vector<double> dense(flags.workers.size());  // speedup over one worker of its own
      for (const std::string& method : methods) {
        Call call(method, kv_len, chunk, flags);
        for (std::size_t i = 0; i < flags.workers.size(); ++i) {
          const int workers = flags.workers[i];
          const auto [recording, by_one] = call.record(workers, flags.rounds);
          const double one = simulated_seconds(by_one, 1, costs);
          const double seconds = workers == 1 ? one : simulated_seconds(recording, workers, costs);
          if (method == "dense") dense[i] = seconds;
          const double speedup = one / seconds, efficiency = speedup / workers;
          table.row("{}\t{}\t{}\t{}\t{:.3f} ms\t{:.1f}x\t{:.0f} %\t{:.1f}x\t{}\t{}", chunk, kv_len,
                    method, workers, 1e3 * seconds, speedup, 100.0 * efficiency, dense[i] / seconds,
                    std::ssize(recording.sections), recording.tasks());
          report["results"].push_back({{"chunk", chunk},
                                       {"kv_len", kv_len},
                                       {"method", method},
                                       {"workers", workers},
                                       {"seconds", seconds},
                                       {"speedup", speedup},
                                       {"efficiency", efficiency},
                                       {"over_dense", dense[i] / seconds},
                                       {"runs", recording.sections.size()},
                                       {"tasks", recording.tasks()},
                                       {"seconds_alone", recording.alone()}});
          if (flags.check && workers > 1 && workers <= threads) {
            quoka::ThreadPool single(1), pool(workers);
            const auto taken = time_in_turns(2, 4 * flags.rounds, [&](std::size_t which) {
              return call.seconds(which == 0 ? single : pool);
            });
            const double real = median_ratio(taken[0], taken[1]);
            table.row("\t\tthe same by real threads\t{}\t{:.3f} ms\t{:.1f}x\t{:.0f} %\t\t\t",
                      workers, 1e3 * median(taken[1]), real, 100.0 * real / workers);
            report["results"].back()["real_speedup"] = real;
          }
          bar.update(++done);
        }
      }
    }
  table.print();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  Flags flags;
  Program app(argc, argv,
              "What a step would take on more cores: recorded tasks, simulated workers");
  app.add_option("--lengths", flags.lengths, "cached keys")->delimiter(',');
  app.add_option("--chunks", flags.chunks, "tokens per chunk; 1 is a decode step")->delimiter(',');
  app.add_option("--workers", flags.workers, "simulated workers")
      ->delimiter(',')
      ->check(whole_number(1, 1024));
  app.add_option("--selectors", flags.methods, "methods beside dense")->capture_default_str();
  app.add_option("--budget", flags.budget, "keys per KV head")->capture_default_str();
  app.add_option("--barrier", flags.barrier_us, "microseconds of a parallel run's barrier")
      ->capture_default_str();
  app.add_option("--hand-over", flags.hand_over_us, "microseconds from a task to the next")
      ->capture_default_str();
  add_rounds(app, flags.rounds);
  app.add_flag("--check", flags.check, "measure real threads, as many as the machine has, too");
  return app.run([&] { return run(flags, app.report); });
}
