// As much of llama.cpp as tests and programs here need: a model, a context, tokens in, logits out.
#pragma once

#include <ggml-backend.h>
#include <llama-cpp.h>

#include <algorithm>
#include <cstdlib>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace quoka_ggml {

struct TokenAt {
  llama_token token;
  llama_pos position;
  llama_seq_id sequence = 0;
  bool logits = false;
};

// Where the build found and made them; a program that is installed elsewhere sets both.
struct BackendFiles {
  std::string cpu_folder = GGML_LIBRARIES, quoka = QUOKA_GGML_BACKEND;
};
inline BackendFiles backend_files;

// Contexts made before load_quoka() always compute by the CPU backend alone.
inline void load_cpu() {
  unsetenv("GGML_BACKEND_PATH");
  if (ggml_backend_dev_count() == 0)
    ggml_backend_load_all_from_path(backend_files.cpu_folder.c_str());
}
inline void load_quoka() {
  if (ggml_backend_dev_by_name("QuoKA") == nullptr &&
      ggml_backend_load(backend_files.quoka.c_str()) == nullptr)
    throw std::runtime_error("cannot load " + backend_files.quoka);
}
// Settings are read again, for later contexts.
inline void restart_quoka() {
  if (ggml_backend_dev_t const device = ggml_backend_dev_by_name("QuoKA"))
    ggml_backend_unload(ggml_backend_dev_backend_reg(device));
  load_quoka();
}
inline void only_errors(ggml_log_level level, const char* text, void*) {
  if (level == GGML_LOG_LEVEL_ERROR) std::fputs(text, stderr);
}

inline llama_model_ptr load_model(const std::string& path) {
  load_cpu();
  llama_model_ptr model(llama_model_load_from_file(path.c_str(), llama_model_default_params()));
  if (!model) throw std::runtime_error("llama.cpp cannot load " + path);
  return model;
}

inline ggml_type cache_type(const std::string& name) {
  return name == "q8_0" ? GGML_TYPE_Q8_0 : GGML_TYPE_F16;
}
// For `tokens` of one sequence, in ubatches. cache: what keys and values are stored as, f16 or
// q8_0.
inline llama_context_params context_params(std::int64_t tokens, std::int64_t ubatch, int threads,
                                           const std::string& cache = "f16") {
  llama_context_params p = llama_context_default_params();
  p.n_ctx = p.n_batch = static_cast<std::uint32_t>(tokens + 255) / 256 * 256;
  p.n_ubatch = static_cast<std::uint32_t>(ubatch);
  p.n_threads = p.n_threads_batch = threads;
  p.type_k = p.type_v = cache_type(cache);
  p.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
  return p;
}

class Session {
 public:
  Session(llama_model* model, const llama_context_params& parameters)
      : context_(llama_init_from_model(model, parameters)),
        n_vocab_(llama_vocab_n_tokens(llama_model_get_vocab(model))) {
    if (!context_) throw std::runtime_error("llama.cpp makes no context");
  }
  llama_memory_t memory() { return llama_get_memory(context_.get()); }

  void decode(std::span<const TokenAt> tokens) {
    llama_batch batch = llama_batch_init(static_cast<int>(tokens.size()), 0, 1);
    for (const TokenAt& x : tokens) {
      const int i = batch.n_tokens++;
      batch.token[i] = x.token, batch.pos[i] = x.position;
      batch.n_seq_id[i] = 1, batch.seq_id[i][0] = x.sequence;
      batch.logits[i] = x.logits ? 1 : 0;
    }
    const int failed = llama_decode(context_.get(), batch);
    llama_batch_free(batch);
    if (failed != 0) throw std::runtime_error("llama_decode: " + std::to_string(failed));
  }
  // Sequence 0 keeps its first `tokens`. Throws where the model's memory cannot forget.
  void cut(std::int64_t tokens) {
    if (!llama_memory_seq_rm(memory(), 0, static_cast<llama_pos>(tokens), -1))
      throw std::runtime_error("the model's memory cannot forget what follows " +
                               std::to_string(tokens) + " tokens");
  }
  // The logits of the last decode's token i, which asked for them.
  std::span<const float> logits(int i) {
    return {llama_get_logits_ith(context_.get(), i), static_cast<std::size_t>(n_vocab_)};
  }

  // A sequence's tokens, keys and values; and into an empty sequence.
  std::vector<std::uint8_t> state(llama_seq_id sequence) {
    std::vector<std::uint8_t> bytes(llama_state_seq_get_size(context_.get(), sequence));
    bytes.resize(llama_state_seq_get_data(context_.get(), bytes.data(), bytes.size(), sequence));
    return bytes;
  }
  void load(const std::vector<std::uint8_t>& state, llama_seq_id sequence) {
    if (llama_state_seq_set_data(context_.get(), state.data(), state.size(), sequence) == 0)
      throw std::runtime_error("llama.cpp takes no state");
  }

 private:
  llama_context_ptr context_;
  int n_vocab_;
};

inline llama_token best(std::span<const float> logits) {
  return static_cast<llama_token>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

}  // namespace quoka_ggml
