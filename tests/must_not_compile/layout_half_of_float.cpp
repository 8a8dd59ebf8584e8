// expect: as_half.. and as_bfloat16.. take integers of 16 bits
// lines: 15
// Floats are not read as halves.
#include <quoka/rows/layouts.hpp>

#include <vector>

#ifdef QUOKA_VALID
using Element = std::uint16_t;
#else
using Element = float;
#endif

quoka::Index len_of(const std::vector<Element>& keys) {
  return quoka::token_major(quoka::as_half(keys), 7, 2, 16).len();
}
