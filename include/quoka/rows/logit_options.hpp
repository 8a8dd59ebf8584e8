// The options of attention that change the logits of past keys: selectors use them as well.
//
//   const AttentionOptions options{.scale = 0.088f};                 // said once
//   const Selection selection = selector.select(q, past_k, k, options, threads);
//   attention(q, {past_k, past_v, selection}, {k, v}, out, options, threads);
//
// Methods that weigh logits (MassSelector, and most of the methods to compare with) choose by
// shares of attention, so another scale chooses other keys. Cosines (QuoKA), and methods that use
// only keys, do not need these options.
//
//   scale           used
//   softcap         used by MassSelector, Oracle and TidalDecode, in float, and refused by other
//                   methods that weigh logits
//   alibi_slopes    refused by methods that weigh logits. Cosines do not depend on positions and
//                   ignore them
//   sliding_window  most of the past is hidden: refused by every method; leave such a layer dense
//   a mask          used by select_visible(), refused by select()
//
// The other options of attention() do not change a selection. Shares do not count sinks; the
// chunk's own keys count if they are passed (SelectorInput::chunk_k).
#pragma once

#include <quoka/base/check.hpp>

#include <cmath>
#include <optional>
#include <span>

namespace quoka {
inline namespace QUOKA_ABI {

// AttentionOptions become these by themselves.
struct LogitOptions {
  std::optional<float> scale = {};           // of the logits; absent: 1 / sqrt(head_dim)
  float softcap = 0.0f;                      // cap on |logit|; 0: none
  Index sliding_window = 0;                  // 0: none
  std::span<const float> alibi_slopes = {};  // [q_heads]; empty: none
  bool masked = false;                       // is there a mask?

  // The scale of a head of this many channels.
  float scale_of(Index head_dim) const {
    return scale.value_or(1.0f / std::sqrt(static_cast<float>(head_dim)));
  }
};

namespace detail {

[[noreturn, gnu::cold, gnu::noinline]] inline void fail_element(std::string_view name, Index index,
                                                                double value,
                                                                std::string_view range) {
  char element[128];
  std::snprintf(element, sizeof element, "%.*s[%td]", static_cast<int>(name.size()), name.data(),
                index);
  fail_range(element, value, range);
}

// The largest factor or bias of a logit: beyond all that are of use, and small enough that few
// products overflow.
inline constexpr float most_option = 1e30f;
inline constexpr std::string_view factor_range = "[-1e30, 1e30]";

// A NaN is in no range.
inline bool is_factor(float x) { return -most_option <= x && x <= most_option; }

[[gnu::noinline]] inline void require_factor(std::string_view name, float x) {
  if (!is_factor(x)) [[unlikely]]
    fail_range(name, static_cast<double>(x), factor_range);
}

[[gnu::noinline]] inline void require_factors(std::string_view name, std::span<const float> x) {
  for (std::size_t i = 0; i < x.size(); ++i)
    if (!is_factor(x[i])) [[unlikely]]
      fail_element(name, static_cast<Index>(i), static_cast<double>(x[i]), factor_range);
}

// Throws std::invalid_argument for numbers that attention() refuses.
inline void check_logit_options(const LogitOptions& options) {
  require_factor("scale", options.scale.value_or(1.0f));
  const float softcap = options.softcap;  // its reciprocal multiplies logits
  if (softcap != 0.0f && !(softcap >= 1e-30f && softcap <= 1e30f)) [[unlikely]]
    fail_range("softcap", static_cast<double>(softcap), "[1e-30, 1e30], nor 0 for none");
}

}  // namespace detail

}  // namespace QUOKA_ABI
}  // namespace quoka
