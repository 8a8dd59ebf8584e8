// Time to first token of long prompts by llama.cpp as it is, exact and with QuoKA, from samples: one ubatch at
// each depth, the cache before it filled with copies of a few tokens. Minutes in place of hours; the sum over
// a whole prompt is interpolated between the depths.
//
//     first_token MODEL.gguf [--depths 0,2048,4096,7680] [--ubatch 512] [--threads 2] [--rounds 1]
//                 [--modes exact,paper] [--budget 1024] [--cache f16|q8_0] [--out results.json]
//     first_token --shape llama-3.1-8b [--layers 2] ...
//
// Modes alternate at each depth; one may have settings of its own (settings_text.hpp): exact:arithmetic=bf16. The
// contents of a cache do not change the time of dense attention. Copies do not favour selection, because many keys
// score alike. The first layer is dense, unless QUOKA_DENSE_LAYERS says otherwise.
//
// --shape: random weights (random_model.hpp), of a model's layers only some, their time multiplied.
// Work outside the layers (embedding, logits of one token) is next to nothing there. The first layer's time is
// exact mode's.
#include "llama_session.hpp"
#include "random_model.hpp"
#include "settings_text.hpp"

#include "support/clock.hpp"
#include "support/json_file.hpp"
#include "support/statistics.hpp"

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <random>

namespace {

using namespace quoka_ggml;
using quoka_examples::median, quoka_examples::process_seconds, quoka_examples::wall_seconds;

constexpr int block = 256;  // tokens that are computed once and copied

std::vector<TokenAt> random_tokens(std::mt19937& random, int vocabulary, int first, int count) {
  std::vector<TokenAt> tokens;
  for (int i = 0; i < count; ++i)
    tokens.push_back(
        {static_cast<llama_token>(random() % static_cast<unsigned>(vocabulary)), first + i});
  tokens.back().logits = true;
  return tokens;
}

// Sequence 0 gets `depth` tokens: copies of the block that `state` holds, each moved to its place.
void fill(Session& session, const std::vector<std::uint8_t>& state, int depth) {
  llama_memory_clear(session.memory(), true);
  for (int begin = 0; begin < depth; begin += block) {
    session.load(state, 1);
    llama_memory_seq_rm(session.memory(), 1, depth - begin, -1);
    llama_memory_seq_add(session.memory(), 1, 0, -1, begin);
    llama_memory_seq_cp(session.memory(), 1, 0, -1, -1);
    llama_memory_seq_rm(session.memory(), 1, -1, -1);
  }
  // Keys are moved in the next decode, and looked at by this backend in the next chunk.
  std::vector<TokenAt> tokens;
  for (int i = 0; i < 32; ++i) tokens.push_back({1, depth + i});
  tokens.back().logits = true;
  session.decode(tokens);
  llama_memory_seq_rm(session.memory(), 0, depth, -1);
}

// A file that is there no longer when the model is loaded.
llama_model_ptr random_model(const ModelShape& shape, int layers) {
  std::string path = (std::filesystem::temp_directory_path() / "quoka_model_XXXXXX").string();
  const int file = mkstemp(path.data());
  if (file < 0) throw std::runtime_error("cannot make " + path);
  close(file);
  const auto remove = [&] { std::filesystem::remove(path); };
  try {
    write_random_model(shape, layers, path);
    llama_model_ptr model = load_model(path);
    remove();
    return model;
  } catch (...) {
    remove();
    throw;
  }
}

const ModelShape& shape_named(const std::string& name) {
  std::string all;
  for (const ModelShape& shape : model_shapes) {
    if (name == shape.name) return shape;
    all += std::string(all.empty() ? "" : ", ") + shape.name;
  }
  throw std::invalid_argument("--shape " + name + " is none of " + all);
}

struct Mode {
  std::string name;
  std::unique_ptr<Session> session;
  std::vector<double> wall = {}, cpu = {};  // of one ubatch at each depth
};

// A ubatch's last times by `layers` layers, as the whole model takes them: in exact mode all of its layers alike,
// else all but the first, which is dense.
void whole_model(std::vector<Mode>& modes, const ModelShape& shape, int layers) {
  const auto exact = std::find_if(modes.begin(), modes.end(),
                                  [](const Mode& mode) { return mode.name == "exact"; });
  const auto all = static_cast<double>(shape.layers), each = 1.0 / layers;
  const auto extend = [&](auto times) {
    const double dense = exact != modes.end() ? each * times(*exact).back() : 0;
    for (Mode& mode : modes) {
      const bool all_alike = mode.name == "llama.cpp" || mode.name.starts_with("exact");
      double& time = times(mode).back();
      time = all_alike || dense == 0 ? all * each * time : dense + (all - 1) * each * time;
    }
  };
  extend([](Mode & mode) -> auto& { return mode.wall; });
  extend([](Mode & mode) -> auto& { return mode.cpu; });
}

// The time of a prompt of `tokens`: one ubatch's times, linear between depths and beyond the last two, summed.
double whole(const std::vector<int>& depths, const std::vector<double>& times, int tokens,
             int ubatch) {
  double sum = 0;
  for (int at = 0; at < tokens; at += ubatch) {
    std::size_t i = 1;
    while (i + 1 < depths.size() && depths[i] < at) ++i;
    const double part = static_cast<double>(at - depths[i - 1]) / (depths[i] - depths[i - 1]);
    const double share = static_cast<double>(std::min(ubatch, tokens - at)) / ubatch;
    sum += share * (times[i - 1] + part * (times[i] - times[i - 1]));
  }
  return sum;
}

}  // namespace

int main(int argc, char** argv) try {
  CLI::App app("Time to first token, from samples");
  std::string model_path, shape_name, budget = "1024", cache = "f16", out;
  std::vector<std::string> names{"exact", "paper"};
  std::vector<int> depths{0, 2048, 4096, 7680};
  int ubatch = 512, threads = 2, rounds = 1, layers = 2;
  const auto* const file = app.add_option("model", model_path)->check(CLI::ExistingFile);
  app.add_option("--shape", shape_name, "a model of random weights")->excludes("model");
  app.add_option("--layers", layers, "of that model")->needs("--shape")->check(CLI::PositiveNumber);
  app.add_option("--depths", depths, "ascending")->delimiter(',')->expected(2, 99);
  app.add_option("--ubatch", ubatch)->check(CLI::PositiveNumber);
  app.add_option("--threads", threads)->check(CLI::PositiveNumber);
  app.add_option("--rounds", rounds)->check(CLI::PositiveNumber);
  app.add_option("--modes", names, "of this backend")->delimiter(',')->allow_extra_args(false);
  app.add_option("--budget", budget);
  app.add_option("--cache", cache)->check(CLI::IsMember({"f16", "q8_0"}));
  app.add_option("--out", out);
  CLI11_PARSE(app, argc, argv);
  for (std::size_t i = 1; i < depths.size(); ++i)
    if (depths[i] <= depths[i - 1] || depths[0] < 0)
      throw std::invalid_argument("--depths must ascend from 0 or more");

  llama_log_set(only_errors, nullptr);
  const bool sampled = file->count() == 0;
  if (sampled && shape_name.empty()) throw std::invalid_argument("a model, or --shape, is needed");
  const ModelShape shape = sampled ? shape_named(shape_name) : ModelShape{};
  if (sampled && layers > shape.layers)
    throw std::invalid_argument("--layers " + std::to_string(layers) + ": " + shape_name + " has " +
                                std::to_string(shape.layers));
  const llama_model_ptr model = sampled ? random_model(shape, layers) : load_model(model_path);
  const int vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(model.get()));
  llama_context_params p =
      context_params(depths.back() + ubatch + block + 1, ubatch, threads, cache);
  p.n_seq_max = 2, p.kv_unified = true;
  std::vector<Mode> modes;
  modes.push_back({"llama.cpp", std::make_unique<Session>(model.get(), p)});
  setenv("QUOKA_BUDGET", budget.c_str(), 1);
  if (sampled) setenv("QUOKA_DENSE_LAYERS", "0", 1);
  for (const std::string& name : names) {
    const nlohmann::json settings = settings_of_mode(name);
    set_variables(settings);
    restart_quoka();
    modes.push_back({name, std::make_unique<Session>(model.get(), p)});
    clear_variables(settings);
  }
  std::mt19937 random(1);
  modes[0].session->decode(random_tokens(random, vocabulary, 0, block));
  const std::vector<std::uint8_t> state = modes[0].session->state(0);

  nlohmann::json rows = nlohmann::json::array();
  fmt::print("{:>8}", "depth");
  for (const Mode& mode : modes) fmt::print(" {:>10}, s (CPU s)", mode.name);
  fmt::print("\n");
  for (const int depth : depths) {
    std::vector<std::vector<double>> wall(modes.size()), seconds(modes.size());
    for (Mode& mode : modes) fill(*mode.session, state, depth);
    for (int round = 0; round < rounds; ++round) {
      const auto tokens = random_tokens(random, vocabulary, depth, ubatch);
      for (std::size_t i = 0; i < modes.size(); ++i) {
        const double begin = wall_seconds(), cpu_begin = process_seconds();
        modes[i].session->decode(tokens);
        modes[i].session->logits(ubatch - 1);
        wall[i].push_back(wall_seconds() - begin);
        seconds[i].push_back(process_seconds() - cpu_begin);
        llama_memory_seq_rm(modes[i].session->memory(), 0, depth, -1);
      }
    }
    for (std::size_t i = 0; i < modes.size(); ++i)
      modes[i].wall.push_back(median(wall[i])), modes[i].cpu.push_back(median(seconds[i]));
    if (sampled) whole_model(modes, shape, layers);
    fmt::print("{:8}", depth);
    nlohmann::json row{{"depth", depth}};
    for (std::size_t i = 0; i < modes.size(); ++i) {
      row[modes[i].name] = {{"s", modes[i].wall.back()}, {"cpu_s", modes[i].cpu.back()}};
      fmt::print(" {:10.3f} ({:7.3f})", modes[i].wall.back(), modes[i].cpu.back());
    }
    fmt::print("\n");
    std::fflush(stdout);
    rows.push_back(row);
  }
  nlohmann::json prompts = nlohmann::json::array();
  for (int tokens = 2048; tokens <= depths.back() + ubatch; tokens *= 2) {
    nlohmann::json prompt{{"tokens", tokens}};
    fmt::print("{} tokens:", tokens);
    for (const Mode& mode : modes) {
      const double wall = whole(depths, mode.wall, tokens, ubatch),
                   seconds = whole(depths, mode.cpu, tokens, ubatch);
      prompt[mode.name] = {{"s", wall}, {"cpu_s", seconds}};
      fmt::print("  {} {:.1f} s (CPU {:.1f})", mode.name, wall, seconds);
    }
    fmt::print("\n");
    prompts.push_back(prompt);
  }
  if (!out.empty())
    quoka_examples::write_json(
        out, {{"model", sampled ? shape_name + ", random weights, " + std::to_string(layers) +
                                      " of its layers"
                                : std::filesystem::path(model_path).filename().string()},
              {"ubatch", ubatch},
              {"threads", threads},
              {"cache", cache},
              {"budget", budget},
              {"rounds", rounds},
              {"one_ubatch", rows},
              {"prompts", prompts}});
} catch (const std::exception& e) {
  std::fprintf(stderr, "first_token: %s\n", e.what());
  return 1;
}
