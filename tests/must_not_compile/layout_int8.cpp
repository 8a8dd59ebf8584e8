// expect: elements must be float, Eigen::half or Eigen::bfloat16; bytes of another format are named by as_format
// lines: 15
// Codes mean nothing without their scales: the format says where these are.
#include <quoka/rows/layouts.hpp>

#include <vector>

quoka::Index len_of(const std::vector<std::int8_t>& keys, const quoka::Format& format) {
#ifdef QUOKA_VALID
  return quoka::token_major(quoka::as_format(keys, format), 7, 2, 16).len();
#else
  return quoka::token_major(keys, 7, 2, 16).len() + format.rounding;
#endif
}
