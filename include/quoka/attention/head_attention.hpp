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
#include <quoka/attention/packed_blocks.hpp>
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

  // All keys, in parts of part_keys; writes the call's output.
  void run(Index part_keys) {
    const KeyRange keys = in_sight();
    pack_panels();
    accumulate(keys.begin, keys.end, part_keys, true);
    for (Index p = 0; p < panels_; ++p) finish_panel(p);
  }

  // Keys [begin, end) of those in sight, begin at a block; leaves them in `to`.
  void run_part(Index begin, Index end, bool with_sinks, const PartialRows& to) {
    pack_panels();
    accumulate(begin, end, std::numeric_limits<Index>::max(), with_sinks);
    for (Index p = 0; p < panels_; ++p) keep_partial(p, to);
  }

  void pack_panels() {
    for (Index p = 0; p < panels_; ++p) pack_panel(p);
  }
  // Part `part` of the keys, once panels are packed.
  void run_part(Index part, Index part_keys) {
    const KeyRange keys = in_sight();
    const Index end = std::min(keys.end, (part + 1) * part_keys);
    accumulate(std::max(keys.begin, part * part_keys), end, std::numeric_limits<Index>::max(),
               part == 0);
  }
  // What was seen of the later parts joins the first one's, which this has; writes the call's output.
  void join_parts(const PanelSums* parts, Index count) {
    for (Index p = 0; p < panels_; ++p) {
      for (Index part = 1; part < count; ++part) join(p, parts[part], first_in_sums_);
      finish_panel(p);
    }
  }

  // Packs the keys, or the values, of the block that begins at `block`, for all rows of the head.
  void pack_keys(Index block, KeptBlock& to) const {
    const Index count = count_of(block);
    const ArithmeticScope scope(arithmetic_, s_.panel);
    keys_.k_rows(block, count, to.mixed.k, to.rows);
    to.rows.describe_keys(call_, count, to.packed);
    if (const PackedBlock* const packed = packed_at(block)) {
      to.packed.take_keys(*packed);
    } else {
      ask_for(to.rows.k, count, to.rows.k_bytes());
      to.packed.keys = to.keys.data();
      arithmetic_.pack_keys(to.packed);
    }
    to.masks = keys_.masked(block, count);
  }
  void pack_values(Index block, KeptBlock& to) const {
    const Index count = count_of(block);
    const ArithmeticScope scope(arithmetic_, s_.panel);
    keys_.v_rows(block, count, to.mixed.v, to.rows);
    to.rows.describe_values(call_, to.packed);
    if (const PackedBlock* const packed = packed_at(block)) return to.packed.take_values(*packed);
    ask_for(to.rows.v, count, to.rows.v_bytes());
    PackedBlock packed{};  // another worker may be packing the keys
    packed.count = count;
    to.rows.describe_values(call_, packed);
    packed.values = to.values.data();
    arithmetic_.pack_values(packed);
    to.packed.take_values(packed);
  }
  // Attends to `count` packed blocks, all there are, of which the first begins at `block`; writes the
  // call's output.
  void attend_to(Index block, Index count, const KeptBlock* blocks) {
    const Index bytes[2] = {arithmetic_.key_bytes(call_.q.dim()),
                            arithmetic_.value_bytes(call_.v_dim)};
    pack_panels();
    for (Index p = 0; p < panels_; ++p) clear_panel(p, true);
    s_.panel.next = {};
    {
      const ArithmeticScope scope(arithmetic_, s_.panel);
      for (Index i = 0; i < count; ++i) {
        // The next block is in another worker's cache.
        const std::byte* next[2] = {};
        if (i + 1 < count)
          next[0] = static_cast<const std::byte*>(blocks[i + 1].packed.keys),
          next[1] = static_cast<const std::byte*>(blocks[i + 1].packed.values);
        for (Index p = 0; p < panels_; ++p) {
          for (int of = 0; i + 1 < count && of < 2; ++of)
            for (Index at = p * bytes[of] / panels_; at < (p + 1) * bytes[of] / panels_; at += 64)
              simd::prefetch(next[of] + at);
          attend(p, block + i * call_.block_keys(), blocks[i].packed, blocks[i].masks);
        }
      }
    }
    for (Index p = 0; p < panels_; ++p) finish_panel(p);
  }

 private:
  Index count_of(Index block) const {
    return std::clamp<Index>(keys_.end_for(call_.q.len() - 1) - block, 0, call_.block_keys());
  }
  static void ask_for(const ConstRow* rows, Index count, Index bytes) {
    RowPrefetch all(rows, count, bytes);
    all.next(all.lines());
  }
  // The block of the past that begins there, where it is packed.
  const PackedBlock* packed_at(Index block) const {
    return call_.packed != nullptr ? call_.packed->find(keys_.b(), keys_.kv_head(), block)
                                   : nullptr;
  }
  // What is asked for while panels meet the block before this one.
  NextRows asked_next(Index block, Index count, const BlockRows& rows) const {
    const PackedBlock* const packed = packed_at(block);
    if (packed == nullptr)
      return {{rows.k, count, rows.k_bytes()}, {rows.v, count, rows.v_bytes()}, panels_};
    s_.packed[0] = static_cast<ConstRow>(packed->keys);
    s_.packed[1] = static_cast<ConstRow>(packed->values);
    const Index one = count > 0 ? 1 : 0;
    return {{&s_.packed[0], one, arithmetic_.kept_key_bytes(call_.q.dim())},
            {&s_.packed[1], one, arithmetic_.kept_value_bytes(call_.v_dim)},
            panels_};
  }

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

  KeyRange in_sight() const {
    const Index last_row = std::min(first_row_ + panels_ * width, call_.rows()) - 1;
    return keys_.in_sight(query_of(first_row_), query_of(last_row));
  }

  // Keys [block, end), from block on in parts that begin at multiples of part_keys. The first one has the sinks,
  // whether it has keys or not.
  void accumulate(Index block, Index end, Index part_keys, bool with_sinks) {
    assert(0 < panels_ && panels_ <= tuning::max_panels_per_task);
    assert(first_row_ < call_.rows());
    for (Index p = 0; p < panels_; ++p) clear_panel(p, with_sinks);
    const ArithmeticScope scope(arithmetic_, s_.panel);
    const Index step = call_.block_keys();
    const auto count_at = [&](Index at) { return std::clamp<Index>(end - at, 0, step); };
    BlockRows *rows = &s_.rows[0], *next_rows = &s_.rows[1];
    keys_.rows(block, count_at(block), s_.mixed, *rows);
    PackedBlock packed;
    PanelSums& first = *sums_;
    const Index first_at = first_in_sums_;
    const auto join_first = [&] {
      if (sums_ == &first) return;
      const PanelSums& part = *sums_;
      sums_ = &first, first_in_sums_ = first_at;
      for (Index p = 0; p < panels_; ++p) join(p, part, 0);
    };
    for (Index part = 0; block < end; block += step, std::swap(rows, next_rows)) {
      if (block / part_keys != part) {
        join_first();
        part = block / part_keys, sums_ = &s_.of_part, first_in_sums_ = 0;
        for (Index p = 0; p < panels_; ++p) clear_panel(p, false);
      }
      const Index count = count_at(block), next_count = count_at(block + step);
      rows->describe_keys(call_, count, packed), rows->describe_values(call_, packed);
      if (const PackedBlock* const known = packed_at(block)) {
        packed.take_keys(*known), packed.take_values(*known);
      } else {
        packed.keys = s_.keys.data(), packed.values = s_.values.data();
        arithmetic_.pack(packed);
      }
      keys_.rows(block + step, next_count, s_.mixed, *next_rows);
      s_.panel.next = asked_next(block + step, next_count, *next_rows);
      const bool masks = keys_.masked(block, count);
      for (Index p = 0; p < panels_; ++p) {
        s_.panel.next.begin_panel();
        attend(p, block, packed, masks);
        s_.panel.next.end_panel();
      }
    }
    join_first();
  }

  // What panel p has seen of a part of the keys, `part` from `at` on, joins what it has seen of those before.
  // A part of which it has seen nothing changes no bit.
  void join(Index p, const PanelSums& part, Index at) {
    if (part.seen.data()[at + p] == 0) return;
    constexpr int packets = tuning::tile_packets;
    const Index size = padded_channels(call_.v_dim) * width;
    const Panel to = panel(p);
    const float* const from = part.out.data() + (at + p) * size;
    simd::Packet own[packets], other[packets];
    for (int j = 0; j < packets; ++j) {
      const auto factors = to.state[j].merge(part.states.data()[(at + p) * packets + j]);
      own[j] = factors.self, other[j] = factors.other;
    }
    for (Index i = 0; i < size; i += width) {
      simd::prefetch(from + i + 4 * width), simd::prefetch(from + i + 5 * width - simd::lanes);
      simd::unroll<packets>([&](auto j) QUOKA_INLINE_LAMBDA {
        float* const x = to.out + i + j * simd::lanes;
        const simd::Packet added = simd::mul(simd::load(from + i + j * simd::lanes), other[j]);
        simd::store(x, simd::fma(simd::load(x), own[j], added));
      });
    }
    sums_->seen.data()[first_in_sums_ + p] = 1;
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
    return {.queries = queries_.panels.data() + at * arithmetic_.query_bytes(call_.q.dim()),
            .row_factors = queries_.row_factors.data() + at * width,
            .state = state(p),
            .out = sums_->out.data() + (first_in_sums_ + p) * padded_channels(call_.v_dim) * width,
            .rows = panel_count(p),
            .source = {this, p, [](const void* owner, Index of, const float** rows) {
                         static_cast<const HeadAttention*>(owner)->query_rows(of, rows);
                       }}};
  }

  void pack_panel(Index p) {
    const float* rows[width];
    query_rows(p, rows);
    const Panel to = panel(p);
    arithmetic_.pack_queries(rows, to.rows, call_.q.dim(), call_.logits.scale, to);
  }
  // Nothing was seen.
  void clear_panel(Index p, bool with_sinks) {
    alignas(64) float sink[width];
    const Panel to = panel(p);
    sums_->seen.data()[first_in_sums_ + p] = 0;
    std::fill_n(to.out, padded_channels(call_.v_dim) * width, 0.0f);
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

  // masks: the mask is of consequence for some row and key of the block.
  void attend(Index p, Index block, const PackedBlock& packed, bool masks) {
    const Index first_query = query_of(panel_row(p));
    const Index last_query = query_of(panel_row(p) + panel_count(p) - 1);
    const Index keys = std::min(packed.count, keys_.end_for(last_query) - block);
    if (keys <= 0 || keys_.begin_for(first_query) >= block + keys) return;
    sums_->seen.data()[first_in_sums_ + p] = 1;
    const bool masked =
        keys_.end_for(first_query) < block + keys || keys_.begin_for(last_query) > block;
    PanelMask mask;
    if (masked) fill_mask(p, block, keys, mask);
    const bool adds = masks || !call_.alibi_slopes.empty();
    if (adds) fill_added(p, block, keys, masks);
    arithmetic_.attend(
        packed, panel(p),
        {keys, masked ? &mask : nullptr, adds ? s_.added.data() : nullptr, call_.logits}, s_.panel);
  }

  // What is added to the logits of `keys` keys from `block` on: the mask's biases and ALiBi.
  void fill_added(Index p, Index block, Index keys, bool masks) const {
    alignas(64) float slope[width], position[width];
    for (Index i = 0; i < width; ++i) {
      const Index row = panel_row(p) + std::min(i, panel_count(p) - 1);
      slope[i] = call_.alibi_slope(head_of(row));
      position[i] = static_cast<float>(query_of(row));
    }
    for (Index key = 0; key < keys; ++key) {
      const simd::Packet at =
          simd::broadcast(static_cast<float>(keys_.position(block + key) - call_.query_position));
      for (Index i = 0; i < width; i += simd::lanes)
        simd::store(s_.added.data() + key * width + i,
                    simd::mul(simd::load(slope + i), simd::sub(at, simd::load(position + i))));
    }
    if (!masks) return;
    Index read_query = -1, read_head = -1;
    for (Index i = 0; i < panel_count(p); ++i) {
      const Index query = query_of(panel_row(p) + i);
      const Index head = call_.mask->heads() > 1 ? head_of(panel_row(p) + i) : 0;
      if (query != read_query || head != read_head)
        keys_.read_mask(head, query, block, keys, s_.mask_row.data());
      read_query = query, read_head = head;
      const float factor = call_.mask_factor(head_of(panel_row(p) + i));
      for (Index key = 0; key < keys; ++key) {
        const float bias = s_.mask_row.data()[key];
        float& to = s_.added.data()[key * width + i];
        to = bias > -simd::infinity ? (bias == 0.0f ? to : to + bias * factor) : -simd::infinity;
      }
    }
  }

  void fill_mask(Index p, Index block, Index keys, PanelMask& mask) const {
    for (Index i = 0; i < width; ++i) {
      const Index query = query_of(panel_row(p) + std::min(i, panel_count(p) - 1));
      mask.first[i] =
          static_cast<float>(std::clamp<Index>(keys_.begin_for(query) - block, 0, keys));
      mask.end[i] = static_cast<float>(std::clamp<Index>(keys_.end_for(query) - block, 0, keys));
    }
  }

  void finish_panel(Index p) {
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

  void keep_partial(Index p, const PartialRows& to) {
    float* rows[width];
    PanelPackets one;
    for (Index i = 0; i < panel_count(p); ++i) rows[i] = to.out + (panel_row(p) + i) * call_.v_dim;
    for (auto& lane : one) lane = simd::broadcast(1.0f);
    unpack_outputs(panel(p).out, one, call_.v_dim, rows, panel_count(p));
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
