// Do two views share memory? Exact for strided views: interleaved ones, such as q, k and v in one
// fused buffer, share their extent and no byte.
//
// Views whose extents lie apart cost a compare. Otherwise each row of the view with fewer rows is
// looked for in the other's lattice: a few divisions a row.
#pragma once

#include <quoka/views/rows.hpp>

#include <algorithm>
#include <utility>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// Rows of `width` bytes at base + i0 step0 + i1 step1 + i2 step2, steps descending and positive.
struct ByteLattice {
  std::uintptr_t base = 0;
  Index width = 0;
  std::array<Index, 3> sizes{}, steps{};

  ByteLattice(const void* data, Index row_bytes, const std::array<Index, 3>& axis_sizes,
              const std::array<Index, 3>& axis_steps)
      : base(reinterpret_cast<std::uintptr_t>(data)), width(row_bytes) {
    for (std::size_t axis = 0; axis < 3; ++axis) {
      sizes[axis] = axis_steps[axis] == 0 ? std::min<Index>(axis_sizes[axis], 1) : axis_sizes[axis];
      steps[axis] = axis_steps[axis] < 0 ? -axis_steps[axis] : axis_steps[axis];
      if (axis_steps[axis] < 0 && sizes[axis] > 0)
        base -= static_cast<std::uintptr_t>(steps[axis] * (sizes[axis] - 1));
    }
    const auto order = [&](std::size_t a, std::size_t b) {
      if (steps[a] < steps[b]) std::swap(steps[a], steps[b]), std::swap(sizes[a], sizes[b]);
    };
    order(0, 1), order(1, 2), order(0, 1);
  }
  explicit ByteLattice(const Rows& rows)
      : ByteLattice(rows.data(), rows.empty() ? 0 : rows.format().row_bytes(rows.dim()),
                    {rows.batch(), rows.heads(), rows.len()}, rows.strides()) {}
  explicit ByteLattice(const TensorView<const float, 3>& x)
      : ByteLattice(x.data(), 4, x.sizes(),
                    {x.strides()[0] * 4, x.strides()[1] * 4, x.strides()[2] * 4}) {}

  Index rows() const { return sizes[0] * sizes[1] * sizes[2]; }
  // Bytes from the first of axis `axis` to the end of the last, with all later axes.
  Index extent(std::size_t axis = 0) const {
    Index bytes = width;
    for (; axis < 3; ++axis) bytes += steps[axis] * (sizes[axis] - 1);
    return bytes;
  }
  // Does a row meet [begin, end), counted from the base?
  bool meets(Index begin, Index end, std::size_t axis = 0) const {
    if (axis == 3) return begin < width && end > 0;
    const Index step = steps[axis], inner = extent(axis + 1);
    if (step == 0) return meets(begin, end, axis + 1);
    const Index first = std::max<Index>(0, begin >= inner ? (begin - inner) / step : 0);
    const Index last = end <= 0 ? -1 : std::min(sizes[axis] - 1, (end - 1) / step);
    for (Index i = first; i <= last; ++i)
      if (meets(begin - i * step, end - i * step, axis + 1)) return true;
    return false;
  }
};

inline bool share_memory(ByteLattice a, ByteLattice b) {
  if (a.rows() == 0 || b.rows() == 0 || a.width == 0 || b.width == 0) return false;
  const auto end = [](const ByteLattice& x) {
    return x.base + static_cast<std::uintptr_t>(x.extent());
  };
  if (end(a) <= b.base || end(b) <= a.base) return false;
  if (a.rows() > b.rows()) std::swap(a, b);
  const auto from = static_cast<Index>(a.base - b.base);  // modulo 2^64: negative where a is first
  for (Index i = 0; i < a.sizes[0]; ++i)
    for (Index j = 0; j < a.sizes[1]; ++j)
      for (Index l = 0; l < a.sizes[2]; ++l) {
        const Index at = from + i * a.steps[0] + j * a.steps[1] + l * a.steps[2];
        if (b.meets(at, at + a.width)) return true;
      }
  return false;
}

// Do rows of one view share bytes with each other? Axes that interleave count as if they did.
template <class Sizes>
bool rows_share_memory(const ByteLattice& x, const Sizes& sizes,
                       const std::array<Index, 3>& strides) {
  if (x.rows() == 0) return false;
  for (std::size_t axis = 0; axis < 3; ++axis)
    if (sizes[axis] > 1 && strides[axis] == 0) return true;
  for (std::size_t axis = 0; axis < 3; ++axis)
    if (x.sizes[axis] > 1 && x.steps[axis] < x.extent(axis + 1)) return true;
  return false;
}

// Throws std::invalid_argument where they do.
template <class A, class B>
void require_apart(const A& a, const B& b, std::string_view message) {
  if (share_memory(ByteLattice(a), ByteLattice(b))) fail_because(message);
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
