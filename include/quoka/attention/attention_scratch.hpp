// Memory that attention calls use again: of the workers, and of heads whose blocks are packed for all
// of their panels.
#pragma once

#include <quoka/attention/listed_work.hpp>
#include <quoka/attention/token_attention.hpp>
#include <quoka/runtime/worker_scratch.hpp>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// A token's heads that one worker takes in turns.
struct TokenHeads {
  GrowingArray<TokenScratch> heads;

  [[gnu::cold]] void reserve(const AttentionCall& call, Index count) {
    heads.at_least(count);
    for (TokenScratch& head : heads) head.reserve(call);
  }
  Index bytes() const { return heads.bytes(); }
};

// What scratch memory of a call depends on: a call like the last one, or of fewer panels or workers, has it already.
struct CallMemoryShape {
  const PanelArithmetic* arithmetic = nullptr;
  const Format *q = nullptr, *out = nullptr;
  Index block_keys = 0, dim = 0, v_dim = 0, group = 0, panels = 0, count = 0;
  bool biased = false, mixed_k = false, mixed_v = false, codes = false, in_parts = false;

  CallMemoryShape() = default;
  CallMemoryShape(const AttentionCall& call, Index panel_count, Index number, bool parts = false)
      : arithmetic(call.arithmetic),
        q(&call.q.format()),
        out(&call.out.format()),
        block_keys(call.block_keys()),
        dim(call.q.dim()),
        v_dim(call.v_dim),
        group(call.group),
        panels(panel_count),
        count(number),
        biased(call.biased()),
        mixed_k(MixedRows::mixes(call.past_k, call.chunk_k)),
        mixed_v(MixedRows::mixes(call.past_v, call.chunk_v)),
        codes(TokenScratch::multiplies_codes(call)),
        in_parts(parts) {}
  bool operator==(const CallMemoryShape&) const = default;

  // reserve(), unless memory was reserved for this shape or a larger one; if it runs out halfway, it is for none.
  template <class Reserve>
  void become(const CallMemoryShape& shape, Reserve&& reserve) {
    if (shape.within(*this)) return;
    *this = {};
    reserve();
    *this = shape;
  }

 private:
  bool within(const CallMemoryShape& other) const {
    CallMemoryShape alike = other;
    alike.panels = panels, alike.count = count, alike.in_parts = in_parts;
    return alike == *this && panels <= other.panels && count <= other.count &&
           in_parts <= other.in_parts;
  }
};

// A head whose blocks are packed for all of its panels.
struct SharedHead {
  GrowingArray<SharedBlock> blocks;
  CallMemoryShape known;  // reserved for

  [[gnu::cold, gnu::noinline]] void reserve(const AttentionCall& call, Index block_count) {
    known.become({call, 0, block_count}, [&] {
      blocks.at_least(block_count);
      for (SharedBlock& block : blocks) block.reserve(call);
    });
  }
  Index bytes() const { return blocks.bytes(); }
};

// A head whose keys are cut into parts, which several workers take: its panels, and what they have seen of each
// part.
struct PartedHead {
  PackedQueries queries;
  GrowingArray<PanelSums> parts;
  CallMemoryShape known;  // reserved for

  [[gnu::cold, gnu::noinline]] void reserve(const AttentionCall& call, Index panel_count,
                                            Index part_count) {
    known.become({call, panel_count, part_count}, [&] {
      queries.reserve(call, panel_count);
      parts.at_least(part_count);
      for (PanelSums& part : parts) part.reserve(call, panel_count);
    });
  }
  Index bytes() const { return queries.bytes() + parts.bytes(); }
};

// Of the workers, and of heads that several of them share.
struct AttentionScratch {
  WorkerScratch<HeadScratch> heads;
  WorkerScratch<TokenHeads> token;
  std::unique_ptr<ListedWork> listed;  // once a call has lists
  GrowingArray<SharedHead> shared;
  GrowingArray<PartedHead> parted;
  CallMemoryShape known;        // that `heads` is reserved for
  CallMemoryShape known_token;  // likewise `token`

  ListedWork& listed_work(const AttentionCall& call) {
    if (listed == nullptr) listed = listed_work_of(call);
    return *listed;
  }
  // count: of heads that a worker takes in turns.
  void reserve_token(const AttentionCall& call, Index count, int workers) {
    known_token.become({call, count, workers}, [&] { token.reserve(workers, call, count); });
  }
  void reserve_heads(const AttentionCall& call, Index panels, int workers, bool in_parts = false) {
    known.become({call, panels, workers, in_parts},
                 [&] { heads.reserve(workers, call, panels, in_parts); });
  }
  Index bytes() const {
    return heads.bytes() + token.bytes() + (listed != nullptr ? listed->bytes() : 0) +
           shared.bytes() + parted.bytes();
  }
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
