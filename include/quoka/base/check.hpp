// Contract checks at the public edge: each throws std::invalid_argument that names both numbers.
//
// The checks run before anything is written. The throwing half is cold and out of line, so a check
// costs its callers one compare.
#pragma once

#include <quoka/base/index.hpp>

#include <array>
#include <cfenv>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <string_view>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// snprintf, not std::to_string: that one is a template of the standard library's, which a linker
// may take from a unit compiled for another processor (version.hpp).
[[noreturn, gnu::cold, gnu::noinline]] inline void fail(std::string_view a, Index a_value,
                                                        std::string_view relation,
                                                        std::string_view b, Index b_value) {
  const auto part = [](std::string_view text) { return static_cast<int>(text.size()); };
  char message[512];
  std::snprintf(message, sizeof message, "quoka: %.*s is %td, %.*s %.*s%s%td", part(a), a.data(),
                a_value, part(relation), relation.data(), part(b), b.data(),
                b.empty() ? "" : ", which is ", b_value);
  throw std::invalid_argument(message);
}

[[noreturn, gnu::cold, gnu::noinline]] inline void fail_range(std::string_view name, double value,
                                                              std::string_view range) {
  char message[512];
  std::snprintf(message, sizeof message, "quoka: %.*s is %g, not in %.*s",
                static_cast<int>(name.size()), name.data(), value, static_cast<int>(range.size()),
                range.data());
  throw std::invalid_argument(message);
}

[[noreturn, gnu::cold, gnu::noinline]] inline void fail_because(std::string_view reason) {
  char message[512];
  std::snprintf(message, sizeof message, "quoka: %.*s", static_cast<int>(reason.size()),
                reason.data());
  throw std::invalid_argument(message);
}

[[gnu::noinline]] inline void require_equal(std::string_view a, Index a_value, std::string_view b,
                                            Index b_value) {
  if (a_value != b_value) [[unlikely]]
    fail(a, a_value, "but must equal", b, b_value);
}

[[gnu::noinline]] inline void require_at_least(std::string_view name, Index value, Index least) {
  if (value < least) [[unlikely]]
    fail(name, value, "but must be at least", "", least);
}

[[gnu::noinline]] inline void require_at_most(std::string_view a, Index a_value, std::string_view b,
                                              Index b_value) {
  if (a_value > b_value) [[unlikely]]
    fail(a, a_value, "but must be at most", b, b_value);
}

// [begin, begin + count) must lie in [0, size).
[[gnu::noinline]] inline void require_part(std::string_view begin_name, Index begin,
                                           std::string_view count_name, Index count,
                                           std::string_view size_name, Index size) {
  require_at_least(begin_name, begin, 0);
  require_at_least(count_name, count, 0);
  require_at_most(begin_name, begin, size_name, size);
  require_at_most(count_name, count, "those from there on", size - begin);
}

// A number of keys is at most max_keys, since a Position numbers them.
[[gnu::noinline]] inline void require_keys(std::string_view name, Index count) {
  require_at_most(name, count, "max_keys", max_keys);
}
// A caller's size: small enough that no later product overflows Index.
[[gnu::noinline]] inline void require_size(std::string_view name, Index size, Index least) {
  require_at_least(name, size, least);
  require_keys(name, size);
}

// A key may differ from its kept data because the rounding mode has changed: says so.
[[gnu::cold, gnu::noinline]] inline void require_rounding_to_nearest() {
  if (std::fegetround() != FE_TONEAREST)
    fail_because(
        "the rounding mode is not to nearest (std::fesetround): a key is not the same as "
        "what was kept of it in another mode; make all calls in one");
}

// A key differs from the data that were kept of it.
[[noreturn, gnu::cold, gnu::noinline]] inline void fail_other_key(Index position,
                                                                  std::string_view reason,
                                                                  Index len) {
  require_rounding_to_nearest();
  fail("the key at position", position, reason, "", len);
}

// a must be a positive multiple of b; b must be positive.
[[gnu::noinline]] inline void require_multiple(std::string_view a, Index a_value,
                                               std::string_view b, Index b_value) {
  if (b_value < 1 || a_value < 1 || a_value % b_value != 0) [[unlikely]]
    fail(a, a_value, "but must be a positive multiple of", b, b_value);
}

// The axes of a tensor: [batch, heads, len] or [batch, heads, len, dim].
using AxisNames = const char* const[4];
inline constexpr AxisNames tensor_axes = {"batch", "heads", "len", "dim"};

// One axis of a tensor.
[[noreturn, gnu::cold, gnu::noinline]] inline void fail_axis(std::string_view tensor,
                                                             std::size_t axis, Index size,
                                                             std::string_view relation,
                                                             Index expected,
                                                             const AxisNames& axes = tensor_axes) {
  char name[128];
  std::snprintf(name, sizeof name, "%.*s's %s", static_cast<int>(tensor.size()), tensor.data(),
                axes[axis]);
  fail(name, size, relation, "", expected);
}

// Sizes of a tensor, axis by axis.
template <std::size_t Rank>
[[gnu::noinline]] void require_sizes(std::string_view tensor, const std::array<Index, Rank>& sizes,
                                     const std::array<Index, Rank>& expected) {
  for (std::size_t axis = 0; axis < Rank; ++axis)
    if (sizes[axis] != expected[axis]) [[unlikely]]
      fail_axis(tensor, axis, sizes[axis], "but must be", expected[axis]);
}

// Refuses sizes that memory cannot have: negative ones, and elements without a pointer.
template <std::size_t Rank>
[[gnu::noinline]] void require_memory(std::string_view tensor, const void* data,
                                      const std::array<Index, Rank>& sizes,
                                      const AxisNames& axes = tensor_axes) {
  bool elements = true;
  for (std::size_t axis = 0; axis < Rank; ++axis) {
    if (sizes[axis] < 0) [[unlikely]]
      fail_axis(tensor, axis, sizes[axis], "but a size must be at least", 0, axes);
    elements = elements && sizes[axis] > 0;
  }
  if (data != nullptr || !elements) [[likely]]
    return;
  char list[128];
  int at = 0;
  for (const Index size : sizes)
    at += std::snprintf(list + at, sizeof list - static_cast<std::size_t>(at), "%s%td",
                        at > 0 ? ", " : "", size);
  char message[256];
  std::snprintf(message, sizeof message, "%.*s of [%s] has elements, but its pointer is null",
                static_cast<int>(tensor.size()), tensor.data(), list);
  fail_because(message);
}

// Throws the refusal of part i of a call again, with the part's name and number.
[[noreturn, gnu::cold, gnu::noinline]] inline void fail_part(const char* name, Index i,
                                                             const char* message) {
  const std::string_view own = "quoka: ", text = message;
  char named[640];
  std::snprintf(named, sizeof named, "quoka: %s %td: %s", name, i,
                message + (text.substr(0, own.size()) == own ? own.size() : 0));
  throw std::invalid_argument(named);
}

// f() for part i of a call: a std::invalid_argument that it throws gets the part's name and number.
template <class F>
void name_part(const char* name, Index i, F&& f) {
  try {
    f();
  } catch (const std::invalid_argument& error) {
    fail_part(name, i, error.what());
  }
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
