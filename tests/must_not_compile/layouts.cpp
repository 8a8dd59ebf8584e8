// Buffers that are no rows: what they hold, how long they are or how long they live is not known.
// expect DOUBLE: elements must be float, Eigen::half or Eigen::bfloat16. bytes of another format are named by as_format
// expect BYTES: elements must be float, Eigen::half or Eigen::bfloat16. bytes of another format are named by as_format
// expect SHORTS: elements of 16 bits may be half or bfloat16: say which by as_half.buffer. or as_bfloat16.buffer.
// expect HALF_OF_FLOAT: as_half.. and as_bfloat16.. take integers of 16 bits
// expect POINTER: a buffer must know its extent: std::span.pointer, count.
// expect TEMPORARY: a buffer that is a temporary would be gone before its view is used
// lines: 15
#include <quoka/rows/layouts.hpp>

#include <span>
#include <vector>

template <class Element>
std::vector<Element>& made();
std::vector<float> make();

inline auto rows() {
#if defined(DOUBLE)
  return quoka::token_major(made<double>(), 7, 2, 16);
#elif defined(BYTES)  // codes mean nothing without their scales
  return quoka::token_major(made<std::int8_t>(), 7, 2, 16);
#elif defined(SHORTS)
  return quoka::token_major(made<std::uint16_t>(), 7, 2, 16);
#elif defined(HALF_OF_FLOAT)
  return quoka::token_major(quoka::as_half(made<float>()), 7, 2, 16);
#elif defined(POINTER)
  return quoka::token_major(made<float>().data(), 7, 2, 16);
#elif defined(TEMPORARY)
  return quoka::token_major(make(), 7, 2, 16);
#else
  return quoka::token_major(made<float>(), 7, 2, 16);
#endif
}
