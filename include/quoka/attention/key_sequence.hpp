// The keys that one KV head's queries attend to, as one sequence: the kept past in ascending order,
// then the chunk.
//
//   columns     for_columns(keys): which columns of the call they are (call.hpp)
//   rows        find_keys(keys), find_values(keys): where they lie
//   visibility  range_of(query): the keys that causality and the window leave to it;
//               blocks_of(first, last): those of several queries, from the beginning of a block on;
//               is_masked(keys): the mask hides one of these from some query, or biases it;
//               any_visible(queries, keys): it leaves one of these
#pragma once

#include <quoka/attention/call.hpp>
#include <quoka/kernels/panel_arithmetic.hpp>

#include <algorithm>
#include <span>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

class KeySequence {
 public:
  // head: b * kv_heads + kv_head.
  KeySequence(const AttentionCall& call, Index head)
      : call_(call),
        b_(head / call.kv_heads),
        kv_head_(head % call.kv_heads),
        kept_(call.kept(b_, kv_head_)),
        past_count_(call.leaves_out() ? std::ssize(kept_) : call.past_k.len()),
        chunk_len_(
            call.visible != nullptr && call.visible->chunk_row(b_) < 0 ? 0 : call.chunk_k.len()) {}

  const AttentionCall& call() const { return call_; }
  Index past_count() const { return past_count_; }  // kept past keys

  // Keys of the past, and of the chunk: their rows in x.
  HeadRows past(const Rows& x) const {
    const HeadRows rows = x.head(b_, kv_head_);
    return call_.leaves_out() ? rows.gathered(kept_.data()) : rows;
  }
  HeadRows chunk(const Rows& x) const { return x.head(b_, kv_head_); }
  // f(columns, i) of these keys: those of the past, then those of the chunk, i keys after the
  // first.
  template <class F>
  void for_columns(const KeyRange& keys, F&& f) const {
    const Index in_past = std::clamp<Index>(past_count_ - keys.begin, 0, keys.count());
    if (in_past > 0)
      f(Columns{call_.leaves_out() ? kept_.data() : nullptr, keys.begin, in_past}, Index{0});
    if (in_past < keys.count())
      f(Columns{nullptr, call_.past_k.len() + keys.begin + in_past - past_count_,
                keys.count() - in_past},
        in_past);
  }
  // Where the rows of these keys lie, one at least, and those of their values. `mixed` has room for
  // a block of two formats.
  void find_keys(const KeyRange& keys, float* mixed, BlockRows& to) const {
    find(call_.past_k, call_.chunk_k, keys, mixed, to);
  }
  void find_values(const KeyRange& keys, float* mixed, BlockRows& to) const {
    find(call_.past_v, call_.chunk_v, keys, mixed, to);
  }

  // The keys that causality and the window leave to a query.
  KeyRange range_of(Index query) const { return {begin_of(query), end_of(query)}; }
  // The keys that they leave to queries first ... last, from the beginning of a block on.
  [[gnu::noinline]] KeyRange blocks_of(Index first, Index last) const {
    const Index end = end_of(last);
    return {std::min(begin_of(first) / call_.block_keys() * call_.block_keys(), end), end};
  }
  // Those of all queries.
  KeyRange range() const { return blocks_of(0, call_.q.len() - 1); }

  // Does the mask hide one of these keys from some row, or bias it?
  bool is_masked(const KeyRange& keys) const {
    if (call_.logits.mask == nullptr) return false;
    const std::uint8_t* const visibility = call_.visible->visibility(b_);
    bool any = false;
    for_columns(keys, [&](const Columns& columns, Index) {
      for (Index i = 0; i < columns.count && !any; ++i)
        any = (visibility[columns[i]] & (hidden_from_some | biased_for_some)) != 0;
    });
    return any;
  }
  // Does the mask leave one of these keys to one of queries first ... last?
  [[gnu::noinline]] bool any_visible(Index first, Index last, const KeyRange& keys) const {
    const Mask& mask = *call_.logits.mask;
    const Index heads = mask.heads() > 1 ? call_.group : 1, head = kv_head_ * call_.group;
    bool any = false;
    for (Index query = first; query <= last && !any; ++query)
      for (Index i = 0; i < heads && !any; ++i)
        for_columns(keys, [&](const Columns& x, Index) {
          any = any || mask.any_visible(b_, head + i, query, x);
        });
    return any;
  }

 private:
  Index begin_of(Index query) const {
    const Index first_visible = call_.logits.begin_column(query);
    if (first_visible >= call_.past_k.len())
      return past_count_ + first_visible - call_.past_k.len();
    if (first_visible == 0 || !call_.leaves_out()) return first_visible;
    return std::partition_point(kept_.begin(), kept_.end(),
                                [first_visible](Position x) { return x < first_visible; }) -
           kept_.begin();
  }
  Index end_of(Index query) const {
    return past_count_ + (call_.logits.causal ? std::min(query + 1, chunk_len_) : chunk_len_);
  }
  void find(const Rows& past, const Rows& chunk, const KeyRange& keys, float* mixed,
            BlockRows& to) const {
    const Index count = keys.count();
    const Index in_past = std::clamp<Index>(past_count_ - keys.begin, 0, count);
    if (in_past > 0) this->past(past).find(keys.begin, in_past, to.at);
    if (in_past < count)
      find_in_chunk(chunk, {keys.begin + in_past - past_count_, keys.end - past_count_},
                    to.at + in_past);
    const Rows& first = in_past > 0 ? past : chunk;
    to.count = count, to.format = &first.format(), to.shape = first.shape(kv_head_);
    if (in_past == 0 || in_past == count || past.stored_as(chunk)) return;
    const Index dim = past.dim();
    for (Index i = 0; i < count; ++i) {
      const Rows& from = i < in_past ? past : chunk;
      from.format().widen(to.at[i], from.shape(kv_head_), mixed + i * dim);
      to.at[i] = reinterpret_cast<ConstRow>(mixed + i * dim);
    }
    to.format = &float_format(), to.shape = {dim};
  }
  // A chunk's row that no query sees may hold anything. Another row is read in its place, because a
  // NaN or a huge number would send its whole block through slow paths (PackedBlock).
  void find_in_chunk(const Rows& chunk, const KeyRange& rows, ConstRow* to) const {
    const HeadRows all = this->chunk(chunk);
    all.find(rows.begin, rows.count(), to);
    if (call_.visible == nullptr) return;
    const std::uint8_t* const visibility = call_.visible->visibility(b_) + call_.past_k.len();
    for (Index i = 0; i < rows.count(); ++i)
      if ((visibility[rows.begin + i] & visible_to_some) == 0)
        to[i] = all[call_.visible->chunk_row(b_)];
  }

  const AttentionCall& call_;
  Index b_, kv_head_;
  std::span<const Position> kept_;
  Index past_count_;
  Index chunk_len_;  // 0 where no query sees a key of it
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
