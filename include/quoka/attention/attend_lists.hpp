// Attention with a separate key list per query: lists, or what lists and a mask leave visible.
//
//   bits        which keys each query sees, of the past, then of the chunk (key_sets.hpp)
//   by rows     each query's own keys, read one by one, its heads together, as in attend_decode.hpp
//   packed      the union of a panel's keys through packed blocks, hidden from the rows that do not
//               see them
//
// Keys are cut four times. A part is an item's. A section of up to 65,536 keys has its bits read at
// once. A range of up to 1,024 keys is what all panels of an item go through before the next one.
// A step of 128 keys is attended to in one way.
//
// For each panel of query rows and each step one comparison decides (choose(), ListCosts). Costs
// are counted in multiply-adds as a panel in float does them. u keys are the union of what the
// panel's queries see:
//
//   by rows     the sum over queries of their keys * rows(heads), which includes gather_key
//   packed      u * (panel + pack), and panel times gather_tile if a key is hidden from a query
//
// A panel all of whose queries see the same keys is assumed to have neighbours that do, too: it
// counts a share of the packing. Panels with the same union of keys share packed blocks. So equal
// lists cost as much as one list, and keys that all queries see cost as much as without lists.
//
// Panels of an item go through the keys together. A range of keys stays in L2, so its rows are read
// from memory once for all panels. A panel that sees few keys of a range waits for more: starting
// and finishing costs a query about as much as 20 keys. Rows that several queries read are first
// gathered as floats, if they have 8 bits or if fewer than four heads share them. In many caches
// the rows of one head lie a power of two apart and evict each other from the processor's cache.
// There is too little work per row to hide that.
//
// Keys are columns throughout: the past's rows, then the chunk's. 2 * q_heads * keys of all lists *
// (head_dim + v_dim) FLOPs, and those of keys that are attended to packed and hidden. Only what
// a panel sees decides how its rows are computed: results depend neither on the executor nor on how
// a list is written.
#pragma once

#include <quoka/attention/attend_panels.hpp>
#include <quoka/attention/key_sets.hpp>
#include <quoka/attention/logits.hpp>
#include <quoka/attention/parts.hpp>
#include <quoka/attention/plan.hpp>
#include <quoka/kernels/kernels.hpp>
#include <quoka/kernels/key_bits.hpp>
#include <quoka/kernels/list_kernels.hpp>
#include <quoka/kernels/row_sums.hpp>
#include <quoka/kernels/token_kernels.hpp>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <utility>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// ---- costs --------------------------------------------------------------------------------------

// Bytes of an element where rows may be copied side by side before queries read them one by one; 0
// where they never are.
inline Index copied_bytes(const AttentionCall& call) {
  bool copies = call.group < tuning::gather_place_rows ||
                whole_packets(call.q.dim()) != call.q.dim() ||
                whole_packets(call.v_dim) != call.v_dim;
  Index bytes = 0;
  for (const Rows* const x : {&call.past_k, &call.past_v, &call.chunk_k, &call.chunk_v}) {
    if (x->empty()) continue;
    const bool widens = x->format().element_bytes == 0;
    copies = copies || widens;
    bytes = std::max(bytes, widens ? Index{sizeof(float)} : x->format().element_bytes);
  }
  return copies ? bytes : 0;
}

// Costs of one key, in multiply-adds of a panel in float.
struct ListCosts {
  float channels;
  float panel;  // multiplied with a panel
  float pack;   // to a block

  explicit ListCosts(const AttentionCall& call)
      : channels(static_cast<float>(call.q.dim() + call.v_dim)) {
    const PanelCost cost = call.arithmetic->cost();
    const float products = static_cast<float>(kernel_sizes().panel_rows) * channels;
    panel = products * cost.products;
    pack = products * cost.packing;
  }
  float rows(Index heads) const {
    const Index rest = heads % 4;
    return tuning::gather_key + channels * (static_cast<float>(heads / 4) * tuning::gather_rows[3] +
                                            (rest > 0 ? tuning::gather_rows[rest - 1] : 0.0f));
  }
};

// ---- panels of one KV head ----------------------------------------------------------------------

// A panel on its way through the keys.
struct ListPanel {
  Index begin;              // keys of the section before it are attended to
  Index waiting_pairs;      // of a query and a key that it sees, from there on
  std::uint32_t row_steps;  // of these keys: bit i, step i is attended to by rows
  Index packed_keys;        // keys that it attends to packed
  bool hides;               // of these: some query does not see one
  unsigned marks;           // of all these steps (KeySets::Mark)
  bool read, packed;        // queries, by rows and packed
};

// Panels [first, first + panels) of head b * kv_heads + kv_head, with the memory of one worker that
// this takes.
class ListPanels {
 public:
  ListPanels(Arena& arena, const AttentionCall& call, Index head, Index first, Index panels)
      : call_(call),
        panel_driver_(arena, call, head, first, panels),
        all_(panel_driver_.queries()),
        panels_(panels),
        first_query_(all_.first / call.group),
        costs_(call),
        ranges_(call),
        most_waiting_keys_(ranges_.most_ranges * ranges_.keys),
        k_width_(whole_packets(call.q.dim())),
        v_width_(whole_packets(call.v_dim)),
        copied_bytes_(copied_bytes(call)),
        key_sets_(arena, call, std::min(call.q.len(), panels * width / call.group + 2)),
        sums_(arena, panels * width, v_width_),
        packed_sums_(arena, width, call.v_dim),
        panel_(arena.take<ListPanel>(panels)),
        queries_(arena.take<float>(2 * panels * width * k_width_)),
        weights_(arena.take<float>(most_rows() * (most_waiting_keys_ + most_lanes))),
        factors_(arena.take<float>(most_rows())),
        mask_row_(arena.take<float>(call.logits.mask != nullptr ? most_waiting_keys_ : 0)),
        row_at_(arena.take<ConstRow>(2 * most_waiting_keys_ + tuning::gather_row_padding)),
        list_(arena.take<Position>(most_waiting_keys_ + most_lanes)),
        packed_lists_(arena.take<Position>(panels * (most_waiting_keys_ + most_lanes))),
        copied_k_(arena.take<std::byte>(most_waiting_keys_ * copied_bytes_ * k_width_)),
        copied_v_(arena.take<std::byte>(most_waiting_keys_ * copied_bytes_ * v_width_)) {}

  // Attends to part `part` of the keys of `parts`; the first has the sinks.
  void attend_part(Index part, Index parts) {
    clear_rows(sums_, panels_ * width);
    for (Index i = 0; i < all_.count && part == 0; ++i)
      add_sink(call_.logits.sink(all_[i].q_head), sums_.states[i]);
    for (Index p = 0; p < panels_; ++p) panel_[p].read = panel_[p].packed = false;
    const ArithmeticScope scope(*call_.arithmetic, panel_driver_.scratch());
    const KeyRange columns = ranges_.columns(part, parts);
    const Index past = ranges_.past_keys;
    attend_columns(call_.past_k, call_.past_v, 0, {columns.begin, std::min(columns.end, past)});
    attend_columns(call_.chunk_k, call_.chunk_v, past,
                   {std::max(columns.begin, past), columns.end});
    for (Index p = 0; p < panels_; ++p) {
      if (!panel_[p].packed) continue;
      panel_driver_.write_partial(p, packed_sums_);
      join(sums_.from(p * width), packed_sums_, panel_driver_.rows_of(p).count, call_.v_dim);
    }
  }
  const HeadQueries& queries() const { return all_; }
  const RowSums& sums() const { return sums_; }  // of these queries

 private:
  const Index width = kernel_sizes().panel_rows;

  // Attends to columns of the past or of the chunk, whose row 0 is column `first`, a section after
  // the other.
  void attend_columns(const Rows& k, const Rows& v, Index first, const KeyRange& columns) {
    const Index section = KeySets::section_keys / ranges_.keys * ranges_.keys,
                queries = (all_.first + all_.count - 1) / call_.group + 1 - first_query_;
    for (column_ = columns.begin; column_ < columns.end; column_ += section) {
      const Index count = std::min(section, columns.end - column_);
      key_sets_.read(all_.b, all_.kv_head, first_query_, queries, column_, count);
      attend_section(k.head(all_.b, all_.kv_head).from(-first),
                     v.head(all_.b, all_.kv_head).from(-first), count);
    }
  }
  // Attends to keys [0, count) of the section, range by range. A panel whose queries see few keys
  // of a range waits for more: see the top.
  void attend_section(const HeadRows& k, const HeadRows& v, Index count) {
    for (Index p = 0; p < panels_; ++p) panel_[p].begin = panel_[p].waiting_pairs = 0;
    for (Index begin = 0, end; begin < count; begin = end) {
      end = std::min(begin + ranges_.keys, count);
      Index first = end;  // the first key that some panel attends to now
      for (Index p = 0; p < panels_; ++p) {
        ListPanel& panel = panel_[p];
        panel.row_steps = 0, panel.packed_keys = 0;
        Index queries = 0;
        for_queries(p, [&](const HeadQueries& rows) {
          ++queries, panel.waiting_pairs += count_keys(bits(rows), begin, end);
        });
        if (panel.waiting_pairs == 0) panel.begin = end;
        if (!is_due(panel, queries, end, count)) continue;
        choose(p, panel.begin, end);
        first = std::min(first, panel.begin);
      }
      if (first == end) continue;
      attend_by_rows(k, v, first, end);
      attend_packed(k, v);
      for (Index p = 0; p < panels_; ++p)
        if (panel_[p].row_steps != 0 || panel_[p].packed_keys > 0)
          panel_[p].begin = end, panel_[p].waiting_pairs = 0;
    }
  }

  // Does a panel of this many queries attend to its waiting keys now, at `end` of the section's
  // `count` keys? It must if it has no room for more, or if there are no more.
  bool is_due(const ListPanel& panel, Index queries, Index end, Index count) const {
    const bool may_wait = end < count && end - panel.begin < most_waiting_keys_;
    return !may_wait || panel.waiting_pairs >= tuning::gather_query_keys * queries;
  }

  // How panel p attends to each step of keys [begin, end): by rows, or packed, whose keys go to
  // its list.
  void choose(Index p, Index begin, Index end) {
    constexpr Index words = KeySets::step_words, most_steps = 32;
    static_assert(ListRanges::most_waiting * ListRanges::most_keys ==
                  most_steps * KeySets::step_keys);
    ListPanel& panel = panel_[p];
    const Index first = begin / KeySets::step_keys,
                steps = ceil_div(end, KeySets::step_keys) - first;
    float rows_cost[most_steps] = {}, seen[most_steps] = {};
    KeyBits all[most_steps * words] = {};
    float queries = 0.0f;
    panel.marks = 0, panel.hides = false;
    for_queries(p, [&](const HeadQueries& rows) {
      const KeyBits* const own = bits(rows) + first * words;
      const float cost = costs_.rows(rows.count);
      queries += 1.0f;
      for (Index step = 0; step < steps; ++step) {
        const Index at = step * words;
        const auto keys = static_cast<float>(count_words(own + at, words));
        rows_cost[step] += cost * keys, seen[step] += keys;
        for (Index w = at; w < at + words; ++w) all[w] |= own[w];
        const unsigned marks = key_sets_.marks(query_of(rows), first + step);
        panel.marks |= marks;
        // Heads that see different keys cannot go by rows together.
        if ((marks & KeySets::uneven) != 0) rows_cost[step] = infinity;
      }
    });
    // The estimated number of panels that pack the same keys.
    const float sharing =
        queries > 1.0f ? tuning::gather_sharing : static_cast<float>(ceil_div(call_.group, width));
    Position* to = packed_list(p);
    for (Index step = 0; step < steps; ++step) {
      const KeyBits* const u = all + step * words;
      const auto keys = static_cast<float>(count_words(u, words));
      const bool hides = seen[step] != keys * queries;
      const float packed = keys * (hides ? costs_.panel * tuning::gather_tile + costs_.pack
                                         : costs_.panel + costs_.pack / sharing);
      if (keys > 0.0f && packed <= rows_cost[step]) {
        panel.hides |= hides;
        for (Index w = 0; w < words; ++w) to = add_columns(u[w], (first + step) * words + w, to);
      } else if (keys > 0.0f) {
        panel.row_steps |= std::uint32_t{1} << step;
      }
    }
    panel.packed_keys = to - packed_list(p);
  }

  // ---- by rows ----

  // Keys of the ranges from `first` to `end`, for the panels that attend to them now.
  void attend_by_rows(HeadRows k, HeadRows v, Index first, Index end) {
    if (copied_bytes_ > 0) copy_rows(first, end, k, v);
    for (Index p = 0; p < panels_; ++p) {
      ListPanel& panel = panel_[p];
      if (panel.row_steps == 0) continue;
      if (!std::exchange(panel.read, true))
        for_queries(
            p, [&](const HeadQueries& rows) { call_.read_queries(rows, scaled_queries(rows)); });
      const bool biased = call_.logits.has_distances() || (panel.marks & KeySets::biased) != 0;
      for_queries(p, [&](const HeadQueries& rows) {
        const KeyBits* const own = bits(rows);
        Position* to = list_;
        for_row_words(p, [&](Index w) { to = add_columns(own[w], w, to); });
        if (to != list_) attend_rows(rows, k, v, to - list_, biased);
      });
    }
  }
  // The rows of these keys side by side, if several queries read them or they are not whole
  // packets.
  void copy_rows(Index first, Index end, HeadRows& k, HeadRows& v) {
    KeyBits used[ListRanges::most_waiting * ListRanges::most_keys / word_keys] = {};
    const Index first_word = first / word_keys;
    Index uses = 0;
    for (Index p = 0; p < panels_; ++p)
      for_queries(p, [&](const HeadQueries& rows) {
        const KeyBits* const own = bits(rows);
        for_row_words(
            p, [&](Index w) { used[w - first_word] |= own[w], uses += std::popcount(own[w]); });
      });
    Position* to = list_;
    for (Index w = 0; w < ceil_div(end - first, word_keys); ++w)
      to = add_columns(used[w], first_word + w, to);
    const bool whole = k_width_ == call_.q.dim() && v_width_ == call_.v_dim;
    if (whole && uses < tuning::gather_uses * (to - list_)) return;
    k = copied(k, list_, to - list_, column_ + first, copied_k_);
    v = copied(v, list_, to - list_, column_ + first, copied_v_);
  }
  // Copies rows list[0, count) of x to `memory`, row i to place i - first: with gaps, so that a row
  // keeps its number. Copies are whole packets, in x's elements or widened to floats.
  static HeadRows copied(const HeadRows& x, const Position* list, Index count, Index first,
                         std::byte* memory) {
    const bool widens = x.format->element_bytes == 0;
    const Format& format = widens ? float_format() : *x.format;
    const Index dim = x.shape.dim, row_width = whole_packets(dim), row_bytes = x.row_bytes();
    const Index used = dim * format.element_bytes, step = row_width * format.element_bytes;
    for (Index i = 0; i < count; ++i) {
      if (i + tuning::token_value_keys < count && row_bytes > 0)
        prefetch_bytes(x[list[i + tuning::token_value_keys]], 0, row_bytes);
      std::byte* const to = memory + (list[i] - first) * step;
      if (widens)
        x.format->widen(x[list[i]], x.shape, reinterpret_cast<float*>(to));
      else
        std::memcpy(to, x[list[i]], static_cast<std::size_t>(used));
      std::fill(to + used, to + step, std::byte{0});
    }
    return {
        .first = memory, .step = step, .begin = -first, .format = &format, .shape = {row_width}};
  }
  // Rows of one query to keys list[0, count) alone, rows of whole packets. Addresses are found
  // first, keys' and then values', and the next ones are prefetched in that order while one is
  // multiplied. The weighted values of a list are added up from zero, and then join what the query
  // has seen before.
  void attend_rows(const HeadQueries& rows, const HeadRows& k, const HeadRows& v, Index count,
                   bool biased) {
    const RowSums seen = sums_.from(rows.first - all_.first);
    const Index tile_rows = token_tile_rows(rows.count), tiles = ceil_div(rows.count, tile_rows);
    const Index tile_size = whole_packets(count * tile_rows);
    // Behind the last keys the first values are prefetched.
    k.gathered(list_).find(0, count, row_at_);
    v.gathered(list_).find(0, count, row_at_ + count);
    std::fill_n(row_at_ + 2 * count, tuning::gather_row_padding, row_at_[2 * count - 1]);
    // Where there are several tiles rows stay in L1 for all of them.
    const Index stretch = tiles > 1 ? tuning::token_stretch_keys : count;
    for (Index i = 0; i < count; i += stretch)
      for (Index tile = 0; tile < tiles; ++tile)
        gather_logits(*k.format, tile_rows, row_at_ + i, std::min(stretch, count - i), k.shape,
                      scaled_queries(rows) + tile * tile_rows * k_width_,
                      weights_ + tile * tile_size + i * tile_rows, tile == 0);
    MaskRow mask_row{mask_row_};
    for (Index row = 0; row < rows.count; row += tile_rows) {
      float* const x = weights_ + row / tile_rows * tile_size;
      HeadQueries of_tile = rows;
      of_tile.first += row, of_tile.count = std::min(tile_rows, rows.count - row);
      call_.logits.rule.apply(x, tile_size);
      if (biased) call_.logits.add_biases(of_tile, {list_, 0, count}, x, tile_rows, mask_row);
      softmax_tile(x, count, tile_rows, of_tile.count, seen.states + row, factors_ + row);
    }
    gather_values(*v.format, row_at_ + count, count, v.shape,
                  {weights_, tile_rows, tile_size, rows.count}, factors_, seen.sums);
  }

  // ---- packed ----

  // Blocks of the panels' lists. Panels side by side whose next keys are the same share a packed
  // block.
  void attend_packed(const HeadRows& k, const HeadRows& v) {
    const Index step = call_.block_keys();
    for (Index at = 0, more = 1; more > 0; at += step) {
      more = 0;
      const PackedBlock* block = nullptr;
      const Position* packed = nullptr;  // its keys
      Index count = 0;
      for (Index p = 0; p < panels_; ++p) {
        const Index left = panel_[p].packed_keys - at;
        if (left <= 0) continue;
        more = std::max(more, left - step);
        const Position* const list = packed_list(p) + at;
        if (packed == nullptr || count != std::min(step, left) ||
            !std::equal(list, list + count, packed)) {
          packed = list, count = std::min(step, left);
          block = &panel_driver_.pack_rows(k.gathered(list), v.gathered(list), count,
                                           std::min(step, left - count));
        }
        if (!std::exchange(panel_[p].packed, true))
          panel_driver_.pack_queries(p), panel_driver_.clear(p, false);
        panel_driver_.attend_block(p, *block,
                                   {.count = count,
                                    .ranges = nullptr,
                                    .bias = biases(p, list, count),
                                    .rule = call_.logits.rule});
      }
    }
  }
  // The biases of the logits of keys list[0, count); null: there are none.
  const float* biases(Index p, const Position* list, Index count) {
    const ListPanel& panel = panel_[p];
    const HeadQueries panel_rows = panel_driver_.rows_of(p);
    const bool adds = call_.logits.has_distances() || panel.marks != 0;
    if (!panel.hides && !adds) return nullptr;
    float* const bias = panel_driver_.bias();
    for_queries(p, [&](const HeadQueries& rows) {
      const Index lane = rows.first - panel_rows.first;
      hide_unseen_keys(bits(rows), column_, list, count, rows.count, bias + lane);
    });
    for (Index key = 0; key < count && panel_rows.count < width; ++key)
      std::fill(bias + key * width + panel_rows.count, bias + (key + 1) * width, -infinity);
    MaskRow mask_row{mask_row_};
    if (adds) call_.logits.add_biases(panel_rows, {list, 0, count}, bias, width, mask_row);
    return bias;
  }

  // ---- queries of a panel, and their keys ----

  // f(rows) for each query of panel p: its rows there.
  template <class F>
  void for_queries(Index p, F&& f) const {
    HeadQueries rows = panel_driver_.rows_of(p);
    for (const Index end = rows.first + rows.count; rows.first < end; rows.first += rows.count) {
      rows.count = std::min(end, (rows.first / rows.group + 1) * rows.group) - rows.first;
      f(rows);
    }
  }
  // The most rows of a query in one panel, in whole tiles.
  Index most_rows() const { return round_up(std::min(call_.group, width), Index{4}); }
  // Which of the item's queries these rows are.
  Index query_of(const HeadQueries& rows) const { return rows.first / rows.group - first_query_; }
  const KeyBits* bits(const HeadQueries& rows) const { return key_sets_.bits(query_of(rows)); }
  // Whole tiles of a query's rows take up to twice as many.
  float* scaled_queries(const HeadQueries& rows) const {
    return queries_ + 2 * (rows.first - all_.first) * k_width_;
  }
  // f(word) for the words of the steps that panel p attends to by rows.
  template <class F>
  void for_row_words(Index p, F&& f) const {
    const ListPanel& panel = panel_[p];
    for (std::uint32_t left = panel.row_steps; left != 0; left &= left - 1) {
      const Index word = panel.begin / word_keys + std::countr_zero(left) * KeySets::step_words;
      for (Index w = word; w < word + KeySets::step_words; ++w) f(w);
    }
  }
  // The columns of a word's bits.
  Position* add_columns(KeyBits word_bits, Index word, Position* to) const {
    return positions_of(word_bits, column_ + word * word_keys, to);
  }
  // The keys that panel p attends to packed.
  Position* packed_list(Index p) const {
    return packed_lists_ + p * (most_waiting_keys_ + most_lanes);
  }

  const AttentionCall& call_;
  PanelAttention panel_driver_;
  HeadQueries all_;
  Index panels_, first_query_;
  ListCosts costs_;
  ListRanges ranges_;
  Index most_waiting_keys_;  // before a panel must attend
  Index k_width_, v_width_;
  Index copied_bytes_;
  Index column_ = 0;  // where the section begins

  KeySets key_sets_;
  RowSums sums_, packed_sums_;  // of all rows, by rows; of a panel
  ListPanel* panel_;            // [panels]
  float* queries_;              // [2 rows][head_dim, rounded up], scaled, for rows
  float* weights_;              // of a query: [tiles][most_keys][rows of a tile]
  float* factors_;              // of a query: [rows, rounded up to tiles]
  float* mask_row_;             // [most_keys]
  ConstRow* row_at_;            // [keys, then values, then those that are prefetched and not read]
  Position* list_;              // [most_keys] columns; compressed stores write whole packets
  Position* packed_lists_;      // [panels][most_keys, the same]
  std::byte *copied_k_, *copied_v_;  // [most_keys][channels, rounded up], copied rows
};

struct ListWork {
  static void attend(const AttendItem& item, Arena& arena);
};
QUOKA_FUNC void ListWork::attend(const AttendItem& item, Arena& arena) {
  ListPanels attention(arena, *item.plan->call, item.head, item.first_panel, item.panels);
  if (arena.is_empty()) return;
  attention.attend_part(item.part, item.plan->parts);
  write_item(item, attention.queries(), attention.sums());
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
