// The biases of a logit, which depend on its row and its key. Panels, decode and lists all take them from here:
//
//   x' = x + slope[q_head] * (position of the key - position of the query)       ALiBi
//   x" = x' + factor[q_head] * mask[q_head][query][key], -infinity where one of the two is that
//
// Scale and soft-cap, the same for every logit, come before (kernels/logit_rule.hpp); causality and the window, which
// hide keys of a panel, come after (VisibleKeys in kernels/panel_arithmetic.hpp).
#pragma once

#include <quoka/attention/call.hpp>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// Biases of a block of keys. Keys has
//   Index count() const;
//   Index position(Index i) const;                                          of key i
//   void read_mask(Index q_head, Index query, float* to) const;             to[count()], what the mask adds
template <class Keys>
class LogitBias {
 public:
  // mask_row has room for count() numbers; null: the mask adds nothing to these keys.
  LogitBias(const AttentionCall& call, const Keys& keys, float* mask_row)
      : call_(call), keys_(keys), mask_row_(mask_row) {}

  // To rows [first, first + rows) of a KV head, panel_rows at most, side by side in x[count()][step], which has room
  // for whole packets where step is a multiple of them: logits, or biases that are added to logits later.
  [[gnu::noinline]] void add(Index kv_head, Index first, Index rows, float* x, Index step) {
    if (call_.biased_everywhere()) add_distances(kv_head, first, rows, x, step);
    for (Index i = 0; i < rows && mask_row_ != nullptr; ++i)
      add_mask(call_.query_row(kv_head, first + i), x + i, step);
  }

 private:
  void add_distances(Index kv_head, Index first, Index rows, float* x, Index step) const {
    alignas(64) float slope[tuning::panel_rows] = {}, query[tuning::panel_rows] = {};
    for (Index i = 0; i < rows; ++i) {
      const QueryRow row = call_.query_row(kv_head, first + i);
      slope[i] = call_.alibi_slope(row.q_head), query[i] = static_cast<float>(row.query);
    }
    const bool whole = step % simd::lanes == 0;
    for (Index key = 0; key < keys_.count(); ++key, x += step) {
      const float position = static_cast<float>(keys_.position(key) - call_.q_offset);
      if (whole) {
        const simd::Packet at = simd::broadcast(position);
        for (Index i = 0; i < rows; i += simd::lanes)
          simd::store(x + i, simd::fma(simd::load(slope + i), simd::sub(at, simd::load(query + i)),
                                       simd::load(x + i)));
      } else {
        for (Index i = 0; i < rows; ++i) x[i] = simd::fma(slope[i], position - query[i], x[i]);
      }
    }
  }

  void add_mask(const QueryRow& row, float* x, Index step) {
    const Index head = call_.mask->heads() > 1 ? row.q_head : 0;
    if (row.query != read_.query || head != read_.q_head)
      keys_.read_mask(head, row.query, mask_row_);
    read_ = {head, row.query};
    const float factor = call_.mask_factor(row.q_head);
    for (Index key = 0; key < keys_.count(); ++key) {
      const float more = mask_row_[key];
      float& to = x[key * step];
      // One comparison, for a branch on either would be guessed wrong. A NaN of the mask shows nothing that is hidden.
      const bool hidden = simd::min(to, more) == -simd::infinity;
      const float sum = simd::fma(more, factor, to);
      to = hidden ? -simd::infinity : sum;
    }
  }

  const AttentionCall& call_;
  const Keys keys_;
  float* mask_row_;
  QueryRow read_{-1, -1};  // whose numbers mask_row_ has
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
