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
// Where the heads' rows lie side by side, [len, heads, dim], one head alone would read 512 bytes
// out of 4 KiB, at a third of the bandwidth. There heads take turns at small blocks of keys, and
// while they are at a block's keys its values are asked for in the order of memory, then the next
// keys: attend_together().
#pragma once

#include <quoka/attention/key_sequence.hpp>
#include <quoka/attention/partial_rows.hpp>
#include <quoka/kernels/panel_kernels.hpp>
#include <quoka/kernels/token_kernels.hpp>

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

  void reserve(const AttentionCall& call, Index block_keys) {
    const Index rows = round_up(call.group, token_tile_rows(call.group));
    const Index k_width = round_up(call.q.dim(), simd::lanes),
                v_width = round_up(call.v_dim, simd::lanes);
    queries.reserve(rows * k_width);
    weights.reserve(rows * block_keys);
    for (auto* sums : {&out, &block_out}) sums->reserve(rows * v_width);
    states.reserve(rows);
    factors.reserve(rows);
    padded.reserve(tuning::token_stretch_keys * std::max(k_width, v_width));
  }
  Index bytes() const {
    return queries.bytes() + weights.bytes() + out.bytes() + block_out.bytes() + states.bytes() +
           factors.bytes() + padded.bytes();
  }
};

// Rows of one format, each of whole packets.
struct TokenRows {
  RowFinder rows;
  const Format* format;
};

// A token's rows of one KV head over a part of the keys.
class TokenAttention {
 public:
  // block_keys: what the scratch was reserved for.
  TokenAttention(const KeySequence& keys, TokenScratch& scratch, Index block_keys)
      : call_(keys.call()),
        keys_(keys),
        tile_rows_(token_tile_rows(call_.group)),
        rows_(round_up(call_.group, tile_rows_)),
        k_width_(round_up(call_.q.dim(), simd::lanes)),
        v_width_(round_up(call_.v_dim, simd::lanes)),
        block_keys_(block_keys),
        s_(scratch) {
    assert(call_.q.len() == 1);
  }

  // First. Rows beyond the group are zero queries; their results are left behind.
  void start(bool with_sinks) {
    const Index dim = call_.q.dim();
    std::fill_n(s_.queries.data(), rows_ * k_width_, 0.0f);
    std::fill_n(s_.out.data(), rows_ * v_width_, 0.0f);
    std::fill_n(s_.states.data(), rows_, SoftmaxState<float>::identity());
    for (Index r = 0; r < call_.group; ++r) {
      const Index head = keys_.kv_head() * call_.group + r;
      float* const to = s_.queries.data() + r * k_width_;
      call_.q.format().widen(call_.q.row(keys_.b(), head, 0), dim, to);
      for (Index c = 0; c < dim; ++c) to[c] *= call_.query_scale;
      if (with_sinks) s_.states.data()[r].admit(call_.sink_log2(head));
    }
  }
  // Keys [begin, end) of the sequence, all of them in sight.
  void attend(Index begin, Index end) {
    assert(begin <= end);
    const Index past = keys_.past_count();
    if (begin < past)
      attend(keys_.past(call_.past_k), call_.past_k.format(), keys_.past(call_.past_v),
             call_.past_v.format(), begin, std::min(end, past));
    if (end > past)
      attend(keys_.chunk(call_.chunk_k), call_.chunk_k.format(), keys_.chunk(call_.chunk_v),
             call_.chunk_v.format(), std::max(begin, past) - past, end - past);
  }

  // The same in two steps, for a block of an unselected past; one row of `ask` is asked for per key.
  void attend_keys(Index begin, Index count, RowWalk& ask) {
    multiply_keys({keys_.past(call_.past_k).from(begin), &call_.past_k.format()}, count, &ask);
    weigh(count);
  }
  void attend_values(Index begin, Index count, RowWalk& ask) {
    add_values({keys_.past(call_.past_v).from(begin), &call_.past_v.format()}, count, &ask);
  }

  // Last: writes the group's rows of `to`.
  void finish(const PartialRows& to) const {
    for (Index r = 0; r < call_.group; ++r) {
      to.state[r] = s_.states.data()[r];
      std::copy_n(s_.out.data() + r * v_width_, call_.v_dim, to.out + r * call_.v_dim);
    }
  }

 private:
  float* weights(Index tile) const { return s_.weights.data() + tile * tile_rows_ * block_keys_; }

  // Keys and values [begin, end) of k and v, block by block.
  void attend(const RowFinder& k, const Format& k_format, const RowFinder& v,
              const Format& v_format, Index begin, Index end) {
    const Index row_bytes = k_format.row_bytes(call_.q.dim());
    for (Index at = begin; at < end; at += block_keys_) {
      const Index count = std::min(block_keys_, end - at);
      const RowFinder keys = k.from(at);
      // Against one row, asking costs more than it brings: tuning.hpp.
      RowWalk ahead(keys, row_bytes, tuning::token_prefetch_keys, count);
      multiply_keys({keys, &k_format}, count, rows_ > 1 ? &ahead : nullptr);
      weigh(count);
      add_values({v.from(at), &v_format}, count, nullptr);
    }
  }

  // Rows [first, first + count), each of whole packets: in place, or widened and filled up with
  // zeros.
  TokenRows whole_packets(const TokenRows& x, Index first, Index count, Index dim) {
    const Index width = round_up(dim, simd::lanes);
    if (width == dim) return {x.rows.from(first), x.format};
    for (Index i = 0; i < count; ++i) {
      float* const to = s_.padded.data() + i * width;
      x.format->widen(x.rows[first + i], dim, to);
      std::fill(to + dim, to + width, 0.0f);
    }
    return {{reinterpret_cast<ConstRow>(s_.padded.data()), width * 4}, &float_format()};
  }

  void multiply_keys(const TokenRows& k, Index count, RowWalk* ask) {
    constexpr Index stretch = tuning::token_stretch_keys;
    for (Index i = 0; i < count; i += stretch) {
      const Index n = std::min(stretch, count - i);
      const TokenRows keys = whole_packets(k, i, n, call_.q.dim());
      for (Index row = 0; row < rows_; row += tile_rows_) {
        const float* const queries = s_.queries.data() + row * k_width_;
        float* const x = weights(row / tile_rows_) + i * tile_rows_;
        keys.format->token_logits(tile_rows_, keys.rows, n, k_width_, queries, x,
                                  row == 0 ? ask : nullptr);
      }
    }
  }

  // The block's logits to weights; raises the states.
  void weigh(Index count) {
    constexpr int lanes = simd::lanes;
    const Index size = count * tile_rows_, padded = round_up(size, lanes);
    for (Index row = 0; row < rows_; row += tile_rows_) {
      float* const x = weights(row / tile_rows_);
      SoftmaxState<float>* const states = s_.states.data() + row;
      if (call_.cap_log2 != 0.0f) cap_logits(x, padded, call_.cap_log2);
      std::fill(x + size, x + padded, -simd::infinity);
      // Lane l of a packet belongs to row l % tile_rows.
      alignas(64) float lane[lanes];
      simd::Packet top = simd::broadcast(-simd::infinity), sum = simd::zero();
      for (Index i = 0; i < padded; i += lanes) top = simd::max(top, simd::load(x + i));
      simd::store(lane, top);
      for (Index r = 0; r < tile_rows_; ++r) {
        for (Index l = r + tile_rows_; l < lanes; l += tile_rows_)
          lane[r] = std::max(lane[r], lane[l]);
        s_.factors.data()[row + r] = states[r].raise(lane[r]);
      }
      for (Index l = 0; l < lanes; ++l) lane[l] = states[l % tile_rows_].reference();
      const simd::Packet reference = simd::load(lane);
      for (Index i = 0; i < padded; i += lanes) {
        const simd::Packet w = simd::exp2(simd::sub(simd::load(x + i), reference));
        sum = simd::add(sum, w);
        simd::store(x + i, w);
      }
      simd::store(lane, sum);
      for (Index l = 0; l < lanes; ++l) states[l % tile_rows_].sum += lane[l];
    }
  }

  void add_values(const TokenRows& v, Index count, RowWalk* ask) {
    constexpr Index stretch = tuning::token_value_keys;
    float *const out = s_.out.data(), *const of_block = s_.block_out.data();
    std::fill_n(of_block, rows_ * v_width_, 0.0f);
    for (Index i = 0; i < count; i += stretch) {
      const Index n = std::min(stretch, count - i);
      const TokenRows values = whole_packets(v, i, n, call_.v_dim);
      for (Index j = 0; ask != nullptr && j < n; ++j) ask_next(*ask);
      for (Index row = 0; row < call_.group; row += 2) add_stretch(values, n, i, row);
    }
    for (Index r = 0; r < call_.group; ++r) {
      const simd::Packet factor = simd::broadcast(s_.factors.data()[r]);
      for (Index c = r * v_width_; c < (r + 1) * v_width_; c += simd::lanes)
        simd::store(out + c, simd::fma(factor, simd::load(out + c), simd::load(of_block + c)));
    }
  }

  // Keys [first, first + count) of the block to rows `row` and, if there is one, row + 1.
  void add_stretch(const TokenRows& v, Index count, Index first, Index row) {
    const auto weight_of = [&](Index r) {
      return weights(r / tile_rows_) + first * tile_rows_ + r % tile_rows_;
    };
    const bool two = row + 1 < call_.group;
    const float* const weight[2] = {weight_of(row), weight_of(two ? row + 1 : row)};
    v.format->token_values(v.rows, count, v_width_, weight, tile_rows_, two,
                           s_.block_out.data() + row * v_width_);
  }

  const AttentionCall& call_;
  KeySequence keys_;
  Index tile_rows_, rows_;   // of a tile; of all tiles
  Index k_width_, v_width_;  // channels, rounded up to whole packets
  Index block_keys_;
  TokenScratch& s_;
};

// Keys [begin, end) of an unselected past, block by block, by KV heads [first_head, first_head +
// heads) of sequence b in turn; attention_of(i) is the TokenAttention of head first_head + i.
template <class AttentionOf>
void attend_together(const AttentionCall& call, Index b, Index first_head, Index heads, Index begin,
                     Index end, AttentionOf&& attention_of) {
  constexpr Index step = tuning::token_together_keys;
  for (Index at = begin; at < end; at += step) {
    const Index next = std::min(at + step, end), after = std::min(next + step, end);
    RowWalk values = call.past_v.walk(b, first_head, heads, at, next);
    for (Index i = 0; i < heads; ++i) attention_of(i).attend_keys(at, next - at, values);
    RowWalk keys = call.past_k.walk(b, first_head, heads, next, after);
    for (Index i = 0; i < heads; ++i) attention_of(i).attend_values(at, next - at, keys);
  }
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
