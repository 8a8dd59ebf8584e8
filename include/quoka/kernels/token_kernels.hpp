// Few query rows against keys and values: kernels with channels across the lanes, for work that is
// bound by memory. Many rows are computed by register_tile.hpp.
#pragma once

#include <quoka/kernels/kernels.hpp>
#include <quoka/kernels/softmax_state.hpp>
#include <quoka/rows/format.hpp>

#include <algorithm>

#if QUOKA_DEFINES_KERNELS
#include <quoka/rows/element_rows.hpp>
#include <type_traits>
#endif

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// Query rows side by side in a tile: 1, 2 or 4, so that whole keys fill the lanes.
inline Index token_tile_rows(Index group) {
  const Index enough = group > 2 ? 4 : group;
  return std::min(enough, kernel_sizes().lanes);
}

// Prefetches every cache line of bytes [begin, end) of a row. A row need not begin with a line.
QUOKA_INLINE void prefetch_bytes(ConstRow row, Index begin, Index end) {
  for (Index at = begin; at < end; at += 64) prefetch(row + at);
  prefetch(row + end - 1);
}

// The softmax of a tile, logits [key][row].
// Logits x of `keys` keys to weights, against states[rows], which are raised; factors[rows] are
// those of what was accumulated before. The tile's other rows are padding; their contents are
// unspecified. x has room for whole packets. Lane l of a packet belongs to row l % tile_rows.
QUOKA_FUNC void softmax_tile(float* x, Index keys, Index tile_rows, Index rows,
                             SoftmaxState<float>* states, float* factors);

// out = factors[row] out + added, rows of `width` channels, whole packets: what was accumulated
// before, and a step's.
QUOKA_FUNC void add_to_rows(const float* factors, const float* added, Index rows, Index width,
                            float* out);

#if QUOKA_DEFINES_KERNELS

// The rows of a run, first to last. Streams: of rows in order the addresses are added up. Computing
// addresses from a row's number instead takes two tests and a multiplication. For a single query
// row one core of a Zen 4 then reads rows of 96 and 128 floats from memory at 0.7 and 0.4 of the
// rate. With several query rows adding up costs as much as it saves.
template <bool Streams>
class RunWalk {
 public:
  // At the run's first row. The run must outlive it.
  explicit RunWalk(const RowRun& run)
      : run_(run), in_order_(run.rows == nullptr && run.list == nullptr), at_(run.first) {}

  // Row i, which is the one that is reached. The next call has the one behind it, or with moves_on
  // = false the same again.
  ConstRow next(Index i, bool moves_on = true) {
    if constexpr (!Streams) return run_[i];
    const ConstRow row = in_order_ ? at_ : run_[i];
    at_ += moves_on ? run_.step : 0;
    return row;
  }

 private:
  const RowRun& run_;
  const bool in_order_;
  ConstRow at_;
};

static_assert(simd::lanes == 1 || simd::lanes % 4 == 0, "a tile of 4 rows fills whole packets");

// Prefetches every cache line of the i-th row ahead.
QUOKA_INLINE void prefetch_rows(const RowsAhead& ahead, Index i) {
  const ConstRow row = ahead.rows[i];
  if (row == nullptr) return;
  prefetch_bytes(row, 0, ahead.row_bytes);
}

// f(c, channels from c on) for all packets of a row.
template <class Row, class F>
QUOKA_INLINE void for_packets(ConstRow row, Index width, const RowShape& shape, F&& f) {
  Index c = 0;
  if constexpr (formats::Grouped<Row>) {
    constexpr Index size = Row::Group::channels;
    for (; c + size <= width; c += size) {
      const typename Row::Group group(row, c);
      simd::unroll<static_cast<int>(size / simd::lanes)>(
          [&](auto p) QUOKA_INLINE_LAMBDA { f(c + p * simd::lanes, group.load(p * simd::lanes)); });
    }
  }
  for (; c < width; c += simd::lanes) f(c, Row::load(row, c, shape));
}

// Logits of `count` keys, channels in whole packets, against a tile of Height queries: x[key][row],
// count rounded up to whole packets. Keys are read one after the other. Two at a time would halve
// the loads of queries, but defeat the hardware's prefetcher and lose half of the bandwidth. One
// row of `upcoming`, if given, is prefetched per key, before the key is used.
template <class Row, int Height>
void token_logits_of_height(const RowRun& keys, Index count, const RowShape& shape,
                            const float* queries, float* x, const RowsAhead* upcoming) {
  const Index width = shape.dim;
  constexpr int lanes = simd::lanes, together = lanes / Height;
  static_assert(RowsAhead::most % together == 0);
  RunWalk<Height == 1> walk(keys);
  for (Index i = 0; i < count; i += together, x += lanes) {
    simd::Square acc;
    simd::unroll<together>([&](auto j) QUOKA_INLINE_LAMBDA {
      simd::unroll<Height>([&](auto r)
                               QUOKA_INLINE_LAMBDA { acc.packet[j * Height + r] = simd::zero(); });
      const ConstRow key = walk.next(std::min(i + j, count - 1), i + j + 1 < count);
      if (upcoming != nullptr) prefetch_rows(*upcoming, i + j);
      for_packets<Row>(key, width, shape,
                       [&](Index c, const simd::Packet& channels) QUOKA_INLINE_LAMBDA {
                         simd::unroll<Height>([&](auto r) QUOKA_INLINE_LAMBDA {
                           simd::Packet& sum = acc.packet[j * Height + r];
                           sum = simd::fma(channels, simd::load(queries + r * width + c), sum);
                         });
                       });
    });
    simd::store(x, simd::sums(acc));
  }
}

// f(height), a constant, for a tile of 1, 2 or 4 query rows.
template <class F>
QUOKA_INLINE void with_tile_rows(Index tile_rows, F&& f) {
  if (tile_rows == 1) return f(simd::Constant<1>{});
  if constexpr (simd::lanes >= 4) {
    if (tile_rows == 2) return f(simd::Constant<2>{});
    f(simd::Constant<4>{});
  }
}

// A Format's token_logits.
template <class Row>
void token_logits(Index tile_rows, const RowRun& keys, Index count, const RowShape& shape,
                  const float* queries, float* x, const RowsAhead* upcoming) {
  with_tile_rows(tile_rows, [&](auto height) {
    token_logits_of_height<Row, height>(keys, count, shape, queries, x, upcoming);
  });
}

template <class Row>
inline constexpr int group_packets = 0;
template <formats::Grouped Row>
inline constexpr int group_packets<Row> = static_cast<int>(Row::Group::channels / simd::lanes);
// Are `packets` packets whole groups?
template <class Row, int packets>
inline constexpr bool whole_groups = group_packets<Row> > 0 &&
                                     packets % (group_packets<Row> > 0 ? group_packets<Row> : 1) ==
                                         0;

// Channels [c, c + Packets packets) of a row. Streams: from one address and constants beside it, in
// the row's order. Compilers kept a register for each packet's address, more registers than there
// are, and read packets in an order that the hardware's prefetcher did not follow.
template <class Row, bool Streams = false, std::size_t Packets>
QUOKA_INLINE void load_packets(ConstRow row, Index c, const RowShape& shape,
                               simd::Packet (&channels)[Packets]) {
  constexpr int lanes = simd::lanes;
  if constexpr (whole_groups<Row, Packets>) {
    constexpr int size = group_packets<Row>;
    simd::unroll<Packets / size>([&](auto g) QUOKA_INLINE_LAMBDA {
      const typename Row::Group group(row, c + g * Row::Group::channels);
      simd::unroll<size>(
          [&](auto p) QUOKA_INLINE_LAMBDA { channels[g * size + p] = group.load(p * lanes); });
    });
  } else if constexpr (Streams && Row::element_bytes > 0) {
    const ConstRow at = simd::opaque(row + c * Row::element_bytes);
    simd::unroll<Packets>(
        [&](auto p) QUOKA_INLINE_LAMBDA { channels[p] = Row::load(at, Index{p} * lanes, shape); });
  } else {
    simd::unroll<Packets>(
        [&](auto p) QUOKA_INLINE_LAMBDA { channels[p] = Row::load(row, c + p * lanes, shape); });
  }
}

// out[r][c...] += sum over keys of weight[r][key * step] * v[key][c...], for Height rows of out,
// `width` apart, and Packets packets of channels. These keys add up by themselves first: one sum
// over all keys would lose up to a rounding a key, and equal numbers do lose a third of that. The
// first product begins the sum, so this takes no instruction more.
template <class Row, std::size_t Height, std::size_t Packets>
QUOKA_INLINE void token_value_packets(const RowRun& v, Index c, Index count, const RowShape& shape,
                                      const float* const* weight, Index step, float* out,
                                      const RowsAhead* upcoming) {
  const Index width = shape.dim;
  constexpr int lanes = simd::lanes;
  simd::Packet acc[Height][Packets];
  RunWalk<Height == 1> walk(v);
  const auto take = [&](Index i, auto begins) QUOKA_INLINE_LAMBDA {
    const ConstRow value = walk.next(i);
    if (upcoming != nullptr) prefetch_rows(*upcoming, i);
    simd::Packet channels[Packets];
    load_packets<Row, Height == 1>(value, c, shape, channels);
    simd::unroll<Height>([&](auto r) QUOKA_INLINE_LAMBDA {
      const simd::Packet w = simd::broadcast(weight[r][i * step]);
      simd::unroll<Packets>([&](auto p) QUOKA_INLINE_LAMBDA {
        acc[r][p] = begins ? simd::mul(w, channels[p]) : simd::fma(w, channels[p], acc[r][p]);
      });
    });
  };
  take(0, std::true_type{});
  for (Index i = 1; i < count; ++i) take(i, std::false_type{});
  simd::unroll<Height, Packets>([&](auto r, auto p) QUOKA_INLINE_LAMBDA {
    float* const at = out + r * width + c + p * lanes;
    simd::store(at, simd::add(simd::load(at), acc[r][p]));
  });
}

template <class Row, int Height>
void token_values_of_height(const RowRun& v, Index count, const RowShape& shape,
                            const float* const* weight, Index step, float* out,
                            const RowsAhead* upcoming) {
  const Index width = shape.dim;
  constexpr int wide = tuning::token_value_packets / (Height > 2 ? 2 : 1);
  Index c = 0;
  for (; c + wide * simd::lanes <= width; c += wide * simd::lanes)
    token_value_packets<Row, Height, wide>(v, c, count, shape, weight, step, out,
                                           c == 0 ? upcoming : nullptr);
  // 96 and 80 channels in one pass: by two, rows of them took 1.4 and 1.15 of the time from memory
  // (Zen 4). Not where 16 bits are widened for several query rows, which takes as long as memory
  // does.
  if constexpr (wide == 8 && (Height == 1 || Row::element_bytes == 4)) {
    const RowsAhead* const ahead = c == 0 ? upcoming : nullptr;
    if (width - c == 6 * simd::lanes)
      return token_value_packets<Row, Height, 6>(v, c, count, shape, weight, step, out, ahead);
    if (width - c == 5 * simd::lanes)
      return token_value_packets<Row, Height, 5>(v, c, count, shape, weight, step, out, ahead);
  }
  for (; c + wide / 2 * simd::lanes <= width; c += wide / 2 * simd::lanes)
    token_value_packets<Row, Height, wide / 2>(v, c, count, shape, weight, step, out,
                                               c == 0 ? upcoming : nullptr);
  for (; c < width; c += simd::lanes)
    token_value_packets<Row, Height, 1>(v, c, count, shape, weight, step, out,
                                        c == 0 ? upcoming : nullptr);
}

// Rows of out that are computed together. Rows that cost much to widen are widened once for four;
// others are read whole for two and two, which the hardware follows better.
template <class Row>
inline constexpr Index value_rows = formats::Grouped<Row>&& simd::registers >= 32 ? 4 : 2;

// All channels, for `rows` rows of out: a Format's token_values.
template <class Row>
void token_values(const RowRun& v, Index count, const RowShape& shape, const float* const* weight,
                  Index step, Index rows, float* out, const RowsAhead* upcoming) {
  if constexpr (value_rows<Row> == 4) {
    if (rows > 2) {
      if (rows == 4)
        return token_values_of_height<Row, 4>(v, count, shape, weight, step, out, upcoming);
      return token_values_of_height<Row, 3>(v, count, shape, weight, step, out, upcoming);
    }
  }
  if (rows == 2)
    token_values_of_height<Row, 2>(v, count, shape, weight, step, out, upcoming);
  else
    token_values_of_height<Row, 1>(v, count, shape, weight, step, out, upcoming);
}

QUOKA_FUNC void softmax_tile(float* x, Index keys, Index tile_rows, Index rows,
                             SoftmaxState<float>* states, float* factors) {
  constexpr int lanes = simd::lanes;
  const Index size = keys * tile_rows, padded = round_up(size, lanes);
  std::fill(x + size, x + padded, -simd::infinity);
  alignas(64) float lane[lanes];
  simd::Packet top = simd::broadcast(-simd::infinity), sum = simd::zero();
  for (Index i = 0; i < padded; i += lanes) top = simd::max(top, simd::load(x + i));
  simd::store(lane, top);
  for (Index r = 0; r < rows; ++r) {
    for (Index l = r + tile_rows; l < lanes; l += tile_rows) lane[r] = std::max(lane[r], lane[l]);
    factors[r] = states[r].raise(lane[r]);
  }
  for (Index l = 0; l < lanes; ++l)
    lane[l] = l % tile_rows < rows ? states[l % tile_rows].reference() : 0.0f;
  const simd::Packet reference = simd::load(lane);
  constexpr Index together = Index{tuning::softmax_packets} * lanes;
  for (Index i = 0; i < padded;) {
    simd::Packet some = simd::zero();
    for (const Index end = std::min(i + together, padded); i < end; i += lanes) {
      const simd::Packet w = simd::exp(simd::sub(simd::load(x + i), reference));
      some = simd::add(some, w);
      simd::store(x + i, w);
    }
    sum = simd::add(sum, some);
  }
  simd::store(lane, sum);
  for (Index l = 0; l < lanes; ++l)
    if (l % tile_rows < rows) states[l % tile_rows].sum += lane[l];
}

QUOKA_FUNC void add_to_rows(const float* factors, const float* added, Index rows, Index width,
                            float* out) {
  for (Index row = 0; row < rows; ++row) {
    const simd::Packet factor = simd::broadcast(factors[row]);
    for (Index c = row * width; c < (row + 1) * width; c += simd::lanes)
      simd::store(out + c, simd::fma(factor, simd::load(out + c), simd::load(added + c)));
  }
}

#endif  // QUOKA_DEFINES_KERNELS

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
