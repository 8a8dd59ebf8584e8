// Keys and values of a past as attention multiplies them, kept from chunk to chunk.
//
//   PackedPast packed;                                  // one for each cache, beside it
//   attention(q, {cache.k(), cache.v(), packed}, ...);  // packs what is not packed yet
//   packed.truncate(len);                               // as the cache
//
// Without one, each call packs all keys in sight anew. The output is the same, bit for bit, but for Arithmetic::int8 of
// few rows, which without one is computed in an arithmetic that packs sooner. It serves calls of several
// tokens that attend to all of the past, but not in float, where packing is a copy. One token reads rows as they lie;
// keys that a selection, a mask or a window names are packed as they are named. ChunkedPrefill has one for
// LayerShape::packed, a RaggedSequence may have one.
//
// Memory: whole blocks of keys in the arithmetic's elements. For each key and KV head 2 (head_dim + v_dim) bytes by one
// or two products of bfloat16, twice as many by three products, with channels rounded up to what the
// instruction takes, and up to a fifth more; by int8 head_dim + v_dim bytes, channels rounded up to 16, and a third
// more (343 bytes of 128 + 128 channels, with all below); 4 bytes to look keys and values up; it grows as blocks fill.
// By tiles over 8,192 keys of float, one or two
// products, chunks of 128 / 32 / 8 tokens are 1.08 to 1.16 / 1.3 to 1.4 / 1.5 to 1.7 times as fast; from a cache of
// bfloat16 0.98 to 1.05 / 1.1 / 1.05 to 1.2 times; by three products 0.99 to 1.07 times.
#pragma once

#include <quoka/base/index.hpp>

#include <memory>

namespace quoka {
inline namespace QUOKA_ABI {

namespace detail {
class PackedBlocks;
}

// One cache's past, packed. One call at a time.
class PackedPast {
 public:
  // Empty; calls fill it. What was packed is forgotten where a call comes in another arithmetic, with other formats or
  // of another shape. A call throws std::invalid_argument, with what was packed unchanged, for a past that is shorter
  // than what was packed; or where some keys and values are looked up and one is not what was packed
  // (cache/key_witness.hpp says which and how surely). Sequences of one batch have one each.
  PackedPast();
  ~PackedPast();
  // Takes the memory over; what was moved from is empty.
  PackedPast(PackedPast&&) noexcept;
  // Takes the memory over.
  PackedPast& operator=(PackedPast&&) noexcept;

  // Back to the first `len` keys; no more than whole blocks of these stay. Throws std::invalid_argument below 0.
  void truncate(Index len);

  Index len() const;    // keys that are packed
  Index bytes() const;  // of memory

  detail::PackedBlocks& blocks();  // the library's own

 private:
  std::unique_ptr<detail::PackedBlocks> blocks_;
};

}  // namespace QUOKA_ABI
}  // namespace quoka
