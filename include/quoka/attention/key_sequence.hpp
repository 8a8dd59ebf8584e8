// The keys that one KV head's queries attend to: the kept past in ascending order, then the chunk, as one
// sequence: where their rows lie, who sees them, and how many keys are cut into parts.
#pragma once

#include <quoka/attention/call.hpp>
#include <quoka/kernels/panel_arithmetic.hpp>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// The keys of one KV head as one sequence: kept past, then chunk.
class KeySequence {
 public:
  KeySequence(const AttentionCall& call, Index b, Index kv_head)
      : call_(call),
        b_(b),
        kv_head_(kv_head),
        keep_(call.attended(b, kv_head)),
        past_count_(call.past_count(b, kv_head)),
        chunk_len_(call.visible != nullptr && call.visible->chunk_row(b) < 0 ? 0
                                                                             : call.chunk_k.len()) {
  }

  // head: b * kv_heads + kv_head.
  KeySequence(const AttentionCall& call, Index head)
      : KeySequence(call, head / call.kv_heads, head % call.kv_heads) {}

  const AttentionCall& call() const { return call_; }
  Index b() const { return b_; }
  Index kv_head() const { return kv_head_; }
  Index past_count() const { return past_count_; }  // kept past keys

  HeadRows past(const Rows& x) const {
    const HeadRows rows = x.head(b_, kv_head_);
    return call_.gathers() ? rows.gathered(keep_.data()) : rows;
  }
  HeadRows chunk(const Rows& x) const { return x.head(b_, kv_head_); }

  // The rows of these keys, and of their values. `mixed` has room for a block of two formats.
  void find_keys(const KeyRange& keys, float* mixed, BlockRows& to) const {
    find(call_.past_k, call_.chunk_k, keys, mixed, to);
  }
  void find_values(const KeyRange& keys, float* mixed, BlockRows& to) const {
    find(call_.past_v, call_.chunk_v, keys, mixed, to);
  }
  // One past the last key that query i sees.
  Index end_for(Index query) const {
    return past_count_ + (call_.causal ? std::min(query + 1, chunk_len_) : chunk_len_);
  }
  // The position of key i.
  Index position(Index i) const {
    return i < past_count_ ? call_.first_position + past_row(i) : call_.q_offset + i - past_count_;
  }
  // Does the mask hide one of these keys from some row, or bias it?
  bool masks(const KeyRange& keys) const {
    if (call_.mask == nullptr) return false;
    const std::uint8_t* const seen_by = call_.visible->seen_by(b_);
    for (Index i = keys.begin; i < keys.end; ++i)
      if ((seen_by[column(i)] & (hidden_from_some | biased_for_some)) != 0) return true;
    return false;
  }
  // Does the mask show one of these keys to one of queries first ... last?
  [[gnu::noinline]] bool shows(Index first, Index last, const KeyRange& keys) const {
    const Index heads = call_.mask->heads() > 1 ? call_.group : 1;
    const Index in_past = std::clamp<Index>(past_count_ - keys.begin, 0, keys.count());
    const Position* const list = call_.gathers() ? keep_.data() : nullptr;
    for (Index query = first; query <= last; ++query)
      for (Index head = kv_head_ * call_.group, end = head + heads; head < end; ++head)
        if (call_.mask->shows(b_, head, query, list, keys.begin, in_past) ||
            call_.mask->shows(b_, head, query, nullptr, column(keys.begin + in_past),
                              keys.count() - in_past))
          return true;
    return false;
  }
  // Reads what the mask adds for keys [first, first + count).
  void read_mask(Index q_head, Index query, Index first, Index count, float* to) const {
    const Index in_past = std::clamp<Index>(past_count_ - first, 0, count);
    if (in_past > 0)
      call_.mask->read(b_, q_head, query, call_.gathers() ? keep_.data() : nullptr, first, in_past,
                       to);
    if (in_past < count)
      call_.mask->read(b_, q_head, query, nullptr, column(first + in_past), count - in_past,
                       to + in_past);
  }
  // The first key that query i sees through the window.
  Index begin_for(Index query) const {
    const Index hidden_past = call_.begin_column(query);  // keys out of sight, unselected
    if (hidden_past >= call_.past_k.len()) return past_count_ + hidden_past - call_.past_k.len();
    if (hidden_past == 0 || !call_.gathers()) return hidden_past;
    Index low = 0, high = past_count_;  // the first kept position that is not hidden
    while (low < high) {
      const Index middle = (low + high) / 2;
      if (keep_[static_cast<std::size_t>(middle)] < hidden_past)
        low = middle + 1;
      else
        high = middle;
    }
    return low;
  }
  // All keys that queries first ... last see, from the beginning of a block on.
  [[gnu::noinline]] KeyRange in_sight(Index first, Index last) const {
    const Index end = end_for(last);
    return {std::min(begin_for(first) / call_.block_keys() * call_.block_keys(), end), end};
  }
  // All that some query sees.
  KeyRange in_sight() const { return in_sight(0, call_.q.len() - 1); }

 private:
  // Rows of the past, and columns of the mask.
  Index past_row(Index i) const {
    return call_.gathers() ? Index{keep_[static_cast<std::size_t>(i)]} : i;
  }
  Index column(Index i) const {
    return i < past_count_ ? past_row(i) : call_.past_k.len() + i - past_count_;
  }
  void find(const Rows& past, const Rows& chunk, const KeyRange& keys, float* mixed,
            BlockRows& to) const {
    const Index count = keys.count();
    const Index in_past = std::clamp<Index>(past_count_ - keys.begin, 0, count);
    if (in_past > 0) this->past(past).find(keys.begin, in_past, to.at);
    if (in_past < count) {
      this->chunk(chunk).find(keys.begin + in_past - past_count_, count - in_past,
                                 to.at + in_past);
      replace_hidden(chunk, keys.begin + in_past, count - in_past, to.at + in_past);
    }
    to.count = count, to.format = &float_format();
    to.shape = {(past.empty() ? chunk : past).dim()};
    if (count == 0) return;
    if (in_past == count || (in_past > 0 && past.stored_as(chunk))) {
      to.format = &past.format(), to.shape = past.shape(kv_head_);
    } else if (in_past == 0) {
      to.format = &chunk.format(), to.shape = chunk.shape(kv_head_);
    } else {
      for (Index i = 0; i < count; ++i) {
        float* const row = mixed + i * to.shape.dim;
        const Rows& from = i < in_past ? past : chunk;
        from.format().widen(to.at[i], from.shape(kv_head_), row);
        to.at[i] = reinterpret_cast<ConstRow>(row);
      }
    }
  }

  // A chunk's row that no query sees may hold anything, and rows of a block share scales: it is not
  // read, but another in its place.
  void replace_hidden(const Rows& chunk, Index first, Index count, ConstRow* rows) const {
    if (call_.mask == nullptr) return;
    const std::uint8_t* const seen_by = call_.visible->seen_by(b_);
    for (Index i = 0; i < count; ++i)
      if ((seen_by[column(first + i)] & seen_by_some) == 0)
        rows[i] = this->chunk(chunk)[call_.visible->chunk_row(b_)];
  }

  const AttentionCall& call_;
  Index b_, kv_head_;
  std::span<const Position> keep_;
  Index past_count_;
  Index chunk_len_;  // 0 where no query sees a key of it
};

// How the keys of a head are cut: by their number alone, so that neither threads nor batch change a bit. Each part is
// attended to from an empty softmax on, and what is seen of the parts joins in their order.
//
// Parts begin at multiples of `size`, wherever the keys in sight do. The first of the `count` that there are is that of
// key 0, which has the sinks; the others are those in sight.
struct KeyParts {
  // That a token or few panels have: a part more at either end of the keys in sight.
  static constexpr Index most_small = tuning::max_parts + 2;

  KeyRange all;  // keys in sight
  Index size, first, count;

  // For panels of query rows: parts of whole blocks. Few panels get more and smaller parts, so that more workers share
  // them.
  static KeyParts of_panels(const KeySequence& keys, Index panels) {
    const Index block = keys.call().block_keys();
    const KeyRange all = keys.in_sight();
    if (panels < tuning::min_panels_per_task)
      return cut(all, std::max(tuning::part_blocks * block,
                               round_up(ceil_div(all.count(), tuning::max_parts), block)));
    Index size = round_up(tuning::long_part_keys, block);
    while (ceil_div(all.count(), size) > tuning::most_long_parts) size *= 2;
    return cut(all, size);
  }
  // For decode. The number of parts is limited for all KV heads of a sequence together, so that many heads do not have
  // many small parts.
  static KeyParts of_decode(const KeySequence& keys) {
    const KeyRange all = keys.in_sight();
    const Index of_all_heads = all.count() * keys.call().kv_heads;
    return cut(all, std::max({tuning::token_part_keys, ceil_div(of_all_heads, tuning::token_parts),
                              ceil_div(all.count(), tuning::max_parts)}));
  }
  KeyRange part(Index i) const {
    const Index begin = (i == 0 ? 0 : first + i) * size;
    return {std::clamp(begin, all.begin, all.end), std::clamp(begin + size, all.begin, all.end)};
  }

 private:
  static KeyParts cut(const KeyRange& all, Index size) {
    const Index first = std::max<Index>(all.begin / size - 1, 0);
    return {all, size, first, std::max<Index>(ceil_div(all.end, size) - first, 1)};
  }
};

// Keys [first, first + size) of the sequence, for LogitBias.
struct SequenceKeys {
  const KeySequence& keys;
  Index first, size;

  Index count() const { return size; }
  Index position(Index i) const { return keys.position(first + i); }
  void read_mask(Index q_head, Index query, float* to) const {
    keys.read_mask(q_head, query, first, size, to);
  }
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
