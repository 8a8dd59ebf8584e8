// Rows of any format as floats: in place where they are floats, else widened into memory of their own.
#pragma once

#include <quoka/base/buffer.hpp>
#include <quoka/rows/format.hpp>
#include <quoka/rows/rows.hpp>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// Several rows of one head at a time.
class FloatRows {
 public:
  // Room for `count` rows.
  void reserve(const Format& format, Index count, Index dim) {
    if (!format.is_float) widened_.reserve(count * dim);
  }
  void read(const Format& format, const RowShape& shape, const ConstRow* rows, Index count,
            const float** floats) {
    for (Index i = 0; i < count; ++i) {
      if (format.is_float) {
        floats[i] = reinterpret_cast<const float*>(rows[i]);
      } else {
        float* const to = widened_.data() + i * shape.dim;
        format.widen(rows[i], shape, to);
        floats[i] = to;
      }
    }
  }
  Index bytes() const { return widened_.bytes(); }

 private:
  Buffer<float> widened_;
};

// One row at a time as floats: in place where it is floats. What read() gives is good until the next.
class FloatRow {
 public:
  // Room for a row of x.
  void reserve(const Rows& x) {
    if (!x.empty()) reserve(x.format(), x.dim());
  }
  void reserve(const Format& format, Index dim) {
    if (!format.is_float) widened_.reserve(dim);
  }
  void reserve(const HeadRows& x) {
    if (!x.format->is_float) widened_.reserve(x.shape.dim);
  }
  const float* read(const Rows& x, Index b, Index head, Index i) {
    return read(x.row(b, head, i), x.format(), x.shape(head));
  }
  const float* read(const HeadRows& rows, Index i) {
    return read(rows[i], *rows.format, rows.shape);
  }
  Index bytes() const { return widened_.bytes(); }

 private:
  const float* read(ConstRow row, const Format& format, const RowShape& shape) {
    if (format.is_float) return reinterpret_cast<const float*>(row);
    format.widen(row, shape, widened_.data());
    return widened_.data();
  }

  Buffer<float> widened_;
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
