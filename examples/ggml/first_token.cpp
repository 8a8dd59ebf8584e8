// Time to first token of long prompts by llama.cpp as it is, exact and with QuoKA, from samples: one ubatch at
// each depth, the cache before it filled with copies of a few tokens. Minutes in place of hours; the sum over
// a whole prompt is interpolated between the depths.
//
//     first_token MODEL.gguf [--depths 0,2048,4096,7680] [--ubatch 512] [--threads 2] [--rounds 1]
//                 [--modes exact,quoka] [--budget 1024] [--cache f16|q8_0] [--out results.json]
//
// Modes alternate at each depth. What is in a cache changes no time of dense attention; copies are no
// favour to selection: many keys score alike.
#include "llama_session.hpp"

#include <nlohmann/json.hpp>
#include <CLI/CLI.hpp>

#include <chrono>
#include <cstdio>
#include <ctime>
#include <fstream>
#include <memory>
#include <random>

namespace {

using namespace quoka_ggml;

constexpr int block = 256;  // tokens that are computed once and copied

double cpu() { return static_cast<double>(std::clock()) / CLOCKS_PER_SEC; }

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double median(std::vector<double> x) {
  std::sort(x.begin(), x.end());
  return x[x.size() / 2];
}

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
  const TokenAt one{1, depth, 0, true};  // keys are moved in the next decode
  session.decode({&one, 1});
  llama_memory_seq_rm(session.memory(), 0, depth, -1);
}

struct Mode {
  std::string name;
  std::unique_ptr<Session> session;
  std::vector<double> wall = {}, cpu = {};  // of one ubatch at each depth
};

// Of a prompt of `tokens`: one ubatch's times, straight between depths and on from the last two, summed.
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
  std::string model_path, budget = "1024", cache = "f16", out;
  std::vector<std::string> names{"exact", "quoka"};
  std::vector<int> depths{0, 2048, 4096, 7680};
  int ubatch = 512, threads = 2, rounds = 1;
  app.add_option("model", model_path)->required();
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
  const llama_model_ptr model = load_model(model_path);
  const int vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(model.get()));
  llama_context_params p = llama_context_default_params();
  p.n_ctx = static_cast<std::uint32_t>(depths.back() + ubatch + 2 * block) / 256 * 256;
  p.n_batch = p.n_ctx, p.n_ubatch = static_cast<std::uint32_t>(ubatch), p.n_seq_max = 2;
  p.n_threads = p.n_threads_batch = threads, p.kv_unified = true;
  p.type_k = p.type_v = cache == "q8_0" ? GGML_TYPE_Q8_0 : GGML_TYPE_F16;
  p.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
  std::vector<Mode> modes;
  modes.push_back({"llama.cpp", std::make_unique<Session>(model.get(), p)});
  setenv("QUOKA_BUDGET", budget.c_str(), 1);
  for (const std::string& name : names) {
    setenv("QUOKA_MODE", name.c_str(), 1);
    restart_quoka();
    modes.push_back({name, std::make_unique<Session>(model.get(), p)});
  }
  std::mt19937 random(1);
  modes[0].session->decode(random_tokens(random, vocabulary, 0, block));
  const std::vector<std::uint8_t> state = modes[0].session->state(0);

  nlohmann::json rows = nlohmann::json::array();
  std::printf("%8s", "depth");
  for (const Mode& mode : modes) std::printf(" %10s, s (CPU s)", mode.name.c_str());
  std::printf("\n");
  for (const int depth : depths) {
    std::vector<std::vector<double>> wall(modes.size()), seconds(modes.size());
    for (Mode& mode : modes) fill(*mode.session, state, depth);
    for (int round = 0; round < rounds; ++round) {
      const auto tokens = random_tokens(random, vocabulary, depth, ubatch);
      for (std::size_t i = 0; i < modes.size(); ++i) {
        const double begin = now(), cpu_begin = cpu();
        modes[i].session->decode(tokens);
        modes[i].session->logits(ubatch - 1);
        wall[i].push_back(now() - begin), seconds[i].push_back(cpu() - cpu_begin);
        llama_memory_seq_rm(modes[i].session->memory(), 0, depth, -1);
      }
    }
    std::printf("%8d", depth);
    nlohmann::json row{{"depth", depth}};
    for (std::size_t i = 0; i < modes.size(); ++i) {
      modes[i].wall.push_back(median(wall[i])), modes[i].cpu.push_back(median(seconds[i]));
      row[modes[i].name] = {{"s", modes[i].wall.back()}, {"cpu_s", modes[i].cpu.back()}};
      std::printf(" %10.3f (%7.3f)", modes[i].wall.back(), modes[i].cpu.back());
    }
    std::printf("\n");
    std::fflush(stdout);
    rows.push_back(row);
  }
  nlohmann::json prompts = nlohmann::json::array();
  for (int tokens = 2048; tokens <= depths.back() + ubatch; tokens *= 2) {
    nlohmann::json prompt{{"tokens", tokens}};
    std::printf("%d tokens:", tokens);
    for (const Mode& mode : modes) {
      const double wall = whole(depths, mode.wall, tokens, ubatch),
                   seconds = whole(depths, mode.cpu, tokens, ubatch);
      prompt[mode.name] = {{"s", wall}, {"cpu_s", seconds}};
      std::printf("  %s %.1f s (CPU %.1f)", mode.name.c_str(), wall, seconds);
    }
    std::printf("\n");
    prompts.push_back(prompt);
  }
  if (!out.empty())
    std::ofstream(out) << nlohmann::json{{"model", model_path}, {"ubatch", ubatch},
                                         {"threads", threads},  {"cache", cache},
                                         {"budget", budget},    {"one_ubatch", rows},
                                         {"prompts", prompts}}
                              .dump(1)
                       << '\n';
} catch (const std::exception& e) {
  std::fprintf(stderr, "first_token: %s\n", e.what());
  return 1;
}
