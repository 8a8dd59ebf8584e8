// A sort that is small in code, for lists that are short or sorted once per call.
//
// Shell's, with Ciura's gaps: one loop, where std::sort is some twenty functions for each type and
// each order. As fast up to some thousand elements.
#pragma once

#include <quoka/base/index.hpp>

#include <algorithm>
#include <iterator>
#include <utility>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// x[0, count) in the order of before(a, b), which must be total: equal elements may change places.
template <class T, class Before>
[[gnu::noinline]] void sort(T* x, Index count, Before&& before) {
  constexpr Index gaps[] = {701, 301, 132, 57, 23, 10, 4, 1};
  Index gap = gaps[0];
  while (gap < count / 5) gap = gap * 9 / 4;
  for (std::size_t smaller = 0; gap > 0;) {
    for (Index i = gap; i < count; ++i) {
      T moved = std::move(x[i]);
      Index at = i;
      for (; at >= gap && before(moved, x[at - gap]); at -= gap) x[at] = std::move(x[at - gap]);
      x[at] = std::move(moved);
    }
    if (gap > gaps[0])
      gap = std::max(gap * 4 / 9, gaps[0]);
    else
      gap = ++smaller < std::size(gaps) ? gaps[smaller] : 0;
  }
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
