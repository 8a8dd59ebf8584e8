// Rows of any format as floats: in place where they are floats, else widened into memory of their own.
#pragma once

#include <quoka/formats/format.hpp>
#include <quoka/runtime/buffer.hpp>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// Several rows at a time.
class FloatRows {
 public:
  // Room for `count` rows.
  void reserve(const Format& format, Index count, Index dim) {
    if (!format.is_float) widened_.reserve(count * dim);
  }
  // rows[0, count) as floats[0, count).
  void read(const Format& format, const ConstRow* rows, Index count, Index dim,
            const float** floats) {
    for (Index i = 0; i < count; ++i) {
      if (format.is_float) {
        floats[i] = reinterpret_cast<const float*>(rows[i]);
      } else {
        format.widen(rows[i], dim, widened_.data() + i * dim);
        floats[i] = widened_.data() + i * dim;
      }
    }
  }
  Index bytes() const { return widened_.bytes(); }

 private:
  Buffer<float> widened_;
};

// One row at a time as floats: in place where it is floats.
class FloatRow {
 public:
  void reserve(const Format* format, Index dim) {
    format_ = format, dim_ = dim;
    if (!format->is_float) widened_.reserve(dim);
  }
  const float* read(ConstRow row) {
    if (format_->is_float) return reinterpret_cast<const float*>(row);
    format_->widen(row, dim_, widened_.data());
    return widened_.data();
  }
  Index bytes() const { return widened_.bytes(); }

 private:
  const Format* format_ = nullptr;
  Index dim_ = 0;
  Buffer<float> widened_;
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
