// Attention of one KV head: some panels of its query rows over all the keys they see.
//
// The rows of a KV head are the group x q_len queries that share its keys, ordered query by query
// so that a panel's rows see nearly the same keys. The keys are one sequence: the kept past in
// ascending order, then the chunk; it is walked in blocks of tuning::block_keys, counted from its
// beginning, and each block is packed once for all panels of the task. A row's arithmetic is
// therefore the same whatever the number of tasks and of threads, and whatever the chunk size as
// long as a head has enough panels not to be cut over its keys (partial_rows.hpp).
#pragma once

#include <quoka/attention/key_sequence.hpp>
#include <quoka/attention/partial_rows.hpp>
#include <quoka/core/panel_kernels.hpp>

#include <algorithm>
#include <cassert>

namespace quoka::inline QUOKA_ABI {
namespace detail {

// Scratch of one worker.
template <class T>
struct AttentionScratch {
  Buffer<float> keys, values, weights, queries, out, lane_out;
  Buffer<PacketState> states;
  struct Rows {
    const T* k[tuning::block_keys];
    const T* v[tuning::block_keys];
  } rows[2];  // of this block and the next

  void reserve(Index panels, Index dim, Index v_dim) {
    keys.reserve(ceil_div(tuning::block_keys, tuning::tile_rows) * key_tile_size(dim));
    values.reserve(tuning::block_keys * value_stride(v_dim));
    weights.reserve(round_up(tuning::block_keys, tuning::tile_rows) * tuning::panel_rows);
    queries.reserve(panels * dim * tuning::panel_rows);
    out.reserve(panels * v_dim * tuning::panel_rows);
    lane_out.reserve(2 * v_dim * tuning::panel_rows);
    states.reserve(panels * tuning::tile_packets);
  }
  Index bytes() const {
    return keys.bytes() + values.bytes() + weights.bytes() + queries.bytes() + out.bytes() +
           lane_out.bytes() + states.bytes();
  }
};

// Panels [first_panel, first_panel + panels) of one KV head.
template <class T>
class HeadAttention {
 public:
  HeadAttention(const KeySequence<T>& sequence, Index first_panel, Index panels,
                AttentionScratch<T>& scratch)
      : call_(sequence.call),
        keys_(sequence),
        first_row_(first_panel * tuning::panel_rows),
        panels_(panels),
        s_(scratch) {}

  // All keys; writes the call's output.
  void run() {
    const KeyRange keys = keys_in_sight();
    accumulate(keys.begin, keys.end, true);
    for (Index p = 0; p < panels_; ++p) finish_panel(p);
  }

  // Keys [begin, end) of those in sight, begin at a block; leaves them in `to`.
  void run_part(Index begin, Index end, bool with_sinks, const PartialRows& to) {
    accumulate(begin, end, with_sinks);
    for (Index p = 0; p < panels_; ++p) leave_panel(p, to);
  }

 private:
  KeyRange keys_in_sight() const {
    const Index last_row = std::min(first_row_ + panels_ * tuning::panel_rows, call_.rows()) - 1;
    return keys_.in_sight(query_of(first_row_), query_of(last_row));
  }

  void accumulate(Index block, Index end, bool with_sinks) {
    assert(0 < panels_ && panels_ <= tuning::max_panels_per_task);
    assert(first_row_ < call_.rows());
    for (Index p = 0; p < panels_; ++p) begin_panel(p, with_sinks);
    constexpr Index step = tuning::block_keys;
    const auto count_at = [&](Index at) { return std::clamp<Index>(end - at, 0, step); };
    auto *rows = &s_.rows[0], *next_rows = &s_.rows[1];
    keys_.rows(block, count_at(block), rows->k, rows->v);
    for (; block < end; block += step, std::swap(rows, next_rows)) {
      const Index count = count_at(block), next_count = count_at(block + step);
      pack_keys(rows->k, count, dim(), s_.keys.data());
      const bool finite = pack_values(rows->v, count, call_.v_dim, s_.values.data());
      keys_.rows(block + step, next_count, next_rows->k, next_rows->v);
      RowPrefetch<T> next_k(next_rows->k, next_count, dim()),
          next_v(next_rows->v, next_count, call_.v_dim);
      for (Index p = 0; p < panels_; ++p) {
        next_k.next(ceil_div(next_k.lines(), panels_));
        next_v.next(ceil_div(next_v.lines(), panels_));
        attend(p, block, count, finite);
      }
    }
  }

  Index dim() const { return call_.q.dim(); }
  Index query_of(Index row) const { return row / call_.group; }
  Index head_of(Index row) const { return keys_.kv_head * call_.group + row % call_.group; }
  Index panel_row(Index p) const { return first_row_ + p * tuning::panel_rows; }
  Index panel_count(Index p) const {
    return std::min<Index>(tuning::panel_rows, call_.rows() - panel_row(p));
  }
  float* queries(Index p) const { return s_.queries.data() + p * dim() * tuning::panel_rows; }
  float* out(Index p) const { return s_.out.data() + p * call_.v_dim * tuning::panel_rows; }
  PanelState& state(Index p) const {
    return *reinterpret_cast<PanelState*>(s_.states.data() + p * tuning::tile_packets);
  }

  void begin_panel(Index p, bool with_sinks) {
    const T* rows[tuning::panel_rows];
    alignas(64) float sink[tuning::panel_rows];
    for (Index i = 0; i < panel_count(p); ++i) {
      const Index row = panel_row(p) + i;
      rows[i] = call_.q.row(keys_.b, head_of(row), query_of(row));
    }
    pack_queries<T, tuning::tile_packets>(rows, panel_count(p), dim(), call_.query_scale,
                                          queries(p));
    std::fill_n(out(p), call_.v_dim * tuning::panel_rows, 0.0f);
    for (Index i = 0; i < tuning::panel_rows; ++i)
      sink[i] = with_sinks && i < panel_count(p) ? call_.sink_log2(head_of(panel_row(p) + i))
                                                 : -simd::infinity;
    for (int j = 0; j < tuning::tile_packets; ++j) {
      state(p)[j] = PacketState::identity();
      state(p)[j].admit(simd::load(sink + j * simd::lanes));
    }
  }

  void attend(Index p, Index block, Index count, bool finite_values) {
    const Index first_query = query_of(panel_row(p));
    const Index last_query = query_of(panel_row(p) + panel_count(p) - 1);
    const Index keys = std::min(count, keys_.end_for(last_query) - block);
    if (keys <= 0 || keys_.begin_for(first_query) >= block + keys) return;
    const bool masked =
        keys_.end_for(first_query) < block + keys || keys_.begin_for(last_query) > block;

    float* x = s_.weights.data();
    PanelPackets top;
    for (auto& lane : top) lane = simd::broadcast(-simd::infinity);
    block_logits(s_.keys.data(), queries(p), dim(), keys, x, top);
    PanelMask mask;
    if (call_.cap_log2 != 0.0f) cap_logits(x, keys * tuning::panel_rows, call_.cap_log2);
    if (masked) {
      fill_mask(p, block, keys, mask);
      mask_logits(x, keys, mask);
    }
    if (masked || call_.cap_log2 != 0.0f || keys % tuning::tile_rows != 0)
      block_maximum(x, keys, top);

    PanelPackets factor;
    for (int j = 0; j < tuning::tile_packets; ++j) factor[j] = state(p)[j].raise(top[j]);
    block_weights(x, keys, state(p));
    if (finite_values || !masked)
      block_values(s_.values.data(), call_.v_dim, x, keys, factor, out(p));
    else
      values_lane_by_lane(mask, panel_count(p), x, factor, out(p));
  }

  void fill_mask(Index p, Index block, Index keys, PanelMask& mask) const {
    for (Index i = 0; i < tuning::panel_rows; ++i) {
      const Index query = query_of(panel_row(p) + std::min(i, panel_count(p) - 1));
      mask.first[i] =
          static_cast<float>(std::clamp<Index>(keys_.begin_for(query) - block, 0, keys));
      mask.end[i] = static_cast<float>(std::clamp<Index>(keys_.end_for(query) - block, 0, keys));
    }
  }

  // A masked weight is an exact zero, but zero times NaN is not: where a block holds a NaN or
  // infinite value, each lane takes the keys it sees and no other. Same tiles, same order, same
  // bits.
  void values_lane_by_lane(const PanelMask& mask, Index count, const float* weights,
                           const PanelPackets& factor, float* panel) {
    const Index size = call_.v_dim * tuning::panel_rows;
    float *result = s_.lane_out.data(), *trial = result + size;
    for (Index lane = 0; lane < count; ++lane) {
      const Index first = static_cast<Index>(mask.first[lane]);
      const Index end = std::max(first, static_cast<Index>(mask.end[lane]));
      std::copy_n(panel, size, trial);
      block_values(s_.values.data() + first * value_stride(call_.v_dim), call_.v_dim,
                   weights + first * tuning::panel_rows, end - first, factor, trial);
      for (Index c = 0; c < call_.v_dim; ++c)
        result[c * tuning::panel_rows + lane] = trial[c * tuning::panel_rows + lane];
    }
    for (Index c = 0; c < call_.v_dim; ++c)
      std::copy_n(result + c * tuning::panel_rows, count, panel + c * tuning::panel_rows);
  }

  void finish_panel(Index p) {
    T* rows[tuning::panel_rows];
    PanelPackets inverse;
    for (Index i = 0; i < panel_count(p); ++i) {
      const Index row = panel_row(p) + i;
      rows[i] = call_.out.row(keys_.b, head_of(row), query_of(row));
    }
    for (int j = 0; j < tuning::tile_packets; ++j) inverse[j] = state(p)[j].inverse_sum();
    unpack_outputs(out(p), inverse, call_.v_dim, rows, panel_count(p));
    if (call_.lse.absent()) return;
    for_states(p, [&](Index i, const SoftmaxState<float>& state) {
      const Index row = panel_row(p) + i;
      call_.lse.at(keys_.b, head_of(row), query_of(row)) = lse_nat(state.max, state.sum);
    });
  }

  void leave_panel(Index p, const PartialRows& to) {
    float* rows[tuning::panel_rows];
    PanelPackets one;
    for (Index i = 0; i < panel_count(p); ++i) rows[i] = to.out + (panel_row(p) + i) * call_.v_dim;
    for (auto& lane : one) lane = simd::broadcast(1.0f);
    unpack_outputs(out(p), one, call_.v_dim, rows, panel_count(p));
    for_states(
        p, [&](Index i, const SoftmaxState<float>& state) { to.state[panel_row(p) + i] = state; });
  }

  // f(i, state) for each row i of the panel.
  template <class F>
  void for_states(Index p, F&& f) const {
    alignas(64) float max[tuning::panel_rows], sum[tuning::panel_rows];
    for (int j = 0; j < tuning::tile_packets; ++j) {
      simd::store(max + j * simd::lanes, state(p)[j].max);
      simd::store(sum + j * simd::lanes, state(p)[j].sum);
    }
    for (Index i = 0; i < panel_count(p); ++i) f(i, SoftmaxState<float>{max[i], sum[i]});
  }

  const AttentionCall<T>& call_;
  const KeySequence<T>& keys_;
  Index first_row_, panels_;
  AttentionScratch<T>& s_;
};

}  // namespace detail
}  // namespace quoka::inline QUOKA_ABI
