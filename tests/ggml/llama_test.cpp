// llama.cpp itself, with and without the backend, on tiny random models: the same logits in exact
// mode, and the same whatever became of the cache before.

#include "ggml/llama_session.hpp"
#include "ggml/tiny_llama.hpp"

#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <memory>
#include <random>

namespace {

using namespace quoka_ggml;
using quoka_test::TinyLlama;

struct Model {
  explicit Model(const std::string& architecture) {
    const auto path = std::filesystem::path(::testing::TempDir()) /
                      ("quoka_tiny_" + architecture + "_" + std::to_string(::getpid()) + ".gguf");
    TinyLlama(architecture).write(path.string());
    llama_log_set(only_errors, nullptr);
    model = load_model(path.string());
    std::filesystem::remove(path);
  }
  // Contexts of the CPU backend come first: they never see this one.
  std::unique_ptr<Session> session(bool quoka, std::uint32_t ubatch = 128, bool unified = true,
                                   ggml_type type = GGML_TYPE_F16) const {
    llama_context_params p = llama_context_default_params();
    p.n_ctx = unified ? 2048 : 4096, p.n_batch = 2048, p.n_ubatch = ubatch, p.n_seq_max = 2;
    p.n_threads = p.n_threads_batch = 1, p.kv_unified = unified, p.type_k = p.type_v = type;
    p.flash_attn_type =
        quoka || type == GGML_TYPE_F16 ? LLAMA_FLASH_ATTN_TYPE_AUTO : LLAMA_FLASH_ATTN_TYPE_ENABLED;
    p.swa_full = true;
    ggml_backend_dev_t const device = ggml_backend_dev_by_name("QuoKA");
    if (quoka)
      load_quoka();
    else if (device != nullptr)
      ggml_backend_unload(ggml_backend_dev_backend_reg(device));
    return std::make_unique<Session>(model.get(), p);
  }

  llama_model_ptr model;
};

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
        add(difference(ours.logits(i), copy(theirs.logits(i))));
  }
  std::size_t count() const { return all_.size(); }
  // The difference that this part of them stays below.
  double below(double part) {
    std::sort(all_.begin(), all_.end());
    return all_[static_cast<std::size_t>(part * static_cast<double>(all_.size() - 1))];
  }

 private:
  std::vector<double> all_;
};

class Architectures : public ::testing::TestWithParam<const char*> {};

// Prompt, decode steps, two sequences: exact mode against llama.cpp's own flash attention.
TEST_P(Architectures, ExactModeGivesLlamaCppsLogits) {
  const Model model(GetParam());
  for (const bool unified : {true, false}) {
    for (const std::uint32_t ubatch : {128u, 512u}) {
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
}
INSTANTIATE_TEST_SUITE_P(All, Architectures,
                         ::testing::Values("llama", "qwen3moe", "gemma3", "gpt-oss"));

TEST(LlamaCpp, CacheInEightBits) {
  const Model model("llama");
  const auto theirs = model.session(false, 128, true, GGML_TYPE_Q8_0),
             ours = model.session(true, 128, true, GGML_TYPE_Q8_0);
  std::mt19937 random(1);
  const auto batch = random_tokens(random, 500, 0, 0);
  theirs->decode(batch), ours->decode(batch);
  EXPECT_LT(difference(ours->logits(499), copy(theirs->logits(499))), 0.1);
}

// Removal, shift and copy on two sequences, against the CPU backend with the same history.
TEST(LlamaCpp, ExactModeThroughRemovalShiftAndCopy) {
  const Model model("llama");
  const auto theirs = model.session(false), ours = model.session(true);
  std::mt19937 random(7);
  llama_pos length[2] = {0, 0};
  bool shared = false;
  Differences differences;
  for (int step = 0; step < 300; ++step) {
    SCOPED_TRACE(step);
    const auto s = static_cast<llama_seq_id>(random() % 2);
    const auto kind = random() % 10;
    if (kind == 0 && length[s] > 60 &&
        !shared) {  // a stretch in the middle, and what follows moves up
      const llama_pos begin = static_cast<llama_pos>(random() % 20),
                      count = 5 + static_cast<llama_pos>(random() % 30);
      for (Session* const one : {theirs.get(), ours.get()}) {
        llama_memory_seq_rm(one->memory(), s, begin, begin + count);
        llama_memory_seq_add(one->memory(), s, begin + count, -1, -count);
      }
      length[s] -= count;
    } else if (kind == 1 && length[s] > 1) {  // the end
      length[s] = 1 + static_cast<llama_pos>(random() % static_cast<unsigned>(length[s]));
      for (Session* const one : {theirs.get(), ours.get()})
        llama_memory_seq_rm(one->memory(), s, length[s], -1);
    } else if (kind == 2 || length[s] > 700) {  // the other sequence becomes this one's copy
      for (Session* const one : {theirs.get(), ours.get()}) {
        llama_memory_seq_rm(one->memory(), s, -1, -1);
        llama_memory_seq_cp(one->memory(), 1 - s, s, -1, length[1 - s]);
      }
      length[s] = length[1 - s];
      shared = true;  // a shift would move the other's positions, too
      if (length[s] > 700) {
        for (Session* const one : {theirs.get(), ours.get()})
          llama_memory_clear(one->memory(), true);
        length[0] = length[1] = 0;
        shared = false;
      }
    }
    std::vector<TokenAt> batch;
    for (llama_seq_id i = 0; i < 2; ++i) {
      if (random() % 4 == 0) continue;
      const int count = random() % 5 == 0 ? 1 + static_cast<int>(random() % 150) : 1;
      for (const TokenAt& x : random_tokens(random, count, i, length[i])) batch.push_back(x);
      length[i] += count;
    }
    if (batch.empty()) continue;
    theirs->decode(batch), ours->decode(batch);
    differences.add(*ours, *theirs, batch);
  }
  EXPECT_GT(differences.count(), 300u);
  EXPECT_LT(differences.below(0.5), 0.03);
  EXPECT_LT(differences.below(0.99), 0.1);
}

// With selection: a sequence that went through decode steps, copies, removals to the end of a chunk
// and another sequence's tokens between its own has the logits of a fresh context that was given
// the same chunks.
TEST(LlamaCpp, SelectionThroughHistoryAsInAFreshContext) {
  const Model model("llama");
  setenv("QUOKA_MODE", "quoka", 1), setenv("QUOKA_BUDGET", "64", 1);
  ggml_backend_dev_t const device = ggml_backend_dev_by_name("QuoKA");
  if (device != nullptr) ggml_backend_unload(ggml_backend_dev_backend_reg(device));
  const auto used = model.session(true);
  std::mt19937 random(11);
  std::vector<std::vector<TokenAt>> history[2];
  const auto length = [&](int s) {
    return history[s].empty() ? 0 : history[s].back().back().position + 1;
  };
  Differences differences, from_exact;
  for (int step = 0; step < 120; ++step) {
    SCOPED_TRACE(step);
    const int s = static_cast<int>(random() % 2);
    const auto kind = random() % 10;
    if (kind == 0 && history[s].size() > 3) {
      history[s].resize(history[s].size() - 1 - random() % 2);
      llama_memory_seq_rm(used->memory(), s, length(s), -1);
    } else if (kind == 1 || length(s) > 600) {
      llama_memory_seq_rm(used->memory(), s, -1, -1);
      history[s].clear();
      if (length(1 - s) > 0 && length(1 - s) < 400) {
        llama_memory_seq_cp(used->memory(), 1 - s, s, -1, -1);
        history[s] = history[1 - s];
        for (auto& chunk : history[s])
          for (TokenAt& x : chunk) x.sequence = s;
      }
    }
    std::vector<TokenAt> batch;
    for (int i = 0; i < 2; ++i) {
      if (random() % 3 == 0) continue;
      const int count = random() % 3 == 0 ? 2 + static_cast<int>(random() % 60) : 1;
      history[i].push_back(random_tokens(random, count, i, length(i)));
      batch.insert(batch.end(), history[i].back().begin(), history[i].back().end());
    }
    if (batch.empty()) continue;
    used->decode(batch);
    if (step % 6 != 5) continue;
    for (int i = 0; i < static_cast<int>(batch.size()); ++i) {
      const TokenAt& last = batch[static_cast<std::size_t>(i)];
      if (!last.logits || length(last.sequence) < 150) continue;
      const auto replayed = [&](const char* mode) {
        setenv("QUOKA_MODE", mode, 1);
        ggml_backend_unload(ggml_backend_dev_backend_reg(ggml_backend_dev_by_name("QuoKA")));
        const auto fresh = model.session(true);
        for (auto chunk : history[last.sequence]) {
          for (TokenAt& x : chunk) x.sequence = 0;
          fresh->decode(chunk);
        }
        return copy(fresh->logits(static_cast<int>(history[last.sequence].back().size()) - 1));
      };
      differences.add(difference(used->logits(i), replayed("quoka")));
      from_exact.add(difference(used->logits(i), replayed("exact")));
    }
  }
  unsetenv("QUOKA_MODE"), unsetenv("QUOKA_BUDGET");
  EXPECT_GT(differences.count(), 10u);
  EXPECT_LT(differences.below(0.5), 0.1);
  EXPECT_LT(differences.below(0.5), 0.2 * from_exact.below(0.5));
  std::printf(
      "difference from a fresh context: median %.3f, nine tenths %.3f; from exact: %.3f, %.3f\n",
      differences.below(0.5), differences.below(0.9), from_exact.below(0.5), from_exact.below(0.9));
}

}  // namespace
