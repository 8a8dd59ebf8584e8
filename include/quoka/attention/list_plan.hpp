// By what the keys of a range are attended to where each query has its own: counted for each step of 128 keys.
//
// Query rows lie in panels of panel_rows, and up to 16 panels are the leaves of a tree. For the keys of a step that
// some query below a node sees, their union u,
//
//   by rows    each query's own keys, its heads together:     sum over queries of keys * row_cost(heads)
//   by tiles   the union, packed once, hidden where not seen:  u * (panels * tile_cost + pack_cost)
//
// A leaf takes the cheaper of both, a node its own union by tiles or what its halves take, whichever is the least. So
// equal lists are one list, keys that all see are attended to as without lists, neighbours whose lists overlap share
// their union, and what is left goes by rows. The tree is the same whatever part of it a task computes: results do not
// depend on how tasks are cut.
//
// The costs are in multiply-adds of a panel in float (tuning.hpp's listed_*). By rows pays, measured on a Zen 4 with 128
// queries of random lists, up to 0.94 of the keys where four heads share a KV head, and up to 0.7 where none does.
#pragma once

#include <quoka/attention/listed_work.hpp>
#include <quoka/attention/seen_keys.hpp>

#include <bit>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// Rows of one query in a panel.
struct QueryRun {
  Index query;  // of the call
  Index lane;   // its first row in the panel
  Index rows;
};

// The query rows of up to most_leaves panels of one KV head.
struct ListTree {
  static constexpr Index most_leaves = ListedWork::most_panels;
  static constexpr Index nodes = 2 * most_leaves - 1;
  static_assert(std::has_single_bit(static_cast<unsigned>(most_leaves)));

  Index first_panel, panels;  // leaves
  Index group, rows;          // rows: of the KV head

  // The tree that a panel is in.
  ListTree(const AttentionCall& call, Index panel)
      : first_panel(panel / most_leaves * most_leaves),
        panels(std::min(most_leaves, ceil_div(call.rows(), tuning::panel_rows) - first_panel)),
        group(call.group),
        rows(call.rows()) {}

  Index first_query() const { return first_panel * tuning::panel_rows / group; }
  Index queries() const {
    const Index end = std::min((first_panel + panels) * tuning::panel_rows, rows);
    return (end - 1) / group + 1 - first_query();
  }
  static Index most_queries(const AttentionCall& call) {
    return std::min(call.q.len(), most_leaves * tuning::panel_rows / call.group + 2);
  }
  // f(run) for the queries of a panel of the call.
  template <class F>
  void for_runs(Index panel, F&& f) const {
    const Index first = panel * tuning::panel_rows,
                end = std::min(first + tuning::panel_rows, rows);
    for (Index row = first; row < end;) {
      const Index next = std::min(end, (row / group + 1) * group);
      f(QueryRun{row / group, row - first, next - row});
      row = next;
    }
  }
};

// Of one key, in multiply-adds of a panel in float.
struct ListCosts {
  float tile;    // of a panel
  float pack;    // of all panels that share it
  float row[4];  // of one, two, three and four query rows
  float key;     // of a query, whatever its rows

  explicit ListCosts(const AttentionCall& call) {
    const auto channels = static_cast<float>(call.q.dim() + call.v_dim);
    const PanelCost panel = call.arithmetic->cost();
    tile = tuning::panel_rows * channels * panel.products;
    pack = tuning::panel_rows * channels * panel.packing;
    for (std::size_t i = 0; i < 4; ++i) row[i] = channels * tuning::listed_rows[i];
    key = tuning::listed_key;
  }
  float rows_cost(Index rows) const {
    const Index rest = rows % 4;
    return key + static_cast<float>(rows / 4) * row[3] +
           (rest > 0 ? row[static_cast<std::size_t>(rest - 1)] : 0.0f);
  }
};

// Of one range of keys.
class ListPlan {
 public:
  static constexpr Index most_keys = 4096;
  static constexpr Index most_words = most_keys / SeenKeys::word_keys;
  static constexpr Index most_steps = most_keys / SeenKeys::step_keys;

  // Keys [first, first + count) of the stretch that `seen` has read for the tree's queries; first is a multiple of a
  // step.
  void make(const ListTree& tree, const SeenKeys& seen, const ListCosts& costs, Index first,
            Index count) {
    words_ = ceil_div(count, SeenKeys::word_keys);
    const Index steps = ceil_div(count, SeenKeys::step_keys);
    first_word_ = first / SeenKeys::word_keys;
    std::memset(tiles_, 0, sizeof tiles_);
    std::memset(by_rows_, 0, sizeof by_rows_);
    std::memset(panels_, 0, sizeof panels_);
    std::memset(runs_, 0, sizeof runs_);
    for (Index p = 0; p < ListTree::most_leaves; ++p) read_leaf(tree, seen, costs, p, steps, first);
    for (Index node = ListTree::most_leaves - 2; node >= 0; --node) {
      panels_[node] = panels_[2 * node + 1] + panels_[2 * node + 2];
      runs_[node] = runs_[2 * node + 1] + runs_[2 * node + 2];
      for (Index w = 0; w < steps * step_words; ++w)  // of whole steps
        union_[node][w] = union_[2 * node + 1][w] | union_[2 * node + 2][w];
    }
    for (Index step = 0; step < steps; ++step) decide(costs, step);
  }

  // The keys that a node's panels share by tiles, as bits.
  const KeyBits* tiles(Index node) const { return tiles_[node]; }
  bool has_tiles(Index node) const { return any(tiles_[node]); }
  // The panels below a node: [first, first + count) of the tree.
  static Index first_panel(Index node) {
    while (node < ListTree::most_leaves - 1) node = 2 * node + 1;
    return node - (ListTree::most_leaves - 1);
  }
  Index panels(Index node) const { return panels_[node]; }
  // Does some query of leaf p see one of these?
  bool sees(Index p, const KeyBits* bits) const {
    KeyBits both = 0;
    for (Index w = 0; w < words_; ++w) both |= bits[w] & union_[leaf(p)][w];
    return both != 0;
  }
  // Which keys leaf p attends to by rows: all bits of some steps.
  bool has_rows(Index p) const { return by_rows_[p] != 0; }
  KeyBits rows_mask(Index p, Index word) const {
    return (by_rows_[p] >> (word * SeenKeys::word_keys / SeenKeys::step_keys) & 1u) != 0
               ? ~KeyBits{0}
               : KeyBits{0};
  }
  Index words() const { return words_; }
  Index first_word() const { return first_word_; }  // in the stretch
  bool any(const KeyBits* bits) const {
    KeyBits all = 0;
    for (Index w = 0; w < words_; ++w) all |= bits[w];
    return all != 0;
  }

 private:
  static constexpr Index step_words = SeenKeys::step_keys / SeenKeys::word_keys;
  static Index leaf(Index p) { return ListTree::most_leaves - 1 + p; }
  static float count(const KeyBits* bits) {
    int sum = 0;
    for (Index w = 0; w < step_words; ++w) sum += std::popcount(bits[w]);
    return static_cast<float>(sum);
  }

  void read_leaf(const ListTree& tree, const SeenKeys& seen, const ListCosts& costs, Index p,
                 Index steps, Index first) {
    KeyBits* const all = union_[leaf(p)];
    std::memset(all, 0, sizeof union_[0]);
    std::fill_n(row_cost_[p], steps, 0.0f), std::fill_n(seen_[p], steps, 0.0f);
    if (p >= tree.panels) return;
    panels_[leaf(p)] = 1;
    tree.for_runs(tree.first_panel + p, [&](const QueryRun& run) {
      const Index i = run.query - tree.first_query();
      const KeyBits* const bits = seen.bits(i) + first_word_;
      const std::uint8_t* const marks = seen.marks(i) + first / SeenKeys::step_keys;
      const float cost = costs.rows_cost(run.rows);
      ++runs_[leaf(p)];
      KeyBits own[most_words + step_words] = {};
      for (Index w = 0; w < words_; ++w) own[w] = bits[w], all[w] |= bits[w];
      for (Index step = 0; step < steps; ++step) {
        const float keys = count(own + step * step_words);
        row_cost_[p][step] += cost * keys, seen_[p][step] += keys;
        // Heads that see other keys than each other have no keys in common to go by.
        if ((marks[step] & SeenKeys::uneven) != 0) row_cost_[p][step] = simd::infinity;
      }
    });
  }

  void decide(const ListCosts& costs, Index step) {
    float least[ListTree::nodes], seen[ListTree::nodes];  // costs; keys of the union, over queries
    bool whole[ListTree::nodes];                          // the node's union by tiles
    const Index w = step * step_words;
    for (Index node = ListTree::nodes - 1; node >= 0; --node) {
      const bool is_leaf = node >= ListTree::most_leaves - 1;
      const Index p = node - (ListTree::most_leaves - 1);
      const float keys = count(union_[node] + w);
      seen[node] = is_leaf ? seen_[p][step] : seen[2 * node + 1] + seen[2 * node + 2];
      const float hides =
          seen[node] < keys * static_cast<float>(runs_[node]) ? tuning::listed_tile : 1.0f;
      const float tiles =
          keys * (static_cast<float>(panels_[node]) * costs.tile * hides + costs.pack);
      const float parts = is_leaf ? row_cost_[p][step] : least[2 * node + 1] + least[2 * node + 2];
      whole[node] = keys > 0 && tiles <= parts;
      least[node] = whole[node] ? tiles : keys > 0 ? parts : 0.0f;
    }
    take(0, whole, step);
  }
  void take(Index node, const bool* whole, Index step) {
    const Index w = step * step_words;
    if (panels_[node] == 0 || count(union_[node] + w) == 0) return;
    if (whole[node]) {
      for (Index i = w; i < std::min(w + step_words, words_); ++i)
        tiles_[node][i] = union_[node][i];
    } else if (node >= ListTree::most_leaves - 1) {
      by_rows_[node - (ListTree::most_leaves - 1)] |= 1u << step;
    } else {
      take(2 * node + 1, whole, step), take(2 * node + 2, whole, step);
    }
  }

  KeyBits union_[ListTree::nodes][most_words + step_words];
  KeyBits tiles_[ListTree::nodes][most_words + step_words];
  Index panels_[ListTree::nodes], runs_[ListTree::nodes];  // below a node
  float row_cost_[ListTree::most_leaves][most_steps + 1];
  float seen_[ListTree::most_leaves][most_steps + 1];  // keys, over the queries of a leaf
  std::uint32_t by_rows_[ListTree::most_leaves];
  Index words_ = 0, first_word_ = 0;
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
