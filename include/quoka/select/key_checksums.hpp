// Checks whether cached keys are still those that a State has seen. A State keeps data per key:
// codes, projections, bounds of pages, means of blocks, a retained set. The data is right only
// while the keys are not overwritten. A State remembers checksums of a few keys; each selection,
// and each appended() before it remembers others, compares some of them.
//
//   remembered   the newest key and 16 others, spread over all keys; each time keys come, one of
//                the others is replaced
//   compared     in each call the newest key and one of the others, in turn; after a truncate()
//                that cut the newest one off, all that are left
//
// So another sequence in the same memory is found in the first call: its key at the newest place
// differs. A change elsewhere is found once a remembered key lies in it. A changed run that is a
// share p of all keys is found within about 1 / p calls, if keys are appended in between; a single
// key perhaps never. Callers that change keys call truncate() first.
//
// A checksum covers one position of all sequences and KV heads: 64 bits of the rows' bytes, or of
// their floats where the format keeps scales or channels apart. Where rows lie does not matter: a
// cache may move. Cost: two rows of each KV head a call, and two when keys come; no memory per key.
// This is for data that a State made of keys, whatever they are. A sketch that the cache's owner
// keeps needs no checksums: its codes are compared with the keys themselves (LookUps in
// select/key_sketch.hpp).
#pragma once

#include <quoka/rows/format.hpp>
#include <quoka/rows/row_reader.hpp>
#include <quoka/rows/rows.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

class KeyChecksums {
 public:
  // Compares some remembered keys with rows [batch, kv_heads, len, dim]. Returns the position of
  // one that has changed; -1: none has.
  Index find_changed(const Rows& rows) {
    const std::size_t turn = turn_++ % most_others;
    const auto changed = [&](const Key& key) {
      return key.position >= 0 && key.position < rows.len() &&
             key_at(rows, key.position).checksum != key.checksum;
    };
    if (changed(keys_.newest)) return keys_.newest.position;
    const bool was_cut = keys_.newest.position < 0;
    for (std::size_t i = 0; i < most_others; ++i)
      if ((was_cut || i == turn) && changed(keys_.others[i])) return keys_.others[i].position;
    return -1;
  }
  // Keys below `len` have been seen, those below `known` before this call. Nothing has changed
  // where it throws.
  void remember(const Rows& rows, Index known, Index len) {
    if (len <= known) return;
    Keys next = keys_;
    next.newest = key_at(rows, len - 1);
    const std::size_t oldest = next.replaced++ % most_others;
    for (std::size_t i = 0; i < most_others; ++i)
      if (i == oldest || next.others[i].position < 0)
        next.others[i] = key_at(rows, spread_point(++next.points, len));
    keys_ = next;
  }
  // Keys from `len` on are gone.
  void truncate(Index len) {
    if (keys_.newest.position >= len) keys_.newest = {};
    for (Key& key : keys_.others)
      if (key.position >= len) key = {};
  }

 private:
  static constexpr std::size_t most_others = 16;

  struct Key {
    Index position = -1;  // -1: none
    std::uint64_t checksum = 0;
  };
  struct Keys {
    Key newest;
    std::array<Key, most_others> others;
    std::uint64_t replaced = 0, points = 0;
  };

  // NH (Black and others, UMAC, 1999): the sum of (low + its key) * (high + the key's) over the
  // words, sums of 32 bits. Heads and words have keys of their own.
  static std::uint64_t hash_of(const std::byte* bytes, Index count, Index head) {
    constexpr std::uint64_t half = 0xffffffff;
    std::uint64_t hash = 0;
    for (Index i = 0; i < count; i += 8) {
      std::uint64_t word = 0;  // the last one may be a part
      std::memcpy(&word, bytes + i, static_cast<std::size_t>(std::min<Index>(8, count - i)));
      const std::uint64_t key =
          ((static_cast<std::uint64_t>(head) << 32) + static_cast<std::uint64_t>(i / 4 + 1)) *
          0x9e3779b97f4a7c15u;
      hash += ((word + key) & half) * (((word >> 32) + (key >> 32)) & half);
    }
    return hash;
  }
  Key key_at(const Rows& rows, Index position) {
    const bool alone = rows.stores_alone();
    Key key{position, 0};
    for (Index b = 0; b < rows.batch(); ++b)
      for (Index head = 0; head < rows.heads(); ++head) {
        const std::byte* const row =
            alone ? rows.row(b, head, position)
                  : reinterpret_cast<const std::byte*>(floats_.read(rows, b, head, position));
        const Index bytes =
            alone ? rows.format().row_bytes(rows.shape(head)) : rows.dim() * Index{sizeof(float)};
        key.checksum += hash_of(row, bytes, b * rows.heads() + head);
      }
    return key;
  }

  Keys keys_;
  RowReader floats_;
  std::uint64_t turn_ = 0;
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
