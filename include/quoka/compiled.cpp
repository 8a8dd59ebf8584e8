// The library as one unit to link. Compile this file once, with QUOKA_COMPILED defined for it and
// for all files that include the headers. CMake: link quoka::compiled.
//
// The library has the instructions of the flags that it is compiled with; those who link it may
// have others. Its names differ from those of header-only use. A program that has both holds two
// libraries, and passing an object of one to the other does not link.
#if !defined(QUOKA_COMPILED)
#error "compile this file, and all that include quoka's headers, with -DQUOKA_COMPILED"
#endif

// With QUOKA_KERNELS_APART it has no kernels: compiled_kernels.cpp has them, once, or once for each
// ISA level (CMake: QUOKA_ISA_LEVELS).
#define QUOKA_COMPILING
#if !defined(QUOKA_KERNELS_APART)
#include <quoka/compiled_kernels.cpp>
#endif

#include <quoka/attention/attention.hpp>
#include <quoka/attention/merge.hpp>
#include <quoka/layer/chunked_prefill.hpp>
#include <quoka/layer/kv_cache.hpp>
#include <quoka/methods/indexer.hpp>
#include <quoka/methods/loki.hpp>
#include <quoka/rows/mask.hpp>
#include <quoka/runtime/isa.hpp>
#include <quoka/runtime/thread_pool.hpp>
#include <quoka/select/key_sketch.hpp>
#include <quoka/select/mass_selector.hpp>
#include <quoka/select/query_rows.hpp>
#include <quoka/select/softmax_scores.hpp>
#include <quoka/select/quoka.hpp>
#include <quoka/select/queries.hpp>
#include <quoka/select/key_scores.hpp>
#include <quoka/select/top_k.hpp>

namespace quoka {
inline namespace QUOKA_ABI {

template void QuokaSelector::select(const SelectorInput&, State&, Selection&, ExecutorRef) const;
template void QuokaSelector::appended(const SelectorInput&, State&, ExecutorRef) const;
template void MassSelector::select(const SelectorInput&, State&, Selection&, ExecutorRef) const;
template void MassSelector::appended(const SelectorInput&, State&, ExecutorRef) const;

}  // namespace QUOKA_ABI
}  // namespace quoka
