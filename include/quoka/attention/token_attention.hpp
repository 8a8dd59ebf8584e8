// Attention of one token: the few query heads that share a KV head, over a part of its keys.
//
// So few rows use each key for a handful of multiply-adds: a decode step is bound by memory, and
// the panels of head_attention.hpp would leave most lanes idle. Here channels lie across the lanes.
// Logits are dot products, as many at a time as there are lanes, that end in one tree of shuffles;
// weighted values add up row by row. Keys and values are read once, from where they lie and in
// their order, so that the hardware's prefetcher keeps memory busy under the arithmetic.
// 2 * group * keys * (head_dim + v_dim) FLOPs, group / 2 per byte of float K and V. Equal to
// head_attention.hpp up to the order of sums.
//
// Where the heads' rows lie side by side, [len, heads, dim] or in pages, one head alone would read
// 512 bytes out of 4 KiB, at a third of the bandwidth. There heads take turns at a few keys, and then
// at a few values, of one block, while the next ones are asked for in the order of memory:
// attend_together(). The arithmetic is the same.
#pragma once

#include <quoka/base/function_ref.hpp>
#include <quoka/attention/key_sequence.hpp>
#include <quoka/attention/logit_bias.hpp>
#include <quoka/attention/partial_rows.hpp>
#include <quoka/kernels/panel_kernels.hpp>
#include <quoka/kernels/token_weights.hpp>
#include <quoka/packing/token_codes.hpp>
#include <quoka/packing/token_kernels.hpp>

#include <cassert>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// Scratch of one worker.
struct TokenScratch {
  Buffer<float> queries;               // [rows][head_dim], rounded up to whole tiles and packets
  Buffer<float> weights;               // [tiles][keys of a block][rows of a tile]
  Buffer<float> out, block_out;        // [rows][v_dim], rounded up: of all keys, of a block
  Buffer<SoftmaxState<float>> states;  // [rows]
  Buffer<float> factors;               // [rows]
  Buffer<float> padded;                // [keys of a stretch][head_dim or v_dim, rounded up]
  Buffer<float> mask_row;              // [keys of a block]
  Buffer<std::byte> codes;             // [tiles], queries as codes: packing/token_codes.hpp
  bool coded = false;                  // are they?

  void reserve(const AttentionCall& call) {
    const Index block_keys = tuning::token_block_keys;
    const Index rows = round_up(call.group, token_tile_rows(call.group));
    const Index k_width = round_up(call.q.dim(), simd::lanes),
                v_width = round_up(call.v_dim, simd::lanes);
    queries.reserve(rows * k_width);
    weights.reserve(rows * block_keys);
    for (auto* sums : {&out, &block_out}) sums->reserve(rows * v_width);
    states.reserve(rows);
    factors.reserve(rows);
    padded.reserve(std::max(tuning::token_stretch_keys, tuning::token_value_keys) *
                   std::max(k_width, v_width));
    if (call.mask != nullptr) mask_row.reserve(block_keys);
    if (multiplies_codes(call)) codes.reserve(rows / token_code_rows * token_code_bytes(k_width));
  }
  // Are there keys that are multiplied as codes, by queries that may be rounded for it?
  static bool multiplies_codes(const AttentionCall& call) {
    if (!call.codes_queries) return false;
    const auto has = [](const Rows& k) {
      return !k.empty() && k.format().token_code_logits != nullptr;
    };
    return token_tile_rows(call.group) == token_code_rows &&
           (has(call.past_k) || has(call.chunk_k));
  }
  Index bytes() const {
    return bytes_of(queries, weights, out, block_out, states, factors, padded, mask_row, codes);
  }
};

// A token's rows of one KV head over a part of the keys.
class TokenAttention {
 public:
  [[gnu::noinline]] TokenAttention(const KeySequence& keys, TokenScratch& scratch)
      : call_(keys.call()),
        keys_(keys),
        tile_rows_(token_tile_rows(call_.group)),
        rows_(round_up(call_.group, tile_rows_)),
        k_width_(round_up(call_.q.dim(), simd::lanes)),
        v_width_(round_up(call_.v_dim, simd::lanes)),
        s_(scratch) {
    assert(call_.q.len() == 1);
  }

  // First. Rows beyond the group are zero queries; their results are left behind.
  [[gnu::noinline]] void start(bool with_sinks) {
    std::fill_n(s_.queries.data(), rows_ * k_width_, 0.0f);
    std::fill_n(s_.out.data(), rows_ * v_width_, 0.0f);
    std::fill_n(s_.states.data(), rows_, SoftmaxState<float>::identity());
    for (Index r = 0; r < call_.group; ++r) {
      const Index head = keys_.kv_head() * call_.group + r;
      float* const to = s_.queries.data() + r * k_width_;
      call_.read_query(keys_.b(), {head, 0}, to);
      if (with_sinks) s_.states.data()[r].admit(call_.sink_logit(head));
    }
    s_.coded = TokenScratch::multiplies_codes(call_);
    for (Index tile = 0; s_.coded && tile < rows_ / tile_rows_; ++tile)
      s_.coded = code_token_queries(queries(tile), k_width_, codes(tile));
  }
  // Keys [begin, end) of the sequence, all of them in sight.
  [[gnu::noinline]] void attend(Index begin, Index end) {
    assert(begin <= end);
    const Index past = keys_.past_count();
    if (begin < past)
      attend(keys_.past(call_.past_k), keys_.past(call_.past_v), begin, std::min(end, past), 0);
    if (end > past)
      attend(keys_.chunk(call_.chunk_k), keys_.chunk(call_.chunk_v), std::max(begin, past) - past,
             end - past, past);
  }

  // The same in steps, for a block of an unselected past that begins at key `block`: the logits of
  // keys [first, first + count) of the block, then the weights of all `size`, then values likewise. One
  // row of `upcoming` is asked for per key.
  [[gnu::noinline]] void attend_keys(Index block, Index first, Index count, RowWalk& upcoming) {
    multiply_keys(keys_.past(call_.past_k).from(block), first, count, &upcoming);
  }
  void finish_keys(Index block, Index size) {
    softmax(block, size);
    begin_values();
  }
  [[gnu::noinline]] void attend_values(Index block, Index first, Index count, RowWalk& upcoming) {
    add_values(keys_.past(call_.past_v).from(block), first, count, &upcoming);
  }
  void end_block() { end_values(); }

  // Last: writes the group's rows of `to`.
  [[gnu::noinline]] void finish(const PartialRows& to) const {
    for (Index r = 0; r < call_.group; ++r) {
      to.state[r] = s_.states.data()[r];
      std::copy_n(s_.out.data() + r * v_width_, call_.v_dim, to.out + r * call_.v_dim);
    }
  }

 private:
  static constexpr Index most_value_rows = 4;

  float* weights(Index tile) const {
    return s_.weights.data() + tile * tile_rows_ * tuning::token_block_keys;
  }
  const float* queries(Index tile) const {
    return s_.queries.data() + tile * tile_rows_ * k_width_;
  }
  std::byte* codes(Index tile) const { return s_.codes.data() + tile * token_code_bytes(k_width_); }

  // Keys and values [begin, end) of k and v, block by block; their first is key `before`.
  [[gnu::noinline]] void attend(const HeadRows& k, const HeadRows& v, Index begin, Index end,
                                Index before) {
    for (Index at = begin; at < end; at += tuning::token_block_keys) {
      const Index count = std::min(tuning::token_block_keys, end - at);
      const HeadRows keys = k.from(at);
      // Against one row, asking costs more than it brings: tuning.hpp.
      const bool asks = rows_ > 1;
      RowWalk ahead(keys.at, keys.row_bytes(), tuning::token_prefetch_keys, count);
      multiply_keys(keys, 0, count, asks ? &ahead : nullptr);
      softmax(before + at, count);
      const HeadRows values = v.from(at);
      RowWalk values_ahead(values.at, values.row_bytes(), tuning::token_prefetch_keys, count);
      begin_values();
      // The hardware reads ahead in one page alone.
      add_values(values, 0, count, asks || values.at.map.any() ? &values_ahead : nullptr);
      end_values();
    }
  }

  // Rows of one format, each of whole packets.
  struct Packets {
    RowRun rows;
    const Format* format;
    RowShape shape;
  };
  // Rows [first, first + count), each of whole packets: in place, or widened and filled up with
  // zeros.
  Packets whole_packets(const HeadRows& x, Index first, Index count, ConstRow* memory) {
    const Index dim = x.shape.dim, width = round_up(dim, simd::lanes);
    if (width == dim) return {x.at.run(first, count, memory), x.format, x.shape};
    for (Index i = 0; i < count; ++i) {
      float* const to = s_.padded.data() + i * width;
      x.format->widen(x[first + i], x.shape, to);
      std::fill(to + dim, to + width, 0.0f);
    }
    return {{reinterpret_cast<ConstRow>(s_.padded.data()), width * 4}, &float_format(), {width}};
  }

  // Logits of the block's keys [first, first + count); k are its rows.
  [[gnu::noinline]] void multiply_keys(const HeadRows& k, Index first, Index count,
                                       RowWalk* upcoming) {
    const Index stretch = tuning::token_stretch_keys;
    assert(stretch <= RowsAhead::most);
    ConstRow memory[RowsAhead::most];
    for (Index i = first; i < first + count; i += stretch) {
      const Index n = std::min(stretch, first + count - i);
      const Packets keys = whole_packets(k, i, n, memory);
      RowsAhead ahead;
      if (upcoming != nullptr) ahead.take(*upcoming, n);
      for (Index row = 0; row < rows_; row += tile_rows_) {
        const Index tile = row / tile_rows_;
        float* const x = weights(tile) + i * tile_rows_;
        const RowsAhead* const asked = upcoming != nullptr && row == 0 ? &ahead : nullptr;
        if (s_.coded && keys.format->token_code_logits != nullptr)
          keys.format->token_code_logits(keys.rows, n, keys.shape, codes(tile), x, asked);
        else
          keys.format->token_logits(tile_rows_, keys.rows, n, keys.shape, queries(tile), x, asked);
      }
    }
  }

  // The logits of keys [first, first + count) to weights; raises the states.
  [[gnu::noinline]] void softmax(Index first, Index count) {
    const Index padded = round_up(count * tile_rows_, simd::lanes);
    LogitBias bias(call_, SequenceKeys{keys_, first, count},
                   call_.mask != nullptr ? s_.mask_row.data() : nullptr);
    for (Index row = 0; row < rows_; row += tile_rows_) {
      float* const x = weights(row / tile_rows_);
      call_.logits.apply(x, padded);
      if (call_.biased())
        bias.add(keys_.kv_head(), row, std::min(tile_rows_, call_.group - row), x, tile_rows_);
      softmax_tile(x, count, tile_rows_, s_.states.data() + row, s_.factors.data() + row);
    }
  }

  void begin_values() { std::fill_n(s_.block_out.data(), rows_ * v_width_, 0.0f); }
  // Of the block's keys [first, first + count).
  [[gnu::noinline]] void add_values(const HeadRows& v, Index first, Index count,
                                    RowWalk* upcoming) {
    const Index stretch = tuning::token_value_keys;
    assert(stretch <= RowsAhead::most);
    ConstRow memory[RowsAhead::most];
    for (Index i = first; i < first + count; i += stretch) {
      const Index n = std::min(stretch, first + count - i);
      const Packets values = whole_packets(v, i, n, memory);
      RowsAhead ahead;
      if (upcoming != nullptr) ahead.take(*upcoming, n);
      for (Index row = 0; row < call_.group; row += values.format->value_rows)
        add_stretch(values, n, i, row, upcoming != nullptr && row == 0 ? &ahead : nullptr);
    }
  }
  [[gnu::noinline]] void end_values() {
    add_to_rows(s_.factors.data(), s_.block_out.data(), call_.group, v_width_, s_.out.data());
  }

  // Keys [first, first + count) of the block to rows from `row` on, as many as are computed together.
  void add_stretch(const Packets& v, Index count, Index first, Index row,
                   const RowsAhead* upcoming) {
    const auto weight_of = [&](Index r) {
      return weights(r / tile_rows_) + first * tile_rows_ + r % tile_rows_;
    };
    const Index rows = std::min(v.format->value_rows, call_.group - row);
    const float* weight[most_value_rows];
    for (Index r = 0; r < rows; ++r) weight[r] = weight_of(row + r);
    v.format->token_values(v.rows, count, v.shape, weight, tile_rows_, rows,
                           s_.block_out.data() + row * v_width_, upcoming);
  }

  const AttentionCall& call_;
  KeySequence keys_;
  Index tile_rows_, rows_;   // of a tile; of all tiles
  Index k_width_, v_width_;  // channels, rounded up to whole packets
  TokenScratch& s_;
};

// Keys of an unselected past, block by block, by KV heads [first_head, first_head +
// heads) of sequence b in turn; attention_of(i) is the TokenAttention of head first_head + i.
inline void attend_together(const AttentionCall& call, Index b, Index first_head, Index heads,
                            const KeyRange& keys,
                            FunctionRef<TokenAttention(Index i)> attention_of) {
  using Step = void (TokenAttention::*)(Index block, Index first, Index count, RowWalk & upcoming);
  const Index step = tuning::token_together_keys;
  for (Index block = keys.begin; block < keys.end; block += tuning::token_block_keys) {
    const Index size = std::min(tuning::token_block_keys, keys.end - block);
    const auto turns = [&](const Rows& rows, Step attend) {
      // One row is asked for per row that is used, so far ahead.
      RowWalk ahead =
          rows.walk(b, first_head, heads, std::min(block + step, keys.end), block + size);
      for (Index at = 0; at < size; at += step)
        for (Index i = 0; i < heads; ++i)
          (attention_of(i).*attend)(block, at, std::min(step, size - at), ahead);
    };
    turns(call.past_k, &TokenAttention::attend_keys);
    for (Index i = 0; i < heads; ++i) attention_of(i).finish_keys(block, size);
    turns(call.past_v, &TokenAttention::attend_values);
    for (Index i = 0; i < heads; ++i) attention_of(i).end_block();
  }
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
