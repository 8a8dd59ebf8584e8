// Needle in a haystack (Kamradt 2023; passkey form of Mohtashami & Jaggi 2023): a sentence with a
// five-digit pass key stands at a given depth of a long text, and the prompt ends by asking for it.
// A chat model is asked in a user's turn, and its answer begins "The pass key is".
//
//   lengths x depths x needles prompts; each is run densely and with every selector and budget
//   exact match   every token with a digit of the pass key is the most probable one
//   log-prob      sum over the pass key's tokens of ln p, each after the right ones before it
//
// Selection acts in every chunk, question and answer included, and in every layer. Prompts of
// neighbouring depths begin alike: whole chunks they share are kept in the cache, not run again.
#include "decoder/program/record.hpp"
#include "decoder/sampling/sampler.hpp"
#include "decoder/tasks/haystack.hpp"

#include "support/progress.hpp"
#include "support/table.hpp"

#include <algorithm>
#include <cmath>
#include <filesystem>

namespace quoka_decoder {
namespace {

struct Flags : GridFlags {
  Flags() { lengths = {512, 1024, 2040}, selectors.budgets = {"128", "256"}; }

  std::string haystack = QUOKA_DECODER_DATA "/pride_and_prejudice.txt";
  Index depths = 10, needles = 5;
  bool chat = true;  // where the model's template is known
};

struct Asked : Contender {
  std::vector<Token> tokens = {};  // in its cache
};

struct Outcome {
  bool exact = true;
  double log_prob = 0.0;
};

// Runs what the cache does not hold yet.
void run_prompt(Asked& c, std::span<const Token> prompt, Index chunk) {
  const Index keep = shared_chunks(prompt, c.tokens, chunk);
  c.session->truncate(keep);
  c.session->run(prompt.subspan(static_cast<std::size_t>(keep)));
  c.tokens.assign(prompt.begin(), prompt.end());
}

Outcome ask(Asked& c, const NeedlePrompt& prompt, Index chunk) {
  run_prompt(c, prompt.tokens, chunk);
  Outcome outcome;
  for (std::size_t i = 0; i < prompt.answer.size(); ++i) {
    const Vector logits = c.session->logits();
    const Token right = prompt.answer[i];
    outcome.log_prob += log_probabilities(logits)[static_cast<std::size_t>(right)];
    outcome.exact = outcome.exact && most_probable(logits) == right;
    if (i + 1 < prompt.answer.size()) c.session->run({&right, 1});
  }
  return outcome;
}

// Outcomes by what was asked of whom, kept in a file as they come: a run that was cut short, or one
// with more selectors, goes on where the file ends.
class Record {
 public:
  // Throws std::runtime_error if the file there is of another model, chunk, grid or seed.
  Record(const Flags& flags, bool chat) : path_(flags.json) {
    nlohmann::json settings = run_settings(flags.model);
    settings["haystack"] = std::filesystem::path(flags.haystack).filename();
    settings["chat"] = chat;
    settings["depths"] = flags.depths;
    settings["seed"] = flags.seed;
    json_ = open_record(path_, flags.command, settings);
  }

  const nlohmann::json& results() const { return json_.at("results"); }

  bool has(const Contender& c, Index length, double depth, const std::string& key) const {
    return std::ranges::any_of(results(), [&](const nlohmann::json& r) {
      return r["selector"] == c.method && r["budget"] == c.budget && r["length"] == length &&
             r["depth"] == depth && r["key"] == key;
    });
  }
  void add(const Contender& c, Index length, double depth, const std::string& key,
           const Outcome& outcome) {
    json_["results"].push_back({{"selector", c.method},
                                {"budget", c.budget},
                                {"length", length},
                                {"depth", depth},
                                {"key", key},
                                {"exact", outcome.exact},
                                {"log_prob", outcome.log_prob}});
  }
  void write() const {
    if (!path_.empty()) write_json(path_, json_);
  }

 private:
  std::string path_;
  nlohmann::json json_;
};

bool as_chat(const Flags& flags, const LoadedModel& loaded) {
  return flags.chat && loaded.chat.has_value();
}
ChatTurns turns_of(const Flags& flags, const LoadedModel& loaded) {
  return as_chat(flags, loaded) ? *loaded.chat : ChatTurns{"", " "};
}

void run_grid(const Flags& flags, const LoadedModel& loaded, std::vector<Asked>& contenders,
              Record& record) {
  const Haystack haystack(*loaded.tokenizer, read_file(flags.haystack), turns_of(flags, loaded));
  const Index points = std::ssize(flags.lengths) * flags.depths * flags.needles;
  Progress bar("needle", points * std::ssize(contenders));
  Index done = 0;
  for (const Index length : flags.lengths) {
    for (Index i = 0; i < flags.depths; ++i) {
      const double depth = depth_of(i, flags.depths);
      for (Index needle = 0; needle < flags.needles; ++needle) {
        const std::string key = draw_key(flags.seed, length, i, needle);
        const NeedlePrompt prompt = haystack.prompt(length, depth, key);
        for (Asked& c : contenders) {
          if (!record.has(c, length, depth, key))
            record.add(c, length, depth, key, ask(c, prompt, flags.model.chunk));
          bar.update(++done);
        }
        record.write();
      }
    }
  }
}

// A row per selector and budget: exact matches in per cent per length, and the mean log-probability.
void print_results(const Flags& flags, const std::vector<Asked>& contenders,
                   const nlohmann::json& results) {
  Table table(fmt::format("selector\tbudget\t{}\tall\tlog-prob", fmt::join(flags.lengths, "\t")));
  for (const Contender& c : contenders) {
    table.row("{}\t{}", c.method, c.method == "dense" ? "-" : c.budget);
    double sum = 0.0, right = 0.0, count = 0.0;
    for (const Index length : flags.lengths) {
      double right_here = 0.0, count_here = 0.0;
      for (const auto& r : results) {
        if (r["selector"] != c.method || r["budget"] != c.budget || r["length"] != length) continue;
        count_here += 1.0;
        right_here += r["exact"].get<bool>() ? 1.0 : 0.0;
        sum += r["log_prob"].get<double>();
      }
      table.more("{:.0f} %", 100.0 * right_here / count_here);
      right += right_here, count += count_here;
    }
    table.more("{:.1f} %\t{:.2f}", 100.0 * right / count, sum / count);
  }
  table.print();
}

void needle(const Flags& flags) {
  const LoadedModel loaded = load(flags.model);
  const Index longest = *std::max_element(flags.lengths.begin(), flags.lengths.end());
  note_context(flags.model, loaded.model.config, longest + 8);
  quoka::ThreadPool threads(thread_count(flags.model));
  std::vector<Asked> contenders;
  for (Contender& c : make_contenders(flags.model, flags.selectors, loaded.model, threads))
    contenders.push_back({std::move(c)});
  Record record(flags, as_chat(flags, loaded));
  run_grid(flags, loaded, contenders, record);
  fmt::print("exact match over {} depths x {} needles; chunk {}, seed {}\n", flags.depths,
             flags.needles, flags.model.chunk, flags.seed);
  print_results(flags, contenders, record.results());
}

}  // namespace

void add_needle(CLI::App& app, const std::string& command) {
  auto flags = std::make_shared<Flags>();
  flags->command = command;
  CLI::App* sub =
      app.add_subcommand("needle", "needle in a haystack: lengths x depths x selectors");
  add_grid_flags(*sub, *flags);
  sub->add_option("--haystack", flags->haystack, "a text; it begins again where it is too short")
      ->check(CLI::ExistingFile)
      ->capture_default_str();
  sub->add_option("--depths", flags->depths, "depths from 0 to 1, evenly spaced")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  sub->add_option("--needles", flags->needles, "pass keys at each depth")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  sub->add_flag("--chat,!--no-chat", flags->chat,
                "ask a chat model in a user's turn; has no effect on others");
  sub->callback([flags] { needle(*flags); });
}

}  // namespace quoka_decoder
