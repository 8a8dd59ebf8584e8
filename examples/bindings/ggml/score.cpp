// Asked before anything else in this library runs. Compiled for any processor, unlike the rest.
#include <quoka/runtime/isa.hpp>

extern "C" __attribute__((visibility("default"))) int ggml_backend_score() {
  return quoka::isa_score();
}
