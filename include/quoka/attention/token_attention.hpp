// Attention of one token: the few query heads that share a KV head, over a part of its keys.
//
// So few rows use each key for a handful of multiply-adds: a decode step is bound by memory, and
// the panels of head_attention.hpp would leave most lanes idle. Here channels lie across the lanes.
// Logits are dot products, as many at a time as there are lanes, that end in one tree of shuffles;
// weighted values add up row by row. Keys and values are read once, from where they lie and in their
// order, so that the hardware's prefetcher keeps memory busy under the arithmetic. 2 * group * keys * (head_dim + v_dim) FLOPs,
// group / 2 per byte of float K and V. Equal to head_attention.hpp up to the order of sums.
#pragma once

#include <quoka/attention/key_sequence.hpp>
#include <quoka/attention/partial_rows.hpp>
#include <quoka/core/packing.hpp>
#include <quoka/core/panel_kernels.hpp>

#include <bit>
#include <cassert>

namespace quoka::inline QUOKA_ABI {
namespace detail {

// Rows side by side in one tile: a power of two, so that whole keys fill the lanes.
inline Index token_tile_rows(Index group) {
  return std::min<Index>(simd::lanes,
                         static_cast<Index>(std::bit_ceil(static_cast<std::size_t>(group))));
}

// Scratch of one worker.
template <class T>
struct TokenScratch {
  Buffer<float> queries;  // [tiles][rows][head_dim, rounded up]
  Buffer<float> weights;  // [keys of a block][rows]
  Buffer<float> out;      // [tiles][rows][v_dim, rounded up]
  Buffer<float> block_out;  // [rows][v_dim, rounded up]
  Buffer<SoftmaxState<float>> states;

  void reserve(Index group, Index dim, Index v_dim) {
    const Index rows_in_all = round_up(group, token_tile_rows(group));
    queries.reserve(rows_in_all * round_up(dim, simd::lanes));
    weights.reserve(token_tile_rows(group) * round_up(tuning::token_block_keys, simd::lanes));
    out.reserve(rows_in_all * round_up(v_dim, simd::lanes));
    block_out.reserve(token_tile_rows(group) * round_up(v_dim, simd::lanes));
    states.reserve(rows_in_all);
  }
  Index bytes() const {
    return queries.bytes() + weights.bytes() + out.bytes() + block_out.bytes() + states.bytes();
  }
};

// Rows that lie `stride` apart, all of them or the kept ones. Addresses are computed where they are
// used: an array of row pointers, written before each block, kept the processor from reading ahead.
template <class T>
struct EveryRow {
  const T* base;
  Index stride;
  QUOKA_INLINE const T* operator[](Index i) const { return base + i * stride; }
  static constexpr bool scattered = false;
  EveryRow from(Index first) const { return {base + first * stride, stride}; }
};
template <class T>
struct KeptRow {
  const T* base;
  Index stride;
  const Position* keep;
  QUOKA_INLINE const T* operator[](Index i) const { return base + keep[i] * stride; }
  static constexpr bool scattered = true;
  KeptRow from(Index first) const { return {base, stride, keep + first}; }
};

// Asks for row i, count rows in all: every line of it.
template <class RowsOfT>
QUOKA_INLINE void prefetch_row(const RowsOfT& rows, Index i, Index count, Index dim) {
  const auto* const row = rows[RowsOfT::scattered ? std::min(i, count - 1) : i];
  for (Index c = 0; c < dim; c += 64 / static_cast<Index>(sizeof(*row))) simd::prefetch(row + c);
}

// Logits of `count` keys against a tile of Rows queries: x[key][row], count rounded up to whole
// packets. Keys are read one after the other; two in turns would halve the loads of queries, but
// lose the hardware's prefetcher and with it half of the bandwidth.
template <int Rows, class Keys>
void token_logits(const Keys& k, Index count, Index dim, const float* queries, float* x) {
  constexpr int lanes = simd::lanes, keys = lanes / Rows;
  const Index stride = round_up(dim, lanes), whole = dim / lanes * lanes;
  for (Index i = 0; i < count; i += keys, x += lanes) {
    simd::Square acc;
    simd::unroll<lanes>([&](auto l) QUOKA_INLINE_LAMBDA { acc.packet[l] = simd::zero(); });
    simd::unroll<keys>([&](auto j) QUOKA_INLINE_LAMBDA {
      const auto* const key = k[std::min(i + j, count - 1)];
      if constexpr (Rows > 1 || Keys::scattered)
        prefetch_row(k, i + j + tuning::token_prefetch_keys, count, dim);
      const auto multiply = [&](Index c, const simd::Packet& channels) QUOKA_INLINE_LAMBDA {
        simd::unroll<Rows>([&](auto r) QUOKA_INLINE_LAMBDA {
          simd::Packet& sum = acc.packet[j * Rows + r];
          sum = simd::fma(channels, simd::load(queries + r * stride + c), sum);
        });
      };
      for (Index c = 0; c < whole; c += lanes) multiply(c, simd::load_as_float(key + c));
      if (whole < dim) multiply(whole, simd::load_as_float(key + whole, dim - whole));
    });
    simd::store(x, simd::sums(acc));
  }
}

// out[r][c...] += sum over keys of x[key][r] * v[key][c...] for Tile of the Rows rows and Packets
// packets of channels; load(value) gives one.
template <int Rows, int Tile, int Packets, class Values, class Load>
QUOKA_INLINE void token_value_tile(const Values& v, Index c, Index count, const float* x,
                                   float* out, Index stride, Load&& load) {
  constexpr int lanes = simd::lanes;
  simd::Packet acc[Tile][Packets];
  simd::unroll<Tile, Packets>([&](auto r, auto p) QUOKA_INLINE_LAMBDA {
    acc[r][p] = simd::load(out + r * stride + c + p * lanes);
  });
  for (Index i = 0; i < count; ++i) {
    const auto* const value = v[i] + c;
    simd::Packet channels[Packets];
    simd::unroll<Packets>(
        [&](auto p) QUOKA_INLINE_LAMBDA { channels[p] = load(value + p * lanes); });
    simd::unroll<Tile>([&](auto r) QUOKA_INLINE_LAMBDA {
      const simd::Packet weight = simd::broadcast(x[i * Rows + r]);
      simd::unroll<Packets>([&](auto p) QUOKA_INLINE_LAMBDA {
        acc[r][p] = simd::fma(weight, channels[p], acc[r][p]);
      });
    });
  }
  simd::unroll<Tile, Packets>([&](auto r, auto p) QUOKA_INLINE_LAMBDA {
    simd::store(out + r * stride + c + p * lanes, acc[r][p]);
  });
}

// Channels [c, dim) of all Rows rows: packets side by side as many as there are, then fewer.
template <int Rows, int Packets, class Values>
void token_values(const Values& v, Index c, Index dim, Index count, const float* x, float* out,
                  Index stride) {
  constexpr int tile = std::clamp(tuning::token_value_registers / Packets, 1, Rows);
  const auto all_rows = [&](auto packets, auto&& load) QUOKA_INLINE_LAMBDA {
    for (int r = 0; r < Rows; r += tile)
      token_value_tile<Rows, tile, packets>(v, c, count, x + r, out + r * stride, stride, load);
  };
  for (; c + Packets * simd::lanes <= dim; c += Packets * simd::lanes)
    all_rows(std::integral_constant<int, Packets>{},
             [](const auto* at) QUOKA_INLINE_LAMBDA { return simd::load_as_float(at); });
  if constexpr (Packets > 1) {
    token_values<Rows, Packets / 2>(v, c, dim, count, x, out, stride);
  } else if (c < dim) {
    all_rows(std::integral_constant<int, 1>{}, [&](const auto* at) QUOKA_INLINE_LAMBDA {
      return simd::load_as_float(at, dim - c);
    });
  }
}

// One tile of Rows queries over the keys of a part.
template <class T>
class TokenAttention {
 public:
  TokenAttention(const KeySequence<T>& keys, TokenScratch<T>& scratch)
      : call_(keys.call), keys_(keys), s_(scratch) {}

  // Keys [begin, end) of the sequence, all of them in sight. Writes the group's rows of `to`.
  void run(Index begin, Index end, bool with_sinks, const PartialRows& to) {
    assert(call_.q.len() == 1 && begin <= end);
    switch (token_tile_rows(call_.group)) {
      case 1: return run<1>(begin, end, with_sinks, to);
      case 2: return run<2>(begin, end, with_sinks, to);
      case 4: return run<4>(begin, end, with_sinks, to);
      case 8: return run<8>(begin, end, with_sinks, to);
      default: return run<16>(begin, end, with_sinks, to);
    }
  }

 private:
  static constexpr Index block = tuning::token_block_keys;

  template <int Rows>
  void run(Index begin, Index end, bool with_sinks, const PartialRows& to) {
    if constexpr (Rows <= simd::lanes) {
      start<Rows>(with_sinks);
      const Index past_end = std::min(end, keys_.past_count);
      if (keys_.keep.empty())
        attend_all<Rows>(every_row(call_.past_k), every_row(call_.past_v), begin, past_end);
      else
        attend_all<Rows>(kept_rows(call_.past_k), kept_rows(call_.past_v), begin, past_end);
      attend_all<Rows>(every_row(call_.chunk_k), every_row(call_.chunk_v),
                       std::max(begin, keys_.past_count) - keys_.past_count,
                       end - keys_.past_count);
      finish<Rows>(to);
    }
  }

  EveryRow<T> every_row(const TensorView<const T>& x) const {
    return {x.row(keys_.b, keys_.kv_head, 0), x.strides()[2]};
  }
  KeptRow<T> kept_rows(const TensorView<const T>& x) const {
    return {x.row(keys_.b, keys_.kv_head, 0), x.strides()[2], keys_.keep.data()};
  }

  // Keys and values [begin, end) of `k` and `v`.
  template <int Rows, class RowsOfT>
  void attend_all(const RowsOfT& k, const RowsOfT& v, Index begin, Index end) {
    for (Index at = begin; at < end; at += block)
      for (Index tile = 0; tile < tiles<Rows>(); ++tile)
        attend<Rows>(k.from(at), v.from(at), std::min(block, end - at), tile);
  }

  template <int Rows>
  Index tiles() const {
    return ceil_div(call_.group, Index{Rows});
  }
  Index dim_stride() const { return round_up(call_.q.dim(), simd::lanes); }
  Index out_stride() const { return round_up(call_.v_dim, simd::lanes); }

  // Rows beyond the group are zero queries: their logits are 0, their results are left behind.
  template <int Rows>
  void start(bool with_sinks) {
    const Index dim = call_.q.dim(), rows = tiles<Rows>() * Rows;
    std::fill_n(s_.queries.data(), rows * dim_stride(), 0.0f);
    std::fill_n(s_.out.data(), rows * out_stride(), 0.0f);
    for (Index r = 0; r < rows; ++r) {
      SoftmaxState<float>& state = s_.states.data()[r];
      state = SoftmaxState<float>::identity();
      if (r >= call_.group) continue;
      const Index head = keys_.kv_head * call_.group + r;
      const T* const q = call_.q.row(keys_.b, head, 0);
      float* const to = s_.queries.data() + r * dim_stride();
      for (Index c = 0; c < dim; ++c) to[c] = static_cast<float>(q[c]) * call_.query_scale;
      if (with_sinks) state.admit(call_.sink_log2(head));
    }
  }

  template <int Rows, class RowsOfT>
  void attend(const RowsOfT& k, const RowsOfT& v, Index count, Index tile) {
    constexpr int lanes = simd::lanes;
    const Index size = count * Rows, packets = ceil_div(size, Index{lanes});
    float* const x = s_.weights.data();
    float* const out = s_.out.data() + tile * Rows * out_stride();
    token_logits<Rows>(k, count, call_.q.dim(), s_.queries.data() + tile * Rows * dim_stride(), x);
    if (call_.cap_log2 != 0.0f) cap_logits(x, packets * lanes, call_.cap_log2);
    std::fill(x + size, x + packets * lanes, -simd::infinity);

    // Lane l of a packet belongs to row l % Rows.
    alignas(64) float lane[lanes], factor[Rows];
    SoftmaxState<float>* const states = s_.states.data() + tile * Rows;
    simd::Packet top = simd::broadcast(-simd::infinity);
    for (Index i = 0; i < packets * lanes; i += lanes) top = simd::max(top, simd::load(x + i));
    simd::store(lane, top);
    for (int r = 0; r < Rows; ++r) {
      for (int l = r + Rows; l < lanes; l += Rows) lane[r] = std::max(lane[r], lane[l]);
      factor[r] = states[r].raise(lane[r]);
    }
    for (int l = 0; l < lanes; ++l) lane[l] = states[l % Rows].reference();
    const simd::Packet reference = simd::load(lane);
    simd::Packet sum = simd::zero();
    for (Index i = 0; i < packets * lanes; i += lanes) {
      const simd::Packet w = simd::exp2(simd::sub(simd::load(x + i), reference));
      sum = simd::add(sum, w);
      simd::store(x + i, w);
    }
    simd::store(lane, sum);
    for (int l = 0; l < lanes; ++l) states[l % Rows].sum += lane[l];

    float* const of_block = s_.block_out.data();
    std::fill_n(of_block, Rows * out_stride(), 0.0f);
    if constexpr (RowsOfT::scattered)
      for (Index i = 0; i < tuning::token_value_keys; ++i)
        prefetch_row(v, i, count, call_.v_dim);
    for (Index i = 0; i < count; i += tuning::token_value_keys) {
      if constexpr (RowsOfT::scattered)
        for (Index j = 0; j < tuning::token_value_keys; ++j)
          prefetch_row(v, i + j + tuning::token_value_keys, count, call_.v_dim);
      token_values<Rows, 8>(v.from(i), 0, call_.v_dim,
                            std::min(tuning::token_value_keys, count - i), x + i * Rows, of_block,
                            out_stride());
    }
    for (int r = 0; r < Rows; ++r)
      for (Index c = r * out_stride(); c < (r + 1) * out_stride(); c += lanes)
        simd::store(out + c, simd::fma(simd::broadcast(factor[r]), simd::load(out + c),
                                       simd::load(of_block + c)));
  }

  template <int Rows>
  void finish(const PartialRows& to) const {
    for (Index r = 0; r < call_.group; ++r) {
      to.state[r] = s_.states.data()[r];
      std::copy_n(s_.out.data() + r * out_stride(), call_.v_dim, to.out + r * call_.v_dim);
    }
  }

  const AttentionCall<T>& call_;
  const KeySequence<T>& keys_;
  TokenScratch<T>& s_;
};

}  // namespace detail
}  // namespace quoka::inline QUOKA_ABI
