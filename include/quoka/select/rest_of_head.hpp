// What stands for the keys that a selection leaves out (views/past_rest.hpp), of one KV head: a key and a value for each
// of its query heads, weighted as the chunk's mean query weighs them.
//
//   m        mean of the head's queries
//   x[t]     scale * m . k[t], capped if asked, of each key t left out
//   w        softmax of x
//   key = sum of w[t] k[t]     value = sum of w[t] v[t]     log_count = entropy of w, -sum of w[t] log w[t]
//
// For every query q: scale * q . key + entropy(w) <= log of the sum over t of exp(scale * q . k[t]), with equality at m
// (Gibbs; without a cap). So what is left out never gets more weight than it would have had, and near m as much. With m = 0
// these are plain means, and log_count is the logarithm of the number of keys.
//
// A query with a NaN or an infinity is no part of m, and a key with one, in itself or in its value, no part of the sums:
// attended to where it is chosen, left out without a trace where it is not. Sums are in float, in an order that the
// positions decide.
//
// Cost: each key and value that is left out is read once, and the mean queries weigh it: 2 * group * (2 * k_dim + v_dim)
// FLOPs, where dense attention of the chunk takes 2 * group * q_len * (k_dim + v_dim).
#pragma once

#include <quoka/kernels/inverse_norm.hpp>
#include <quoka/kernels/logit_rule.hpp>
#include <quoka/packing/token_kernels.hpp>
#include <quoka/views/float_rows.hpp>
#include <quoka/base/buffer.hpp>
#include <quoka/select/selector.hpp>
#include <quoka/simd/simd.hpp>
#include <quoka/views/past_rest.hpp>

#include <algorithm>
#include <cmath>
#include <span>
#include <utility>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// Some rows of one head as floats, each of whole packets.
class FloatBlock {
 public:
  static constexpr Index most = 64;  // rows
  static constexpr Index stretch =
      RowsAhead::most;  // rows that are asked for while as many are used
  static constexpr Index asked_ahead = tuning::token_prefetch_keys;  // from a row to that asked for
  static_assert(most % stretch == 0);

  void reserve(const Rows& x) {
    if (!x.empty()) floats_.reserve(x.format(), most, x.dim(), round_up(x.dim(), simd::lanes));
  }
  // Rows list[0, count) of x, good until the next call. list[count, known), `asked_ahead` of them at most, are read next.
  void read(const HeadRows& x, const Position* list, Index count, Index known) {
    x.listed(list).at.find(0, known, found_);
    known_ = known, row_bytes_ = x.row_bytes();
    for (Index i = 0; i < count; i += stretch) {
      if (!x.format->is_float)
        for (Index j = i + asked_ahead; j < std::min(i + asked_ahead + stretch, known); ++j)
          ask_for(found_[j], 0, row_bytes_);
      floats_.read(*x.format, x.shape, round_up(x.shape.dim, simd::lanes), found_, i,
                   std::min(i + stretch, count), rows_);
    }
    for (Index i = 0; i < count; ++i) as_rows_[i] = reinterpret_cast<ConstRow>(rows_[i]);
  }
  // Those that were read, from row `first` on.
  RowRun from(Index first) const {
    RowRun run;
    run.rows = as_rows_ + first;
    return run;
  }
  // The rows that follow those of the stretch from `first` on.
  RowsAhead behind(Index first) const {
    RowsAhead ahead{{}, row_bytes_};
    const Index begin = std::min(first + asked_ahead, known_);
    std::copy(found_ + begin, found_ + std::min(begin + stretch, known_), ahead.rows);
    return ahead;
  }
  const float* row(Index i) const { return rows_[i]; }
  Index bytes() const { return floats_.bytes(); }

 private:
  FloatRows floats_;
  Index known_ = 0, row_bytes_ = 0;
  ConstRow found_[most + asked_ahead];  // where they lie
  const float* rows_[most];             // as floats
  ConstRow as_rows_[most];              // likewise
};

// Sums over keys for each query head of a KV head, whose rows are padded to whole tiles and their channels to whole packets.
struct RestSums {
  Buffer<float> weight;   // [rows] sum of weights, exp(logit - largest)
  Buffer<float> logit;    // [rows] sum of weight * (logit - largest)
  Buffer<float> largest;  // [rows] logit
  Buffer<float> key;      // [rows, k_width] sum of weight * key
  Buffer<float> value;    // [rows, v_width]

  void reserve(Index rows, Index k_width, Index v_width) {
    weight.reserve(rows), logit.reserve(rows), largest.reserve(rows);
    key.reserve(rows * k_width), value.reserve(rows * v_width);
  }
  Index bytes() const { return bytes_of(weight, logit, largest, key, value); }
};

// Scratch memory of a worker.
struct RestScratch {
  FloatRow q;
  FloatBlock k, v;
  Buffer<float> queries;  // [rows, k_width], times attention's scale
  Buffer<float> weights;  // [tile][key of the block][row of the tile], logits first
  RestSums part, total;   // of a block, and of all before it
  Position list[FloatBlock::most + FloatBlock::asked_ahead];  // of a block, and what follows

  // Of the query heads of a KV head: whole tiles of token_logits().
  static Index rows_of(Index group) { return round_up(group, token_tile_rows(group)); }
  void reserve(const SelectorInput& input) {
    q.reserve(input.q), k.reserve(input.k), v.reserve(input.v);
    const Index rows = rows_of(input.group());
    const Index k_width = round_up(input.k.dim(), simd::lanes),
                v_width = round_up(input.v.dim(), simd::lanes);
    queries.reserve(rows * k_width);
    weights.reserve(round_up(rows * FloatBlock::most, simd::lanes));
    part.reserve(rows, k_width, v_width), total.reserve(rows, k_width, v_width);
  }
  Index bytes() const { return bytes_of(q, k, v, queries, weights, part, total); }
};

class RestOfHead {
 public:
  // Of head b * kv_heads + kv_head; input has values.
  RestOfHead(const SelectorInput& input, Index head, RestScratch& scratch)
      : q_(input.q),
        b_(head / input.k.heads()),
        group_(input.group()),
        first_head_(head % input.k.heads() * group_),
        keys_(input.k.head(b_, head % input.k.heads())),
        values_(input.v.head(b_, head % input.k.heads())),
        len_(input.k.len()),
        k_dim_(input.k.dim()),
        v_dim_(input.v.dim()),
        k_width_(round_up(k_dim_, simd::lanes)),
        v_width_(round_up(v_dim_, simd::lanes)),
        tile_rows_(token_tile_rows(group_)),
        rows_(RestScratch::rows_of(group_)),
        rule_(LogitRule::from(input.logits.value_or(LogitOptions{}), k_dim_)),
        s_(scratch) {}

  // What `kept`, ascending positions, leaves out, to the rows of the KV head's query heads.
  void run(std::span<const Position> kept, PastRest& to) {
    std::fill_n(s_.queries.data(), rows_ * k_width_, 0.0f);
    for (Index r = 0; r < group_; ++r) mean_query(r);
    clear(s_.total);
    std::fill_n(s_.total.largest.data(), rows_, -simd::infinity);
    constexpr Index most = FloatBlock::most;
    Index known = 0, t = 0;
    auto next = kept.begin();
    while (true) {
      for (; t < len_ && known < most + FloatBlock::asked_ahead; ++t) {
        if (next != kept.end() && Index{*next} == t)
          ++next;
        else
          s_.list[known++] = static_cast<Position>(t);
      }
      if (known == 0) break;
      const Index count = std::min(known, most);
      add_finite(count, known);
      std::copy(s_.list + count, s_.list + known, s_.list);
      known -= count;
    }
    for (Index r = 0; r < group_; ++r) finish(r, to.row(b_ * q_.heads() + first_head_ + r));
  }

 private:
  float* mean(Index r) const { return s_.queries.data() + r * k_width_; }
  // The logit or the weight of key i of the block for query head r.
  float& weight(Index r, Index i) const {
    return s_.weights.data()[tile(r) + i * tile_rows_ + r % tile_rows_];
  }
  Index tile(Index r) const { return r / tile_rows_ * tile_rows_ * FloatBlock::most; }
  void clear(RestSums& sums) const {
    std::fill_n(sums.weight.data(), rows_, 0.0f), std::fill_n(sums.logit.data(), rows_, 0.0f);
    std::fill_n(sums.key.data(), rows_ * k_width_, 0.0f);
    std::fill_n(sums.value.data(), rows_ * v_width_, 0.0f);
  }

  void mean_query(Index r) {
    Index count = 0;
    for (Index i = 0; i < q_.len(); ++i) {
      const float* const row = s_.q.read(q_, b_, first_head_ + r, i);
      if (!all_finite(row, k_dim_)) continue;
      add_row(row, k_dim_, mean(r));
      ++count;
    }
    const float factor = rule_.scale / static_cast<float>(std::max<Index>(count, 1));
    for (Index c = 0; c < k_dim_; ++c) mean(r)[c] *= factor;
    if (!all_finite(mean(r), k_dim_)) std::fill_n(mean(r), k_dim_, 0.0f);
  }

  // The first `count` of the list, of which `known` are there; of a block with something that is not finite those keys
  // that are.
  void add_finite(Index count, Index known) {
    if (add(count, known)) return;
    Index finite = 0;
    for (Index i = 0; i < count; ++i)
      if (all_finite(s_.k.row(i), k_dim_) && all_finite(s_.v.row(i), v_dim_))
        s_.list[finite++] = s_.list[i];
    if (finite > 0) add(finite, finite);
  }

  // False, and nothing added, where a logit or a sum is not finite.
  bool add(Index count, Index known) {
    s_.k.read(keys_, s_.list, count, known);
    s_.v.read(values_, s_.list, count, known);
    clear(s_.part);
    for (Index i = 0; i < count; i += FloatBlock::stretch) multiply_keys(i, count);
    for (Index r = 0; r < group_; ++r) softmax(r, count);
    for (Index i = 0; i < count; i += FloatBlock::stretch) {
      const RowsAhead ahead = s_.v.behind(i);
      add_weighted(s_.k, i, count, k_width_, nullptr, s_.part.key.data());
      add_weighted(s_.v, i, count, v_width_, &ahead, s_.part.value.data());
    }
    if (!all_finite(s_.part.weight.data(), group_) || !all_finite(s_.part.logit.data(), group_) ||
        !all_finite(s_.part.key.data(), group_ * k_width_) ||
        !all_finite(s_.part.value.data(), group_ * v_width_))
      return false;
    for (Index r = 0; r < group_; ++r) join(r);
    return true;
  }

  // The logits of a stretch of the block, from key `first` on.
  void multiply_keys(Index first, Index count) {
    const RowsAhead ahead = s_.k.behind(first);
    const RowRun keys = s_.k.from(first);
    const Index n = std::min(FloatBlock::stretch, count - first);
    for (Index r = 0; r < rows_; r += tile_rows_) {
      float* const x = s_.weights.data() + tile(r) + first * tile_rows_;
      float_format().token_logits(tile_rows_, keys, n, {k_width_}, mean(r), x,
                                  r == 0 ? &ahead : nullptr);
      rule_.apply(x, round_up(n * tile_rows_, simd::lanes));
    }
  }

  // A block's logits of a head become weights, relative to the largest so far. One that is not finite makes all NaN.
  void softmax(Index r, Index count) {
    alignas(64) float below[FloatBlock::most], exponentials[FloatBlock::most];
    const Index padded = round_up(count, simd::lanes);
    for (Index i = 0; i < count; ++i) below[i] = weight(r, i);
    std::fill(below + count, below + padded, below[0]);
    simd::Packet top = simd::broadcast(s_.total.largest.data()[r]), poison = simd::zero();
    for (Index i = 0; i < padded; i += simd::lanes) {
      const simd::Packet x = simd::load(below + i);
      top = simd::max(top, x), poison = simd::fma(x, simd::zero(), poison);
    }
    const float largest = simd::reduce_max(top) + simd::reduce_add(poison);
    for (Index i = 0; i < padded; i += simd::lanes) {
      const simd::Packet x = simd::sub(simd::load(below + i), simd::broadcast(largest));
      simd::store(below + i, x), simd::store(exponentials + i, simd::exp(x));
    }
    std::fill(exponentials + count, exponentials + padded, 0.0f);
    simd::Packet sum = simd::zero(), logits = simd::zero();
    for (Index i = 0; i < padded; i += simd::lanes) {
      const simd::Packet w = simd::load(exponentials + i);
      sum = simd::add(sum, w), logits = simd::fma(w, simd::load(below + i), logits);
    }
    for (Index i = 0; i < count; ++i) weight(r, i) = exponentials[i];
    s_.part.largest.data()[r] = largest;
    s_.part.weight.data()[r] = simd::reduce_add(sum);
    s_.part.logit.data()[r] = simd::reduce_add(logits);
  }

  // sum[r] += weights of head r times the rows of a stretch, from `first` on. upcoming: asked for on the way; null: none.
  void add_weighted(const FloatBlock& x, Index first, Index count, Index width,
                    const RowsAhead* upcoming, float* sum) const {
    const RowRun rows = x.from(first);
    const Index keys = std::min(FloatBlock::stretch, count - first);
    const Index together = std::min(float_format().value_rows, tile_rows_);
    for (Index r = 0; r < group_; r += together) {
      const float* weights[4];
      const Index n = std::min(together, group_ - r);
      for (Index i = 0; i < n; ++i) weights[i] = &weight(r + i, first);
      float_format().token_values(rows, keys, {width}, weights, tile_rows_, n, sum + r * width,
                                  r == 0 ? upcoming : nullptr);
    }
  }

  // The block's sums to those of the blocks before it.
  void join(Index r) {
    float &total = s_.total.weight.data()[r], &logit = s_.total.logit.data()[r];
    float* const key = s_.total.key.data() + r * k_width_;
    float* const value = s_.total.value.data() + r * v_width_;
    const float largest = s_.part.largest.data()[r];
    const float moved = s_.total.largest.data()[r] - largest;  // minus infinity at first
    if (moved < 0.0f) {
      const float factor = std::exp(moved);
      if (factor > 0.0f) logit += moved * total;
      total *= factor, logit *= factor;
      for (Index c = 0; c < k_width_; ++c) key[c] *= factor;
      for (Index c = 0; c < v_width_; ++c) value[c] *= factor;
    }
    s_.total.largest.data()[r] = largest;
    total += s_.part.weight.data()[r], logit += s_.part.logit.data()[r];
    add_row(s_.part.key.data() + r * k_width_, k_width_, key);
    add_row(s_.part.value.data() + r * v_width_, v_width_, value);
  }

  void finish(Index r, float* to) const {
    const float weight = s_.total.weight.data()[r], logit = s_.total.logit.data()[r];
    const float share = weight > 0.0f ? 1.0f / weight : 0.0f;
    to[0] = std::log(weight) - logit * share;  // minus infinity of nothing
    for (Index c = 0; c < k_dim_; ++c) to[1 + c] = s_.total.key.data()[r * k_width_ + c] * share;
    for (Index c = 0; c < v_dim_; ++c)
      to[1 + k_dim_ + c] = s_.total.value.data()[r * v_width_ + c] * share;
  }

  const Rows& q_;
  Index b_, group_, first_head_;
  HeadRows keys_, values_;
  Index len_, k_dim_, v_dim_, k_width_, v_width_;
  Index tile_rows_, rows_;  // of a tile, and of all tiles
  LogitRule rule_;
  RestScratch& s_;
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
