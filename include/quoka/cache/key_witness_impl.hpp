// Definitions of key_witness.hpp.
#pragma once

#include <quoka/cache/key_witness.hpp>
#include <quoka/packing/format_table.hpp>
#include <quoka/simd/simd.hpp>

#include <algorithm>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

QUOKA_FUNC void fail_changed(const WitnessWords& words, Index b, Index head, Index i, Index len) {
  require_rounding_to_nearest();
  char message[512];
  std::snprintf(message, sizeof message,
                "the %s at position %td of batch %td, KV head %td is not the one that %s, of %td: "
                "%s",
                words.row, i, b, head, words.told, len, words.way_out);
  fail_because(message);
}

QUOKA_FUNC std::uint16_t KeyWitness::noted(const Rows& rows, Index b, Index head, Index i,
                                           FloatRow& reader) const {
  const auto key_of = [](Index word) {
    return static_cast<std::uint64_t>(2 * word + 1) * 0x9e3779b97f4a7c15u;
  };
  std::uint64_t hash;
  if (rows.stores_alone())
    hash = keyed_hash(rows.row(b, head, i), rows.format().row_bytes(rows.shape(head)), key_of);
  else
    hash = keyed_hash(reinterpret_cast<const std::byte*>(reader.read(rows, b, head, i)),
                      rows.dim() * static_cast<Index>(sizeof(float)), key_of);
  return static_cast<std::uint16_t>(((hash ^ hash >> 32) * 0xd6e8feb86659fd93u) >> 48);
}

QUOKA_FUNC void KeyWitness::require(const Rows& rows, const WitnessWords& words) {
  if (len_ == 0 || rows.batch() != hashes_.batch() || rows.heads() != hashes_.heads() ||
      rows.dim() != dim_ || rows.len() < len_)
    return;
  floats_.reserve(1, rows);
  const LookUps at(len_, rows.heads(), turn_++);
  const Index count = at.count(), per_sequence = rows.heads() * count;
  const Index all = rows.batch() * per_sequence;
  const Index bytes = bytes_together(rows.format(), rows.shape(0));
  struct CheckedRow {
    Index b, head, row;
  };
  const auto row_at = [&](Index i) {
    const Index b = i / per_sequence, head = i % per_sequence / count;
    return CheckedRow{b, head, at(head, i % count)};
  };
  constexpr Index ahead = 8;  // rows between the one at hand and the one asked for
  for (Index i = -ahead; i < all; ++i) {
    if (i + ahead < all) {
      const CheckedRow next = row_at(i + ahead);
      const std::byte* const row = rows.row(next.b, next.head, next.row);
      for (Index byte = 0; byte < bytes; byte += 64) simd::prefetch(row + byte);
      simd::prefetch(hashes_.row(next.b, next.head, next.row));
    }
    if (i < 0) continue;
    const CheckedRow x = row_at(i);
    if (noted(rows, x.b, x.head, x.row, floats_[0]) != *hashes_.row(x.b, x.head, x.row))
        [[unlikely]]
      fail_changed(words, x.b, x.head, x.row, len_);
  }
}

QUOKA_FUNC void KeyWitness::reserve(const Rows& rows, Index len, Index capacity, int workers) {
  if (rows.batch() != hashes_.batch() || rows.heads() != hashes_.heads() || rows.dim() != dim_)
    len_ = 0;
  staged_ = 0;
  floats_.reserve(workers, rows);
  hashes_.reshape(rows.batch(), rows.heads(), 1);
  dim_ = rows.dim();
  hashes_.grow(len, capacity);
}

QUOKA_FUNC void KeyWitness::stage(const Rows& rows, Index b, Index head, Index begin, Index end,
                                  int worker) {
  for (Index i = begin; i < end; ++i)
    *hashes_.row(b, head, i) = noted(rows, b, head, i, floats_[worker]);
}

QUOKA_FUNC void KeyWitness::commit(Index len) {
  if (len <= len_) return;
  len_ = len;
  staged_ = 0;
  hashes_.resize(len_);  // room was made
}

QUOKA_FUNC void KeyWitness::stage(const Rows& rows, Index len, Index capacity,
                                  ExecutorRef executor) {
  if (len <= len_ || staged_ == len) return;
  reserve(rows, len, capacity, executor.workers());
  constexpr Index together = 64;  // rows of a task
  const Index heads = rows.batch() * rows.heads(), first = len_;
  const Index parts = ceil_div(len - first, together);
  const auto run = [&](Index task, int worker) {
    const Index head = task / parts, begin = first + task % parts * together;
    stage(rows, head / rows.heads(), head % rows.heads(), begin, std::min(begin + together, len),
          worker);
  };
  run_rows(executor, heads * (len - first), 8 * together, heads * parts, run);
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
