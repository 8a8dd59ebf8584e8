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
#include <quoka/core/panel_kernels.hpp>
#include <quoka/core/token_kernels.hpp>

#include <cassert>

namespace quoka::inline QUOKA_ABI {
namespace detail {

// Scratch of one worker.
template <class T>
struct TokenScratch {
  Buffer<float> queries;               // [rows][head_dim], rounded up to whole tiles and packets
  Buffer<float> weights;               // [tiles][keys of a block][rows of a tile]
  Buffer<float> out, block_out;        // [rows][v_dim], rounded up: of all keys, of a block
  Buffer<SoftmaxState<float>> states;  // [rows]
  Buffer<float> factors;               // [rows]
  Buffer<T> padded;                    // [keys of a stretch][head_dim or v_dim, rounded up]

  void reserve(Index group, Index dim, Index v_dim, Index block_keys) {
    const Index rows = round_up(group, token_tile_rows(group));
    const Index k_width = round_up(dim, simd::lanes), v_width = round_up(v_dim, simd::lanes);
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

// A token's rows of one KV head over a part of the keys.
template <class T>
class TokenAttention {
 public:
  // block_keys: what the scratch was reserved for.
  TokenAttention(const KeySequence<T>& keys, TokenScratch<T>& scratch, Index block_keys)
      : call_(keys.call),
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
      const Index head = keys_.kv_head * call_.group + r;
      const T* const q = call_.q.row(keys_.b, head, 0);
      float* const to = s_.queries.data() + r * k_width_;
      for (Index c = 0; c < dim; ++c) to[c] = static_cast<float>(q[c]) * call_.query_scale;
      if (with_sinks) s_.states.data()[r].admit(call_.sink_log2(head));
    }
  }
  // Keys [begin, end) of the sequence, all of them in sight.
  void attend(Index begin, Index end) {
    assert(begin <= end);
    const Index past = keys_.past_count;
    const Position* const keep = keys_.keep.empty() ? nullptr : keys_.keep.data();
    attend(rows_of(call_.past_k, keep), rows_of(call_.past_v, keep), begin, std::min(end, past));
    attend(rows_of(call_.chunk_k), rows_of(call_.chunk_v), std::max(begin, past) - past,
           end - past);
  }

  // The same in two steps, for a block of an unselected past; ask(i) is called once for its key i.
  template <class Ask>
  void attend_keys(Index begin, Index count, Ask&& ask) {
    multiply_keys(rows_of(call_.past_k).from(begin), count, ask);
    weigh(count);
  }
  template <class Ask>
  void attend_values(Index begin, Index count, Ask&& ask) {
    add_values(rows_of(call_.past_v).from(begin), count, ask);
  }

  // Last: writes the group's rows of `to`.
  void finish(const PartialRows& to) const {
    for (Index r = 0; r < call_.group; ++r) {
      to.state[r] = s_.states.data()[r];
      std::copy_n(s_.out.data() + r * v_width_, call_.v_dim, to.out + r * call_.v_dim);
    }
  }

 private:
  CacheRows<T> rows_of(const TensorView<const T>& x, const Position* keep = nullptr) const {
    return {x.row(keys_.b, keys_.kv_head, 0), x.strides()[2], keep};
  }
  float* weights(Index tile) const { return s_.weights.data() + tile * tile_rows_ * block_keys_; }

  // Keys and values [begin, end) of k and v, block by block.
  void attend(const CacheRows<T>& k, const CacheRows<T>& v, Index begin, Index end) {
    for (Index at = begin; at < end; at += block_keys_) {
      const Index count = std::min(block_keys_, end - at);
      const CacheRows<T> keys = k.from(at);
      const Index last = rows_ > 1 ? count - 1 : -1;
      multiply_keys(keys, count, [&](Index i) QUOKA_INLINE_LAMBDA {
        const Index later = i + tuning::token_prefetch_keys;
        if (later <= last) keys.prefetch(later, k_width_);
      });
      weigh(count);
      add_values(v.from(at), count, [](Index) {});
    }
  }

  // Rows [first, first + count), each of whole packets: in place, or copied to be filled up with
  // zeros.
  CacheRows<T> whole_packets(const CacheRows<T>& rows, Index first, Index count, Index dim) {
    const Index width = round_up(dim, simd::lanes);
    if (width == dim) return rows.from(first);
    for (Index i = 0; i < count; ++i) {
      T* const to = s_.padded.data() + i * width;
      std::fill(std::copy_n(rows[first + i], dim, to), to + width, T(0.0f));
    }
    return {s_.padded.data(), width};
  }

  template <class Ask>
  void multiply_keys(const CacheRows<T>& k, Index count, Ask&& ask) {
    constexpr Index stretch = tuning::token_stretch_keys;
    for (Index i = 0; i < count; i += stretch) {
      const Index n = std::min(stretch, count - i);
      const CacheRows<T> keys = whole_packets(k, i, n, call_.q.dim());
      for (Index row = 0; row < rows_; row += tile_rows_) {
        const float* const queries = s_.queries.data() + row * k_width_;
        float* const x = weights(row / tile_rows_) + i * tile_rows_;
        const bool first = row == 0;
        token_logits(tile_rows_, keys, n, k_width_, queries, x, [&](Index j) QUOKA_INLINE_LAMBDA {
          if (first) ask(i + j);
        });
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

  template <class Ask>
  void add_values(const CacheRows<T>& v, Index count, Ask&& ask) {
    constexpr Index stretch = tuning::token_value_keys;
    float *const out = s_.out.data(), *const of_block = s_.block_out.data();
    std::fill_n(of_block, rows_ * v_width_, 0.0f);
    for (Index i = 0; i < count; i += stretch) {
      const Index n = std::min(stretch, count - i);
      const CacheRows<T> values = whole_packets(v, i, n, call_.v_dim);
      for (Index j = i; j < i + n; ++j) ask(j);
      for (Index row = 0; row < call_.group; row += 2) add_stretch(values, n, i, row);
    }
    for (Index r = 0; r < call_.group; ++r) {
      const simd::Packet factor = simd::broadcast(s_.factors.data()[r]);
      for (Index c = r * v_width_; c < (r + 1) * v_width_; c += simd::lanes)
        simd::store(out + c, simd::fma(factor, simd::load(out + c), simd::load(of_block + c)));
    }
  }

  // Keys [first, first + count) of the block to rows `row` and, if there is one, row + 1.
  void add_stretch(const CacheRows<T>& v, Index count, Index first, Index row) {
    const auto weight_of = [&](Index r) {
      return weights(r / tile_rows_) + first * tile_rows_ + r % tile_rows_;
    };
    const bool two = row + 1 < call_.group;
    const float* const weight[2] = {weight_of(row), weight_of(two ? row + 1 : row)};
    float* const out = s_.block_out.data() + row * v_width_;
    const auto add = [&](auto packets, Index c) {
      if (two)
        token_values<2, packets>(v, c, count, weight, tile_rows_, out, v_width_);
      else
        token_values<1, packets>(v, c, count, weight, tile_rows_, out, v_width_);
    };
    constexpr int wide = tuning::token_value_packets;
    Index c = 0;
    for (; c + wide * simd::lanes <= v_width_; c += wide * simd::lanes)
      add(std::integral_constant<int, wide>{}, c);
    for (; c + wide / 2 * simd::lanes <= v_width_; c += wide / 2 * simd::lanes)
      add(std::integral_constant<int, wide / 2>{}, c);
    for (; c < v_width_; c += simd::lanes) add(std::integral_constant<int, 1>{}, c);
  }

  const AttentionCall<T>& call_;
  KeySequence<T> keys_;
  Index tile_rows_, rows_;   // of a tile; of all tiles
  Index k_width_, v_width_;  // channels, rounded up to whole packets
  Index block_keys_;
  TokenScratch<T>& s_;
};

// Do the rows of one token's heads lie nearer to each other than one head's rows of two tokens?
template <class T>
bool side_by_side(const TensorView<const T>& rows) {
  return rows.heads() > 1 && std::abs(rows.strides()[1]) < std::abs(rows.strides()[2]);
}

// Asks for rows [begin, end) of some heads in the order of [len, heads, dim], one a call.
template <class T>
class AskInOrder {
 public:
  AskInOrder(const TensorView<const T>& rows, Index b, Index first_head, Index heads, Index begin,
             Index end)
      : rows_(rows), b_(b), first_head_(first_head), heads_(heads), at_(begin), end_(end) {}

  QUOKA_INLINE void operator()(Index) {
    if (at_ >= end_) return;
    CacheRows<T>{rows_.row(b_, first_head_ + head_, at_), 0}.prefetch(0, rows_.dim());
    if (++head_ == heads_) head_ = 0, ++at_;
  }

 private:
  const TensorView<const T>& rows_;
  Index b_, first_head_, heads_, at_, end_, head_ = 0;
};

// Keys [begin, end) of an unselected past, block by block, by KV heads [first_head, first_head +
// heads) of sequence b in turn; attention_of(i) is the TokenAttention of head first_head + i.
template <class T, class AttentionOf>
void attend_together(const AttentionCall<T>& call, Index b, Index first_head, Index heads,
                     Index begin, Index end, AttentionOf&& attention_of) {
  constexpr Index step = tuning::token_together_keys;
  for (Index at = begin; at < end; at += step) {
    const Index next = std::min(at + step, end), after = std::min(next + step, end);
    AskInOrder<T> values(call.past_v, b, first_head, heads, at, next);
    for (Index i = 0; i < heads; ++i) attention_of(i).attend_keys(at, next - at, values);
    AskInOrder<T> keys(call.past_k, b, first_head, heads, next, after);
    for (Index i = 0; i < heads; ++i) attention_of(i).attend_values(at, next - at, keys);
  }
}

}  // namespace detail
}  // namespace quoka::inline QUOKA_ABI
