// Keys by the codes of a sketch (key_sketch.hpp), as a selection reads them.
//
//   StateSketch    part of a State: a sketch of its own, if the cache's owner keeps none
//   SketchedKeys   a call's keys, and where each lies in the sketch
//   CodeBlocks     one head of them, 32 keys at a time
//
//   std::optional<SketchedKeys> keys;  // none: score in float
//   if (by_codes(options.sketch)) keys = state.find_codes(input.k, input.sketch);
#pragma once

#include <quoka/rows/row_reader.hpp>
#include <quoka/rows/rows.hpp>
#include <quoka/select/key_sketch.hpp>
#include <quoka/select/options.hpp>

#include <algorithm>
#include <cstdint>
#include <optional>

#if QUOKA_DEFINES
#include <quoka/kernels/codes.hpp>
#include <quoka/simd/tuning.hpp>
#endif

namespace quoka {
inline namespace QUOKA_ABI {

// Keys [batch, kv_heads, kv_len, head_dim], and the sketch that has the codes of all of them.
class SketchedKeys {
 public:
  // Keys whose sketch grows with them: key i is row i of the sketch. Throws std::invalid_argument
  // if they have another shape than was sketched.
  SketchedKeys(const Rows& k, const KeySketch& sketch) : k_(k), sketch_(&sketch) {
    sketch.require_shape_of(k);
  }
  // Keys of a cache, and the cache's sketch. turn counts the calls of look_up(). Throws
  // std::invalid_argument if they are not of that cache.
  SketchedKeys(const Rows& k, const KeySketch& of_cache, std::uint64_t& turn)
      : k_(k), sketch_(&of_cache), turn_(&turn), mapping_(of_cache.map_rows(k)) {}

  const Rows& k() const { return k_; }                  // the keys
  const KeySketch& sketch() const { return *sketch_; }  // their sketch
  // Where the keys lie in the sketch; null: key i is row i.
  const KeySketch::RowMapping* mapping() const { return turn_ != nullptr ? &mapping_ : nullptr; }
  // For a sketch that the cache's owner keeps: compares some keys with their codes. Throws
  // std::invalid_argument if a key is not the sketched one.
  void look_up(RowReader& reader) const {
    if (turn_ != nullptr) sketch_->require_held(k_, mapping_, (*turn_)++, reader);
  }
  // The same of the key of KV head `kv_head` whose score is largest. scores [kv_len].
  void look_up_best(Index kv_head, const float* scores, RowReader& reader) const {
    if (turn_ != nullptr)
      sketch_->require_held(k_, mapping_, kv_head,
                            std::max_element(scores, scores + k_.len()) - scores, reader);
  }

 private:
  Rows k_;
  const KeySketch* sketch_;
  std::uint64_t* turn_ = nullptr;  // null: the State keeps the sketch
  KeySketch::RowMapping mapping_;
};

// A State's sketch of the keys, which grows with the cache.
struct StateSketch {
  KeySketch sketch;        // of the keys that were appended
  std::uint64_t turn = 0;  // calls of look_up() so far, where the cache's owner keeps the sketch

  void truncate(Index kv_len) { sketch.truncate(kv_len); }
  Index kept_len() const { return sketch.len(); }      // keys in the sketch
  Index kept_bytes() const { return sketch.bytes(); }  // its memory

  // Heads of more channels have no codes: their products might not fit 32 bits.
  static constexpr Index most_dim = 1024;

  // Sketches the new keys, if their codes can be used.
  void append(const Rows& k, Index capacity, ExecutorRef executor) {
    if (k.dim() <= most_dim) sketch.append(k, capacity, executor);
  }
  // Are there codes of all keys k? `cache` is the sketch of the cache that k lies in; if it is
  // null, `sketch` counts.
  bool has_codes(const Rows& k, const KeySketch* cache) const {
    return k.dim() <= most_dim && (cache != nullptr ? cache->has_room() : sketch.len() == k.len());
  }
  // These codes, or nothing. Throws as the constructors of SketchedKeys.
  std::optional<SketchedKeys> find_codes(const Rows& k, const KeySketch* cache) {
    if (!has_codes(k, cache)) return std::nullopt;
    return cache != nullptr ? SketchedKeys(k, *cache, turn) : SketchedKeys(k, sketch);
  }
};

// Are keys scored by codes? automatic: if that is faster than float on this ISA, with about 64 rows
// of a KV head, or with the rows of every query. NEON without i8mm has no kernel for several rows.
bool by_codes(Sketch sketch, bool every_query = false);

#if QUOKA_DEFINES

QUOKA_FUNC bool by_codes(Sketch sketch, bool every_query) {
  return sketch == Sketch::on ||
         (sketch == Sketch::automatic && detail::codes_beat_float(every_query));
}

namespace detail {

// Codes of a head's keys in their own order, a pair of blocks (32 keys) at a time, wherever they
// lie in the cache. A block of the sketch that holds 16 keys in their order is read in place;
// others are gathered. The pair some way ahead is prefetched on the way.
class CodeBlocks {
 public:
  static constexpr Index pair = code_pair;

  CodeBlocks() = default;
  // All keys of a head, which stay where they are.
  CodeBlocks(const SketchedKeys& keys, Index b, Index head)
      : sketch_(&keys.sketch()),
        mapping_(keys.mapping()),
        end_(keys.k().len()),
        b_(b),
        head_(head),
        steps_(code_steps(keys.k().dim())) {}

  // The pair at kv, a multiple of 32, of keys below `end`. gathered: memory for two blocks, where
  // keys may come to lie.
  KeyPair at(Index kv, Index end, std::uint8_t* gathered) const {
    const Index count = std::min(pair, end - kv), later = kv + tuning::sketch_prefetch_pairs * pair;
    KeyPair keys{count, {block(kv, std::min<Index>(count, code_block), gathered)}, {}};
    keys.codes[1] = count > code_block
                        ? block(kv + code_block, count - code_block, gathered + steps_ * code_line)
                        : keys.codes[0];
    if (later + pair <= end_)
      keys.ahead[0] = around(later), keys.ahead[1] = around(later + code_block);
    return keys;
  }

  // A number of each key of a pair, of the `column` that the sketch has of the head: in place, or
  // copied to `room` [32].
  const float* numbers(const float* column, Index kv, Index count, float* room) const {
    if (mapping_ == nullptr && count == pair) return column + kv;
    for (Index first = 0; first < count; first += code_block) {
      const Index n = std::min<Index>(code_block, count - first);
      if (in_one_block(kv + first))
        std::copy_n(column + row(kv + first), n, room + first);
      else
        for (Index i = 0; i < n; ++i) room[first + i] = column[row(kv + first + i)];
    }
    return room;
  }

 private:
  Index row(Index key) const { return mapping_ != nullptr ? (*mapping_)(key) : key; }
  bool in_one_block(Index first) const {
    return mapping_ == nullptr || mapping_->keeps_blocks(first);
  }
  // The block that holds this key.
  const std::uint8_t* around(Index key) const {
    return sketch_->codes(b_, head_, row(key) / code_block);
  }

  // Codes of keys [first, first + n), 0 < n <= 16: in place, or gathered at `to`.
  const std::uint8_t* block(Index first, Index n, std::uint8_t* to) const {
    constexpr Index width = code_block;
    if (in_one_block(first)) return around(first);
    Index rows[width] = {};  // n is not 0, which a compiler cannot see
    for (Index i = 0; i < n; ++i) rows[i] = row(first + i);
    bool in_place = rows[0] % width == 0;
    for (Index i = 0; i < n; ++i) in_place = in_place && rows[i] == rows[0] + i;
    if (in_place) return sketch_->codes(b_, head_, rows[0] / width);
    ScatteredKeys keys;
    const std::uint8_t* prefetched = nullptr;
    for (Index i = 0; i < n; ++i) {
      keys.block[i] = sketch_->codes(b_, head_, rows[i] / width);
      keys.at[i] = rows[i] % width;
      const Index ahead = first + i + tuning::gathered_prefetch_keys;
      const std::uint8_t* const later = ahead < end_ ? around(ahead) : prefetched;
      keys.ahead[i] = later != prefetched ? later : nullptr;
      prefetched = later;
    }
    gather_block(keys, n, steps_, to);
    return to;
  }

  const KeySketch* sketch_ = nullptr;
  const KeySketch::RowMapping* mapping_ = nullptr;  // null: key i is row i of the sketch
  Index end_ = 0, b_ = 0, head_ = 0, steps_ = 0;
};

}  // namespace detail

#endif  // QUOKA_DEFINES

}  // namespace QUOKA_ABI
}  // namespace quoka
