// Attention of one token: the few query heads that share a KV head, over a part of its keys.
//
// So few rows use each key for a handful of multiply-adds: a decode step is bound by memory, and
// the panels of head_attention.hpp would leave most lanes idle. Here channels lie across the lanes.
// Logits are dot products, as many at a time as there are lanes, that end in one tree of shuffles;
// weighted values add up row by row. Keys and values are read once from where they lie, in blocks;
// the next block is asked for while this one is used. 2 * group * keys * (head_dim + v_dim) FLOPs,
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
  Buffer<float> weights;  // [tiles][keys of a block][rows]
  Buffer<float> out;      // [tiles][rows][v_dim, rounded up]
  Buffer<SoftmaxState<float>> states;
  struct Rows {
    const T* k[tuning::token_block_keys];
    const T* v[tuning::token_block_keys];
  } rows[2];  // of this block and the next

  void reserve(Index group, Index dim, Index v_dim) {
    const Index rows_in_all = round_up(group, token_tile_rows(group));
    queries.reserve(rows_in_all * round_up(dim, simd::lanes));
    weights.reserve(rows_in_all * round_up(tuning::token_block_keys, simd::lanes));
    out.reserve(rows_in_all * round_up(v_dim, simd::lanes));
    states.reserve(rows_in_all);
  }
  Index bytes() const {
    return queries.bytes() + weights.bytes() + out.bytes() + states.bytes();
  }
};

// Logits of `count` keys against a tile of Rows queries: x[key][row], count rounded up to whole
// packets. between() is called once per packet.
template <int Rows, class T, class Between>
void token_logits(const T* const* k, Index count, Index dim, const float* queries, float* x,
                  Between&& between) {
  constexpr int lanes = simd::lanes, keys = lanes / Rows;
  const Index stride = round_up(dim, lanes), whole = dim / lanes * lanes;
  for (Index i = 0; i < count; i += keys, x += lanes) {
    between();
    const T* key[keys];
    simd::unroll<keys>([&](auto j) QUOKA_INLINE_LAMBDA { key[j] = k[std::min(i + j, count - 1)]; });
    simd::Square acc;
    simd::unroll<lanes>([&](auto l) QUOKA_INLINE_LAMBDA { acc.packet[l] = simd::zero(); });
    const auto multiply = [&](Index c, auto&& load) QUOKA_INLINE_LAMBDA {
      simd::unroll<keys>([&](auto j) QUOKA_INLINE_LAMBDA {
        const simd::Packet channels = load(key[j] + c);
        simd::unroll<Rows>([&](auto r) QUOKA_INLINE_LAMBDA {
          simd::Packet& sum = acc.packet[j * Rows + r];
          sum = simd::fma(channels, simd::load(queries + r * stride + c), sum);
        });
      });
    };
    for (Index c = 0; c < whole; c += lanes)
      multiply(c, [](const T* at) QUOKA_INLINE_LAMBDA { return simd::load_as_float(at); });
    if (whole < dim)
      multiply(whole, [&](const T* at) QUOKA_INLINE_LAMBDA {
        return simd::load_as_float(at, dim - whole);
      });
    simd::store(x, simd::sums(acc));
  }
}

// out[r][c...] = factor[r] * out[r][c...] + sum over keys of x[key][r] * v[key][c...], for Packets
// packets of channels, the last of them `valid` elements long.
template <int Rows, int Packets, class T>
QUOKA_INLINE void token_value_tile(const T* const* v, Index c, Index valid, Index count,
                                   const float* x, const float* factor, float* out, Index stride) {
  constexpr int lanes = simd::lanes;
  simd::Packet acc[Rows][Packets];
  simd::unroll<Rows, Packets>([&](auto r, auto p)
                                  QUOKA_INLINE_LAMBDA { acc[r][p] = simd::zero(); });
  const auto add = [&](auto&& load) QUOKA_INLINE_LAMBDA {
    for (Index i = 0; i < count; ++i) {
      const T* const value = v[i] + c;
      simd::Packet channels[Packets];
      simd::unroll<Packets>(
          [&](auto p) QUOKA_INLINE_LAMBDA { channels[p] = load(value + p * lanes); });
      simd::unroll<Rows>([&](auto r) QUOKA_INLINE_LAMBDA {
        const simd::Packet weight = simd::broadcast(x[i * Rows + r]);
        simd::unroll<Packets>([&](auto p) QUOKA_INLINE_LAMBDA {
          acc[r][p] = simd::fma(weight, channels[p], acc[r][p]);
        });
      });
    }
  };
  if (Packets > 1 || valid == lanes)
    add([](const T* at) QUOKA_INLINE_LAMBDA { return simd::load_as_float(at); });
  else
    add([&](const T* at) QUOKA_INLINE_LAMBDA { return simd::load_as_float(at, valid); });
  simd::unroll<Rows, Packets>([&](auto r, auto p) QUOKA_INLINE_LAMBDA {
    float* const at = out + r * stride + c + p * lanes;
    simd::store(at, simd::fma(simd::broadcast(factor[r]), simd::load(at), acc[r][p]));
  });
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
      const auto count_at = [&](Index at) { return std::clamp<Index>(end - at, 0, block); };
      auto *rows = &s_.rows[0], *next = &s_.rows[1];
      keys_.rows(begin, count_at(begin), rows->k, rows->v);
      for (Index at = begin; at < end; at += block, std::swap(rows, next)) {
        const Index count = count_at(at), next_count = count_at(at + block);
        keys_.rows(at + block, next_count, next->k, next->v);
        RowPrefetch<T> next_k(next->k, next_count, call_.q.dim()),
            next_v(next->v, next_count, call_.v_dim);
        for (Index tile = 0; tile < tiles<Rows>(); ++tile)
          attend<Rows>(*rows, count, tile, next_k, next_v);
      }
      finish<Rows>(to);
    }
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

  template <int Rows>
  void attend(const typename TokenScratch<T>::Rows& rows, Index count, Index tile,
              RowPrefetch<T>& next_k, RowPrefetch<T>& next_v) {
    constexpr int lanes = simd::lanes;
    const Index size = count * Rows, packets = ceil_div(size, Index{lanes});
    float* const x = s_.weights.data();
    const Index calls = packets * tiles<Rows>(), k_lines = ceil_div(next_k.lines(), calls),
                v_lines = ceil_div(next_v.lines(), calls);
    token_logits<Rows>(rows.k, count, call_.q.dim(), s_.queries.data() + tile * Rows * dim_stride(),
                       x, [&] { next_k.next(k_lines), next_v.next(v_lines); });
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

    constexpr int wide = std::max(1, tuning::token_value_packets / Rows);
    float* const out = s_.out.data() + tile * Rows * out_stride();
    Index c = 0;
    for (; c + wide * lanes <= call_.v_dim; c += wide * lanes)
      token_value_tile<Rows, wide>(rows.v, c, lanes, count, x, factor, out, out_stride());
    for (; c < call_.v_dim; c += lanes)
      token_value_tile<Rows, 1>(rows.v, c, std::min<Index>(lanes, call_.v_dim - c), count, x,
                                factor, out, out_stride());
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
