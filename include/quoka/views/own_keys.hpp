// What says that each query has keys of its own brings the code that attends to them: IndexLists and
// Mask::as_lists() make the one function known by which attention makes itself ready for it.
//
// With headers alone a program without lists does not compile attention to lists, a tenth of the first example's code.
// With the compiled library it is there.
#pragma once

#include <quoka/base/version.hpp>

#include <memory>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

class ListedWork;  // attention/listed_work.hpp

// A template, so that it is compiled where it is named and nowhere else: attention/listed_attention.hpp.
template <class = void>
std::unique_ptr<ListedWork> make_listed_work();

using MakeListedWork = std::unique_ptr<ListedWork> (*)();
#if defined(QUOKA_COMPILED)
template <class>
inline constexpr MakeListedWork known_listed_work = nullptr;
#else
template <class T>
inline constexpr MakeListedWork known_listed_work = make_listed_work<T>;
#endif

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
