// Attention of one KV head: some panels of its query rows over all the keys they see.
//
// The rows of a KV head are the group x q_len queries that share its keys, ordered query by query
// so that a panel's rows see nearly the same keys. The keys are one sequence: the kept past in
// ascending order, then the chunk; it is walked in blocks of tuning::block_keys, counted from its
// beginning, and each block is packed once for all panels of the task. A row's arithmetic is
// therefore the same whatever the number of tasks and of threads; in float, and whatever the chunk
// size as long as a head has enough panels not to be cut over its keys (partial_rows.hpp). In fixed
// point the values of a block share their scale, later ones of the chunk included.
#pragma once

#include <quoka/attention/key_sequence.hpp>
#include <quoka/attention/partial_rows.hpp>
#include <quoka/core/fixed_panels.hpp>
#include <quoka/core/panel_kernels.hpp>

#include <algorithm>
#include <cassert>
#include <cstddef>

namespace quoka::inline QUOKA_ABI {
namespace detail {

// Scratch of one worker, for panels of either arithmetic.
template <class T>
struct AttentionScratch {
  Buffer<std::byte> keys, values, queries, weights;  // as the arithmetic packs them
  Buffer<float> logits, out, lane_out, row_factors;
  Buffer<PacketState> states;
  struct Rows {
    const T* k[tuning::block_keys];
    const T* v[tuning::block_keys];
  } rows[2];  // of this block and the next

  template <class Panels>
  void reserve(Panels, Index panels, Index dim, Index v_dim) {
    constexpr Index packed = sizeof(typename Panels::Packed), lane = sizeof(typename Panels::Lane),
                    width = tuning::panel_rows;
    constexpr Index block = round_up(tuning::block_keys, tuning::tile_rows) * width;
    keys.reserve(ceil_div(tuning::block_keys, tuning::tile_rows) *
                 key_tile_size(Panels::steps(dim)) * packed);
    values.reserve(tuning::block_keys * value_stride(v_dim) * packed);
    queries.reserve(panels * Panels::steps(dim) * width * lane);
    logits.reserve(block);
    out.reserve(panels * v_dim * width);
    states.reserve(panels * tuning::tile_packets);
    if constexpr (Panels::in_float) {
      lane_out.reserve(2 * v_dim * width);
    } else {
      weights.reserve(block * lane);
      row_factors.reserve(panels * width);
    }
  }
  Index bytes() const {
    return keys.bytes() + values.bytes() + queries.bytes() + weights.bytes() + logits.bytes() +
           out.bytes() + lane_out.bytes() + row_factors.bytes() + states.bytes();
  }
};

// Panels [first_panel, first_panel + panels) of one KV head, in SinglePanels or FixedPanels.
template <class T, class Panels = SinglePanels>
class HeadAttention {
  using Packed = typename Panels::Packed;
  using Lane = typename Panels::Lane;
  using Block = typename Panels::Block;
  using Factors = typename Panels::Factors;
  using Rows = typename AttentionScratch<T>::Rows;
  static constexpr Index width = tuning::panel_rows;

 public:
  HeadAttention(const KeySequence<T>& sequence, Index first_panel, Index panels,
                AttentionScratch<T>& scratch)
      : call_(sequence.call),
        keys_(sequence),
        first_row_(first_panel * width),
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
    const Index last_row = std::min(first_row_ + panels_ * width, call_.rows()) - 1;
    return keys_.in_sight(query_of(first_row_), query_of(last_row));
  }

  void accumulate(Index block, Index end, bool with_sinks) {
    assert(0 < panels_ && panels_ <= tuning::max_panels_per_task);
    assert(first_row_ < call_.rows());
    for (Index p = 0; p < panels_; ++p) begin_panel(p, with_sinks);
    constexpr Index step = tuning::block_keys;
    // What a block of values is scaled by must not depend on the task: then all of it is packed.
    const Index last = Panels::in_float ? end : keys_.end_for(call_.q.len() - 1);
    const auto count_at = [&](Index at) { return std::clamp<Index>(last - at, 0, step); };
    auto *rows = &s_.rows[0], *next_rows = &s_.rows[1];
    keys_.rows(block, count_at(block), rows->k, rows->v);
    for (; block < end; block += step, std::swap(rows, next_rows)) {
      const Index count = count_at(block), next_count = count_at(block + step);
      const auto packed =
          Panels::pack(rows->k, rows->v, count, dim(), call_.v_dim, keys(), values());
      keys_.rows(block + step, next_count, next_rows->k, next_rows->v);
      RowPrefetch<T> next_k(next_rows->k, next_count, dim()),
          next_v(next_rows->v, next_count, call_.v_dim);
      for (Index p = 0; p < panels_; ++p) {
        next_k.next(ceil_div(next_k.lines(), panels_));
        next_v.next(ceil_div(next_v.lines(), panels_));
        attend(p, block, count, packed, *rows);
      }
    }
  }

  Index dim() const { return call_.q.dim(); }
  Index query_of(Index row) const { return row / call_.group; }
  Index head_of(Index row) const { return keys_.kv_head * call_.group + row % call_.group; }
  Index panel_row(Index p) const { return first_row_ + p * width; }
  Index panel_count(Index p) const { return std::min<Index>(width, call_.rows() - panel_row(p)); }
  Packed* keys() const { return reinterpret_cast<Packed*>(s_.keys.data()); }
  Packed* values() const { return reinterpret_cast<Packed*>(s_.values.data()); }
  Lane* queries(Index p) const {
    return reinterpret_cast<Lane*>(s_.queries.data()) + p * Panels::steps(dim()) * width;
  }
  float* row_factors(Index p) const { return s_.row_factors.data() + p * width; }
  float* out(Index p) const { return s_.out.data() + p * call_.v_dim * width; }
  PanelState& state(Index p) const {
    return *reinterpret_cast<PanelState*>(s_.states.data() + p * tuning::tile_packets);
  }

  void begin_panel(Index p, bool with_sinks) {
    const T* rows[width];
    alignas(64) float sink[width];
    query_rows(p, rows);
    Panels::pack_rows(rows, panel_count(p), dim(), call_.query_scale, queries(p), row_factors(p));
    std::fill_n(out(p), call_.v_dim * width, 0.0f);
    for (Index i = 0; i < width; ++i)
      sink[i] = with_sinks && i < panel_count(p) ? call_.sink_log2(head_of(panel_row(p) + i))
                                                 : -simd::infinity;
    for (int j = 0; j < tuning::tile_packets; ++j) {
      state(p)[j] = PacketState::identity();
      state(p)[j].admit(simd::load(sink + j * simd::lanes));
    }
  }

  void query_rows(Index p, const T* (&rows)[width]) const {
    for (Index i = 0; i < panel_count(p); ++i) {
      const Index row = panel_row(p) + i;
      rows[i] = call_.q.row(keys_.b, head_of(row), query_of(row));
    }
  }

  void attend(Index p, Index block, Index count, const Block& packed, const Rows& rows) {
    const Index first_query = query_of(panel_row(p));
    const Index last_query = query_of(panel_row(p) + panel_count(p) - 1);
    const Index keys = std::min(count, keys_.end_for(last_query) - block);
    if (keys <= 0 || keys_.begin_for(first_query) >= block + keys) return;
    const bool masked =
        keys_.end_for(first_query) < block + keys || keys_.begin_for(last_query) > block;

    float* const x = s_.logits.data();
    PanelPackets top;
    for (auto& lane : top) lane = simd::broadcast(-simd::infinity);
    Panels::logits(packed, this->keys(), queries(p), row_factors(p), dim(), keys, x, top);
    bool exceptions = false;
    if constexpr (!Panels::in_float) exceptions = logits_left(p, packed, rows, keys, x);
    PanelMask mask;
    if (call_.cap_log2 != 0.0f) cap_logits(x, keys * width, call_.cap_log2);
    if (masked) {
      fill_mask(p, block, keys, mask);
      mask_logits(x, keys, mask);
    }
    if (masked || exceptions || call_.cap_log2 != 0.0f || keys % tuning::tile_rows != 0)
      block_maximum(x, keys, top);

    Factors factors;
    const Lane* const weights = Panels::softmax(x, keys, top, state(p), factors,
                                                reinterpret_cast<Lane*>(s_.weights.data()));
    if constexpr (Panels::in_float) {
      if (!packed.finite_values && masked)
        return values_lane_by_lane(mask, panel_count(p), packed, weights, factors, out(p));
    }
    Panels::values(packed, values(), call_.v_dim, weights, keys, factors, out(p));
    if constexpr (!Panels::in_float) {
      if (exceptions) admit_not_finite(x, keys, state(p));
      if (!packed.all_values) values_left(masked, mask, packed, rows, keys, state(p), out(p));
    }
  }

  // Logits of the keys and queries that integers cannot hold, in float. Returns whether there are
  // any.
  bool logits_left(Index p, const Block& packed, const Rows& rows, Index keys, float* x) const {
    if (packed.all_keys && all_held(row_factors(p))) return false;
    const T* queries[width];
    query_rows(p, queries);
    logits_in_float(rows.k, packed.key_factors, keys, queries, row_factors(p), panel_count(p),
                    dim(), call_.query_scale, x);
    return true;
  }

  // Channels of values likewise: each lane takes the keys it sees.
  void values_left(bool masked, const PanelMask& mask, const Block& packed, const Rows& rows,
                   Index keys, const PanelState& state, float* panel) const {
    const auto sees = [&](Index key, Index lane) {
      const float at = static_cast<float>(key);
      return !masked || (mask.first[lane] <= at && at < mask.end[lane]);
    };
    values_in_float(rows.v, packed.apart, keys, call_.v_dim, s_.logits.data(), state, sees, panel);
  }

  void fill_mask(Index p, Index block, Index keys, PanelMask& mask) const {
    for (Index i = 0; i < width; ++i) {
      const Index query = query_of(panel_row(p) + std::min(i, panel_count(p) - 1));
      mask.first[i] =
          static_cast<float>(std::clamp<Index>(keys_.begin_for(query) - block, 0, keys));
      mask.end[i] = static_cast<float>(std::clamp<Index>(keys_.end_for(query) - block, 0, keys));
    }
  }

  // A masked weight is an exact zero, but zero times NaN is not: where a block holds a NaN or
  // infinite value, each lane takes the keys it sees and no other. Same tiles, same order, same
  // bits.
  void values_lane_by_lane(const PanelMask& mask, Index count, const Block& packed,
                           const Lane* weights, const Factors& factors, float* panel) {
    const Index size = call_.v_dim * width;
    float *result = s_.lane_out.data(), *trial = result + size;
    for (Index lane = 0; lane < count; ++lane) {
      const Index first = static_cast<Index>(mask.first[lane]);
      const Index end = std::max(first, static_cast<Index>(mask.end[lane]));
      std::copy_n(panel, size, trial);
      Panels::values(packed, values() + first * value_stride(call_.v_dim), call_.v_dim,
                     weights + first * width, end - first, factors, trial);
      for (Index c = 0; c < call_.v_dim; ++c) result[c * width + lane] = trial[c * width + lane];
    }
    for (Index c = 0; c < call_.v_dim; ++c)
      std::copy_n(result + c * width, count, panel + c * width);
  }

  void finish_panel(Index p) {
    T* rows[width];
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
    float* rows[width];
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
    alignas(64) float max[width], sum[width];
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
