// Are cached keys still those that were noted? What is kept beside keys (their codes, projections, bounds of pages,
// means of blocks, a retained set, packed blocks) is right as long as the keys are what they were. Nobody tells of an overwritten one:
// a ring buffer that went round, an edited prompt, another sequence appended without a truncate(). So whoever keeps
// something notes 16 bits of each row, and each call that uses it (a selection, attention to packed keys) looks up some
// rows:
//
//   noted[b][head][i]   16 bits of a hash of row i's bytes (base/hash.hpp); of its floats where the format keeps
//                       scales or channels apart. Where the row lies does not matter: a cache may move
//   looked up           of each head the newest row, the oldest, and points of a golden-ratio sequence, which goes on
//                       from head to head and from call to call: of a sequence's heads together at least 64 rows a call
//
// A row that is looked up and has other bits than those noted is found, but once in 65,536 times.
//
//   what was overwritten, in all heads             found
//   a run, wherever it lies, of 1/46 of the keys   in the first call
//                              of a share p        within 1.9 / (64 p) calls
//   a share p, scattered                           in one call with a probability of 1 - (1 - p)^64: p = 0.01 0.47,
//                                                  0.05 0.96; practically surely (1 - 1e-6) within 0.22 / p calls
//   one key of len                                 within 1.9 len / 64 calls
//   the newest or the oldest key                   in the first call
//   keys of one head of n alone                    about as above, with 64 / n in place of 64
//   rewritten with the same bytes                  nothing has changed
//
// What a call returned before it was found out may be that of the old keys. Whoever changes keys says so: truncate()
// to the first keys that are as they were, then the others anew. For engines that say nothing engine/known_cells.hpp
// hashes every cell in each call.
//
// Cost: 2 bytes a key and KV head, kept; a hash of each row as it comes (a multiplication for 8 bytes; 30 ns for 128
// floats); and in each call 64 rows or 2 a head, whichever is more, and 2 more a head, asked for ahead of their use:
// with 8 KV heads of 128 floats 80 rows, 640 cache lines. Over 32,768 keys that is 0.5 % of the time in which
// recommended() selects for a chunk of 128, and 1.8 % for one token.
#pragma once

#include <quoka/base/hash.hpp>
#include <quoka/cache/row_store.hpp>
#include <quoka/runtime/executor.hpp>
#include <quoka/runtime/worker_scratch.hpp>
#include <quoka/views/float_rows.hpp>
#include <quoka/views/rows.hpp>

#include <cstdint>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// Which rows of a sequence's heads a call looks up: turn 0, 1, 2, ... counts the calls.
class LookUps {
 public:
  static constexpr Index least_rows =
      64;  // of a sequence, beside the newest and the oldest of each head

  LookUps(Index len, Index heads, std::uint64_t turn)
      : len_(len), each_(std::max<Index>(2, ceil_div(least_rows, std::max<Index>(1, heads)))) {
    first_ = 1 + turn * static_cast<std::uint64_t>(each_ * heads);
  }

  Index count() const { return std::min(len_, each_ + 2); }  // of each head
  // The i-th of a head: below len. Each of all where these are few.
  Index operator()(Index head, Index i) const {
    if (len_ <= each_ + 2 || i == 0) return len_ - 1 - i;
    if (i == 1) return 0;
    const std::uint64_t at = first_ + static_cast<std::uint64_t>(head * each_ + i - 2);
    // at / the golden ratio, of which the fraction counts.
    const std::uint64_t fraction = (at * 0x9e3779b97f4a7c15u) >> 32;
    return static_cast<Index>((fraction * static_cast<std::uint64_t>(len_)) >> 32);
  }

 private:
  Index len_, each_;
  std::uint64_t first_;  // of the sequence's points, those of this call
};

// What a row is called in an error's message, who was told of it, and what to do.
struct WitnessWords {
  const char *row, *told, *way_out;
};
// Throws std::invalid_argument: row i of one head, of len, has changed.
[[noreturn, gnu::cold]] void fail_changed(const WitnessWords& words, Index b, Index head, Index i,
                                          Index len);

// The rows of one cache [batch, heads, len, dim] that were noted.
class KeyWitness {
 public:
  Index len() const { return len_; }               // rows of each head that are noted
  Index bytes() const { return hashes_.bytes(); }  // of memory
  // Back to the first `len` rows; those are noted as before.
  void truncate(Index len) {
    len_ = std::min(len_, len);
    staged_ = 0;
  }

  // Looks some rows up. Throws std::invalid_argument, naming head and position, where one is not what was noted.
  // Of another shape than what was noted nothing is looked up.
  void require(const Rows& rows, const WitnessWords& words);

  // New rows in three steps, of which the last one throws nothing: room for them, by who will write [len(), len) of
  // each head; each head's, in any order and in tasks; and then they are noted. What was staged and not committed is
  // nothing. Forgets all where the shape is another one than before.
  void reserve(const Rows& rows, Index len, Index capacity, int workers);
  void stage(const Rows& rows, Index b, Index head, Index begin, Index end, int worker);
  void commit(Index len);
  // The first two steps for rows [len(), len), by executor; none of those that were staged and kept.
  void stage(const Rows& rows, Index len, Index capacity, ExecutorRef executor);
  // Those up to `len` have been staged, and stay so until they are committed, more are or a truncate().
  void keep_staged(Index len) { staged_ = len; }

 private:
  std::uint16_t noted(const Rows& rows, Index b, Index head, Index i, FloatRow& reader) const;

  RowStore<std::uint16_t> hashes_;  // [batch, heads, len, 1]
  WorkerScratch<FloatRow> floats_;
  Index len_ = 0, dim_ = 0;
  Index staged_ = 0;
  std::uint64_t turn_ = 0;  // of the look-ups
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka

#if !defined(QUOKA_COMPILED)
#include <quoka/cache/key_witness_impl.hpp>
#endif
