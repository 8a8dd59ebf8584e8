// Attention of some panels of one KV head's query rows: the loop over keys around the kernels of an arithmetic. It is
// an item of a plan (plan.hpp): attend_panels(), at the end.
//
//   rows      of a KV head, query by query, so that a panel's rows see nearly the same keys; packed once for all keys
//   keys      one sequence (key_sequence.hpp), in blocks of the arithmetic's size, counted from its beginning
//   a block   is packed once for all panels here, or once for all workers of the head (SharedBlocks), while the rows of
//             the next one are prefetched; then each panel is multiplied by it: logits, softmax, values
//   a part    of many keys is attended to from an empty softmax on, and joins those before it (join_rows.hpp): here,
//             one after the other, or from as many workers
//
// A row's arithmetic is therefore the same whatever the number of tasks and of threads; in float, and whatever the
// chunk size, as long as parts have the same size.
#pragma once

#include <quoka/attention/join_rows.hpp>
#include <quoka/attention/key_sequence.hpp>
#include <quoka/attention/logits.hpp>
#include <quoka/kernels/panel_arithmetic.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// ---- memory -------------------------------------------------------------------------------------

// Blocks of a head's keys that are packed once for all of its panels.
struct SharedBlocks {
  struct Block {
    BlockRows k, v;
    PackedBlock packed;
  };

  SharedBlocks() = default;
  SharedBlocks(Arena& arena, const AttentionCall& call, Index count)
      : key_bytes(round_up(call.arithmetic->key_bytes(call.q.dim()), 64)),
        value_bytes(round_up(call.arithmetic->value_bytes(call.v_dim), 64)),
        blocks(arena.take<Block>(count)),
        keys(arena.take<std::byte>(count * key_bytes)),
        values(arena.take<std::byte>(count * value_bytes)),
        mixed_k(arena.take<float>(call.mixed_k_floats())),
        mixed_v(arena.take<float>(call.mixed_v_floats())) {}

  Index key_bytes = 0, value_bytes = 0;
  Block* blocks = nullptr;
  std::byte *keys = nullptr, *values = nullptr;
  float *mixed_k = nullptr, *mixed_v = nullptr;  // the one block of two formats, widened
};

// Memory of one worker for an item of `panels` panels.
struct PanelMemory {
  static constexpr Index width = tuning::panel_rows;

  // walks: several parts of the keys are attended to, one after the other.
  PanelMemory(Arena& arena, const AttentionCall& call, Index panels, bool walks = false)
      : queries(arena.take<std::byte>(panels * call.arithmetic->query_bytes(call.q.dim()))),
        row_factors(arena.take<float>(panels * width)),
        sum_size(call.arithmetic->sum_rows(call.v_dim) * width),
        sums(arena.take<float>(panels * sum_size)),
        states(arena.take<PanelState>(panels)),
        seen(arena.take<std::uint8_t>(panels)),
        joined(arena, walks ? panels * width : 0, call.v_dim),
        next(arena, walks ? panels * width : 0, call.v_dim),
        keys(arena.take<std::byte>(call.arithmetic->key_bytes(call.q.dim()))),
        values(arena.take<std::byte>(call.arithmetic->value_bytes(call.v_dim))),
        mixed_k(arena.take<float>(call.mixed_k_floats())),
        mixed_v(arena.take<float>(call.mixed_v_floats())),
        query_rows(arena.take<float>(call.q.format().is_float ? 0 : width * call.q.dim())),
        out_rows(arena.take<float>(call.out.format().is_float ? 0 : width * call.v_dim)),
        bias(arena.take<float>(call.biased() ? call.block_keys() * width : 0)),
        mask_row(arena.take<float>(call.biased() ? call.block_keys() : 0)) {
    panel.row = arena.take<float>(std::max(call.q.dim(), call.v_dim));
    call.arithmetic->take(arena, panel, call.v_dim, call.biased());
  }

  std::byte* queries;            // [panels], as the arithmetic packs them
  float* row_factors;            // [panels][panel_rows]
  Index sum_size;                // floats of a panel's sums
  float* sums;                   // [panels] of values, unnormalised
  PanelState* states;            // [panels]
  std::uint8_t* seen;            // [panels], Panel::seen
  RowSums joined, next;          // of the parts so far, and of the next one: [panels * panel_rows]
  std::byte *keys, *values;      // a block, as the arithmetic packs it
  float *mixed_k, *mixed_v;      // the one block of two formats, widened
  float *query_rows, *out_rows;  // [panel_rows][dim] as floats
  float* bias;                   // [block_keys][panel_rows] to logits
  float* mask_row;               // of one query and a block
  BlockRows k[2], v[2];          // of this block and the next
  PackedBlock packed;
  PanelMask mask;  // of a block and a panel
  PanelScratch panel;
};

// ---- panels and blocks --------------------------------------------------------------------------

// Panels [first_panel, first_panel + panels) of one KV head.
class PanelAttention {
  static constexpr Index width = tuning::panel_rows;

 public:
  PanelAttention(const KeySequence& keys, Index head, Index first_panel, Index panels,
                 PanelMemory& memory)
      : call_(keys.call()),
        arithmetic_(*call_.arithmetic),
        keys_(keys),
        rows_(call_.rows_of(head, first_panel * width, panels * width)),
        panels_(panels),
        s_(memory) {}

  const HeadQueries& rows() const { return rows_; }
  // The rows of panel p.
  HeadQueries panel_rows(Index p) const {
    HeadQueries rows = rows_;
    rows.first += p * width, rows.count = panel_count(p);
    return rows;
  }
  // Keys that some row of these panels sees.
  KeyRange in_sight() const { return keys_.in_sight(query_of(0), query_of(rows_.count - 1)); }
  // Does the mask show a query of these panels one of the keys? A window or documents given as a mask hide most blocks
  // of a long chunk from most of its queries.
  bool shows(const KeyRange& keys) const {
    return !keys_.masks(keys) || keys_.shows(query_of(0), query_of(rows_.count - 1), keys);
  }

  // The first step: packs the queries of a panel, once for all keys.
  void pack_queries(Index p) {
    const float* rows[width];
    query_rows(p, rows);
    const Panel to = panel(p);
    arithmetic_.pack_queries(rows, to.rows, call_.q.dim(), call_.logits.rule.scale, to);
  }
  // Empties panel p: no key was seen.
  void clear(Index p, bool with_sinks) {
    alignas(64) float sink[width];
    const Panel to = panel(p);
    to.seen = 0;
    const Index unrotated = arithmetic_.first_unrotated(call_.v_dim);
    std::fill_n(to.out, (unrotated > 0 ? unrotated : arithmetic_.sum_rows(call_.v_dim)) * width,
                0.0f);
    for (Index i = 0; i < width; ++i)
      sink[i] = with_sinks && i < to.rows ? call_.logits.sink(rows_[p * width + i].q_head)
                                          : -simd::infinity;
    for (int j = 0; j < tuning::tile_packets; ++j) {
      to.state[j] = PacketState::identity();
      to.state[j].update(simd::load(sink + j * simd::lanes));
    }
  }

  // Packs a block; the rows of the next one, up to key `end`, are prefetched beside the panels.
  const PackedBlock& pack(const KeyRange& keys, Index end) {
    if (found_ != keys.begin) find(keys);
    PackedBlock& to = s_.packed;
    to.k = &s_.k[at_], to.v = &s_.v[at_], to.masked = keys_.masks(keys);
    to.keys = s_.keys, to.values = s_.values;
    arithmetic_.pack(to);
    s_.panel.prefetch = {};
    const KeyRange next = behind(keys, end);
    if (next.count() > 0) {
      at_ = 1 - at_;
      find(next);
      s_.panel.prefetch = {s_.k[at_].prefetch(), s_.v[at_].prefetch(), panels_};
    }
    return to;
  }
  // Or takes a block that was packed for all panels of the head; the next one is prefetched.
  const PackedBlock& packed(const SharedBlocks::Block* block, const KeyRange& keys, Index end) {
    s_.panel.prefetch = {};
    if (behind(keys, end).count() > 0)
      s_.panel.prefetch = {{&block[1].packed.keys, 1, arithmetic_.key_bytes(call_.q.dim())},
                           {&block[1].packed.values, 1, arithmetic_.value_bytes(call_.v_dim)},
                           panels_};
    return block->packed;
  }
  // The keys of the block that panel p sees; count is 0 if none.
  VisibleKeys visible(Index p, const KeyRange& keys, const PackedBlock& block) {
    const Index first_query = query_of(p * width);
    const Index last_query = query_of(p * width + panel_count(p) - 1);
    const KeyRange seen{keys.begin, std::min(keys.end, keys_.end_for(last_query))};
    VisibleKeys to{.count = 0, .mask = nullptr, .bias = nullptr, .rule = call_.logits.rule};
    if (seen.count() <= 0 || keys_.begin_for(first_query) >= seen.end) return to;
    if (block.masked && !keys_.shows(first_query, last_query, seen)) return to;
    to.count = seen.count();
    if (keys_.end_for(first_query) < seen.end || keys_.begin_for(last_query) > seen.begin)
      fill_mask(p, seen), to.mask = &s_.mask;
    if (block.masked || call_.logits.has_distances())
      fill_bias(p, seen, block.masked), to.bias = s_.bias;
    return to;
  }
  // Softmax and values of the block.
  void attend(Index p, const PackedBlock& block, const VisibleKeys& visible) {
    s_.seen[p] |= seen_keys;
    arithmetic_.attend(block, panel(p), visible, s_.panel);
  }

  // Writes the partial results of panel p's rows to to[0, rows of the panel).
  void unpack(Index p, const RowSums& to) {
    turn_back(p);
    float* rows[width];
    PanelPackets one;
    for (Index i = 0; i < panel_count(p); ++i) rows[i] = to.row(i);
    for (auto& lane : one) lane = simd::broadcast(1.0f);
    unpack_outputs(panel(p).out, one, call_.v_dim, rows, panel_count(p));
    for_states(p, [&](Index i, const SoftmaxState<float>& state) { to.states[i] = state; });
  }
  // The last step: writes panel p to the call's output.
  void finish(Index p) {
    turn_back(p);
    const bool in_place = call_.out.format().is_float;
    std::byte* stored[width];
    float* rows[width];
    PanelPackets inverse;
    for (Index i = 0; i < panel_count(p); ++i) {
      const QueryRow row = rows_[p * width + i];
      stored[i] = call_.out.row(rows_.b, row.q_head, row.query);
      rows[i] = in_place ? reinterpret_cast<float*>(stored[i]) : s_.out_rows + i * call_.v_dim;
    }
    for (int j = 0; j < tuning::tile_packets; ++j) inverse[j] = s_.states[p][j].inverse_sum();
    unpack_outputs(panel(p).out, inverse, call_.v_dim, rows, panel_count(p));
    for (Index i = 0; !in_place && i < panel_count(p); ++i)
      call_.out.format().narrow(rows[i], call_.out.shape(0), stored[i]);
    if (call_.lse.absent()) return;
    for_states(p, [&](Index i, const SoftmaxState<float>& state) {
      const QueryRow row = rows_[p * width + i];
      call_.lse.at(rows_.b, row.q_head, row.query) = lse_nat(state.max, state.sum);
    });
  }

 private:
  Index query_of(Index row) const { return (rows_.first + row) / rows_.group; }
  Index panel_count(Index p) const { return std::min<Index>(width, rows_.count - p * width); }
  KeyRange behind(const KeyRange& keys, Index end) const {
    return {keys.end, std::min(keys.end + call_.block_keys(), end)};
  }
  Panel panel(Index p) const {
    float* const out = s_.sums + p * s_.sum_size;
    return {.queries = s_.queries + p * arithmetic_.query_bytes(call_.q.dim()),
            .row_factors = s_.row_factors + p * width,
            .state = s_.states[p],
            .out = out,
            .unrotated = out + arithmetic_.first_unrotated(call_.v_dim) * width,
            .seen = s_.seen[p],
            .rows = panel_count(p),
            .source = {this, p, [](const void* owner, Index panel, const float** rows) {
                         static_cast<const PanelAttention*>(owner)->query_rows(panel, rows);
                       }}};
  }
  void query_rows(Index p, const float** rows) const {
    const Format& format = call_.q.format();
    for (Index i = 0; i < panel_count(p); ++i) {
      const QueryRow row = rows_[p * width + i];
      const ConstRow stored = call_.q.row(rows_.b, row.q_head, row.query);
      float* const widened = s_.query_rows + i * call_.q.dim();
      if (!format.is_float) format.widen(stored, call_.q.shape(row.q_head), widened);
      rows[i] = format.is_float ? reinterpret_cast<const float*>(stored) : widened;
    }
  }

  void find(const KeyRange& keys) {
    keys_.find_keys(keys, s_.mixed_k, s_.k[at_]);
    keys_.find_values(keys, s_.mixed_v, s_.v[at_]);
    found_ = keys.begin;
  }
  // Biases of the logits of these keys, to s_.bias.
  void fill_bias(Index p, const KeyRange& keys, bool masked) const {
    std::fill_n(s_.bias, keys.count() * width, 0.0f);
    keys_.for_columns(keys, [&](const Columns& columns, Index i) {
      MaskRow mask_row{masked ? s_.mask_row : nullptr};
      call_.logits.add_biases(panel_rows(p), columns, s_.bias + i * width, width, mask_row);
    });
  }
  void fill_mask(Index p, const KeyRange& keys) {
    for (Index i = 0; i < width; ++i) {
      const Index query = query_of(p * width + std::min(i, panel_count(p) - 1));
      const auto in_block = [&](Index key) {
        return static_cast<float>(std::clamp<Index>(key - keys.begin, 0, keys.count()));
      };
      s_.mask.first[i] = in_block(keys_.begin_for(query));
      s_.mask.end[i] = in_block(keys_.end_for(query));
    }
  }

  // Rotated sums, where the arithmetic has such, to those of values.
  void turn_back(Index p) const {
    if (s_.seen[p] != 0) arithmetic_.finish(panel(p), call_.v_dim);
  }
  // f(i, state) for each row i of the panel.
  template <class F>
  void for_states(Index p, F&& f) const {
    alignas(64) float max[width], sum[width];
    for (int j = 0; j < tuning::tile_packets; ++j) {
      simd::store(max + j * simd::lanes, s_.states[p][j].max);
      simd::store(sum + j * simd::lanes, s_.states[p][j].sum);
    }
    for (Index i = 0; i < panel_count(p); ++i) f(i, SoftmaxState<float>{max[i], sum[i]});
  }

  const AttentionCall& call_;
  const PanelArithmetic& arithmetic_;
  const KeySequence& keys_;
  HeadQueries rows_;
  Index panels_;
  PanelMemory& s_;
  Index found_ = -1;  // the first key of the rows in k[at] and v[at]
  int at_ = 0;
};

// ---- items --------------------------------------------------------------------------------------

// Panels [first, first + panels) of head b * kv_heads + kv_head: over part `part` of the keys, to partials, or, where
// these have one part, over all keys to the call's output. shared: the head's blocks that are packed; null: none are.
inline void attend_panels(const AttentionCall& call, Index head, Index first, Index panels,
                          Index part, const Partials& partials, const SharedBlocks* shared,
                          Arena arena) {
  const KeySequence keys(call, head);
  const KeyParts parts = KeyParts::of_panels(keys, call.panels());
  const bool walks = partials.parts == 1, joins = walks && parts.count > 1;
  PanelMemory memory(arena, call, panels, joins);
  PanelAttention attention(keys, head, first, panels, memory);
  const KeyRange in_sight = attention.in_sight();
  const ArithmeticScope scope(*call.arithmetic, memory.panel);
  for (Index p = 0; p < panels; ++p) attention.pack_queries(p);
  for (Index i = walks ? 0 : part, end = walks ? parts.count : part + 1; i < end; ++i) {
    for (Index p = 0; p < panels; ++p) attention.clear(p, i == 0);
    const KeyRange range = parts.part(i).common(in_sight);
    for (KeyRange block{range.begin, range.begin}; block.begin < range.end;
         block.begin = block.end) {
      block.end = std::min(block.begin + call.block_keys(), range.end);
      if (!attention.shows(block)) continue;
      const PackedBlock& packed =
          shared == nullptr ? attention.pack(block, range.end)
                            : attention.packed(shared->blocks + (block.begin - parts.all.begin) /
                                                                    call.block_keys(),
                                               block, range.end);
      for (Index p = 0; p < panels; ++p) {
        memory.panel.prefetch.begin_panel();
        const VisibleKeys visible = attention.visible(p, block, packed);
        if (visible.count > 0) attention.attend(p, packed, visible);
        memory.panel.prefetch.end_panel();
      }
    }
    if (walks && !joins) continue;
    const RowSums to = !walks   ? partials.part(head, i).from(attention.rows().first)
                       : i == 0 ? memory.joined
                                : memory.next;
    for (Index p = 0; p < panels; ++p) attention.unpack(p, to.from(p * tuning::panel_rows));
    if (i > 0 && walks) join(memory.joined, to, attention.rows().count, call.v_dim);
  }
  if (joins) write(call, attention.rows(), memory.joined);
  for (Index p = 0; p < panels && walks && !joins; ++p) attention.finish(p);
}

// Block i of a head's keys, or of its values.
inline void pack_shared(const AttentionCall& call, Index head, Index i, bool values,
                        const SharedBlocks& shared, Arena arena) {
  const KeySequence sequence(call, head);
  const KeyRange all = sequence.in_sight();
  const Index begin = all.begin + i * call.block_keys();
  const KeyRange keys{begin, std::min(begin + call.block_keys(), all.end)};
  if (keys.count() <= 0) return;
  PanelMemory scratch(arena, call, 0);
  const ArithmeticScope scope(*call.arithmetic, scratch.panel);
  SharedBlocks::Block& to = shared.blocks[i];
  BlockRows& rows = values ? to.v : to.k;
  if (values)
    sequence.find_values(keys, shared.mixed_v, rows);
  else
    sequence.find_keys(keys, shared.mixed_k, rows);
  RowPrefetch ahead = rows.prefetch();
  ahead.prefetch(ahead.lines());
  if (values) {
    to.packed.v = &to.v, to.packed.values = shared.values + i * shared.value_bytes;
    call.arithmetic->pack_values(to.packed);
  } else {
    to.packed.k = &to.k, to.packed.keys = shared.keys + i * shared.key_bytes;
    to.packed.masked = sequence.masks(keys);
    call.arithmetic->pack_keys(to.packed);
  }
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
