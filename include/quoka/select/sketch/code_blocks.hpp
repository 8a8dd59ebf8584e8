// A head's sketched keys, a pair of blocks (32 keys) at a time, in the order of the keys wherever they lie in the
// cache: the one walk over codes, for scores (sketched_cosines.hpp) and for masses (sketched_mass.hpp).
//
// A block of the sketch that holds 16 keys as they are wanted is read in place; others are put together. The pair some
// way ahead is prefetched on the way.
#pragma once

#include <quoka/kernels/code_units.hpp>
#include <quoka/select/sketch/key_sketch.hpp>
#include <quoka/simd/code_products.hpp>
#include <quoka/simd/tuning.hpp>

#include <algorithm>
#include <cstring>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

class CodeBlocks {
 public:
  static constexpr Index pair = simd::code_pair;

  // Blocks of keys [0, end). mapping: null where key i is row i of the sketch. gathered: memory for two blocks.
  CodeBlocks(const KeySketch& sketch, const KeySketch::RowMapping* mapping, Index end, Index b,
             Index head, Index dim, std::uint8_t* gathered)
      : sketch_(sketch),
        mapping_(mapping),
        end_(end),
        b_(b),
        head_(head),
        steps_(simd::code_steps(dim)),
        gathered_(gathered) {}

  // use(kv, count, codes, ahead) for every step-th pair of blocks in [begin, end): codes of keys [kv, kv + count), of
  // which only the last pair may have fewer than 32, and the blocks to ask for meanwhile. begin: a multiple of 32.
  template <class Use>
  void for_each_pair(Index begin, Index end, Index step, Use&& use) const {
    for (Index kv = begin; kv < end; kv += step * pair) {
      const Index count = std::min(pair, end - kv);
      const std::uint8_t* codes[2];
      codes[0] = block(kv, std::min<Index>(count, simd::code_block), 0);
      codes[1] = count > simd::code_block
                     ? block(kv + simd::code_block, count - simd::code_block, 1)
                     : codes[0];
      const Index later = kv + tuning::sketch_prefetch_pairs * pair;
      simd::LaterBlocks ahead;
      if (later + pair <= end_) ahead = {around(later), around(later + simd::code_block)};
      use(kv, count, std::as_const(codes), ahead);
    }
  }

  bool in_order() const { return mapping_ == nullptr; }
  // A number of each key of a pair, of the `column` that the sketch has of the head: in place, or copied to `room`
  // [32].
  const float* numbers(const float* column, Index kv, Index count, float* room) const {
    if (in_order() && count == pair) return column + kv;
    for (Index first = 0; first < count; first += simd::code_block) {
      const Index n = std::min<Index>(simd::code_block, count - first);
      if (in_one_block(kv + first))
        std::copy_n(column + row(kv + first), n, room + first);
      else
        for (Index i = 0; i < n; ++i) room[first + i] = column[row(kv + first + i)];
    }
    return room;
  }

 private:
  static constexpr Index line = simd::code_block * simd::code_channels;

  Index row(Index key) const { return mapping_ != nullptr ? (*mapping_)(key) : key; }
  bool in_one_block(Index first) const {
    return mapping_ == nullptr || mapping_->keeps_blocks(first);
  }
  // The block that holds this key.
  const std::uint8_t* around(Index key) const {
    return sketch_.codes(b_, head_, row(key) / simd::code_block);
  }

  // Codes of keys [first, first + n), 0 < n <= 16: in place, or in half 0 or 1 of what is gathered.
  const std::uint8_t* block(Index first, Index n, Index half) const {
    constexpr Index width = simd::code_block;
    if (in_one_block(first)) return around(first);
    Index rows[width] = {};  // n is not 0, which a compiler does not know
    for (Index i = 0; i < n; ++i) rows[i] = row(first + i);
    bool in_place = rows[0] % width == 0;
    for (Index i = 0; i < n; ++i) in_place = in_place && rows[i] == rows[0] + i;
    if (in_place) return sketch_.codes(b_, head_, rows[0] / width);
    std::uint8_t* const to = gathered_ + half * steps_ * simd::code_channels * width;
    const std::uint8_t* prefetched = nullptr;
    for (Index i = 0; i < n; ++i) {
      const std::uint8_t* const from =
          sketch_.codes(b_, head_, rows[i] / width) + rows[i] % width * simd::code_channels;
      const Index ahead = first + i + tuning::gathered_prefetch_keys;
      const std::uint8_t* const later = ahead < end_ ? around(ahead) : prefetched;
      // A key's codes lie in every line of its block.
      for (Index s = 0; s < steps_; ++s) {
        std::memcpy(to + (s * width + i) * simd::code_channels, from + s * line,
                    simd::code_channels);
        if (later != prefetched) simd::prefetch(later + s * line);
      }
      prefetched = later;
    }
    return to;
  }

  const KeySketch& sketch_;
  const KeySketch::RowMapping* mapping_;
  Index end_, b_, head_, steps_;
  std::uint8_t* gathered_;
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
