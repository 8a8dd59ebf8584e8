// Does the past already hold the chunk, by a copy of its keys and values? They would count twice.
//
// Memory that is shared is found by addresses (views/overlap.hpp). A copy is found by what it holds:
// the past's last q_len rows are the chunk's, keys and values, in every head of every sequence, as the
// past's format rounds them. The last rows are compared first, so a call costs one row of one head.
//
// No sign of a copy, and accepted: a chunk that lies behind the past in one cache; rows that are all
// the same there, as padding and constants are (the past's last two rows are equal, or each key has one
// number in all its channels); a Selection that lists none of the copies; a mask that hides the last of
// them from the last query, or a list of the last query's that does not name it; ALiBi, whose keys know no positions, so
// that equal tokens have equal rows. AttentionOptions::may_repeat says that of other keys without positions.
#pragma once

#include <quoka/attention/attention_options.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <vector>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// Does the chunk go on where the past ends, in one cache?
inline bool lies_behind(const Rows& past, const Rows& chunk) {
  if (!past.stored_as(chunk) || past.strides() != chunk.strides()) return false;
  if (past.mapped() || chunk.mapped()) return past.data() == chunk.data();
  return past.data() + past.len() * past.strides()[2] == chunk.data();
}

// Compares rows as floats. Allocates for rows of many channels alone.
class RowComparison {
 public:
  RowComparison(const Rows& past_k, const Rows& past_v)
      : channels_(std::max(past_k.dim(), past_v.dim())),
        bytes_(std::max(bytes_written(past_k), bytes_written(past_v))) {
    const Index size = 2 * channels_ + ceil_div(bytes_, Index{sizeof(float)});
    if (size > std::ssize(few_)) many_.resize(static_cast<std::size_t>(size));
  }

  // Has row i of a the numbers of row j of b, or has a's format rounded them to its own?
  bool same(const Rows& a, Index i, const Rows& b, Index j, Index sequence, Index head) {
    float* const row_a = memory();
    float* const row_b = row_a + channels_;
    a.format().widen(a.row(sequence, head, i), a.shape(head), row_a);
    b.format().widen(b.row(sequence, head, j), b.shape(head), row_b);
    const auto size = static_cast<std::size_t>(a.dim()) * sizeof(float);
    if (std::memcmp(row_a, row_b, size) == 0) return true;
    if (a.stored_as(b) || !a.format().writes) return false;
    auto* const rounded = reinterpret_cast<std::byte*>(row_b + channels_);
    a.format().narrow(row_b, a.shape(head), rounded);
    a.format().widen(rounded, a.shape(head), row_b);
    return std::memcmp(row_a, row_b, size) == 0;
  }
  // Has it one number in all its channels?
  bool constant(const Rows& a, Index i, Index sequence, Index head) {
    float* const x = memory();
    a.format().widen(a.row(sequence, head, i), a.shape(head), x);
    return std::all_of(x, x + a.dim(),
                       [&](float y) { return std::memcmp(&y, x, sizeof(float)) == 0; });
  }

 private:
  static Index bytes_written(const Rows& x) {
    return x.format().writes ? x.format().row_bytes(x.shape(0)) : 0;
  }
  float* memory() { return many_.empty() ? few_.data() : many_.data(); }

  Index channels_, bytes_;
  alignas(64) std::array<float, 4096> few_;
  std::vector<float> many_;
};

// Of sizes that were checked. mask: the call's, in place of the options'.
[[gnu::noinline]] inline bool past_holds_chunk(const Past& past, const Chunk& chunk,
                                               const AttentionOptions& options, const Mask& mask,
                                               const IndexLists& lists) {
  const Index n = chunk.k.len(), len = past.k.len(), heads = past.k.heads();
  if (n == 0 || len < n || options.may_repeat || lies_behind(past.k, chunk.k)) return false;
  if (!options.alibi_slopes.empty() || !options.mask_factors.empty()) return false;
  RowComparison rows(past.k, past.v);
  const auto in_all_heads = [&](FunctionRef<bool(Index b, Index head)> holds) {
    for (Index b = 0; b < past.k.batch(); ++b)
      for (Index head = 0; head < heads; ++head)
        if (!holds(b, head)) return false;
    return true;
  };
  // The past's row i is the chunk's row j.
  const auto copied = [&](Index i, Index j) {
    return in_all_heads([&](Index b, Index head) {
      return rows.same(past.k, i, chunk.k, j, b, head) && rows.same(past.v, i, chunk.v, j, b, head);
    });
  };
  if (!copied(len - 1, n - 1)) return false;
  if (in_all_heads([&](Index b, Index head) { return rows.constant(past.k, len - 1, b, head); }))
    return false;
  if (len > 1 && in_all_heads([&](Index b, Index head) {
        return rows.same(past.k, len - 1, past.k, len - 2, b, head) &&
               rows.same(past.v, len - 1, past.v, len - 2, b, head);
      }))
    return false;
  for (Index j = n - 2; j >= 0; --j)
    if (!copied(len - n + j, j)) return false;
  if (past.keep != nullptr && !past.keep->is_all() && in_all_heads([&](Index b, Index head) {
        const std::span<const Position> list = past.keep->row(b, head);
        return list.empty() || list.back() < len - n;
      }))
    return false;
  if (!lists.absent() && !in_all_heads([&](Index b, Index head) {
        const std::span<const Position> list = lists.list(b, head, n - 1);
        const auto last = static_cast<Position>((len - 1) / lists.block());
        return std::find(list.begin(), list.end(), last) != list.end();
      }))
    return false;
  if (mask.absent()) return true;
  for (Index b = 0; b < mask.batch(); ++b)
    for (Index head = 0; head < mask.heads(); ++head) {
      float added = 0;
      mask.read(b, head, n - 1, nullptr, len - 1, 1, &added);
      if (!(added <= Mask::hides_from)) return true;
    }
  return false;
}

// Throws std::invalid_argument where the past holds the chunk.
inline void require_chunk_once(const Past& past, const Chunk& chunk,
                               const AttentionOptions& options, const Mask& mask,
                               const IndexLists& lists) {
  if (!past_holds_chunk(past, chunk, options, mask, lists)) [[likely]]
    return;
  char message[320];
  std::snprintf(message, sizeof message,
                "the past's last %td rows of %td are the chunk's keys and values: they would count "
                "twice; chunk_in_cache(k, v, q_len) splits a cache that holds the chunk (keys that "
                "know no positions may repeat: AttentionOptions::may_repeat)",
                chunk.k.len(), past.k.len());
  fail_because(message);
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
