// What a call would take on more cores than this machine has: a simulation.
//
// A real call runs by an executor that claims `workers` threads and records what it is given: parallel runs, their
// tasks, how long each took on one thread, and what the caller did between runs on its own. The record is then
// played on that many workers: a free one takes the next task that may start. A run costs a barrier, a task
// a hand-over, and the call no less than the bytes that it must read take. Efficiency is the time of one
// worker over workers times theirs. Not simulated: caches that workers share, clocks that fall, and
// sockets. What real threads of this machine take is measured beside it.
//
// One layer of Qwen3-4B's shape in float, generated data: a whole step (select, attend, append).

#include "support/machine.hpp"
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
  std::string methods = "quoka,quoka.recommended,quoka.robust";
  std::string budget = "1024";
  double barrier_us = 5.0, hand_over_us = 0.2, gbs = 0.0;
  int rounds = 5;
  bool runs = false, check = false;
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

// What a step must read once: keys and values of dense attention; a sketch's codes, units and errors, and
// keys and values of the selected.
double bytes_read(const std::string& method, Index kv_len, const Flags& flags) {
  const double row = static_cast<double>(shape.head_dim) * sizeof(float);
  const double len = static_cast<double>(kv_len), heads = static_cast<double>(shape.kv_heads);
  if (method == "dense") return heads * len * 2.0 * row;
  const double kept = static_cast<double>(parse_budget(flags.budget).count(kv_len));
  const bool in_float = method.find(".float") != std::string::npos;
  const double scored = in_float ? row : static_cast<double>(shape.head_dim) + 12.0;
  return heads * (len * scored + kept * 2.0 * row);
}

// What an empty parallel run takes with all threads of this machine, in microseconds.
double measured_barrier_us(int threads) {
  quoka::ThreadPool pool(threads);
  std::vector<double> us;
  for (int i = 0; i < 2000; ++i)
    us.push_back(1e6 * seconds_of([&] { pool.run(threads, [](Index, int) {}); }));
  return median(us);
}

void print_runs(const Recording& recording, int workers, const Costs& costs) {
  Table table("alone, us\tchains\ttasks of a stage\tsum, us\tlongest, us\tsimulated, us");
  for (const Section& section : recording.sections) {
    table.row("{:.1f}\t{}\t\t\t\t{:.1f}", 1e6 * section.alone, section.chains,
              1e6 * simulated_seconds(section, workers, costs));
    Index begin = 0;
    for (const Index tasks : section.tasks) {
      double sum = 0.0, longest = 0.0;
      for (Index chain = 0; chain < section.chains; ++chain)
        for (Index task = 0; task < tasks; ++task) {
          const auto at = static_cast<std::size_t>(chain * section.chain_tasks() + begin + task);
          sum += section.seconds[at], longest = std::max(longest, section.seconds[at]);
        }
      table.row("\t\t{}\t{:.1f}\t{:.1f}", tasks, 1e6 * sum, 1e6 * longest);
      begin += tasks;
    }
  }
  table.row("{:.1f}\t-\tend\t-\t-\t-", 1e6 * recording.alone_at_end);
  table.print();
}

int run(Flags& flags, Report& report) {
  const int threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  if (flags.barrier_us < 0.0) flags.barrier_us = measured_barrier_us(threads);
  if (flags.gbs < 0.0) flags.gbs = read_bandwidth_gbs() * threads;
  const Costs costs{1e-6 * flags.barrier_us, 1e-6 * flags.hand_over_us};
  std::vector<std::string> methods = parse_methods(flags.methods);
  methods.insert(methods.begin(), "dense");
  fmt::print(
      "{}\none layer, {} query heads, {} KV heads, head_dim {}, budget {}; a barrier {:.1f} us, a "
      "hand-over {:.2f} us, {}; the least of {} rounds\n\n",
      machine(), shape.q_heads, shape.kv_heads, shape.head_dim, flags.budget, flags.barrier_us,
      flags.hand_over_us, flags.gbs > 0.0 ? fmt::format("{:.0f} GB/s", flags.gbs) : "any bandwidth",
      flags.rounds);
  report.add({{"q_heads", shape.q_heads},
              {"kv_heads", shape.kv_heads},
              {"head_dim", shape.head_dim},
              {"budget", flags.budget},
              {"barrier_us", flags.barrier_us},
              {"hand_over_us", flags.hand_over_us},
              {"gbs", flags.gbs},
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
        const double least =
            flags.gbs > 0.0 ? 1e-9 * bytes_read(method, kv_len, flags) / flags.gbs : 0.0;
        for (std::size_t i = 0; i < flags.workers.size(); ++i) {
          const int workers = flags.workers[i];
          const auto [recording, by_one] = call.record(workers, flags.rounds);
          const double one = simulated_seconds(by_one, 1, costs);
          const double seconds =
              workers == 1 ? one : std::max(least, simulated_seconds(recording, workers, costs));
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
          if (flags.runs) {
            fmt::print("chunk {}, {} keys, {}, {} workers\n", chunk, kv_len, method, workers);
            print_runs(recording, workers, costs);
            fmt::print("\n");
          }
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
  app.add_option("--barrier", flags.barrier_us,
                 "microseconds of a parallel run's barrier; below 0: measured here")
      ->capture_default_str();
  app.add_option("--hand-over", flags.hand_over_us, "microseconds from a task to the next")
      ->capture_default_str();
  app.add_option("--bandwidth", flags.gbs,
                 "GB/s that all workers share; 0: any; below 0: of this machine's cores together")
      ->capture_default_str();
  add_rounds(app, flags.rounds);
  app.add_flag("--runs", flags.runs, "print each parallel run");
  app.add_flag("--check", flags.check, "measure real threads, as many as the machine has, too");
  return app.run([&] { return run(flags, app.report); });
}
