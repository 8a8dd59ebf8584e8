// KeySets: which keys each query sees, where queries have lists or a mask is read as lists.
//
// An item reads the whole list of each of its queries once per section of keys. A section has up to
// 65,536 columns, of the past or of the chunk. From there on a query's keys are bits: in order,
// each once, whatever order a list has and however often it names a key. If there is a mask, each
// query has a mark for each 128 keys: whether the mask adds something to a logit, or hides a key
// from some heads only.
#pragma once

#include <quoka/attention/call.hpp>
#include <quoka/attention/key_sequence.hpp>
#include <quoka/kernels/key_bits.hpp>

#include <algorithm>
#include <cstdint>
#include <numeric>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// For lists of each query: the keys in ranges, of the past, then of the chunk. The panels of an
// item go through them together. A part is some of the ranges.
struct ListRanges {
  // Decided together: by rows or by panels (attend_lists.hpp).
  static constexpr Index step_keys = 128;
  static constexpr Index most_keys = 8 * step_keys;
  static constexpr Index most_waiting = 4;

  // As many keys as fit the cache as halves: whole blocks that are whole steps, too, where one such
  // fits, else whole steps. If one query's heads alone fill a panel, a row that is read serves all
  // of them. Then a range has most_keys keys, which need not fit.
  explicit ListRanges(const AttentionCall& call)
      : past_keys(call.past_k.len()), all_keys(past_keys + call.chunk_k.len()) {
    const Index fit = tuning::gather_range_bytes / (2 * (call.q.dim() + call.v_dim));
    const Index step = step_keys, blocks = std::lcm(call.block_keys(), step);
    const Index wanted = call.group >= kernel_sizes().panel_rows
                             ? most_keys
                             : std::clamp(fit, step, Index{most_keys});
    keys = wanted >= blocks ? wanted / blocks * blocks : wanted / step * step;
    const Rows& k = call.past_k.empty() ? call.chunk_k : call.past_k;
    const bool floats = !k.empty() && k.format().element_bytes > 2;
    most_ranges = floats ? most_waiting / 2 : Index{most_waiting};
    past = ceil_div(past_keys, keys);
    all = past + ceil_div(all_keys - past_keys, keys);
  }

  // The keys are cut into as many parts at most.
  Index parts() const { return std::clamp<Index>(all, 1, tuning::max_parts); }
  // The columns of one of `parts`.
  KeyRange columns(Index part, Index parts) const {
    const auto begin = [&](Index range) {
      return range < past ? range * keys : std::min(past_keys + (range - past) * keys, all_keys);
    };
    return {begin(all * part / parts), begin(all * (part + 1) / parts)};
  }

  Index past_keys, all_keys;
  Index keys;  // of a range
  // Ranges that wait at most before a panel must attend. Floats take twice the cache, so half as
  // many: with as many, lists of 512 of 8,192 keys took 1.2 times as long.
  Index most_ranges;
  Index past, all;  // ranges
};

class KeySets {
 public:
  static constexpr Index step_keys = ListRanges::step_keys, step_words = step_keys / word_keys;
  // Keys of a section, at most: memory does not grow with the cache.
  static constexpr Index section_keys = Index{1} << 16;

  enum Mark : std::uint8_t {
    biased = 1,  // seen, and its logit gets a bias
    uneven = 2,  // seen by some of the query's heads and not by others
  };

  KeySets(Arena& arena, const AttentionCall& call, Index queries)
      : call_(call),
        steps_(
            ceil_div(std::min(std::max(call.past_k.len(), call.chunk_k.len()), Index{section_keys}),
                     step_keys)),
        bits_(arena.take<KeyBits>(queries * steps_ * step_words)),
        marks_(arena.take<std::uint8_t>(call.logits.mask != nullptr ? queries * steps_ : 0)) {}

  // The section is columns [first, first + count), for queries [query, query + queries) of one KV
  // head.
  void read(Index b, Index kv_head, Index query, Index queries, Index first, Index count) {
    const Logits& logits = call_.logits;
    steps_ = ceil_div(count, step_keys);
    const auto in_section = [&](Index column) {
      return std::clamp<Index>(column - first, 0, count);
    };
    for (Index i = 0; i < queries; ++i) {
      KeyBits* const to = bits_ + i * steps_ * step_words;
      std::fill_n(to, steps_ * step_words, KeyBits{0});
      const KeyRange range{in_section(logits.begin_column(query + i)),
                           in_section(logits.end_column(query + i))};
      if (call_.lists == nullptr) {
        set_keys(to, range.begin, range.end);
      } else {
        set_listed_keys(call_.lists->list(b, kv_head, query + i), call_.lists->block(), first,
                        count, to);
        clear_keys(to, 0, range.begin), clear_keys(to, range.end, count);
      }
      if (logits.mask != nullptr)
        heed_mask(b, kv_head, query + i, first, count, to, marks_ + i * steps_);
    }
  }

  // Bits of the i-th of these queries: words of whole steps; only bits of the section are set.
  const KeyBits* bits(Index i) const { return bits_ + i * steps_ * step_words; }
  unsigned marks(Index i, Index step) const {
    return call_.logits.mask != nullptr ? marks_[i * steps_ + step] : 0u;
  }

 private:
  // Clears the bits of keys that the mask hides from all heads of the group, for one query, and
  // marks its steps.
  void heed_mask(Index b, Index kv_head, Index query, Index first, Index count, KeyBits* bits,
                 std::uint8_t* marks) const {
    constexpr Index together = 1024;  // they stay in L1
    const Mask& mask = *call_.logits.mask;
    const Index heads = mask.heads() > 1 ? call_.group : 1,
                head = mask.heads() > 1 ? kv_head * call_.group : 0;
    std::fill_n(marks, steps_, std::uint8_t{0});
    for (Index at = 0; at < count; at += together) {
      const Index n = std::min(together, count - at), words = ceil_div(n, word_keys);
      KeyBits some[together / word_keys] = {}, all[together / word_keys];  // heads that see a key
      std::fill_n(all, words, ~KeyBits{0});
      KeyBits* const own = bits + at / word_keys;
      std::uint8_t* const mark = marks + at / step_keys;
      for (Index i = 0; i < heads; ++i) {
        float added[together];
        mask.read(b, head + i, query, {nullptr, first + at, n}, added);
        for (Index w = 0; w < words; ++w) {
          const MaskedKeys keys =
              masked_keys(added + w * word_keys, std::min(word_keys, n - w * word_keys));
          some[w] |= keys.seen, all[w] &= keys.seen;
          if ((keys.biased & own[w]) != 0) mark[w / step_words] |= biased;
        }
      }
      for (Index w = 0; w < words; ++w) {
        if (((some[w] ^ all[w]) & own[w]) != 0) mark[w / step_words] |= uneven;
        own[w] &= some[w];
      }
    }
  }

  const AttentionCall& call_;
  Index steps_;          // of the section
  KeyBits* bits_;        // [queries, steps, step_words]
  std::uint8_t* marks_;  // [queries, steps], with a mask
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
