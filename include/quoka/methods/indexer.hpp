// Indexer: a model's own index heads, small heads that score every key for every query. The best
// keys become the lists that attention reads (rows/index_lists.hpp).
//
//   quoka::Indexer indexer({.k = 2048});
//   const quoka::IndexLists lists =
//       indexer.choose({.q = index_q, .k = index_k, .weights = weights}, threads);
//   quoka::attention(q, {past_k, past_v}, chunk, out, {.lists = lists}, threads);
//
//   with weights      score[i, t] = sum over heads h of weights[h, i] * max(0, q[h, i] . k[t])
//   without           score[i, t] = maximum over heads of q[h, i] . k[t]
//   a block of keys   has the score of its best key that the query sees
//
// With weights it is the lightning indexer of DeepSeek-V3.2 (its report, section 2.1, equation 1)
// and GLM-5. Without weights and by blocks it is that of MiniMax-M3, as llama.cpp computes it. The
// scores have no scale, because a scale changes no list.
//
// Keys are numbered as attention's columns are: `k` holds the past's keys, then the chunk's own,
// and query i stands at kv_len - q_len + i. A list names keys that its query sees, in ascending
// order, -1 behind the last; all where they are no more than k. With equal scores the earlier key
// is taken. A score that is not finite (NaN or infinity in a key, a query or a weight) ranks behind
// all others that the query sees.
//
// Products and sums are in float, over channels and then over heads in their order: the same bits
// for any executor. Cost: 2 * index_heads * q_len * kv_len * dim FLOPs at the rate of attention in
// float, and a top-k for each query. Memory: scores of some queries, tuning::indexer_score_bytes at
// most where one query's need no more.
#pragma once

#include <quoka/attention/attention.hpp>
#include <quoka/base/arena.hpp>
#include <quoka/base/buffer.hpp>
#include <quoka/rows/index_lists.hpp>
#include <quoka/rows/mask.hpp>
#include <quoka/rows/row_walk.hpp>
#include <quoka/rows/rows.hpp>
#include <quoka/runtime/executor.hpp>
#include <quoka/runtime/head_loops.hpp>
#include <quoka/select/top_k.hpp>

#if QUOKA_DEFINES
#include <quoka/kernels/kernels.hpp>
#include <quoka/kernels/panel_packing.hpp>
#include <quoka/kernels/panel_scores.hpp>
#include <quoka/kernels/token_kernels.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#endif

namespace quoka {
inline namespace QUOKA_ABI {

// Options of an Indexer.
struct IndexerOptions {
  Index k = 2048;   // entries of a list at most: keys, or blocks
  Index block = 1;  // keys of an entry: entry e names keys [block * e, block * (e + 1))
  // The first entries that a query sees are in its list in any case, and the last ones: 1 is that
  // of its own key. They count inside k; where not all fit the first ones stay, then the most
  // recent (top-k's rule, top_k.hpp).
  Index keep_first = 0, keep_last = 0;
  // KV heads that have lists of their own, each by an equal share of the index heads; 1: the same
  // list for all.
  Index lists_heads = 1;
  bool causal = true;  // query i sees no key behind its own; false: all but what the mask hides

  bool operator==(const IndexerOptions&) const = default;
};

// The input of Indexer::choose.
struct IndexerInput {
  Rows q;  // [batch, index_heads, q_len, dim]
  Rows k;  // [batch, 1 or lists_heads, kv_len, dim], the chunk's q_len keys last
  // [batch, index_heads, q_len]; absent: the maximum over heads.
  TensorView<const float, 3> weights = {};
  // [batch or 1, lists_heads or 1, q_len, kv_len]: hidden keys are not listed; biases are ignored.
  Mask mask = {};
};

// Scores and chooses, and keeps the memory that it needs for the next call. One call at a time.
class Indexer {
 public:
  // Throws std::invalid_argument for k, block or lists_heads below 1, for a negative keep_first or
  // keep_last.
  explicit Indexer(const IndexerOptions& options = {});

  // The lists of a chunk, [batch, lists_heads, q_len, k], or as many entries as there are where
  // these are fewer; valid until the next call. Throws std::invalid_argument where shapes do not
  // fit together, before anything is written.
  IndexLists choose(const IndexerInput& input, ExecutorRef executor = SerialExecutor{}) {
    const Index most = write_lists(input, executor);
    return IndexLists(IndexLists::Entries(lists_.data(), {input.q.batch(), options_.lists_heads,
                                                          input.q.len(), most}),
                      options_.block);
  }

  const IndexerOptions& options() const { return options_; }  // as given
  // Bytes of memory that is kept.
  Index bytes() const { return bytes_of(lists_, scores_, workers_); }

 private:
  // Returns the entries of a list.
  Index write_lists(const IndexerInput& input, ExecutorRef executor);

  IndexerOptions options_;
  Buffer<Position> lists_;  // [batch, lists_heads, q_len, most]
  Buffer<float> scores_;    // [query of some units][kv_len, rounded up]
  Arenas workers_;
};

#if QUOKA_DEFINES

// ---- how it computes ----------------------------------------------------------------------------
//
// Keys lie across the lanes and rows of queries are broadcast, the opposite of attention. So the
// heads of a query add up without a step across lanes, and scores come out in the order in which
// top-k reads them. A unit is some queries of one list's head, whose rows are packed once; its
// tasks are ranges of keys. If a unit has few rows, as for a single query, transposing keys would
// take longer than multiplying them. They are then read where they lie, channels across the lanes,
// as in decode.

namespace detail {

// Memory of one worker's task.
struct IndexerScratch {
  IndexerScratch(Arena& arena, Index rows, const Rows& k)
      : queries(arena.take<float>(round_up(rows, Index{4}) * k.dim())),
        weights(arena.take<float>(rows)),
        tiles(arena.take<float>(ceil_div(rows, kernel_sizes().tile_rows) * key_tile_size(k.dim()))),
        keys(arena.take<float>(kernel_sizes().panel_rows * k.dim())),
        lanes(arena.take<float>(kernel_sizes().panel_rows * k.dim())),
        products(arena.take<float>(
            std::max(round_up(rows, kernel_sizes().tile_rows), round_up(rows, Index{4})) *
            panel_keys())),
        biases(arena.take<float>(k.len())),
        top_k(arena, k.len(), 1) {}

  // Keys at a time.
  static Index panel_keys() {
    return std::max(kernel_sizes().panel_rows, tuning::token_stretch_keys);
  }

  float* queries;   // [row][dim]: heads of some queries
  float* weights;   // [row]
  float* tiles;     // the queries, packed
  float* keys;      // [key][dim] of a panel
  float* lanes;     // [channel][panel_rows]: these keys, transposed
  float* products;  // [row][key] of a panel; rows up to a whole tile of either way
  float* biases;    // a mask's row
  TopKScratch top_k;
};

// A call: its shape, and where its parts lie.
class IndexerCall {
 public:
  IndexerCall(const IndexerInput& input, const IndexerOptions& options, Index most)
      : in_(input),
        o_(options),
        most_(most),
        heads_(input.q.heads() / options.lists_heads),
        stride_(round_up(input.k.len(), Index{64})),
        queries_(std::clamp<Index>(
            std::min(tuning::indexer_rows / heads_,
                     tuning::indexer_score_bytes / (stride_ * Index{sizeof(float)})),
            1, input.q.len())) {}

  Index unit_rows() const { return queries_ * heads_; }  // of packed queries
  Index unit_queries() const { return queries_; }        // at most
  Index units() const { return in_.q.batch() * o_.lists_heads * blocks(); }
  Index stride() const { return stride_; }  // from a query's scores to the next one's

  // Scores of a unit's queries for keys [begin, end), to scores [queries][stride].
  void score(Index unit, Index begin, Index end, float* scores, const IndexerScratch& s) const {
    const Unit u = of(unit);
    end = std::min(end, visible(u.first + u.count - 1));
    if (begin >= end) return;
    const HeadRows keys = in_.k.head(u.b, in_.k.heads() > 1 ? u.list_head : 0);
    read_queries(u, s);
    if (unit_rows() <= kernel_sizes().token_rows && whole_packets(in_.k.dim()) == in_.k.dim())
      score_rows(u, keys, begin, end, scores, s);
    else
      score_lanes(u, keys, begin, end, scores, s);
  }

  // One query's scores, which are used up, to its list of `most` entries.
  void choose(Index unit, Index i, float* scores, Position* lists, const IndexerScratch& s) const {
    const Unit u = of(unit);
    if (i >= u.count) return;
    const Index query = u.first + i, keys = visible(query), entries = ceil_div(keys, o_.block);
    Position* const to =
        lists + ((u.b * o_.lists_heads + u.list_head) * in_.q.len() + query) * most_;
    rank_behind(u, query, keys, scores, s);
    if (o_.block > 1) best_of_blocks(keys, scores);
    const Index seen = entries - std::count(scores, scores + entries, -infinity);
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

  // The unit's rows as floats, head by head of each query, zeros up to a whole tile of
  // token_logits(); and their weights.
  void read_queries(const Unit& u, const IndexerScratch& s) const {
    const Rows& q = in_.q;
    const Index rows = u.count * heads_, dim = q.dim();
    for (Index row = 0; row < rows; ++row) {
      const Index head = u.list_head * heads_ + row % heads_, query = u.first + row / heads_;
      q.format().widen(q.row(u.b, head, query), q.shape(head), s.queries + row * dim);
      s.weights[row] = in_.weights.absent() ? 0.0f : in_.weights.at(u.b, head, query);
    }
    std::fill(s.queries + rows * dim, s.queries + round_up(rows, Index{4}) * dim, 0.0f);
  }

  // For few rows: products straight from where keys lie.
  void score_rows(const Unit& u, const HeadRows& keys, Index begin, Index end, float* scores,
                  const IndexerScratch& s) const {
    constexpr Index stretch = tuning::token_stretch_keys;
    const Index rows = u.count * heads_, height = token_tile_rows(rows);
    std::fill_n(s.products, rows * stretch, 0.0f);
    RowWalk walk(keys, begin + stretch, end);
    for (Index first = begin; first < end; first += stretch) {
      const Index n = std::min(stretch, end - first);
      ConstRow memory[stretch];
      const RowsAhead ahead = walk.take(n);
      for (Index row = 0; row < rows; row += height) {
        alignas(64) float tile[4 * stretch];  // [key][row of the tile]
        keys.format->token_logits(height, keys.run(first, n, memory), n, keys.shape,
                                  s.queries + row * keys.shape.dim, tile,
                                  row == 0 ? &ahead : nullptr);
        for (Index r = 0; r < height; ++r)
          for (Index t = 0; t < n; ++t) s.products[(row + r) * stretch + t] = tile[t * height + r];
      }
      add_heads(u.count, stretch, scores + first, s);
    }
  }

  // For many rows: a panel of keys is transposed for all rows, and the next one is prefetched
  // meanwhile.
  void score_lanes(const Unit& u, const HeadRows& keys, Index begin, Index end, float* scores,
                   const IndexerScratch& s) const {
    const Index width = kernel_sizes().panel_rows, height = kernel_sizes().tile_rows;
    const Index rows = u.count * heads_, dim = in_.k.dim();
    for (Index row = 0; row < rows; row += height) {
      ConstRow queries[most_tile_rows];
      const Index n = std::min(height, rows - row);
      for (Index i = 0; i < n; ++i)
        queries[i] = reinterpret_cast<ConstRow>(s.queries + (row + i) * dim);
      float_format().pack_key_tile(queries, n, {dim}, s.tiles + row / height * key_tile_size(dim));
    }
    ConstRow found[most_panel_rows];
    keys.find(begin, std::min(width, end - begin), found);
    for (Index first = begin; first < end; first += width) {
      const float* floats[most_panel_rows];
      const Index n = std::min(width, end - first), next = std::min(width, end - first - n);
      for (Index i = 0; i < n; ++i) {
        keys.format->widen(found[i], keys.shape, s.keys + i * dim);
        floats[i] = s.keys + i * dim;
      }
      pack_queries(floats, n, dim, 1.0f, width, s.lanes);
      keys.find(first + n, next, found);
      RowPrefetch ahead(found, next, keys.row_bytes());
      key_products(s.tiles, rows, s.lanes, dim, ahead, s.products);
      add_heads(u.count, width, scores + first, s);
    }
  }

  // Products of some queries with `width` keys to their scores, head by head.
  void add_heads(Index queries, Index width, float* scores, const IndexerScratch& s) const {
    for (Index query = 0; query < queries; ++query) {
      const Index row = query * heads_;
      detail::add_heads(s.products + row * width, heads_, width,
                        in_.weights.absent() ? nullptr : s.weights + row, scores + query * stride_);
    }
  }

  // Keys that are hidden become minus infinity, scores that are not finite the lowest number.
  void rank_behind(const Unit& u, Index query, Index keys, float* scores,
                   const IndexerScratch& s) const {
    constexpr float most = std::numeric_limits<float>::max();
    for (Index t = 0; t < keys; ++t) scores[t] = std::abs(scores[t]) <= most ? scores[t] : -most;
    if (in_.mask.absent()) return;
    in_.mask.read(u.b, u.list_head, query, {nullptr, 0, keys}, s.biases);
    for (Index t = 0; t < keys; ++t)
      if (s.biases[t] == -infinity) scores[t] = -infinity;
  }
  void best_of_blocks(Index keys, float* scores) const {
    for (Index first = 0, e = 0; first < keys; first += o_.block, ++e)
      scores[e] = *std::max_element(scores + first, scores + std::min(first + o_.block, keys));
  }
  // Forced entries, the first and the last ones that a query sees, get the best of scores, as many
  // as fit a list. Of the last ones the most recent come first.
  void force(float* scores, Index entries) const {
    constexpr float most = std::numeric_limits<float>::max();
    const Index first = std::min(o_.keep_first, most_);
    Index left = first;
    for (Index e = 0; e < entries && left > 0; ++e)
      if (scores[e] > -infinity) scores[e] = most, --left;
    left = std::min(o_.keep_last, most_ - first);
    for (Index e = entries; e-- > 0 && left > 0;)
      if (scores[e] > -infinity) scores[e] = most, --left;
  }

  const IndexerInput& in_;
  const IndexerOptions& o_;
  Index most_;     // entries of a list
  Index heads_;    // index heads of a list's head
  Index stride_;   // from a query's scores to the next one's: whole panels
  Index queries_;  // of a unit
};
static_assert(64 % most_panel_rows == 0 && 64 % tuning::token_stretch_keys == 0);

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
  const auto scratch_in = [&](auto&& arena) {
    return detail::IndexerScratch(arena, call.unit_rows(), k);
  };
  workers_.reserve(executor.workers(), scratch_in);
  for (Index first = 0; first < all; first += at_once) {
    const Index units = std::min(at_once, all - first);
    const auto ranges = detail::KeyRanges::for_workers(k.len(), units, executor.workers());
    executor.run(units * ranges.count, [&](Index task, int worker) {
      const Index unit = task / ranges.count;
      const auto [begin, end] = ranges.of(task % ranges.count);
      call.score(first + unit, begin, end, scores + unit * unit_size, scratch_in(workers_[worker]));
    });
    executor.run(units * queries, [&](Index task, int worker) {
      call.choose(first + task / queries, task % queries, scores + task * stride, lists,
                  scratch_in(workers_[worker]));
    });
  }
  return most;
}

#endif  // QUOKA_DEFINES

}  // namespace QUOKA_ABI
}  // namespace quoka
