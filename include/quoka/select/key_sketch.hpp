// A sketch of the keys: 8-bit codes with one scale per key, kept beside a cache. It has an eighth
// of the bytes of float K and V, so a scan of all keys reads little and multiplies 8-bit numbers.
//
//   code[c] = round(k[c] / s), s = (1 + 2^-20) max |k[c]| / 127: no rounding mode makes a 128
//   scale   = s / |k|                     so that codes stand for the key's direction
//   error   = |k - s code| / |k|          their error, rounded up
//   length  = |k|                         for dot products, which need the key itself
//
// By Cauchy and Schwarz the sketched cosine misses by at most error times the query's length
// (select/sketched_cosines.hpp), and the sketched dot product by at most length times that
// (select/code_mass.hpp). Codes cannot represent a key that is not finite, or that is shorter than
// 1e-12 or longer than 1e12, where float products could underflow or overflow. It has scale 0,
// length 0 and error infinity. Codes are blocked for simd/code_dots.hpp. A key takes head_dim + 12
// bytes, head_dim rounded up to a multiple of 4, keys to blocks of 16. Adding a key takes about 4
// operations per channel.
//
// A sketch belongs to a cache, and is updated with it:
//
//   append(k)            keys were appended, to a cache without pages
//   update(pool, rows)   rows of the pool were written: new keys, overwritten, moved or copied ones
//   truncate(len)        the cache became shorter
//
// A row that was never sketched is scored in float; softmax_scores() then does its whole KV head in
// float. A removed row needs no update, since no query reads it. A pool that several sequences
// share, with pages of a common prefix, has one sketch.
//
// Each selection checks for changes without an update(): it compares the newest and the oldest key
// of each KV head, and 64 others of a sequence, with their codes. QuokaSelector also compares each
// key that it scores in float (select/sketched_cosines.hpp), and softmax_scores() the best key of
// each list. The 64 are points of a golden-ratio sequence, with fewer than 1/46 of the keys between
// neighbours, so the first call finds a longer run of overwritten keys. A single one is found
// within (number of keys) * 1.9 / 64 calls. If update() throws, its rows are scored in float.
//
// Heads of more than 1,024 channels are scored in float (StateSketch::most_dim), sketch or not.
//
// With headers alone, a unit that writes a sketch includes select/softmax_scores.hpp or quoka.hpp:
// without them the linker misses coded_softmax_scores().
#pragma once

#include <quoka/rows/row_reader.hpp>
#include <quoka/rows/row_store.hpp>
#include <quoka/rows/rows.hpp>
#include <quoka/runtime/executor.hpp>

#include <algorithm>
#include <cstdint>
#include <span>

#if QUOKA_DEFINES
#include <quoka/kernels/codes.hpp>

#include <cstdio>
#endif

namespace quoka {
inline namespace QUOKA_ABI {

namespace detail {

// The keys that a call compares with their codes: the newest and the oldest of each head, and at
// least 64 others of a sequence. Those are points of a golden-ratio sequence that goes on from head
// to head and from call to call. turn 0, 1, 2, ... counts the calls. This is for a sketch that a
// cache's owner keeps; a State's own data has checksums instead (select/key_checksums.hpp).
class LookUps {
 public:
  // Keys of a sequence that are looked up, beside the newest and the oldest of each head.
  static constexpr Index least_rows = 64;

  LookUps(Index len, Index heads, std::uint64_t turn)
      : len_(len), each_(std::max<Index>(2, ceil_div(least_rows, std::max<Index>(1, heads)))) {
    first_ = 1 + turn * static_cast<std::uint64_t>(each_ * heads);
  }

  Index count() const { return std::min(len_, each_ + 2); }  // of each head
  // The i-th key of a head. A short head has all of its keys compared.
  Index operator()(Index head, Index i) const {
    if (len_ <= each_ + 2 || i == 0) return len_ - 1 - i;
    if (i == 1) return 0;
    return spread_point(first_ + static_cast<std::uint64_t>(head * each_ + i - 2), len_);
  }

 private:
  Index len_, each_;
  std::uint64_t first_;  // of the sequence's points, those of this call
};

class HeadLoops;
struct MassCall;
// The phases of a softmax mass by codes. A sketch carries them from the functions that write it to
// softmax_scores(): so a program that makes no sketch does not compile products of codes, a fifth
// of its time.
using MassPhases = void (*)(const HeadLoops& on, const MassCall& mass);
MassPhases coded_softmax_scores();  // softmax_scores.hpp

}  // namespace detail

class KeySketch {
 public:
  // Keys that were appended, or rows of a pool.
  Index len() const { return len_; }
  // Bytes of memory.
  Index bytes() const { return bytes_of(codes_, scales_, errors_, lengths_); }

  // Sketches the keys [len(), k.len()) of k [batch, kv_heads, kv_len, head_dim]; its first len()
  // keys are in the sketch. Makes room for `capacity` keys at once. If the shape has changed, all
  // keys are sketched again. Throws std::invalid_argument for fewer keys than the sketch has, and
  // for more than max_keys.
  void append(const Rows& k, Index capacity, ExecutorRef executor);
  // Sketches `rows` of pool [pages, kv_heads, page_size, head_dim], counted through all pages (row
  // i of page p is p * page_size + i), or of a cache [1, kv_heads, len, head_dim]. The pool may
  // have grown, or moved; if the page size has changed, all rows are forgotten. Throws
  // std::invalid_argument, with nothing changed, for a row outside the pool and for a pool of more
  // than max_keys rows. After another exception (an executor's, std::bad_alloc) these rows have no
  // codes.
  void update(const Rows& pool, std::span<const Position> rows, ExecutorRef executor);
  // The same for rows [begin, begin + count), which lie in the pool.
  void update(const Rows& pool, Index begin, Index count, ExecutorRef executor);

  // Where keys [1, kv_heads, kv_len, head_dim] of the cache lie in the sketch: key i is row
  // mapping(i) of the sketch.
  struct RowMapping {
    RowMap map;       // of the keys, where they are in pages or gathered
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

  // Throws std::invalid_argument if k has another shape than the sketched keys.
  void require_shape_of(const Rows& k) const;
  // Compares some of the keys, which lie by `rows`, with their codes; turn counts the calls
  // (LookUps). Throws std::invalid_argument, naming head and position, if one is not the key that
  // was sketched.
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

  // False after an update() without memory for all rows of the pool: keys are scored in float.
  bool has_room() const { return has_room_; }
  // The library's own; null before anything was written.
  detail::MassPhases coded_phases = nullptr;

 private:
  template <class RowAt>
  void update_each(const Rows& pool, Index count, const RowAt& row_at, ExecutorRef executor);
  void reshape(const Rows& k, Index batch);
  void make_room(Index capacity, Index len, bool all_written);
  void write(Index b, Index head, Index row, const float* key);
  void forget(Index head, Index row);

  RowStore<std::uint8_t> codes_;               // [batch, kv_heads, blocks, bytes of a block]
  RowStore<float> scales_, errors_, lengths_;  // [batch, kv_heads, blocks, 16]
  Index dim_ = 0, len_ = 0;
  Rows pool_;  // as update() saw it: where it lies is compared, and its rows are never read
  bool has_room_ = true;  // for all rows of pool_
  Arenas workers_;        // to read rows
};

#if QUOKA_DEFINES

namespace detail {

inline constexpr Index few_rows = 16;  // that one worker codes sooner than several

// Rows of all pages. Throws std::invalid_argument for more than max_keys, and for rows in pages.
inline Index rows_of_pool(const Rows& pool) {
  if (pool.mapped()) fail_because("update() takes the whole pool, not rows in pages or of a list");
  require_keys("the number of pages", pool.batch());
  require_keys("the rows of a page", pool.len());
  require_keys("the rows of all pages", pool.batch() * pool.len());
  return pool.batch() * pool.len();
}

}  // namespace detail

QUOKA_FUNC void KeySketch::reshape(const Rows& k, Index batch) {
  if (codes_.batch() != batch || codes_.heads() != k.heads() || dim_ != k.dim()) len_ = 0;
  dim_ = k.dim();
  coded_phases = detail::coded_softmax_scores();
  codes_.reshape(batch, k.heads(), detail::code_block_bytes(k.dim()));
  scales_.reshape(batch, k.heads(), detail::code_block);
  errors_.reshape(batch, k.heads(), detail::code_block);
  lengths_.reshape(batch, k.heads(), detail::code_block);
}

// `key` becomes this row.
QUOKA_FUNC void KeySketch::write(Index b, Index head, Index row, const float* key) {
  constexpr Index width = detail::code_block;
  detail::encode_key(
      key, dim_,
      {codes_.row(b, head, row / width), row % width, scales_.row(b, head, row / width),
       errors_.row(b, head, row / width), lengths_.row(b, head, row / width)});
}

QUOKA_FUNC void KeySketch::append(const Rows& k, Index capacity, ExecutorRef executor) {
  const int workers = executor.workers();
  detail::require_keys("kv_len", k.len());
  reshape(k, k.batch());
  detail::require_at_most("the sketch's length", len_, "the keys' (truncate() was not called)",
                          k.len());
  const auto reader_in = [&](Arena& arena) { return RowReader(arena, k.dim()); };
  workers_.reserve(workers, reader_in);
  make_room(capacity, k.len(), true);
  // One task writes a whole block.
  const Index heads = k.batch() * k.heads(), first = len_ / detail::code_block,
              last = len_ < k.len() ? detail::code_blocks(k.len()) : first;
  const Index wanted = std::max<Index>(1, 2 * Index{workers} / std::max<Index>(1, heads));
  const Index blocks = std::max<Index>(1, ceil_div(last - first, wanted)),
              parts = ceil_div(last - first, blocks);
  const auto append_part = [&](Index task, int worker) {
    const Index b = task / parts / k.heads(), kv_head = task / parts % k.heads();
    const Index block = first + task % parts * blocks;
    const Index begin = std::max(block * detail::code_block, len_);
    const Index end = std::min((block + blocks) * detail::code_block, k.len());
    Arena arena = workers_[worker];
    RowReader reader = reader_in(arena);
    for (Index row = begin; row < end; ++row)
      write(b, kv_head, row, reader.read(k, b, kv_head, row));
  };
  detail::run_rows(executor, heads * (k.len() - len_), detail::few_rows, heads * parts,
                   append_part);
  len_ = k.len();
}

// Room for `len` rows, or for `capacity` if that is more; new rows are without codes. all_written:
// they are written next, whole blocks as they are.
QUOKA_FUNC void KeySketch::make_room(Index capacity, Index len, bool all_written) {
  constexpr Index width = detail::code_block;
  const Index known = detail::code_blocks(len_), blocks = detail::code_blocks(len),
              most = detail::code_blocks(capacity);
  codes_.resize(blocks, most), scales_.resize(blocks, most);
  errors_.resize(blocks, most), lengths_.resize(blocks, most);
  const bool padded =
      dim_ % detail::code_channels != 0;  // a row's last codes are written by nobody
  const Index first = all_written && !padded ? std::max(known, len / width) : known;
  for (Index b = 0; b < codes_.batch(); ++b)
    for (Index head = 0; head < codes_.heads(); ++head)
      for (Index block = first; block < blocks; ++block) {
        detail::clear_block_codes(codes_.row(b, head, block), codes_.dim());
        std::fill_n(scales_.row(b, head, block), width, 0.0f);
        std::fill_n(errors_.row(b, head, block), width, detail::infinity);
        std::fill_n(lengths_.row(b, head, block), width, 0.0f);
      }
}

QUOKA_FUNC void KeySketch::update(const Rows& pool, std::span<const Position> rows,
                                  ExecutorRef executor) {
  const Index total = detail::rows_of_pool(pool);
  for (const Position row : rows) {
    detail::require_at_least("a row of the pool", row, 0);
    detail::require_at_most("a row of the pool", row, "its last", total - 1);
  }
  update_each(
      pool, std::ssize(rows), [&](Index i) { return Index{rows[static_cast<std::size_t>(i)]}; },
      executor);
}

QUOKA_FUNC void KeySketch::update(const Rows& pool, Index begin, Index count,
                                  ExecutorRef executor) {
  const Index total = detail::rows_of_pool(pool);
  detail::require_at_least("the first row", begin, 0);
  detail::require_at_most("the first row", begin, "the pool's rows", total);
  detail::require_at_least("the number of rows", count, 0);
  detail::require_at_most("the number of rows", count, "those from the first on", total - begin);
  update_each(
      pool, count, [begin](Index i) { return begin + i; }, executor);
}

// Rows row_at(i), i < count, of the pool. After its refusals nothing throws outside `try`.
template <class RowAt>
void KeySketch::update_each(const Rows& pool, Index count, const RowAt& row_at,
                            ExecutorRef executor) {
  const Index page_size = pool.len(), total = detail::rows_of_pool(pool);
  reshape(pool, 1);
  // Rows are counted through pages, so another page size gives them other numbers.
  if (page_size != pool_.len() && std::max(pool.batch(), pool_.batch()) > 1) len_ = 0;
  pool_ = pool;
  has_room_ = total <= len_;
  try {
    if (!has_room_) {
      make_room(0, total, false);
      len_ = total;
      has_room_ = true;
    }
    const auto reader_in = [&](Arena& arena) { return RowReader(arena, pool.dim()); };
    workers_.reserve(executor.workers(), reader_in);
    detail::run_rows(executor, count * pool.heads(), detail::few_rows, pool.heads(),
                     [&](Index head, int worker) {
                       Arena arena = workers_[worker];
                       RowReader reader = reader_in(arena);
                       for (Index i = 0; i < count; ++i) {
                         const Index row = row_at(i);
                         write(0, head, row,
                               reader.read(pool, row / page_size, head, row % page_size));
                       }
                     });
  } catch (...) {
    for (Index i = 0; i < count; ++i) {
      if (row_at(i) >= len_) continue;
      for (Index head = 0; head < pool.heads(); ++head) forget(head, row_at(i));
    }
    throw;
  }
}
// The row is then like one that was never sketched.
QUOKA_FUNC void KeySketch::forget(Index head, Index row) {
  constexpr Index width = detail::code_block;
  const Index block = row / width, at = row % width;
  detail::clear_key_codes(codes_.row(0, head, block), at, dim_);
  scales_.row(0, head, block)[at] = lengths_.row(0, head, block)[at] = 0.0f;
  errors_.row(0, head, block)[at] = detail::infinity;
}

QUOKA_FUNC KeySketch::RowMapping KeySketch::map_rows(const Rows& keys) const {
  const auto refuse = [] {
    detail::fail_because("the keys are not of the cache that was sketched");
  };
  detail::require_equal("kv_heads", keys.heads(), "the sketch's", codes_.heads());
  detail::require_equal("head_dim", keys.dim(), "the sketch's", dim_);
  detail::require_equal("the batch of keys with a sketch of their cache", keys.batch(),
                        "one sequence", 1);
  const Index step = pool_.strides()[2];
  if (keys.strides()[1] != pool_.strides()[1] || keys.strides()[2] != step) refuse();
  RowMap map = keys.map();
  if (map.pages != nullptr) {
    if (keys.data() != pool_.data() || keys.pool_sizes()[2] != pool_.len() ||
        map.page_step != pool_.strides()[0])
      refuse();
    detail::require_at_most("the number of pages", keys.pool_sizes()[0],
                            "that of the pool that was sketched", pool_.batch());
    return {map, keys.pool_begin()};
  }
  // Adjacent rows, or a list of cells: some of the cache's rows, wherever they begin.
  const Index bytes = keys.data() - pool_.data();
  const Index rows = map.cells != nullptr ? keys.pool_sizes()[2] : keys.len();
  if (pool_.batch() != 1 || step == 0 || bytes % step != 0 || bytes / step < 0 ||
      bytes / step + rows > pool_.len())
    refuse();
  if (map.cells == nullptr) return {{}, bytes / step};
  map.first_cell += bytes / step;
  return {map, keys.pool_begin()};
}

QUOKA_FUNC bool KeySketch::holds(Index b, Index head, Index row, const float* key) const {
  constexpr Index width = detail::code_block;
  constexpr Index most_bytes = 1024 * width;
  std::uint8_t block[most_bytes];
  float scale[width], error[width], length[width];
  if (codes_.dim() > most_bytes) return true;
  const Index at = row % width;
  detail::encode_key(key, dim_, {block, at, scale, error, length});
  return scale[at] == scales_.row(b, head, row / width)[at] &&
         length[at] == lengths_.row(b, head, row / width)[at] &&
         detail::same_key_codes(block, codes_.row(b, head, row / width), at, dim_);
}

QUOKA_FUNC void KeySketch::require_shape_of(const Rows& k) const {
  detail::require_sizes("the keys, other than those of the state,", k.sizes(),
                        {codes_.batch(), codes_.heads(), len_, dim_});
}

QUOKA_FUNC void KeySketch::require_held(const Rows& keys, const RowMapping& rows,
                                        std::uint64_t turn, RowReader& reader) const {
  if (keys.len() == 0) return;
  const detail::LookUps at(keys.len(), keys.heads(), turn);
  for (Index head = 0; head < keys.heads(); ++head)
    for (Index i = 0; i < at.count(); ++i) require_held(keys, rows, head, at(head, i), reader);
}
QUOKA_FUNC void KeySketch::require_held(const Rows& keys, const RowMapping& rows, Index head,
                                        Index key, RowReader& reader) const {
  const Index row = rows(key);
  if (errors(0, head)[row] == detail::infinity) return;  // never sketched, or not coded
  if (holds(0, head, row, reader.read(keys, 0, head, key))) return;
  detail::require_rounding_to_nearest();
  char message[256];
  std::snprintf(message, sizeof message,
                "the key at position %td of KV head %td is not the one that was sketched, of %td: "
                "its cache changed, and KeySketch::update() was not called",
                key, head, keys.len());
  detail::fail_because(message);
}

#endif  // QUOKA_DEFINES

}  // namespace QUOKA_ABI
}  // namespace quoka
