// Strided, non-owning views of one element type: how every tensor enters the library.
//
// A view is a pointer, sizes and strides; it is trivially copyable and never owns.
//
//   TensorView<float> q = tensor;                                 a row-major Eigen tensor or map
//   TensorView<float> q(pointer, {batch, heads, len, dim});       contiguous memory
//   TensorView<float> k(pointer, {batch, heads, len, dim},        any memory: a cache in the order
//                       {len * heads * dim, dim, heads * dim, 1});  [batch, len, heads, dim]
//
// The last axis of a rank-4 view (the channels of a head) is contiguous; every other axis has a
// stride of its own.
//
//   TensorView<T>      [batch, heads, len, dim]   q, k, v, out
//   TensorView<T, 3>   [batch, heads, len]        scores, inverse norms, log-sum-exp
//
// Functions that read rows of any element type take Rows (rows.hpp), to which a TensorView
// converts.
// Eigen's headers are not included: code that has a tensor has included them.
#pragma once

#include <quoka/base/check.hpp>

#include <array>
#include <concepts>
#include <limits>
#include <type_traits>

namespace Eigen {
struct half;
struct bfloat16;
template <typename Scalar, int NumIndices, int Options, typename IndexType>
class Tensor;
template <typename PlainObject, int Options, template <class> class MakePointer>
class TensorMap;
}  // namespace Eigen

namespace quoka {
inline namespace QUOKA_ABI {

// The element types. Scores, softmax and every accumulation are float for all of them.
template <class T>
concept Storage =
    std::same_as<T, float> || std::same_as<T, Eigen::half> || std::same_as<T, Eigen::bfloat16>;

template <class T, int Rank = 4>
class TensorView;

namespace detail {

template <class E>
inline constexpr bool is_tensor = false;
template <class S, int N, int O, class I>
inline constexpr bool is_tensor<Eigen::Tensor<S, N, O, I>> = true;
template <class P, int O, template <class> class M>
inline constexpr bool is_tensor<Eigen::TensorMap<P, O, M>> = true;

template <class E>
inline constexpr bool is_view = false;
template <class T, int Rank>
inline constexpr bool is_view<TensorView<T, Rank>> = true;

template <class E>
concept AnyTensor = is_tensor<std::remove_cv_t<E>>;

// Eigen tensor or map, row-major, of the rank wanted; rank 3 also serves rank 4, as batch 1.
template <class E, class T, int Rank>
concept EigenTensorOf = AnyTensor<E> &&(int{E::Layout} & 1) == 1 &&
                        (E::NumIndices == Rank || (Rank == 4 && E::NumIndices == 3)) &&
                        std::is_convertible_v<decltype(std::declval<E&>().data()), T*>;

// Sizes and row-major strides of an Eigen tensor; a batch of 1 where it has rank 3.
template <int Rank>
using Sizes = std::array<Index, static_cast<std::size_t>(Rank)>;

template <int Rank, class E>
void dense_sizes(const E& tensor, Sizes<Rank>& sizes, Sizes<Rank>& strides) {
  constexpr std::size_t rank = Rank, missing = static_cast<std::size_t>(Rank - E::NumIndices);
  sizes[0] = 1;
  for (std::size_t axis = missing; axis < rank; ++axis)
    sizes[axis] = static_cast<Index>(tensor.dimensions()[axis - missing]);
  strides[rank - 1] = 1;
  for (std::size_t axis = rank - 1; axis > 0; --axis)
    strides[axis - 1] = strides[axis] * sizes[axis];
}

}  // namespace detail

// A view or an Eigen tensor of float, half or bfloat16: for functions that return the element type.
template <class E>
concept TensorLike =
    (detail::is_view<std::remove_cvref_t<E>> || detail::is_tensor<std::remove_cvref_t<E>>)&&Storage<
        std::remove_const_t<typename std::remove_cvref_t<E>::Scalar>>;

// Its element type, without const.
template <TensorLike E>
using storage_t = std::remove_const_t<typename std::remove_cvref_t<E>::Scalar>;

template <class T, int Rank>
class TensorView {
  static_assert(Rank == 3 || Rank == 4,
                "a view has the axes [batch, heads, len] or [batch, heads, len, dim]");

 public:
  using Scalar = T;                   // the element type, const for what is only read
  using Sizes = detail::Sizes<Rank>;  // std::array<Index, Rank>

  // No elements: the absent optional input.
  constexpr TensorView() = default;

  // From an Eigen tensor or map that outlives the view.
  template <detail::EigenTensorOf<T, Rank> E>
  TensorView(E& tensor) : data_(tensor.data()) {
    detail::dense_sizes<Rank>(tensor, sizes_, strides_);
  }
  // From an Eigen map that is a temporary: its memory must outlive the view.
  template <class P, int O, template <class> class M>
  requires detail::EigenTensorOf<const Eigen::TensorMap<P, O, M>, T, Rank> TensorView(
      const Eigen::TensorMap<P, O, M>&& map)
      : data_(map.data()) {
    detail::dense_sizes<Rank>(map, sizes_, strides_);
  }
  // A temporary tensor would be gone before the view is used.
  template <class S, int N, int O, class I>
  TensorView(const Eigen::Tensor<S, N, O, I>&&) = delete;

  // From contiguous memory of the caller's, row-major: the last axis runs fastest. Throws
  // std::invalid_argument on a negative size, on more elements than Index counts, and on null with
  // elements.
  TensorView(T* data, const Sizes& sizes) : TensorView(data, sizes, row_major(sizes)) {}

  // From memory with strides of its own. Strides count elements; in rank 4 the last one must be 1.
  // Throws std::invalid_argument on a negative size, on another inner stride, and on null with
  // elements.
  TensorView(T* data, const Sizes& sizes, const Sizes& strides)
      : data_(data), sizes_(sizes), strides_(strides) {
    detail::require_memory("a view", data, sizes);
    if constexpr (Rank == 4) {
      if (strides[3] != 1)
        detail::fail("a view's inner stride", strides[3],
                     "but the channels of a head must be contiguous: stride", "", 1);
    }
  }

  // From a view of mutable elements.
  template <class U>
  requires(std::is_same_v<const U, T>) TensorView(const TensorView<U, Rank>& other)
      : data_(other.data()), sizes_(other.sizes()), strides_(other.strides()) {}

  T* data() const { return data_; }                  // the first element
  const Sizes& sizes() const { return sizes_; }      // [batch, heads, len], and dim in rank 4
  const Sizes& strides() const { return strides_; }  // in elements
  Index batch() const { return sizes_[0]; }          // sequences
  Index heads() const { return sizes_[1]; }          // of a sequence
  Index len() const { return sizes_[2]; }            // rows of a head
  Index dim() const requires(Rank == 4) { return sizes_[3]; }  // channels of a row
  // The optional input that was not given.
  bool absent() const { return data_ == nullptr; }
  // No elements at all.
  bool empty() const {
    for (const Index size : sizes_)
      if (size == 0) return true;
    return false;
  }

  // Rank 4: the dim() contiguous channels of one row. Rank 3: one element.
  T* row(Index b, Index head, Index i) const {
    return data_ + b * strides_[0] + head * strides_[1] + i * strides_[2];
  }
  // One element.
  T& at(Index b, Index head, Index i) const requires(Rank == 3) { return *row(b, head, i); }

  // The rows [begin, begin + count) of the len axis. Throws std::invalid_argument beyond the end.
  TensorView slice(Index begin, Index count) const {
    detail::require_part("slice's begin", begin, "slice's count", count, "the view's len", len());
    TensorView part = *this;
    if (data_ != nullptr) part.data_ += begin * strides_[2];
    part.sizes_[2] = count;
    return part;
  }

  // Heads [begin, begin + count). Throws std::invalid_argument beyond the last.
  TensorView some_heads(Index begin, Index count) const {
    detail::require_part("the first of some heads", begin, "the number of heads", count,
                         "the view's heads", heads());
    TensorView part = *this;
    if (data_ != nullptr) part.data_ += begin * strides_[1];
    part.sizes_[1] = count;
    return part;
  }

 private:
  static Sizes row_major(const Sizes& sizes) {
    Sizes strides{};
    Index step = 1;
    for (std::size_t axis = sizes.size(); axis-- > 0;) {
      strides[axis] = step;
      const Index size = sizes[axis] > 1 ? sizes[axis] : 1;
      if (size > std::numeric_limits<Index>::max() / step)
        detail::fail("a view's size", size, "but must be at most", "what Index counts",
                     std::numeric_limits<Index>::max() / step);
      step *= size;
    }
    return strides;
  }

  T* data_ = nullptr;
  Sizes sizes_{};
  Sizes strides_{};
};

static_assert(std::is_trivially_copyable_v<TensorView<float>>);

// The read-only rank-4 view of a view or an Eigen tensor, element type deduced.
template <TensorLike E>
TensorView<const storage_t<E>> view_of(E& tensor) {
  return tensor;
}
// A temporary tensor would be gone before the view is used.
template <class S, int N, int O, class I>
void view_of(const Eigen::Tensor<S, N, O, I>&&) = delete;
// The same of a view that is a temporary.
template <class T, int Rank>
TensorView<const std::remove_const_t<T>, Rank> view_of(const TensorView<T, Rank>&& view) {
  return view;
}

}  // namespace QUOKA_ABI
}  // namespace quoka
