// Rows that a State makes of a cache's keys as they are appended, and keeps in their place: bounds
// of pages, means of blocks, projections, adjacent channels.
//
//   keys [0, keys_per_row) -> row 0, the next ones -> row 1, ...; the last row covers the
//   remaining keys
//
// A full row is computed once. A last one that is not full is made again from its first key when
// more keys come.
#pragma once

#include <quoka/rows/row_reader.hpp>
#include <quoka/rows/row_store.hpp>
#include <quoka/select/query_rows.hpp>

#include <algorithm>

namespace quoka {
inline namespace QUOKA_ABI {

// Part of a State.
class KeptRows {
 public:
  // Makes the rows of the keys that have come: make(kv_head, count, key, row) writes a row [dim] of
  // `count` keys, key(i) being the i-th as floats [head_dim], good until the next. Room for
  // `capacity` keys.
  template <class Make>
  void append(const Rows& k, Index capacity, Index keys_per_row, Index dim, ExecutorRef executor,
              Make&& make) {
    if (rows_.batch() != k.batch() || rows_.heads() != k.heads() || rows_.dim() != dim ||
        keys_per_row_ != keys_per_row)
      keys_ = 0;
    keys_per_row_ = keys_per_row;
    truncate(k.len());
    const Index count = ceil_div(k.len(), keys_per_row);
    if (keys_ == k.len() && rows_.len() == count) return;
    rows_.reshape(k.batch(), k.heads(), dim);
    rows_.resize(count, ceil_div(capacity, keys_per_row));
    const auto reader_in = [&](Arena& arena) { return RowReader(arena, k.dim()); };
    workers_.reserve(executor.workers(), reader_in);
    // The last row is made again: if that fails, it is of no keys.
    keys_ = keys_ / keys_per_row * keys_per_row;
    for_each_kv_head(k, executor, [&](Index b, Index kv_head, int worker) {
      Arena arena = workers_[worker];
      RowReader reader = reader_in(arena);
      for (Index row = keys_ / keys_per_row; row < rows_.len(); ++row) {
        const Index begin = row * keys_per_row, end = std::min(begin + keys_per_row, k.len());
        const auto key = [&](Index i) { return reader.read(k, b, kv_head, begin + i); };
        make(kv_head, end - begin, key, rows_.row(b, kv_head, row));
      }
    });
    keys_ = k.len();  // now that all are made
  }
  // Back to the first kv_len keys: to the rows that are of these alone.
  void truncate(Index kv_len) {
    if (kv_len < keys_) keys_ = kv_len / keys_per_row_ * keys_per_row_;
  }

  const RowStore<float>& rows() const { return rows_; }  // [batch, kv_heads, rows, dim]
  Index kept_len() const { return keys_; }               // keys that rows were made of
  Index kept_bytes() const { return rows_.bytes(); }     // memory that grows with them

 private:
  RowStore<float> rows_;
  Arenas workers_;
  Index keys_ = 0, keys_per_row_ = 1;
};

}  // namespace QUOKA_ABI
}  // namespace quoka
