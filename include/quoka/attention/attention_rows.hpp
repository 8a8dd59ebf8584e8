// The last step of a row of attention.
#pragma once

#include <quoka/attention/attention_call.hpp>
#include <quoka/kernels/softmax_state.hpp>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// Row `row` of a KV head, of query row / group, from its state and its sums [v_dim], which are divided in place: writes
// the call's output.
inline void write_row(const AttentionCall& call, Index b, Index kv_head, Index row,
                      const SoftmaxState<float>& state, float* sums) {
  const Index q_head = kv_head * call.group + row % call.group, query = row / call.group;
  const float share = state.inverse_sum();
  for (Index c = 0; c < call.v_dim; ++c) sums[c] *= share;
  call.out.format().narrow(sums, call.out.shape(q_head), call.out.row(b, q_head, query));
  if (!call.lse.absent()) call.lse.at(b, q_head, query) = lse_nat(state.max, state.sum);
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
