// Views of a buffer in one of the two orders that engines keep. Sizes go in; strides are computed, and the
// buffer's extent is checked: it must be all that the sizes say, so a wrong size is found.
//
//   token_major(buffer, len, heads, dim)   [batch, len, heads, dim]   a token's heads side by side
//   head_major(buffer, len, heads, dim)    [batch, heads, len, dim]   a head's tokens side by side
//
// A buffer is a std::vector, std::array or std::span of float, Eigen::half or Eigen::bfloat16: the view is a
// TensorView, of const elements if the buffer's are. From a pointer make a std::span(pointer, count). Halves kept as
// integers, and any other format, are named; the view is Rows, or OutputRows of a buffer that is not const:
//
//   as_half(buffer), as_bfloat16(buffer)   16 bits each
//   as_format(buffer, q8_0_format())       rows of bytes, as that format has them
//
// Other layouts that engines have, without a stride by hand:
//
//   room for more tokens than there are    token_major(all, len, heads, dim, {.capacity = 4096})
//   keys, then values, of each token       token_major(all, len, 2 * heads, dim).some_heads(heads, heads)
//   all keys, then all values              the two halves of the span
//   padding behind a token or a row        {.step_bytes = ...}
//   one layer of a cache                   its part of the span
//   the chunk already in the cache         chunk_in_cache(k, v, q_len)
#pragma once

#include <quoka/rows/rows.hpp>

#include <limits>
#include <ranges>
#include <span>
#include <type_traits>

namespace quoka {
inline namespace QUOKA_ABI {

// Options of a buffer beside len, heads and dim.
struct BufferLayout {
  Index batch = 1;     // sequences, one behind the other
  Index capacity = 0;  // tokens there is room for, of which the first len are seen; 0: len
  Index step_bytes =
      0;  // from a token to the next (token_major) or a row to the next (head_major),
          // padding included; 0: without padding
};

// A buffer whose format is named. Made by as_half(), as_bfloat16() and as_format().
template <class Byte>  // const std::byte, or std::byte
struct NamedBuffer {
  Byte* data;            // the first byte
  Index bytes;           // of all of it
  const Format* format;  // of its rows
};

namespace detail {

template <class E>
inline constexpr bool is_named_buffer = false;
template <class Byte>
inline constexpr bool is_named_buffer<NamedBuffer<Byte>> = true;

template <class Buffer>
concept HasExtent = requires(Buffer& buffer) {
  std::span(buffer);
};
// Does its memory outlive the expression?
template <class Buffer>
inline constexpr bool outlives =
    std::is_lvalue_reference_v<Buffer> || std::ranges::borrowed_range<Buffer>;
template <class Buffer>
using ElementOf = typename decltype(std::span(std::declval<Buffer&>()))::element_type;
template <class T>
using ByteLike = std::conditional_t<std::is_const_v<T>, const std::byte, std::byte>;

// The strides of a layout, and the extent of its buffer, all in bytes.
struct LayoutStrides {
  Index batch, head, row, buffer;
};

enum class LayoutOrder { tokens, heads };

// Strides in a buffer with elements of `unit` bytes; 1: bytes. Throws std::invalid_argument.
[[gnu::noinline]] inline LayoutStrides layout_strides(LayoutOrder order, Index unit,
                                                      Index row_bytes, Index len, Index heads,
                                                      const BufferLayout& layout) {
  const auto times = [](Index a, Index b) {
    Index product;
    if (__builtin_mul_overflow(a, b, &product))
      fail("a layout's size", a, "but must be at most", "what Index counts",
           std::numeric_limits<Index>::max() / b);
    return product;
  };
  require_at_least("a layout's len", len, 0);
  require_at_least("a layout's heads", heads, 1);
  require_at_least("a layout's batch", layout.batch, 1);
  require_at_least("a layout's capacity", layout.capacity, 0);
  const Index capacity = layout.capacity == 0 ? len : layout.capacity;
  require_at_most("a layout's len", len, "its capacity", capacity);
  const bool by_token = order == LayoutOrder::tokens;
  const Index together = by_token ? times(heads, row_bytes) : row_bytes;
  const Index step = layout.step_bytes == 0 ? together : layout.step_bytes;
  if (step < together)
    fail("step_bytes", step, "but must be at least", "the bytes of what lies together", together);
  if (step % unit != 0)
    fail("step_bytes", step, "but must be a multiple of", "an element's bytes", unit);
  const Index sequence = times(times(capacity, by_token ? 1 : heads), step);
  const Index buffer = times(layout.batch, sequence);
  if (by_token) return {sequence, row_bytes, step, buffer};
  return {sequence, times(capacity, step), step, buffer};
}

// Throws std::invalid_argument unless the buffer is as large as that.
[[gnu::noinline]] inline void require_buffer(Index buffer_bytes, Index unit,
                                             const LayoutStrides& strides, Index capacity) {
  if (buffer_bytes != strides.buffer)
    fail(unit == 1 ? "the buffer's number of bytes" : "the buffer's number of elements",
         buffer_bytes / unit, "but must equal",
         capacity == 0 ? "that of len, heads and dim (a cache that has room for more: "
                         "{.capacity = ...})"
                       : "that of capacity, heads and dim",
         strides.buffer / unit);
}

// Both.
[[gnu::noinline]] inline LayoutStrides checked_layout(LayoutOrder order, Index buffer_bytes,
                                                      Index unit, Index row_bytes, Index len,
                                                      Index heads, const BufferLayout& layout) {
  const LayoutStrides strides = layout_strides(order, unit, row_bytes, len, heads, layout);
  require_buffer(buffer_bytes, unit, strides, layout.capacity);
  return strides;
}

// The one place that says in words what a buffer may be.
template <class Buffer>
constexpr bool checked_buffer() {
  constexpr bool known = HasExtent<Buffer>;
  static_assert(known, "quoka: a buffer must know its extent: std::span(pointer, count)");
  if constexpr (!HasExtent<Buffer>) {
    return false;
  } else {
    static_assert(outlives<Buffer>,
                  "quoka: a buffer that is a temporary would be gone before its view is used");
    return outlives<Buffer>;
  }
}
template <class Buffer>
constexpr bool checked_elements() {
  using T = std::remove_const_t<ElementOf<Buffer>>;
  constexpr bool two_bytes = sizeof(T) == 2 && !Storage<T>;
  static_assert(!two_bytes,
                "quoka: elements of 16 bits may be half or bfloat16: say which by as_half(buffer) "
                "or as_bfloat16(buffer)");
  static_assert(Storage<T> || two_bytes,
                "quoka: elements must be float, Eigen::half or Eigen::bfloat16; bytes of another "
                "format are named by as_format(buffer, format)");
  return Storage<T>;
}

template <LayoutOrder order, class Buffer>
auto view_of_layout(Buffer&& buffer, Index len, Index heads, Index dim,
                    const BufferLayout& layout) {
  require_at_least("a layout's dim", dim, 1);
  using B = std::remove_cvref_t<Buffer>;
  if constexpr (is_named_buffer<B>) {
    using View = BasicRows<std::remove_pointer_t<decltype(buffer.data)>>;
    const Index element = buffer.format->element_bytes;
    const LayoutStrides strides =
        checked_layout(order, buffer.bytes, element > 0 ? element : 1,
                       buffer.format->row_bytes({dim}), len, heads, layout);
    return View(buffer.data, *buffer.format, {layout.batch, heads, len, dim},
                {strides.batch, strides.head, strides.row});
  } else if constexpr (!checked_buffer<Buffer>()) {
    return TensorView<float>();
  } else if constexpr (!checked_elements<Buffer>()) {
    return TensorView<float>();
  } else {
    using T = ElementOf<Buffer>;
    constexpr auto unit = static_cast<Index>(sizeof(T));
    const std::span elements(buffer);
    if (dim > std::numeric_limits<Index>::max() / unit)
      fail("a layout's dim", dim, "but must be at most", "what Index counts",
           std::numeric_limits<Index>::max() / unit);
    const LayoutStrides strides = checked_layout(order, static_cast<Index>(elements.size_bytes()),
                                                 unit, dim * unit, len, heads, layout);
    return TensorView<T>(elements.data(), {layout.batch, heads, len, dim},
                         {strides.batch / unit, strides.head / unit, strides.row / unit, 1});
  }
}

// Elements of `size` bytes, of this format.
template <std::size_t size, class Buffer>
auto named_buffer(Buffer&& buffer, const Format& format) {
  if constexpr (!checked_buffer<Buffer>()) {
    return NamedBuffer<std::byte>{nullptr, 0, &format};
  } else {
    using T = ElementOf<Buffer>;
    constexpr bool fits = sizeof(T) == size && !Storage<std::remove_const_t<T>>;
    static_assert(fits || size != 2,
                  "quoka: as_half() and as_bfloat16() take integers of 16 bits, as std::uint16_t");
    static_assert(fits || size != 1, "quoka: as_format() takes bytes");
    const std::span elements(buffer);
    return NamedBuffer<ByteLike<T>>{reinterpret_cast<ByteLike<T>*>(elements.data()),
                                    static_cast<Index>(elements.size_bytes()), &format};
  }
}

}  // namespace detail

// A buffer of numbers in IEEE half precision, kept as any type of 16 bits: std::uint16_t, _Float16.
template <class Buffer>
auto as_half(Buffer&& buffer) {
  return detail::named_buffer<2>(std::forward<Buffer>(buffer), format_of<Eigen::half>());
}
// The same of bfloat16.
template <class Buffer>
auto as_bfloat16(Buffer&& buffer) {
  return detail::named_buffer<2>(std::forward<Buffer>(buffer), format_of<Eigen::bfloat16>());
}
// A buffer of bytes, rows of any format. The format outlives the view. Scales that lie apart come by
// Rows::with_scales.
template <class Buffer>
auto as_format(Buffer&& buffer, const Format& format) {
  return detail::named_buffer<1>(std::forward<Buffer>(buffer), format);
}

// The view [batch, heads, len, dim] of a buffer [batch, capacity, heads, dim]. Throws
// std::invalid_argument, with both numbers, where the buffer is not as large as that, for a negative
// size, and for a len beyond the capacity.
template <class Buffer>
auto token_major(Buffer&& buffer, Index len, Index heads, Index dim,
                 const BufferLayout& layout = {}) {
  return detail::view_of_layout<detail::LayoutOrder::tokens>(std::forward<Buffer>(buffer), len,
                                                             heads, dim, layout);
}
// The view [batch, heads, len, dim] of a buffer [batch, heads, capacity, dim]. Throws as token_major() does.
template <class Buffer>
auto head_major(Buffer&& buffer, Index len, Index heads, Index dim,
                const BufferLayout& layout = {}) {
  return detail::view_of_layout<detail::LayoutOrder::heads>(std::forward<Buffer>(buffer), len,
                                                            heads, dim, layout);
}

}  // namespace QUOKA_ABI
}  // namespace quoka
