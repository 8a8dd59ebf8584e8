// Do two views share memory? Shared bytes are always found, with a few comparisons for any number
// of rows.
//
// Views whose extents do not meet share nothing. If extents meet, rows are compared within one
// period of the largest stride, then of the next. So views that are interleaved in one buffer with
// common strides count as separate: q, k, v and out of a fused projection, or past and chunk of one
// cache. Rows that lie between another view's rows by other strides count as shared.
#pragma once

#include <quoka/base/sort.hpp>
#include <quoka/rows/mask.hpp>
#include <quoka/rows/rows.hpp>
#include <quoka/runtime/executor.hpp>

#include <algorithm>
#include <utility>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// The bytes of a view: `width` of them at base + i0 step0 + ... + i3 step3, steps descending. An
// axis of one row has step 0; a view without elements has width 0.
struct Footprint {
  struct Axis {
    Index size = 1, step = 0;
  };

  std::uintptr_t base = 0;
  Index width = 0;
  std::array<Axis, 4> axes{};

  Footprint() = default;
  [[gnu::noinline]] Footprint(const void* data, Index row_bytes, const std::array<Axis, 4>& given)
      : base(reinterpret_cast<std::uintptr_t>(data)), width(row_bytes) {
    for (std::size_t i = 0; i < axes.size(); ++i) {
      const auto [size, step] = given[i];
      if (size == 0) width = 0;
      if (size <= 1 || step == 0) continue;
      axes[i] = {size, step < 0 ? -step : step};
      if (step < 0) base += static_cast<std::uintptr_t>(step * (size - 1));
    }
    const auto order = [&](std::size_t a, std::size_t b) {
      if (axes[a].step < axes[b].step) std::swap(axes[a], axes[b]);
    };
    order(0, 1), order(2, 3), order(0, 2), order(1, 3), order(1, 2);
  }
  // The whole pool, where rows are in pages or of a list.
  [[gnu::noinline]] explicit Footprint(const Rows& rows) {
    if (rows.empty()) return;
    const RowShape shape = rows.shape(0);  // with a channel step, channels are an axis
    const auto sizes = rows.pool_sizes();
    const auto steps = rows.pool_strides();
    *this = Footprint(rows.data(),
                      rows.format().row_bytes(shape.channel_step != 0 ? RowShape{1} : shape),
                      {{{sizes[0], steps[0]},
                        {sizes[1], steps[1]},
                        {sizes[2], steps[2]},
                        {rows.dim(), shape.channel_step}}});
  }
  template <class T, int Rank>
  explicit Footprint(const TensorView<T, Rank>& x)
      : Footprint(x.data(), x.sizes(), x.strides(),
                  Index{sizeof(T)} * (Rank == 4 ? x.sizes().back() : 1), Index{sizeof(T)}) {}
  template <std::same_as<Mask> M>  // and nothing that converts to one
  explicit Footprint(const M& mask)
      : Footprint(mask.data(), mask.sizes(), mask.strides(), mask.row_bytes(), 1) {}

  bool empty() const { return width == 0; }
  // Bytes from the first to the end of the last, over axis `axis` and those behind it.
  Index extent(std::size_t axis = 0) const {
    Index bytes = width;
    for (; axis < axes.size(); ++axis) bytes += axes[axis].step * (axes[axis].size - 1);
    return bytes;
  }
  std::uintptr_t end() const { return base + static_cast<std::uintptr_t>(extent()); }
  // f(begin, end) for each stretch of bytes without a gap. Rows must not meet each other.
  void for_each_stretch(FunctionRef<void(std::uintptr_t begin, std::uintptr_t end)> f) const {
    if (!empty()) add_stretches(base, 0, f);
  }

 private:
  // Strides of the first three axes.
  template <class Sizes, class Strides>
  Footprint(const void* data, const Sizes& sizes, const Strides& strides, Index row_bytes,
            Index element)
      : Footprint(data, row_bytes,
                  {{{sizes[0], strides[0] * element},
                    {sizes[1], strides[1] * element},
                    {sizes[2], strides[2] * element}}}) {}
  void add_stretches(std::uintptr_t begin, std::size_t axis,
                     FunctionRef<void(std::uintptr_t, std::uintptr_t)> f) const {
    Index bytes = width;
    for (std::size_t i = axis; i < axes.size(); ++i) bytes *= axes[i].size;
    if (bytes == extent(axis)) return f(begin, begin + static_cast<std::uintptr_t>(bytes));
    for (Index i = 0; i < axes[axis].size; ++i)
      add_stretches(begin + static_cast<std::uintptr_t>(i * axes[axis].step), axis + 1, f);
  }
};

// Do rows of a over its axes from `a_axis` on meet those of b? `distance`: from a's first byte to
// b's.
[[gnu::noinline]] inline bool rows_meet(const Footprint& a, std::size_t a_axis, const Footprint& b,
                                        std::size_t b_axis, Index distance) {
  if (distance >= a.extent(a_axis) || -distance >= b.extent(b_axis)) return false;
  const auto axis = [](const Footprint& x, std::size_t at) {
    return at < x.axes.size() ? x.axes[at] : Footprint::Axis{};
  };
  const Footprint::Axis a_rows = axis(a, a_axis), b_rows = axis(b, b_axis);
  const Index period = std::max(a_rows.step, b_rows.step);
  if (period == 0) return true;  // two stretches
  const bool a_has = a_rows.step == period, b_has = b_rows.step == period;
  const std::size_t a_next = a_axis + (a_has ? 1 : 0), b_next = b_axis + (b_has ? 1 : 0);
  if (std::max(a.extent(a_next), b.extent(b_next)) > period) return true;  // by other strides
  // Row i of a and row j of b are near each other for two values of i - j alone.
  const Index below = distance / period - (distance % period < 0 ? 1 : 0);
  for (const Index apart : {below, below + 1})
    if (apart < (a_has ? a_rows.size : 1) && -apart < (b_has ? b_rows.size : 1) &&
        rows_meet(a, a_next, b, b_next, distance - apart * period))
      return true;
  return false;
}
inline bool share_memory(const Footprint& a, const Footprint& b) {
  return !a.empty() && !b.empty() && rows_meet(a, 0, b, 0, static_cast<Index>(b.base - a.base));
}

// Do rows of one output share bytes with each other? Axes that interleave count as if they did.
template <class View>
bool rows_share_memory(const View& output) {
  const Footprint x(output);
  if (x.empty()) return false;
  for (std::size_t axis = 0; axis < 3; ++axis)
    if (output.sizes()[axis] > 1 && output.strides()[axis] == 0) return true;
  for (std::size_t axis = 0; axis < x.axes.size(); ++axis)
    if (x.axes[axis].size > 1 && x.axes[axis].step < x.extent(axis + 1)) return true;
  return false;
}

// Throws std::invalid_argument where they do.
template <class View>
void require_rows_apart(const View& output, const char* name) {
  if (rows_share_memory(output))
    fail_because(std::string("rows of ") + name + " share memory with each other");
}

// Throws std::invalid_argument where two views share memory.
template <class A, class B>
[[gnu::noinline]] void require_no_overlap(const A& a, const B& b, std::string_view message) {
  if (share_memory(Footprint(a), Footprint(b))) fail_because(message);
}

// One past the last of the rows that lie evenly from row i on.
inline Index run_end(const Rows& x, Index i) {
  if (!x.mapped()) return x.len();
  if (x.map().cells != nullptr) return i + 1;
  const Index page_size = x.map().page_size;
  return std::min(x.len(), i + page_size - x.pool_row(i) % page_size);
}

// The same for rows of one sequence in pages, or of a list. Rows of one pool are separate if they
// share no row of it. Cost: for each 512 rows of b a search per page of a, or per cell of a list.
// For two descriptions of one pool it is a comparison of each page of a with each page of b.
// Allocates nothing.
inline bool share_no_rows(const Rows& a, const Rows& b) {
  if (!share_memory(Footprint(a), Footprint(b))) return true;
  if (!a.mapped() || !b.mapped() || a.data() != b.data() || a.pool_strides() != b.pool_strides() ||
      a.pool_sizes() != b.pool_sizes()) {
    const auto run = [](const Rows& x, Index begin, Index end) {
      if (!x.mapped()) return Footprint(x);
      return Footprint(x.row(0, 0, begin), x.format().row_bytes(x.shape(0)),
                       {{{x.pool_sizes()[1], x.strides()[1]}, {end - begin, x.strides()[2]}}});
    };
    for (Index i = 0, next = 0; i < a.len(); i = next) {
      const Footprint of_a = run(a, i, next = run_end(a, i));
      for (Index j = 0, after = 0; j < b.len(); j = after)
        if (share_memory(of_a, run(b, j, after = run_end(b, j)))) return false;
    }
    return true;
  }
  constexpr Index together = 512;
  Index pool_rows[together];
  for (Index j = 0; j < b.len(); j += together) {
    const Index count = std::min(together, b.len() - j);
    for (Index i = 0; i < count; ++i) pool_rows[i] = b.pool_row(j + i);
    sort(pool_rows, count, [](Index x, Index y) { return x < y; });
    for (Index i = 0, next = 0; i < a.len(); i = next) {
      const Index row = a.pool_row(i);
      next = run_end(a, i);
      const Index* const found = std::lower_bound(pool_rows, pool_rows + count, row);
      if (found != pool_rows + count && *found < row + next - i) return false;
    }
  }
  return true;
}
inline void require_no_shared_rows(const Rows& a, const Rows& b, std::string_view message) {
  if (!share_no_rows(a, b)) fail_because(message);
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
