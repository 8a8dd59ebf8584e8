// The options of attention that change the logits of past keys: selectors use them as well.
//
//   const AttentionOptions options{.scale = 0.088f};                 // said once
//   const Selection selection = selector.select(q, past_k, options, threads);
//   attention(q, {past_k, past_v, selection}, {k, v}, out, options, threads);
//
// Methods that weigh logits (MassSelector, and most of the methods to compare
// with) choose by attention's own shares: with another scale they choose other keys. Cosines, QuoKA's default, and
// methods that look at keys alone need nothing of it.
//
//   scale           used
//   softcap         used by MassSelector, in float, and refused by other methods that weigh logits
//   alibi_slopes    refused by methods that weigh logits. Cosines do not depend on positions and choose as without
//   sliding_window  most of the past is hidden: refused by every method; leave such a layer dense
//   a mask          select_visible() looks at what it hides; select() takes all keys to be seen, and refuses it
//
// The rest of AttentionOptions changes nothing: shares are those among past keys, and neither a sink nor the
// chunk's own keys move them.
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
// Throws std::invalid_argument for numbers that attention() refuses.
inline void check_logit_options(const LogitOptions& options) {
  require_factor("scale", options.scale.value_or(1.0f));
  require_softcap(options.softcap);
}
}  // namespace detail

}  // namespace QUOKA_ABI
}  // namespace quoka
