// expect: elements must be float, Eigen::half or Eigen::bfloat16; bytes of another format are named by as_format
// lines: 15
// Nothing converts a buffer of double in silence.
#include <quoka/rows/layouts.hpp>

#include <vector>

#ifdef QUOKA_VALID
using Element = float;
#else
using Element = double;
#endif

quoka::Index len_of(const std::vector<Element>& keys) {
  return quoka::head_major(keys, 7, 2, 16).len();
}
