// The shares of one KV head in float: attention's own tiles, without its values.
//
// 2 * rows * keys * dim FLOPs and one read of the keys a pass. Weights are taken against a block's own maximum and
// kept, 4 bytes per row and key, until the rows' sums are known; a pass is as many panels of rows as have room. Stages,
// over ranges of keys, except the second: weigh, find_factors, add. No result depends on which worker runs them.
#pragma once

#include <quoka/select/mass/head_votes.hpp>
#include <quoka/select/steps/top_k.hpp>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// How many panels of rows have room at a time.
inline Index panels_of_pass(const VoteShape& shape) {
  return panels_at_once(shape.rows(), shape.keys);
}

// Memory that the tasks of a KV head share, beside HeadVotes.
struct FloatMemory {
  FloatMemory(Arena& arena, const VoteShape& shape)
      : FloatMemory(arena, panels_of_pass(shape) * tuning::panel_rows, shape.blocks()) {}
  FloatMemory(Arena& arena, Index lanes, Index blocks)
      : block_max(arena.take<float>(blocks * lanes)),
        block_sum(arena.take<float>(blocks * lanes)),
        row_max(arena.take<float>(lanes)),
        factors(arena.take<float>(lanes)) {}

  float *block_max, *block_sum;  // [panel of the pass][block][lane]
  float *row_max, *factors;      // [panel of the pass][lane]
};

class FloatVotes {
  static constexpr Index width = tuning::panel_rows;

 public:
  FloatVotes(const VoteShape& shape, HeadVotes& votes, FloatMemory& memory)
      : shape_(shape), v_(votes), m_(memory), rows_(shape, votes) {}

  static Index passes(const VoteShape& shape) {
    return ceil_div(shape.panels(), panels_of_pass(shape));
  }
  static Index weight_bytes(const VoteShape& shape) {
    return panels_of_pass(shape) * shape.keys * width * Index{sizeof(float)};
  }
  // Some blocks each: enough work that a task is worth its while.
  static KeyRanges ranges(const VoteShape& shape) {
    return KeyRanges::by_size(shape.keys, 8 * Index{tuning::block_keys});
  }

  // Weights of a range of `k`, the head's past.
  void weigh(Index pass, Index range, const HeadRows& k, const VoteScratch& s) const {
    const auto [begin, end] = ranges(shape_).of(range);
    if (pass == 0) std::fill(v_.hidden + begin, v_.hidden + end, std::uint8_t{0});
    RowKeys keys(k, shape_.keys);
    keys.pack_into(s.tiles);
    BlockPrefetch prefetch;
    keys.walk({begin, end}, panels(pass), prefetch,
              [&](Index p, const KeyRange& block_keys, const PackedBlock& block) {
                PanelState state;
                rows_.weigh(first(pass) + p, keys, block, block_keys.count(), nullptr, s.logits,
                            state, weights(p, block_keys.begin),
                            [&](Index i) { v_.hidden[block_keys.begin + i] = 1; });
                const Index to = at(p, block_keys.begin / tuning::block_keys);
                for (int j = 0; j < tuning::tile_packets; ++j) {
                  simd::store(m_.block_max + to + j * simd::lanes, state[j].max);
                  simd::store(m_.block_sum + to + j * simd::lanes, state[j].sum);
                }
              });
  }

  // The factors that take each row's weights to its part of the shares.
  void find_factors(Index pass) const {
    for (Index p = 0; p < panels(pass); ++p)
      for (Index i = 0; i < width; ++i) {
        const Index row = (first(pass) + p) * width + i;
        float most = -simd::infinity;
        double sum = 0.0;
        m_.factors[p * width + i] = 0.0f;
        if (row >= shape_.rows()) continue;
        const SoftmaxState<float>& chunk = v_.chunk[row];
        most = chunk.max;
        for (Index block = 0; block < shape_.blocks(); ++block)
          most = std::max(most, m_.block_max[at(p, block) + i]);
        const float reference = std::isfinite(most) ? most : 0.0f;
        const auto in_units_of_row = [&](float max, float of_sum) {
          return static_cast<double>(simd::exp(max - reference)) * static_cast<double>(of_sum);
        };
        const double of_chunk = in_units_of_row(chunk.max, chunk.sum);
        for (Index block = 0; block < shape_.blocks(); ++block)
          sum += in_units_of_row(m_.block_max[at(p, block) + i], m_.block_sum[at(p, block) + i]);
        sum += of_chunk;
        m_.row_max[p * width + i] = reference;
        if (!(sum > 0.0 && std::isfinite(sum))) continue;
        const double part = static_cast<double>(v_.part[row]) / sum;
        m_.factors[p * width + i] = static_cast<float>(part);
        v_.chunk_share[row / shape_.voters.rows_of_list()] += static_cast<float>(part * of_chunk);
      }
  }

  // To the shares of the KV head's lists.
  void add(Index pass, Index range, const ShareRows& shares, Index first_list) const {
    const auto [begin, end] = ranges(shape_).of(range);
    const Index of_list = shape_.voters.rows_of_list();
    const Index first_row = first(pass) * width,
                end_row = std::min(first_row + panels(pass) * width, shape_.rows());
    for (Index list = first_row / of_list; list * of_list < end_row; ++list) {
      float* const to = shares[first_list + list];
      if (list * of_list >= first_row) std::fill(to + begin, to + end, 0.0f);
      const Index row = std::max(list * of_list, first_row),
                  last_row = std::min((list + 1) * of_list, end_row) - 1;
      for (Index key = begin; key < end; key += tuning::block_keys)
        add(row - first_row, last_row - first_row, key,
            std::min(key + Index{tuning::block_keys}, end), to);
    }
    for (Index list = 0; pass + 1 == passes(shape_) && list < shape_.voters.lists; ++list)
      for (Index t = begin; t < end; ++t)
        if (v_.hidden[t] != 0) shares[first_list + list][t] = -simd::infinity;
  }

 private:
  Index first(Index pass) const { return pass * panels_of_pass(shape_); }
  Index panels(Index pass) const {
    return std::min(panels_of_pass(shape_), shape_.panels() - first(pass));
  }
  Index at(Index p, Index block) const { return (p * shape_.blocks() + block) * width; }
  float* weights(Index p, Index key) const {
    return reinterpret_cast<float*>(v_.weights) + (p * shape_.keys + key) * width;
  }

  // Rows [row, last_row] of the pass to keys [begin, end), which lie in one block.
  void add(Index row, Index last_row, Index begin, Index end, float* to) const {
    alignas(64) float factors[tuning::max_panels_per_task * width];
    const Index first_panel = row / width, panels = last_row / width + 1 - first_panel,
                block = begin / tuning::block_keys;
    for (Index p = 0; p < panels; ++p)
      for (Index i = 0; i < width; ++i) {
        const Index of = (first_panel + p) * width + i;
        const bool own = row <= of && of <= last_row && m_.factors[of] > 0.0f;
        const float max = m_.block_max[at(first_panel + p, block) + i];
        factors[p * width + i] = own ? simd::exp(max - m_.row_max[of]) * m_.factors[of] : 0.0f;
      }
    for (Index t = begin; t < end; ++t) {
      simd::Packet sum = simd::zero();
      for (Index p = 0; p < panels; ++p)
        simd::unroll<tuning::tile_packets>([&](auto j) QUOKA_INLINE_LAMBDA {
          const Index lane = j * simd::lanes;
          sum = simd::fma(simd::load(weights(first_panel + p, t) + lane),
                          simd::load(factors + p * width + lane), sum);
        });
      to[t] += simd::reduce_add(sum);
    }
  }

  const VoteShape& shape_;
  HeadVotes& v_;
  FloatMemory& m_;
  VotingRows rows_;
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
