// Means of the keys and values that a selection leaves out (views/past_rest.hpp), without reading them all: sums over
// the whole past are kept, and those of the chosen keys taken away.
//
//   sums[i]   over the first (i + 1) * 256 keys: how many count, their channels, their values' channels
//   rest   = (sums of all - sums of the chosen) / (number of all - number of the chosen)
//
// A key counts unless it or its value has a NaN or an infinity: those are attended to where they are chosen, and left
// out without a trace where they are not. Where more than half of the keys are chosen the others are added up instead.
// Sums are in float over 64 keys at most, and in double beyond, in an order that the positions decide: the rest is the
// same, bit for bit, whatever was kept and truncated before. Error of a mean: below 2^-16 of the mean |x| of the past.
//
// Cost of a call: each chosen key and value, and up to 255 more, read and added once: head_dim + v_dim additions, where
// a chunk's attention to it takes 2 * group * q_len times as many. New keys once. Kept: 8 * (1 + head_dim + v_dim) bytes
// for 256 keys of a KV head, 3 % of a cache of half.
#pragma once

#include <quoka/cache/row_store.hpp>
#include <quoka/runtime/worker_scratch.hpp>
#include <quoka/views/float_rows.hpp>
#include <quoka/views/past_rest.hpp>
#include <quoka/views/rows.hpp>

#include <span>

namespace quoka {
inline namespace QUOKA_ABI {

// Of the keys and values of one cache. Who keeps it says what has changed: truncate(n) to the first keys that are as
// they were. One call at a time.
class PastSums {
 public:
  static constexpr Index step = 256;  // keys between two sums that are kept

  // Keys of which sums are kept: whole steps.
  Index len() const { return sums_.len() * step; }
  Index kept_bytes() const { return sums_.bytes(); }                // of memory for them
  Index bytes() const { return sums_.bytes() + scratch_.bytes(); }  // with scratch memory
  // Sums of the first `len` keys stay.
  void truncate(Index len) { sums_.truncate(std::max<Index>(len, 0) / step); }

  // A call, in three steps: rest() of every head in between, by any worker. k [batch, kv_heads, len, head_dim], v
  // [batch, kv_heads, len, v_dim]: the whole past, those known among it. capacity: of the cache. Throws
  // std::invalid_argument where k and v do not fit together.
  void begin(const Rows& k, const Rows& v, Index capacity, int workers);
  // What is left out by `kept`, ascending positions of head b * kv_heads + kv_head, to a row of a PastRest.
  void rest(Index head, std::span<const Position> kept, float* to, int worker);
  // The sums of new keys are kept, if rest() was called for all heads.
  void finish() { sums_.resize(k_.len() / step); }

 private:
  struct Scratch {
    detail::FloatRow k, v;
    Buffer<float> part;    // sums over a few rows: keys, then values, each of whole packets
    Buffer<double> total;  // [width]

    void reserve(const Rows& keys, const Rows& values);
    Index bytes() const { return k.bytes() + v.bytes() + part.bytes() + total.bytes(); }
  };
  // Rows of one head: [begin, end) of the cache, or of a list of its positions.
  struct Some {
    Index begin, end;
    const Position* list = nullptr;
    Index operator[](Index i) const { return list != nullptr ? Index{list[i]} : i; }
  };

  Index width() const { return 1 + k_.dim() + v_.dim(); }
  // sign times the sums over `rows` to `to` [width].
  void add(Index head, const Some& rows, double sign, double* to, Scratch& scratch) const;
  bool add_together(Index head, const Some& rows, double sign, double* to, Scratch& scratch) const;
  // sign times `rows` keys and values, summed up. False, and nothing added, where one of the sums is not finite.
  bool add_sums(const float* keys, const float* values, Index rows, double sign, double* to) const;

  Rows k_, v_;             // of the call
  Index known_ = 0;        // steps, when it began
  Index k_dim_ = 0;        // of what is kept
  RowStore<double> sums_;  // [batch, kv_heads, steps, width]
  WorkerScratch<Scratch> scratch_;
};

}  // namespace QUOKA_ABI
}  // namespace quoka

#if !defined(QUOKA_COMPILED)
#include <quoka/cache/past_sums_impl.hpp>
#endif
