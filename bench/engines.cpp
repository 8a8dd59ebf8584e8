// What an engine's cache costs beside the library's own: pages, 8-bit rows, ragged batches.
//
// One layer of 32 query and 8 KV heads of 128 channels, float queries and outputs, generated keys.
// In each row two ways to do the same work take turns in one process; the figure is the median of
// the ratios of their times, below 1 where the second is faster. Wall clock with more than one
// thread, else the thread's CPU time. README.md says what each row is.

#include "data.hpp"

#include <quoka/packing/byte_formats.hpp>

#include "support/build_info.hpp"
#include "support/json_file.hpp"
#include "support/machine.hpp"
#include "support/paired_steps.hpp"
#include "support/run_program.hpp"
#include "support/table.hpp"

#include <CLI/CLI.hpp>

#include <functional>
#include <iostream>
#include <numeric>

namespace {

using namespace quoka_bench;
using namespace quoka_examples;
using quoka::Position;
using quoka::Rows;

struct Flags {
  int rounds = 9;
  int threads = 2;
  std::string json, command;
};

constexpr LayerShape shape = qwen3_4b;
constexpr Index budget = 1024, dim = shape.head_dim, page_len = 16;

// Keys and values of `len` tokens of a format, contiguous [kv_heads, len, dim], or in pages of
// page_len tokens [page, kv_heads, page_len, dim] in shuffled order.
class Cache {
 public:
  Cache(const quoka::Format& format, Index len, bool paged)
      : format_(format), len_(len), bytes_(format.row_bytes({dim})), paged_(paged) {
    table_.resize(static_cast<std::size_t>(quoka::ceil_div(len, page_len)));
    std::iota(table_.begin(), table_.end(), Position{0});
    std::shuffle(table_.begin(), table_.end(), std::mt19937(7));
    const Index rows = shape.kv_heads * std::ssize(table_) * page_len;
    for (auto& memory : memory_) memory.reserve(rows * bytes_);
    Normal normal(3);
    std::vector<float> row(static_cast<std::size_t>(dim));
    for (int side = 0; side < 2; ++side)
      for (Index i = 0; i < len; ++i)
        for (Index head = 0; head < shape.kv_heads; ++head) {
          for (float& x : row) x = normal();
          format.narrow(row.data(), {dim}, memory_[side].data() + offset(head, i));
        }
  }
  Rows k() const { return rows(memory_[0].data()); }
  Rows v() const { return rows(memory_[1].data()); }
  double bytes() const { return 2.0 * static_cast<double>(shape.kv_heads * len_ * bytes_); }

 private:
  Index offset(Index head, Index i) const {
    if (!paged_) return (head * len_ + i) * bytes_;
    const Index page = table_[static_cast<std::size_t>(i / page_len)];
    return ((page * shape.kv_heads + head) * page_len + i % page_len) * bytes_;
  }
  Rows rows(const std::byte* data) const {
    if (!paged_) return {data, format_, {1, shape.kv_heads, len_, dim}, {0, len_ * bytes_, bytes_}};
    const Rows pool(data, format_, {std::ssize(table_), shape.kv_heads, page_len, dim},
                    {shape.kv_heads * page_len * bytes_, page_len * bytes_, bytes_});
    return quoka::paged(pool, table_, len_);
  }

  const quoka::Format& format_;
  Index len_, bytes_;
  bool paged_;
  std::vector<Position> table_;
  quoka::Buffer<std::byte> memory_[2];
};

struct Result {
  std::string what, first, second;
  double ratio, low, high;  // median of second / first, and the quartiles
  std::string note;
};

class Engines {
 public:
  explicit Engines(const Flags& flags) : flags_(flags), pool_(flags.threads) {}

  std::vector<Result> run() {
    pages();
    eight_bits();
    ragged();
    return results_;
  }

 private:
  using Work = std::function<void(quoka::ExecutorRef)>;

  void compare(const std::string& what, const std::string& first, const Work& f,
               const std::string& second, const Work& g, bool threads = false,
               std::string note = "") {
    std::vector<double> ratios;
    const auto time = [&](const Work& work) {
      const auto run = [&] { threads ? work(pool_) : work(quoka::SerialExecutor{}); };
      if (threads) return seconds_of(run);
      const double start = thread_seconds();
      run();
      return thread_seconds() - start;
    };
    time(f), time(g);
    for (int round = 0; round < flags_.rounds; ++round) {
      const bool swapped = round % 2 == 1;
      const double b_first = swapped ? time(g) : 0.0, a = time(f);
      ratios.push_back((swapped ? b_first : time(g)) / a);
    }
    std::sort(ratios.begin(), ratios.end());
    const auto at = [&](double share) {
      return ratios[static_cast<std::size_t>(share * static_cast<double>(ratios.size() - 1))];
    };
    results_.push_back({what, first, second, at(0.5), at(0.25), at(0.75), std::move(note)});
    std::cerr << what << ": " << second << " / " << first << " " << at(0.5) << "\n";
  }

  // attention() of q_len tokens over a cache.
  Work attend(const Cache& cache, ChunkData<float>& chunk, const quoka::Selection* keep = nullptr,
              quoka::Arithmetic arithmetic = quoka::Arithmetic::single) {
    return [&, keep, arithmetic](quoka::ExecutorRef executor) {
      quoka::Past past(cache.k(), cache.v());
      past.keep = keep;
      quoka::attention(chunk.q.view(), past, {chunk.k.view(), chunk.v.view()}, {chunk.out.view()},
                       {.arithmetic = arithmetic}, executor, workspace_);
    };
  }

  void pages() {
    const Index len = 32768;
    const Cache flat(quoka::format_of<Eigen::half>(), len, false),
        paged(quoka::format_of<Eigen::half>(), len, true);
    ChunkData<float> chunk(shape, chunk_len), token(shape, 1);
    const quoka::QuokaSelector selector({.budget = budget});
    // The sketches belong to the caches.
    quoka::KeySketch of_flat, of_pages;
    const Rows pool = pool_of(paged);
    of_flat.update(flat.k(), 0, len, pool_);
    of_pages.update(pool, 0, pool.batch() * pool.len(), pool_);
    const auto quoka_chunk = [&](const Cache& cache, const quoka::KeySketch& sketch) -> Work {
      return [&](quoka::ExecutorRef executor) {
        selector.select({.q = chunk.q.view(), .k = cache.k(), .sketch = &sketch}, state_, keep_,
                        executor);
        attend(cache, chunk, &keep_)(executor);
      };
    };
    const std::string one = "contiguous half", two = "pages of 16 half rows";
    compare("QuoKA chunk of 128, 32,768 keys, budget 1,024", one, quoka_chunk(flat, of_flat), two,
            quoka_chunk(paged, of_pages));
    compare("dense token, 32,768 keys", one, attend(flat, token), two, attend(paged, token));
    const Cache short_flat(quoka::format_of<Eigen::half>(), 8192, false),
        short_paged(quoka::format_of<Eigen::half>(), 8192, true);
    compare("dense chunk of 128, 8,192 keys", one, attend(short_flat, chunk), two,
            attend(short_paged, chunk));
  }
  static Rows pool_of(const Cache& cache) {
    const Rows k = cache.k();
    return {k.data(), k.format(), k.pool_sizes(), k.pool_strides()};
  }

  // As KvCache keeps them.
  static TensorView<const float, 3> norms_of(const Cache& cache, std::vector<float>& memory) {
    const Rows k = cache.k();
    std::vector<float> row(static_cast<std::size_t>(dim));
    for (Index head = 0; head < k.heads(); ++head)
      for (Index i = 0; i < k.len(); ++i) {
        k.format().widen(k.row(0, head, i), {dim}, row.data());
        memory.push_back(quoka::inverse_norm(row.data(), dim));
      }
    return {memory.data(), {1, k.heads(), k.len()}, {0, k.len(), 1}};
  }

  void eight_bits() {
    const Index len = 32768;
    const Cache half(quoka::format_of<Eigen::half>(), len, false),
        q8(quoka::q8_0_format(), len, false);
    ChunkData<float> chunk(shape, chunk_len), token(shape, 1);
    const std::string one = "half", two = "q8_0";
    compare("dense token, 32,768 keys", one, attend(half, token), two, attend(q8, token));
    compare("dense token, 32,768 keys, " + std::to_string(flags_.threads) + " threads", one,
            attend(half, token), two, attend(q8, token), true);
    const Cache short_half(quoka::format_of<Eigen::half>(), 8192, false),
        short_q8(quoka::q8_0_format(), 8192, false);
    compare("dense chunk of 128, 8,192 keys", one, attend(short_half, chunk), two,
            attend(short_q8, chunk));
    compare("dense chunk of 128, 8,192 keys", one + " in float", attend(short_half, chunk),
            two + " in fixed16", attend(short_q8, chunk, nullptr, quoka::Arithmetic::fixed16),
            false, arithmetic_name(quoka::Arithmetic::fixed16));
    const quoka::QuokaSelector selector({.budget = budget});
    quoka::KeySketch sketch;
    sketch.update(half.k(), 0, len, pool_);
    std::vector<float> memory[2];
    const auto norms = norms_of(q8, memory[0]), half_norms = norms_of(half, memory[1]);
    const quoka::QuokaSelector in_float({.budget = budget, .sketch = quoka::Sketch::off});
    const auto select = [&](const quoka::QuokaSelector& by, const Cache& cache,
                            const TensorView<const float, 3>& inverse_norms,
                            const quoka::KeySketch* of_cache) -> Work {
      return [&, inverse_norms, of_cache](quoka::ExecutorRef executor) {
        by.select({.q = chunk.q.view(),
                   .k = cache.k(),
                   .inverse_norms = inverse_norms,
                   .sketch = of_cache},
                  state_, keep_, executor);
      };
    };
    const Work by_sketch = select(selector, half, half_norms, &sketch),
               in_place = select(selector, q8, norms, nullptr);
    const auto append_and_select = [&](quoka::ExecutorRef executor) {
      sketch.update(half.k(), len - chunk_len, chunk_len, executor);
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
      lengths.push_back(quoka::round_up(256 + i * (32768 - 256) / 31 / 4, page_len));
    lengths.back() = 32768;
    const Index all = std::accumulate(lengths.begin(), lengths.end(), Index{0});
    const Cache whole(quoka::format_of<Eigen::half>(), all, true);
    std::vector<std::unique_ptr<ChunkData<float>>> tokens;
    std::vector<quoka::AttentionSequence> batch;
    Index begin = 0;
    for (const Index len : lengths) {
      tokens.push_back(std::make_unique<ChunkData<float>>(shape, 1));
      ChunkData<float>& x = *tokens.back();
      batch.push_back({.q = x.q.view(),
                       .past = {whole.k().slice(begin, len), whole.v().slice(begin, len)},
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
                     .past = {whole.k().slice(0, 8192), whole.v().slice(0, 8192)},
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
  quoka::ThreadPool pool_;
  quoka::AttentionWorkspace workspace_, ragged_workspace_;
  quoka::QuokaSelector::State state_;
  quoka::Selection keep_;
  std::vector<Result> results_;
};

int run(const Flags& flags) {
  const double gflops = fma_peak_gflops(), gbs = read_bandwidth_gbs();
  const std::vector<Result> results = Engines(flags).run();
  nlohmann::json json{{"command", flags.command},
                      {"cpu", cpu_name()},
                      {"build", build_description()},
                      {"fma_peak_gflops", gflops},
                      {"read_gbs", gbs}};
  std::vector<std::vector<std::string>> rows;
  for (const Result& r : results) {
    rows.push_back({r.what, r.second + " / " + r.first, fixed(r.ratio, 2),
                    fixed(r.low, 2) + " to " + fixed(r.high, 2), r.note});
    json["results"].push_back({{"what", r.what},
                               {"first", r.first},
                               {"second", r.second},
                               {"ratio", r.ratio},
                               {"quartiles", {r.low, r.high}},
                               {"note", r.note}});
  }
  std::cout << cpu_name() << "; " << build_description() << "\none core: " << fixed(gflops, 0)
            << " GFLOP/s of multiply-adds, " << fixed(gbs, 0) << " GB/s read\n\n";
  print_table(std::cout, {"work", "ways", "time", "quartiles", ""}, rows);
  if (!flags.json.empty()) write_json(flags.json, json);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  Flags flags;
  flags.command = command_line(argc, argv);
  CLI::App app("An engine's cache beside the library's own: pages, 8-bit rows, ragged batches");
  app.add_option("--rounds", flags.rounds, "timed repetitions; medians of ratios count")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--threads", flags.threads, "workers of the rows with threads")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--json", flags.json, "write the results there too");
  return run_program(app, argc, argv, [&] { return run(flags); });
}
