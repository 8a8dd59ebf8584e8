// RowReader: rows of any format as floats.
#pragma once

#include <quoka/base/arena.hpp>
#include <quoka/rows/rows.hpp>

namespace quoka {
inline namespace QUOKA_ABI {

// Reads one row at a time as floats: in place where it is floats, else widened into the reader's
// memory. The result of read() is valid until the next one.
class RowReader {
 public:
  // Memory of its own, which is taken when the first row is widened.
  RowReader() = default;
  // Room in the arena for rows of up to `dim` channels.
  RowReader(Arena& arena, Index dim) : room_(dim > 0 ? arena.take<float>(dim) : nullptr) {}

  // Row i of a head, as floats [dim].
  const float* read(const Rows& x, Index b, Index head, Index i) {
    return read(x.row(b, head, i), x.format(), x.shape(head));
  }
  // Row i, as floats [dim].
  const float* read(const HeadRows& rows, Index i) {
    return read(rows[i], *rows.format, rows.shape);
  }

 private:
  const float* read(ConstRow row, const Format& format, const RowShape& shape) {
    if (format.is_float) return reinterpret_cast<const float*>(row);
    float* const to = room_ != nullptr ? room_ : own_.reserve(shape.dim);
    format.widen(row, shape, to);
    return to;
  }

  float* room_ = nullptr;
  Buffer<float> own_;
};

}  // namespace QUOKA_ABI
}  // namespace quoka
