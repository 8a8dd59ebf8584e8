// What a PackedPast holds: each head's blocks of keys and values, as the arithmetic packs them.
#pragma once

#include <quoka/attention/key_sequence.hpp>
#include <quoka/runtime/executor.hpp>
#include <quoka/runtime/worker_scratch.hpp>

#include <algorithm>
#include <cstddef>
#include <cstring>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

class PackedBlocks {
 public:
  Index len() const { return len_; }
  Index bytes() const { return heads_.bytes() + k_.bytes() + v_.bytes(); }
  void truncate(Index len) {
    if (len < len_) len_ = len / shape_.step * shape_.step;
  }

  // Packs the blocks of the call's past that are whole and not packed yet. The call's arithmetic is chosen, and no list
  // says what it attends to.
  void pack(const AttentionCall& call, ExecutorRef executor) {
    const Shape shape(call);
    if (shape != shape_) len_ = 0, shape_ = shape;
    require_at_most("the length that is packed", len_,
                    "the past's (PackedPast::truncate() was not called)", call.past_k.len());
    const Index heads = call.q.batch() * call.kv_heads;
    heads_.at_least(heads);
    k_.reserve(call.q.dim()), v_.reserve(call.v_dim);
    for (Index head = 0; head < heads; ++head) require_same(call, head);
    const Index step = call.block_keys(), known = len_ / step, blocks = call.past_k.len() / step;
    if (blocks == known) return;  // and at least one key was looked up, or none is packed
    for (Index head = 0; head < heads; ++head) heads_[head].reserve(call, blocks);
    executor.run(heads * (blocks - known), [&](Index task, int) {
      const Index head = task % heads, block = known + task / heads;
      heads_[head].blocks[block].pack(sequence(call, head), block * step);
    });
    len_ = blocks * step;
    for (Index head = 0; head < heads; ++head) remember(call, head);
  }

  // The block that begins at key `first`; null where it is not packed.
  const PackedBlock* find(Index b, Index kv_head, Index first) const {
    if (first + shape_.step > len_) return nullptr;
    return &heads_[b * shape_.kv_heads + kv_head].blocks[first / shape_.step].packed;
  }

 private:
  struct Block {
    Buffer<std::byte> keys, values;
    PackedBlock packed{};

    void reserve(const AttentionCall& call) {
      keys.reserve(call.arithmetic->key_bytes(call.q.dim()));
      values.reserve(call.arithmetic->value_bytes(call.v_dim));
    }
    void pack(const KeySequence& of, Index first) {
      const AttentionCall& call = of.call();
      PanelScratch session;
      const ArithmeticScope scope(*call.arithmetic, session);
      BlockRows rows;
      MixedRows none;  // all of them are of the past
      of.rows(first, call.block_keys(), none, rows);
      rows.describe_keys(call, call.block_keys(), packed);
      rows.describe_values(call, packed);
      packed.keys = keys.data(), packed.values = values.data();
      call.arithmetic->pack(packed);
    }
    Index bytes() const { return keys.bytes() + values.bytes() + Index{sizeof packed}; }
  };
  // A key and its value when they were packed, to be looked up: a cache that changed and did not say so is found by it.
  struct Mark {
    Index key = 0;
    Buffer<float> k, v;

    void reserve(const AttentionCall& call) { k.reserve(call.q.dim()), v.reserve(call.v_dim); }
    Index bytes() const { return k.bytes() + v.bytes(); }
  };
  struct Head {
    Parts<Block> blocks;
    Mark marks[2];

    void reserve(const AttentionCall& call, Index count) {
      if (count > blocks.count()) blocks.at_least(std::max(count, 2 * blocks.count()));
      for (Index i = 0; i < count; ++i) blocks[i].reserve(call);
      for (Mark& mark : marks) mark.reserve(call);
    }
    Index bytes() const { return blocks.bytes() + marks[0].bytes() + marks[1].bytes(); }
  };
  struct Shape {
    const PanelArithmetic* arithmetic = nullptr;
    const Format *k = nullptr, *v = nullptr;
    Index batch = 0, kv_heads = 0, dim = 0, v_dim = 0, step = 1;

    Shape() = default;
    explicit Shape(const AttentionCall& call)
        : arithmetic(call.arithmetic),
          k(&call.past_k.format()),
          v(&call.past_v.format()),
          batch(call.q.batch()),
          kv_heads(call.kv_heads),
          dim(call.q.dim()),
          v_dim(call.v_dim),
          step(call.block_keys()) {}
    bool operator==(const Shape&) const = default;
  };

  static KeySequence sequence(const AttentionCall& call, Index head) {
    return {call, head / call.kv_heads, head % call.kv_heads};
  }
  static void read(const HeadRows& rows, Index key, float* to) {
    rows.format->widen(rows[key], rows.shape, to);
  }
  // The last key, and one that depends on the length.
  void remember(const AttentionCall& call, Index head) {
    const Index keys[] = {len_ - 1, somewhere(len_)};
    const KeySequence of = sequence(call, head);
    for (int i = 0; i < 2; ++i) {
      Mark& mark = heads_[head].marks[i];
      mark.key = keys[i];
      read(of.past(call.past_k), mark.key, mark.k.data());
      read(of.past(call.past_v), mark.key, mark.v.data());
    }
  }
  void require_same(const AttentionCall& call, Index head) {
    const KeySequence of = sequence(call, head);
    for (const Mark& mark : heads_[head].marks) {
      if (mark.key >= len_) continue;  // forgotten
      read(of.past(call.past_k), mark.key, k_.data());
      read(of.past(call.past_v), mark.key, v_.data());
      if (!same(k_, mark.k, call.q.dim()) || !same(v_, mark.v, call.v_dim))
        fail("the key or value at position", mark.key,
             "not the one that was packed (the cache changed and PackedPast was not told), of", "",
             len_);
    }
  }
  static bool same(const Buffer<float>& a, const Buffer<float>& b, Index n) {
    return std::memcmp(a.data(), b.data(), static_cast<std::size_t>(n) * sizeof(float)) == 0;
  }

  Shape shape_;
  Index len_ = 0;
  Parts<Head> heads_;
  Buffer<float> k_, v_;  // of a key that is looked up
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
