// Selection in one and in two levels (TwoLevels of quoka/select/quoka.hpp): how it grows with the cache,
// what it keeps, and what it loses.
//
//   time      one chunk's selection, one layer, keys of normal numbers; one and two levels in turn, medians
//             over rounds; exponents fitted by least squares on logarithms
//   mass      share of the past's attention mass that is kept, recorded layers, mean over rows of all
//             chunks whose past is longer than the candidates
//   needles   of single keys that a chunk's queries are after, 8 of 128 queries in all heads: found by one
//             level, and of these by two. A query is 1.5 |mean query| (0.8 r + 0.35 r' + 0.25 m): r, r' the
//             directions of the needle and of another key, less the mean key, m that of the mean query.
//             In the recorded layers, and among keys of normal numbers, where neighbours share nothing

#include "support/capture.hpp"
#include "support/clock.hpp"
#include "support/program.hpp"
#include "support/progress.hpp"
#include "support/selector_flags.hpp"
#include "support/statistics.hpp"
#include "support/table.hpp"

#include <quoka/attention/diagnostics.hpp>
#include <quoka/runtime/thread_pool.hpp>
#include <quoka/select/quoka.hpp>

#include <cmath>
#include <random>

namespace {

using namespace quoka_examples;
using quoka::QuokaOptions;
using quoka::QuokaSelector;
using quoka::Rows;
using quoka::Selection;
using quoka::SelectorInput;
using quoka::TwoLevels;

using Keys = quoka::Tensor<float>;

struct Flags {
  std::string capture;
  std::vector<Index> lengths{8192, 16384, 32768, 65536, 131072, 262144, 524288, 1048576};
  std::vector<Index> needle_lengths{8192, 32768, 131072};
  std::vector<Index> budgets{64, 128};
  std::vector<Index> blocks{16, 32}, candidates{4, 8, 16};
  Index budget = 1024;
  int rounds = 7;
};

struct Method {
  std::string name;
  QuokaOptions options;
};

// One level first, then every block size and number of candidates, for the paper's defaults and for robust().
std::vector<Method> methods_for(Index budget, const Flags& flags) {
  std::vector<Method> methods;
  for (const bool robust : {false, true}) {
    QuokaOptions options =
        QuokaOptions::preset(robust ? "robust" : "quoka", quoka::Budget::keys(budget));
    options.sketch = quoka::Sketch::on;
    const std::string name = robust ? "quoka.robust" : "quoka";
    methods.push_back({name, options});
    for (const Index block : flags.blocks)
      for (const Index candidates : flags.candidates) {
        options.two_levels = {block, candidates};
        methods.push_back(
            {fmt::format("{}.blocks{}.candidates{}", name, block, candidates), options});
      }
  }
  return methods;
}
bool is_one_level(const Method& method) { return method.options.two_levels.block == 0; }

void fill_normal(Keys& x, unsigned seed) {
  std::minstd_rand random(seed);
  std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
  for (Index i = 0; i < x.size(); ++i)  // the sum of four: nearly normal, variance 1
    x.data()[i] =
        std::sqrt(0.75f) * (uniform(random) + uniform(random) + uniform(random) + uniform(random));
}

// ---- time -----------------------------------------------------------------------------------------

Table measure_time(const Flags& flags, Report& report) {
  constexpr Index q_heads = 32, kv_heads = 8, dim = 128, chunk = 128;
  const Index most = *std::max_element(flags.lengths.begin(), flags.lengths.end());
  Keys q(1, q_heads, chunk, dim), k(1, kv_heads, most, dim);
  fill_normal(q, 1), fill_normal(k, 2);
  const std::vector<Method> methods = methods_for(flags.budget, flags);
  std::vector<QuokaSelector::State> states(methods.size());
  std::vector<std::vector<double>> medians(methods.size());  // [method][length]
  quoka::ThreadPool one(1);
  Selection keep;
  for (const Index len : flags.lengths) {
    const SelectorInput input{
        .q = q, .k = Rows(k).slice(0, len), .logits = quoka::LogitOptions{}, .capacity = most};
    for (std::size_t m = 0; m < methods.size(); ++m)
      QuokaSelector(methods[m].options).appended(input, states[m], one);
    Progress bar(std::to_string(len) + " keys", flags.rounds + 1);
    const auto seconds = time_in_turns(
        methods.size(), flags.rounds,
        [&](std::size_t m) {
          const QuokaSelector selector(methods[m].options);
          return seconds_of([&] { selector.select(input, states[m], keep, one); });
        },
        [&](int done) { bar.update(done); });
    std::size_t base = 0;
    for (std::size_t m = 0; m < methods.size(); ++m) {
      if (is_one_level(methods[m])) base = m;
      medians[m].push_back(median(seconds[m]));
      report["time"].push_back(
          {{"keys", len},
           {"method", methods[m].name},
           {"seconds", medians[m].back()},
           {"one_level_takes_times", median_ratio(seconds[base], seconds[m])},
           {"kept_bytes_per_key_and_head",
            static_cast<double>(states[m].kept_bytes()) / static_cast<double>(most * kv_heads)},
           {"rounds", seconds[m]}});
    }
  }
  Table table(fmt::format("selection, ms, at keys:\t{}\texponent", fmt::join(flags.lengths, "\t")));
  const std::vector<double> lengths(flags.lengths.begin(), flags.lengths.end());
  for (std::size_t m = 0; m < methods.size(); ++m) {
    table.row("{}", methods[m].name);
    for (const double seconds : medians[m]) table.more("{:.2f}", 1e3 * seconds);
    const double fitted = exponent(lengths, medians[m]);
    table.more("{:.2f}", fitted);
    report["exponents"].push_back({{"method", methods[m].name}, {"exponent", fitted}});
  }
  return table;
}

// Queries about a mean of their own, one for each head: 9 (0.85 m + 0.53 z), unit vectors.
void fill_about_means(Keys& q, unsigned seed) {
  fill_normal(q, seed);
  const Index dim = q.dimension(3);
  Keys means(1, 1, q.dimension(1), dim);
  fill_normal(means, seed + 1);
  const float unit = 9.0f / std::sqrt(static_cast<float>(dim));
  for (Index head = 0; head < q.dimension(1); ++head)
    for (Index i = 0; i < q.dimension(2); ++i)
      for (Index c = 0; c < dim; ++c)
        q(0, head, i, c) = unit * (0.85f * means(0, 0, head, c) + 0.53f * q(0, head, i, c));
}

// ---- mass and needles -----------------------------------------------------------------------------

struct Found {
  double mass = 0.0, rows = 0.0;
  double needles = 0.0, found = 0.0;  // those that one level finds; thereof found
};

// Directions less their mean, of one head.
class Directions {
 public:
  Directions(quoka::TensorView<const float> k, Index head)
      : k_(k), head_(head), mean_(uz(k.dim())) {
    for (Index t = 0; t < k.len(); ++t)
      for (Index c = 0; c < k.dim(); ++c)
        mean_[uz(c)] += k.row(0, head, t)[c] / static_cast<float>(k.len());
  }
  std::vector<float> operator()(Index t) const {
    std::vector<float> r(k_.row(0, head_, t), k_.row(0, head_, t) + k_.dim());
    float square = 0.0f;
    for (std::size_t c = 0; c < r.size(); ++c) r[c] -= mean_[c], square += r[c] * r[c];
    for (float& x : r) x /= std::sqrt(square);
    return r;
  }

 private:
  static std::size_t uz(Index i) { return static_cast<std::size_t>(i); }
  quoka::TensorView<const float> k_;
  Index head_;
  std::vector<float> mean_;
};

// Turns 8 rows of the chunk q, all heads of each group, to needles of k. Returns them: [kv_head][8].
std::vector<std::vector<Index>> plant(Keys& q, quoka::TensorView<const float> k, unsigned seed) {
  std::mt19937 random(seed);
  const Index kv_heads = k.heads(), group = q.dimension(1) / kv_heads, dim = k.dim(),
              chunk = q.dimension(2);
  std::vector<std::vector<Index>> needles(static_cast<std::size_t>(kv_heads));
  for (Index head = 0; head < kv_heads; ++head) {
    const Directions direction(k, head);
    Keys mean(1, 1, group, dim);
    mean.setZero();
    for (Index r = 0; r < group; ++r)
      for (Index i = 0; i < chunk; ++i)
        for (Index c = 0; c < dim; ++c)
          mean(0, 0, r, c) += q(0, head * group + r, i, c) / static_cast<float>(chunk);
    for (Index n = 0; n < 8; ++n) {
      const auto pick = [&](Index below) {
        return static_cast<Index>(random() % static_cast<unsigned>(below));
      };
      const Index needle = pick(k.len()), other = pick(k.len()),
                  i = n * chunk / 8 + pick(chunk / 8);
      const std::vector<float> to = direction(needle), beside = direction(other);
      for (Index r = 0; r < group; ++r) {
        float length = 0.0f;
        for (Index c = 0; c < dim; ++c) length += mean(0, 0, r, c) * mean(0, 0, r, c);
        length = std::sqrt(length);
        for (Index c = 0; c < dim; ++c) {
          const auto at = static_cast<std::size_t>(c);
          q(0, head * group + r, i, c) =
              1.5f * length *
              (0.8f * to[at] + 0.35f * beside[at] + 0.25f * mean(0, 0, r, c) / length);
        }
      }
      needles[static_cast<std::size_t>(head)].push_back(needle);
    }
  }
  return needles;
}

Selection select(const QuokaOptions& options, const SelectorInput& input) {
  const QuokaSelector selector(options);
  QuokaSelector::State state;
  Selection keep;
  selector.appended(input, state, quoka::SerialExecutor{});
  selector.select(input, state, keep, quoka::SerialExecutor{});
  return keep;
}

// Adds one chunk. One level comes first of its kind.
void look(const std::vector<Method>& methods, const Keys& q, const Rows& k,
          const std::vector<std::vector<Index>>& needles, bool mass, std::vector<Found>& found) {
  Selection one;
  const auto lse = mass ? quoka::past_lse(q, k) : quoka::Tensor<float, 3>();
  for (std::size_t m = 0; m < methods.size(); ++m) {
    const Selection keep = select(methods[m].options, {.q = q, .k = k});
    if (is_one_level(methods[m])) one = keep;
    for (Index head = 0; head < std::ssize(needles); ++head)
      for (const Index needle : needles[static_cast<std::size_t>(head)]) {
        const auto holds = [&](const Selection& x) {
          const auto row = x.row(0, head);
          return std::binary_search(row.begin(), row.end(), needle);
        };
        found[m].needles += holds(one) ? 1.0 : 0.0;
        found[m].found += holds(one) && holds(keep) ? 1.0 : 0.0;
      }
    if (!mass) continue;
    const auto shares = quoka::mass_kept(q, k, keep, lse);
    for (Index i = 0; i < shares.size(); ++i)
      found[m].mass += static_cast<double>(shares.data()[i]), found[m].rows += 1.0;
  }
}

Keys chunk_of(const Keys& q, Index begin, Index len) {
  Keys part(1, q.dimension(1), len, q.dimension(3));
  for (Index head = 0; head < q.dimension(1); ++head)
    for (Index i = 0; i < len; ++i)
      for (Index c = 0; c < q.dimension(3); ++c) part(0, head, i, c) = q(0, head, begin + i, c);
  return part;
}

void tell(const std::string& data, Index keys, Index budget, const std::vector<Method>& methods,
          const std::vector<Found>& plain, const std::vector<Found>& planted,
          nlohmann::json& records, Table& table) {
  const auto share = [](double part, double whole) { return whole > 0.0 ? part / whole : 0.0; };
  for (std::size_t m = 0; m < methods.size(); ++m) {
    const double needles = share(planted[m].found, planted[m].needles);
    records.push_back({{"data", data},
                       {"keys", keys},
                       {"budget", budget},
                       {"method", methods[m].name},
                       {"needles", needles},
                       {"needles_of_one_level", planted[m].needles}});
    std::string mass;
    if (plain[m].rows > 0.0) {
      records.back()["mass_kept"] = plain[m].mass / plain[m].rows;
      mass = fmt::format("{:.2f}", 100.0 * plain[m].mass / plain[m].rows);
    }
    table.row("{}\t{}\t{}\t{}\t{}\t{:.1f}\t{:.0f}", data, keys, budget, methods[m].name, mass,
              100.0 * needles, planted[m].needles);
  }
}

void measure_capture(const Flags& flags, nlohmann::json& records, Table& table) {
  const std::vector<LayerCapture> layers = load_layers(SafetensorsFile(flags.capture));
  for (const Index budget : flags.budgets) {
    const std::vector<Method> methods = methods_for(budget, flags);
    std::vector<Found> plain(methods.size()), planted(methods.size());
    const Index len = layers.front().k.dimension(2);
    for (const LayerCapture& layer : layers)
      for (Index begin = len / 2 / 128 * 128; begin + 128 <= len; begin += 128) {
        Keys q = chunk_of(layer.q, begin, 128);
        const Rows k = Rows(layer.k).slice(0, begin);
        look(methods, q, k, {}, true, plain);
        const auto needles = plant(q, k.typed<float>(), static_cast<unsigned>(begin));
        look(methods, q, k, needles, false, planted);
      }
    tell("recorded", len, budget, methods, plain, planted, records, table);
  }
}

void measure_lone_needles(const Flags& flags, nlohmann::json& records, Table& table) {
  for (const Index len : flags.needle_lengths) {
    const std::vector<Method> methods = methods_for(flags.budget, flags);
    std::vector<Found> planted(methods.size());
    Keys q(1, 16, 128, 128), k(1, 4, len, 128);
    fill_about_means(q, 3), fill_normal(k, 4);
    const auto needles = plant(q, k, 5);
    look(methods, q, k, needles, false, planted);
    tell("normal", len, flags.budget, methods, std::vector<Found>(methods.size()), planted, records,
         table);
  }
}

int run(const Flags& flags, Report& report) {
  report.add({{"budget", flags.budget}, {"rounds", flags.rounds}});
  fmt::print("{}\n\n", machine());
  Table kept("keys are\tkeys\tbudget\tmethod\tmass kept, %\tneedles found, %\tof");
  if (!flags.capture.empty()) measure_capture(flags, report["kept"], kept);
  if (flags.needle_lengths.front() > 0) measure_lone_needles(flags, report["kept"], kept);
  if (!kept.empty()) kept.print();
  if (flags.lengths.front() > 0) {
    const Table times = measure_time(flags, report);
    std::cout << '\n';
    times.print();
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  Flags flags;
  Program app(
      argc, argv,
      "Selection in one and in two levels: time against the length of the cache, mass kept, "
      "needles found");
  app.add_option("capture", flags.capture, "a safetensors file of recorded layers");
  const auto list = [&](const char* name, std::vector<Index>& values, const char* help) {
    app.add_option(name, values, help)->delimiter(',')->capture_default_str();
  };
  list("--lengths", flags.lengths, "cached keys at which selection is timed; 0: none");
  list("--needle-lengths", flags.needle_lengths,
       "cached keys of normal numbers with needles; 0: none");
  list("--budgets", flags.budgets, "keys per KV head, for the recorded layers");
  list("--blocks", flags.blocks, "keys of a block");
  list("--candidates", flags.candidates, "keys looked at, times the budget");
  app.add_option("--budget", flags.budget, "keys per KV head, elsewhere")->capture_default_str();
  add_rounds(app, flags.rounds);
  return app.run([&] { return run(flags, app.report); });
}
