// What one KV head's queries attend to: the kept past in ascending order, then the chunk, as one
// sequence of keys.
#pragma once

#include <quoka/attention/attention_call.hpp>
#include <quoka/packing/panel_packing.hpp>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// Keys [begin, end) of a sequence.
struct KeyRange {
  Index begin, end;
};

// The rows of one block: addresses, and the format of all of them.
struct BlockRows {
  ConstRow k[tuning::most_block_keys], v[tuning::most_block_keys];
  const Format *k_format, *v_format;
  RowShape k_shape, v_shape;

  // What packing the first `count` of them must know.
  void describe_keys(const AttentionCall& call, Index count, PackedBlock& packed) const {
    packed.k = k, packed.k_format = k_format, packed.k_shape = k_shape;
    packed.count = count, packed.dim = call.q.dim();
  }
  void describe_values(const AttentionCall& call, PackedBlock& packed) const {
    packed.v = v, packed.v_format = v_format, packed.v_shape = v_shape;
    packed.v_dim = call.v_dim;
  }
  Index k_bytes() const { return bytes_together(*k_format, k_shape); }
  Index v_bytes() const { return bytes_together(*v_format, v_shape); }
};

// Where a block of two formats is widened to floats: the past's last and the chunk's first keys.
struct MixedRows {
  Buffer<float> k, v;

  void reserve(const AttentionCall& call) {
    if (mixes(call.past_k, call.chunk_k)) k.reserve(call.block_keys() * call.q.dim());
    if (mixes(call.past_v, call.chunk_v)) v.reserve(call.block_keys() * call.v_dim);
  }
  static bool mixes(const Rows& past, const Rows& chunk) {
    return past.len() > 0 && chunk.len() > 0 && !past.stored_as(chunk);
  }
  Index bytes() const { return k.bytes() + v.bytes(); }
};

// The keys of one KV head as one sequence: kept past, then chunk.
class KeySequence {
 public:
  KeySequence(const AttentionCall& call, Index b, Index kv_head)
      : call_(call),
        b_(b),
        kv_head_(kv_head),
        keep_(call.attended(b, kv_head)),
        past_count_(call.past_count(b, kv_head)),
        chunk_len_(call.mask != nullptr && call.visible->chunk_row(b) < 0 ? 0
                                                                          : call.chunk_k.len()) {}

  // Of head b * kv_heads + kv_head.
  KeySequence(const AttentionCall& call, Index head)
      : KeySequence(call, head / call.kv_heads, head % call.kv_heads) {}

  const AttentionCall& call() const { return call_; }
  Index b() const { return b_; }
  Index kv_head() const { return kv_head_; }
  Index past_count() const { return past_count_; }  // kept past keys

  HeadRows past(const Rows& x) const {
    const HeadRows rows = x.head(b_, kv_head_);
    return call_.listed() ? rows.listed(keep_.data()) : rows;
  }
  HeadRows chunk(const Rows& x) const { return x.head(b_, kv_head_); }

  // Keys [first, first + count).
  void rows(Index first, Index count, MixedRows& mixed, BlockRows& to) const {
    k_rows(first, count, mixed.k, to);
    v_rows(first, count, mixed.v, to);
  }
  void k_rows(Index first, Index count, Buffer<float>& mixed, BlockRows& to) const {
    const Index of_past = std::clamp<Index>(past_count_ - first, 0, count);
    to.k_format = find(call_.past_k, call_.chunk_k, first, of_past, count, mixed, to.k, to.k_shape);
  }
  void v_rows(Index first, Index count, Buffer<float>& mixed, BlockRows& to) const {
    const Index of_past = std::clamp<Index>(past_count_ - first, 0, count);
    to.v_format = find(call_.past_v, call_.chunk_v, first, of_past, count, mixed, to.v, to.v_shape);
  }
  // One past the last key that query i sees.
  Index end_for(Index query) const {
    return past_count_ + (call_.causal ? std::min(query + 1, chunk_len_) : chunk_len_);
  }
  // The position of key i.
  Index position(Index i) const {
    return i < past_count_ ? call_.first_position + past_row(i)
                           : call_.query_position + i - past_count_;
  }
  // Does the mask hide one of the keys [first, first + count) from some row, or bias it?
  bool masked(Index first, Index count) const {
    if (call_.mask == nullptr) return false;
    const std::uint8_t* const sight = call_.visible->sight(b_);
    for (Index i = first; i < first + count; ++i)
      if ((sight[column(i)] & (hidden_from_some | biased_for_some)) != 0) return true;
    return false;
  }
  // What the mask adds for keys [first, first + count).
  void read_mask(Index q_head, Index query, Index first, Index count, float* to) const {
    const Index of_past = std::clamp<Index>(past_count_ - first, 0, count);
    if (of_past > 0)
      call_.mask->read(b_, q_head, query, call_.listed() ? keep_.data() : nullptr, first, of_past,
                       to);
    if (of_past < count)
      call_.mask->read(b_, q_head, query, nullptr, column(first + of_past), count - of_past,
                       to + of_past);
  }
  // The first key that query i sees through the window.
  Index begin_for(Index query) const {
    if (call_.window == std::numeric_limits<Index>::max()) return 0;
    const Index hidden = call_.query_position + query - call_.window;  // last position out of sight
    if (hidden >= call_.query_position) return past_count_ + hidden - call_.query_position + 1;
    const Index of_past = hidden - call_.first_position + 1;  // past keys out of sight, unselected
    if (of_past <= 0) return 0;
    if (!call_.listed()) return std::min(of_past, past_count_);
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
    return {std::min(begin_for(first) / call_.block_keys() * call_.block_keys(), end), end};
  }

 private:
  // Rows of the past, and columns of the mask.
  Index past_row(Index i) const {
    return call_.listed() ? Index{keep_[static_cast<std::size_t>(i)]} : i;
  }
  Index column(Index i) const {
    return i < past_count_ ? past_row(i) : call_.past_k.len() + i - past_count_;
  }
  const Format* find(const Rows& past, const Rows& chunk, Index first, Index of_past, Index count,
                     Buffer<float>& mixed, ConstRow* rows, RowShape& shape) const {
    if (of_past > 0) this->past(past).at.find(first, of_past, rows);
    if (of_past < count) {
      this->chunk(chunk).at.find(first + of_past - past_count_, count - of_past, rows + of_past);
      replace_hidden(chunk, first + of_past, count - of_past, rows + of_past);
    }
    shape = {(past.empty() ? chunk : past).dim()};
    if (count == 0) return &float_format();
    if (of_past == count || (of_past > 0 && past.stored_as(chunk))) {
      shape = past.shape(kv_head_);
      return &past.format();
    }
    if (of_past == 0) {
      shape = chunk.shape(kv_head_);
      return &chunk.format();
    }
    for (Index i = 0; i < count; ++i) {
      float* const to = mixed.data() + i * shape.dim;
      const Rows& from = i < of_past ? past : chunk;
      from.format().widen(rows[i], from.shape(kv_head_), to);
      rows[i] = reinterpret_cast<ConstRow>(to);
    }
    return &float_format();
  }

  // A chunk's row that no query sees may hold anything, and rows of a block share scales: it is not
  // read, but another in its place.
  void replace_hidden(const Rows& chunk, Index first, Index count, ConstRow* rows) const {
    if (call_.mask == nullptr) return;
    const std::uint8_t* const sight = call_.visible->sight(b_);
    for (Index i = 0; i < count; ++i)
      if ((sight[column(first + i)] & seen_by_some) == 0)
        rows[i] = this->chunk(chunk)[call_.visible->chunk_row(b_)];
  }

  const AttentionCall& call_;
  Index b_, kv_head_;
  std::span<const Position> keep_;
  Index past_count_;
  Index chunk_len_;  // 0 where no query sees a key of it
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
