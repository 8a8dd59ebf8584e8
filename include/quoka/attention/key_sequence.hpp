// What one KV head's queries attend to: the kept past in ascending order, then the chunk, as one
// sequence of keys.
#pragma once

#include <quoka/attention/attention_call.hpp>
#include <quoka/kernels/packing.hpp>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// Keys [begin, end) of a sequence.
struct KeyRange {
  Index begin, end;
};

// The rows of one block: addresses, and the format of all of them.
struct BlockRows {
  ConstRow k[tuning::block_keys], v[tuning::block_keys];
  const Format *k_format, *v_format;
};

// Where a block of two formats is widened to floats: the past's last and the chunk's first keys.
struct MixedRows {
  Buffer<float> k, v;

  void reserve(const AttentionCall& call) {
    if (mixes(call.past_k, call.chunk_k)) k.reserve(tuning::block_keys * call.q.dim());
    if (mixes(call.past_v, call.chunk_v)) v.reserve(tuning::block_keys * call.v_dim);
  }
  static bool mixes(const Rows& past, const Rows& chunk) {
    return past.len() > 0 && chunk.len() > 0 && &past.format() != &chunk.format();
  }
  Index bytes() const { return k.bytes() + v.bytes(); }
};

// The keys of one KV head as one sequence: kept past, then chunk.
class KeySequence {
 public:
  KeySequence(const AttentionCall& call, Index b, Index kv_head)
      : call_(call), b_(b), kv_head_(kv_head), past_count_(call.past_count(b, kv_head)) {
    if (call.keep != nullptr) keep_ = call.keep->row(b, kv_head);
  }

  const AttentionCall& call() const { return call_; }
  Index b() const { return b_; }
  Index kv_head() const { return kv_head_; }
  Index past_count() const { return past_count_; }  // kept past keys

  RowFinder past(const Rows& x) const {
    const RowFinder rows = x.head(b_, kv_head_);
    return call_.keep != nullptr ? rows.listed(keep_.data()) : rows;
  }
  RowFinder chunk(const Rows& x) const { return x.head(b_, kv_head_); }

  // Keys [first, first + count).
  void rows(Index first, Index count, MixedRows& mixed, BlockRows& to) const {
    const Index of_past = std::clamp<Index>(past_count_ - first, 0, count);
    to.k_format = find(call_.past_k, call_.chunk_k, first, of_past, count, mixed.k, to.k);
    to.v_format = find(call_.past_v, call_.chunk_v, first, of_past, count, mixed.v, to.v);
  }
  // One past the last key that query i sees.
  Index end_for(Index query) const {
    return past_count_ + std::min(query + 1, call_.chunk_k.len());
  }
  // The first key that query i sees through the window.
  Index begin_for(Index query) const {
    if (call_.window == std::numeric_limits<Index>::max()) return 0;
    const Index hidden = call_.query_position + query - call_.window;  // last position out of sight
    if (hidden >= call_.query_position) return past_count_ + hidden - call_.query_position + 1;
    const Index of_past = hidden - call_.first_position + 1;  // past keys out of sight, unselected
    if (of_past <= 0) return 0;
    if (call_.keep == nullptr) return std::min(of_past, past_count_);
    Index low = 0, high = past_count_;  // the first kept position that is not hidden
    while (low < high) {
      const Index middle = (low + high) / 2;
      if (keep_[static_cast<std::size_t>(middle)] < of_past)
        low = middle + 1;
      else
        high = middle;
    }
    return low;
  }
  // All keys that queries first ... last see, from the beginning of a block on.
  KeyRange in_sight(Index first, Index last) const {
    const Index end = end_for(last);
    return {std::min(begin_for(first) / tuning::block_keys * tuning::block_keys, end), end};
  }

 private:
  const Format* find(const Rows& past, const Rows& chunk, Index first, Index of_past, Index count,
                     Buffer<float>& mixed, ConstRow* rows) const {
    if (of_past > 0) this->past(past).find(first, of_past, rows);
    if (of_past < count)
      this->chunk(chunk).find(first + of_past - past_count_, count - of_past, rows + of_past);
    if (of_past == count && count > 0) return &past.format();
    if (of_past == 0 && count > 0) return &chunk.format();
    if (count == 0) return &float_format();
    if (&past.format() == &chunk.format()) return &past.format();
    for (Index i = 0; i < count; ++i) {
      float* const to = mixed.data() + i * past.dim();
      (i < of_past ? past : chunk).format().widen(rows[i], past.dim(), to);
      rows[i] = reinterpret_cast<ConstRow>(to);
    }
    return &float_format();
  }

  const AttentionCall& call_;
  Index b_, kv_head_;
  std::span<const Position> keep_;
  Index past_count_;
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
