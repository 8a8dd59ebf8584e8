// llama.cpp itself, with and without the backend, on tiny random models: the same logits in exact mode, whatever happened
// to the cache before. QUOKA_SOAK_STEPS=1000 takes 1,000 steps. real_model_test.cpp has a trained model.

#include "ggml/architectures.hpp"
#include "ggml/graph_of_one.hpp"
#include "ggml/node.hpp"
#include "ggml/said.hpp"
#include "ggml/tiny_llama.hpp"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <map>
#include <memory>
#include <random>

namespace {

using namespace quoka_ggml;
using quoka_test::Folder, quoka_test::restart_with, quoka_test::TinyLlama;

struct Model {
  Model() {
    const Folder folder;
    TinyLlama().write(folder / "tiny.gguf");
    llama_log_set(only_errors, nullptr);
    model = load_model(folder / "tiny.gguf");
  }
  explicit Model(llama_model_ptr loaded) : model(std::move(loaded)) {}
  // Contexts of the CPU backend come first: they never see this one.
  std::unique_ptr<Session> session(bool quoka, std::uint32_t ubatch = 128, bool unified = true,
                                   ggml_type type = GGML_TYPE_F16) const {
    llama_context_params p = llama_context_default_params();
    p.n_ctx = unified ? 2048 : 4096, p.n_batch = 2048, p.n_ubatch = ubatch, p.n_seq_max = 2;
    p.n_threads = p.n_threads_batch = 1, p.kv_unified = unified, p.type_k = p.type_v = type;
    p.flash_attn_type =
        quoka || type == GGML_TYPE_F16 ? LLAMA_FLASH_ATTN_TYPE_AUTO : LLAMA_FLASH_ATTN_TYPE_ENABLED;
    p.swa_full = swa_full;
    ggml_backend_dev_t const device = ggml_backend_dev_by_name("QuoKA");
    if (quoka)
      load_quoka();
    else if (device != nullptr)
      ggml_backend_unload(ggml_backend_dev_backend_reg(device));
    return std::make_unique<Session>(model.get(), p);
  }

  llama_model_ptr model;
  bool swa_full = true;  // caches of layers with a window are as long as others
};

// The account that the backend leaves (QUOKA_STATS) of what `run` does, with these variables.
template <class Run>
nlohmann::json stats_of(std::map<std::string, std::string> variables, Run run) {
  const Folder folder;
  variables["QUOKA_STATS"] = folder / "stats.json";
  restart_with(variables);
  run();
  restart_with({});
  return nlohmann::json::parse(quoka_test::text_of(variables["QUOKA_STATS"]));
}

std::vector<TokenAt> random_tokens(std::mt19937& random, int count, llama_seq_id sequence,
                                   llama_pos first) {
  std::vector<TokenAt> tokens;
  for (int i = 0; i < count; ++i)
    tokens.push_back({static_cast<llama_token>(random() % quoka_test::tiny_vocabulary), first + i,
                      sequence, false});
  tokens.back().logits = true;
  return tokens;
}

// The largest difference, by the spread of the logits.
double difference(std::span<const float> x, const std::vector<float>& y) {
  double largest = 0, squares = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    largest = std::max(largest, std::abs(static_cast<double>(x[i]) - static_cast<double>(y[i])));
    squares += static_cast<double>(y[i]) * static_cast<double>(y[i]);
  }
  return largest / std::sqrt(squares / static_cast<double>(x.size()));
}

std::vector<float> copy(std::span<const float> x) { return {x.begin(), x.end()}; }

// Rounding differs (ggml rounds queries to half), is written to the cache, and a random model makes
// much of it: an expert more or less, a key more or less. So most differences must be small.
class Differences {
 public:
  void add(double x) { all_.push_back(x); }
  void add(Session& ours, Session& theirs, const std::vector<TokenAt>& batch) {
    for (int i = 0; i < static_cast<int>(batch.size()); ++i)
      if (batch[static_cast<std::size_t>(i)].logits)
        add(difference(ours.logits(i), copy(theirs.logits(i)))),
            same_top_ += best(ours.logits(i)) == best(theirs.logits(i)) ? 1 : 0;
  }
  std::size_t same_top() const { return same_top_; }  // of those by sessions
  std::size_t count() const { return all_.size(); }
  // The difference that this part of them stays below.
  double below(double part) {
    std::sort(all_.begin(), all_.end());
    return all_[static_cast<std::size_t>(part * static_cast<double>(all_.size() - 1))];
  }

 private:
  std::vector<double> all_;
  std::size_t same_top_ = 0;
};

// Prompt, decode steps, two sequences: exact mode against llama.cpp's own flash attention. Of one sequence, and what
// layers select, of all architectures: the program `architectures`.
TEST(LlamaCpp, ExactModeOfTwoSequencesInOneCacheOrInStreams) {
  const Model model;
  for (const auto& [unified, ubatch] : {std::pair(true, 128u), std::pair(false, 512u)}) {
    SCOPED_TRACE(std::to_string(ubatch) + (unified ? ", one cache" : ", streams"));
    const auto theirs = model.session(false, ubatch, unified),
               ours = model.session(true, ubatch, unified);
    std::mt19937 random(1);
    Differences differences;
    llama_pos length[2] = {0, 0};
    for (int step = 0; step < 40; ++step) {
      std::vector<TokenAt> batch;
      for (llama_seq_id s = 0; s < 2; ++s) {
        const int count = step == s ? 300 : step == 20 ? 150 : 1;
        for (const TokenAt& x : random_tokens(random, count, s, length[s])) batch.push_back(x);
        length[s] += count;
        if (step == 0) break;
      }
      theirs->decode(batch), ours->decode(batch);
      differences.add(*ours, *theirs, batch);
    }
    EXPECT_LT(differences.below(0.5), 0.03);
    EXPECT_LT(differences.below(0.8), 0.06);
  }
}

// Returns what each layer did, by its number, with these settings: a prompt of 512 tokens, then 128
// more.
std::map<int, std::map<std::string, int>> what_layers_did(
    const Model& model, const std::map<std::string, std::string>& variables) {
  std::mt19937 random(5);
  const auto account = stats_of(variables, [&] {
    const auto session = model.session(true, 512);
    session->decode(random_tokens(random, 512, 0, 0));
    session->decode(random_tokens(random, 128, 0, 512));
  });
  std::map<int, std::map<std::string, int>> all;
  for (const auto& layer : account["layers"])
    all[layer["layer"].get<int>()] = layer["did"].get<std::map<std::string, int>>();
  return all;
}
using Did = std::map<std::string, int>;
const std::map<std::string, std::string> one_dense_layer{
    {"QUOKA_MODE", "recommended"}, {"QUOKA_BUDGET", "16"}, {"QUOKA_DENSE_LAYERS", "1"}};
const Did no_call{}, selected{{"selected", 2}},
    a_dense_layer{{"exact: a dense layer by the settings", 2}},
    a_window{{"exact: a sliding window", 2}},
    among_first{{"exact: one of the first layers, dense by the settings", 2}};

// The first layers of the settings are the first that could select: layer 0 of a hybrid is recurrent and never
// calls, in Gemma 2 it has a window.
TEST(LlamaCpp, TheFirstLayersAreThoseThatCouldSelect) {
  const Model hybrid(random_architecture("lfm2"));
  EXPECT_EQ(what_layers_did(hybrid, one_dense_layer),
            (std::map<int, Did>{{0, no_call}, {1, among_first}, {2, no_call}, {3, selected}}));
  Model gemma(random_architecture("gemma2"));
  for (const bool same_size : {true, false}) {
    SCOPED_TRACE(same_size);
    gemma.swa_full = same_size;
    auto all = what_layers_did(gemma, one_dense_layer);
    if (!same_size) {  // other caches had not been seen when the first layer's first call came
      EXPECT_EQ(all[0].size(), 1u);
      all[0] = a_window;
    }
    EXPECT_EQ(all,
              (std::map<int, Did>{{0, a_window}, {1, among_first}, {2, a_window}, {3, selected}}));
  }
  auto listed = one_dense_layer;
  listed["QUOKA_DENSE_LAYERS"] = "[3]";  // by the model's own numbers
  EXPECT_EQ(what_layers_did(hybrid, listed),
            (std::map<int, Did>{{0, no_call}, {1, selected}, {2, no_call}, {3, a_dense_layer}}));
  listed["QUOKA_DENSE_LAYERS"] = "2";
  EXPECT_EQ(what_layers_did(hybrid, listed),
            (std::map<int, Did>{{0, no_call}, {1, among_first}, {2, no_call}, {3, among_first}}));
}

// Layers without keys of their own attend to an earlier one's. They have numbers, budgets and lines of their own.
TEST(LlamaCpp, LayersThatShareKeysAreKnownByTheirOwnNumbers) {
  Model model(
      random_architecture("gemma4"));  // even layers have windows; 4 to 7 share the keys of 2 and 3
  const auto& one = one_dense_layer;
  std::map<int, Did> all{{1, among_first}, {3, selected}, {5, selected}, {7, selected}};
  for (const int window : {0, 2, 4, 6}) all[window] = a_window;
  EXPECT_EQ(what_layers_did(model, one), all);
  auto listed = one;
  listed["QUOKA_DENSE_LAYERS"] = "[3, 7]";
  all[1] = selected, all[3] = all[7] = a_dense_layer;
  EXPECT_EQ(what_layers_did(model, listed), all);
  listed["QUOKA_DENSE_LAYERS"] = "3";
  all[1] = all[3] = all[5] = among_first, all[7] = selected;
  EXPECT_EQ(what_layers_did(model, listed), all);

  const Folder folder;
  listed["QUOKA_DENSE_LAYERS"] = "0";
  listed["QUOKA_CONFIG"] = folder.written("budgets.json", R"({"layer_budgets": {"5": 640}})");
  all[1] = all[3] = all[7] = selected;
  all[5] = {{"exact: budget holds all, below min_past, or it takes less", 2}};
  EXPECT_EQ(what_layers_did(model, listed), all);
}

// A layer is that whose queries attend; an engine names them by it. Where it does not, the layer that wrote the keys.
TEST(Node, TheLayerIsThatOfTheQueries) {
  GraphOfOne graph({.layer = 19});
  const auto layer_of_queries = [&](const char* name) {
    ggml_set_name(graph.q_rows, name);
    for (ggml_tensor* x : {graph.out->src[0]->src[0], graph.out->src[0]})  // as views are named
      ggml_format_name(x, "%s (view)", x->src[0]->name);
    return Node(*graph.out).layer;
  };
  EXPECT_EQ(layer_of_queries("Qcur-21"), 21);
  EXPECT_EQ(layer_of_queries("Qcur_pos-230"), 230);
  EXPECT_TRUE(Node(*graph.out).shares_keys());
  EXPECT_EQ(Node(*graph.out).cache_layer, 19);
  for (const char* const other :
       {"", "q", "25", "node_25", "Qcur-", "Qcur-21b", "Qcur-99999999999",
        "Qcur-3"})  // the last: layer 3's weights in a loop, whose cache is its own
    EXPECT_EQ(layer_of_queries(other), 19) << other;
  EXPECT_FALSE(Node(*graph.out).shares_keys());
  // The name of a view is not asked where it has none: what it is a view of is.
  ggml_set_name(graph.q_rows, "Qcur-20");
  ggml_set_name(graph.out->src[0], ""), ggml_set_name(graph.out->src[0]->src[0], "");
  EXPECT_EQ(Node(*graph.out).layer, 20);
  ggml_set_name(graph.k_cache, "other"), ggml_set_name(graph.v_cache, "other");
  EXPECT_EQ(Node(*graph.out).layer, -1) << "over no cache";
}

// Every layer up to the last says what attention it has.
TEST(LlamaCpp, LayersSayWhatAttentionTheyHave) {
  const auto kinds = [](const char* architecture) {
    const Model model(random_architecture(architecture));
    std::mt19937 random(5);
    const auto account =
        stats_of({}, [&] { model.session(true, 512)->decode(random_tokens(random, 300, 0, 0)); });
    std::vector<std::string> all;
    for (const auto& layer : account["layers"]) all.push_back(layer["kind"]);
    return all;
  };
  using Kinds = std::vector<std::string>;
  const std::string window = "a sliding window", full = "full attention";
  EXPECT_EQ(kinds("qwen35"), (Kinds{"", full, "", full}));
  EXPECT_EQ(kinds("gemma4"), (Kinds{window, full, window, full, window + " over layer 2's keys",
                                    full + " over layer 3's keys", window + " over layer 2's keys",
                                    full + " over layer 3's keys"}));
  const std::string chooses = "keys that the model chooses";
  EXPECT_EQ(kinds("deepseek4"), (Kinds{window, window, chooses, chooses}));
  EXPECT_EQ(kinds("bloom"), (Kinds{"ALiBi", "ALiBi", "ALiBi", "ALiBi"}));
}

// Compressed and chosen keys are the model's own selection, and the account says so.
TEST(LlamaCpp, ModelsThatChooseKeysByThemselves) {
  const Model model(random_architecture("deepseek4"));
  const Did chooses{{"exact: the model chooses keys by itself", 2}};
  const auto all = what_layers_did(model, one_dense_layer);
  ASSERT_EQ(all.size(), 4u);
  EXPECT_EQ(all.at(2), chooses);
  EXPECT_EQ(all.at(3), chooses);
  for (const int raw : {0, 1})
    EXPECT_EQ(all.at(raw).count("selected"), 0u) << "these have a window";
}

// llama.cpp converts a float cache for each call: what arrives is not a cache, and yet a layer's.
TEST(LlamaCpp, LayersOfAFloatCacheAreKnown) {
  const Model model;
  std::mt19937 random(5);
  const auto layers = stats_of(
      {{"QUOKA_MODE", "paper"}, {"QUOKA_BUDGET", "16"}, {"QUOKA_DENSE_LAYERS", "[2]"}}, [&] {
        model.session(true, 512, true, GGML_TYPE_F32)->decode(random_tokens(random, 640, 0, 0));
      })["layers"];
  ASSERT_EQ(layers.size(), 4u);
  for (int layer = 0; layer < 4; ++layer) {
    EXPECT_EQ(layers[layer]["layer"], layer);
    EXPECT_EQ(layers[layer]["did"].contains("selected"), layer != 2);
  }
}

TEST(LlamaCpp, CacheInEightBits) {
  const Model model;
  const auto theirs = model.session(false, 128, true, GGML_TYPE_Q8_0),
             ours = model.session(true, 128, true, GGML_TYPE_Q8_0);
  std::mt19937 random(1);
  const auto batch = random_tokens(random, 500, 0, 0);
  theirs->decode(batch), ours->decode(batch);
  EXPECT_LT(difference(ours->logits(499), copy(theirs->logits(499))), 0.1);
}

// llama.cpp's `auto` asks with an empty cache whether flash attention lands where the layer is: it stays on, and what
// comes after the first prompt is computed here, single tokens, too.
TEST(LlamaCpp, SingleTokensOverACacheOfFourBits) {
  const Model model;
  for (const ggml_type type : {GGML_TYPE_Q8_0, GGML_TYPE_Q4_0, GGML_TYPE_Q5_1, GGML_TYPE_IQ4_NL}) {
    SCOPED_TRACE(ggml_type_name(type));
    const auto theirs = model.session(false, 128, true, type);
    std::mt19937 random(1);
    const auto all = stats_of({}, [&] {
      const auto ours = model.session(true, 128, true, type);
      llama_pos length = 0;
      for (const int count : {400, 1, 1, 2}) {
        const auto batch = random_tokens(random, count, 0, length);
        length += count;
        theirs->decode(batch), ours->decode(batch);
        EXPECT_LT(difference(ours->logits(count - 1), copy(theirs->logits(count - 1))), 0.5);
      }
    });
    ASSERT_EQ(all["layers"].size(), 4u);
    // The first of a prompt's four ubatches is over an empty cache, and the second has the same graph.
    for (const auto& layer : all["layers"]) EXPECT_EQ(layer["did"]["exact: the mode"], 2 + 3);
    EXPECT_GT(all["questions_declined"]["few queries over an empty cache"], 0);
    // In 4 layers: ubatches of 128 and 16 tokens, two tokens alone, two together.
    std::map<std::string, int> calls;
    for (const Index queries : {128, 16, 1, 1, 2})
      calls[name_of(arithmetic_used(quoka::Arithmetic::automatic, type, type, queries, 1))] += 4;
    EXPECT_EQ(all["arithmetic"], nlohmann::json(calls));
  }
}

// Random decode steps, chunks, removals, shifts and copies on two sequences, the same in both sessions.
// Single tokens are those that `theirs` would write.
Differences soak(Session& theirs, Session& ours) {
  const char* const given = std::getenv("QUOKA_SOAK_STEPS");
  const int steps = given != nullptr ? std::atoi(given) : 300;
  std::mt19937 random(7);
  llama_pos length[2] = {0, 0};
  llama_token next[2] = {1, 1};
  bool shared = false;
  Differences differences;
  for (int step = 0; step < steps; ++step) {
    SCOPED_TRACE(step);
    const auto s = static_cast<llama_seq_id>(random() % 2);
    const auto kind = random() % 10;
    if (kind == 0 && length[s] > 60 &&
        !shared) {  // a stretch in the middle, and what follows moves up
      const llama_pos begin = static_cast<llama_pos>(random() % 20),
                      count = 5 + static_cast<llama_pos>(random() % 30);
      for (Session* const one : {&theirs, &ours}) {
        llama_memory_seq_rm(one->memory(), s, begin, begin + count);
        llama_memory_seq_add(one->memory(), s, begin + count, -1, -count);
      }
      length[s] -= count;
    } else if (kind == 1 && length[s] > 1) {  // the end
      length[s] = 1 + static_cast<llama_pos>(random() % static_cast<unsigned>(length[s]));
      for (Session* const one : {&theirs, &ours})
        llama_memory_seq_rm(one->memory(), s, length[s], -1);
    } else if (kind == 2 || length[s] > 700) {  // the other sequence becomes this one's copy
      for (Session* const one : {&theirs, &ours}) {
        llama_memory_seq_rm(one->memory(), s, -1, -1);
        llama_memory_seq_cp(one->memory(), 1 - s, s, -1, length[1 - s]);
      }
      length[s] = length[1 - s];
      shared = true;  // a shift would move the other's positions, too
      if (length[s] > 700) {
        for (Session* const one : {&theirs, &ours}) llama_memory_clear(one->memory(), true);
        length[0] = length[1] = 0;
        shared = false;
      }
    }
    std::vector<TokenAt> batch;
    for (llama_seq_id i = 0; i < 2; ++i) {
      if (random() % 4 == 0) continue;
      const int count = random() % 5 == 0 ? 2 + static_cast<int>(random() % 150) : 1;
      for (const TokenAt& x : random_tokens(random, count, i, length[i])) batch.push_back(x);
      if (count == 1) batch.back().token = next[i];
      length[i] += count;
    }
    if (batch.empty()) continue;
    theirs.decode(batch), ours.decode(batch);
    differences.add(ours, theirs, batch);
    for (std::size_t i = 0; i < batch.size(); ++i)
      if (batch[i].logits) next[batch[i].sequence] = best(theirs.logits(static_cast<int>(i)));
  }
  return differences;
}

TEST(LlamaCpp, ExactModeThroughRemovalShiftAndCopy) {
  const Model model;
  const auto theirs = model.session(false), ours = model.session(true);
  Differences differences = soak(*theirs, *ours);
  EXPECT_GT(differences.count(), 300u);
  EXPECT_LT(differences.below(0.5), 0.03);
  EXPECT_LT(differences.below(0.99), 0.1);
  EXPECT_GT(differences.same_top(), differences.count() * 97 / 100);
}

// The backend's memory of a cache changes no bit: with a sketch the same keys are selected as without.
TEST(LlamaCpp, AKnownCacheThroughRemovalShiftAndCopy) {
  const Model model;
  restart_with({{"QUOKA_MODE", "paper"}, {"QUOKA_BUDGET", "64"}, {"QUOKA_SKETCH", "0"}});
  const auto without = model.session(true);
  restart_with({{"QUOKA_MODE", "paper"}, {"QUOKA_BUDGET", "64"}});
  const auto with = model.session(true);
  Differences differences = soak(*without, *with);
  restart_with({});
  EXPECT_GT(differences.count(), 300u);
  EXPECT_EQ(differences.below(1.0), 0.0);
}

// ggml unloads the library while contexts have threads asleep in it: they still wake, compute and end.
TEST(LlamaCpp, ContextsOutliveTheUnloadingOfTheirBackend) {
  const Model model;
  std::mt19937 random(3);
  const auto prompt = random_tokens(random, 900, 0, 0);
  llama_context_params p = context_params(1024, 512, 2);
  restart_with({});
  for (int round = 0; round < 5; ++round) {
    Session session(model.model.get(), p);
    session.decode(prompt);
    const auto before = copy(session.logits(899));
    ggml_backend_unload(ggml_backend_dev_backend_reg(ggml_backend_dev_by_name("QuoKA")));
    if (round % 2 == 0) load_quoka();
    session.cut(0);
    session.decode(prompt);
    EXPECT_EQ(copy(session.logits(899)), before);
    load_quoka();
  }
}

}  // namespace
