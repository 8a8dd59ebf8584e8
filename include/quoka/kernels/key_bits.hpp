// Which of some keys a query sees, as bits: 64 keys a word, the first one lowest.
#pragma once

#include <quoka/kernels/kernels.hpp>

#include <algorithm>
#include <cstdint>
#include <span>

#if QUOKA_DEFINES_KERNELS
#include <quoka/simd/simd.hpp>
#include <bit>
#include <limits>
#include <type_traits>
#endif

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

using KeyBits = std::uint64_t;
inline constexpr Index word_keys = 64;

// f(word, mask of bits [begin, end) in it).
template <class F>
void for_key_words(Index begin, Index end, F&& f) {
  for (Index at = begin; at < end; at = (at / word_keys + 1) * word_keys) {
    const Index word = at / word_keys, last = std::min(end, (word + 1) * word_keys) - 1;
    f(word, ~KeyBits{0} << (at % word_keys) & ~KeyBits{0} >> (word_keys - 1 - last % word_keys));
  }
}
inline void set_keys(KeyBits* bits, Index begin, Index end) {
  for_key_words(begin, end, [&](Index word, KeyBits mask) { bits[word] |= mask; });
}
inline void clear_keys(KeyBits* bits, Index begin, Index end) {
  for_key_words(begin, end, [&](Index word, KeyBits mask) { bits[word] &= ~mask; });
}

// Sets the bits of keys that a list names, those of [first, first + count), key `first` being bit
// 0. Its entries, in any order, are blocks of `block` keys; -1 names nothing.
inline void set_listed_keys(std::span<const Position> list, Index block, Index first, Index count,
                            KeyBits* bits) {
  if (block > 1) {
    for (const Position x : list)
      if (x >= 0)
        set_keys(bits, std::clamp<Index>(x * block - first, 0, count),
                 std::clamp<Index>((x + 1) * block - first, 0, count));
    return;
  }
  const auto add = [&](Position x) {
    const auto key = static_cast<std::uint64_t>(x - first);  // -1 wraps to a huge number
    if (key < static_cast<std::uint64_t>(count))
      bits[key / word_keys] |= KeyBits{1} << (key % word_keys);
  };
  // Many lists ascend, so the next entry is often in the word that was just written, and would wait
  // for it. Entries from eight places of the list are taken in turn.
  constexpr std::size_t places = 8;
  const std::size_t step = list.size() / places;
  for (std::size_t i = 0; i < step; ++i)
    for (std::size_t place = 0; place < places; ++place) add(list[place * step + i]);
  for (const Position x : list.subspan(places * step)) add(x);
}

// Keys of some words.
QUOKA_FUNC Index count_words(const KeyBits* bits, Index words);

// Keys of the words that hold [begin, end), begin the first of one.
inline Index count_keys(const KeyBits* bits, Index begin, Index end) {
  return count_words(bits + begin / word_keys, ceil_div(end, word_keys) - begin / word_keys);
}

// Numbers that a mask adds to the logits of a word's keys: which keys are seen, and to which of
// these it adds something other than 0.
struct MaskedKeys {
  KeyBits seen, biased;
};
QUOKA_FUNC MaskedKeys masked_keys(const float* added, Index keys);

// first + i for each bit i of a word that is set, to `to`, which has room for most_lanes more than
// that. Returns the end of them.
QUOKA_FUNC Position* positions_of(KeyBits left, Index first_key, Position* to);

// bias[i][panel_rows], of key list[i]: 0 where its bit is set, else -infinity, for `rows` rows side
// by side. Bit 0 is key `first`.
QUOKA_FUNC void hide_unseen_keys(const KeyBits* bits, Index first, const Position* list,
                                 Index count, Index rows, float* bias);

#if QUOKA_DEFINES_KERNELS

QUOKA_FUNC Index count_words(const KeyBits* bits, Index words) {
  Index sum = 0;
  for (Index w = 0; w < words; ++w) sum += std::popcount(bits[w]);
  return sum;
}

QUOKA_FUNC MaskedKeys masked_keys(const float* added, Index keys) {
  constexpr float lowest = std::numeric_limits<float>::lowest(),
                  above_zero = std::numeric_limits<float>::denorm_min();
  KeyBits seen = 0, other = 0;
  simd::for_each_compared(keys, [&](auto lanes) QUOKA_INLINE_LAMBDA {
    // Both are true for NaN.
    const auto more = lanes.load(added);
    seen |= KeyBits{simd::not_less(more, lanes.broadcast(lowest))} << lanes.i;
    other |= KeyBits{simd::less(more, lanes.broadcast(0.0f)) |
                     simd::not_less(more, lanes.broadcast(above_zero))}
             << lanes.i;
  });
  return {seen, other & seen};
}

// Compressed where that can be: a branch on the number of bits in a word would be mispredicted.
template <bool compress = simd::has_lane_masks>
Position* word_positions(KeyBits left, Index first_key, Position* to) {
  auto first = static_cast<Position>(first_key);
  if constexpr (compress) {
    constexpr int lanes = compress ? simd::lanes : 0;  // looked up only where it is needed
    constexpr KeyBits all = (KeyBits{1} << simd::lanes) - 1;
    for (Index i = 0; i < word_keys; i += simd::lanes) {
      to += simd::store_compressed<lanes>(to, static_cast<unsigned>(left & all), first);
      left >>= simd::lanes, first += simd::lanes;
    }
  } else {
    for (; left != 0; left &= left - 1)
      *to++ = first + static_cast<Position>(std::countr_zero(left));
  }
  return to;
}

QUOKA_FUNC Position* positions_of(KeyBits left, Index first_key, Position* to) {
  return word_positions(left, first_key, to);
}

QUOKA_FUNC void hide_unseen_keys(const KeyBits* bits, Index first, const Position* list,
                                 Index count, Index rows, float* bias) {
  static constexpr float bit_values[2] = {-simd::infinity, 0.0f};  // a branch would be mispredicted
  const auto fill = [&](auto n) {
    for (Index key = 0; key < count; ++key) {
      const Index at = list[key] - first;
      const float x = bit_values[bits[at / word_keys] >> (at % word_keys) & 1u];
      for (Index i = 0; i < n; ++i) bias[key * tuning::panel_rows + i] = x;
    }
  };
  if (rows == 4)
    fill(std::integral_constant<Index, 4>{});
  else if (rows == 8)
    fill(std::integral_constant<Index, 8>{});
  else if (rows == 16)
    fill(std::integral_constant<Index, 16>{});
  else
    fill(rows);
}

#endif  // QUOKA_DEFINES_KERNELS

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
