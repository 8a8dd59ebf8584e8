// A unit that makes lists compiles attention to them: without its header the linker would miss it.
// expect ALONE: (incomplete type|ListWork)
// expect OPTIONS: (incomplete type|ListWork)
// alone
#if defined(ALONE)
#include <quoka/rows/index_lists.hpp>
#elif defined(OPTIONS)
#include <quoka/attention/attention_options.hpp>
#else
#include <quoka/attention/attention.hpp>
#endif

quoka::IndexLists lists(const quoka::IndexLists::Entries& entries) {
  return quoka::IndexLists(entries, 64);
}
