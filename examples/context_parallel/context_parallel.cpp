// A prompt whose keys are spread over the processes of an MPI job, against one process. Each chunk is
// done twice, in turns: by all processes together, then by the first one alone, while the others sleep.
// So both are timed on the same machine at the same time, and each chunk's Selection and output are
// compared.
//
//   mpirun -n 2 build/examples/context_parallel/context_parallel --len 32768
//
// Exits with 1 where a Selection differs, or an output by more than 2e-6 of the largest one.

#include "context_parallel/mpi_communicator.hpp"
#include "support/run_program.hpp"

#include <quoka/distributed/sharded_prefill.hpp>
#include <quoka/prefill/chunked_prefill.hpp>
#include <quoka/runtime/isa.hpp>
#include <quoka/runtime/thread_pool.hpp>
#include <quoka/select/quoka.hpp>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>
#include <unsupported/Eigen/CXX11/Tensor>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <thread>
#include <vector>

namespace {

using namespace quoka_examples;
using quoka::Index;
using Tensor = Eigen::Tensor<float, 4, Eigen::RowMajor>;

struct Flags {
  Index len = 32768, chunk = 128, q_heads = 32, kv_heads = 8, head_dim = 128, budget = 1024;
  Index block = 0;  // tokens of a shard's block; 0: the layer's choice
  int threads = 1;  // of each process
  bool robust = false, dense = false;
  std::string json;
};

// The same numbers on every process: uniform in [-1, 1), a variance of 1/3.
class Numbers {
 public:
  explicit Numbers(std::uint64_t seed) : state_(seed) {}
  void fill(Tensor& x) {
    for (Index i = 0; i < x.size(); ++i) {
      state_ = state_ * 6364136223846793005u + 1442695040888963407u;
      x.data()[i] = static_cast<float>(static_cast<std::int32_t>(state_ >> 32)) * 0x1p-31f;
    }
  }

 private:
  std::uint64_t state_;
};

// A barrier that does not keep a core busy.
void sleep_until_all_are_here() {
  MPI_Request request;
  MPI_Ibarrier(MPI_COMM_WORLD, &request);
  for (int done = 0; done == 0;) {
    MPI_Test(&request, &done, MPI_STATUS_IGNORE);
    if (done == 0) std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

double seconds_of(auto&& f) {
  const auto begin = std::chrono::steady_clock::now();
  f();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// The sum of x, each 16 neighbours counted by their median: neighbours on a shared machine take time
// from single chunks.
double sum_of_medians(const std::vector<double>& x) {
  double sum = 0.0;
  for (std::size_t begin = 0; begin < x.size(); begin += 16) {
    std::vector<double> part(
        x.begin() + static_cast<std::ptrdiff_t>(begin),
        x.begin() + static_cast<std::ptrdiff_t>(std::min(begin + 16, x.size())));
    const auto middle = part.begin() + std::ssize(part) / 2;
    std::nth_element(part.begin(), middle, part.end());
    sum += *middle * static_cast<double>(part.size());
  }
  return sum;
}

struct Totals {
  std::vector<double> together, alone;  // seconds of each chunk
  double error = 0.0;                   // of the largest output
  Index different = 0;                  // Selections
  Index bytes = 0, messages = 0;        // of the last chunk, sent by this rank
};

template <class S>
Totals run(const Flags& flags, const typename S::Options& options, MpiCommunicator& mpi,
           quoka::ThreadPool& threads) {
  const quoka::LayerShape shape{flags.q_heads, flags.kv_heads, flags.head_dim};
  const bool first = mpi.rank() == 0;
  quoka::ShardedPrefill<S> sharded(shape, options, mpi,
                                   quoka::ShardLayout::round_robin(flags.block));
  typename S::Options one_machine = options;
  if constexpr (requires { one_machine.sketch; })
    if (one_machine.domain == quoka::Domain::softmax) one_machine.sketch = quoka::Sketch::off;
  quoka::ChunkedPrefill<S> alone(shape, one_machine);
  sharded.reserve(flags.len);
  if (first) alone.reserve(flags.len);

  Numbers numbers(1);
  Totals totals;
  for (Index begin = 0; begin < flags.len; begin += flags.chunk) {
    const Index n = std::min(flags.chunk, flags.len - begin);
    Tensor q(1, flags.q_heads, n, flags.head_dim), k(1, flags.kv_heads, n, flags.head_dim),
        v(1, flags.kv_heads, n, flags.head_dim), out(1, flags.q_heads, n, flags.head_dim),
        expected(1, flags.q_heads, n, flags.head_dim);
    for (Tensor* const x : {&q, &k, &v}) numbers.fill(*x);
    const Index bytes = mpi.bytes(), messages = mpi.messages();
    MPI_Barrier(MPI_COMM_WORLD);
    totals.together.push_back(seconds_of([&] { sharded.forward(q, k, v, out, threads); }));
    totals.bytes = mpi.bytes() - bytes, totals.messages = mpi.messages() - messages;
    if (first) {
      totals.alone.push_back(seconds_of([&] { alone.forward(q, k, v, expected, threads); }));
      double most = 0.0, worst = 0.0;
      for (Index i = 0; i < out.size(); ++i) {
        most = std::max(most, std::abs(static_cast<double>(expected.data()[i])));
        worst = std::max(worst, std::abs(static_cast<double>(out.data()[i]) -
                                         static_cast<double>(expected.data()[i])));
      }
      totals.error = std::max(totals.error, worst / most);
      totals.different += sharded.selection() == alone.selection() ? 0 : 1;
    }
    sleep_until_all_are_here();
  }
  return totals;
}

int run_job(const Flags& flags) {
  MpiCommunicator mpi;
  quoka::ThreadPool threads(flags.threads);
  const quoka::QuokaOptions options =
      flags.robust ? quoka::QuokaOptions::robust(flags.q_heads / flags.kv_heads, flags.budget)
                   : quoka::QuokaOptions{.budget = flags.budget};
  const Totals totals = flags.dense ? run<quoka::DenseSelector>(flags, {}, mpi, threads)
                                    : run<quoka::QuokaSelector>(flags, options, mpi, threads);
  if (mpi.rank() != 0) return 0;
  const double together = sum_of_medians(totals.together), alone = sum_of_medians(totals.alone),
               ratio = alone / together;
  const Index ring =
      4 * 2 * flags.kv_heads * flags.head_dim * (flags.len / mpi.ranks()) * (mpi.ranks() - 1);
  std::printf("%d processes of %d thread(s), %s, %td tokens in chunks of %td, budget %td, %s\n",
              mpi.ranks(), flags.threads,
              flags.dense    ? "dense"
              : flags.robust ? "robust"
                             : "QuoKA",
              flags.len, flags.chunk, flags.budget, quoka::isa());
  std::printf("prefill together         %8.3f s\n", together);
  std::printf("prefill by one process   %8.3f s, %.2f times as long\n", alone, ratio);
  std::printf("sent by a process in the last chunk   %td bytes in %td messages\n", totals.bytes,
              totals.messages);
  std::printf("by a ring of all keys and values      %td bytes\n", ring);
  std::printf("Selections that differ   %td\n", totals.different);
  std::printf("outputs differ by        %.1e of the largest\n", totals.error);
  if (!flags.json.empty()) {
    const nlohmann::json record = {{"processes", mpi.ranks()},
                                   {"threads", flags.threads},
                                   {"len", flags.len},
                                   {"chunk", flags.chunk},
                                   {"budget", flags.budget},
                                   {"dense", flags.dense},
                                   {"robust", flags.robust},
                                   {"seconds_together", together},
                                   {"seconds_alone", alone},
                                   {"ratio", ratio},
                                   {"bytes_per_chunk", totals.bytes},
                                   {"messages_per_chunk", totals.messages},
                                   {"ring_bytes_per_chunk", ring},
                                   {"selections_that_differ", totals.different},
                                   {"output_error", totals.error},
                                   {"isa", quoka::isa()}};
    std::ofstream(flags.json) << record.dump(2) << "\n";
  }
  return totals.different == 0 && totals.error <= 2e-6 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  const MpiSession session(&argc, &argv);
  Flags flags;
  CLI::App app("Prefill over the processes of an MPI job, against one process");
  app.add_option("--len", flags.len, "tokens of the prompt")->capture_default_str();
  app.add_option("--chunk", flags.chunk)->capture_default_str();
  app.add_option("--q-heads", flags.q_heads)->capture_default_str();
  app.add_option("--kv-heads", flags.kv_heads)->capture_default_str();
  app.add_option("--head-dim", flags.head_dim)->capture_default_str();
  app.add_option("--budget", flags.budget, "keys per KV head")->capture_default_str();
  app.add_option("--block", flags.block, "tokens of a shard's block; 0: the layer's choice");
  app.add_option("--threads", flags.threads, "of each process")->capture_default_str();
  app.add_flag("--robust", flags.robust, "QuoKA's robust preset");
  app.add_flag("--dense", flags.dense, "no selection");
  app.add_option("--json", flags.json, "write the results there, too");
  return run_program(app, argc, argv, [&] { return run_job(flags); });
}
