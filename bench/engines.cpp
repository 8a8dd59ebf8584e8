// What an engine's cache costs beside the library's own: pages, 8-bit rows, ragged batches.
//
// One layer of 32 query and 8 KV heads of 128 channels, float queries and outputs, generated keys.
// In each row two ways to do the same work take turns in one process; the figure is the median of
// the ratios of their times, below 1 where the second is faster. Wall clock with more than one
// thread, else the thread's CPU time. README.md says what each row is.

#include "arithmetic.hpp"
#include "engine_cache.hpp"

#include "support/clock.hpp"
#include "support/machine.hpp"
#include "support/program.hpp"
#include "support/selector_flags.hpp"
#include "support/statistics.hpp"
#include "support/table.hpp"

#include <functional>
#include <memory>

namespace {

using namespace quoka_bench;
using namespace quoka_examples;

struct Flags {
  int rounds = 9;
  int threads = 2;
};

constexpr LayerShape shape = EngineCache::shape;
constexpr Index budget = 1024;

class Engines {
 public:
  Engines(const Flags& flags, Table& table, nlohmann::json& records)
      : flags_(flags), table_(table), records_(records), pool_(flags.threads) {}

  void run() {
    pages();
    eight_bits();
    ragged();
  }

 private:
  using Work = std::function<void(quoka::ExecutorRef)>;

  void compare(const std::string& what, const std::string& first, const Work& f,
               const std::string& second, const Work& g, bool threads = false,
               const std::string& note = "") {
    const auto seconds = time_in_turns(2, flags_.rounds, [&](std::size_t i) {
      const Work& work = i == 0 ? f : g;
      return threads ? seconds_of([&] { work(pool_); })
                     : seconds_of([&] { work(quoka::SerialExecutor{}); }, thread_seconds);
    });
    const std::vector<double> all = ratios(seconds[1], seconds[0]);
    const double ratio = median(all), low = quantile(all, 0.25), high = quantile(all, 0.75);
    table_.row("{}\t{} / {}\t{:.2f}\t{:.2f} to {:.2f}\t{}", what, second, first, ratio, low, high,
               note);
    records_.push_back({{"what", what},
                        {"first", first},
                        {"second", second},
                        {"ratio", ratio},
                        {"quartiles", {low, high}},
                        {"note", note}});
    fmt::print(stderr, "{}: {} / {} {:.2f}\n", what, second, first, ratio);
  }

  // attention() of q_len tokens over a cache.
  Work attend(const EngineCache& cache, ChunkData<float>& chunk,
              const quoka::Selection* keep = nullptr,
              quoka::Arithmetic arithmetic = quoka::Arithmetic::single) {
    return [&, keep, arithmetic](quoka::ExecutorRef executor) {
      quoka::Past past(cache.k, cache.v);
      past.keep = keep;
      quoka::attention(chunk.q.view(), past, {chunk.k.view(), chunk.v.view()}, {chunk.out.view()},
                       {.arithmetic = arithmetic}, executor, workspace_);
    };
  }

  void pages() {
    const Index len = 32768;
    const EngineCache flat(quoka::format_of<Eigen::half>(), len),
        paged(quoka::format_of<Eigen::half>(), len, Layout::pages);
    ChunkData<float> chunk(shape, chunk_len), token(shape, 1);
    const quoka::QuokaSelector selector({.budget = quoka::Budget::keys(budget)});
    // The sketches belong to the caches.
    quoka::KeySketch of_flat, of_pages;
    const Rows pool = pool_of(paged);
    of_flat.update(flat.k, 0, len, pool_);
    of_pages.update(pool, 0, pool.batch() * pool.len(), pool_);
    const auto quoka_chunk = [&](const EngineCache& cache, const quoka::KeySketch& sketch) -> Work {
      return [&](quoka::ExecutorRef executor) {
        selector.select(
            {.q = chunk.q.view(), .k = cache.k, .logits = quoka::LogitOptions{}, .sketch = &sketch},
            state_, keep_, executor);
        attend(cache, chunk, &keep_)(executor);
      };
    };
    const std::string one = "contiguous half", two = "pages of 16 half rows";
    compare("QuoKA chunk of 128, 32,768 keys, budget 1,024", one, quoka_chunk(flat, of_flat), two,
            quoka_chunk(paged, of_pages));
    compare("dense token, 32,768 keys", one, attend(flat, token), two, attend(paged, token));
    const EngineCache short_flat(quoka::format_of<Eigen::half>(), 8192),
        short_paged(quoka::format_of<Eigen::half>(), 8192, Layout::pages);
    compare("dense chunk of 128, 8,192 keys", one, attend(short_flat, chunk), two,
            attend(short_paged, chunk));
  }
  static Rows pool_of(const EngineCache& cache) {
    const Rows k = cache.k;
    return {k.data(), k.format(), k.pool_sizes(), k.pool_strides()};
  }

  // As KvCache keeps them.
  static TensorView<const float, 3> norms_of(const EngineCache& cache, std::vector<float>& memory) {
    const Rows k = cache.k;
    std::vector<float> row(static_cast<std::size_t>(k.dim()));
    for (Index head = 0; head < k.heads(); ++head)
      for (Index i = 0; i < k.len(); ++i) {
        k.format().widen(k.row(0, head, i), {k.dim()}, row.data());
        memory.push_back(quoka::inverse_norm(row.data(), k.dim()));
      }
    return {memory.data(), {1, k.heads(), k.len()}, {0, k.len(), 1}};
  }

  void eight_bits() {
    const Index len = 32768;
    const EngineCache half(quoka::format_of<Eigen::half>(), len), q8(quoka::q8_0_format(), len);
    ChunkData<float> chunk(shape, chunk_len), token(shape, 1);
    const std::string one = "half", two = "q8_0";
    compare("dense token, 32,768 keys", one, attend(half, token), two, attend(q8, token));
    compare("dense token, 32,768 keys, " + std::to_string(flags_.threads) + " threads", one,
            attend(half, token), two, attend(q8, token), true);
    const EngineCache short_half(quoka::format_of<Eigen::half>(), 8192),
        short_q8(quoka::q8_0_format(), 8192);
    compare("dense chunk of 128, 8,192 keys", one, attend(short_half, chunk), two,
            attend(short_q8, chunk));
    compare("dense chunk of 128, 8,192 keys", one + " in float", attend(short_half, chunk),
            two + " in fixed16", attend(short_q8, chunk, nullptr, quoka::Arithmetic::fixed16),
            false, arithmetic_name(quoka::Arithmetic::fixed16));
    const quoka::QuokaSelector selector({.budget = quoka::Budget::keys(budget)});
    quoka::KeySketch sketch;
    sketch.update(half.k, 0, len, pool_);
    std::vector<float> memory[2];
    const auto norms = norms_of(q8, memory[0]), half_norms = norms_of(half, memory[1]);
    const quoka::QuokaSelector in_float(
        {.budget = quoka::Budget::keys(budget), .sketch = quoka::Sketch::off});
    const auto select = [&](const quoka::QuokaSelector& by, const EngineCache& cache,
                            const TensorView<const float, 3>& inverse_norms,
                            const quoka::KeySketch* of_cache) -> Work {
      return [&, inverse_norms, of_cache](quoka::ExecutorRef executor) {
        by.select({.q = chunk.q.view(),
                   .k = cache.k,
                   .logits = quoka::LogitOptions{},
                   .inverse_norms = inverse_norms,
                   .sketch = of_cache},
                  state_, keep_, executor);
      };
    };
    const Work by_sketch = select(selector, half, half_norms, &sketch),
               in_place = select(selector, q8, norms, nullptr);
    const auto append_and_select = [&](quoka::ExecutorRef executor) {
      sketch.update(half.k, len - chunk_len, chunk_len, executor);
      by_sketch(executor);
    };
    compare("selection for a chunk of 128, 32,768 keys", "half by its sketch", by_sketch,
            "q8_0 in place", in_place, false,
            "the sketch takes " + std::to_string(sketch.bytes() >> 20) + " MiB more");
    compare("the same, and 128 keys into the sketch", "half by its sketch", append_and_select,
            "q8_0 in place", in_place);
    compare("the same", "q8_0 in float", select(in_float, q8, norms, nullptr), "q8_0 in place",
            in_place);
  }

  void ragged() {
    // 32 sequences of 256 to 32,768 keys, and one as long as all of them.
    std::vector<Index> lengths;
    for (int i = 0; i < 32; ++i)  // each begins at a page
      lengths.push_back(quoka::round_up(256 + i * (32768 - 256) / 31 / 4, 16));
    lengths.back() = 32768;
    const Index all = std::accumulate(lengths.begin(), lengths.end(), Index{0});
    const EngineCache whole(quoka::format_of<Eigen::half>(), all, Layout::pages);
    std::vector<std::unique_ptr<ChunkData<float>>> tokens;
    std::vector<quoka::AttentionSequence> batch;
    Index begin = 0;
    for (const Index len : lengths) {
      tokens.push_back(std::make_unique<ChunkData<float>>(shape, 1));
      ChunkData<float>& x = *tokens.back();
      batch.push_back({.q = x.q.view(),
                       .past = {whole.k.slice(begin, len), whole.v.slice(begin, len)},
                       .chunk = {x.k.view(), x.v.view()},
                       .out = x.out.view()});
      begin += len;
    }
    ChunkData<float> long_token(shape, 1), chunk(shape, chunk_len);
    for (const bool threads : {false, true})
      compare(
          "32 tokens of as many sequences, 256 to 32,768 keys" +
              std::string(threads ? ", " + std::to_string(flags_.threads) + " threads" : ""),
          "one token over as many keys", attend(whole, long_token), "32 in one call",
          [&](quoka::ExecutorRef executor) {
            quoka::attention(batch, {}, executor, ragged_workspace_);
          },
          threads);
    // A prefill chunk over 8,192 keys beside 16 decode steps.
    std::vector<quoka::AttentionSequence> mixed(batch.begin(), batch.begin() + 16);
    mixed.push_back({.q = chunk.q.view(),
                     .past = {whole.k.slice(0, 8192), whole.v.slice(0, 8192)},
                     .chunk = {chunk.k.view(), chunk.v.view()},
                     .out = chunk.out.view()});
    compare(
        "a chunk of 128 over 8,192 keys beside 16 tokens, " + std::to_string(flags_.threads) +
            " threads",
        "one after the other",
        [&](quoka::ExecutorRef executor) {
          for (const auto& x : mixed)
            quoka::attention({&x, 1}, quoka::AttentionOptions{}, executor, workspace_);
        },
        "in one call",
        [&](quoka::ExecutorRef executor) {
          quoka::attention(mixed, {}, executor, ragged_workspace_);
        },
        true);
  }

  Flags flags_;
  Table& table_;
  nlohmann::json& records_;
  quoka::ThreadPool pool_;
  quoka::AttentionWorkspace workspace_, ragged_workspace_;
  quoka::QuokaSelector::State state_;
  quoka::Selection keep_;
};

int run(const Flags& flags, Report& report) {
  const double gflops = fma_peak_gflops(), gbs = read_bandwidth_gbs();
  report.add({{"fma_peak_gflops", gflops}, {"read_gbs", gbs}});
  Table table("work\tways\ttime\tquartiles\t");
  Engines(flags, table, report["results"]).run();
  fmt::print("{}\none core: {:.0f} GFLOP/s of multiply-adds, {:.0f} GB/s read\n\n", machine(),
             gflops, gbs);
  table.print();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  Flags flags;
  Program app(argc, argv,
              "An engine's cache beside the library's own: pages, 8-bit rows, ragged batches");
  add_rounds(app, flags.rounds);
  add_threads(app, flags.threads);
  return app.run([&] { return run(flags, app.report); });
}
