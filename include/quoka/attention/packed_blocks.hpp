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
  // Does the call attend to all of its past, by panels of rows, in an arithmetic whose blocks are worth keeping?
  static bool serve(const AttentionCall& call) {
    const bool all_in_sight = call.query_position - call.first_position < call.window;
    return call.arithmetic->kept_key_bytes(call.q.dim()) > 0 && all_in_sight && !call.listed() &&
           !call.is_a_token();
  }

  Index len() const { return len_; }
  Index bytes() const { return heads_.bytes() + rooms_.bytes(); }
  void truncate(Index len) {
    if (len < len_) len_ = len / shape_.step * shape_.step;
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
    rooms_.reserve(executor.workers(), call);
    for (Index head = 0; known > 0 && head < heads; ++head)
      for (const Index block : {known - 1, somewhere(known)})
        require_same(KeySequence(call, head), heads_[head].blocks[block], block * shape.step);
    len_ = known * shape.step, shape_ = shape;
    if (blocks == known) return;
    heads_.at_least(heads);
    for (Index head = 0; head < heads; ++head) heads_[head].reserve(call, known, blocks);
    executor.run(heads * (blocks - known), [&](Index task, int worker) {
      const Index head = task % heads, block = known + task / heads;
      heads_[head].blocks[block].pack(KeySequence(call, head), block * shape.step, rooms_[worker]);
    });
    len_ = blocks * shape.step;
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
    Buffer<float> row;  // a key, then a value
    BlockRows rows;
    PanelScratch session;

    void reserve(const AttentionCall& call) {
      keys.reserve(call.arithmetic->key_bytes(call.q.dim()));
      values.reserve(call.arithmetic->value_bytes(call.v_dim));
      row.reserve(call.q.dim() + call.v_dim);
    }
    Index bytes() const { return keys.bytes() + values.bytes() + row.bytes(); }
  };
  struct Block {
    Buffer<std::byte> keys, values;
    // Key and value, to be looked up: a cache that changed and did not say so is found by it.
    Buffer<float> last;
    PackedBlock packed{};

    void reserve(const AttentionCall& call) {
      keys.reserve(call.arithmetic->kept_key_bytes(call.q.dim()));
      values.reserve(call.arithmetic->kept_value_bytes(call.v_dim));
      last.reserve(call.q.dim() + call.v_dim);
    }
    void pack(const KeySequence& of, Index first, Room& room) {
      const AttentionCall& call = of.call();
      const ArithmeticScope scope(*call.arithmetic, room.session);
      MixedRows none;  // all of them are of the past
      of.rows(first, call.block_keys(), none, room.rows);
      room.rows.describe_keys(call, call.block_keys(), packed);
      room.rows.describe_values(call, packed);
      packed.keys = room.keys.data(), packed.values = room.values.data();
      packed.units = packed.apart = nullptr;
      call.arithmetic->pack(packed);
      keep(call, room);
      read(of, first + call.block_keys() - 1, last.data());
    }
    Index bytes() const {
      return keys.bytes() + values.bytes() + last.bytes() + Index{sizeof packed};
    }

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
      packed.units = moved(packed.units), packed.apart = moved(packed.apart);
      packed.k = packed.v = nullptr;  // each call finds its rows anew
    }
  };
  struct Head {
    Parts<Block> blocks;

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

  static void read(const KeySequence& of, Index key, float* to) {
    for (const Rows* const x : {&of.call().past_k, &of.call().past_v}) {
      const HeadRows rows = of.past(*x);
      rows.format->widen(rows[key], rows.shape, to);
      to += x->dim();
    }
  }
  void require_same(const KeySequence& of, const Block& block, Index first) {
    const Index last = first + shape_.step - 1, floats = shape_.dim + shape_.v_dim;
    float* const now = rooms_[0].row.data();
    read(of, last, now);
    if (std::memcmp(now, block.last.data(), static_cast<std::size_t>(floats) * sizeof(float)) != 0)
      fail("the key or value at position", last,
           "not the one that was packed (the cache changed and PackedPast was not told), of", "",
           len_);
  }

  Shape shape_;
  Index len_ = 0;
  Parts<Head> heads_;
  WorkerScratch<Room> rooms_;
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
