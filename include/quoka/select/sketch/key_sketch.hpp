// A sketch of the keys: 8-bit codes with one scale per key, an eighth of the bytes of float K and
// V, kept beside a cache so that a scan of all keys reads little and multiplies 8-bit numbers.
//
//   code[c] = round(k[c] / s), s = (1 + 2^-20) max |k[c]| / 127: no rounding mode makes a 128
//   scale   = s / |k|                     so that codes stand for the key's direction
//   error   = |k - s code| / |k|          what they miss of it, rounded up
//   length  = |k|                         for dot products, which want the key itself
//
// By Cauchy and Schwarz the sketched cosine misses by at most error times the query's length
// (select/sketch/sketched_cosines.hpp), and the sketched dot product by at most length times that
// (select/sketch/sketched_mass.hpp). A key that codes cannot stand for (NaN, infinite, or shorter
// than 1e-12 or longer than 1e12, where float products could underflow or overflow) has scale 0,
// length 0 and error infinity. Codes are blocked for simd/code_dots.hpp. A key takes head_dim + 12 bytes, head_dim
// rounded up to a multiple of 4, keys to blocks of 16. When a key comes it takes about 4
// operations per channel.
//
// A sketch belongs to a cache, and is updated with it:
//
//   append(k)            keys came at the end, of a cache without pages
//   update(pool, rows)   rows of the pool were written: new keys, overwritten, moved or copied ones
//   truncate(len)        the cache became shorter
//
// A row that was never sketched is scored in float; a removed one needs no update, since no query
// reads it. A pool that several sequences share, pages with a common prefix among them, has one
// sketch. Each selection looks for changes that it was not notified of: it compares the newest and the oldest key of
// each KV head, and 64 others of a sequence, with their codes, and scores keys near the threshold in float
// (select/sketch/sketched_head.hpp). So a run of 1/46 of the keys that was overwritten is found in the first call, a
// single key within 1.9 / 64 as many calls as there are keys. After an update() that threw, its rows are scored in
// float.
#pragma once

#include <quoka/rows/row_store.hpp>
#include <quoka/rows/rows.hpp>
#include <quoka/runtime/executor.hpp>
#include <quoka/runtime/worker_scratch.hpp>

#include <algorithm>
#include <cstdint>

namespace quoka {
inline namespace QUOKA_ABI {

namespace detail {

// Which keys of a sequence's heads a call compares with their codes: of each head the newest, the oldest, and points of
// a golden-ratio sequence that goes on from head to head and from call to call; of a sequence's heads together at least
// 64 a call. turn 0, 1, 2, ... counts the calls.
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

}  // namespace detail

class KeySketch {
 public:
  // Keys that were appended, or rows of a pool.
  Index len() const { return len_; }
  // Bytes of memory.
  Index bytes() const { return bytes_of(codes_, scales_, errors_, lengths_); }

  // Sketches the keys [len(), k.len()) of k [batch, kv_heads, kv_len, head_dim], whose first len()
  // keys it has seen; room for `capacity` keys is made at once. Forgets all where the shape is
  // another one than before. Throws std::invalid_argument for fewer keys than it has seen, and for more than max_keys.
  void append(const Rows& k, Index capacity, ExecutorRef executor);
  // Sketches the rows `rows` of pool [pages, kv_heads, page_size, head_dim], counted through all pages
  // (row i of page p is p * page_size + i), or of a cache [1, kv_heads, len, head_dim]. The pool may
  // have grown, or moved; with pages of another length all rows are forgotten. Throws
  // std::invalid_argument, with nothing changed, for a row that is not in the pool, and for a pool of more than
  // max_keys rows; after another exception (an executor's, std::bad_alloc) these rows have no codes.
  void update(const Rows& pool, std::span<const Position> rows, ExecutorRef executor);
  // The same for rows [begin, begin + count), which lie in the pool.
  void update(const Rows& pool, Index begin, Index count, ExecutorRef executor);

  // Where keys [1, kv_heads, kv_len, head_dim] of the cache lie in the sketch: row i is mapping(i).
  // Throws std::invalid_argument where they are not of the cache that was last sketched.
  struct RowMapping {
    RowMap map;       // of the keys, where they are in pages or listed
    Index begin = 0;  // row 0 of the keys, counted in the map
    // The sketch's row of key i.
    Index operator()(Index i) const { return map.any() ? map.pool_row(begin + i) : begin + i; }
    // Do 16 keys from i on lie in one block of the sketch, in their order?
    bool keeps_blocks(Index i) const {
      return map.cells == nullptr && (map.pages == nullptr || map.page_size % 16 == 0) &&
             (begin + i) % 16 == 0;
    }
  };
  // Throws std::invalid_argument where keys are not of the cache that was last sketched.
  RowMapping map_rows(const Rows& keys) const;

  void truncate(Index len) { len_ = len < len_ ? len : len_; }  // back to the first `len` keys

  // Is it of this shape, with as many keys?
  bool knows(const Rows& k) const {
    return codes_.batch() == k.batch() && codes_.heads() == k.heads() && dim_ == k.dim() &&
           len_ == k.len();
  }
  // Throws std::invalid_argument where k is of another shape than what was sketched.
  void require_shape_of(const Rows& k) const;
  // Looks some of the keys up that lie by `rows`; turn counts the calls (LookUps). Throws
  // std::invalid_argument, naming head and position, where one is not what was sketched. `reader` has room for a key.
  void require_held(const Rows& keys, const RowMapping& rows, std::uint64_t turn,
                    RowReader& reader) const;
  // The same of one key.
  void require_held(const Rows& keys, const RowMapping& rows, Index head, Index key,
                    RowReader& reader) const;
  // Is `key` [head_dim] the one that was sketched as this row?
  bool holds(Index b, Index head, Index row, const float* key) const;

  // The block of 16 keys that begins at 16 * block. Places beyond len() hold zero keys or old ones.
  const std::uint8_t* codes(Index b, Index head, Index block) const {
    return codes_.row(b, head, block);
  }
  // One number per key: [len()], contiguous.
  const float* scales(Index b, Index head) const { return scales_.row(b, head, 0); }
  // |k - s code| / |k|, rounded up; infinite for a key that codes cannot stand for.
  const float* errors(Index b, Index head) const { return errors_.row(b, head, 0); }
  const float* lengths(Index b, Index head) const { return lengths_.row(b, head, 0); }  // |k|

 private:
  void reshape(const Rows& k, Index batch);
  void make_room(Index capacity, Index len, bool all_written);
  void write(Index b, Index head, Index row, const float* key);
  void forget(Index head, Index row);

  RowStore<std::uint8_t> codes_;               // [batch, kv_heads, blocks, bytes of a block]
  RowStore<float> scales_, errors_, lengths_;  // [batch, kv_heads, blocks, 16]
  Index dim_ = 0, len_ = 0;
  Rows pool_;  // as update() saw it: where it lies is compared, and its rows are never read
  WorkerScratch<RowReader> floats_;
};

namespace detail {

// Are scores by a sketch faster than those in float, on the ISA this is compiled for?
bool sketch_is_fast();
// The same of softmax mass: with some 64 rows of a KV head, or with those of every query. NEON without i8mm has no
// kernel for several rows.
bool sketched_mass_is_fast(bool every_query = false);

}  // namespace detail

}  // namespace QUOKA_ABI
}  // namespace quoka

#if !defined(QUOKA_COMPILED)
#include <quoka/select/sketch/key_sketch_impl.hpp>
#endif
