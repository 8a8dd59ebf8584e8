// Which channels of 8-bit codes the voters of a KV head are multiplied with: those in which their logits differ most
// from key to key.
//
//   noise[c] = mean over the rows of row[c]^2 * max(variance[c], largest (key[c] - mean[c])^2 / 16 of the first 16
//   keys)
//
// Mean and variance are those of up to 512 keys, evenly spaced in blocks; the first keys count by themselves, since an
// attention sink is a single key. Channels go by steps of four, as codes lie. At least half of the steps stay; of the
// others those go that have the least noise, as long as the logits that go have a standard deviation of at most
// tuning::dropped_logits. The mean of a dropped channel adds the same to a row's logits of all past keys: `dropped`.
//
// Its loss is in simd/tuning.hpp. It keeps nothing from call to call, so a result does not depend on how a cache
// came about. For some 256 rows a head choosing takes 1/100 of the products.
#pragma once

#include <quoka/base/arena.hpp>
#include <quoka/kernels/code_units.hpp>
#include <quoka/kernels/inverse_norm.hpp>
#include <quoka/select/codes.hpp>
#include <quoka/simd/tuning.hpp>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

class CodedChannels {
 public:
  CodedChannels(Arena& arena, Index dim)
      : dim_(dim),
        all_(simd::code_steps(dim)),
        steps_(arena.take<Index>(all_)),
        mean_(arena.take<float>(all_ * simd::code_channels)),
        spread_(arena.take<float>(all_ * simd::code_channels)) {}

  // Memory of one worker for sample(), in floats.
  static Index sums_size(Index dim) { return 2 * simd::code_steps(dim) * line; }

  // All channels stay.
  void take_all() {
    count_ = all_;
    std::iota(steps_, steps_ + all_, Index{0});
  }

  // Means and variances of the keys that `blocks` walks over, of `keys` > 0; scales and lengths are the sketch's
  // columns of the head. A key that codes cannot stand for does not count.
  void sample(const CodeBlocks& blocks, const float* scales, const float* lengths, Index keys,
              float* sums) {
    const Index size = all_ * line, pairs = ceil_div(keys, CodeBlocks::pair);
    std::fill_n(sums, 2 * size, 0.0f);
    Index count = 0;
    for_each_block(blocks, scales, lengths, keys, std::max<Index>(1, pairs / sampled_pairs),
                   [&](const std::uint8_t* codes, const float* units, Index coded) {
                     count += coded;
                     for (Index at = 0; at < size; at += line)
                       for (Index i = 0; i < line; ++i) {
                         const float x = value(codes[at + i], units[i]);
                         sums[at + i] += x;
                         sums[size + at + i] += x * x;
                       }
                   });
    const float share = 1.0f / static_cast<float>(std::max<Index>(count, 1));
    for (Index c = 0; c < all_ * simd::code_channels; ++c) {
      float sum = 0.0f, squares = 0.0f;
      for (Index key = 0; key < simd::code_block; ++key) {
        sum += sums[simd::key_code_at(key, c)];
        squares += sums[size + simd::key_code_at(key, c)];
      }
      mean_[c] = sum * share;
      spread_[c] = std::max(0.0f, squares * share - mean_[c] * mean_[c]);
    }
    for_each_block(blocks, scales, lengths, std::min(keys, simd::code_block), 1,
                   [&](const std::uint8_t* codes, const float* units, Index) {
                     for (Index c = 0; c < all_ * simd::code_channels; ++c)
                       for (Index key = 0; key < simd::code_block; ++key) {
                         const float unit = units[key * simd::code_channels];
                         if (unit == 0.0f) continue;
                         const float off = value(codes[simd::key_code_at(key, c)], unit) - mean_[c];
                         spread_[c] = std::max(spread_[c], off * off * first_keys_weight);
                       }
                   });
  }

  // Chooses for rows [count, dim], of logits in units of log2. squares: memory for as many floats as a row has.
  void choose(const float* rows, Index count, float* squares) {
    take_all();
    std::fill_n(squares, dim_, 0.0f);
    for (Index m = 0; m < count; ++m)
      for (Index c = 0; c < dim_; ++c) squares[c] += rows[m * dim_ + c] * rows[m * dim_ + c];
    // The means are needed later, the spreads are not: a step's noise takes the place of its first.
    for (Index step = 0; step < all_; ++step) {
      double noise = 0.0;
      const Index first = step * simd::code_channels;
      for (Index c = first; c < std::min(dim_, first + simd::code_channels); ++c)
        noise += static_cast<double>(squares[c]) * static_cast<double>(spread_[c]);
      noise /= static_cast<double>(std::max<Index>(count, 1));
      spread_[first] =
          static_cast<float>(std::min(noise, double{std::numeric_limits<float>::max()}));
    }
    const auto of = [&](Index step) { return spread_[step * simd::code_channels]; };
    std::sort(steps_, steps_ + all_,
              [&](Index a, Index b) { return of(a) > of(b) || (of(a) == of(b) && a < b); });
    constexpr float most = tuning::dropped_logits * simd::log2_e;
    float gone = 0.0f;
    while (count_ > ceil_div(all_, Index{2})) {
      gone += of(steps_[count_ - 1]);
      if (!(gone <= most * most)) break;
      --count_;
    }
    // As many as tiles take, and an even number, which products in 16 bits need.
    while (count_ < all_ && (count_ % 2 != 0 || !TiledQueries::fits(count_))) ++count_;
    std::sort(steps_, steps_ + count_);
    // Only the others' means are needed.
    for (Index i = 0; i < count_; ++i)
      std::fill_n(mean_ + steps_[i] * simd::code_channels, simd::code_channels, 0.0f);
  }

  bool are_all() const { return count_ == all_; }
  Index steps() const { return count_; }
  bool stays(Index step) const { return std::binary_search(steps_, steps_ + count_, step); }
  // Channels that stay.
  Index dim() const {
    return count_ * simd::code_channels - (stays(all_ - 1) ? all_ * simd::code_channels - dim_ : 0);
  }

  // Rows [count, head_dim] become [count, dim()] in their place. dropped[m]: what the means of the other channels add
  // to the logits of row m.
  void compact(float* rows, Index count, float* dropped) const {
    std::fill_n(dropped, count, 0.0f);
    if (are_all()) return;
    float* to = rows;
    for (Index m = 0; m < count; ++m, rows += dim_) {
      dropped[m] = sum_of_products(rows, mean_, dim_);
      for (Index i = 0; i < count_; ++i) {
        const Index first = steps_[i] * simd::code_channels;
        to = std::copy(rows + first, rows + std::min(dim_, first + simd::code_channels), to);
      }
    }
  }

  // The same channels of two blocks of keys: `codes` themselves, or copies in `room`, of two blocks.
  void compact(CodePair codes, const simd::LaterBlocks& ahead, std::uint8_t* room,
               const std::uint8_t* (&kept)[2]) const {
    const std::uint8_t* const later[2] = {ahead.first, ahead.second};
    for (Index half = 0; half < 2; ++half) {
      std::uint8_t* to = room + half * count_ * line;
      kept[half] = to;
      for (Index i = 0; i < count_; ++i, to += line) {
        std::memcpy(to, codes[half] + steps_[i] * line, line);
        if (later[half] != nullptr) simd::prefetch(later[half] + steps_[i] * line);
      }
    }
  }

 private:
  static constexpr Index line = simd::code_block * simd::code_channels;  // of a block's step
  static constexpr Index sampled_pairs = 16;                             // of blocks
  static constexpr float first_keys_weight = 1.0f / 16.0f;

  static float value(std::uint8_t code, float unit) {
    return static_cast<float>(static_cast<int>(code) - simd::code_bias) * unit;
  }

  // use(codes, units, coded): of every step-th pair of blocks each block; units [line] of its keys, 0 where there is no
  // key or codes cannot stand for it; how many are coded.
  template <class Use>
  static void for_each_block(const CodeBlocks& blocks, const float* scales, const float* lengths,
                             Index keys, Index step, Use&& use) {
    blocks.for_each_pair(
        0, keys, step, [&](Index kv, Index count, CodePair codes, const simd::LaterBlocks&) {
          alignas(64) float room[2][CodeBlocks::pair], units[line];
          const float* const scale = blocks.numbers(scales, kv, count, room[0]);
          const float* const length = blocks.numbers(lengths, kv, count, room[1]);
          for (Index half = 0, key = 0; half < 2 && key < count; ++half) {
            Index coded = 0;
            for (Index i = 0; i < simd::code_block; ++i, ++key) {
              const float unit = key < count ? scale[key] * length[key] : 0.0f;
              std::fill_n(units + i * simd::code_channels, simd::code_channels, unit);
              coded += unit != 0.0f ? 1 : 0;
            }
            use(codes[half], units, coded);
          }
        });
  }

  Index dim_, all_;  // head_dim; steps
  Index* steps_;     // [count_] that stay, ascending
  Index count_ = 0;
  float *mean_, *spread_;  // [channels]; means of what is dropped, once it is chosen
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
