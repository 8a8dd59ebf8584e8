// From a product q . k to a logit, as far as it is the same for every row and key of a call.
//
//   q' = scale * q        before any product, where queries are packed
//   x  = q' . k
//   x' = softcap * tanh(x / softcap)
//
// The struct travels whole, from attention's options to the loops over packed keys: an option that changes a logit by
// itself is a member and a line of apply(), and kernels do not change. Biases of a row and a key are added after
// it (attention/logits.hpp), or hides the key (panel_arithmetic.hpp's VisibleKeys).
#pragma once

#include <quoka/base/index.hpp>
#include <quoka/rows/logit_options.hpp>
#include <quoka/simd/simd.hpp>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// x = cap * tanh(x / cap) for `keys` times `count` logits, whole packets, `step` apart.
[[gnu::noinline]] inline void cap_logits(float* x, Index keys, Index count, Index step, float cap) {
  const simd::Packet inverse = simd::broadcast(1.0f / cap), most = simd::broadcast(cap);
  for (Index at = 0; at < keys * step; at += step)
    for (Index i = at; i < at + count; i += simd::lanes)
      simd::store(x + i, simd::mul(simd::tanh(simd::mul(simd::load(x + i), inverse)), most));
}

struct LogitRule {
  float scale = 1.0f;    // of the queries
  float softcap = 0.0f;  // cap on |logit|; 0: none

  // Attention's, of a head of this many channels.
  static LogitRule from(const LogitOptions& options, Index head_dim) {
    return {options.scale_of(head_dim), options.softcap};
  }
  // Does apply() change anything? Then a maximum that was found before is none.
  bool changes() const { return softcap != 0.0f; }
  // To `count` logits, whole packets, in place.
  void apply(float* x, Index count) const { apply(x, 1, count, count); }
  // To `count` logits of each of `keys`, `step` apart.
  void apply(float* x, Index keys, Index count, Index step) const {
    if (softcap != 0.0f) cap_logits(x, keys, count, step, softcap);
  }
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
