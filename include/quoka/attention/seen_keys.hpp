// Which keys each query sees, as bits: what lists name and causality, the window and a mask leave of it.
//
// Lists of each query's own are read once for a task, a stretch of keys at a time. From there on a query's keys are
// bits: in order, each once, whatever order a list has and however often it names a key. Beside them stands, for each
// query and step_keys keys, whether a mask adds something to a logit, or hides a key from some heads alone.
#pragma once

#include <quoka/attention/call.hpp>
#include <quoka/base/buffer.hpp>
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
  static constexpr Index step_keys = 128;  // keys that share their marks
  static constexpr Index stretch_keys = Index{1}
                                        << 16;  // at a time: memory does not grow with the cache
  static constexpr Index mask_keys = 1024;      // of a mask, read at a time: they stay in L1

  enum Mark : std::uint8_t {
    biased = 1,  // seen, with something else than 0 added
    uneven = 2,  // seen by some of the query's heads and not by others
  };

  void reserve(const AttentionCall& call, Index queries) {
    const Index keys = std::min(std::max(call.past_k.len(), call.chunk_k.len()), stretch_keys);
    known_ = {};
    words_ = ceil_div(keys, word_keys), steps_ = ceil_div(keys, step_keys);
    bits_.reserve(queries * words_);
    marks_.reserve(queries * steps_);
    if (call.mask == nullptr) return;
    some_.reserve(words_), all_.reserve(words_);
    added_.reserve(mask_keys);
  }
  Index bytes() const { return bytes_of(bits_, marks_, some_, all_, added_); }

  // Of columns [first, first + count): the past's rows, then the chunk's. For queries [query, query + queries) of one
  // KV head.
  void read(const AttentionCall& call, Index b, Index kv_head, Index query, Index queries,
            Index first, Index count) {
    // The next KV head often has the same keys.
    const bool same_for_heads = (call.lists == nullptr || call.lists->heads() == 1) &&
                                (call.mask == nullptr || call.mask->heads() == 1);
    const Known now{&call, b, same_for_heads ? 0 : kv_head, query, queries, first, count};
    if (now == known_) return;
    known_ = now;
    words_ = ceil_div(count, word_keys), steps_ = ceil_div(count, step_keys);
    std::memset(marks_.data(), 0, static_cast<std::size_t>(queries * steps_));
    for (Index i = 0; i < queries; ++i) {
      KeyBits* const to = bits_.data() + i * words_;
      std::memset(to, 0, static_cast<std::size_t>(words_) * sizeof(KeyBits));
      const KeyRange in_sight{call.begin_column(query + i), call.end_column(query + i)};
      if (call.lists != nullptr)
        set_listed(call.lists->list(b, kv_head, query + i), call.lists->block(), first, count, to);
      else
        set(to, 0, count);
      keep(to, std::clamp<Index>(in_sight.begin - first, 0, count),
           std::clamp<Index>(in_sight.end - first, 0, count));
      if (call.mask != nullptr) heed_mask(call, b, kv_head, query + i, first, count, i);
    }
  }

  // Of the i-th of these queries, from the stretch's first key on.
  const KeyBits* bits(Index i) const { return bits_.data() + i * words_; }
  const std::uint8_t* marks(Index i) const { return marks_.data() + i * steps_; }

 private:
  static void set(KeyBits* bits, Index begin, Index end) {
    if (begin >= end) return;
    const Index first = begin / word_keys, last = (end - 1) / word_keys;
    const KeyBits from = ~KeyBits{0} << (begin % word_keys);
    const KeyBits to = ~KeyBits{0} >> (word_keys - 1 - (end - 1) % word_keys);
    if (first == last) {
      bits[first] |= from & to;
      return;
    }
    bits[first] |= from, bits[last] |= to;
    for (Index i = first + 1; i < last; ++i) bits[i] = ~KeyBits{0};
  }
  // Only bits [begin, end) stay.
  void keep(KeyBits* bits, Index begin, Index end) const {
    const Index first = begin / word_keys, last = end / word_keys;
    for (Index i = 0; i < std::min(first, words_); ++i) bits[i] = 0;
    if (first < words_) bits[first] &= ~KeyBits{0} << (begin % word_keys);
    if (last < words_) bits[last] &= (KeyBits{1} << (end % word_keys)) - 1;
    for (Index i = last + 1; i < words_; ++i) bits[i] = 0;
  }

  static void set_listed(std::span<const Position> list, Index block, Index first, Index count,
                         KeyBits* bits) {
    const Position* const x = list.data();
    const Index n = std::ssize(list);
    if (block > 1) {
      for (Index i = 0; i < n; ++i)
        if (x[i] >= 0)
          set(bits, std::clamp<Index>(x[i] * block - first, 0, count),
              std::clamp<Index>((x[i] + 1) * block - first, 0, count));
      return;
    }
    // Many lists ascend: a word's bits are gathered before it is written, and runs are seen 32 keys at a time.
    constexpr Index run = 32;
    Index word = 0;
    KeyBits gathered = 0;
    const auto add = [&](Index key) {
      if (key < 0 || key >= count) return;
      if (key / word_keys != word) {
        bits[word] |= gathered;
        word = key / word_keys, gathered = 0;
      }
      gathered |= KeyBits{1} << (key % word_keys);
    };
    Index i = 0;
    for (; i + run <= n; i += run) {
      Position gaps = 0;
      for (Index j = 1; j < run; ++j) gaps |= x[i + j] ^ (x[i] + static_cast<Position>(j));
      if (gaps == 0 && x[i] >= 0)
        set(bits, std::clamp<Index>(x[i] - first, 0, count),
            std::clamp<Index>(x[i] + run - first, 0, count));
      else
        for (Index j = 0; j < run; ++j)
          if (x[i + j] >= 0) add(x[i + j] - first);
    }
    for (; i < n; ++i)
      if (x[i] >= 0) add(x[i] - first);
    if (count > 0) bits[word] |= gathered;
  }

  // What the mask hides from all heads of the group leaves the bits of the i-th query.
  void heed_mask(const AttentionCall& call, Index b, Index kv_head, Index query, Index first,
                 Index count, Index i) {
    KeyBits* const to = bits_.data() + i * words_;
    std::uint8_t* const marks = marks_.data() + i * steps_;
    const bool own = call.mask->heads() > 1;  // a mask of each head
    constexpr float lowest = std::numeric_limits<float>::lowest(),
                    above_zero = std::numeric_limits<float>::denorm_min();
    KeyBits *const some = some_.data(), *const all = all_.data();
    std::memset(some, 0, static_cast<std::size_t>(words_) * sizeof(KeyBits));
    std::memset(all, 0xff, static_cast<std::size_t>(words_) * sizeof(KeyBits));
    for (Index head = 0; head < (own ? call.group : 1); ++head) {
      for (Index w = 0; w < words_; ++w) {
        const Index at = w * word_keys, n = std::min(word_keys, count - at);
        if (at % mask_keys == 0)
          call.mask->read(b, own ? kv_head * call.group + head : 0, query, nullptr, first + at,
                          std::min(mask_keys, count - at), added_.data());
        const float* const added = added_.data() + at % mask_keys;
        KeyBits seen = 0, other = 0;
        for_each_compared(n, [&](auto lanes) QUOKA_INLINE_LAMBDA {
          // Of NaN both are true.
          const auto x = lanes.load(added);
          seen |= KeyBits{simd::not_less(x, lanes.broadcast(lowest))} << lanes.i;
          other |= KeyBits{simd::less(x, lanes.broadcast(0.0f)) |
                           simd::not_less(x, lanes.broadcast(above_zero))}
                   << lanes.i;
        });
        some[w] |= seen, all[w] &= seen;
        if ((other & seen & to[w]) != 0) marks[w * word_keys / step_keys] |= biased;
      }
    }
    for (Index w = 0; w < words_; ++w) {
      if (((some[w] ^ all[w]) & to[w]) != 0) marks[w * word_keys / step_keys] |= uneven;
      to[w] &= some[w];
    }
  }

  // What was read last, of the calls that memory was reserved for.
  struct Known {
    const AttentionCall* call = nullptr;
    Index b = 0, kv_head = 0, query = 0, queries = 0, first = 0, count = 0;
    bool operator==(const Known&) const = default;
  };

  Known known_;
  Buffer<KeyBits> bits_;         // [queries, words]
  Buffer<std::uint8_t> marks_;   // [queries, steps]
  Buffer<KeyBits> some_, all_;   // [words], of a query's heads
  Buffer<float> added_;          // [mask_keys], of a mask's row
  Index words_ = 0, steps_ = 0;  // of a query
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
