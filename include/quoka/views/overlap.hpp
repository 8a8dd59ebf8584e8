// Do two views share memory? Exact for strided views: interleaved ones, such as q, k and v in one
// fused buffer, share their extent and no byte.
//
// Views whose extents lie apart cost a compare. Otherwise each row of the view with fewer rows is
// looked for in the other's lattice: a few divisions a row. Many views are compared by their stretches of
// bytes, in the order of memory.
#pragma once

#include <quoka/base/function_ref.hpp>
#include <quoka/base/sort.hpp>
#include <quoka/views/index_lists.hpp>
#include <quoka/views/mask.hpp>
#include <quoka/views/rows.hpp>

#include <algorithm>
#include <cstdlib>
#include <utility>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// Rows of `width` bytes at base + i0 step0 + i1 step1 + i2 step2, steps descending and positive.
struct ByteLattice {
  static constexpr Index bytes_of_position = sizeof(Position);

  std::uintptr_t base = 0;
  Index width = 0;
  std::array<Index, 3> sizes{}, steps{};

  [[gnu::noinline]] ByteLattice(const void* data, Index row_bytes,
                                const std::array<Index, 3>& axis_sizes,
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
  [[gnu::noinline]] explicit ByteLattice(const Rows& rows)
      : ByteLattice(rows.data(), rows.empty() ? 0 : rows.format().row_bytes(rows.shape(0)),
                    {rows.pool_sizes()[0], rows.heads(), rows.pool_sizes()[2]},
                    rows.pool_strides()) {}
  explicit ByteLattice(const TensorView<const float, 3>& x)
      : ByteLattice(x.data(), 4, x.sizes(),
                    {x.strides()[0] * 4, x.strides()[1] * 4, x.strides()[2] * 4}) {}
  template <std::same_as<Mask> M>  // and nothing that converts to one
  explicit ByteLattice(const M& mask)
      : ByteLattice(mask.data(), mask.row_bytes(),
                    {mask.sizes()[0], mask.sizes()[1], mask.sizes()[2]}, mask.strides()) {}
  // The lists' entries.
  template <std::same_as<IndexLists> L>
  explicit ByteLattice(const L& lists)
      : ByteLattice(lists.entries().data(), lists.most() * bytes_of_position,
                    {lists.batch(), lists.heads(), lists.q_len()},
                    {lists.entries().strides()[0] * bytes_of_position,
                     lists.entries().strides()[1] * bytes_of_position,
                     lists.entries().strides()[2] * bytes_of_position}) {}

  Index rows() const { return sizes[0] * sizes[1] * sizes[2]; }
  // Bytes from the first of axis `axis` to the end of the last, with all later axes.
  Index extent(std::size_t axis = 0) const {
    Index bytes = width;
    for (; axis < 3; ++axis) bytes += steps[axis] * (sizes[axis] - 1);
    return bytes;
  }
  std::uintptr_t end() const { return base + static_cast<std::uintptr_t>(extent()); }
  // Rows that follow each other without a gap are one stretch; the first `axes` axes lead from one to the next.
  struct Stretch {
    std::size_t axes = 3;
    Index bytes = 0;
  };
  Stretch stretch() const {
    Stretch all{.bytes = width};
    while (all.axes > 0 && (sizes[all.axes - 1] == 1 || steps[all.axes - 1] <= all.bytes))
      --all.axes, all.bytes += steps[all.axes] * (sizes[all.axes] - 1);
    return all;
  }
  Index stretches() const {
    const Stretch all = stretch();
    Index count = rows() > 0 && width > 0 ? 1 : 0;
    for (std::size_t axis = 0; axis < all.axes; ++axis) count *= sizes[axis];
    return count;
  }
  // f(begin, end) for each of them. Where axes interleave they may meet, and have no order.
  [[gnu::noinline]] void for_each_stretch(
      FunctionRef<void(std::uintptr_t begin, std::uintptr_t end)> f) const {
    if (stretches() == 0) return;
    const Stretch all = stretch();
    const auto size = [&](std::size_t axis) { return axis < all.axes ? sizes[axis] : 1; };
    for (Index i = 0; i < size(0); ++i)
      for (Index j = 0; j < size(1); ++j)
        for (Index l = 0; l < size(2); ++l) {
          const Index at = i * steps[0] + j * steps[1] + l * steps[2];
          const std::uintptr_t begin = base + static_cast<std::uintptr_t>(at);
          f(begin, begin + static_cast<std::uintptr_t>(all.bytes));
        }
  }
  // Does a row meet [begin, end), counted from the base?
  [[gnu::noinline]] bool meets(Index begin, Index end, std::size_t axis = 0) const {
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

[[gnu::noinline]] inline bool share_memory(const ByteLattice& x, const ByteLattice& y) {
  if (x.rows() == 0 || y.rows() == 0 || x.width == 0 || y.width == 0) return false;
  if (x.end() <= y.base || y.end() <= x.base) return false;
  const ByteLattice &a = x.rows() <= y.rows() ? x : y, &b = x.rows() <= y.rows() ? y : x;
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
[[gnu::noinline]] void require_no_overlap(const A& a, const B& b, std::string_view message) {
  if (share_memory(ByteLattice(a), ByteLattice(b))) fail_because(message);
}

// Some stretches of bytes, in the order of memory.
class Stretches {
 public:
  static constexpr Index most = 512;

  bool full() const { return count_ == most; }
  void add(std::uintptr_t begin, std::uintptr_t end) { list_[count_++] = {begin, end}; }
  void clear() { count_ = 0; }
  // Before meets(): those that meet become one.
  void unite() {
    sort(list_, count_, [](const Bytes& a, const Bytes& b) { return a.begin < b.begin; });
    Index last = 0;
    for (Index i = 1; i < count_; ++i)
      if (list_[i].begin <= list_[last].end)
        list_[last].end = std::max(list_[last].end, list_[i].end);
      else
        list_[++last] = list_[i];
    if (count_ > 0) count_ = last + 1;
  }
  bool meets(std::uintptr_t begin, std::uintptr_t end) const {
    const Bytes* const found = std::partition_point(
        list_, list_ + count_, [&](const Bytes& bytes) { return bytes.end <= begin; });
    return found != list_ + count_ && found->begin < end;
  }

 private:
  struct Bytes {
    std::uintptr_t begin, end;
  };
  Bytes list_[most];
  Index count_ = 0;
};

// One past the last of the rows that lie evenly from row i on.
inline Index run_end(const Rows& x, Index i) {
  if (!x.mapped()) return x.len();
  if (x.map().cells != nullptr) return i + 1;
  const Index page_len = x.map().page_len;
  return std::min(x.len(), i + page_len - x.pool_row(i) % page_len);
}

// Rows of one block [dim, token]: channels apart, tokens side by side. Are their first channels apart?
inline bool share_no_channels(const Rows& a, const Rows& b) {
  const Index step = a.shape(0).channel_step, distance = b.data() - a.data();
  if (step == 0 || b.shape(0).channel_step != step || a.strides() != b.strides() ||
      std::abs(distance) >= step)
    return false;
  const auto first_channels = [](const Rows& x) {
    return ByteLattice(x.data(), x.format().row_bytes({1}), {x.batch(), x.heads(), x.len()},
                       x.strides());
  };
  return !share_memory(first_channels(a), first_channels(b));
}

// The same for rows of one sequence that may be in pages, or of a list: of one pool, they are apart
// if they share no row of it. Costs a search per page of a, or per cell of a list, for each 512 rows of b;
// for two views of the same memory one per stretch of bytes of a, for each 512 of b. Allocates nothing.
inline bool share_no_rows(const Rows& a, const Rows& b) {
  if (!share_memory(ByteLattice(a), ByteLattice(b))) return true;
  if (!a.mapped() && !b.mapped()) return share_no_channels(a, b);
  const auto run = [](const Rows& x, Index begin, Index end) {
    return ByteLattice(x.row(0, 0, begin), x.format().row_bytes(x.shape(0)),
                       {1, x.heads(), end - begin}, {0, x.strides()[1], x.strides()[2]});
  };
  if (!a.mapped() || !b.mapped() || a.data() != b.data() || a.pool_strides() != b.pool_strides() ||
      a.pool_sizes() != b.pool_sizes()) {
    Stretches stretches;
    bool met = false;
    const auto look_for_them = [&] {
      stretches.unite();
      for (Index i = 0, next = 0; i < a.len() && !met; i = next)
        run(a, i, next = run_end(a, i))
            .for_each_stretch([&](std::uintptr_t begin, std::uintptr_t end) {
              met = met || stretches.meets(begin, end);
            });
      stretches.clear();
    };
    for (Index j = 0, next = 0; j < b.len() && !met; j = next)
      run(b, j, next = run_end(b, j))
          .for_each_stretch([&](std::uintptr_t begin, std::uintptr_t end) {
            if (stretches.full()) look_for_them();
            stretches.add(begin, end);
          });
    look_for_them();
    return !met;
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
