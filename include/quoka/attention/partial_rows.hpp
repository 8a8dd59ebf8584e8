// Attention of a row over parts of its keys, and the result over all of them.
//
// A row that few others share its keys with is cut over the keys, not over the rows: each part is a
// task that leaves its softmax state and its sum of weighted values here, unnormalised; merging
// them in the order of the keys ends the row. How keys are cut depends on their number alone, so
// that neither threads nor batch change a bit.
#pragma once

#include <quoka/base/buffer.hpp>
#include <quoka/kernels/softmax_state.hpp>
#include <quoka/simd/tuning.hpp>

#include <algorithm>
#include <cassert>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// One state and one row of sums per query row, of one part.
struct PartialRows {
  SoftmaxState<float>* state;  // [rows]
  float* out;                  // [rows, v_dim]
};

// Keys per part, for `keys` of them in all: a multiple of `step`, and at least `least`.
inline Index part_keys(Index keys, Index step, Index least) {
  return std::max(least, round_up(ceil_div(keys, tuning::max_parts), step));
}

class Partials {
 public:
  // Room for `room` parts: tuning::max_parts, where a growing cache is not to ask for more.
  void reserve(Index heads, Index parts, Index rows, Index v_dim, Index room) {
    assert(0 < parts && parts <= room && room <= tuning::max_parts);
    parts_ = parts, rows_ = rows, v_dim_ = v_dim;
    states_.reserve(heads * room * rows);
    out_.reserve(heads * room * rows * v_dim);
  }
  PartialRows part(Index head, Index part) const {
    const Index first = (head * parts_ + part) * rows_;
    return {states_.data() + first, out_.data() + first * v_dim_};
  }
  Index bytes() const { return states_.bytes() + out_.bytes(); }

  // All parts of one head, merged into the first.
  PartialRows merged(Index head) const {
    const PartialRows all = part(head, 0);
    for (Index p = 1; p < parts_; ++p) {
      const PartialRows next = part(head, p);
      for (Index row = 0; row < rows_; ++row) {
        const auto [factor, next_factor] = all.state[row].merge(next.state[row]);
        float* const to = all.out + row * v_dim_;
        const float* const from = next.out + row * v_dim_;
        for (Index c = 0; c < v_dim_; ++c) to[c] = simd::fma(to[c], factor, from[c] * next_factor);
      }
    }
    return all;
  }

 private:
  Buffer<SoftmaxState<float>> states_;  // [heads, parts, rows]
  Buffer<float> out_;                   // [heads, parts, rows, v_dim]
  Index parts_ = 0, rows_ = 0, v_dim_ = 0;
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
