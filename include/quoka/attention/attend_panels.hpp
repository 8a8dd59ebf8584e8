// Attention of some panels of one KV head's query rows: the loop over keys around the kernels of an
// arithmetic. It is an item of a plan (plan.hpp): attend_panels(), at the end.
//
//   rows      of a KV head, query by query, so that a panel's rows see nearly the same keys; packed
//             once for all keys
//   keys      one sequence (key_sequence.hpp), in blocks of the arithmetic's size, counted from its
//             beginning
//   a block   is packed once for all panels here, or once for all workers of the head
//             (SharedBlocks). Then each panel is multiplied by it (logits, softmax, values), while
//             the rows of the next block are prefetched
//   a part    of many keys is attended to from an empty softmax on, and joins those before it
//             (parts.hpp): here, one after the other, or from as many workers
//
// So a row's arithmetic does not depend on the number of items or of threads. In float it does not
// depend on the chunk size either, as long as parts have the same size.
#pragma once

#include <quoka/attention/key_sequence.hpp>
#include <quoka/attention/logits.hpp>
#include <quoka/attention/parts.hpp>
#include <quoka/attention/plan.hpp>
#include <quoka/kernels/kernels.hpp>
#include <quoka/kernels/panel_arithmetic.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// Panels [first_panel, first_panel + panels) of head b * kv_heads + kv_head, with the memory of one
// worker that this takes.
class PanelAttention {
 public:
  // joins_parts: several parts of the keys are attended to one after the other, and joined here.
  PanelAttention(Arena& arena, const AttentionCall& call, Index head, Index first_panel,
                 Index panels, bool joins_parts = false)
      : call_(call),
        arithmetic_(*call.arithmetic),
        keys_(call, head),
        rows_(call.rows_of(head, first_panel * width, panels * width)),
        panels_(panels),
        queries_(arena.take<std::byte>(panels * arithmetic_.query_bytes(call.q.dim()))),
        row_factors_(arena.take<float>(panels * width)),
        sum_size_(arithmetic_.sum_rows(call.v_dim) * width),
        sums_(arena.take<float>(panels * sum_size_)),
        states_(arena.take<PanelState>(panels)),
        flags_(arena.take<std::uint8_t>(panels)),
        joined_(arena, joins_parts ? panels * width : width, call.v_dim),
        next_(arena, joins_parts ? panels * width : 0, call.v_dim),
        packed_keys_(arena.take<std::byte>(arithmetic_.key_bytes(call.q.dim()))),
        packed_values_(arena.take<std::byte>(arithmetic_.value_bytes(call.v_dim))),
        mixed_k_(arena.take<float>(call.mixed_k_floats())),
        mixed_v_(arena.take<float>(call.mixed_v_floats())),
        query_rows_(arena.take<float>(call.q.format().is_float ? 0 : width * call.q.dim())),
        bias_(arena.take<float>(call.biased() ? call.block_keys() * width : 0)),
        mask_row_(arena.take<float>(call.biased() ? call.block_keys() : 0)) {
    scratch_.row = arena.take<float>(std::max(call.q.dim(), call.v_dim));
    arithmetic_.take(arena, scratch_, call.v_dim, call.biased());
  }
  PanelAttention(const PanelAttention&) = delete;
  PanelAttention& operator=(const PanelAttention&) = delete;

  const HeadQueries& queries() const { return rows_; }
  // Those of panel p.
  HeadQueries rows_of(Index p) const {
    HeadQueries rows = rows_;
    rows.first += p * width, rows.count = panel_count(p);
    return rows;
  }
  PanelScratch& scratch() { return scratch_; }
  float* bias() const { return bias_; }  // [block_keys][panel_rows], of a block and a panel

  // ---- the steps, in this order ----

  // Packs the queries of all panels, or of panel p, once for all keys.
  void pack_queries() {
    for (Index p = 0; p < panels_; ++p) pack_queries(p);
  }
  void pack_queries(Index p) {
    const float* rows[most_panel_rows];
    query_rows(p, rows);
    const Panel to = panel(p);
    arithmetic_.pack_queries(rows, to.rows, call_.q.dim(), call_.logits.rule.scale, to);
  }
  // Empties panel p: no key was seen, only its sinks, if wanted.
  void clear(Index p, bool with_sinks) {
    alignas(64) float sinks[most_panel_rows];
    const Panel to = panel(p);
    to.seen = 0;
    const Index unrotated = arithmetic_.first_unrotated(call_.v_dim);
    std::fill_n(to.out, (unrotated > 0 ? unrotated : arithmetic_.sum_rows(call_.v_dim)) * width,
                0.0f);
    for (Index i = 0; i < width; ++i)
      sinks[i] =
          with_sinks && i < to.rows ? call_.logits.sink(rows_[p * width + i].q_head) : -infinity;
    begin_rows(sinks, to.state);
  }
  // All panels attend to these keys, block by block, from an empty softmax on. Blocks that the
  // head's items share are packed before, others are here.
  void attend_part(const KeyRange& part, bool with_sinks, const SharedBlocks& shared) {
    for (Index p = 0; p < panels_; ++p) clear(p, with_sinks);
    const KeyRange keys = part.common(range());
    for (KeyRange block{keys.begin, keys.begin}; block.begin < keys.end; block.begin = block.end) {
      block.end = std::min(block.begin + call_.block_keys(), keys.end);
      if (!any_visible(block)) continue;
      const PackedBlock& packed =
          shared.count == 0 ? pack_block(block, keys.end) : shared_block(shared, block, keys.end);
      for (Index p = 0; p < panels_; ++p) attend_block(p, packed, visible_keys(p, block, packed));
    }
  }
  // Panel p attends to keys of a packed block: softmax and values. Meanwhile its share of the next
  // block's rows is prefetched.
  void attend_block(Index p, const PackedBlock& block, const VisibleKeys& visible) {
    scratch_.prefetch.begin_panel();
    if (visible.count > 0) {
      flags_[p] |= seen_keys;
      arithmetic_.multiply_block(block, panel(p), visible, scratch_);
    }
    scratch_.prefetch.end_panel();
  }
  // Writes the partial results of panel p's rows to to[0, rows of the panel).
  void write_partial(Index p, const RowSums& to) {
    // Rotated sums, where the arithmetic has such, to those of values.
    if (flags_[p] != 0) arithmetic_.finish(panel(p), call_.v_dim);
    float* rows[most_panel_rows];
    for (Index i = 0; i < panel_count(p); ++i) {
      rows[i] = to.row(i);
      to.states[i] = {states_[p].max[i], states_[p].sum[i]};
    }
    unpack_outputs(panel(p).out, call_.v_dim, rows, panel_count(p));
  }
  // Those of all panels to to[0, rows).
  void write_partials(const RowSums& to) {
    for (Index p = 0; p < panels_; ++p) write_partial(p, to.from(p * width));
  }
  // The results of a part join those of the parts before it.
  void join_part(bool is_first) {
    write_partials(is_first ? joined_ : next_);
    if (!is_first) join(joined_, next_, rows_.count, call_.v_dim);
  }
  // The last step writes to the call's output: what was joined, or the results of all panels.
  void write_joined() { write_rows(call_, rows_, joined_); }
  void write_output() {
    for (Index p = 0; p < panels_; ++p) {
      write_partial(p, joined_);
      write_rows(call_, rows_of(p), joined_);
    }
  }

  // ---- blocks of keys ----

  // Rows [0, count) of k and v, packed here; the `next` rows after them are prefetched during
  // the panels. All of them may be hidden from some query.
  const PackedBlock& pack_rows(const HeadRows& k, const HeadRows& v, Index count, Index next) {
    const auto find = [](const HeadRows& x, Index first, Index rows, BlockRows& to) {
      x.find(first, rows, to.at);
      to.count = rows, to.format = x.format, to.shape = x.shape;
    };
    find(k, 0, count, k_[0]), find(v, 0, count, v_[0]);
    find(k, count, next, k_[1]), find(v, count, next, v_[1]);
    scratch_.prefetch = {k_[1].prefetch(), v_[1].prefetch(), panels_};
    return pack(k_[0], v_[0], true);
  }

 private:
  const Index width = kernel_sizes().panel_rows;

  const PackedBlock& pack(const BlockRows& k, const BlockRows& v, bool masked) {
    packed_.k = &k, packed_.v = &v, packed_.masked = masked;
    packed_.keys = packed_keys_, packed_.values = packed_values_;
    arithmetic_.pack(packed_);
    return packed_;
  }
  // Packs a block of the sequence; the rows of the next one, up to key `end`, are prefetched.
  const PackedBlock& pack_block(const KeyRange& block, Index end) {
    if (found_ != block.begin) find(block);
    pack(k_[at_], v_[at_], keys_.is_masked(block));
    scratch_.prefetch = {};
    const KeyRange next = after(block, end);
    if (next.count() > 0) {
      at_ = 1 - at_;
      find(next);
      scratch_.prefetch = {k_[at_].prefetch(), v_[at_].prefetch(), panels_};
    }
    return packed_;
  }
  // The addresses of a block's rows.
  void find(const KeyRange& block) {
    keys_.find_keys(block, mixed_k_, k_[at_]);
    keys_.find_values(block, mixed_v_, v_[at_]);
    found_ = block.begin;
  }
  // Or takes a block that was packed for all panels of the head; the next one is prefetched.
  const PackedBlock& shared_block(const SharedBlocks& shared, const KeyRange& block, Index end) {
    const Index first = keys_.range().begin, head = rows_.b * call_.kv_heads + rows_.kv_head;
    const SharedBlocks::Block* const at =
        shared.blocks + head * shared.count + (block.begin - first) / call_.block_keys();
    scratch_.prefetch = {};
    if (after(block, end).count() > 0)
      scratch_.prefetch = {{&at[1].packed.keys, 1, arithmetic_.key_bytes(call_.q.dim())},
                           {&at[1].packed.values, 1, arithmetic_.value_bytes(call_.v_dim)},
                           panels_};
    return at->packed;
  }
  KeyRange after(const KeyRange& block, Index end) const {
    return {block.end, std::min(block.end + call_.block_keys(), end)};
  }

  // ---- what panels see ----

  Index query_of(Index row) const { return (rows_.first + row) / rows_.group; }
  Index panel_count(Index p) const { return std::min<Index>(width, rows_.count - p * width); }
  // Keys that causality and the window leave to some row of these panels.
  KeyRange range() const { return keys_.blocks_of(query_of(0), query_of(rows_.count - 1)); }
  // Does the mask leave one of the keys to a query of these panels? A window or documents given as
  // a mask hide most blocks of a long chunk from most of its queries.
  bool any_visible(const KeyRange& block) const {
    return !keys_.is_masked(block) ||
           keys_.any_visible(query_of(0), query_of(rows_.count - 1), block);
  }
  // The keys of the block that panel p sees; count is 0 if none.
  VisibleKeys visible_keys(Index p, const KeyRange& block, const PackedBlock& packed) {
    const Index first_query = query_of(p * width);
    const Index last_query = query_of(p * width + panel_count(p) - 1);
    const KeyRange of_first = keys_.range_of(first_query), of_last = keys_.range_of(last_query);
    const KeyRange keys{block.begin, std::min(block.end, of_last.end)};
    VisibleKeys to{.count = 0, .ranges = nullptr, .bias = nullptr, .rule = call_.logits.rule};
    if (keys.count() <= 0 || of_first.begin >= keys.end) return to;
    if (packed.masked && !keys_.any_visible(first_query, last_query, keys)) return to;
    to.count = keys.count();
    if (of_first.end < keys.end || of_last.begin > keys.begin)
      fill_ranges(p, keys), to.ranges = &ranges_;
    if (packed.masked || call_.logits.has_distances())
      fill_bias(p, keys, packed.masked), to.bias = bias_;
    return to;
  }
  void fill_ranges(Index p, const KeyRange& keys) {
    Index begins[most_panel_rows], ends[most_panel_rows];
    for (Index i = 0; i < panel_count(p); ++i) {
      const KeyRange range = keys_.range_of(query_of(p * width + i));
      begins[i] = range.begin, ends[i] = range.end;
    }
    find_ranges(begins, ends, panel_count(p), keys, ranges_);
  }
  void fill_bias(Index p, const KeyRange& keys, bool masked) const {
    std::fill_n(bias_, keys.count() * width, 0.0f);
    keys_.for_columns(keys, [&](const Columns& columns, Index i) {
      MaskRow mask_row{masked ? mask_row_ : nullptr};
      call_.logits.add_biases(rows_of(p), columns, bias_ + i * width, width, mask_row);
    });
  }

  // ---- panels ----

  Panel panel(Index p) const {
    float* const out = sums_ + p * sum_size_;
    return {.queries = queries_ + p * arithmetic_.query_bytes(call_.q.dim()),
            .row_factors = row_factors_ + p * width,
            .state = states_[p],
            .out = out,
            .unrotated = out + arithmetic_.first_unrotated(call_.v_dim) * width,
            .seen = flags_[p],
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
      float* const widened = query_rows_ + i * call_.q.dim();
      if (!format.is_float) format.widen(stored, call_.q.shape(row.q_head), widened);
      rows[i] = format.is_float ? reinterpret_cast<const float*>(stored) : widened;
    }
  }

  const AttentionCall& call_;
  const PanelArithmetic& arithmetic_;
  KeySequence keys_;
  HeadQueries rows_;
  Index panels_;

  std::byte* queries_;   // [panels], as the arithmetic packs them
  float* row_factors_;   // [panels][panel_rows]
  Index sum_size_;       // floats of a panel's sums
  float* sums_;          // [panels] of values, unnormalised
  PanelState* states_;   // [panels]
  std::uint8_t* flags_;  // [panels], Panel::seen
  RowSums joined_,
      next_;  // of the parts so far, and of the next one; if there is one part, of a panel
  std::byte *packed_keys_, *packed_values_;  // a block, as the arithmetic packs it
  float *mixed_k_, *mixed_v_;                // the one block of two formats, widened
  float* query_rows_;                        // [panel_rows][head_dim] as floats
  float* bias_;                              // [block_keys][panel_rows] to logits
  float* mask_row_;                          // of one query and a block
  BlockRows k_[2], v_[2];                    // of this block and the next
  Index found_ = -1;                         // the first key of the rows in k_[at_] and v_[at_]
  int at_ = 0;
  PackedBlock packed_;
  LaneRanges ranges_;  // of a block and a panel
  PanelScratch scratch_;
};

// ---- items --------------------------------------------------------------------------------------

inline void attend_panels(const AttendItem& item, Arena& arena) {
  const CallPlan& plan = *item.plan;
  const AttentionCall& call = *plan.call;
  PanelAttention attention(arena, call, item.head, item.first_panel, item.panels, plan.joins_parts);
  if (arena.is_empty()) return;
  const KeyParts parts = KeyParts::of_panels(KeySequence(call, item.head), call.panels());
  const ArithmeticScope scope(*call.arithmetic, attention.scratch());
  const SharedBlocks& shared = plan.shared;
  attention.pack_queries();
  if (plan.parts > 1) {  // one of several parts, which other items join
    attention.attend_part(parts.part(item.part), item.part == 0, shared);
    attention.write_partials(
        plan.partials.part(item.head, item.part).from(attention.queries().first));
  } else if (parts.count > 1) {  // all of them
    for (Index i = 0; i < parts.count; ++i) {
      attention.attend_part(parts.part(i), i == 0, shared);
      attention.join_part(i == 0);
    }
    attention.write_joined();
  } else {
    attention.attend_part(parts.part(0), true, shared);
    attention.write_output();
  }
}

inline void pack_shared(const PackItem& item) {
  const AttentionCall& call = *item.plan->call;
  const SharedBlocks& shared = item.plan->shared;
  const KeySequence sequence(call, item.head);
  const KeyRange all = sequence.range();
  const Index begin = all.begin + item.block * call.block_keys();
  const KeyRange keys{begin, std::min(begin + call.block_keys(), all.end)};
  if (keys.count() <= 0) return;
  PanelScratch scratch;
  const ArithmeticScope scope(*call.arithmetic, scratch);
  const Index which = item.head * shared.count + item.block;
  SharedBlocks::Block& to = shared.blocks[which];
  BlockRows& rows = item.values ? to.v : to.k;
  if (item.values)
    sequence.find_values(keys, shared.mixed_v + item.head * shared.mixed_v_floats, rows);
  else
    sequence.find_keys(keys, shared.mixed_k + item.head * shared.mixed_k_floats, rows);
  RowPrefetch ahead = rows.prefetch();
  ahead.prefetch(ahead.lines());
  if (item.values) {
    to.packed.v = &to.v, to.packed.values = shared.values + which * shared.value_bytes;
    call.arithmetic->pack_values(to.packed);
  } else {
    to.packed.k = &to.k, to.packed.keys = shared.keys + which * shared.key_bytes;
    to.packed.masked = sequence.is_masked(keys);
    call.arithmetic->pack_keys(to.packed);
  }
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
