// expect: (incomplete type|ListWork)
// alone
// A unit that makes lists compiles attention to them: without its header the linker would miss it.
#ifdef QUOKA_VALID
#include <quoka/attention/attention.hpp>
#else
#include <quoka/rows/index_lists.hpp>
#endif

quoka::IndexLists lists(const quoka::IndexLists::Entries& entries) {
  return quoka::IndexLists(entries, 64);
}
