// Definitions of indexer.hpp.
//
// Keys lie across the lanes and rows of queries are broadcast, the other way round than in attention: heads of a query
// then add up without a step across lanes, however few they are, and scores come out in the order in which top-k reads
// them. A unit is some queries of one list's head, whose rows are packed once; its tasks are ranges of keys. Where a unit
// has few rows, as a single query has, turning keys would take longer than multiplying them: they are read where they lie,
// channels across the lanes, as one token's attention does.
#pragma once

#include <quoka/kernels/key_blocks.hpp>
#include <quoka/matrix/register_tile.hpp>
#include <quoka/packing/panel_packing.hpp>
#include <quoka/packing/token_kernels.hpp>
#include <quoka/select/indexer.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// Keys of a block: whole panels.
inline constexpr Index index_block_keys = 128;
static_assert(index_block_keys % tuning::panel_rows == 0 &&
              index_block_keys <= tuning::most_block_keys);

QUOKA_FUNC void IndexerScratch::reserve(Index rows, Index kv_len, const Rows& k) {
  tiles.reserve(std::max(ceil_div(rows, tuning::tile_rows) * key_tile_size(k.dim()),
                         round_up(rows, Index{4}) * k.dim()));
  weights.reserve(rows);
  lanes.reserve(index_block_keys * k.dim());
  query_rows.reserve(tuning::tile_rows * k.dim());
  biases.reserve_amortised(kv_len);
  keys.reserve(k.format(), tuning::panel_rows, k.dim());
  top_k.reserve(kv_len, 1);
}

// The keys of one head, transposed panel by panel.
class LaneKeys final : public KeyBlocks {
 public:
  LaneKeys(const HeadRows& rows, Index count, IndexerScratch& scratch)
      : KeyBlocks(count, index_block_keys), rows_(rows), s_(scratch) {
    block_.keys = reinterpret_cast<std::byte*>(s_.lanes.data());
  }

  const PackedBlock& pack(const KeyRange& keys) override {
    constexpr Index width = tuning::panel_rows;
    const Index dim = rows_.shape.dim;
    if (found_at_ != keys.begin) find(keys);
    for (Index i = 0; i < keys.count(); i += width) {
      const Index n = std::min(width, keys.count() - i);
      const float* floats[width];
      s_.keys.read(*rows_.format, rows_.shape, found_ + i, n, floats);
      pack_queries(floats, n, dim, 1.0f, width, s_.lanes.data() + i * dim);
    }
    return block_;
  }
  BlockPrefetch prefetch(const KeyRange& keys, Index panels) override {
    find(keys);
    return {{found_, keys.count(), rows_.row_bytes()}, {}, panels};
  }

 private:
  void find(const KeyRange& keys) {
    rows_.at.find(keys.begin, keys.count(), found_);
    found_at_ = keys.begin;
  }

  HeadRows rows_;
  IndexerScratch& s_;
  PackedBlock block_;
  ConstRow found_[index_block_keys];
  Index found_at_ = -1;  // the first key of the rows that were found last
};

// What becomes of the products of one query's heads with a panel of keys.
template <bool Weighted>
class HeadSum {
  static constexpr int packets = tuning::tile_packets;

 public:
  HeadSum() { begin(); }
  void add(const float* x, float weight) {
    simd::unroll<packets>([&](auto j) QUOKA_INLINE_LAMBDA {
      const simd::Packet product = simd::load(x + j * simd::lanes);
      poison_[j] =
          simd::fma(product, simd::zero(), poison_[j]);  // x * 0 is NaN for NaN and infinity
      if constexpr (Weighted)
        score_[j] = simd::fma(simd::broadcast(weight), simd::max(product, simd::zero()), score_[j]);
      else
        score_[j] = simd::max(product, score_[j]);
    });
  }
  // Writes the score of each key, and begins anew.
  void end(float* scores) {
    for (int j = 0; j < packets; ++j)
      simd::store(scores + j * simd::lanes, simd::add(score_[j], poison_[j]));
    begin();
  }

 private:
  void begin() {
    for (int j = 0; j < packets; ++j) {
      poison_[j] = simd::zero();
      score_[j] = Weighted ? simd::zero() : simd::broadcast(std::numeric_limits<float>::lowest());
    }
  }

  PanelPackets score_, poison_;
};

// A call: its shape, and where its parts lie.
class IndexerCall {
 public:
  IndexerCall(const IndexerInput& input, const IndexerOptions& options, Index most)
      : in_(input),
        o_(options),
        most_(most),
        heads_(input.q.heads() / options.lists_heads),
        stride_(round_up(input.k.len(), index_block_keys)),
        queries_(std::clamp<Index>(std::min(tuning::indexer_rows / heads_, scores_at_once()), 1,
                                   std::max<Index>(1, input.q.len()))) {}

  Index unit_rows() const { return queries_ * heads_; }  // of packed queries
  Index unit_queries() const { return queries_; }        // at most
  Index units() const { return in_.q.batch() * o_.lists_heads * blocks(); }
  Index stride() const { return stride_; }  // from a query's scores to the next one's

  // Scores of a unit's queries for keys of `range`, to scores [queries][stride].
  void score(Index unit, const KeyRange& range, float* scores, IndexerScratch& s) const {
    const Unit u = of(unit);
    const KeyRange seen{range.begin, std::min(range.end, visible(u.first + u.count - 1))};
    if (in_.weights.absent())
      score<false>(u, seen, scores, s);
    else
      score<true>(u, seen, scores, s);
  }

  // One query's scores, which are used up, to its list of k entries.
  void choose(Index unit, Index i, float* scores, Position* lists, IndexerScratch& s) const {
    const Unit u = of(unit);
    if (i >= u.count) return;
    const Index query = u.first + i, keys = visible(query), entries = ceil_div(keys, o_.block);
    Position* const to =
        lists + ((u.b * o_.lists_heads + u.list_head) * in_.q.len() + query) * most_;
    rank_behind(u, query, keys, scores, s);
    if (o_.block > 1) best_of_blocks(keys, scores);
    const Index seen = entries - std::count(scores, scores + entries, -simd::infinity);
    const Index count = std::min(most_, seen);
    force(scores, entries);
    if (count == entries)
      std::iota(to, to + count, Position{0});
    else if (count > 0)
      top_k_head(scores, entries, {}, {to, static_cast<std::size_t>(count)}, s.top_k);
    std::fill(to + count, to + most_, Position{-1});
  }

 private:
  struct Unit {
    Index b, list_head, first, count;  // queries [first, first + count)
  };

  // Queries whose scores fit into what waits for its top-k.
  Index scores_at_once() const {
    return tuning::indexer_score_bytes / (stride_ * Index{sizeof(float)});
  }
  Index blocks() const { return ceil_div(in_.q.len(), queries_); }
  Unit of(Index unit) const {
    const Index head = unit / blocks(), first = unit % blocks() * queries_;
    return {head / o_.lists_heads, head % o_.lists_heads, first,
            std::min(queries_, in_.q.len() - first)};
  }
  // Keys up to the last that a query sees.
  Index visible(Index query) const {
    return o_.causal ? in_.k.len() - in_.q.len() + query + 1 : in_.k.len();
  }

  template <bool Weighted>
  void score(const Unit& u, const KeyRange& range, float* scores, IndexerScratch& s) const {
    const HeadRows keys = in_.k.head(u.b, in_.k.heads() > 1 ? u.list_head : 0);
    if (few_rows()) {
      pack_rows(u, s);
      score_rows<Weighted>(u, range, keys, scores, s);
    } else {
      pack(u, s);
      LaneKeys lanes(keys, in_.k.len(), s);
      score_lanes<Weighted>(u, range, lanes, scores, s);
    }
  }

  bool few_rows() const {
    return unit_rows() <= tuning::token_rows && in_.k.dim() % simd::lanes == 0;
  }

  // Row `row` of the unit, a head of a query, as floats to `to` [dim]; and its weight.
  void read_row(const Unit& u, Index row, float* to, IndexerScratch& s) const {
    const Rows& q = in_.q;
    const Index head = u.list_head * heads_ + row % heads_, query = u.first + row / heads_;
    q.format().widen(q.row(u.b, head, query), q.shape(head), to);
    if (!in_.weights.absent()) s.weights.data()[row] = in_.weights.at(u.b, head, query);
  }
  void pack(const Unit& u, IndexerScratch& s) const {
    const Index rows = u.count * heads_, dim = in_.q.dim();
    for (Index row = 0; row < rows; row += tuning::tile_rows) {
      ConstRow floats[tuning::tile_rows];
      const Index n = std::min<Index>(tuning::tile_rows, rows - row);
      for (Index i = 0; i < n; ++i) {
        float* const to = s.query_rows.data() + i * dim;
        read_row(u, row + i, to, s);
        floats[i] = reinterpret_cast<ConstRow>(to);
      }
      float_format().pack_key_tile(floats, n, RowShape{dim},
                                   s.tiles.data() + row / tuning::tile_rows * key_tile_size(dim));
    }
  }
  // Row by row, zeros up to a whole tile of token_logits().
  void pack_rows(const Unit& u, IndexerScratch& s) const {
    const Index rows = u.count * heads_, dim = in_.q.dim();
    for (Index row = 0; row < rows; ++row) read_row(u, row, s.tiles.data() + row * dim, s);
    std::fill(s.tiles.data() + rows * dim,
              s.tiles.data() + round_up(rows, token_tile_rows(rows)) * dim, 0.0f);
  }

  // Of few rows: products straight from where keys lie.
  template <bool Weighted>
  void score_rows(const Unit& u, const KeyRange& range, const HeadRows& keys, float* scores,
                  const IndexerScratch& s) const {
    constexpr Index stretch = tuning::token_stretch_keys;
    const Index rows = u.count * heads_, tile_rows = token_tile_rows(rows);
    const HeadRows some = keys.from(range.begin);
    const Index count = range.end - range.begin;
    RowWalk walk(some.at, some.row_bytes(), stretch, count);
    for (Index i = 0; i < count; i += stretch) {
      const Index n = std::min(stretch, count - i);
      ConstRow memory[RowsAhead::most];
      RowsAhead ahead;
      ahead.take(walk, n);
      alignas(64) float x[tuning::token_rows + 4][stretch];
      for (Index row = 0; row < rows; row += tile_rows) {
        alignas(64) float tile[4 * stretch];  // [key][row of the tile]
        some.format->token_logits(tile_rows, some.at.run(i, n, memory), n, some.shape,
                                  s.tiles.data() + row * some.shape.dim, tile,
                                  row == 0 ? &ahead : nullptr);
        for (Index r = 0; r < tile_rows; ++r)
          for (Index t = 0; t < n; ++t) x[row + r][t] = tile[t * tile_rows + r];
      }
      for (Index query = 0; query < u.count; ++query) {
        float* const to = scores + query * stride_ + range.begin + i;
        for (Index t = 0; t < n; ++t) to[t] = Weighted ? 0.0f : x[query * heads_][t];
        for (Index row = query * heads_; row < (query + 1) * heads_; ++row)
          add_head<Weighted>(x[row], Weighted ? s.weights.data()[row] : 0.0f, n, to);
      }
    }
  }
  // A head's products with n keys to their scores. One that is not finite makes its score so.
  template <bool Weighted>
  static void add_head(const float* x, float weight, Index n, float* scores) {
    for (Index t = 0; t < n; ++t) {
      const float better = Weighted ? simd::fma(weight, x[t] > 0.0f ? x[t] : 0.0f, scores[t])
                           : x[t] > scores[t] ? x[t]
                                              : scores[t];
      scores[t] = better + x[t] * 0.0f;
    }
  }

  template <bool Weighted>
  void score_lanes(const Unit& u, const KeyRange& range, LaneKeys& keys, float* scores,
                   const IndexerScratch& s) const {
    constexpr int rows = tuning::tile_rows, packets = tuning::tile_packets;
    constexpr Index width = tuning::panel_rows;
    const Index dim = in_.k.dim(), count = u.count * heads_, tiles = ceil_div(count, rows);
    BlockPrefetch next;
    keys.walk(range, 1, next, [&](Index, const KeyRange& block, const PackedBlock& packed) {
      const Index panels = ceil_div(block.count(), width),
                  lines = ceil_div(next.left(), panels * tiles);
      const float* lanes = reinterpret_cast<const float*>(packed.keys);
      for (Index p = 0; p < panels; ++p, lanes += dim * width) {
        HeadSum<Weighted> sum;
        float* to = scores + block.begin + p * width;
        Index head = 0;
        for (Index row = 0; row < count; row += rows) {
          next.prefetch(lines);
          simd::Packet acc[rows][packets];
          clear(acc);
          add_key_tile(acc, s.tiles.data() + row / rows * key_tile_size(dim), lanes, dim, [] {});
          alignas(64) float x[rows * tuning::panel_rows];
          simd::unroll<rows, packets>([&](auto i, auto j) QUOKA_INLINE_LAMBDA {
            simd::store(x + i * width + j * simd::lanes, acc[i][j]);
          });
          for (Index i = 0; i < std::min<Index>(rows, count - row); ++i) {
            sum.add(x + i * width, Weighted ? s.weights.data()[row + i] : 0.0f);
            if (++head < heads_) continue;
            sum.end(to);
            head = 0, to += stride_;
          }
        }
      }
    });
  }

  // Keys that are hidden become minus infinity, scores that are not finite the lowest number.
  void rank_behind(const Unit& u, Index query, Index keys, float* scores, IndexerScratch& s) const {
    constexpr float most = std::numeric_limits<float>::max();
    for (Index t = 0; t < keys; ++t) scores[t] = std::abs(scores[t]) <= most ? scores[t] : -most;
    if (in_.mask.absent()) return;
    float* const biases = s.biases.data();
    in_.mask.read(u.b, u.list_head, query, nullptr, 0, keys, biases);
    for (Index t = 0; t < keys; ++t)
      if (biases[t] == -simd::infinity) scores[t] = -simd::infinity;
  }
  void best_of_blocks(Index keys, float* scores) const {
    for (Index first = 0, e = 0; first < keys; first += o_.block, ++e)
      scores[e] = *std::max_element(scores + first, scores + std::min(first + o_.block, keys));
  }
  // The first and the last entries that are seen get the best of scores, as many as fit a list: of the last ones the most
  // recent.
  void force(float* scores, Index entries) const {
    constexpr float most = std::numeric_limits<float>::max();
    const Index first = std::min(o_.keep_first, most_);
    Index left = first;
    for (Index e = 0; e < entries && left > 0; ++e)
      if (scores[e] > -simd::infinity) scores[e] = most, --left;
    left = std::min(o_.keep_last, most_ - first);
    for (Index e = entries; e-- > 0 && left > 0;)
      if (scores[e] > -simd::infinity) scores[e] = most, --left;
  }

  const IndexerInput& in_;
  const IndexerOptions& o_;
  Index most_;     // entries of a list
  Index heads_;    // index heads of a list's head
  Index stride_;   // from a query's scores to the next one's
  Index queries_;  // of a unit
};

inline void check_indexer(const IndexerInput& input, const IndexerOptions& options) {
  const Rows &q = input.q, &k = input.k;
  require_multiple("index_heads", q.heads(), "lists_heads", options.lists_heads);
  require_at_least("dim", q.dim(), 1);
  require_keys("kv_len", k.len());
  if (k.heads() != 1) require_equal("k's heads", k.heads(), "lists_heads", options.lists_heads);
  require_sizes("k", k.sizes(), {q.batch(), k.heads(), k.len(), q.dim()});
  if (options.causal)
    require_at_most("q_len", q.len(), "kv_len, the chunk's keys among them", k.len());
  if (!input.weights.absent())
    require_sizes("weights", input.weights.sizes(), {q.batch(), q.heads(), q.len()});
  if (!input.mask.absent()) input.mask.check(q.batch(), options.lists_heads, q.len(), k.len());
}

}  // namespace detail

QUOKA_FUNC Indexer::Indexer(const IndexerOptions& options) : options_(options) {
  detail::require_size("k", options.k, 1);
  detail::require_size("block", options.block, 1);
  detail::require_size("lists_heads", options.lists_heads, 1);
  detail::require_size("keep_first", options.keep_first, 0);
  detail::require_size("keep_last", options.keep_last, 0);
}

QUOKA_FUNC Index Indexer::write_lists(const IndexerInput& input, ExecutorRef executor) {
  detail::check_indexer(input, options_);
  const Rows& k = input.k;
  const Index most = std::min(options_.k, ceil_div(k.len(), options_.block));
  const Index size = input.q.batch() * options_.lists_heads * input.q.len() * most;
  Position* const lists = lists_.reserve(size);
  if (size == 0) return most;
  const detail::IndexerCall call(input, options_, most);
  const Index all = call.units(), queries = call.unit_queries(), stride = call.stride();
  const Index unit_size = queries * stride;
  const Index at_once =
      std::clamp<Index>(tuning::indexer_score_bytes / (unit_size * Index{sizeof(float)}), 1, all);
  float* const scores = scores_.reserve_amortised(at_once * unit_size);
  scratch_.reserve(executor.workers(), call.unit_rows(), k.len(), k);
  for (Index first = 0; first < all; first += at_once) {
    const Index units = std::min(at_once, all - first);
    const auto ranges = detail::KeyRanges::for_workers(k.len(), units, executor.workers());
    executor.run(units * ranges.count, [&](Index task, int worker) {
      const Index unit = task / ranges.count;
      const auto [begin, end] = ranges.of(task % ranges.count);
      call.score(first + unit, {begin, end}, scores + unit * unit_size, scratch_[worker]);
    });
    executor.run(units * queries, [&](Index task, int worker) {
      call.choose(first + task / queries, task % queries, scores + task * stride, lists,
                  scratch_[worker]);
    });
  }
  return most;
}

}  // namespace QUOKA_ABI
}  // namespace quoka
