// Softmax scores by 8-bit logits, for any method whose rows are multiplied with all keys: what
// softmax_scores() of query_scores.hpp makes, nearly (sketched_mass.hpp says how nearly), in 0.3 of the time where the
// ISA has 8-bit dot products.
//
//   appended   sketch.append(keys)                          the keys themselves, or rows that stand for them
//   score      if (sketch.score(rows, fill, keys, ...)) return;
//              softmax_scores({rows, fill, keys, ...}, ...);   a State that does not have all keys
#pragma once

#include <quoka/select/options.hpp>
#include <quoka/select/query_scores.hpp>
#include <quoka/select/sketch/key_sketch.hpp>
#include <quoka/select/sketch/sketched_call.hpp>

#include <memory>

namespace quoka {
inline namespace QUOKA_ABI {

// Is that wanted with these options, and here? every_query: all queries of
// the chunk score, not some.
inline bool uses_softmax_sketch(Sketch sketch, Domain domain, bool every_query = false) {
  return domain == Domain::softmax &&
         (sketch == Sketch::on ||
          (sketch == Sketch::automatic && detail::sketched_mass_is_fast(every_query)));
}

// Part of a State: a sketch of the keys, and reused memory.
class SoftmaxSketch {
 public:
  SoftmaxSketch();
  SoftmaxSketch(SoftmaxSketch&&) noexcept;             // leaves an object to assign to or destroy
  SoftmaxSketch& operator=(SoftmaxSketch&&) noexcept;  // the same
  ~SoftmaxSketch();

  // Sketches the keys that have come since; room for `capacity`. keys [batch, kv_heads, len, dim].
  void append(const Rows& keys, Index capacity, ExecutorRef executor) {
    keys_.append(keys, capacity, executor);
  }
  void truncate(Index len) { keys_.truncate(len); }   // back to the first len keys
  Index kept_len() const { return keys_.len(); }      // keys that were appended
  Index kept_bytes() const { return keys_.bytes(); }  // memory that grows with them
  Index bytes() const;                                // all its memory

  // scores [batch, kv_heads, len] of rows as fill() makes them. cache: a sketch of the cache that the keys
  // lie in; null: the appended ones. False, and nothing done, where that is not all of the keys, or
  // sums of codes would not fit. Throws std::invalid_argument for keys of another shape, and where some of those of a
  // cache are not those that were sketched; callers of append() check that themselves (KeysIdentity).
  // kept_len(): the appended keys.
  bool score(const QueryRows& shape, FillRows fill, const Rows& keys, const KeySketch* cache,
             Index capacity, Aggregation over, TensorView<float, 3> scores, ExecutorRef executor);

 private:
  KeySketch keys_;
  Buffer<float> rows_;  // [batch, kv_heads, max_rows, dim]
  WorkerScratch<RowReader> readers_;
  std::unique_ptr<detail::SketchedMassState> mass_;
};

}  // namespace QUOKA_ABI
}  // namespace quoka

#if QUOKA_DEFINES
#include <quoka/select/sketch/sketched_mass.hpp>

#include <algorithm>
#include <limits>

namespace quoka {
inline namespace QUOKA_ABI {

QUOKA_FUNC SoftmaxSketch::SoftmaxSketch() = default;
QUOKA_FUNC SoftmaxSketch::SoftmaxSketch(SoftmaxSketch&&) noexcept = default;
QUOKA_FUNC SoftmaxSketch& SoftmaxSketch::operator=(SoftmaxSketch&&) noexcept = default;
QUOKA_FUNC SoftmaxSketch::~SoftmaxSketch() = default;
QUOKA_FUNC Index SoftmaxSketch::bytes() const {
  return keys_.bytes() + rows_.bytes() + readers_.bytes() + (mass_ != nullptr ? mass_->bytes() : 0);
}

QUOKA_FUNC bool SoftmaxSketch::score(const QueryRows& shape, FillRows fill, const Rows& keys,
                                     const KeySketch* cache, Index capacity, Aggregation over,
                                     TensorView<float, 3> scores, ExecutorRef executor) {
  if ((cache == nullptr && keys_.len() != keys.len()) || !detail::codes_fit(keys.dim()))
    return false;
  const Index head_size = shape.max_rows * shape.dim;
  float* const rows = rows_.reserve(keys.batch() * keys.heads() * head_size);
  readers_.reserve(executor.workers(), shape.read.empty() ? keys : shape.read);
  for_each_kv_head(keys, executor, [&](Index b, Index kv_head, int worker) {
    float* const to = rows + (b * keys.heads() + kv_head) * head_size;
    RowWriter writer(to, shape.dim, readers_[worker]);
    fill(b, kv_head, writer);
    // Rows that were left out are no rows below either.
    std::fill(to + writer.count() * shape.dim, to + head_size,
              std::numeric_limits<float>::quiet_NaN());
  });
  if (mass_ == nullptr) mass_ = std::make_unique<detail::SketchedMassState>();
  const detail::SketchedKeys sketched(keys, keys_, cache);
  detail::sketched_softmax_scores({sketched, rows, shape.max_rows, over, capacity, executor}, 1.0f,
                                  scores, *mass_);
  return true;
}

}  // namespace QUOKA_ABI
}  // namespace quoka
#endif  // QUOKA_DEFINES
