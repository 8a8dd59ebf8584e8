// When selecting pays: the time of selecting and attending to what was chosen, over that of attending to
// everything, by heads, cached keys, queries, share, preset, and with and without 8-bit codes that are kept.
//
// One thread's CPU time, medians of ratios of interleaved calls; the cache is of bfloat16. *rule*: what the
// options' Selecting::where_it_pays does there (select/worth_selecting.hpp).

#include <quoka/quoka.hpp>

#include "normal.hpp"

#include "support/clock.hpp"
#include "support/machine.hpp"
#include "support/program.hpp"
#include "support/statistics.hpp"
#include "support/table.hpp"

#include <Eigen/Core>

namespace {

using namespace quoka_examples;
using quoka::Index;
using quoka::QuokaOptions;
using Element = Eigen::bfloat16;

struct Heads {
  Index q, kv, dim;
};
struct Flags {
  std::vector<Index> keys{2048, 8192}, queries{1, 8, 128}, parts{2, 4, 8, 16};
  int rounds = 7;
};

std::vector<Element> elements(Index count, std::uint64_t seed) {
  return quoka_bench::normals<Element>(count, seed);
}

struct Way {
  quoka::QuokaSelector selector;
  quoka::QuokaSelector::State state;
  quoka::Selection keep;
};

// Does Selecting::where_it_pays select?
bool rule(Way& way, const quoka::SelectorInput& input) {
  QuokaOptions options = way.selector.options();
  options.selecting = quoka::Selecting::where_it_pays;
  return quoka::QuokaScorer(options).pays(input, way.state.scorer);
}

void measure(const Flags& flags, const Heads& heads, Index keys, Table& table, Report& report) {
  const Index most = *std::max_element(flags.queries.begin(), flags.queries.end());
  const auto k = elements(heads.kv * keys * heads.dim, 1),
             v = elements(heads.kv * keys * heads.dim, 2);
  const auto own_k = elements(heads.kv * most * heads.dim, 3),
             own_v = elements(heads.kv * most * heads.dim, 4);
  const auto queries = quoka_bench::normals<float>(heads.q * most * heads.dim, 5);
  std::vector<float> out(queries.size());
  const quoka::SerialExecutor serial;
  const auto rows = [](const auto& x, Index count, Index len, Index dim) {
    return quoka::Rows(quoka::head_major(
        std::span(x).first(static_cast<std::size_t>(count * len * dim)), len, count, dim));
  };
  const quoka::Rows past_k = rows(k, heads.kv, keys, heads.dim),
                    past_v = rows(v, heads.kv, keys, heads.dim);
  quoka::AttentionWorkspace workspace;
  for (const Index n : flags.queries) {
    const quoka::Rows q = rows(queries, heads.q, n, heads.dim);
    const quoka::Chunk chunk{rows(own_k, heads.kv, n, heads.dim),
                             rows(own_v, heads.kv, n, heads.dim)};
    const quoka::OutputRows to(
        quoka::head_major(std::span(out).first(static_cast<std::size_t>(heads.q * n * heads.dim)),
                          n, heads.q, heads.dim));
    const auto attend = [&](const quoka::Selection* keep) {
      quoka::Past past(past_k, past_v);
      past.keep = keep;
      quoka::attention(q, past, chunk, to, {}, serial, workspace);
    };
    for (const char* const preset : {"paper", "balanced"})
      for (const bool kept : {false, true}) {
        std::vector<Way> ways;
        const quoka::SelectorInput input{
            .q = q, .k = past_k, .logits = quoka::LogitOptions{}, .capacity = keys};
        for (const Index part : flags.parts) {
          Way& way = ways.emplace_back(Way{
              quoka::QuokaSelector(QuokaOptions::preset(preset, quoka::Budget::keys(keys / part))),
              {},
              {}});
          if (kept)
            way.selector.appended(
                {.q = {}, .k = past_k, .logits = quoka::LogitOptions{}, .capacity = keys},
                way.state, serial);
        }
        std::vector<std::vector<double>> seconds(ways.size() + 1);
        for (int round = -1; round < flags.rounds; ++round) {
          for (std::size_t i = 0; i <= ways.size(); ++i) {
            const double taken = seconds_of(
                [&] {
                  if (i == ways.size()) return attend(nullptr);
                  ways[i].selector.select(input, ways[i].state, ways[i].keep, serial);
                  attend(&ways[i].keep);
                },
                thread_seconds);
            if (round >= 0) seconds[i].push_back(taken);
          }
        }
        for (std::size_t i = 0; i < ways.size(); ++i) {
          const double ratio = median_ratio(seconds[i], seconds.back());
          const bool pays = rule(ways[i], input);
          table.row("{}/{}/{}\t{}\t{}\t{}\t{}\t1/{}\t{:.2f}\t{}", heads.q, heads.kv, heads.dim,
                    keys, n, preset, kept ? "kept" : "none", flags.parts[i], ratio,
                    pays ? "selects" : "all");
          report["rows"].push_back(
              {{"shape", fmt::format("{}/{}/{}", heads.q, heads.kv, heads.dim)},
               {"keys", keys},
               {"queries", n},
               {"preset", preset},
               {"codes", kept},
               {"part", flags.parts[i]},
               {"ratio", ratio},
               {"rule", pays},
               {"ms", 1e3 * median(seconds.back())}});
        }
      }
  }
}

}  // namespace

int main(int argc, char** argv) {
  Flags flags;
  Program app(argc, argv,
              "When selecting and attending takes less than attending to everything, one thread");
  app.add_option("--keys", flags.keys, "cached keys")->delimiter(',')->capture_default_str();
  app.add_option("--queries", flags.queries, "of a call")->delimiter(',')->capture_default_str();
  app.add_option("--parts", flags.parts, "one key in so many is chosen")
      ->delimiter(',')
      ->capture_default_str();
  app.add_option("--rounds", flags.rounds, "timed calls of each")->capture_default_str();
  return app.run([&] {
    fmt::print("{}\n\n", machine());
    Table table("heads\tkeys\tqueries\tpreset\tcodes\tshare\tof exact\trule");
    for (const Heads heads : {Heads{32, 8, 128}, Heads{32, 4, 64}, Heads{9, 3, 64},
                              Heads{16, 4, 256}, Heads{8, 8, 128}})
      for (const Index keys : flags.keys) measure(flags, heads, keys, table, app.report);
    table.print();
    return 0;
  });
}
