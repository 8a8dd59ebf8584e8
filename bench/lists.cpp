// Attention where each query has keys of its own (rows/index_lists.hpp), beside the ways without lists.
//
//   lists      attention() with IndexLists
//   mask       the same keys as a mask that hides the others
//   all        every key, which is the most that either may cost
//   selection  where one list serves all queries: the same keys as a Selection
//   bound      the attended pairs at the rate of `all`
//
// They are called in turns, and medians of their ratios are printed, so that other load affects all of them equally.
// One thread, its own time. Caches are [token, head, channel] as llama.cpp has them, or in pages of 16 tokens in a
// shuffled order. Each round's lists are compared with the mask: the largest difference is printed, relative to the
// largest output.

#include <quoka/attention/attention.hpp>
#include <quoka/kernels/byte_formats.hpp>

#include "normal.hpp"

#include "support/clock.hpp"
#include "support/machine.hpp"
#include "support/program.hpp"
#include "support/statistics.hpp"
#include "support/table.hpp"

#include <Eigen/Core>

#include <algorithm>
#include <numeric>
#include <random>

namespace {

using namespace quoka_examples;
using quoka::Index;
using quoka::Position;
using quoka::TensorView;
using quoka_bench::normals;

struct Flags {
  int rounds = 7;
  std::string only;
  std::vector<Index> cases;
};

// Which keys the queries of a chunk name.
enum class Kind { own, neighbours, shared };
constexpr const char* kinds[] = {"each its own", "like the one before", "one for all"};

enum class Cache { half, q8_0, pages };  // pages: of half
constexpr const char* caches[] = {"half", "q8_0", "half in pages"};

struct Case {
  Index q_heads, kv_heads, head_dim, v_dim;
  Index queries, keys;
  Index attended, block;  // keys of a query
  Kind kind;
  Cache cache = Cache::half;
};

constexpr Case cases[] = {
    {32, 8, 128, 128, 128, 8192, 2048, 1, Kind::own},
    {32, 8, 128, 128, 128, 8192, 512, 1, Kind::own},
    {32, 8, 128, 128, 128, 8192, 2048, 1, Kind::neighbours},
    {32, 8, 128, 128, 128, 8192, 2048, 1, Kind::shared},
    {32, 8, 128, 128, 128, 8192, 8192, 1, Kind::shared},
    {32, 8, 128, 128, 128, 8192, 2048, 64, Kind::own},
    {32, 8, 128, 128, 128, 8192, 2048, 128, Kind::own},
    {32, 8, 128, 128, 512, 16384, 2048, 1, Kind::own},
    {32, 8, 128, 128, 512, 16384, 512, 1, Kind::own},
    {32, 8, 128, 128, 8, 8192, 2048, 1, Kind::own},
    {32, 8, 128, 128, 1, 8192, 2048, 1, Kind::own},
    {16, 16, 128, 128, 128, 8192, 2048, 1, Kind::own},
    {16, 8, 128, 128, 128, 8192, 2048, 1, Kind::own},
    {16, 1, 576, 512, 128, 8192, 2048, 1, Kind::own},
    {16, 1, 576, 512, 128, 8192, 512, 1, Kind::own},
    {128, 1, 576, 512, 32, 8192, 2048, 1, Kind::own},
    {128, 1, 576, 512, 32, 8192, 512, 1, Kind::own},
    {32, 8, 128, 128, 128, 8192, 2048, 1, Kind::own, Cache::q8_0},
    {32, 8, 128, 128, 128, 8192, 2048, 1, Kind::own, Cache::pages},
    // Lists that name enough keys for all keys to be cheaper (attend_lists.hpp).
    {32, 8, 128, 128, 128, 8192, 4096, 1, Kind::own},
    {32, 8, 128, 128, 128, 8192, 6144, 1, Kind::own},
    {32, 8, 128, 128, 128, 8192, 7936, 1, Kind::own},
    {16, 16, 128, 128, 128, 8192, 4096, 1, Kind::own},
    {16, 16, 128, 128, 128, 8192, 6144, 1, Kind::own},
    {16, 16, 128, 128, 128, 8192, 7936, 1, Kind::own},
};

// Keys or values of a case, drawn again.
class CachedRows {
 public:
  CachedRows(const Case& c, Index dim, std::mt19937& random)
      : format_(c.cache == Cache::q8_0 ? quoka::q8_0_format() : quoka::format_of<Eigen::half>()),
        pages_(static_cast<std::size_t>(c.keys / page_size)) {
    const Index row_bytes = format_.row_bytes({dim}), token_bytes = c.kv_heads * row_bytes;
    std::byte* const data = memory_.reserve(c.keys * token_bytes);
    std::iota(pages_.begin(), pages_.end(), Position{0});
    std::shuffle(pages_.begin(), pages_.end(), std::mt19937(7));
    const quoka::Rows pool(data, format_, {c.keys / page_size, c.kv_heads, page_size, dim},
                           {page_size * token_bytes, row_bytes, token_bytes});
    rows = c.cache == Cache::pages ? quoka::paged(pool, pages_, c.keys)
                                   : quoka::Rows(data, format_, {1, c.kv_heads, c.keys, dim},
                                                 {0, row_bytes, token_bytes});
    const auto values = normals<float>(c.keys * c.kv_heads * dim, random());
    for (Index i = 0; i < c.keys; ++i)
      for (Index head = 0; head < c.kv_heads; ++head)
        format_.narrow(values.data() + (i * c.kv_heads + head) * dim, rows.shape(head),
                       const_cast<std::byte*>(rows.row(0, head, i)));
  }
  CachedRows(const CachedRows&) = delete;
  CachedRows& operator=(const CachedRows&) = delete;

  quoka::Rows rows;  // [1, kv_heads, keys, dim]

 private:
  static constexpr Index page_size = 16;
  const quoka::Format& format_;
  std::vector<Position> pages_;
  quoka::Buffer<std::byte> memory_;
};

// The entries of each query's list, ascending.
std::vector<Position> draw_lists(const Case& c, std::mt19937& random) {
  const Index entries = c.keys / c.block, k = c.attended / c.block;
  std::vector<Position> lists;
  std::vector<Position> all(static_cast<std::size_t>(entries));
  for (Index i = 0; i < c.queries; ++i) {
    std::vector<Position> list(static_cast<std::size_t>(k));
    if (i == 0 || c.kind == Kind::own) {
      std::iota(all.begin(), all.end(), 0);
      std::sample(all.begin(), all.end(), list.begin(), k, random);
    } else {
      std::copy(lists.end() - k, lists.end(), list.begin());
      for (Index n = c.kind == Kind::neighbours ? k / 32 : 0; n > 0; --n) {
        const auto entry = static_cast<Position>(random() % static_cast<unsigned>(entries));
        if (!std::binary_search(list.begin(), list.end(), entry))
          list[random() % list.size()] = entry;
        std::sort(list.begin(), list.end());
      }
    }
    lists.insert(lists.end(), list.begin(), list.end());
  }
  return lists;
}

void measure(const Case& c, const Flags& flags, Table& table, Report& report) {
  std::mt19937 random(1);
  const auto q = normals<float>(c.q_heads * c.queries * c.head_dim, random());
  const CachedRows k(c, c.head_dim, random), v(c, c.v_dim, random);
  const auto entries = draw_lists(c, random);
  const Index most = c.attended / c.block;
  std::vector<Eigen::half> hidden(static_cast<std::size_t>(c.queries * c.keys),
                                  static_cast<Eigen::half>(-65504.0f));
  for (Index i = 0; i < c.queries; ++i)
    for (Index j = 0; j < c.attended; ++j) {
      const Index entry = entries[static_cast<std::size_t>(i * most + j / c.block)];
      hidden[static_cast<std::size_t>(i * c.keys + entry * c.block + j % c.block)] =
          static_cast<Eigen::half>(0.0f);
    }
  const TensorView<const float> queries(q.data(), {1, c.q_heads, c.queries, c.head_dim});
  const quoka::Past past(k.rows, v.rows);
  const bool selects = c.kind == Kind::shared;  // with blocks of one key
  quoka::Selection selection;
  if (selects)
    selection = quoka::Selection(
        TensorView<const Position, 3>(entries.data(), {1, c.kv_heads, c.attended}, {0, 0, 1}),
        c.keys);
  quoka::AttentionOptions all{.causal = false}, masked = all, listed = all;
  masked.mask =
      quoka::Mask(TensorView<const Eigen::half>(hidden.data(), {1, 1, c.queries, c.keys}));
  listed.lists = quoka::IndexLists(
      TensorView<const Position>(entries.data(), {1, 1, c.queries, most}), c.block);
  std::vector<float> out[4];
  quoka::AttentionWorkspace workspace;
  const auto seconds = [&](int which, const quoka::AttentionOptions& options,
                           const quoka::Past& keys) {
    out[which].resize(static_cast<std::size_t>(c.q_heads * c.queries * c.v_dim));
    const double start = thread_seconds();
    quoka::attention(queries, keys, {},
                     TensorView<float>(out[which].data(), {1, c.q_heads, c.queries, c.v_dim}),
                     options, quoka::SerialExecutor{}, workspace);
    return thread_seconds() - start;
  };
  std::vector<double> times, of_bound, mask_ratio, all_ratio, selection_ratio;
  for (int round = 0; round <= flags.rounds; ++round) {
    const double by_lists = seconds(0, listed, past), by_mask = seconds(1, masked, past),
                 by_all = seconds(2, all, past);
    const double by_selection = selects ? seconds(3, all, {k.rows, v.rows, selection}) : 0;
    if (round == 0) continue;  // memory is new
    const double share = static_cast<double>(c.attended) / static_cast<double>(c.keys);
    times.push_back(by_lists), of_bound.push_back(by_lists / (by_all * share));
    mask_ratio.push_back(by_mask / by_lists), all_ratio.push_back(by_all / by_lists);
    if (selects) selection_ratio.push_back(by_selection / by_lists);
  }
  float error = 0, size = 0;
  for (std::size_t i = 0; i < out[0].size(); ++i) {
    error = std::max(error, std::abs(out[0][i] - out[1][i]));
    size = std::max(size, std::abs(out[1][i]));
  }
  const std::string heads = fmt::format("{}/{}/{}", c.q_heads, c.kv_heads, c.head_dim);
  const std::string keys = c.block > 1 ? fmt::format("{} in blocks of {}", c.attended, c.block)
                                       : fmt::format("{}", c.attended);
  const auto kind = kinds[static_cast<int>(c.kind)], cache = caches[static_cast<int>(c.cache)];
  table.row("{}\t{}\t{} of {}, {}, {}\t{:.2f} ms\t{:.2f}\t{:.2f}x\t{:.2f}x\t{}\t{:.0e}", heads,
            c.queries, keys, c.keys, kind, cache, 1e3 * median(times), median(of_bound),
            median(mask_ratio), median(all_ratio),
            selects ? fmt::format("{:.2f}x", median(selection_ratio)) : "-",
            static_cast<double>(error / size));
  nlohmann::json result = {{"q_heads", c.q_heads},
                           {"kv_heads", c.kv_heads},
                           {"head_dim", c.head_dim},
                           {"v_dim", c.v_dim},
                           {"queries", c.queries},
                           {"keys", c.keys},
                           {"attended", c.attended},
                           {"block", c.block},
                           {"kind", kind},
                           {"cache", cache},
                           {"milliseconds", 1e3 * median(times)},
                           {"of_bound", median(of_bound)},
                           {"of_mask", median(mask_ratio)},
                           {"of_all", median(all_ratio)},
                           {"error", error / size}};
  if (selects) result["of_selection"] = median(selection_ratio);
  report["results"].push_back(std::move(result));
}

int run(const Flags& flags, Report& report) {
  fmt::print("{}\n\none thread, medians of {} rounds\n\n", machine(), flags.rounds);
  report["rounds"] = flags.rounds;
  Table table(
      "heads, channels\tqueries\tkeys of a query\ttime\tof bound\tmask / lists\tall / "
      "lists\tselection / lists\terror");
  for (const Case& c : cases) {
    const auto named = [&](Index i) { return i == &c - cases; };
    const bool chosen =
        flags.cases.empty() || std::any_of(flags.cases.begin(), flags.cases.end(), named);
    if (chosen && (flags.only.empty() ||
                   flags.only == fmt::format("{}/{}/{}", c.q_heads, c.kv_heads, c.head_dim)))
      measure(c, flags, table, report);
  }
  table.print();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  Flags flags;
  Program app(argc, argv, "Attention over lists of keys, beside a mask and all keys, one thread");
  app.add_option("--rounds", flags.rounds, "timed calls of each")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  app.add_option("--only", flags.only, "one shape: q_heads/kv_heads/head_dim");
  app.add_option("--cases", flags.cases, "which rows of the table, from 0: it in pieces")
      ->check(CLI::Range(Index{0}, static_cast<Index>(std::size(cases)) - 1));
  return app.run([&] { return run(flags, app.report); });
}
