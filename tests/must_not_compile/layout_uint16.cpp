// expect: elements of 16 bits may be half or bfloat16: say which by as_half.buffer. or as_bfloat16.buffer.
// lines: 15
// 16 bits alone do not say what they are.
#include <quoka/rows/layouts.hpp>

#include <vector>

#ifdef QUOKA_VALID
using Element = float;
#else
using Element = std::uint16_t;
#endif

quoka::Index len_of(const std::vector<Element>& keys) {
  return quoka::token_major(keys, 7, 2, 16).len();
}
