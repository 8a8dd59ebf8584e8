// Which keys each query sees, as bits: what lists name and causality, the window and a mask leave of it.
//
// An item's lists are read once, a stretch of keys at a time. From there on a query's keys are bits: in order, each
// once, whatever order a list has and however often it names a key. Where there is a mask, marks say for each query and
// step of 128 keys whether it adds something to a logit, or hides a key from some heads alone.
#pragma once

#include <quoka/attention/call.hpp>
#include <quoka/base/arena.hpp>
#include <quoka/kernels/compact.hpp>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <limits>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

using KeyBits = std::uint64_t;  // of 64 keys, the first one lowest

class SeenKeys {
 public:
  static constexpr Index word_keys = 64;
  static constexpr Index step_keys = 128, step_words = step_keys / word_keys;
  // Keys of a stretch, at most: memory does not grow with the cache.
  static constexpr Index stretch_keys = Index{1} << 16;

  enum Mark : std::uint8_t {
    biased = 1,  // seen, with something else than 0 added
    uneven = 2,  // seen by some of the query's heads and not by others
  };

  SeenKeys(Arena& arena, const AttentionCall& call, Index queries) {
    const Index keys = std::min(std::max(call.past_k.len(), call.chunk_k.len()), stretch_keys);
    steps_ = ceil_div(keys, step_keys);
    bits_ = arena.take<KeyBits>(queries * steps_ * step_words);
    marks_ = arena.take<std::uint8_t>(call.mask != nullptr ? queries * steps_ : 0);
  }

  // The stretch is columns [first, first + count): the past's rows, then the chunk's. For queries [query, query +
  // queries) of one KV head.
  void read(const AttentionCall& call, Index b, Index kv_head, Index query, Index queries,
            Index first, Index count) {
    steps_ = ceil_div(count, step_keys);
    has_marks_ = call.mask != nullptr;
    const auto in_stretch = [&](Index column) {
      return std::clamp<Index>(column - first, 0, count);
    };
    for (Index i = 0; i < queries; ++i) {
      KeyBits* const to = bits_ + i * steps_ * step_words;
      std::fill_n(to, steps_ * step_words, KeyBits{0});
      const KeyRange in_sight{in_stretch(call.begin_column(query + i)),
                              in_stretch(call.end_column(query + i))};
      if (call.lists == nullptr) {
        set(to, in_sight.begin, in_sight.end);
      } else {
        set_list(call.lists->list(b, kv_head, query + i), call.lists->block(), first, count, to);
        clear(to, 0, in_sight.begin), clear(to, in_sight.end, count);
      }
      if (call.mask != nullptr) heed_mask(call, b, kv_head, query + i, first, count, i);
    }
  }

  // Bits of the i-th of these queries: words of whole steps; only bits of the stretch are set.
  const KeyBits* bits(Index i) const { return bits_ + i * steps_ * step_words; }
  unsigned marks(Index i, Index step) const { return has_marks_ ? marks_[i * steps_ + step] : 0u; }

 private:
  // f(word, mask of bits [begin, end) in it).
  template <class F>
  static void for_words(Index begin, Index end, F&& f) {
    for (Index at = begin; at < end; at = (at / word_keys + 1) * word_keys) {
      const Index word = at / word_keys, last = std::min(end, (word + 1) * word_keys) - 1;
      f(word, ~KeyBits{0} << (at % word_keys) & ~KeyBits{0} >> (word_keys - 1 - last % word_keys));
    }
  }
  static void set(KeyBits* bits, Index begin, Index end) {
    for_words(begin, end, [&](Index word, KeyBits mask) { bits[word] |= mask; });
  }
  static void clear(KeyBits* bits, Index begin, Index end) {
    for_words(begin, end, [&](Index word, KeyBits mask) { bits[word] &= ~mask; });
  }

  static void set_list(std::span<const Position> list, Index block, Index first, Index count,
                       KeyBits* bits) {
    if (block > 1) {
      for (const Position x : list)
        if (x >= 0)
          set(bits, std::clamp<Index>(x * block - first, 0, count),
              std::clamp<Index>((x + 1) * block - first, 0, count));
      return;
    }
    const auto add = [&](Position x) {
      const auto key = static_cast<std::uint64_t>(x - first);  // of -1 beyond the last, too
      if (key < static_cast<std::uint64_t>(count))
        bits[key / word_keys] |= KeyBits{1} << (key % word_keys);
    };
    // Many lists ascend: eight places of it in turn, since the next entry is often in the word that was just written.
    constexpr std::size_t places = 8;
    const std::size_t step = list.size() / places;
    for (std::size_t i = 0; i < step; ++i)
      for (std::size_t place = 0; place < places; ++place) add(list[place * step + i]);
    for (const Position x : list.subspan(places * step)) add(x);
  }

  // Clears the bits of keys that the mask hides from all heads of the group, for the i-th query.
  void heed_mask(const AttentionCall& call, Index b, Index kv_head, Index query, Index first,
                 Index count, Index i) {
    constexpr Index together = 1024, most_words = together / word_keys;  // they stay in L1
    constexpr float lowest = std::numeric_limits<float>::lowest(),
                    above_zero = std::numeric_limits<float>::denorm_min();
    const bool own = call.mask->heads() > 1;  // a mask of each head
    KeyBits* const bits = bits_ + i * steps_ * step_words;
    std::uint8_t* const marks = marks_ + i * steps_;
    std::fill_n(marks, steps_, std::uint8_t{0});
    for (Index at = 0; at < count; at += together) {
      const Index n = std::min(together, count - at), words = ceil_div(n, word_keys);
      KeyBits some[most_words] = {}, all[most_words];  // heads that see a key
      std::fill_n(all, words, ~KeyBits{0});
      KeyBits* const to = bits + at / word_keys;
      std::uint8_t* const mark = marks + at / step_keys;
      for (Index head = 0; head < (own ? call.group : 1); ++head) {
        float added[together];
        call.mask->read(b, own ? kv_head * call.group + head : 0, query, nullptr, first + at, n,
                        added);
        for (Index w = 0; w < words; ++w) {
          KeyBits seen = 0, other = 0;
          const float* const x = added + w * word_keys;
          for_each_compared(
              std::min(word_keys, n - w * word_keys), [&](auto lanes) QUOKA_INLINE_LAMBDA {
                // Of NaN both are true.
                const auto more = lanes.load(x);
                seen |= KeyBits{simd::not_less(more, lanes.broadcast(lowest))} << lanes.i;
                other |= KeyBits{simd::less(more, lanes.broadcast(0.0f)) |
                                 simd::not_less(more, lanes.broadcast(above_zero))}
                         << lanes.i;
              });
          some[w] |= seen, all[w] &= seen;
          if ((other & seen & to[w]) != 0) mark[w / step_words] |= biased;
        }
      }
      for (Index w = 0; w < words; ++w) {
        if (((some[w] ^ all[w]) & to[w]) != 0) mark[w / step_words] |= uneven;
        to[w] &= some[w];
      }
    }
  }

  KeyBits* bits_;        // [queries, steps, step_words]
  std::uint8_t* marks_;  // [queries, steps], with a mask
  Index steps_;          // of the stretch
  bool has_marks_ = false;
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
