// The input of selection by 8-bit codes: rows of queries, and keys that were sketched (select/sketch/key_sketch.hpp).
#pragma once

#include <quoka/runtime/executor.hpp>
#include <quoka/select/options.hpp>
#include <quoka/select/sketch/key_sketch.hpp>

#include <algorithm>
#include <cstdint>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// Keys [batch, kv_heads, kv_len, head_dim], and the sketch that has their codes.
class SketchedKeys {
 public:
  // By `own`, a sketch of all of k, or, if it is not null, by that of the cache that k lies in. Throws
  // std::invalid_argument where k is of another shape than what was sketched, or not of that cache.
  SketchedKeys(const Rows& k, const KeySketch& own, const KeySketch* cache)
      : k_(k), sketch_(cache != nullptr ? *cache : own), in_cache_(cache != nullptr) {
    if (in_cache_)
      mapping_ = cache->map_rows(k);
    else
      own.require_shape_of(k);
  }

  const Rows& k() const { return k_; }
  const KeySketch& sketch() const { return sketch_; }
  // Where the keys lie in the sketch; null: key i is row i.
  const KeySketch::RowMapping* mapping() const { return in_cache_ ? &mapping_ : nullptr; }
  // Of a cache that others keep some keys are looked up; turn counts the calls. Throws std::invalid_argument where one
  // is not what was sketched. reader: room for a key.
  void look_up(std::uint64_t& turn, RowReader& reader) const {
    if (in_cache_) sketch_.require_held(k_, mapping_, turn++, reader);
  }
  // The same of the key of KV head `kv_head` whose score is largest. scores [kv_len].
  void look_up_best(Index kv_head, const float* scores, RowReader& reader) const {
    if (in_cache_)
      sketch_.require_held(k_, mapping_, kv_head,
                           std::max_element(scores, scores + k_.len()) - scores, reader);
  }

 private:
  Rows k_;
  const KeySketch& sketch_;
  bool in_cache_;
  KeySketch::RowMapping mapping_;
};

struct SketchedCall {
  const SketchedKeys& keys;
  const float* q_bar;       // [batch, kv_heads, rows, head_dim]
  Index rows;               // of queries, for each KV head
  Aggregation aggregation;  // over these
  Index capacity;           // of the cache: memory for so many keys is taken
  ExecutorRef executor;

  const Rows& k() const { return keys.k(); }
  Index heads() const { return k().batch() * k().heads(); }
  Index most_keys() const { return std::max(k().len(), capacity); }
  // The rows of head b * kv_heads + kv_head.
  const float* rows_of(Index head) const { return q_bar + head * rows * k().dim(); }
};

// Do codes serve heads of `dim` channels? Products of more might not fit 32 bits.
inline bool codes_fit(Index dim) { return dim <= 1024; }

// A State's sketch of the keys, which grows with the cache.
struct SketchKept {
  KeySketch sketch;

  void truncate(Index kv_len) { sketch.truncate(kv_len); }
  Index kept_len() const { return sketch.len(); }
  Index kept_bytes() const { return sketch.bytes(); }
};

// Reused memory: of sketched_cosines.hpp and sketched_mass.hpp.
struct SketchedCosinesState;
struct SketchedMassState;

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
