// expect: deleted
// Rows refer to their format.
#include <quoka/rows/rows.hpp>

#ifdef QUOKA_VALID
const quoka::Format& format();
#else
quoka::Format format();
#endif

quoka::Rows rows(const std::byte* data) {
  return {data, format(), {1, 8, 100, 128}, {0, 51200, 512}};
}
