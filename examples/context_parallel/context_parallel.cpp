// A prompt whose keys are spread over the processes of an MPI job, against one process. Each chunk is
// done twice, in turns: by all processes together, then by the first one alone, while the others sleep.
// So both are timed on the same machine at the same time, and each chunk's Selection and output are
// compared. The parts of a chunk are timed on the first one, and what cost_model.hpp makes of them is printed
// beside what was measured, and for other numbers of ranks on other networks.
//
//   mpirun -n 2 build/examples/context_parallel/context_parallel --len 32768
//
// Exits with 1 where a Selection differs, an output by more than 2e-6 of the largest one (2e-5 where
// Arithmetic::automatic takes products of bfloat16), or what was sent from what the model says.

#include "context_parallel/cost_model.hpp"
#include "context_parallel/mpi_communicator.hpp"
#include "support/clock.hpp"
#include "support/program.hpp"
#include "support/selector_flags.hpp"
#include "support/statistics.hpp"

#include <quoka/distributed/sharded_prefill.hpp>
#include <quoka/kernels/merge_row.hpp>
#include <quoka/simd/tuning.hpp>
#include <quoka/prefill/chunked_prefill.hpp>
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
  Index block = 0;  // tokens of a shard's block; 0: the layer's choice
  int threads = 1;  // of each process
  bool dense = false;
};

// Networks that the model is asked about: the assumptions of its curves.
struct NamedNetwork {
  const char* name;
  Network network;
};
constexpr NamedNetwork networks[] = {
    {"100 Gbit/s, 5 us", {5e-6, 12.5e9}},
    {"10 Gbit/s, 20 us", {20e-6, 1.25e9}},
};
constexpr Index header_bytes = quoka::detail::Rounds::header_bytes;

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

double median_seconds(int rounds, auto&& f) {
  std::vector<double> seconds;
  for (int round = 0; round < rounds; ++round) seconds.push_back(seconds_of(f));
  return median(std::move(seconds));
}

// The parts of a chunk by this process alone, from its layer over the whole prompt.
template <class S>
ComputeCost parts_of(const Flags& flags, const typename S::Options& options,
                     quoka::ChunkedPrefill<S>& layer, quoka::ThreadPool& threads) {
  constexpr int rounds = 9;
  const Index n = flags.chunk, len = layer.kv_len(), heads = flags.q_heads;
  Tensor q(1, heads, n, flags.head_dim), k(1, flags.kv_heads, n, flags.head_dim),
      v(1, flags.kv_heads, n, flags.head_dim), out(1, heads, n, flags.head_dim), other = out;
  Numbers numbers(2);
  for (Tensor* const x : {&q, &k, &v}) numbers.fill(*x);
  Eigen::Tensor<float, 3, Eigen::RowMajor> lse(1, heads, n), other_lse(1, heads, n);
  quoka::AttentionWorkspace workspace;
  const auto attend = [&](const quoka::Past& past, const quoka::Chunk& chunk) {
    return median_seconds(rounds, [&] {
      quoka::attention(q, past, chunk, {out, lse}, {.causal = !chunk.k.empty()}, threads,
                       workspace);
    });
  };
  ComputeCost cost{};
  const quoka::Rows all_k = layer.cache().k(), all_v = layer.cache().v();
  const Index half = len / 2;
  if constexpr (std::is_same_v<S, quoka::DenseSelector>) {
    const double at_half = attend({all_k.slice(0, half), all_v.slice(0, half)}, {}),
                 at_all = attend({all_k, all_v}, {});
    cost.past_per_key = (at_all - at_half) / static_cast<double>(len - half);
    cost.past = std::max(0.0, at_half - cost.past_per_key * static_cast<double>(half));
  } else {
    const auto select = [&] { return median_seconds(rounds, [&] { layer.select(q, threads); }); };
    const double at_all = select();
    const quoka::Selection keep = layer.selection();
    cost.past = attend({all_k, all_v, keep}, {});
    layer.truncate(half);
    const double at_half = select();
    cost.score_per_key = (at_all - at_half) / static_cast<double>(len - half);
    cost.choose = std::max(0.0, at_half - cost.score_per_key * static_cast<double>(half));
    const Index wanted = options.budget.count(len);
    std::vector<std::uint64_t> candidates(static_cast<std::size_t>(2 * wanted)), copy;
    std::uint64_t state = 1;
    for (std::uint64_t& x : candidates)
      x = state = state * 6364136223846793005u + 1442695040888963407u;
    cost.candidate =
        median_seconds(rounds,
                       [&] {
                         copy = candidates;
                         std::nth_element(copy.begin(), copy.begin() + wanted, copy.end());
                       }) /
        static_cast<double>(candidates.size());
  }
  cost.chunk = attend({}, {k, v});
  other = out, other_lse = lse;
  const Index dim = flags.head_dim;
  cost.merge = median_seconds(rounds, [&] {
    threads.run(heads, [&](Index head, int) {
      for (Index row = head * n; row < (head + 1) * n; ++row)
        quoka::detail::merge_row(out.data() + row * dim, lse.data()[row], other.data() + row * dim,
                                 other_lse.data()[row], dim);
    });
  });
  cost.deliver = median_seconds(rounds, [&] {
    threads.run(heads, [&](Index head, int) {
      std::copy_n(out.data() + head * n * dim, n * dim, other.data() + head * n * dim);
    });
  });
  return cost;
}

// Of a message that is next to nothing, and of a large one, among these processes; 0 for one process alone.
Network measured_network(MpiCommunicator& mpi) {
  if (mpi.ranks() == 1) return {0.0, 1e12};
  constexpr int times = 200;
  std::vector<std::byte> small(static_cast<std::size_t>(header_bytes * (mpi.ranks() + 1))),
      large(std::size_t{2} << 20);
  const auto one = std::span(small).first(static_cast<std::size_t>(header_bytes));
  const auto rest = std::span(small).subspan(static_cast<std::size_t>(header_bytes));
  const auto half = large.size() / 2;
  const int right = (mpi.rank() + 1) % mpi.ranks(),
            left = (mpi.rank() + mpi.ranks() - 1) % mpi.ranks();
  const double latency = median_seconds(times, [&] { mpi.allgather(one, rest); });
  const double seconds = median_seconds(times / 10, [&] {
    mpi.sendrecv(std::span(large).first(half), right, std::span(large).subspan(half), left);
  });
  return {latency / doublings(mpi.ranks()),
          static_cast<double>(half) / std::max(1e-9, seconds - latency)};
}

// How much longer the same work takes when all processes do it at once than on the first one alone: more than
// 1 where they are more than the cores, or share what cores are made of.
double measured_contention(const Flags& flags, MpiCommunicator& mpi, quoka::ThreadPool& threads) {
  Tensor q(1, flags.q_heads, 128, flags.head_dim), k(1, flags.kv_heads, 128, flags.head_dim),
      out = q;
  Numbers numbers(3);
  numbers.fill(q), numbers.fill(k);
  // All of it, not a median: who waits for a core between two calls has waited, too.
  const auto work = [&] {
    return seconds_of([&] {
      for (int i = 0; i < 200; ++i) quoka::attention(q, {}, {k, k}, out, {}, threads);
    });
  };
  work();
  const double alone = mpi.rank() == 0 ? work() : 0.0;
  sleep_until_all_are_here();
  MPI_Barrier(MPI_COMM_WORLD);
  const double together = work();
  sleep_until_all_are_here();
  return mpi.rank() == 0 ? std::max(1.0, together / alone) : 1.0;
}

struct Totals {
  std::vector<double> together, alone;  // seconds of each chunk
  double error = 0.0;                   // of the largest output
  Index different = 0;                  // Selections
  Index bytes = 0, messages = 0;        // of the last chunk, sent by this rank
  ComputeCost parts{};
  Network network{};
  double contention = 1.0;
  ChunkShape shape{};
};

template <class S>
Totals run(const Flags& flags, const typename S::Options& options, MpiCommunicator& mpi,
           quoka::ThreadPool& threads) {
  const quoka::LayerShape shape{flags.q_heads, flags.kv_heads, flags.head_dim};
  const bool first = mpi.rank() == 0;
  quoka::ShardedPrefill<S> sharded(shape, options, mpi,
                                   quoka::ShardLayout::round_robin(flags.block));
  quoka::ChunkedPrefill<S> alone(shape, options);
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
  totals.network = measured_network(mpi);
  totals.contention = measured_contention(flags, mpi, threads);
  const Index past = flags.len - 1 - (flags.len - 1) % flags.chunk;  // of the last chunk
  totals.shape = {flags.q_heads, flags.kv_heads, flags.head_dim, flags.len - past, 0, 0};
  if constexpr (!std::is_same_v<S, quoka::DenseSelector>) {
    if (options.budget.count(past) < past) {
      totals.shape.wanted = options.budget.count(past);
      totals.shape.proposed = sharded.proposed();
    }
  }
  if (first) totals.parts = parts_of<S>(flags, options, alone, threads);
  sleep_until_all_are_here();
  return totals;
}

int run_job(const Flags& flags, Report& report) {
  MpiCommunicator mpi;
  quoka::ThreadPool threads(flags.threads);
  const auto options = quoka::QuokaOptions::paper(quoka::Budget::keys(flags.budget));
  const Totals totals = flags.dense ? run<quoka::DenseSelector>(flags, {}, mpi, threads)
                                    : run<quoka::QuokaSelector>(flags, options, mpi, threads);
  if (mpi.rank() != 0) {
    report.discard();
    return 0;
  }
  const double together = sum_of_medians(totals.together), alone = sum_of_medians(totals.alone),
               ratio = alone / together;
  const Sent sent = sent_per_chunk(totals.shape, header_bytes, mpi.ranks(), 0);
  const Index ring =
      ring_bytes_per_chunk(flags.kv_heads, flags.head_dim, flags.head_dim, flags.len, mpi.ranks());
  // Of the whole prompt.
  const auto predicted = [&](Index ranks, const Network& network, double contention) {
    double seconds = 0.0;
    for (Index past = 0; past < flags.len; past += flags.chunk) {
      ChunkShape shape = totals.shape;
      shape.proposed = std::min(shape.wanted, quoka::ceil_div(shape.wanted, ranks) * 9 / 8 + 16);
      shape.q_len = std::min(flags.chunk, flags.len - past);
      ComputeCost parts = totals.parts;
      if (past <= flags.budget && !flags.dense) {  // all of it is attended to
        shape.wanted = shape.proposed = 0, parts.choose = parts.score_per_key = 0.0;
        parts.past *= static_cast<double>(past) / static_cast<double>(flags.budget);
      }
      seconds += chunk_seconds(shape, parts, network, header_bytes, ranks, past, contention);
    }
    return seconds;
  };
  const double here = predicted(mpi.ranks(), totals.network, totals.contention),
               one = predicted(1, totals.network, 1.0);
  fmt::print("{} processes of {} thread(s), {}, {} tokens in chunks of {}, budget {}, {}\n",
             mpi.ranks(), flags.threads, flags.dense ? "dense" : "QuoKA", flags.len, flags.chunk,
             flags.budget, quoka::isa());
  fmt::print("prefill together         {:8.3f} s\n", together);
  fmt::print("prefill by one process   {:8.3f} s, {:.2f} times as long\n", alone, ratio);
  fmt::print("all at once, the same work takes one {:.2f} times as long as alone\n",
             totals.contention);
  fmt::print("the cost model says      {:8.3f} s and {:.3f} s, {:.2f} times\n", here, one,
             one / here);
  fmt::print("sent by a process in the last chunk   {} bytes in {} messages\n", totals.bytes,
             totals.messages);
  fmt::print("the formula says                      {} bytes in {} messages\n", sent.bytes(),
             sent.calls);
  fmt::print("by a ring of all keys and values      {} bytes\n", ring);
  for (const NamedNetwork& network : networks) {
    fmt::print("ranks by {}, each a machine like this one:", network.name);
    for (Index ranks = 2; ranks <= 64; ranks *= 2)
      fmt::print("  {}: {:.2f} times", ranks, one / predicted(ranks, network.network, 1.0));
    fmt::print("\n");
  }
  fmt::print("Selections that differ   {}\n", totals.different);
  fmt::print("outputs differ by        {:.1e} of the largest\n", totals.error);
  const ComputeCost& c = totals.parts;
  report.add({{"processes", mpi.ranks()},
              {"contention", totals.contention},
              {"threads", flags.threads},
              {"len", flags.len},
              {"chunk", flags.chunk},
              {"budget", flags.budget},
              {"dense", flags.dense},
              {"seconds_together", together},
              {"seconds_alone", alone},
              {"predicted_together", here},
              {"predicted_alone", one},
              {"parts",
               {{"choose", c.choose},
                {"score_per_key", c.score_per_key},
                {"past", c.past},
                {"past_per_key", c.past_per_key},
                {"chunk", c.chunk},
                {"candidate", c.candidate},
                {"merge", c.merge},
                {"deliver", c.deliver}}},
              {"latency_s", totals.network.latency_s},
              {"bytes_per_s", totals.network.bytes_per_s},
              {"ratio", ratio},
              {"bytes_per_chunk", totals.bytes},
              {"messages_per_chunk", totals.messages},
              {"ring_bytes_per_chunk", ring},
              {"selections_that_differ", totals.different},
              {"output_error", totals.error},
              {"isa", quoka::isa()}});
  for (const NamedNetwork& network : networks)
    for (Index ranks = 1; ranks <= 64; ranks *= 2)
      report["predicted"].push_back(
          {{"network", network.name},
           {"latency_s", network.network.latency_s},
           {"bytes_per_s", network.network.bytes_per_s},
           {"ranks", ranks},
           {"ratio", one / predicted(ranks, network.network, 1.0)},
           {"bytes_per_chunk", sent_per_chunk(totals.shape, header_bytes, ranks, 0).bytes()},
           {"ring_bytes_per_chunk", ring_bytes_per_chunk(flags.kv_heads, flags.head_dim,
                                                         flags.head_dim, flags.len, ranks)}});
  const bool as_said = sent.bytes() == totals.bytes && sent.calls == totals.messages;
  const bool in_float =
      quoka::arithmetic_used(quoka::Arithmetic::automatic) == quoka::Arithmetic::single;
  return totals.different == 0 && totals.error <= (in_float ? 2e-6 : 2e-5) && as_said ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  const MpiSession session(&argc, &argv);
  Flags flags;
  Program app(argc, argv, "Prefill over the processes of an MPI job, against one process");
  add_prefill_flags(app, flags);
  app.add_option("--block", flags.block, "tokens of a shard's block; 0: the layer's choice");
  app.add_option("--threads", flags.threads, "of each process")->capture_default_str();
  app.add_flag("--dense", flags.dense, "no selection");
  return app.run([&] { return run_job(flags, app.report); });
}
