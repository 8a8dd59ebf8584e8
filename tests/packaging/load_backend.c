// Loads a ggml backend as ggml does, and prints its score. release.sh runs it on the backends that it has built.
#include <dlfcn.h>
#include <stdio.h>

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  void* const library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
  if (library == NULL) {
    fprintf(stderr, "%s\n", dlerror());
    return 1;
  }
  int (*const score)(void) = (int (*)(void))dlsym(library, "ggml_backend_score");
  void* (*const init)(void) = (void* (*)(void))dlsym(library, "ggml_backend_init");
  if (score == NULL || init == NULL || score() == 0 || init() == NULL) {
    fprintf(stderr, "%s: no score, or nothing to begin with\n", argv[1]);
    return 1;
  }
  printf("%d\n", score());
  return 0;
}
