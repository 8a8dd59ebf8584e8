// expect: a buffer must know its extent: std::span.pointer, count.
// lines: 15
// Without an extent nothing can be checked.
#include <quoka/rows/layouts.hpp>

#include <span>

quoka::Index len_of(const float* keys) {
#ifdef QUOKA_VALID
  return quoka::token_major(std::span(keys, 7 * 2 * 16), 7, 2, 16).len();
#else
  return quoka::token_major(keys, 7, 2, 16).len();
#endif
}
