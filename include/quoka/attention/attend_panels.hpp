// Attention of some panels of one KV head's query rows: the loop over keys around the kernels of an arithmetic.
//
//   rows      of a KV head, query by query, so that a panel's rows see nearly the same keys; packed once for all keys
//   keys      one sequence (key_sequence.hpp), in blocks of the arithmetic's size, counted from its beginning
//   a block   is packed once for all panels here, or once for all workers of the head (SharedBlocks), while the rows of
//             the next one are prefetched; then each panel is multiplied by it: logits, softmax, values
//   a part    of many keys is attended to from an empty softmax on, and joins those before it: by the worker that walks
//             one after the other (attend_panels), or from as many workers (attend_part, join_parts)
//
// A row's arithmetic is therefore the same whatever the number of tasks and of threads; in float, and whatever the
// chunk size, as long as parts have the same size.
#pragma once

#include <quoka/attention/key_sequence.hpp>
#include <quoka/attention/logit_bias.hpp>
#include <quoka/kernels/panel_arithmetic.hpp>

#include <algorithm>
#include <cassert>
#include <cstddef>
#include <cstdint>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// ---- memory -------------------------------------------------------------------------------------

// The state of panels of queries: unnormalised outputs, softmax states, and which of seen_keys and seen_unrotated hold.
struct PanelSums {
  PanelSums() = default;
  PanelSums(Arena& arena, const AttentionCall& call, Index panels)
      : size(call.arithmetic->sum_rows(call.v_dim) * tuning::panel_rows),
        out(arena.take<float>(panels * size)),
        states(arena.take<PanelState>(panels)),
        seen(arena.take<std::uint8_t>(panels)) {}
  // The part from panel p on.
  PanelSums from(Index p) const {
    PanelSums rest = *this;
    rest.out += p * size, rest.states += p, rest.seen += p;
    return rest;
  }

  Index size = 0;  // floats of a panel
  float* out = nullptr;
  PanelState* states = nullptr;
  std::uint8_t* seen = nullptr;
};

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
struct HeadScratch {
  static constexpr Index width = tuning::panel_rows;

  // in_parts: several parts of the keys are attended to, one after the other.
  HeadScratch(Arena& arena, const AttentionCall& call, Index panels, bool in_parts = false)
      : queries(arena.take<std::byte>(panels * call.arithmetic->query_bytes(call.q.dim()))),
        row_factors(arena.take<float>(panels * width)),
        sums(arena, call, panels),
        part_sums(arena, call, in_parts ? panels : 0),
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

  std::byte* queries;         // [panels], as the arithmetic packs them
  float* row_factors;         // [panels][panel_rows]
  PanelSums sums, part_sums;  // of the first part of the keys and those joined to it; of the next
  std::byte *keys, *values;   // a block, as the arithmetic packs it
  float *mixed_k, *mixed_v;   // the one block of two formats, widened
  float *query_rows, *out_rows;  // [panel_rows][dim] as floats
  float* bias;                   // [block_keys][panel_rows] to logits
  float* mask_row;               // of one query and a block
  BlockRows k[2], v[2];          // of this block and the next
  PackedBlock packed;
  PanelScratch panel;
};

// ---- one item -----------------------------------------------------------------------------------

// Panels [first_panel, first_panel + panels) of one KV head.
class PanelAttention {
  static constexpr Index width = tuning::panel_rows;

 public:
  PanelAttention(const KeySequence& keys, Index first_panel, Index panels, HeadScratch& scratch)
      : call_(keys.call()),
        arithmetic_(*call_.arithmetic),
        keys_(keys),
        first_row_(first_panel * width),
        panels_(panels),
        s_(scratch) {}

  // Keys that some row of these panels sees.
  KeyRange in_sight() const { return keys_.in_sight(query_of(first_row_), query_of(last_row())); }

  // First the queries, once for all keys.
  void pack_queries() {
    for (Index p = 0; p < panels_; ++p) pack_panel(p);
  }
  // Nothing was seen.
  void clear(const PanelSums& sums, bool with_sinks) {
    for (Index p = 0; p < panels_; ++p) clear_panel(p, sums, with_sinks);
  }
  // Then keys [range), from the beginning of a block on, each block for each panel. shared: blocks that are packed,
  // from key `first_shared` on; null: none are. Rows before `end` are asked for ahead.
  void attend(const KeyRange& range, Index end, const SharedBlocks* shared, Index first_shared,
              const PanelSums& sums) {
    const ArithmeticScope scope(arithmetic_, s_.panel);
    const Index step = call_.block_keys();
    Index found = -1;  // the first key of the rows in k[at] and v[at]
    int at = 0;
    for (KeyRange keys{range.begin, range.begin}; keys.begin < range.end; keys.begin = keys.end) {
      keys.end = std::min(keys.begin + step, range.end);
      if (!shows(keys)) continue;
      const PackedBlock* block = &s_.packed;
      const KeyRange next{keys.end, std::min(keys.end + step, end)};
      s_.panel.prefetch = {};
      if (shared != nullptr) {
        const SharedBlocks::Block* const blocks =
            shared->blocks + (keys.begin - first_shared) / step;
        block = &blocks->packed;
        if (next.count() > 0) s_.panel.prefetch = prefetch(blocks[1].packed);
      } else {
        if (found != keys.begin) find(keys, at);
        pack(keys, at);
        if (next.count() > 0) {
          at = 1 - at, found = next.begin;
          find(next, at);
          s_.panel.prefetch = {s_.k[at].prefetch(), s_.v[at].prefetch(), panels_};
        }
      }
      for (Index p = 0; p < panels_; ++p) {
        s_.panel.prefetch.begin_panel();
        fold(p, keys, *block, sums);
        s_.panel.prefetch.end_panel();
      }
    }
  }
  // Merges `other`, what panel p has seen of other keys, into its state. If it has seen none of them, no bit changes.
  void join(Index p, const PanelSums& sums, const PanelSums& other) {
    const std::uint8_t seen = *other.seen;
    if (seen == 0) return;
    constexpr int packets = tuning::tile_packets;
    const Panel to = panel(p, sums);
    const Index rows = arithmetic_.sum_rows(call_.v_dim),
                unrotated = arithmetic_.first_unrotated(call_.v_dim);
    simd::Packet own[packets], factor[packets];
    for (int j = 0; j < packets; ++j) {
      const auto factors = to.state[j].merge((*other.states)[j]);
      own[j] = factors.self, factor[j] = factors.other;
    }
    const auto add_rows = [&](Index begin, Index end) {
      for (Index i = begin * width; i < end * width; i += width) {
        const float* const from = other.out + i;
        simd::prefetch(from + 4 * width), simd::prefetch(from + 5 * width - simd::lanes);
        simd::unroll<packets>([&](auto j) QUOKA_INLINE_LAMBDA {
          float* const x = to.out + i + j * simd::lanes;
          const simd::Packet added = simd::mul(simd::load(from + j * simd::lanes), factor[j]);
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
  // Last, what was seen becomes the call's output.
  void finish(const PanelSums& sums) {
    for (Index p = 0; p < panels_; ++p) finish_panel(p, sums);
  }

  // For lists of each query: a block of keys of which panel p sees what `visible` says; `first`: of this panel. Its
  // queries are packed then, and nothing was seen. Between enter() and leave() of the arithmetic.
  void attend_gathered(Index p, const PackedBlock& block, const VisibleKeys& visible, bool first) {
    if (first) pack_panel(p), clear_panel(p, s_.sums, false);
    s_.sums.seen[p] |= seen_keys;
    arithmetic_.attend(block, panel(p, s_.sums), visible, s_.panel);
  }
  // The state of panel p: states[rows] and sums [rows][v_dim].
  void unpack(Index p, SoftmaxState<float>* states, float* sums) {
    turn_back(p, s_.sums);
    float* rows[width];
    PanelPackets one;
    for (Index i = 0; i < panel_count(p); ++i) rows[i] = sums + i * call_.v_dim;
    for (auto& lane : one) lane = simd::broadcast(1.0f);
    unpack_outputs(panel(p, s_.sums).out, one, call_.v_dim, rows, panel_count(p));
    for_states(p, s_.sums, [&](Index i, const SoftmaxState<float>& state) { states[i] = state; });
  }

 private:
  Index query_of(Index row) const { return row / call_.group; }
  QueryRow query_row(Index p, Index i) const {
    return call_.query_row(keys_.kv_head(), panel_row(p) + i);
  }
  Index last_row() const { return std::min(first_row_ + panels_ * width, call_.rows()) - 1; }
  Index panel_row(Index p) const { return first_row_ + p * width; }
  Index panel_count(Index p) const { return std::min<Index>(width, call_.rows() - panel_row(p)); }
  Panel panel(Index p, const PanelSums& sums) const {
    float* const out = sums.out + p * sums.size;
    return {.queries = s_.queries + p * arithmetic_.query_bytes(call_.q.dim()),
            .row_factors = s_.row_factors + p * width,
            .state = sums.states[p],
            .out = out,
            .unrotated = out + arithmetic_.first_unrotated(call_.v_dim) * width,
            .seen = sums.seen[p],
            .rows = panel_count(p),
            .source = {this, p, [](const void* owner, Index panel, const float** rows) {
                         static_cast<const PanelAttention*>(owner)->query_rows(panel, rows);
                       }}};
  }

  void pack_panel(Index p) {
    const float* rows[width];
    query_rows(p, rows);
    const Panel to = panel(p, s_.sums);
    arithmetic_.pack_queries(rows, to.rows, call_.q.dim(), call_.logits.scale, to);
  }
  void query_rows(Index p, const float** rows) const {
    const Format& format = call_.q.format();
    for (Index i = 0; i < panel_count(p); ++i) {
      const QueryRow row = query_row(p, i);
      const ConstRow stored = call_.q.row(keys_.b(), row.q_head, row.query);
      float* const widened = s_.query_rows + i * call_.q.dim();
      if (!format.is_float) format.widen(stored, call_.q.shape(row.q_head), widened);
      rows[i] = format.is_float ? reinterpret_cast<const float*>(stored) : widened;
    }
  }
  void clear_panel(Index p, const PanelSums& sums, bool with_sinks) {
    alignas(64) float sink[width];
    const Panel to = panel(p, sums);
    to.seen = 0;
    const Index unrotated = arithmetic_.first_unrotated(call_.v_dim);
    std::fill_n(to.out, (unrotated > 0 ? unrotated : arithmetic_.sum_rows(call_.v_dim)) * width,
                0.0f);
    for (Index i = 0; i < width; ++i)
      sink[i] = with_sinks && i < to.rows ? call_.sink(query_row(p, i).q_head) : -simd::infinity;
    for (int j = 0; j < tuning::tile_packets; ++j) {
      to.state[j] = PacketState::identity();
      to.state[j].update(simd::load(sink + j * simd::lanes));
    }
  }

  void find(const KeyRange& keys, int at) {
    keys_.find_keys(keys, s_.mixed_k, s_.k[at]);
    keys_.find_values(keys, s_.mixed_v, s_.v[at]);
  }
  void pack(const KeyRange& keys, int at) {
    PackedBlock& to = s_.packed;
    to.k = &s_.k[at], to.v = &s_.v[at], to.masked = keys_.masks(keys);
    to.keys = s_.keys, to.values = s_.values;
    arithmetic_.pack(to);
  }
  BlockPrefetch prefetch(const PackedBlock& block) const {
    return {{&block.keys, 1, arithmetic_.key_bytes(call_.q.dim())},
            {&block.values, 1, arithmetic_.value_bytes(call_.v_dim)},
            panels_};
  }
  // Does the mask show a query of these panels one of the keys? A window or documents given as a mask hide most blocks
  // of a long chunk from most of its queries.
  bool shows(const KeyRange& keys) const {
    return !keys_.masks(keys) || keys_.shows(query_of(first_row_), query_of(last_row()), keys);
  }

  // Softmax and values of one block, as panel p sees it.
  void fold(Index p, const KeyRange& keys, const PackedBlock& block, const PanelSums& sums) {
    const Index first_query = query_of(panel_row(p));
    const Index last_query = query_of(panel_row(p) + panel_count(p) - 1);
    const KeyRange seen{keys.begin, std::min(keys.end, keys_.end_for(last_query))};
    if (seen.count() <= 0 || keys_.begin_for(first_query) >= seen.end) return;
    if (block.masked && !keys_.shows(first_query, last_query, seen)) return;
    sums.seen[p] |= seen_keys;
    const bool masked =
        keys_.end_for(first_query) < seen.end || keys_.begin_for(last_query) > seen.begin;
    PanelMask mask;
    if (masked) fill_mask(p, seen, mask);
    const bool biased = block.masked || call_.biased_everywhere();
    if (biased) fill_bias(p, seen, block.masked);
    arithmetic_.attend(block, panel(p, sums),
                       {.count = seen.count(),
                        .mask = masked ? &mask : nullptr,
                        .bias = biased ? s_.bias : nullptr,
                        .rule = call_.logits},
                       s_.panel);
  }
  // Adds the biases of these keys to their logits.
  void fill_bias(Index p, const KeyRange& keys, bool masked) const {
    std::fill_n(s_.bias, keys.count() * width, 0.0f);
    LogitBias bias(call_, SequenceKeys{keys_, keys.begin, keys.count()},
                   masked ? s_.mask_row : nullptr);
    bias.add(keys_.kv_head(), panel_row(p), panel_count(p), s_.bias, width);
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

  // Rotated sums, where the arithmetic has such, to those of values.
  void turn_back(Index p, const PanelSums& sums) const {
    const Panel of = panel(p, sums);
    if (of.seen != 0) arithmetic_.finish(of, call_.v_dim);
  }
  void finish_panel(Index p, const PanelSums& sums) {
    turn_back(p, sums);
    const bool in_place = call_.out.format().is_float;
    std::byte* stored[width];
    float* rows[width];
    PanelPackets inverse;
    for (Index i = 0; i < panel_count(p); ++i) {
      const QueryRow row = query_row(p, i);
      stored[i] = call_.out.row(keys_.b(), row.q_head, row.query);
      rows[i] = in_place ? reinterpret_cast<float*>(stored[i]) : s_.out_rows + i * call_.v_dim;
    }
    for (int j = 0; j < tuning::tile_packets; ++j) inverse[j] = sums.states[p][j].inverse_sum();
    unpack_outputs(panel(p, sums).out, inverse, call_.v_dim, rows, panel_count(p));
    for (Index i = 0; !in_place && i < panel_count(p); ++i)
      call_.out.format().narrow(rows[i], call_.out.shape(0), stored[i]);
    if (call_.lse.absent()) return;
    for_states(p, sums, [&](Index i, const SoftmaxState<float>& state) {
      const QueryRow row = query_row(p, i);
      call_.lse.at(keys_.b(), row.q_head, row.query) = lse_nat(state.max, state.sum);
    });
  }
  // f(i, state) for each row i of the panel.
  template <class F>
  void for_states(Index p, const PanelSums& sums, F&& f) const {
    alignas(64) float max[width], sum[width];
    for (int j = 0; j < tuning::tile_packets; ++j) {
      simd::store(max + j * simd::lanes, sums.states[p][j].max);
      simd::store(sum + j * simd::lanes, sums.states[p][j].sum);
    }
    for (Index i = 0; i < panel_count(p); ++i) f(i, SoftmaxState<float>{max[i], sum[i]});
  }

  const AttentionCall& call_;
  const PanelArithmetic& arithmetic_;
  const KeySequence& keys_;
  Index first_row_, panels_;
  HeadScratch& s_;
};

// ---- items --------------------------------------------------------------------------------------

// Panels [first, first + panels) of head b * kv_heads + kv_head over all keys, to the call's output. shared: blocks
// that are packed; null: none are.
inline void attend_panels(const AttentionCall& call, Index head, Index first, Index panels,
                          const SharedBlocks* shared, Arena arena) {
  const KeySequence keys(call, head);
  const KeyParts parts = KeyParts::of_panels(keys, call.panels());
  HeadScratch s(arena, call, panels, parts.count > 1);
  PanelAttention attention(keys, first, panels, s);
  const KeyRange all = attention.in_sight();
  attention.pack_queries();
  attention.clear(s.sums, true);
  for (Index i = 0; i < parts.count; ++i) {
    const KeyRange part = parts.part(i).common(all);
    if (part.count() <= 0) continue;
    if (i > 0) attention.clear(s.part_sums, false);
    attention.attend(part, all.end, shared, parts.all.begin, i > 0 ? s.part_sums : s.sums);
    for (Index p = 0; i > 0 && p < panels; ++p) attention.join(p, s.sums, s.part_sums.from(p));
  }
  attention.finish(s.sums);
}

// The same over part i of the keys. sums: of this part and all panels of the head.
inline void attend_part(const AttentionCall& call, Index head, Index first, Index panels, Index i,
                        const PanelSums& sums, Arena arena) {
  const KeySequence keys(call, head);
  HeadScratch s(arena, call, panels);
  PanelAttention attention(keys, first, panels, s);
  const KeyRange part = KeyParts::of_panels(keys, call.panels()).part(i);
  const PanelSums own = sums.from(first);
  attention.pack_queries();
  attention.clear(own, i == 0);
  attention.attend(part.common(attention.in_sight()), part.end, nullptr, 0, own);
}
// Writes panel p's results of all parts to the call's output. sums: those of all panels, part by part.
inline void join_parts(const AttentionCall& call, Index head, Index p, const PanelSums& sums,
                       Arena arena) {
  const KeySequence keys(call, head);
  HeadScratch scratch(arena, call, 1);
  PanelAttention attention(keys, p, 1, scratch);
  const Index parts = KeyParts::of_panels(keys, call.panels()).count;
  for (Index i = 1; i < parts; ++i)
    attention.join(0, sums.from(p), sums.from(i * call.panels() + p));
  attention.finish(sums.from(p));
}

// Block i of a head's keys, or of its values.
inline void pack_shared(const AttentionCall& call, Index head, Index i, bool values,
                        const SharedBlocks& shared, Arena arena) {
  const KeySequence sequence(call, head);
  const KeyRange all = sequence.in_sight();
  const Index begin = all.begin + i * call.block_keys();
  const KeyRange keys{begin, std::min(begin + call.block_keys(), all.end)};
  if (keys.count() <= 0) return;
  HeadScratch scratch(arena, call, 0);
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
