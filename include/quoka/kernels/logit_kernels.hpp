// From a product of a query and a key to its logit: loops over rows of products.
// attention/logits.hpp has their order, and which numbers a query and a key bring along.
#pragma once

#include <quoka/base/index.hpp>
#include <quoka/kernels/kernels.hpp>
#include <quoka/rows/logit_options.hpp>

#include <algorithm>

#if QUOKA_DEFINES_KERNELS
#include <limits>
#endif

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// From a product q . k to a logit, as far as it is the same for every row and key of a call:
//
//   q' = scale * q        before any product, where queries are packed
//   x  = q' . k
//   x' = softcap * tanh(x / softcap)
//
// The struct is passed whole, from attention's options to the loops over packed keys. So an option
// that changes a logit by itself is a member and a line of apply(), and kernels do not change.
// Biases of a row and a key are added after it (attention/logits.hpp), and then keys are hidden
// (VisibleKeys of panel_arithmetic.hpp).
struct LogitRule {
  float scale = 1.0f;    // of the queries
  float softcap = 0.0f;  // cap on |logit|; 0: none

  // Attention's, of a head of this many channels.
  static LogitRule from(const LogitOptions& options, Index head_dim) {
    return {options.scale_of(head_dim), options.softcap};
  }
  // Does apply() change anything? If so, a maximum found earlier is no longer valid.
  bool changes() const { return softcap != 0.0f; }
  // To `count` logits, whole packets, in place.
  void apply(float* x, Index count) const { apply(x, 1, count, count); }
  // To `count` logits of each of `keys`, `step` apart.
  void apply(float* x, Index keys, Index count, Index step) const;
};

// ---- rows side by side, x[key][step] ------------------------------------------------------------

// x[key][row] += slopes[row] * (positions[key] - queries[row]) for `rows` rows. slopes and queries
// have room for panel_rows; x has room for whole packets of rows where `step` is a multiple of
// them.
QUOKA_FUNC void add_distances(const float* slopes, const float* queries, Index rows,
                              const float* positions, Index keys, float* x, Index step);

// x[key * step] += factor * more[key], for one row; -infinity where either is.
QUOKA_FUNC void add_mask(const float* more, float factor, Index keys, float* x, Index step);

// ---- a panel's logits, x[key][panel_rows] -------------------------------------------------------

// Which keys [first, end) of the block each row sees, as small exact floats.
struct LaneRanges {
  alignas(64) float first[most_panel_rows];
  alignas(64) float end[most_panel_rows];
};

// Writes which of these keys each of `rows` rows sees, if those before begins[row] and from
// ends[row] on are hidden. begins may be null: none are before. Returns whether any is hidden.
QUOKA_FUNC bool find_ranges(const Index* begins, const Index* ends, Index rows,
                            const KeyRange& keys, LaneRanges& ranges);

// Logits of the panel's first `rows` rows, whole packets, plus their biases; -inf where a bias is
// -inf, whatever the logit.
QUOKA_FUNC void add_biases(float* x, Index keys, Index rows, const float* bias);

#if QUOKA_DEFINES_KERNELS

QUOKA_FUNC void LogitRule::apply(float* x, Index keys, Index count, Index step) const {
  if (softcap == 0.0f) return;
  const simd::Packet inverse = simd::broadcast(1.0f / softcap), most = simd::broadcast(softcap);
  for (Index at = 0; at < keys * step; at += step)
    for (Index i = at; i < at + count; i += simd::lanes)
      simd::store(x + i, simd::mul(simd::tanh(simd::mul(simd::load(x + i), inverse)), most));
}

// ---- rows side by side, x[key][step] ------------------------------------------------------------

QUOKA_FUNC void add_distances(const float* slopes, const float* queries, Index rows,
                              const float* positions, Index keys, float* x, Index step) {
  const bool whole = step % simd::lanes == 0;
  for (Index key = 0; key < keys; ++key, x += step) {
    if (whole) {
      const simd::Packet at = simd::broadcast(positions[key]);
      for (Index i = 0; i < rows; i += simd::lanes)
        simd::store(x + i, simd::fma(simd::load(slopes + i), simd::sub(at, simd::load(queries + i)),
                                     simd::load(x + i)));
    } else {
      for (Index i = 0; i < rows; ++i)
        x[i] = simd::fma(slopes[i], positions[key] - queries[i], x[i]);
    }
  }
}

QUOKA_FUNC void add_mask(const float* more, float factor, Index keys, float* x, Index step) {
  for (Index key = 0; key < keys; ++key, x += step) {
    // One comparison, because a branch on either would be mispredicted. A NaN in the mask does
    // not reveal a hidden key.
    const bool hidden = simd::min(*x, more[key]) == -simd::infinity;
    const float sum = simd::fma(more[key], factor, *x);
    *x = hidden ? -simd::infinity : sum;
  }
}

// ---- a panel's logits, x[key][panel_rows] -------------------------------------------------------

QUOKA_FUNC bool find_ranges(const Index* begins, const Index* ends, Index rows,
                            const KeyRange& keys, LaneRanges& ranges) {
  const auto in_block = [&](Index key) {
    return static_cast<float>(std::clamp<Index>(key - keys.begin, 0, keys.count()));
  };
  bool any = false;
  for (Index i = 0; i < tuning::panel_rows; ++i) {
    const Index row = std::min(i, rows - 1), begin = begins != nullptr ? begins[row] : keys.begin;
    ranges.first[i] = in_block(begin), ranges.end[i] = in_block(ends[row]);
    any = any || begin > keys.begin || ends[row] < keys.end;
  }
  return any;
}

// Logits of `keys` keys from `first` of the block on, of the panel's first `rows` rows, whole
// packets: those outside a row's keys become -inf.
inline void hide_outside(float* x, Index keys, Index rows, const LaneRanges& ranges, Index first) {
  const simd::Packet hidden = simd::broadcast(-simd::infinity);
  for (Index key = 0; key < keys; ++key) {
    const simd::Packet here = simd::broadcast(static_cast<float>(first + key));
    for (Index row = 0; row < rows; row += simd::lanes) {
      float* at = x + key * tuning::panel_rows + row;
      const simd::Packet before_end =
          simd::select_less(here, simd::load(ranges.end + row), simd::load(at), hidden);
      simd::store(at, simd::select_less(here, simd::load(ranges.first + row), hidden, before_end));
    }
  }
}

QUOKA_FUNC void add_biases(float* x, Index keys, Index rows, const float* bias) {
  const simd::Packet hidden = simd::broadcast(-simd::infinity);
  const simd::Packet least = simd::broadcast(std::numeric_limits<float>::lowest());
  for (Index at = 0; at < keys * tuning::panel_rows; at += tuning::panel_rows)
    for (Index i = at; i < at + rows; i += simd::lanes) {
      const simd::Packet more = simd::load(bias + i);
      simd::store(x + i,
                  simd::select_less(more, least, hidden, simd::add(simd::load(x + i), more)));
    }
}

#endif  // QUOKA_DEFINES_KERNELS

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
