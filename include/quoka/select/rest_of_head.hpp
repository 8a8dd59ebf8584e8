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

// Scratch memory of a worker.
struct RestScratch {
  static constexpr Index together = 64;  // keys between two looks at the largest logit

  FloatRow q, k, v;
  Buffer<float> queries;  // [group, k_dim], times attention's scale
  Buffer<float> weights;  // [group, together], logits first
  Buffer<float> part;     // [group, width]: sums over a block's keys, then its values
  Buffer<float> total;    // [group, width]
  Position list[together];

  void reserve(const SelectorInput& input) {
    q.reserve(input.q), k.reserve(input.k), v.reserve(input.v);
    const Index group = input.group(), width = 3 + input.k.dim() + input.v.dim();
    queries.reserve(group * input.k.dim());
    weights.reserve(group * together);
    part.reserve(group * width), total.reserve(group * width);
  }
  Index bytes() const {
    return q.bytes() + k.bytes() + v.bytes() + queries.bytes() + weights.bytes() + part.bytes() +
           total.bytes();
  }
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
        s_(scratch) {
    rule_.scale = 1.0f / std::sqrt(static_cast<float>(k_dim_));
    if (input.logits) rule_ = {input.logits->scale.value_or(rule_.scale), input.logits->softcap};
  }

  // What `kept`, ascending positions, leaves out, to the rows of the KV head's query heads.
  void run(std::span<const Position> kept, PastRest& to) {
    for (Index r = 0; r < group_; ++r) {
      mean_query(r);
      std::fill_n(sums(s_.total, r).weight, width(), 0.0f);
      *sums(s_.total, r).largest = -simd::infinity;
    }
    Index count = 0;
    auto next = kept.begin();
    for (Index t = 0; t < len_; ++t) {
      if (next != kept.end() && Index{*next} == t) {
        ++next;
        continue;
      }
      s_.list[count++] = static_cast<Position>(t);
      if (count == RestScratch::together) add_finite(std::exchange(count, 0));
    }
    add_finite(count);
    for (Index r = 0; r < group_; ++r) finish(r, to.row(b_ * q_.heads() + first_head_ + r));
  }

 private:
  static constexpr Index together = RestScratch::together;

  // Of one query head: what stands in a row of `part` and of `total`.
  struct Sums {
    float* weight;   // sum of weights, exp(logit - largest)
    float* logit;    // sum of weight * (logit - largest)
    float* largest;  // logit
    float* key;      // [k_dim] sum of weight * key, then [v_dim] of weight * value
  };
  Index width() const { return 3 + k_dim_ + v_dim_; }
  Sums sums(const Buffer<float>& of, Index r) const {
    float* const row = of.data() + r * width();
    return {row, row + 1, row + 2, row + 3};
  }
  float* weights(Index r) const { return s_.weights.data() + r * together; }
  float* mean(Index r) const { return s_.queries.data() + r * k_dim_; }

  void mean_query(Index r) {
    std::fill_n(mean(r), k_dim_, 0.0f);
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

  // The first `count` of the list; of a block with something that is not finite those keys that are.
  void add_finite(Index count) {
    if (count == 0 || add(count)) return;
    Index finite = 0;
    for (Index i = 0; i < count; ++i)
      if (all_finite(s_.k.read(keys_, s_.list[i]), k_dim_) &&
          all_finite(s_.v.read(values_, s_.list[i]), v_dim_))
        s_.list[finite++] = s_.list[i];
    if (finite > 0) add(finite);
  }

  // False, and nothing added, where a logit or a sum is not finite.
  bool add(Index count) {
    for (Index i = 0; i < count; ++i) {
      const float* const key = s_.k.read(keys_, s_.list[i]);
      for (Index r = 0; r < group_; ++r) weights(r)[i] = sum_of_products(mean(r), key, k_dim_);
    }
    for (Index r = 0; r < group_; ++r) weigh(r, count);
    for (Index i = 0; i < count; ++i) {
      const float* const key = s_.k.read(keys_, s_.list[i]);
      for (Index r = 0; r < group_; ++r)
        add_times(key, k_dim_, weights(r)[i], sums(s_.part, r).key);
      const float* const value = s_.v.read(values_, s_.list[i]);
      for (Index r = 0; r < group_; ++r)
        add_times(value, v_dim_, weights(r)[i], sums(s_.part, r).key + k_dim_);
    }
    if (!all_finite(s_.part.data(), group_ * width())) return false;
    for (Index r = 0; r < group_; ++r) join(r);
    return true;
  }

  // A block's logits of a head become weights, relative to the largest so far.
  void weigh(Index r, Index count) {
    float* const x = weights(r);
    const Index padded = round_up(count, simd::lanes);
    std::fill(x + count, x + padded, 0.0f);
    rule_.apply(x, padded);
    const Sums part = sums(s_.part, r);
    std::fill_n(part.weight, width(), 0.0f);
    float& largest = *part.largest = *sums(s_.total, r).largest;
    for (Index i = 0; i < count; ++i) largest = x[i] <= largest ? largest : x[i];  // a NaN shows
    alignas(64) float below[together];
    for (Index i = 0; i < padded; ++i) below[i] = x[i] - largest;
    for (Index i = 0; i < padded; i += simd::lanes)
      simd::store(x + i, simd::exp(simd::load(below + i)));
    for (Index i = 0; i < count; ++i) *part.weight += x[i], *part.logit += x[i] * below[i];
  }

  // The block's sums to those of the blocks before it.
  void join(Index r) {
    const Sums part = sums(s_.part, r), total = sums(s_.total, r);
    const float moved = *total.largest - *part.largest;  // minus infinity at first
    if (moved < 0.0f) {
      const float factor = std::exp(moved);
      if (factor > 0.0f) *total.logit += moved * *total.weight;
      for (float* x : {total.weight, total.logit}) *x *= factor;
      for (Index c = 0; c < k_dim_ + v_dim_; ++c) total.key[c] *= factor;
    }
    *total.largest = *part.largest;
    *total.weight += *part.weight, *total.logit += *part.logit;
    add_row(part.key, k_dim_ + v_dim_, total.key);
  }

  void finish(Index r, float* to) const {
    const Sums total = sums(s_.total, r);
    const float share = *total.weight > 0.0f ? 1.0f / *total.weight : 0.0f;
    to[0] = std::log(*total.weight) - *total.logit * share;  // minus infinity of nothing
    for (Index c = 0; c < k_dim_ + v_dim_; ++c) to[1 + c] = total.key[c] * share;
  }

  // sum[c] += factor * row[c].
  static void add_times(const float* row, Index dim, float factor, float* sum) {
    const simd::Packet times = simd::broadcast(factor);
    Index c = 0;
    for (; c + simd::lanes <= dim; c += simd::lanes)
      simd::store_unaligned(
          sum + c, simd::fma(times, simd::load_unaligned(row + c), simd::load_unaligned(sum + c)));
    for (; c < dim; ++c) sum[c] = simd::fma(factor, row[c], sum[c]);
  }

  const Rows& q_;
  Index b_, group_, first_head_;
  HeadRows keys_, values_;
  Index len_, k_dim_, v_dim_;
  LogitRule rule_;
  RestScratch& s_;
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
