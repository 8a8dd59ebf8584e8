// The table of architectures: for each that llama.cpp makes without a file (architectures.hpp), a tiny model of random
// weights, its logits with the backend against llama.cpp's own, what each of its layers is, and which select.
//
//     architectures [NAME...] [--prompt 640] [--out results.json] [--expect results.json]
//
// A prompt of 640 tokens in ubatches of two fifths, then 8 single ones; diffusion models: the prompt at once. Exact:
// exact mode's logits are about as near to those of llama.cpp's flash attention as llama.cpp's are without flash
// attention, at most twice as far (random weights make much of a bit); both distances are printed, root mean squares by
// the logits' own. Single tokens: llama.cpp rounds queries and sums to half below 64 queries, here they are float.
//
// Both presets must run, give finite logits and select in the same layers, and with "dense_layers": 1 in all of these
// but the first. --expect: layers, and where they select, as that file says; else the program fails.
//
// Each architecture is a process of its own (--one NAME), so an assert of llama.cpp's ends one row only.
#include "architectures.hpp"
#include "settings_text.hpp"

#include "support/json_file.hpp"

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <filesystem>
#include <fstream>
#include <future>
#include <map>
#include <optional>
#include <set>
#include <thread>

#include <unistd.h>

namespace {

using namespace quoka_ggml;
using nlohmann::json;

constexpr int steps = 8, budget = 64;
constexpr unsigned longest_seconds = 300;  // of one architecture

struct Logits {
  std::vector<float> prompt, steps;
};

json read_json(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw std::runtime_error("cannot read " + path);
  return json::parse(file);
}

// ---- one architecture -------------------------------------------------------------------------------------------

class OfOne {
 public:
  OfOne(const std::string& name, int prompt)
      : prompt_(prompt),
        model_(random_architecture(name)),
        vocabulary_(llama_vocab_n_tokens(llama_model_get_vocab(model_.get()))) {
    cached_ = Session(model_.get(), params(true)).memory() != nullptr;
  }
  int layers() const { return llama_model_n_layer(model_.get()); }

  Logits run(bool flash_attention = true) const {
    llama_context_params p = params(cached_);
    if (!flash_attention) p.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    Session session(model_.get(), p);
    std::mt19937 random(1);
    const auto token = [&] {
      return static_cast<llama_token>(random() % static_cast<unsigned>(vocabulary_));
    };
    Logits all;
    std::vector<TokenAt> tokens;
    const auto asked = [](int i) { return i % 16 == 15; };
    for (int i = 0; i < prompt_; ++i) tokens.push_back({token(), i, 0, asked(i)});
    const auto append = [&](std::vector<float>& to, int i) {
      const std::span<const float> logits = session.logits(i);
      to.insert(to.end(), logits.begin(), logits.end());
    };
    session.decode(tokens);
    for (int i = 0; i < prompt_; ++i)
      if (asked(i)) append(all.prompt, i);
    for (int i = 0; cached_ && i < steps; ++i) {
      session.decode(std::vector<TokenAt>{{token(), prompt_ + i, 0, true}});
      append(all.steps, 0);
    }
    return all;
  }
  // The same by the backend with these settings; and what it says of the layers.
  std::pair<Logits, json> run(json settings) const {
    const std::filesystem::path file =
        std::filesystem::temp_directory_path() /
        ("quoka_architecture_" + std::to_string(::getpid()) + ".json");
    settings.update({{"stats", file.string()}, {"quiet", 1}});
    set_variables(settings);
    restart_quoka();
    Logits logits = run();
    clear_variables(settings);
    set_variables({{"quiet", 1}});
    restart_quoka();  // the results until now are written
    json stats = read_json(file.string());
    std::filesystem::remove(file);
    return {std::move(logits), std::move(stats)};
  }

 private:
  llama_context_params params(bool in_ubatches) const {
    return context_params(prompt_ + steps, in_ubatches ? prompt_ * 2 / 5 : prompt_, 1);
  }

  int prompt_;
  llama_model_ptr model_;
  int vocabulary_;
  bool cached_;
};

// Root mean squares: of the difference, by that of y; 0 where both are.
double distance(const std::vector<float>& x, const std::vector<float>& y) {
  double of_difference = 0, of_y = 0;
  for (std::size_t i = 0; i < y.size(); ++i) {
    const double a = x[i], b = y[i];
    of_difference += (a - b) * (a - b), of_y += b * b;
  }
  if (y.empty()) return 0;
  if (!(of_y > 0)) throw std::runtime_error("llama.cpp's logits are zeros");
  return std::sqrt(of_difference / of_y);
}
double rounded(double x) { return std::strtod(fmt::format("{:.1e}", x).c_str(), nullptr); }

std::vector<int> selecting(const json& stats) {
  std::vector<int> layers;
  for (const json& layer : stats["layers"])
    if (layer["did"].contains("selected")) layers.push_back(layer["layer"]);
  return layers;
}

json row_of(const std::string& name, int prompt) {
  const OfOne model(name, prompt);
  const Logits llama = model.run();
  const Logits unfused =
      model.run(false);  // the contexts of llama.cpp alone come first: they never see the backend
  const auto [exact, stats] = model.run(json{{"mode", "exact"}});
  std::vector<std::string> kinds(static_cast<std::size_t>(model.layers()));
  for (const json& layer : stats["layers"]) {
    const int number = layer["layer"];
    if (number >= 0)
      kinds.at(static_cast<std::size_t>(number)) = layer["kind"];
    else  // of no layer by name, and of all
      kinds.assign(kinds.size(), "no cache");
  }
  json row{{"architecture", name},
           {"kinds", kinds},
           {"prompt",
            {rounded(distance(exact.prompt, llama.prompt)),
             rounded(distance(unfused.prompt, llama.prompt))}},
           {"steps",
            {rounded(distance(exact.steps, llama.steps)),
             rounded(distance(unfused.steps, llama.steps))}}};

  std::optional<std::vector<int>> selects;
  for (const char* const mode : {"paper", "balanced", "recommended"}) {
    for (const int dense : {0, 1}) {
      const auto [logits, said] =
          model.run(json{{"mode", mode}, {"budget", budget}, {"dense_layers", dense}});
      const std::string of = fmt::format("{}, {} dense layers: ", mode, dense);
      for (const std::vector<float>* const part : {&logits.prompt, &logits.steps})
        for (const float x : *part)
          if (!std::isfinite(x)) throw std::runtime_error(of + "logits that are not finite");
      if (!said["selections_refused"].empty())
        throw std::runtime_error(of + said["selections_refused"].dump());
      const std::vector<int> layers = selecting(said);
      if (!selects) selects = layers;
      const auto first = selects->begin() + (dense == 1 && !selects->empty() ? 1 : 0);
      if (layers != std::vector<int>(first, selects->end()))
        throw std::runtime_error(fmt::format("{}selects in {}, but with paper in {}", of,
                                             json(layers).dump(), json(*selects).dump()));
    }
  }
  row["selects"] = *selects;
  return row;
}

bool is_exact(const json& row) {
  const auto near = [](const json& distances) {
    constexpr double of_float = 1e-5;
    return distances[0] <= std::max(2 * distances[1].get<double>(), of_float);
  };
  return near(row["prompt"]) && near(row["steps"]);
}

// ---- all of them ------------------------------------------------------------------------------------------------

// The row by a process of its own, or {"failed": why}.
json row_by_process(const std::string& program, const std::string& name, int prompt) {
  std::string said;
  const std::string command = "GGML_NO_BACKTRACE=1 '" + program + "' --prompt " +
                              std::to_string(prompt) + " --one " + name + " 2>&1";
  std::FILE* const pipe = ::popen(command.c_str(), "r");
  if (pipe == nullptr) return {{"failed", "no process"}};
  char part[4096];
  for (std::size_t got; (got = std::fread(part, 1, sizeof part, pipe)) > 0;) said.append(part, got);
  ::pclose(pipe);
  const std::size_t begin = said.rfind("{\"architecture\"");
  const json row = begin == said.npos ? json() : json::parse(said.substr(begin), nullptr, false);
  if (row.is_object()) return row;
  while (!said.empty() && said.back() == '\n') said.pop_back();
  return {{"failed", said.substr(said.rfind('\n') == said.npos ? 0 : said.rfind('\n') + 1)}};
}

std::string numbers(const json& all) {
  std::string text;
  for (const json& one : all) text += (text.empty() ? "" : " ") + one.dump();
  return text.empty() ? "-" : text;
}
// Layers by what they are, but those of full attention.
std::string by_kind(const json& kinds) {
  std::map<std::string, json> layers;
  for (std::size_t i = 0; i < kinds.size(); ++i) {
    const std::string kind = kinds[i].get<std::string>();
    if (kind != "full attention") layers[kind.empty() ? "no call" : kind].push_back(i);
  }
  std::string text;
  for (const auto& [kind, of] : layers)
    text += (text.empty() ? "" : "; ") + kind + ": " + numbers(of);
  return text;
}

}  // namespace

int main(int argc, char** argv) try {
  CLI::App app("The backend's table of architectures, against llama.cpp itself");
  std::vector<std::string> names;
  std::string one, out, expect;
  int prompt = 640;
  app.add_option("names", names, "architectures; all, if none is given")
      ->check(CLI::IsMember(
          std::set<std::string>(std::begin(architecture_names), std::end(architecture_names))));
  app.add_option("--one", one)->group("");
  app.add_option("--prompt", prompt, "tokens")->check(CLI::Range(5, 4096));
  app.add_option("--out", out, "write the rows there");
  app.add_option("--expect", expect, "rows of an earlier run: layers must be the same")
      ->check(CLI::ExistingFile);
  CLI11_PARSE(app, argc, argv);

  if (!one.empty()) {
    ::alarm(longest_seconds);
    std::printf("%s\n", row_of(one, prompt).dump().c_str());
    return 0;
  }
  if (names.empty()) names.assign(std::begin(architecture_names), std::end(architecture_names));
  std::map<std::string, json> expected;
  if (!expect.empty()) {
    const json earlier = read_json(expect);
    for (const json& row : earlier.at("results")) expected[row.at("architecture")] = row;
  }

  const std::string program = std::filesystem::read_symlink("/proc/self/exe").string();
  json rows = json::array();
  int wrong = 0;
  fmt::print("{:<17} {:<10} {:>17} {:>17}  {:<16} {}\n", "architecture", "", "prompt (llama)",
             "steps (llama)", "selects in", "other layers");
  // As many processes at once as there are cores; rows in the order of the names.
  std::deque<std::future<json>> begun;
  std::size_t next = 0;
  for (const std::string& name : names) {
    while (next < names.size() && begun.size() < std::max(1u, std::thread::hardware_concurrency()))
      begun.push_back(
          std::async(std::launch::async, row_by_process, program, names[next++], prompt));
    const json row = begun.front().get();
    begun.pop_front();
    std::string problem;
    if (row.contains("failed")) {
      problem = row["failed"];
    } else {
      rows.push_back(row);
      if (!is_exact(row)) problem = "much farther from llama.cpp than that is from itself";
      const auto before = expected.find(name);
      if (!expect.empty() && before == expected.end()) problem = "not in " + expect;
      if (before != expected.end())
        for (const char* const key : {"kinds", "selects"})
          if (row[key] != before->second[key])
            problem =
                fmt::format("{} {}, expected {}", key, row[key].dump(), before->second[key].dump());
    }
    wrong += problem.empty() ? 0 : 1;
    if (row.contains("failed"))
      fmt::print("{:<17} FAILED: {}\n", name, problem);
    else
      fmt::print("{:<17} {:<10} {:.1e} ({:.1e}) {:.1e} ({:.1e})  {:<16} {}{}\n", name,
                 is_exact(row) ? "exact" : "NOT EXACT", row["prompt"][0].get<double>(),
                 row["prompt"][1].get<double>(), row["steps"][0].get<double>(),
                 row["steps"][1].get<double>(), numbers(row["selects"]), by_kind(row["kinds"]),
                 problem.empty() ? "" : "  WRONG: " + problem);
    std::fflush(stdout);
  }
  fmt::print("{} architectures, {} wrong\n", names.size(), wrong);
  if (!out.empty())
    quoka_examples::write_json(out,
                               {{"command", "architectures --out bench/results/data/architectures.json"},
                                {"llama.cpp", "v0.5.0"},
                                {"results", rows}});
  return wrong == 0 ? 0 : 1;
} catch (const std::exception& e) {
  std::fprintf(stderr, "architectures: %s\n", e.what());
  return 1;
}
