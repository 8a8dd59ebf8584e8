// Attention of one KV head: some panels of its query rows over all the keys they see.
//
// The rows of a KV head are the group x q_len queries that share its keys, ordered query by query
// so that a panel's rows see nearly the same keys. The keys are one sequence: the kept past in
// ascending order, then the chunk; it is walked in blocks of the arithmetic's size, counted from its
// beginning, and each block is packed once for all panels of the task. Many keys are walked in parts, each from
// an empty softmax on, which join in their order: so several workers may take one each, and find the same.
// A row's arithmetic is therefore the same whatever the number of tasks and of threads; in float, and
// whatever the chunk size as long as a head has enough panels not to be cut over its keys
// (partial_rows.hpp) and parts have the same size.
#pragma once

#include <quoka/attention/head_scratch.hpp>
#include <quoka/attention/logit_bias.hpp>
#include <quoka/attention/partial_rows.hpp>

#include <algorithm>
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// Panels [first_panel, first_panel + panels) of one KV head.
class HeadAttention {
  static constexpr Index width = tuning::panel_rows;

 public:
  HeadAttention(const KeySequence& keys, Index first_panel, Index panels, HeadScratch& scratch)
      : HeadAttention(keys, first_panel, panels, scratch.queries, 0, scratch.sums, 0, scratch) {}
  // The same with memory for all panels of the head.
  HeadAttention(const KeySequence& keys, Index first_panel, Index panels, PackedQueries& queries,
                PanelSums& sums, HeadScratch& scratch)
      : HeadAttention(keys, first_panel, panels, queries, first_panel, sums, first_panel, scratch) {
  }

  // Keys that some row of these panels sees.
  KeyRange in_sight() const {
    const Index last_row = std::min(first_row_ + panels_ * width, call_.rows()) - 1;
    return keys_.in_sight(query_of(first_row_), query_of(last_row));
  }

  // First their queries, once for all keys.
  [[gnu::noinline]] void pack_panels() {
    for (Index p = 0; p < panels_; ++p) pack_panel(p);
  }
  // Then keys, from the beginning of a block on, in parts that begin at multiples of part_keys: what panels see of
  // these is all that they have seen. The first part has the sinks, whether it has keys or not.
  void attend(KeyBlocks& blocks, const KeyRange& keys, Index part_keys, bool with_sinks) {
    assert(0 < panels_ && panels_ <= tuning::max_panels_per_task);
    assert(first_row_ < call_.rows());
    clear_panels(with_sinks);
    const ArithmeticScope scope(arithmetic_, s_.panel);
    PanelSums& sums = *sums_;
    const Index at = first_in_sums_;
    for (KeyRange part{keys.begin, keys.begin}; part.begin < keys.end; part.begin = part.end) {
      const Index i = part.begin / part_keys;
      part.end = std::min(keys.end, (i + 1) * part_keys);
      if (i > 0) sums_ = &s_.part_sums, first_in_sums_ = 0, clear_panels(false);
      blocks.walk(
          part, panels_, s_.panel.prefetch, [&](const KeyRange& block) { return shows(block); },
          [&](Index p, const KeyRange& block_keys, const PackedBlock& block) {
            fold(p, block_keys, block);
          });
      sums_ = &sums, first_in_sums_ = at;
      for (Index p = 0; i > 0 && p < panels_; ++p) join(p, s_.part_sums, 0);
    }
  }
  static constexpr Index whole = std::numeric_limits<Index>::max();  // part_keys of one part

  // Last one of these. What was seen becomes the call's output,
  void finish() {
    for (Index p = 0; p < panels_; ++p) finish_panel(p);
  }
  // or is kept for a merge,
  void keep(const PartialRows& to) {
    for (Index p = 0; p < panels_; ++p)
      unpack(p, to.state + panel_row(p), to.out + panel_row(p) * call_.v_dim);
  }
  // or, of the first of several parts, is joined by what was seen of the others, and becomes the call's output.
  void join_parts(const PanelSums* parts, Index count) {
    for (Index p = 0; p < panels_; ++p)
      for (Index part = 1; part < count; ++part) join(p, parts[part], first_in_sums_);
    finish();
  }

  // A block of keys of which panel p sees what `visible` says; `first`: of this panel. Its queries are packed then, and
  // nothing was seen. Between enter() and leave() of the arithmetic.
  void attend_listed(Index p, const PackedBlock& block, const VisibleKeys& visible, bool first) {
    if (first) pack_panel(p), clear_panel(p, false);
    sums_->seen.data()[first_in_sums_ + p] |= seen_keys;
    arithmetic_.attend(block, panel(p), visible, s_.panel);
  }
  // What panel p has seen: states[rows] and sums [rows][v_dim].
  void unpack(Index p, SoftmaxState<float>* states, float* sums) {
    turn_back(p);
    float* rows[width];
    PanelPackets one;
    for (Index i = 0; i < panel_count(p); ++i) rows[i] = sums + i * call_.v_dim;
    for (auto& lane : one) lane = simd::broadcast(1.0f);
    unpack_outputs(panel(p).out, one, call_.v_dim, rows, panel_count(p));
    for_states(p, [&](Index i, const SoftmaxState<float>& state) { states[i] = state; });
  }

 private:
  HeadAttention(const KeySequence& keys, Index first_panel, Index panels, PackedQueries& queries,
                Index first_in_queries, PanelSums& sums, Index first_in_sums, HeadScratch& scratch)
      : call_(keys.call()),
        arithmetic_(*call_.arithmetic),
        keys_(keys),
        first_row_(first_panel * width),
        panels_(panels),
        queries_(queries),
        first_in_queries_(first_in_queries),
        sums_(&sums),
        first_in_sums_(first_in_sums),
        s_(scratch) {}

  // What panel p has seen of a part of the keys, `part` from `at` on, joins what it has seen of those before.
  // A part of which it has seen nothing changes no bit.
  void join(Index p, const PanelSums& part, Index at) {
    const std::uint8_t seen = part.seen.data()[at + p];
    if (seen == 0) return;
    constexpr int packets = tuning::tile_packets;
    const Panel to = panel(p);
    const Index rows = arithmetic_.sum_rows(call_.v_dim),
                unrotated = arithmetic_.first_unrotated(call_.v_dim);
    const float* const from = part.out.data() + (at + p) * rows * width;
    simd::Packet own[packets], other[packets];
    for (int j = 0; j < packets; ++j) {
      const auto factors = to.state[j].merge(part.states.data()[(at + p) * packets + j]);
      own[j] = factors.self, other[j] = factors.other;
    }
    const auto add_rows = [&](Index begin, Index end) {
      for (Index i = begin * width; i < end * width; i += width) {
        simd::prefetch(from + i + 4 * width), simd::prefetch(from + i + 5 * width - simd::lanes);
        simd::unroll<packets>([&](auto j) QUOKA_INLINE_LAMBDA {
          float* const x = to.out + i + j * simd::lanes;
          const simd::Packet added = simd::mul(simd::load(from + i + j * simd::lanes), other[j]);
          simd::store(x, simd::fma(simd::load(x), own[j], added));
        });
      }
    };
    add_rows(0, unrotated > 0 ? unrotated : rows);
    if ((seen & seen_unrotated) != 0) {
      arithmetic_.unrotated_sums(to, call_.v_dim);
      add_rows(unrotated, rows);
    } else if ((to.seen & seen_unrotated) != 0) {
      for (Index i = unrotated * width; i < rows * width; i += width)
        for (int j = 0; j < packets; ++j) {
          float* const x = to.out + i + j * simd::lanes;
          simd::store(x, simd::mul(simd::load(x), own[j]));
        }
    }
    to.seen |= seen_keys;
  }
  // Rotated sums, where the arithmetic has such, to those of values.
  void turn_back(Index p) const {
    const Panel of = panel(p);
    if (of.seen != 0) arithmetic_.finish(of, call_.v_dim);
  }

  Index query_of(Index row) const { return row / call_.group; }
  Index head_of(Index row) const { return keys_.kv_head() * call_.group + row % call_.group; }
  Index panel_row(Index p) const { return first_row_ + p * width; }
  Index panel_count(Index p) const { return std::min<Index>(width, call_.rows() - panel_row(p)); }
  PanelState& state(Index p) const {
    return *reinterpret_cast<PanelState*>(sums_->states.data() +
                                          (first_in_sums_ + p) * tuning::tile_packets);
  }
  Panel panel(Index p) const {
    const Index at = first_in_queries_ + p;
    const Index size = arithmetic_.sum_rows(call_.v_dim) * width;
    float* const out = sums_->out.data() + (first_in_sums_ + p) * size;
    return {.queries = queries_.panels.data() + at * arithmetic_.query_bytes(call_.q.dim()),
            .row_factors = queries_.row_factors.data() + at * width,
            .state = state(p),
            .out = out,
            .unrotated = out + arithmetic_.first_unrotated(call_.v_dim) * width,
            .seen = sums_->seen.data()[first_in_sums_ + p],
            .rows = panel_count(p),
            .source = {this, p, [](const void* owner, Index panel, const float** rows) {
                         static_cast<const HeadAttention*>(owner)->query_rows(panel, rows);
                       }}};
  }

  void pack_panel(Index p) {
    const float* rows[width];
    query_rows(p, rows);
    const Panel to = panel(p);
    arithmetic_.pack_queries(rows, to.rows, call_.q.dim(), call_.logits.scale, to);
  }
  // Nothing was seen.
  void clear_panels(bool with_sinks) {
    for (Index p = 0; p < panels_; ++p) clear_panel(p, with_sinks);
  }
  void clear_panel(Index p, bool with_sinks) {
    alignas(64) float sink[width];
    const Panel to = panel(p);
    to.seen = 0;
    const Index unrotated = arithmetic_.first_unrotated(call_.v_dim);
    std::fill_n(to.out, (unrotated > 0 ? unrotated : arithmetic_.sum_rows(call_.v_dim)) * width,
                0.0f);
    for (Index i = 0; i < width; ++i)
      sink[i] =
          with_sinks && i < to.rows ? call_.sink_logit(head_of(panel_row(p) + i)) : -simd::infinity;
    for (int j = 0; j < tuning::tile_packets; ++j) {
      to.state[j] = PacketState::identity();
      to.state[j].admit(simd::load(sink + j * simd::lanes));
    }
  }

  void query_rows(Index p, const float** rows) const {
    ConstRow stored[width];
    for (Index i = 0; i < panel_count(p); ++i) {
      const Index row = panel_row(p) + i;
      stored[i] = call_.q.row(keys_.b(), head_of(row), query_of(row));
    }
    s_.query_rows.read(call_.q.format(), call_.q.shape(0), stored, panel_count(p), rows);
  }

  // Softmax and values of one block, as panel p sees it.
  void fold(Index p, const KeyRange& keys, const PackedBlock& block) {
    const Index first_query = query_of(panel_row(p));
    const Index last_query = query_of(panel_row(p) + panel_count(p) - 1);
    const KeyRange seen{keys.begin, std::min(keys.end, keys_.end_for(last_query))};
    if (seen.count() <= 0 || keys_.begin_for(first_query) >= seen.end) return;
    if (block.masked && !keys_.shows(first_query, last_query, seen)) return;
    sums_->seen.data()[first_in_sums_ + p] |= seen_keys;
    const bool masked =
        keys_.end_for(first_query) < seen.end || keys_.begin_for(last_query) > seen.begin;
    PanelMask mask;
    if (masked) fill_mask(p, seen, mask);
    const bool biased = block.masked || call_.biased_everywhere();
    if (biased) fill_bias(p, seen, block.masked);
    arithmetic_.attend(block, panel(p),
                       {.count = seen.count(),
                        .mask = masked ? &mask : nullptr,
                        .bias = biased ? s_.bias.data() : nullptr,
                        .rule = call_.logits},
                       s_.panel);
  }

  // Does the mask show a query of this task one of these keys? A window or documents given as a mask hide most blocks
  // of a long chunk from most of its queries.
  bool shows(const KeyRange& keys) const {
    if (!keys_.masks(keys)) return true;
    const Index last_row = std::min(first_row_ + panels_ * width, call_.rows()) - 1;
    return keys_.shows(query_of(first_row_), query_of(last_row), keys);
  }

  // What is added to the logits of these keys.
  void fill_bias(Index p, const KeyRange& keys, bool masked) const {
    std::fill_n(s_.bias.data(), keys.count() * width, 0.0f);
    LogitBias bias(call_, SequenceKeys{keys_, keys.begin, keys.count()},
                   masked ? s_.mask_row.data() : nullptr);
    bias.add(keys_.kv_head(), panel_row(p), panel_count(p), s_.bias.data(), width);
  }

  void fill_mask(Index p, const KeyRange& keys, PanelMask& mask) const {
    for (Index i = 0; i < width; ++i) {
      const Index query = query_of(panel_row(p) + std::min(i, panel_count(p) - 1));
      const auto in_block = [&](Index key) {
        return static_cast<float>(std::clamp<Index>(key - keys.begin, 0, keys.count()));
      };
      mask.first[i] = in_block(keys_.begin_for(query));
      mask.end[i] = in_block(keys_.end_for(query));
    }
  }

  void finish_panel(Index p) {
    turn_back(p);
    const bool in_place = call_.out.format().is_float;
    std::byte* stored[width];
    float* rows[width];
    PanelPackets inverse;
    for (Index i = 0; i < panel_count(p); ++i) {
      const Index row = panel_row(p) + i;
      stored[i] = call_.out.row(keys_.b(), head_of(row), query_of(row));
      rows[i] =
          in_place ? reinterpret_cast<float*>(stored[i]) : s_.out_rows.data() + i * call_.v_dim;
    }
    for (int j = 0; j < tuning::tile_packets; ++j) inverse[j] = state(p)[j].inverse_sum();
    unpack_outputs(panel(p).out, inverse, call_.v_dim, rows, panel_count(p));
    for (Index i = 0; !in_place && i < panel_count(p); ++i)
      call_.out.format().narrow(rows[i], call_.out.shape(0), stored[i]);
    if (call_.lse.absent()) return;
    for_states(p, [&](Index i, const SoftmaxState<float>& state) {
      const Index row = panel_row(p) + i;
      call_.lse.at(keys_.b(), head_of(row), query_of(row)) = lse_nat(state.max, state.sum);
    });
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

  const AttentionCall& call_;
  const PanelArithmetic& arithmetic_;
  const KeySequence& keys_;
  Index first_row_, panels_;
  PackedQueries& queries_;
  Index first_in_queries_;
  PanelSums* sums_;
  Index first_in_sums_;
  HeadScratch& s_;
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
