// Blocks of one head's keys and values, packed for the call's arithmetic: by the worker that walks them, or once for
// all workers of the head.
#pragma once

#include <quoka/attention/key_sequence.hpp>
#include <quoka/kernels/key_blocks.hpp>

#include <algorithm>
#include <cstddef>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// Memory for one block.
struct BlockMemory {
  Buffer<std::byte> keys, values;  // as the arithmetic packs them
  MixedRows mixed;
  PackedBlock packed;

  void reserve(const AttentionCall& call) {
    keys.reserve(call.arithmetic->key_bytes(call.q.dim()));
    values.reserve(call.arithmetic->value_bytes(call.v_dim));
    mixed.reserve(call);
  }
  Index bytes() const { return bytes_of(keys, values, mixed); }
};

// A block that is packed once for the tasks of several workers: keys by one of them, values by another.
struct SharedBlock : BlockMemory {
  BlockRows k, v;

  void pack_keys(const KeySequence& sequence, const KeyRange& range) {
    sequence.find_keys(range, mixed, k);
    packed.k = &k, packed.masked = sequence.masks(range);
    prefetch(k);
    packed.keys = keys.data();
    sequence.call().arithmetic->pack_keys(packed);
  }
  void pack_values(const KeySequence& sequence, const KeyRange& range) {
    sequence.find_values(range, mixed, v);
    packed.v = &v;
    prefetch(v);
    packed.values = values.data();
    sequence.call().arithmetic->pack_values(packed);
  }

 private:
  static void prefetch(const BlockRows& rows) {
    RowPrefetch all = rows.prefetch();
    all.prefetch(all.lines());
  }
};

// Memory of SequenceBlocks.
struct SequenceMemory : BlockMemory {
  BlockRows k[2], v[2];  // of this block and the next
};

// The blocks of keys [0, end), packed one after the other as they are walked.
class SequenceBlocks final : public KeyBlocks {
 public:
  SequenceBlocks(const KeySequence& keys, Index end, SequenceMemory& memory)
      : KeyBlocks(end, keys.call().block_keys()), keys_(keys), s_(memory) {}

  const PackedBlock& pack(const KeyRange& keys) override {
    if (found_ != keys.begin) find(keys);
    PackedBlock& to = s_.packed;
    to.k = &s_.k[at_], to.v = &s_.v[at_], to.masked = keys_.masks(keys);
    to.keys = s_.keys.data(), to.values = s_.values.data();
    keys_.call().arithmetic->pack(to);
    return to;
  }
  BlockPrefetch prefetch(const KeyRange& keys, Index panels) override {
    if (keys.count() == 0) return {};
    at_ = 1 - at_;
    find(keys);
    return {s_.k[at_].prefetch(), s_.v[at_].prefetch(), panels};
  }

 private:
  void find(const KeyRange& keys) {
    keys_.find_keys(keys, s_.mixed, s_.k[at_]);
    keys_.find_values(keys, s_.mixed, s_.v[at_]);
    found_ = keys.begin;
  }

  const KeySequence& keys_;
  SequenceMemory& s_;
  int at_ = 0;
  Index found_ = -1;  // the first key of the rows that were found last
};

// Blocks of keys [begin, end) that are packed, which other workers' caches may hold.
class SharedBlocks final : public KeyBlocks {
 public:
  SharedBlocks(const AttentionCall& call, const KeyRange& all, const SharedBlock* blocks)
      : KeyBlocks(all.end, call.block_keys()), call_(call), begin_(all.begin), blocks_(blocks) {}

  const PackedBlock& pack(const KeyRange& keys) override { return block_of(keys); }
  BlockPrefetch prefetch(const KeyRange& keys, Index panels) override {
    if (keys.count() == 0) return {};
    const PackedBlock& block = block_of(keys);
    return {{&block.keys, 1, call_.arithmetic->key_bytes(call_.q.dim())},
            {&block.values, 1, call_.arithmetic->value_bytes(call_.v_dim)},
            panels};
  }

 private:
  const PackedBlock& block_of(const KeyRange& keys) const {
    return blocks_[(keys.begin - begin_) / call_.block_keys()].packed;
  }

  const AttentionCall& call_;
  Index begin_;
  const SharedBlock* blocks_;
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
