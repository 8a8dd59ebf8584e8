#include "decoder/program/common.hpp"

#include "decoder/file/gguf.hpp"

#include "support/layer_policy_file.hpp"

#include <fmt/format.h>

#include <sys/resource.h>

#include <fstream>
#include <iterator>
#include <map>
#include <stdexcept>
#include <thread>

namespace quoka_decoder {
namespace {

void override_rope(RopeConfig& rope, const ModelFlags& flags, Index context) {
  static const std::map<std::string, RopeScaling> names{
      {"none", RopeScaling::none}, {"linear", RopeScaling::linear}, {"yarn", RopeScaling::yarn}};
  if (flags.rope_scaling.empty()) return;
  rope.scaling = names.at(flags.rope_scaling);
  rope.factor = rope.scaling == RopeScaling::none ? 1.0f : flags.rope_factor;
  rope.magnitude = 1.0f;  // the file's belongs to its own scaling
  if (rope.trained_context == 0) rope.trained_context = context;
}

}  // namespace

void add_model_flags(CLI::App& app, ModelFlags& flags, bool model_required) {
  app.add_option("-m,--model", flags.model, "a GGUF file")
      ->required(model_required)
      ->check(CLI::ExistingFile);
  app.add_option("-t,--threads", flags.threads, "0: one for each processor")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_option("--chunk", flags.chunk, "tokens that select together")->capture_default_str();
  app.add_option("--batch", flags.batch, "tokens that go through a matrix product together")
      ->capture_default_str();
  app.add_option("--dense-layers", flags.dense_layers, "the first layers attend to everything")
      ->capture_default_str();
  app.add_option("--policy", flags.policy,
                 "a file of `decoder calibrate`: dense layers and budgets, in place of --budget")
      ->check(CLI::ExistingFile);
  auto* scaling = app.add_option("--rope-scaling", flags.rope_scaling,
                                 "none | linear | yarn, in place of what the file says")
                      ->check(CLI::IsMember({"none", "linear", "yarn"}));
  app.add_option("--rope-factor", flags.rope_factor, "by which the trained context is stretched")
      ->needs(scaling)
      ->check(CLI::PositiveNumber);
}

LoadedModel load(const ModelFlags& flags) {
  if (!flags.rope_scaling.empty() && flags.rope_scaling != "none" && flags.rope_factor <= 0.0f)
    throw std::runtime_error("--rope-scaling " + flags.rope_scaling + " needs --rope-factor");
  const auto file = std::make_shared<const GgufFile>(flags.model);
  LoadedModel loaded{load_model(file), make_tokenizer(*file), chat_turns(*file)};
  ModelConfig& c = loaded.model.config;
  if (loaded.tokenizer->size() > c.vocabulary)
    throw std::runtime_error(flags.model + ": its tokenizer has " +
                             std::to_string(loaded.tokenizer->size()) + " tokens, its embedding " +
                             std::to_string(c.vocabulary));
  override_rope(c.rope, flags, c.context);
  fmt::print(stderr, "{}: {}, {} layers, d_model {}, {}/{} heads of {}, {:.2f} GiB of {}\n",
             flags.model, c.architecture, c.layers, c.d_model, c.q_heads, c.kv_heads, c.head_dim,
             static_cast<double>(loaded.model.bytes()) / (1 << 30),
             name_of(loaded.model.layers.front().gate.type));
  return loaded;
}

std::vector<SelectorList::Choice> SelectorList::choices() const {
  std::vector<Choice> all;
  if (dense) all.push_back({"dense", "1.0"});
  for (const std::string& budget : budgets)
    for (const std::string& method : parse_methods(methods)) all.push_back({method, budget});
  return all;
}

void add_selector_list(CLI::App& app, SelectorList& list) {
  app.add_option("--selectors", list.methods, "a list of methods, or all")->capture_default_str();
  app.add_option("--budgets", list.budgets, "a list: 256,0.25")
      ->delimiter(',')
      ->capture_default_str();
  add_quoka_flags(app, list.quoka);
}

void add_prompt_flags(CLI::App& app, PromptFlags& flags) {
  app.add_option("-f,--file", flags.file, "a file with the prompt")
      ->required()
      ->check(CLI::ExistingFile);
  app.add_option("--max-tokens", flags.max_tokens, "cut the prompt there; 0: all of it")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
}

std::vector<Token> read_prompt(const PromptFlags& flags, const Tokenizer& tokenizer) {
  auto prompt = tokenizer.encode(read_file(flags.file));
  if (flags.max_tokens > 0 && std::ssize(prompt) > flags.max_tokens)
    prompt.resize(static_cast<std::size_t>(flags.max_tokens));
  return prompt;
}

std::vector<Contender> make_contenders(const ModelFlags& flags, const SelectorList& selectors,
                                       const Model& model, quoka::ThreadPool& threads) {
  std::vector<Contender> all;
  for (const auto& [method, budget] : selectors.choices()) {
    const auto options = session_options(flags, method, budget, selectors.quoka);
    all.push_back({method, budget, std::make_unique<Session>(model, options, threads)});
  }
  return all;
}

void note_context(const ModelFlags& flags, const ModelConfig& config, Index tokens) {
  if (tokens > config.context && flags.rope_scaling.empty())
    fmt::print(stderr, "note: up to {} tokens; the model was trained on {}\n", tokens,
               config.context);
}

int thread_count(const ModelFlags& flags) {
  if (flags.threads > 0) return flags.threads;
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

SessionOptions session_options(const ModelFlags& flags, const std::string& method,
                               const std::string& budget, const quoka::QuokaOptions& quoka) {
  return {.method = method,
          .selector = {.budget = parse_budget(budget), .quoka = quoka},
          .chunk = flags.chunk,
          .batch = flags.batch,
          .dense_layers = flags.dense_layers,
          .policy = flags.policy.empty() ? LayerPolicy{} : read_policy(flags.policy)};
}

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  if (!file) throw std::runtime_error(path + ": cannot read it");
  return text;
}

double peak_memory_mib() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_maxrss) / 1024.0;
}

}  // namespace quoka_decoder
