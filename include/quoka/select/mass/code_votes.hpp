// The shares of one KV head by its keys' sketch: what weights of 8-bit logits (sketch/coded_weights.hpp) become, whose
// bound holds here, too. Channels are those that are multiplied: of at least fewest_choosing_rows rows at least half,
// those in which the rows' logits differ most from key to key (sketch/coded_channels.hpp), unless all are asked for. No
// logit is computed in float but those of the chunk: shares are others than in float, of nearly the same mass.
#pragma once

#include <quoka/select/mass/head_votes.hpp>
#include <quoka/select/sketch/coded_weights.hpp>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// Memory that the tasks of a KV head share, beside HeadVotes, whose memory has the weights.
struct VoteCodes : CodeMemory {
  VoteCodes(Arena& arena, const VoteShape& shape, const HeadVotes& votes)
      : CodeMemory(arena, shape.rows(), shape.keys, shape.dim),
        dropped(arena.take<float>(shape.rows())) {
    weights = reinterpret_cast<std::uint32_t*>(votes.weights);
  }

  float* dropped;  // [rows] what channels that are not multiplied add to the logits of past keys
};

// Tiles: what multiplies codes where tiles serve (kernels/code_units.hpp).
template <class Tiles>
class CodeVotes : public CodedWeights<Tiles> {
  using Base = CodedWeights<Tiles>;
  using Base::pair, Base::keys_, Base::blocks_, Base::ranges_, Base::b_, Base::kv_head_, Base::m_,
      Base::s_;

 public:
  static Index passes(const VoteShape& shape) {
    return MassShape::passes(shape.rows(), shape.keys);
  }
  static Index weight_bytes(const VoteShape& shape) {
    return pass_rows(shape) * MassShape::pairs(shape.keys) * pair * Index{sizeof(std::uint16_t)};
  }
  static KeyRanges ranges(const VoteShape& shape) {
    return MassShape::ranges(shape.keys, shape.rows());
  }
  static void reserve(const VoteShape& shape, CodedRows& coded) {
    coded.reserve<Tiles>(shape.rows(), shape.dim, pass_rows(shape));
  }

  CodeVotes(const VoteShape& shape, const SketchedKeys& keys, Index b, Index kv_head,
            HeadVotes& votes, VoteCodes& memory, const CodeScratch& scratch)
      : Base(keys, ranges(shape), b, kv_head, memory, scratch),
        shape_(shape),
        v_(votes),
        dropped_(memory.dropped) {}

  // Codes of the rows, which are in units of log2 from here on, and of the chosen channels.
  void encode_rows() const {
    const Index rows = shape_.rows();
    for (Index i = 0; i < rows * shape_.dim; ++i) v_.rows[i] *= simd::log2_e;
    CodedChannels& channels = m_.channels;
    channels.take_all();
    if (!shape_.all_channels && rows >= tuning::fewest_choosing_rows && shape_.keys > 0) {
      const KeySketch& sketch = keys_.sketch();
      channels.sample(blocks_, sketch.scales(b_, kv_head_), sketch.lengths(b_, kv_head_),
                      shape_.keys, s_.channel_sums);
      channels.choose(v_.rows, rows, s_.channel_sums);
    }
    channels.compact(v_.rows, rows, dropped_);
    this->encode(v_.rows, rows, pass_rows(shape_));
  }

  // The factors that take each row's weights to its part of the shares.
  void find_factors(Index pass) const {
    const auto [first, count] = this->rows_of(pass);
    for (Index m = 0; m < count; ++m) {
      const Index row = first + m;
      double sum = 0.0;
      for (Index r = 0; r < ranges_.count; ++r)
        sum += static_cast<double>(m_.range_rows[r * this->stride() + m]);
      const SoftmaxState<float>& chunk = v_.chunk[row];
      const double of_chunk =
          chunk.sum > 0.0f
              ? static_cast<double>(chunk.sum) *
                    std::exp2(static_cast<double>(chunk.max) * static_cast<double>(simd::log2_e) +
                              static_cast<double>(m_.shifts[row] - dropped_[row]))
              : 0.0;
      sum += of_chunk;
      m_.factors[m] = 0.0f;
      if (!(sum > 0.0 && std::isfinite(sum))) continue;
      const double part = static_cast<double>(v_.part[row]) / sum;
      m_.factors[m] = static_cast<float>(part * static_cast<double>(share_scale));
      v_.chunk_share[row / shape_.voters.rows_of_list()] += static_cast<float>(part * of_chunk);
    }
  }
  // To the shares of the KV head's lists.
  void add(Index pass, Index r, const ShareRows& shares, Index first_list) const {
    if (!this->by_codes()) return;
    const auto [begin, end] = ranges_.of(r);
    const auto [first, count] = this->rows_of(pass);
    const Index of_list = shape_.voters.rows_of_list();
    for (Index kv = begin; kv < end; kv += pair) {
      const Index n = std::min(pair, shape_.keys - kv);
      for (Index row = first, next = 0; row < first + count; row = next) {
        const Index list = row / of_list;
        next = std::min((list + 1) * of_list, first + count);
        alignas(64) float part[pair];
        shares_of_weights(this->weights(kv, count) + (row - first) * pair / 2,
                          m_.factors + row - first, next - row, Aggregation::mean, part);
        float* const to = shares[first_list + list] + kv;
        if (row == list * of_list)
          std::copy_n(part, n, to);
        else
          for (Index i = 0; i < n; ++i) to[i] += part[i];
      }
    }
    if (pass + 1 < m_.coded->passes()) return;
    for (Index kv = begin; kv < end; kv += pair)
      for (Index t = kv; m_.partial[kv / pair] != 0 && t < std::min(kv + pair, end); ++t)
        for (Index list = 0; m_.units[t] < 0.0f && list < shape_.voters.lists; ++list)
          shares[first_list + list][t] = -simd::infinity;
  }

 private:
  static Index pass_rows(const VoteShape& shape) {
    return MassShape::pass_rows(shape.rows(), shape.keys);
  }

  const VoteShape& shape_;
  HeadVotes& v_;
  float* dropped_;  // [rows]
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
