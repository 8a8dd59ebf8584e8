// Writes a GGUF model with its weights in another type, by llama.cpp.
//
//     requantize MODEL.gguf RESULT.gguf Q4_0|Q4_1|Q4_K|Q5_0|Q6_K|Q8_0|F16
//
// For tests and measurements that read many long prompts: llama.cpp's products with weights of Q4_0 are several times
// as fast as those with Q4_1.
#include <llama.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <utility>

namespace {

constexpr std::pair<const char*, llama_ftype> types[] = {
    {"Q4_0", LLAMA_FTYPE_MOSTLY_Q4_0},   {"Q4_1", LLAMA_FTYPE_MOSTLY_Q4_1},
    {"Q4_K", LLAMA_FTYPE_MOSTLY_Q4_K_S}, {"Q5_0", LLAMA_FTYPE_MOSTLY_Q5_0},
    {"Q6_K", LLAMA_FTYPE_MOSTLY_Q6_K},   {"Q8_0", LLAMA_FTYPE_MOSTLY_Q8_0},
    {"F16", LLAMA_FTYPE_MOSTLY_F16}};

}  // namespace

int main(int argc, char** argv) {
  llama_model_quantize_params params = llama_model_quantize_default_params();
  params.allow_requantize = true;
  const auto* const type = std::find_if(std::begin(types), std::end(types), [&](const auto& one) {
    return argc == 4 && std::strcmp(argv[3], one.first) == 0;
  });
  if (type == std::end(types))
    return std::fprintf(stderr,
                        "requantize MODEL.gguf RESULT.gguf Q4_0|Q4_1|Q4_K|Q5_0|Q6_K|Q8_0|F16\n"),
           2;
  params.ftype = type->second;
  llama_backend_init();
  llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
  if (llama_model_quantize(argv[1], argv[2], &params) == 0) return 0;
  std::remove(argv[2]);
  return std::fprintf(stderr, "requantize: llama.cpp cannot write %s from %s\n", argv[2], argv[1]),
         1;
}
