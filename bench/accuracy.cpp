// RULER's tasks on token ids (support/ruler_tasks.hpp), asked of a small trained model (examples/data/trained): tasks x
// lengths x samples prompts, each run densely and with every selector and budget.
//
//   exact    every answer of the sample is right; recall: share of the right tokens
//   kept     past keys that a KV head attended to, mean over heads, layers, chunks and samples
//   budget   a count, or a share of the prompt: the same number of keys for every chunk; or
//
// Selection acts in every chunk, the question's included, and in every layer. A prompt is the same
// for every selector, so that differences are paired.
#include "support/ask_model.hpp"
#include "support/bootstrap.hpp"
#include "support/program.hpp"
#include "support/progress.hpp"
#include "support/selector_flags.hpp"
#include "support/table.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

namespace {

using namespace quoka_examples;

std::vector<std::string> names_of(std::span<const Task> tasks) {
  std::vector<std::string> names;
  for (const Task task : tasks) names.push_back(name_of(task));
  return names;
}

struct Flags {
  std::string model, json, command;  // the command line as typed
  std::vector<std::string> tasks = names_of(all_tasks);
  std::string selectors = "quoka";
  std::vector<std::string> budgets{"0.03125", "0.0625", "0.125", "0.25"};
  std::vector<Index> lengths{512, 1024, 2048, 4096};
  Index samples = 200, chunk = 128;
  std::uint32_t seed = 1;
  int threads = 0;  // 0: one for each processor
  quoka::QuokaOptions quoka = {};

  struct Choice {
    std::string method, budget;
  };
  // Dense attention first, then each selector with each budget.
  std::vector<Choice> choices() const {
    std::vector<Choice> all{{"dense", "1.0"}};
    for (const std::string& budget : budgets)
      for (const std::string& method : parse_methods(selectors)) all.push_back({method, budget});
    return all;
  }
};

// A whole file. Throws std::runtime_error naming it.
std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  if (!file) throw std::runtime_error(path + ": cannot read it");
  return text;
}

// One selector's settings: a line of the results.
struct Cell {
  std::string method, budget;
  Task task;
  Index length;

  // A count.
  quoka::Budget keys() const { return quoka::Budget::keys(parse_budget(budget).count(length)); }
  auto name() const { return std::tuple(method, budget, name_of(task), length); }
};

// FNV-1a: a model that was trained again under an old name is another model.
std::string checksum(const std::string& bytes) {
  std::uint64_t hash = 14695981039346656037u;
  for (const char byte : bytes) hash = (hash ^ static_cast<unsigned char>(byte)) * 1099511628211u;
  return fmt::format("{:016x}", static_cast<std::int64_t>(hash));
}

// The settings that results depend on.
nlohmann::json settings_of(const Flags& flags) {
  const quoka::QuokaOptions& o = flags.quoka;
  nlohmann::json settings{{"model", std::filesystem::path(flags.model).filename()},
                          {"model_fnv1a", checksum(read_file(flags.model))},
                          {"chunk", flags.chunk},
                          {"seed", flags.seed}};
  settings["quoka"] = {{"n_queries", o.n_queries},
                       {"keep_first", o.keep_first},
                       {"keep_last", o.keep_last},
                       {"sketch", o.sketch != quoka::Sketch::off}};
  return settings;
}

// commands, machine, build, the settings, and "results": those that the file holds, or none without
// a file or a path. A file that several commands wrote names all of them. Throws std::runtime_error
// if the file's results have other settings.
nlohmann::json open_record(const std::string& path, const std::string& command,
                           const nlohmann::json& settings) {
  nlohmann::json json{{"commands", {command}},
                      {"cpu", cpu_name()},
                      {"build", build_description()},
                      {"results", nlohmann::json::array()}};
  json.update(settings);
  if (path.empty() || !std::filesystem::exists(path)) return json;
  const auto before = nlohmann::json::parse(read_file(path));
  for (const auto& [key, value] : settings.items())
    if (const auto held = before.value(key, nlohmann::json("")); held != value)
      throw std::runtime_error(path + " holds results with " + key + ' ' + held.dump() + ", not " +
                               value.dump());
  json["results"] = before.at("results");
  nlohmann::json commands = before.value("commands", nlohmann::json::array());
  if (std::find(commands.begin(), commands.end(), command) == commands.end())
    commands.push_back(command);
  json["commands"] = commands;
  return json;
}

// A digit per sample, so that a line of the file holds a cell: "exact" 0 or 1, and "right", how many
// of the "of" tokens of an answer are right, in hexadecimal.
constexpr const char* digits = "0123456789abcdef";

// The outcomes, kept in a file as they come: a run that was cut short, or one with more selectors,
// lengths or samples, goes on where the file ends.
class Record {
 public:
  explicit Record(const Flags& flags)
      : path_(flags.json), json_(open_record(path_, flags.command, settings_of(flags))) {
    for (std::size_t i = 0; i < results().size(); ++i) {
      const auto& r = results()[i];
      places_[{r.at("selector"), r.at("budget"), r.at("task"), r.at("length")}] = i;
    }
  }

  const nlohmann::json& results() const { return json_.at("results"); }
  const nlohmann::json* find(const Cell& cell) const { return find(cell.name()); }

  Index samples(const Cell& cell) const {
    const auto* r = find(cell);
    return r == nullptr ? 0 : std::ssize(r->at("exact").get_ref<const std::string&>());
  }

  // Further samples of a cell, after those that it has.
  void add(const Cell& cell, const std::vector<Asked>& asked) {
    const Index before = samples(cell);
    const auto [place, is_new] = places_.try_emplace(cell.name(), results().size());
    if (is_new)
      json_["results"].push_back({{"selector", cell.method},
                                  {"budget", cell.budget},
                                  {"keys", cell.keys().count(cell.length)},
                                  {"task", name_of(cell.task)},
                                  {"length", cell.length},
                                  {"of", asked.front().score.of},
                                  {"exact", ""},
                                  {"right", ""}});
    nlohmann::json& r = json_["results"][place->second];
    double kept = 0.0;
    for (const Asked& a : asked) {
      r["exact"].get_ref<std::string&>() += a.score.exact() ? '1' : '0';
      r["right"].get_ref<std::string&>() += digits[a.score.right];
      kept += a.kept;
    }
    if (before > 0 && !r.contains("kept")) return;  // an older program's samples
    const auto n = static_cast<double>(before);
    r["kept"] =
        rounded((n * r.value("kept", 0.0) + kept) / (n + static_cast<double>(asked.size())));
  }

  // Means, 95 % intervals and paired differences to dense and to quoka with the same budget, of
  // every cell.
  void summarise() {
    for (auto& r : json_["results"]) {
      r["exact_mean"] = mean(exact(r));
      r["exact_interval"] = interval(exact(r));
      r["recall_mean"] = mean(recall(r));
      r["recall_interval"] = interval(recall(r));
      const std::string method = r["selector"], budget = r["budget"], task = r["task"];
      const Index length = r["length"];
      if (method != "dense") compare(r, "minus_dense", find({"dense", "1.0", task, length}));
      if (method != "dense" && method != "quoka")
        compare(r, "minus_quoka", find({"quoka", budget, task, length}));
    }
  }

  void write() const {
    if (!path_.empty()) write_json(path_, json_);
  }

 private:
  using Name = std::tuple<std::string, std::string, std::string, Index>;
  using Values = std::vector<double>;

  const nlohmann::json* find(const Name& name) const {
    const auto place = places_.find(name);
    return place == places_.end() ? nullptr : &results()[place->second];
  }

  static Values exact(const nlohmann::json& r) {
    Values values;
    for (const char digit : r.at("exact").get_ref<const std::string&>())
      values.push_back(digit == '1' ? 1.0 : 0.0);
    return values;
  }
  static Values recall(const nlohmann::json& r) {
    Values values;
    for (const char digit : r.at("right").get_ref<const std::string&>())
      values.push_back(static_cast<double>(std::string_view(digits).find(digit)) /
                       r.at("of").get<double>());
    return values;
  }

  // To six decimals, because further digits are rounding.
  static double rounded(double x) { return std::round(1e6 * x) / 1e6; }
  static double mean(const Values& values) { return rounded(quoka_examples::mean(values)); }
  nlohmann::json interval(const Values& values) {
    const Index n = std::ssize(values);
    const Interval i = bootstraps_.try_emplace(n, n).first->second.of_mean(values);
    return {rounded(i.low), rounded(i.high)};
  }

  // Over the samples that both have.
  void compare(nlohmann::json& r, const char* key, const nlohmann::json* other) {
    r.erase(key);
    if (other == nullptr) return;
    const auto difference = [](Values a, const Values& b) {
      a.resize(std::min(a.size(), b.size()));
      std::transform(a.begin(), a.end(), b.begin(), a.begin(), std::minus<>());
      return a;
    };
    const Values by_exact = difference(exact(r), exact(*other)),
                 by_recall = difference(recall(r), recall(*other));
    r[key] = {{"exact_mean", mean(by_exact)},
              {"exact_interval", interval(by_exact)},
              {"recall_mean", mean(by_recall)},
              {"recall_interval", interval(by_recall)}};
  }

  std::string path_;
  nlohmann::json json_;
  std::map<Name, std::size_t> places_;
  std::map<Index, Bootstrap> bootstraps_;  // by the number of samples
};

std::vector<Cell> all_cells(const Flags& flags) {
  std::vector<Cell> cells;
  for (const Index length : flags.lengths)
    for (const std::string& task : flags.tasks)
      for (const auto& [method, budget] : flags.choices())
        cells.push_back({method, budget, task_named(task), length});
  return cells;
}

void run_cells(const Flags& flags, const SmallModel& model, const std::vector<Cell>& cells,
               Record& record) {
  quoka::ThreadPool threads(
      flags.threads > 0 ? flags.threads
                        : std::max(1, static_cast<int>(std::thread::hardware_concurrency())));
  const auto missing = [&](const Cell& cell) {
    return std::max<Index>(0, flags.samples - record.samples(cell));
  };
  Index tokens = 0, done = 0;
  for (const Cell& cell : cells) tokens += missing(cell) * cell.length;
  Progress bar("accuracy", tokens);
  for (const Cell& cell : cells) {
    const Index first = record.samples(cell), count = missing(cell);
    if (count == 0) continue;
    record.add(cell, ask(model, cell.method, {.budget = cell.keys(), .quoka = flags.quoka},
                         {cell.task, cell.length, first, count, flags.seed, flags.chunk}, threads));
    record.write();
    bar.update(done += count * cell.length);
  }
}

// A row per selector and budget, a column per task: exact matches in per cent, mean over the lengths.
void print_results(const Flags& flags, const Record& record) {
  Table table(fmt::format("selector\tbudget\t{}\tmean", fmt::join(flags.tasks, "\t")));
  for (const auto& [method, budget] : flags.choices()) {
    table.row("{}\t{}", method, method == "dense" ? "-" : budget);
    double over_tasks = 0.0;
    for (const std::string& task : flags.tasks) {
      double over_lengths = 0.0;
      for (const Index length : flags.lengths)
        over_lengths +=
            record.find({method, budget, task_named(task), length})->at("exact_mean").get<double>();
      over_lengths /= static_cast<double>(flags.lengths.size());
      over_tasks += over_lengths;
      table.more("{:.1f}", 100.0 * over_lengths);
    }
    table.more("{:.1f}", 100.0 * over_tasks / static_cast<double>(flags.tasks.size()));
  }
  table.print();
}

// Finds errors that would stop a run of hours before it starts: a budget out of its range, a length
// that does not hold its task, a file that cannot be written.
void check(const Flags& flags, const std::vector<Cell>& cells, const Record& record) {
  if (cells.empty()) throw std::runtime_error("nothing to run: no task, length or selector");
  for (const Cell& cell : cells) {
    (void)cell.keys();
    (void)evaluation_sample(cell.task, cell.length, 0, flags.seed);
  }
  record.write();
}

void run(const Flags& flags) {
  const std::vector<Cell> cells = all_cells(flags);
  Record record(flags);
  check(flags, cells, record);
  run_cells(flags, SmallModel(GgufFile(flags.model)), cells, record);
  record.summarise();
  record.write();

  Index samples = record.samples(cells.front());  // a file may hold more than were asked for
  for (const Cell& cell : cells) samples = std::min(samples, record.samples(cell));
  fmt::print("exact match in per cent, {} samples or more at each length ({}); chunk {}, seed {}\n",
             samples, fmt::join(flags.lengths, ", "), flags.chunk, flags.seed);
  print_results(flags, record);
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("RULER's tasks on token ids: tasks x lengths x selectors x budgets");
  Flags flags;
  flags.command = command_line(argc, argv);
  app.add_option("-m,--model", flags.model, "a GGUF file of examples/data/trained")
      ->required()
      ->check(CLI::ExistingFile);
  app.add_option("--tasks", flags.tasks, "a list of tasks")
      ->delimiter(',')
      ->check(CLI::IsMember(names_of(all_tasks)))
      ->capture_default_str();
  app.add_option("--selectors", flags.selectors, "a list of methods, or all")
      ->capture_default_str();
  app.add_option("--budgets", flags.budgets,
                 "a list of counts (256) and shares of the prompt (0.25)")
      ->delimiter(',')
      ->capture_default_str();
  app.add_option("--lengths", flags.lengths, "prompt lengths in tokens")
      ->delimiter(',')
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--samples", flags.samples, "prompts of each task and length")
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  app.add_option("--seed", flags.seed, "of the prompts")->capture_default_str();
  app.add_option("--chunk", flags.chunk, "tokens that select together")
      ->check(whole_number(1, 65536))
      ->capture_default_str();
  app.add_option("-t,--threads", flags.threads, "0: one for each processor")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_option("--json", flags.json,
                 "write the results there as they come; those that it holds are not run again");
  add_quoka_flags(app, flags.quoka);
  try {
    app.parse(argc, argv);
    refuse_empty_items(app, argc, argv);
    run(flags);
  } catch (const CLI::ParseError& error) {
    return app.exit(error);
  } catch (const std::exception& error) {
    std::cerr << "accuracy: " << error.what() << '\n';
    return 1;
  }
  return 0;
}
