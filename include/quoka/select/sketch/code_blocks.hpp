// Blocks of a head's codes in the order of its keys, wherever the keys lie in the cache: a block of the
// sketch that holds 16 of them as they are wanted is read in place, others are put together.
#pragma once

#include <quoka/cache/key_sketch.hpp>
#include <quoka/simd/code_dots.hpp>
#include <quoka/simd/tuning.hpp>

#include <cstring>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

class CodeBlocks {
 public:
  // Of keys [0, end). places: null where key i is row i of the sketch. gathered: two blocks.
  CodeBlocks(const KeySketch& sketch, const KeySketch::Places* places, Index end, Index b,
             Index head, Index dim, std::uint8_t* gathered)
      : sketch_(sketch),
        places_(places),
        end_(end),
        b_(b),
        head_(head),
        steps_(simd::code_steps(dim)),
        gathered_(gathered) {}

  // Rows of the sketch that hold keys [first, first + n), 0 < n <= 16.
  void rows(Index first, Index n, Index* to) const {
    if (in_one_block(first))
      for (Index i = 0, begin = row(first); i < n; ++i) to[i] = begin + i;
    else
      for (Index i = 0; i < n; ++i) to[i] = row(first + i);
  }

  // The codes of the same keys: in place, or in half 0 or 1 of what is gathered.
  const std::uint8_t* block(Index first, Index n, Index half) const {
    constexpr Index width = simd::code_block;
    if (in_one_block(first)) return sketch_.codes(b_, head_, row(first) / width);
    Index rows[width] = {};  // n is not 0, which a compiler does not know
    this->rows(first, n, rows);
    bool in_place = true;
    for (Index i = 0; i < n; ++i) in_place = in_place && rows[i] == rows[0] + i;
    if (in_place && rows[0] % width == 0) return sketch_.codes(b_, head_, rows[0] / width);
    std::uint8_t* const to = gathered_ + half * steps_ * simd::code_channels * width;
    const std::uint8_t* asked = nullptr;
    for (Index i = 0; i < n; ++i) {
      const std::uint8_t* const from =
          sketch_.codes(b_, head_, rows[i] / width) + rows[i] % width * simd::code_channels;
      const Index ahead = first + i + tuning::gathered_prefetch_keys;
      const std::uint8_t* const later = ahead < end_ ? around(ahead) : asked;
      // A key's codes lie in every line of its block.
      for (Index s = 0; s < steps_; ++s) {
        std::memcpy(to + (s * width + i) * simd::code_channels, from + s * line,
                    simd::code_channels);
        if (later != asked) simd::prefetch(later + s * line);
      }
      asked = later;
    }
    return to;
  }

  // The block that holds this key, to be asked for.
  const std::uint8_t* around(Index key) const {
    return sketch_.codes(b_, head_, row(key) / simd::code_block);
  }

 private:
  static constexpr Index line = simd::code_block * simd::code_channels;

  Index row(Index key) const { return places_ != nullptr ? (*places_)(key) : key; }
  bool in_one_block(Index first) const {
    return places_ == nullptr || places_->keeps_blocks(first);
  }

  const KeySketch& sketch_;
  const KeySketch::Places* places_;
  Index end_, b_, head_, steps_;
  std::uint8_t* gathered_;
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
