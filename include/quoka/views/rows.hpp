// Rows of channels wherever they lie and however they are stored: what the library reads and writes.
//
//   Rows         [batch, heads, len, dim], read          q, k, v
//   OutputRows   [batch, heads, len, dim], written       out
//   RowFinder    the rows of one head: finder[i] is the address of row i
//
// Both are made implicitly from a TensorView and from a row-major Eigen tensor of float, half or
// bfloat16; the element type becomes a Format. Kernels ask a RowFinder for row addresses and know
// nothing of strides: a cache in pages, or a list of rows, is another way to answer.
#pragma once

#include <quoka/formats/format.hpp>
#include <quoka/views/row_finder.hpp>
#include <quoka/views/tensor_view.hpp>

namespace quoka {
inline namespace QUOKA_ABI {

template <class Byte>  // const std::byte, or std::byte
class BasicRows {
  static constexpr bool writes = !std::is_const_v<Byte>;
  template <class T>
  using Element = std::conditional_t<writes, T, const T>;

 public:
  using Sizes = std::array<Index, 4>;
  using Strides = std::array<Index, 3>;  // of batch, heads and len, in bytes

  // No rows, of no format.
  constexpr BasicRows() = default;

  template <class T>
  requires(Storage<std::remove_const_t<T>> && (!writes || !std::is_const_v<T>))
      BasicRows(const TensorView<T>& view)
      : data_(reinterpret_cast<Byte*>(view.data())),
        format_(&format_of<std::remove_const_t<T>>()),
        sizes_(view.sizes()),
        strides_{view.strides()[0] * bytes<T>, view.strides()[1] * bytes<T>,
                 view.strides()[2] * bytes<T>} {}
  // From an Eigen tensor or map that outlives the rows.
  template <detail::AnyTensor E>
  BasicRows(E& tensor) : BasicRows(checked_view(tensor)) {}
  template <class P, int O, template <class> class M>
  BasicRows(const Eigen::TensorMap<P, O, M>&& map) : BasicRows(checked_view(map)) {}
  // A temporary tensor would be gone before the rows are used.
  template <class S, int N, int O, class I>
  BasicRows(const Eigen::Tensor<S, N, O, I>&&) = delete;
  // What may be written may be read.
  template <class Other>
  requires(!writes && std::is_same_v<Other, std::byte>) BasicRows(const BasicRows<Other>& other)
      : data_(other.data()),
        format_(other.empty() ? nullptr : &other.format()),
        sizes_(other.sizes()),
        strides_(other.strides()) {}
  // From memory of the caller's, in any format. Throws std::invalid_argument on a negative size, and
  // on null with elements.
  BasicRows(Byte* data, const Format& format, const Sizes& sizes, const Strides& strides)
      : data_(data), format_(&format), sizes_(sizes), strides_(strides) {
    for (const Index size : sizes) detail::require_at_least("a size of rows", size, 0);
    if (data == nullptr && !empty())
      detail::fail_because("a view has elements, but its pointer is null");
  }

  Byte* data() const { return data_; }
  const Format& format() const { return *format_; }
  const Sizes& sizes() const { return sizes_; }
  const Strides& strides() const { return strides_; }
  Index batch() const { return sizes_[0]; }
  Index heads() const { return sizes_[1]; }
  Index len() const { return sizes_[2]; }
  Index dim() const { return sizes_[3]; }
  bool empty() const {
    return sizes_[0] == 0 || sizes_[1] == 0 || sizes_[2] == 0 || sizes_[3] == 0;
  }
  // Do one token's heads lie nearer to each other than one head's tokens?
  bool heads_side_by_side() const {
    const auto size = [](Index x) { return x < 0 ? -x : x; };
    return heads() > 1 && size(strides_[1]) < size(strides_[2]);
  }

  Byte* row(Index b, Index head, Index i) const {
    return data_ + b * strides_[0] + head * strides_[1] + i * strides_[2];
  }
  RowFinder head(Index b, Index head) const requires(!writes) {
    return {row(b, head, 0), strides_[2]};
  }

  // As a view of T. Throws std::invalid_argument where they are of another format.
  template <Storage T>
  TensorView<const T> typed() const requires(!writes) {
    if (format_ != &format_of<T>())
      detail::fail_because("rows are not of the type they are asked for");
    const auto elements = [](Index step) { return step / static_cast<Index>(sizeof(T)); };
    return {reinterpret_cast<const T*>(data_),
            sizes_,
            {elements(strides_[0]), elements(strides_[1]), elements(strides_[2]), 1}};
  }
  // Rows [begin, end) of `heads` heads from `head` on, token by token.
  RowWalk walk(Index b, Index head, Index heads, Index begin, Index end) const requires(!writes) {
    return {this->head(b, head), format_->row_bytes(dim()), begin, end, heads, strides_[1]};
  }

  // The rows [begin, begin + count) of each head. Throws std::invalid_argument beyond the end.
  BasicRows slice(Index begin, Index count) const {
    detail::require_at_least("slice's begin", begin, 0);
    detail::require_at_least("slice's count", count, 0);
    detail::require_at_most("slice's begin", begin, "the rows' len", len());
    detail::require_at_most("slice's count", count, "the rows from there on", len() - begin);
    BasicRows part = *this;
    if (data_ != nullptr) part.data_ += begin * strides_[2];
    part.sizes_[2] = count;
    return part;
  }

 private:
  template <class T>
  static constexpr Index bytes = static_cast<Index>(sizeof(T));

  // The one place that says in words which tensors there can be rows of.
  template <class E>
  static auto checked_view(E& tensor) {
    using Scalar = typename E::Scalar;
    constexpr bool stored = Storage<Scalar>;
    constexpr bool row_major = (int{E::Layout} & 1) == 1;
    constexpr bool rank = E::NumIndices == 4 || E::NumIndices == 3;
    constexpr bool writable =
        !writes || !std::is_const_v<std::remove_pointer_t<decltype(tensor.data())>>;
    static_assert(stored, "quoka: elements must be float, Eigen::half or Eigen::bfloat16");
    static_assert(row_major,
                  "quoka: tensors must be row-major: Eigen::Tensor<T, 4, Eigen::RowMajor>");
    static_assert(
        rank,
        "quoka: tensors must have rank 4, [batch, heads, len, dim], or rank 3, without batch");
    static_assert(writable, "quoka: an output must not be const");
    if constexpr (stored && row_major && rank && writable)
      return TensorView<Element<Scalar>>(tensor);
    else
      return TensorView<Element<float>>();
  }

  Byte* data_ = nullptr;
  const Format* format_ = nullptr;
  Sizes sizes_{};
  Strides strides_{};
};

using Rows = BasicRows<const std::byte>;
using OutputRows = BasicRows<std::byte>;

static_assert(std::is_trivially_copyable_v<Rows>);

}  // namespace QUOKA_ABI
}  // namespace quoka

#if !defined(QUOKA_COMPILED)
#include <quoka/formats/format_table.hpp>
#endif
