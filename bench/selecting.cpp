// Time of selecting by attention and attending to the selection, beside attention to all keys: one layer, one thread.
//
//   exact      attention to all keys
//   select     MassSelector, with the State's 8-bit codes of the keys, or without (`float`); other numbers of voters
//              are in the JSON file
//   KV heads   attention to lists of KV heads, `budget` keys each
//   heads      to lists of query heads, as many keys each
//
// Lists for attention are of random keys: those of a group share keys only by chance, which is the hardest case for
// lists of query heads. All are called in turns, and medians are printed. Keys and values are normal numbers in a float
// cache.
//
// Two thresholds of the library follow from it: tuning::one_list_rows, up to which query rows of a KV head one list serves
// it, and MassScorer::pays, below which a call attends to all keys.
#include "data.hpp"

#include <quoka/attention/attention.hpp>
#include <quoka/select/mass_selector.hpp>

#include "support/clock.hpp"
#include "support/machine.hpp"
#include "support/program.hpp"
#include "support/statistics.hpp"
#include "support/table.hpp"

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <random>

namespace {

using namespace quoka_bench;
using namespace quoka_examples;
using quoka::Arithmetic;
using quoka::Position;
using quoka::Selection;

struct Flags {
  std::vector<Index> keys{8192}, queries{128};
  Index part = 8;                                           // a list keeps one key in this many
  std::vector<Index> voters{quoka::MassOptions().queries};  // of a KV head
  int rounds = 7;
  std::vector<std::string> arithmetics{"float", "int8"};
};

Selection random_lists(Index heads, Index kv_len, Index count) {
  std::mt19937 random(7);
  std::vector<Position> all(static_cast<std::size_t>(kv_len));
  std::iota(all.begin(), all.end(), 0);
  std::vector<std::vector<Position>> lists;
  for (Index head = 0; head < heads; ++head) {
    std::shuffle(all.begin(), all.end(), random);
    lists.emplace_back(all.begin(), all.begin() + count);
    std::sort(lists.back().begin(), lists.back().end());
  }
  return Selection::from_lists(1, heads, kv_len, lists);
}

class Calls {
 public:
  Calls(Index keys, Index queries, const Flags& flags)
      : past_(past_of<float>(qwen3_4b, keys)),
        chunk_(qwen3_4b, queries),
        budget_(quoka::Budget::keys(keys / flags.part)),
        in_float_({.budget = budget_, .threshold = 0.0f, .least = 0, .sketch = quoka::Sketch::off}),
        of_kv_heads_(random_lists(qwen3_4b.kv_heads, keys, keys / flags.part)),
        of_heads_(random_lists(qwen3_4b.q_heads, keys, keys / flags.part)) {
    for (const Index voters : flags.voters)
      by_codes_.emplace_back(
          quoka::MassOptions{.budget = budget_, .threshold = 0.0f, .least = 0, .queries = voters});
    by_codes_.front().appended({.q = {}, .k = past_.k, .capacity = keys}, state_, one_);
    for (const quoka::MassSelector& selector : by_codes_)
      add(name_of(selector), [this, &selector] { select(selector, state_); });
    add("select, float", [this] { select(in_float_, no_codes_); });
    for (const std::string& name : flags.arithmetics) {
      const Arithmetic in = name == "int8" ? Arithmetic::int8 : Arithmetic::float_;
      add("exact " + name, [this, in] { attend(in, nullptr); });
      add("KV heads " + name, [this, in] { attend(in, &of_kv_heads_); });
      add("heads " + name, [this, in] { attend(in, &of_heads_); });
    }
  }
  // Medians of milliseconds, by name.
  std::map<std::string, double> milliseconds(int rounds) {
    for (auto& call : calls_) call.run();  // memory, caches
    for (int round = 0; round < rounds; ++round)
      for (auto& call : calls_) call.ms.push_back(1e3 * seconds_of(call.run));
    std::map<std::string, double> all;
    for (auto& call : calls_) all[call.name] = median(call.ms);
    return all;
  }
  // Does a call that attends as well select?
  bool pays() {
    quoka::SelectorInput of = input();
    of.attends = true;
    by_codes_.front().select(of, state_, keep_, one_);
    return !keep_.is_all();
  }

 private:
  struct Call {
    std::string name;
    std::function<void()> run;
    std::vector<double> ms = {};
  };

  // "select" is the first one's.
  std::string name_of(const quoka::MassSelector& selector) const {
    if (&selector == &by_codes_.front()) return "select";
    return fmt::format("select, {} voters", selector.options().queries);
  }
  void add(const std::string& name, std::function<void()> run) {
    calls_.push_back({name, std::move(run)});
  }
  quoka::SelectorInput input() const {
    return {.q = chunk_.q.view(),
            .k = past_.k,
            .logits = quoka::LogitOptions{},
            .capacity = past_.k.len(),
            .chunk_k = chunk_.k.view()};
  }
  void select(const quoka::MassSelector& selector, quoka::MassSelector::State& state) {
    selector.select(input(), state, keep_, one_);
  }
  void attend(Arithmetic in, const Selection* keep) {
    quoka::Past past{past_.k, past_.v};
    if (keep != nullptr) past.selection = keep;
    quoka::attention(chunk_.q.view(), past, {chunk_.k.view(), chunk_.v.view()}, chunk_.out.view(),
                     {.arithmetic = in}, one_, workspace_);
  }

  PastData<float> past_;
  ChunkData<float> chunk_;
  quoka::Budget budget_;
  std::vector<quoka::MassSelector> by_codes_;
  quoka::MassSelector in_float_;
  quoka::MassSelector::State state_, no_codes_;
  Selection of_kv_heads_, of_heads_, keep_;
  quoka::AttentionWorkspace workspace_;
  quoka::SerialExecutor one_;
  std::vector<Call> calls_;
};

int run(const Flags& flags, Report& report) {
  fmt::print(
      "{}\none layer, 32 query heads, 8 KV heads of 128; lists keep 1/{} of the keys; ms, medians "
      "of {}\n\n",
      machine(), flags.part, flags.rounds);
  report.add({{"q_heads", 32},
              {"kv_heads", 8},
              {"head_dim", 128},
              {"part", flags.part},
              {"voters", flags.voters},
              {"rounds", flags.rounds}});
  Table table("keys\tqueries\tselect\tselect, float\tpays");
  for (const std::string& name : flags.arithmetics)
    table.more("exact {}\tKV heads\theads\tselect + heads", name);
  for (const Index keys : flags.keys)
    for (const Index queries : flags.queries) {
      Calls calls(keys, queries, flags);
      auto ms = calls.milliseconds(flags.rounds);
      table.row("{}\t{}\t{:.2f}\t{:.2f}\t{}", keys, queries, ms["select"], ms["select, float"],
                calls.pays() ? "yes" : "no");
      for (const std::string& name : flags.arithmetics)
        table.more("{:.2f}\t{:.2f}\t{:.2f}\t{:.2f}", ms["exact " + name], ms["KV heads " + name],
                   ms["heads " + name], ms["select"] + ms["heads " + name]);
      report["results"].push_back({{"keys", keys},
                                   {"queries", queries},
                                   {"part", flags.part},
                                   {"pays", calls.pays()},
                                   {"ms", ms}});
    }
  table.print();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  Flags flags;
  Program app(
      argc, argv,
      "Selecting by attention and attending to the selection, beside attention to all keys");
  app.add_option("--keys", flags.keys, "cached")->delimiter(',')->check(CLI::PositiveNumber);
  app.add_option("--queries", flags.queries, "of a chunk")
      ->delimiter(',')
      ->check(CLI::PositiveNumber);
  app.add_option("--part", flags.part, "lists keep one key in N")->check(CLI::Range(2, 64));
  app.add_option("--voters", flags.voters, "of a KV head")
      ->delimiter(',')
      ->check(CLI::PositiveNumber);
  app.add_option("--rounds", flags.rounds)->check(CLI::PositiveNumber);
  app.add_option("--arithmetics", flags.arithmetics)
      ->delimiter(',')
      ->check(CLI::IsMember({"float", "int8"}));
  return app.run([&] { return run(flags, app.report); });
}
