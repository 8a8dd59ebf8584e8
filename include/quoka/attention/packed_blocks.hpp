// What a PackedPast holds: each head's blocks of keys and values, as the arithmetic packs them.
#pragma once

#include <quoka/attention/key_sequence.hpp>
#include <quoka/cache/key_witness.hpp>
#include <quoka/runtime/executor.hpp>
#include <quoka/runtime/worker_scratch.hpp>

#include <algorithm>
#include <cstddef>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

class PackedBlocks {
 public:
  // Has the call a PackedPast, and does it attend to all of its past by panels of rows? What a mask hides from all
  // queries is known later than this is asked for the first time.
  static bool may_serve(const AttentionCall& call) {
    const bool all_in_sight = call.query_position - call.first_position < call.window;
    return call.packed_past != nullptr && all_in_sight && !call.listed() && !call.own_keys() &&
           !call.is_a_token();
  }
  // And are blocks of its arithmetic worth keeping?
  static bool serve(const AttentionCall& call) {
    return may_serve(call) && call.arithmetic->kept_key_bytes(call.q.dim()) > 0;
  }

  Index len() const { return len_; }
  Index bytes() const { return bytes_of(heads_, rooms_, keys_, values_); }
  void truncate(Index len) {
    if (len < len_) len_ = len / shape_.step * shape_.step;
    keys_.truncate(len_), values_.truncate(len_);
  }

  // Packs the blocks of the call's past that are whole and not packed yet; they serve it.
  void pack(const AttentionCall& call, ExecutorRef executor) {
    const Index past = call.past_k.len();
    const Shape shape = past > 0 ? Shape(call) : shape_;
    const Index known = shape == shape_ ? len_ / shape.step : 0, blocks = past / shape.step;
    require_at_most("the length that is packed", known * shape.step,
                    "the past's (PackedPast::truncate() was not called)", past);
    if (blocks == 0) return truncate(0);
    const Index heads = shape.batch * shape.kv_heads;
    if (known > 0)
      keys_.require(call.past_k, words("key")), values_.require(call.past_v, words("value"));
    if (blocks == known) return;
    truncate(known * shape.step);
    shape_ = shape;
    rooms_.reserve(executor.workers(), call);
    const Index len = blocks * shape.step;
    keys_.reserve(call.past_k, len, 0, executor.workers());
    values_.reserve(call.past_v, len, 0, executor.workers());
    heads_.at_least(heads);
    for (Index head = 0; head < heads; ++head) heads_[head].reserve(call, known, blocks);
    executor.run(heads * (blocks - known), [&](Index task, int worker) {
      const Index head = task % heads, block = known + task / heads;
      const KeySequence sequence(call, head);
      const Index first = block * shape.step, end = first + shape.step;
      heads_[head].blocks[block].pack(sequence, {first, end}, rooms_[worker]);
      keys_.stage(call.past_k, sequence.b(), sequence.kv_head(), first, end, worker);
      values_.stage(call.past_v, sequence.b(), sequence.kv_head(), first, end, worker);
    });
    keys_.commit(len), values_.commit(len);
    len_ = len;
  }

  // The block that begins at key `first`; null where it is not packed.
  const PackedBlock* find(Index b, Index kv_head, Index first) const {
    if (first + shape_.step > len_) return nullptr;
    return &heads_[b * shape_.kv_heads + kv_head].blocks[first / shape_.step].packed;
  }

 private:
  // Where a worker packs.
  struct Room {
    Buffer<std::byte> keys, values;
    BlockRows k, v;
    PanelScratch session;

    void reserve(const AttentionCall& call) {
      keys.reserve(call.arithmetic->key_bytes(call.q.dim()));
      values.reserve(call.arithmetic->value_bytes(call.v_dim));
    }
    Index bytes() const { return keys.bytes() + values.bytes(); }
  };
  struct Block {
    Buffer<std::byte> keys, values;
    PackedBlock packed{};

    void reserve(const AttentionCall& call) {
      keys.reserve(call.arithmetic->kept_key_bytes(call.q.dim()));
      values.reserve(call.arithmetic->kept_value_bytes(call.v_dim));
    }
    void pack(const KeySequence& sequence, const KeyRange& keys_of_block, Room& room) {
      const AttentionCall& call = sequence.call();
      const ArithmeticScope scope(*call.arithmetic, room.session);
      MixedRows none;  // all of them are of the past
      sequence.find_keys(keys_of_block, none, room.k),
          sequence.find_values(keys_of_block, none, room.v);
      packed.k = &room.k, packed.v = &room.v;
      packed.keys = room.keys.data(), packed.values = room.values.data();
      packed.unfit_channels = nullptr;
      call.arithmetic->pack(packed);
      keep(call, room);
    }
    Index bytes() const { return keys.bytes() + values.bytes() + Index{sizeof packed}; }

   private:
    // What is packed, out of the room.
    void keep(const AttentionCall& call, const Room& room) {
      const auto moved = [&](float* x) {
        const std::byte* const at = reinterpret_cast<const std::byte*>(x);
        return x == nullptr ? x
                            : reinterpret_cast<float*>(values.data() + (at - room.values.data()));
      };
      std::copy_n(room.keys.data(), call.arithmetic->kept_key_bytes(call.q.dim()), keys.data());
      std::copy_n(room.values.data(), call.arithmetic->kept_value_bytes(call.v_dim), values.data());
      packed.keys = keys.data(), packed.values = values.data();
      packed.unfit_channels = moved(packed.unfit_channels);
      packed.k = packed.v = nullptr;  // each call finds its rows anew
    }
  };
  struct Head {
    GrowingArray<Block> blocks;

    // Blocks [known, count); those before have their memory.
    void reserve(const AttentionCall& call, Index known, Index count) {
      if (count > blocks.count()) blocks.at_least(std::max(count, 2 * blocks.count()));
      for (Index i = known; i < count; ++i) blocks[i].reserve(call);
    }
    Index bytes() const { return blocks.bytes(); }
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

  static WitnessWords words(const char* row) {
    return {
        row, "was packed",
        "the cache has changed. PackedPast::truncate(n) to the first keys that are as they were"};
  }

  Shape shape_;
  Index len_ = 0;
  GrowingArray<Head> heads_;
  KeyWitness keys_, values_;  // rows that are packed
  WorkerScratch<Room> rooms_;
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
