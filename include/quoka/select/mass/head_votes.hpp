// What the voters of one KV head look for, and what becomes of it: the rows, the attention that they keep for their own
// chunk, and the memory that float_votes.hpp and code_votes.hpp share among the tasks of a head.
//
//   share[list][t] = sum over the list's voting rows m of weight(m, t) / (past(m) + chunk(m)) / voters
//
// past(m) is the sum of the row's weights over the past, chunk(m) that over the chunk's keys that it sees. A row that
// is not finite, or whose sums are not, does not vote.
#pragma once

#include <quoka/base/arena.hpp>
#include <quoka/kernels/softmax_state.hpp>
#include <quoka/rows/rows.hpp>
#include <quoka/select/mass/voters.hpp>
#include <quoka/select/query_scores.hpp>
#include <quoka/select/steps/softmax_mass.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// Shares of one list: share(t) of each key of the past, -infinity of a key with a NaN or an infinity. `pad` elements of
// -infinity lie before the first and behind the last, so that a key's neighbours are there.
struct ShareRows {
  float* data;
  Index keys, pad;

  static Index stride(Index keys, Index pad) { return keys + 2 * pad; }
  float* operator[](Index list) const { return data + list * stride(keys, pad) + pad; }
};

// One call's voters of one sequence of a batch.
struct VoteShape {
  Voters voters;
  Index dim, keys, chunk;  // keys of the past and, where they are at hand, of the chunk
  LogitRule rule;          // with the queries' scale
  bool all_channels;       // of codes: else at least half (coded_channels.hpp)

  Index rows() const { return voters.rows(); }
  Index panels() const { return ceil_div(rows(), tuning::panel_rows); }
  Index blocks() const { return ceil_div(keys, Index{tuning::block_keys}); }
};

// The memory of a KV head that its tasks share.
struct HeadVotes {
  HeadVotes(Arena& arena, const VoteShape& shape, Index weight_bytes)
      : rows(arena.take<float>(shape.rows() * shape.dim)),
        part(arena.take<float>(shape.rows())),
        ends(arena.take<Index>(round_up(shape.rows(), Index{tuning::panel_rows}))),
        chunk(arena.take<SoftmaxState<float>>(shape.rows())),
        panels(arena.take<float>(shape.panels() * tuning::panel_rows * shape.dim)),
        chunk_share(arena.take<float>(shape.voters.lists)),
        hidden(arena.take<std::uint8_t>(shape.keys)),
        weights(arena.take<std::byte>(weight_bytes)) {}

  float* rows;  // [rows][dim] times the logit scale; zeros for a row that does not vote
  float* part;  // [rows] 1 / voters of the list; 0 for a row that does not vote
  Index* ends;  // [rows] one past the last key of the chunk that it sees
  SoftmaxState<float>* chunk;  // [rows] of those keys
  float* panels;               // the rows packed for float
  float* chunk_share;          // [lists] of the voters' attention
  std::uint8_t* hidden;        // [keys] of the past: with a NaN or an infinity
  std::byte* weights;          // of a pass
};

// Memory of one worker.
struct VoteScratch {
  VoteScratch(Arena& arena, const VoteShape& shape)
      : tiles(arena.take<float>(ceil_div(Index{tuning::block_keys}, Index{tuning::tile_rows}) *
                                key_tile_size(shape.dim))),
        logits(
            arena.take<float>(round_up(Index{tuning::most_block_keys}, Index{tuning::tile_rows}) *
                              tuning::panel_rows)),
        weights(arena.take<float>(tuning::block_keys * tuning::panel_rows)) {}

  float* tiles;    // a packed block of keys
  float* logits;   // of a block of keys and a panel
  float* weights;  // likewise
};

// The rows of one KV head.
class VotingRows {
 public:
  static constexpr Index width = tuning::panel_rows;

  VotingRows(const VoteShape& shape, HeadVotes& votes) : shape_(shape), v_(votes) {}

  // Reads KV head `kv_head`'s voters, and what they see of the chunk.
  void read(const Rows& q, const Rows& chunk_k, Index b, Index kv_head, RowReader& reader,
            const VoteScratch& s) {
    const Voters& voters = shape_.voters;
    const Index of_list = voters.rows_of_list(), heads = voters.group / voters.lists;
    for (Index list = 0; list < voters.lists; ++list) {
      Index row = list * of_list, count = 0;
      const Index end = row + of_list;
      for (Index member = list * heads; member < (list + 1) * heads; ++member)
        for (Index m = 0; m < voters.per_head; ++m, ++row) {
          const Index at = voters.position(member, m);
          const bool finite = scale(reader.read(q, b, kv_head * voters.group + member, at),
                                    v_.rows + row * shape_.dim);
          v_.part[row] = finite ? 1.0f : 0.0f;
          v_.ends[row] = at + 1;
          count += finite ? 1 : 0;
        }
      for (; row < end; ++row) {
        std::fill_n(v_.rows + row * shape_.dim, shape_.dim, 0.0f);
        v_.part[row] = 0.0f, v_.ends[row] = 1;
      }
      for (row = list * of_list; row < end; ++row)
        v_.part[row] /= static_cast<float>(std::max<Index>(count, 1));
      v_.chunk_share[list] = 0.0f;
    }
    pack();
    for (Index row = 0; row < shape_.rows(); ++row) v_.chunk[row] = SoftmaxState<float>::identity();
    if (shape_.chunk > 0) see_chunk(chunk_k.head(b, kv_head), s);
  }

  Index panel_count(Index p) const { return std::min(width, shape_.rows() - p * width); }

  // Weights of a block of keys against the block's largest logit, and their sums. hide(i): key i of the block has none.
  template <class Hide>
  void weigh(Index p, const MassKeys& keys, const PackedBlock& block, Index count,
             const PanelMask* mask, float* logits, PanelState& state, float* weights,
             Hide&& hide) const {
    PanelPackets top;
    keys.multiply(block, v_.panels + p * width * shape_.dim, count, logits, top);
    VisibleKeys{
        .count = count, .mask = mask, .bias = nullptr, .rule = {.softcap = shape_.rule.softcap}}
        .finish_logits(logits, top);
    if (!block.keys_fit) {
      for (Index i = 0; i < count; ++i) {
        if (block.key_factors[i] == block.key_factors[i]) continue;
        std::fill_n(logits + i * width, width, -simd::infinity);
        hide(i);
      }
      block_maximum(logits, count, top);
    }
    for (int j = 0; j < tuning::tile_packets; ++j) state[j] = {top[j], simd::zero()};
    block_weights(logits, count, state, weights);
  }

 private:
  // x times the logit scale; zeros, and false, where that is not finite.
  bool scale(const float* x, float* to) const {
    if (scale_row(x, shape_.dim, shape_.rule.scale, to)) return true;
    std::fill_n(to, shape_.dim, 0.0f);
    return false;
  }
  void pack() const {
    for (Index p = 0; p < shape_.panels(); ++p) {
      const float* rows[width];
      for (Index i = 0; i < panel_count(p); ++i) rows[i] = v_.rows + (p * width + i) * shape_.dim;
      pack_queries(rows, panel_count(p), shape_.dim, 1.0f, width,
                   v_.panels + p * width * shape_.dim);
    }
  }
  void see_chunk(const HeadRows& chunk, const VoteScratch& s) const {
    RowKeys keys(chunk, shape_.chunk);
    keys.pack_into(s.tiles);
    BlockPrefetch prefetch;
    keys.walk({0, shape_.chunk}, shape_.panels(), prefetch,
              [&](Index p, const KeyRange& range, const PackedBlock& block) {
                PanelMask mask;
                const bool masked = mask_after(v_.ends + p * width, panel_count(p), range, mask);
                PanelState state;
                weigh(p, keys, block, range.count(), masked ? &mask : nullptr, s.logits, state,
                      s.weights, [](Index) {});
                alignas(64) float max[width], sum[width];
                for (int j = 0; j < tuning::tile_packets; ++j) {
                  simd::store(max + j * simd::lanes, state[j].max);
                  simd::store(sum + j * simd::lanes, state[j].sum);
                }
                for (Index i = 0; i < panel_count(p); ++i)
                  v_.chunk[p * width + i].merge({max[i], sum[i]});
              });
  }

  const VoteShape& shape_;
  HeadVotes& v_;
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
