// Views of a buffer in one of the two orders that engines keep. Strides are computed from sizes,
// and the buffer's extent must be exactly that of the sizes, so a wrong size is found.
//
//   token_major(buffer, len, heads, dim)   [batch, len, heads, dim]   a token's heads side by side
//   head_major(buffer, len, heads, dim)    [batch, heads, len, dim]   a head's tokens side by side
//
// A buffer is a std::vector, std::array or std::span of float, Eigen::half or Eigen::bfloat16; from
// a pointer make a std::span(pointer, count). The view is Rows, or OutputRows if the buffer is not
// const. Halves kept as integers, and any other format, are named:
//
//   as_half(buffer), as_bfloat16(buffer)   16 bits each
//   as_format(buffer, q8_0_format())       rows of bytes, as that format has them
//
// Other layouts that engines have, without a stride by hand:
//
//   room for more tokens than there are    token_major(all, len, heads, dim, {.capacity = 4096})
//   keys, then values, of each token       token_major(all, len, 2 * heads, dim).some_heads(heads,
//                                          heads)
//   all keys, then all values              the two halves of the span
//   padding behind a token or a row        {.step_bytes = ...}
//   one layer of a cache                   its part of the span
//   the chunk already in the cache         chunk_in_cache(k, v, q_len)
#pragma once

#include <quoka/rows/rows.hpp>

#include <algorithm>
#include <limits>
#include <ranges>
#include <span>
#include <type_traits>
#include <utility>

namespace quoka {
inline namespace QUOKA_ABI {

// Options of a buffer beside len, heads and dim.
struct BufferLayout {
  Index batch = 1;     // sequences, one behind the other
  Index capacity = 0;  // tokens there is room for, of which the first len are seen; 0: len
  // From a token to the next (token_major) or a row to the next (head_major), padding included; 0:
  // without padding.
  Index step_bytes = 0;
};

// A buffer and the format of its rows. Made by as_half(), as_bfloat16() and as_format().
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
// Does the buffer's memory outlive the expression?
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

// Checks that Buffer is a buffer, with a message for each fault.
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
// A view of a buffer, which must be as large as len, heads and dim say.
template <class Byte>
BasicRows<Byte> view_of_layout(LayoutOrder order, const NamedBuffer<Byte>& buffer, Index len,
                               Index heads, Index dim, const BufferLayout& layout) {
  require_at_least("a layout's dim", dim, 1);
  require_at_most("a layout's dim", dim, "what Index counts",
                  std::numeric_limits<Index>::max() / 8);
  const Format& format = *buffer.format;
  const Index unit = std::max<Index>(format.element_bytes, 1);
  const LayoutStrides strides =
      layout_strides(order, unit, format.row_bytes({dim}), len, heads, layout);
  if (buffer.bytes != strides.buffer)
    fail(unit == 1 ? "the buffer's number of bytes" : "the buffer's number of elements",
         buffer.bytes / unit, "but must equal",
         layout.capacity == 0 ? "that of len, heads and dim (a cache that has room for more: "
                                "{.capacity = ...})"
                              : "that of capacity, heads and dim",
         strides.buffer / unit);
  return {buffer.data,
          format,
          {layout.batch, heads, len, dim},
          {strides.batch, strides.head, strides.row}};
}

template <class T>
NamedBuffer<ByteLike<T>> bytes_of(std::span<T> elements, const Format& format) {
  return {reinterpret_cast<ByteLike<T>*>(elements.data()),
          static_cast<Index>(elements.size_bytes()), &format};
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
    return bytes_of<T>(buffer, format);
  }
}

// A buffer whose format is named, or follows from the type of its elements.
template <class Buffer>
auto any_buffer(Buffer&& buffer) {
  if constexpr (is_named_buffer<std::remove_cvref_t<Buffer>>) {
    return buffer;
  } else if constexpr (!checked_buffer<Buffer>()) {
    return NamedBuffer<std::byte>{nullptr, 0, &float_format()};
  } else {
    using T = std::remove_const_t<ElementOf<Buffer>>;
    constexpr bool two_bytes = sizeof(T) == 2 && !Storage<T>;
    static_assert(
        !two_bytes,
        "quoka: elements of 16 bits may be half or bfloat16: say which by as_half(buffer) "
        "or as_bfloat16(buffer)");
    static_assert(Storage<T> || two_bytes,
                  "quoka: elements must be float, Eigen::half or Eigen::bfloat16; bytes of another "
                  "format are named by as_format(buffer, format)");
    using Known = std::conditional_t<Storage<T>, T, float>;
    return bytes_of<ElementOf<Buffer>>(buffer, format_of<Known>());
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
// A buffer of bytes, rows of any format. The format outlives the view. Scales that lie apart come
// by Rows::with_scales.
template <class Buffer>
auto as_format(Buffer&& buffer, const Format& format) {
  return detail::named_buffer<1>(std::forward<Buffer>(buffer), format);
}

// The view [batch, heads, len, dim] of a buffer [batch, capacity, heads, dim]. Throws
// std::invalid_argument, with both numbers, where the buffer is not as large as that, for a
// negative size, and for a len beyond the capacity.
template <class Buffer>
auto token_major(Buffer&& buffer, Index len, Index heads, Index dim,
                 const BufferLayout& layout = {}) {
  return detail::view_of_layout(detail::LayoutOrder::tokens,
                                detail::any_buffer(std::forward<Buffer>(buffer)), len, heads, dim,
                                layout);
}
// The view [batch, heads, len, dim] of a buffer [batch, heads, capacity, dim]. Throws as
// token_major() does.
template <class Buffer>
auto head_major(Buffer&& buffer, Index len, Index heads, Index dim,
                const BufferLayout& layout = {}) {
  return detail::view_of_layout(detail::LayoutOrder::heads,
                                detail::any_buffer(std::forward<Buffer>(buffer)), len, heads, dim,
                                layout);
}

}  // namespace QUOKA_ABI
}  // namespace quoka
