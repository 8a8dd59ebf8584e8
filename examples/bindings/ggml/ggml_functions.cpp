// The functions of ggml's base library that this backend calls: those of the ggml that loads it.
//
// They are looked up by name, not linked: each engine has a name of its own for that library (libggml-base.so,
// libggml-base.so.0), some hold it in another one, and Node loads it out of sight of other libraries. So one file
// serves them all, and where a program holds two ggmls the right one answers.
#include "ggml_functions.hpp"

#include <ggml-backend.h>
#include <ggml.h>

#include <dlfcn.h>

// result, name, parameters, arguments
#define QUOKA_GGML_FUNCTIONS(X)                                                      \
  X(bool, ggml_backend_buffer_is_host, (ggml_backend_buffer_t of), (of))             \
  X(bool, ggml_backend_buft_is_host, (ggml_backend_buffer_type_t of), (of))          \
  X(ggml_backend_buffer_type_t, ggml_backend_cpu_buffer_type, (void), ())            \
  X(const char*, ggml_backend_dev_description, (ggml_backend_dev_t of), (of))        \
  X(const char*, ggml_backend_dev_name, (ggml_backend_dev_t of), (of))               \
  X(const struct ggml_type_traits*, ggml_get_type_traits, (enum ggml_type of), (of)) \
  X(int, ggml_graph_n_nodes, (struct ggml_cgraph * of), (of))                        \
  X(struct ggml_tensor*, ggml_graph_node, (struct ggml_cgraph * of, int i), (of, i)) \
  X(bool, ggml_is_empty, (const struct ggml_tensor* of), (of))                       \
  X(bool, ggml_is_quantized, (enum ggml_type of), (of))                              \
  X(int64_t, ggml_nelements, (const struct ggml_tensor* of), (of))                   \
  X(size_t, ggml_row_size, (enum ggml_type of, int64_t elements), (of, elements))    \
  X(size_t, ggml_type_size, (enum ggml_type of), (of))

namespace {
namespace found {
#define X(result, name, parameters, arguments) result(*name) parameters = nullptr;
QUOKA_GGML_FUNCTIONS(X)
#undef X
}  // namespace found
}  // namespace

#define X(result, name, parameters, arguments) \
  result name parameters { return found::name arguments; }
extern "C" {
QUOKA_GGML_FUNCTIONS(X)
}
#undef X

namespace quoka_ggml {

const char* find_ggml_functions(const void* caller) {
  Dl_info library{};
  void* from = nullptr;  // with all that it links
  if (dladdr(caller, &library) != 0) from = dlopen(library.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  if (from == nullptr) from = dlopen(nullptr, RTLD_LAZY);  // the program itself
#define X(result, name, parameters, arguments)                              \
  found::name = reinterpret_cast<result(*) parameters>(dlsym(from, #name)); \
  if (found::name == nullptr) return #name;
  QUOKA_GGML_FUNCTIONS(X)
#undef X
  return nullptr;  // `from` stays open: a library that is in use is not unloaded
}

}  // namespace quoka_ggml
