// A prompt whose keys are spread over the processes of an MPI job, against one process. Each chunk is
// done twice, in turns: by all processes together, then by the first one alone, while the others sleep.
// So both are timed on the same machine at the same time, and each chunk's Selection and output are
// compared.
//
//   mpirun -n 2 build/examples/context_parallel/context_parallel --len 32768
//
// Exits with 1 where a Selection differs, or an output by more than 2e-6 of the largest one (2e-5 where
// Arithmetic::automatic takes products of bfloat16).

#include "context_parallel/mpi_communicator.hpp"
#include "context_parallel/sharded_prefill.hpp"
#include "support/clock.hpp"
#include "support/program.hpp"
#include "support/selector_flags.hpp"
#include "support/statistics.hpp"

#include <quoka/layer/chunked_prefill.hpp>
#include <quoka/runtime/isa.hpp>
#include <quoka/runtime/thread_pool.hpp>
#include <quoka/select/quoka.hpp>

#include <unsupported/Eigen/CXX11/Tensor>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <thread>
#include <vector>

namespace {

using namespace quoka_examples;
using quoka::Index;
using Tensor = Eigen::Tensor<float, 4, Eigen::RowMajor>;

struct Flags : PrefillFlags {
  Index block = ShardMap::usual_block;
  int threads = 1;  // of each process
  bool dense = false;
};

// The same numbers on every process: uniform in [-1, 1), a variance of 1/3.
class Numbers {
 public:
  void fill(Tensor& x) {
    for (Index i = 0; i < x.size(); ++i) {
      state_ = state_ * 6364136223846793005u + 1442695040888963407u;
      x.data()[i] = static_cast<float>(static_cast<std::int32_t>(state_ >> 32)) * 0x1p-31f;
    }
  }

 private:
  std::uint64_t state_ = 1;
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

// The sum of x, each 16 neighbours counted by their median: neighbours on a shared machine take time
// from single chunks.
double sum_of_medians(const std::vector<double>& x) {
  double sum = 0.0;
  for (std::size_t begin = 0; begin < x.size(); begin += 16) {
    const std::size_t end = std::min(begin + 16, x.size());
    sum += median({x.begin() + static_cast<std::ptrdiff_t>(begin),
                   x.begin() + static_cast<std::ptrdiff_t>(end)}) *
           static_cast<double>(end - begin);
  }
  return sum;
}

struct Totals {
  std::vector<double> together, alone;  // seconds of each chunk
  double error = 0.0;                   // of the largest output
  Index different = 0;                  // Selections
  Index bytes = 0, messages = 0;        // of the last chunk, sent by this rank
};

// The largest difference, relative to the largest number of `expected`.
double largest_error(const Tensor& out, const Tensor& expected) {
  double most = 0.0, worst = 0.0;
  for (Index i = 0; i < out.size(); ++i) {
    const double x = static_cast<double>(expected.data()[i]);
    most = std::max(most, std::abs(x));
    worst = std::max(worst, std::abs(static_cast<double>(out.data()[i]) - x));
  }
  return worst / most;
}

template <class Selector>
Totals run(const Flags& flags, const typename Selector::Options& options,
           const std::optional<quoka::QuokaOptions>& selection, MpiCommunicator& mpi,
           quoka::ThreadPool& threads) {
  const quoka::LayerShape shape{flags.q_heads, flags.kv_heads, flags.head_dim};
  const bool first = mpi.rank() == 0;
  ShardedPrefill sharded(shape, selection, mpi, {}, flags.block);
  quoka::ChunkedPrefill<Selector> alone(shape, options);
  sharded.reserve(flags.len);
  if (first) alone.reserve(flags.len);

  Numbers numbers;
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
      totals.error = std::max(totals.error, largest_error(out, expected));
      totals.different += sharded.selection() == alone.selection() ? 0 : 1;
    }
    sleep_until_all_are_here();
  }
  return totals;
}

int run_job(const Flags& flags, Report& report) {
  MpiCommunicator mpi;
  quoka::ThreadPool threads(flags.threads);
  const quoka::QuokaOptions options{.budget = quoka::Budget::keys(flags.budget)};
  const Totals totals = flags.dense
                            ? run<quoka::DenseSelector>(flags, {}, std::nullopt, mpi, threads)
                            : run<quoka::QuokaSelector>(flags, options, options, mpi, threads);
  if (mpi.rank() != 0) {
    report.discard();
    return 0;
  }
  const double together = sum_of_medians(totals.together), alone = sum_of_medians(totals.alone);
  // Bytes that dense attention by a ring sends, for the last chunk.
  const Index ring =
      8 * flags.kv_heads * flags.head_dim * (flags.len / mpi.ranks()) * (mpi.ranks() - 1);
  fmt::print("{} processes of {} thread(s), {}, {} tokens in chunks of {}, budget {}, {}\n",
             mpi.ranks(), flags.threads, flags.dense ? "dense" : "QuoKA", flags.len, flags.chunk,
             flags.budget, quoka::isa());
  fmt::print("together {:.2f} s, alone {:.2f} s: {:.2f} times as fast\n", together, alone,
             alone / together);
  fmt::print("sent by a process for the last chunk: {} bytes in {} messages; a ring sends {}\n",
             totals.bytes, totals.messages, ring);
  fmt::print("{} selections differ; the largest difference of an output is {:.1e} of the largest\n",
             totals.different, totals.error);
  report.add({{"processes", mpi.ranks()},
              {"threads", flags.threads},
              {"len", flags.len},
              {"chunk", flags.chunk},
              {"budget", flags.budget},
              {"dense", flags.dense},
              {"seconds_together", together},
              {"seconds_alone", alone},
              {"ratio", alone / together},
              {"bytes_per_chunk", totals.bytes},
              {"messages_per_chunk", totals.messages},
              {"ring_bytes_per_chunk", ring},
              {"selections_that_differ", totals.different},
              {"output_error", totals.error},
              {"isa", quoka::isa()}});
  const bool in_float =
      quoka::arithmetic_used(quoka::Arithmetic::automatic) == quoka::Arithmetic::float_;
  return totals.different == 0 && totals.error <= (in_float ? 2e-6 : 2e-5) ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  const MpiSession session(&argc, &argv);
  Flags flags;
  Program app(argc, argv, "Prefill over the processes of an MPI job, against one process");
  add_prefill_flags(app, flags);
  app.add_option("--block", flags.block, "tokens of a shard's block")->capture_default_str();
  app.add_option("--threads", flags.threads, "of each process")->capture_default_str();
  app.add_flag("--dense", flags.dense, "no selection");
  return app.run([&] { return run_job(flags, app.report); },
                 [&](const std::string& name, const std::exception& error) {
                   fmt::print(stderr, "{}: {}\n", name, error.what());
                   MPI_Abort(MPI_COMM_WORLD, 1);
                   return 1;
                 });
}
