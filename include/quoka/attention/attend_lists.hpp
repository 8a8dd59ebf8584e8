// Attention where each query has keys of its own: lists, or what lists and a mask leave.
//
//   bits       which keys each query sees, of the past, then of the chunk (SeenKeys)
//   by rows    each query's own keys, read one by one, its heads together, as in attend_decode.hpp
//   by tiles   the union of a panel's keys through packed blocks, hidden from the rows that do not see them
//
// For each panel of query rows and each step of 128 keys one comparison decides, in multiply-adds of a panel in float
// (tuning.hpp's gather_*): u keys of the union, of which each query sees some,
//
//   by rows    sum over queries of keys * (rows_cost(heads) + gather_key)
//   by tiles   u * (tile_cost + pack_cost), tile_cost more by gather_tile where something is hidden
//
// A panel all of whose queries see the same keys is assumed to have neighbours that do, too: it counts a share of
// the packing. Panels whose unions are the same, key by key of a block, share packed blocks: so equal lists cost what
// one list does, and keys that all queries see cost what they cost without lists.
//
// Panels of an item go through the keys together, a range at a time that stays in L2, so that its rows are read from
// memory once for all of them. A panel that sees few keys of a range waits for more: to begin and to end takes a query
// as long as some 20 keys. Rows that several queries read are first copied side by side, as floats, if they are in 8
// bits or if fewer than four heads share them. In many caches the rows of one head lie a power of two apart and evict
// each other from the processor's cache, which little work per row cannot hide.
//
// Keys are columns throughout: the past's rows, then the chunk's. 2 * q_heads * keys of all lists * (head_dim + v_dim)
// FLOPs, and those of keys that are attended to by tiles and hidden. Only what a panel sees decides how its rows
// are computed: results depend neither on the executor nor on how a list is written.
#pragma once

#include <quoka/attention/attend_panels.hpp>
#include <quoka/attention/join_rows.hpp>
#include <quoka/attention/logits.hpp>
#include <quoka/kernels/compact.hpp>
#include <quoka/kernels/token_kernels.hpp>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <type_traits>
#include <utility>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// ---- which keys each query sees ------------------------------------------------------------------

using KeyBits = std::uint64_t;  // of 64 keys, the first one lowest

// An item's lists are read once, a stretch of keys at a time. From there on a query's keys are bits: in order, each
// once, whatever order a list has and however often it names a key. Where there is a mask, marks say for each query and
// step of 128 keys whether it adds something to a logit, or hides a key from some heads alone.
class SeenKeys {
 public:
  static constexpr Index word_keys = 64;
  static constexpr Index step_keys = 128, step_words = step_keys / word_keys;
  // Keys of a stretch, at most: memory does not grow with the cache.
  static constexpr Index stretch_keys = Index{1} << 16;

  enum Mark : std::uint8_t {
    biased = 1,  // seen, and its logit gets a bias
    uneven = 2,  // seen by some of the query's heads and not by others
  };

  SeenKeys(Arena& arena, const AttentionCall& call, Index queries) {
    const Index keys = std::min(std::max(call.past_k.len(), call.chunk_k.len()), stretch_keys);
    steps_ = ceil_div(keys, step_keys);
    bits_ = arena.take<KeyBits>(queries * steps_ * step_words);
    marks_ = arena.take<std::uint8_t>(call.logits.mask != nullptr ? queries * steps_ : 0);
  }

  // The stretch is columns [first, first + count), for queries [query, query + queries) of one KV head.
  void read(const AttentionCall& call, Index b, Index kv_head, Index query, Index queries,
            Index first, Index count) {
    const Logits& logits = call.logits;
    steps_ = ceil_div(count, step_keys);
    has_marks_ = logits.mask != nullptr;
    const auto in_stretch = [&](Index column) {
      return std::clamp<Index>(column - first, 0, count);
    };
    for (Index i = 0; i < queries; ++i) {
      KeyBits* const to = bits_ + i * steps_ * step_words;
      std::fill_n(to, steps_ * step_words, KeyBits{0});
      const KeyRange in_sight{in_stretch(logits.begin_column(query + i)),
                              in_stretch(logits.end_column(query + i))};
      if (call.lists == nullptr) {
        set(to, in_sight.begin, in_sight.end);
      } else {
        set_listed(call.lists->list(b, kv_head, query + i), call.lists->block(), first, count, to);
        clear(to, 0, in_sight.begin), clear(to, in_sight.end, count);
      }
      if (has_marks_) heed_mask(call, b, kv_head, query + i, first, count, i);
    }
  }

  // Bits of the i-th of these queries: words of whole steps; only bits of the stretch are set.
  const KeyBits* bits(Index i) const { return bits_ + i * steps_ * step_words; }
  unsigned marks(Index i, Index step) const { return has_marks_ ? marks_[i * steps_ + step] : 0u; }

 private:
  // f(word, mask of bits [begin, end) in it).
  template <class F>
  static void for_words(Index begin, Index end, F&& f) {
    for (Index at = begin; at < end; at = (at / word_keys + 1) * word_keys) {
      const Index word = at / word_keys, last = std::min(end, (word + 1) * word_keys) - 1;
      f(word, ~KeyBits{0} << (at % word_keys) & ~KeyBits{0} >> (word_keys - 1 - last % word_keys));
    }
  }
  static void set(KeyBits* bits, Index begin, Index end) {
    for_words(begin, end, [&](Index word, KeyBits mask) { bits[word] |= mask; });
  }
  static void clear(KeyBits* bits, Index begin, Index end) {
    for_words(begin, end, [&](Index word, KeyBits mask) { bits[word] &= ~mask; });
  }

  static void set_listed(std::span<const Position> list, Index block, Index first, Index count,
                         KeyBits* bits) {
    if (block > 1) {
      for (const Position x : list)
        if (x >= 0)
          set(bits, std::clamp<Index>(x * block - first, 0, count),
              std::clamp<Index>((x + 1) * block - first, 0, count));
      return;
    }
    const auto add = [&](Position x) {
      const auto key = static_cast<std::uint64_t>(x - first);  // of -1 beyond the last, too
      if (key < static_cast<std::uint64_t>(count))
        bits[key / word_keys] |= KeyBits{1} << (key % word_keys);
    };
    // Many lists ascend: eight places of it in turn, since the next entry is often in the word that was just written.
    constexpr std::size_t places = 8;
    const std::size_t step = list.size() / places;
    for (std::size_t i = 0; i < step; ++i)
      for (std::size_t place = 0; place < places; ++place) add(list[place * step + i]);
    for (const Position x : list.subspan(places * step)) add(x);
  }

  // Clears the bits of keys that the mask hides from all heads of the group, for the i-th query.
  void heed_mask(const AttentionCall& call, Index b, Index kv_head, Index query, Index first,
                 Index count, Index i) {
    constexpr Index together = 1024, most_words = together / word_keys;  // they stay in L1
    constexpr float lowest = std::numeric_limits<float>::lowest(),
                    above_zero = std::numeric_limits<float>::denorm_min();
    const bool own = call.logits.mask->heads() > 1;  // a mask of each head
    KeyBits* const bits = bits_ + i * steps_ * step_words;
    std::uint8_t* const marks = marks_ + i * steps_;
    std::fill_n(marks, steps_, std::uint8_t{0});
    for (Index at = 0; at < count; at += together) {
      const Index n = std::min(together, count - at), words = ceil_div(n, word_keys);
      KeyBits some[most_words] = {}, all[most_words];  // heads that see a key
      std::fill_n(all, words, ~KeyBits{0});
      KeyBits* const to = bits + at / word_keys;
      std::uint8_t* const mark = marks + at / step_keys;
      for (Index head = 0; head < (own ? call.group : 1); ++head) {
        float added[together];
        call.logits.mask->read(b, own ? kv_head * call.group + head : 0, query, nullptr, first + at,
                               n, added);
        for (Index w = 0; w < words; ++w) {
          KeyBits seen = 0, other = 0;
          const float* const x = added + w * word_keys;
          for_each_compared(
              std::min(word_keys, n - w * word_keys), [&](auto lanes) QUOKA_INLINE_LAMBDA {
                // For a NaN both are true.
                const auto more = lanes.load(x);
                seen |= KeyBits{simd::not_less(more, lanes.broadcast(lowest))} << lanes.i;
                other |= KeyBits{simd::less(more, lanes.broadcast(0.0f)) |
                                 simd::not_less(more, lanes.broadcast(above_zero))}
                         << lanes.i;
              });
          some[w] |= seen, all[w] &= seen;
          if ((other & seen & to[w]) != 0) mark[w / step_words] |= biased;
        }
      }
      for (Index w = 0; w < words; ++w) {
        if (((some[w] ^ all[w]) & to[w]) != 0) mark[w / step_words] |= uneven;
        to[w] &= some[w];
      }
    }
  }

  KeyBits* bits_;        // [queries, steps, step_words]
  std::uint8_t* marks_;  // [queries, steps], with a mask
  Index steps_;          // of the stretch
  bool has_marks_ = false;
};

// first + i for each bit i that is set. Compressed where that can be: a branch on the number of bits in a word would be
// mispredicted.
template <bool compress = simd::has_lane_masks>
Position* add_set(KeyBits left, Index first_key, Position* to) {
  auto first = static_cast<Position>(first_key);
  if constexpr (compress) {
    constexpr int lanes = compress ? simd::lanes : 0;  // looked up only where it is needed
    constexpr KeyBits all = (KeyBits{1} << simd::lanes) - 1;
    for (Index i = 0; i < SeenKeys::word_keys; i += simd::lanes) {
      to += simd::store_compressed<lanes>(to, static_cast<unsigned>(left & all), first);
      left >>= simd::lanes, first += simd::lanes;
    }
  } else {
    for (; left != 0; left &= left - 1)
      *to++ = first + static_cast<Position>(std::countr_zero(left));
  }
  return to;
}

// ---- ranges and parts of the keys --------------------------------------------------------------------

// Bytes of an element where rows may be copied side by side before queries read them one by one; 0 where they never
// are.
inline Index copied_bytes(const AttentionCall& call) {
  bool copies = call.group < tuning::gather_place_rows || call.q.dim() % simd::lanes != 0 ||
                call.v_dim % simd::lanes != 0;
  Index bytes = 0;
  for (const Rows* const x : {&call.past_k, &call.past_v, &call.chunk_k, &call.chunk_v}) {
    if (x->empty()) continue;
    const bool widens = x->format().element_bytes == 0;
    copies = copies || widens;
    bytes = std::max(bytes, widens ? Index{sizeof(float)} : x->format().element_bytes);
  }
  return copies ? bytes : 0;
}
inline constexpr Index most_range_keys = 8 * SeenKeys::step_keys;
// A panel waits for this many ranges at most.
inline constexpr Index most_gather_ranges = 4;
// Keys of a range: as many as fit the cache as halves, in whole blocks where that is nearly the same. Rows that one
// query's heads alone fill panels with are read once, and need not fit.
inline Index range_keys(const AttentionCall& call) {
  const Index fit = tuning::gather_range_bytes / (2 * (call.q.dim() + call.v_dim));
  const Index step = SeenKeys::step_keys, blocks = std::lcm(call.block_keys(), step);
  const Index keys =
      call.group >= tuning::panel_rows ? most_range_keys : std::clamp(fit, step, most_range_keys);
  return keys >= blocks ? keys / blocks * blocks : keys / step * step;
}

// Ranges of the past, then of the chunk: keys are cut into as many parts at most.
inline Index gather_ranges(const AttentionCall& call) {
  const Index keys = range_keys(call);
  return ceil_div(call.past_k.len(), keys) + ceil_div(call.chunk_k.len(), keys);
}
inline Index gather_parts(const AttentionCall& call) {
  return std::clamp<Index>(gather_ranges(call), 1, tuning::max_parts);
}
// The columns of one of `parts`.
inline KeyRange gather_columns(const AttentionCall& call, Index part, Index parts) {
  const Index ranges = gather_ranges(call), keys = range_keys(call);
  const Index past = call.past_k.len(), past_ranges = ceil_div(past, keys);
  const auto column = [&](Index range) {
    return range < past_ranges
               ? range * keys
               : std::min(past + (range - past_ranges) * keys, past + call.chunk_k.len());
  };
  return {column(ranges * part / parts), column(ranges * (part + 1) / parts)};
}

// Costs of one key, in multiply-adds of a panel in float.
struct ListCosts {
  float channels;
  float tile;  // of a panel
  float pack;  // of a block's key

  explicit ListCosts(const AttentionCall& call)
      : channels(static_cast<float>(call.q.dim() + call.v_dim)) {
    const PanelCost panel = call.arithmetic->cost();
    tile = tuning::panel_rows * channels * panel.products;
    pack = tuning::panel_rows * channels * panel.packing;
  }
  float rows(Index heads) const {
    const Index rest = heads % 4;
    return tuning::gather_key + channels * (static_cast<float>(heads / 4) * tuning::gather_rows[3] +
                                            (rest > 0 ? tuning::gather_rows[rest - 1] : 0.0f));
  }
};

// ---- the walk ------------------------------------------------------------------------------------------

// Rows of a panel that are one query's.
struct QueryRun {
  Index query;  // of the call
  Index lane;   // its first row in the panel
  Index rows;
  Index
      in_tiles;  // the first one, where each query of the panel has whole tiles of token_kernels.hpp
};
inline Index rows_in_tiles(Index rows) { return round_up(rows, token_tile_rows(rows)); }

// A panel on its way through the keys.
struct ListedPanel {
  Index begin;              // keys of the stretch before it are attended to
  Index waiting;            // keys from there on, over all queries
  std::uint32_t row_steps;  // of these keys: bit i, step i is attended to by rows
  Index tile_keys;          // keys that it attends to by tiles
  bool hides;               // of these: some query does not see one
  unsigned marks;           // of all these steps (SeenKeys::Mark)
  bool read, packed;        // queries for rows, for tiles
};

// Memory of one worker for items of `panels` panels, beside its PanelMemory.
struct ListedScratch {
  ListedScratch(Arena& arena, const AttentionCall& call, Index panels)
      : most_keys(most_gather_ranges * range_keys(call)),
        seen_keys(arena, call,
                  std::min(call.q.len(), panels * tuning::panel_rows / call.group + 2)),
        seen(arena, panels * tuning::panel_rows, round_up(call.v_dim, simd::lanes)),
        by_tiles(arena, tuning::panel_rows, call.v_dim) {
    const Index packet = simd::lanes;
    const Index run_rows = round_up(std::min<Index>(call.group, tuning::panel_rows), Index{4});
    panel = arena.take<ListedPanel>(panels);
    // Groups of 5 leave most room in tiles: 8 rows for 5.
    queries = arena.take<float>(2 * panels * tuning::panel_rows * round_up(call.q.dim(), packet));
    weights = arena.take<float>(run_rows * (most_keys + packet));
    factors = arena.take<float>(run_rows);
    mask_row = arena.take<float>(call.logits.mask != nullptr ? most_keys : 0);
    rows = arena.take<ConstRow>(2 * most_keys + tuning::gather_row_padding);
    list = arena.take<Position>(most_keys + packet);
    tile_lists = arena.take<Position>(panels * (most_keys + packet));
    const Index copied = most_keys * copied_bytes(call);
    k = arena.take<std::byte>(copied * round_up(call.q.dim(), packet));
    v = arena.take<std::byte>(copied * round_up(call.v_dim, packet));
  }
  // The keys that panel i attends to by tiles.
  Position* tile_list(Index i) const { return tile_lists + i * (most_keys + simd::lanes); }

  Index most_keys;  // that a panel waits for
  SeenKeys seen_keys;
  RowSums seen, by_tiles;  // of all rows, by rows; of a panel
  ListedPanel* panel;      // [panels]
  float* queries;          // [panels][2 panel_rows][head_dim, rounded up], scaled, for rows
  float* weights;          // of a query: [tiles][most_keys][rows of a tile]
  float* factors;          // of a query: [rows, rounded up to tiles]
  float* mask_row;         // [most_keys]
  ConstRow* rows;          // [keys, then values, then those that are prefetched and not read]
  Position* list;          // [most_keys] columns; compressed stores write whole packets
  Position* tile_lists;    // [panels][most_keys, the same]
  std::byte *k, *v;        // [most_keys][channels, rounded up], copied rows
};

// Panels of one KV head.
class ListedPanels {
  static constexpr Index width = tuning::panel_rows;

 public:
  ListedPanels(const KeySequence& keys, PanelAttention& tiles, Index panels, ListedScratch& scratch,
               PanelMemory& panel_memory)
      : call_(keys.call()),
        all_(tiles.rows()),
        panels_(panels),
        first_query_(all_.first / call_.group),
        costs_(call_),
        range_(range_keys(call_)),
        k_width_(round_up(call_.q.dim(), simd::lanes)),
        v_width_(round_up(call_.v_dim, simd::lanes)),
        copies_(copied_bytes(call_) > 0),
        tiles_(tiles),
        s_(scratch),
        h_(panel_memory) {}

  // These columns. The first part of a call's has the sinks.
  void attend(const KeyRange& columns, bool with_sinks) {
    std::fill_n(s_.seen.sums, panels_ * width * v_width_, 0.0f);
    std::fill_n(s_.seen.states, panels_ * width, SoftmaxState<float>::identity());
    for (Index i = 0; i < all_.count && with_sinks; ++i)
      s_.seen.states[i].update(call_.logits.sink(all_[i].q_head));
    for (Index p = 0; p < panels_; ++p) s_.panel[p].read = s_.panel[p].packed = false;
    const ArithmeticScope scope(*call_.arithmetic, h_.panel);
    const Index past = call_.past_k.len();
    attend(call_.past_k, call_.past_v, 0, {columns.begin, std::min(columns.end, past)});
    attend(call_.chunk_k, call_.chunk_v, past, {std::max(columns.begin, past), columns.end});
    for (Index p = 0; p < panels_; ++p) {
      if (!s_.panel[p].packed) continue;
      tiles_.unpack(p, s_.by_tiles);
      join(s_.seen.from(p * width), s_.by_tiles, tiles_.panel_rows(p).count, call_.v_dim);
    }
  }

 private:
  // f(run) for the queries of a panel.
  template <class F>
  void for_runs(Index p, F&& f) const {
    const Index first = all_.first + p * width, end = first + tiles_.panel_rows(p).count;
    for (Index row = first, in_tiles = 0; row < end;) {
      const Index query = row / call_.group, rows = std::min(end, (query + 1) * call_.group) - row;
      f(QueryRun{query, row - first, rows, in_tiles});
      row += rows, in_tiles += rows_in_tiles(rows);
    }
  }
  HeadQueries rows_of(Index p, const QueryRun& run) const {
    HeadQueries rows = all_;
    rows.first += p * width + run.lane, rows.count = run.rows;
    return rows;
  }
  const KeyBits* bits(const QueryRun& run) const {
    return s_.seen_keys.bits(run.query - first_query_);
  }

  // Attends to columns of the past or of the chunk, whose row 0 is column `first`.
  void attend(const Rows& k, const Rows& v, Index first, const KeyRange& columns) {
    const Index stretch = SeenKeys::stretch_keys / range_ * range_,
                queries = (all_.first + all_.count - 1) / call_.group + 1 - first_query_;
    for (Index column = columns.begin; column < columns.end; column += stretch) {
      const Index count = std::min(stretch, columns.end - column);
      s_.seen_keys.read(call_, all_.b, all_.kv_head, first_query_, queries, column, count);
      attend_stretch(k.head(all_.b, all_.kv_head).from(-first),
                     v.head(all_.b, all_.kv_head).from(-first), column, count);
    }
  }
  // Attends to keys [0, count) of a stretch that begins at this column, by the stretch's bits.
  void attend_stretch(const HeadRows& k, const HeadRows& v, Index column, Index count) {
    column_ = column;
    for (Index p = 0; p < panels_; ++p) s_.panel[p].begin = s_.panel[p].waiting = 0;
    for (Index begin = 0, end; begin < count; begin = end) {
      end = std::min(begin + range_, count);
      Index first = end;  // the first key that some panel attends to now
      for (Index p = 0; p < panels_; ++p) {
        ListedPanel& panel = s_.panel[p];
        Index queries = 0;
        for_runs(p, [&](const QueryRun& run) {
          ++queries, panel.waiting += count_bits(bits(run), begin, end);
        });
        panel.row_steps = 0, panel.tile_keys = 0;
        if (panel.waiting == 0) panel.begin = end;
        const bool more = end < count && end - panel.begin < most_gather_ranges * range_;
        if (more && panel.waiting < tuning::gather_query_keys * queries) continue;
        choose(p, panel.begin, end);
        first = std::min(first, panel.begin);
      }
      if (first == end) continue;
      attend_by_rows(k, v, first, end);
      attend_by_tiles(k, v);
      for (Index p = 0; p < panels_; ++p)
        if (s_.panel[p].row_steps != 0 || s_.panel[p].tile_keys > 0)
          s_.panel[p].begin = end, s_.panel[p].waiting = 0;
    }
  }
  static Index count_bits(const KeyBits* bits, Index begin, Index end) {
    Index sum = 0;
    for (Index w = begin / SeenKeys::word_keys; w < ceil_div(end, SeenKeys::word_keys); ++w)
      sum += std::popcount(bits[w]);
    return sum;
  }
  // The columns of a word's bits.
  Position* add_columns(KeyBits bits, Index word, Position* to) const {
    return add_set(bits, column_ + word * SeenKeys::word_keys, to);
  }

  // How panel p attends to each step of keys [begin, end).
  void choose(Index p, Index begin, Index end) {
    constexpr Index words = SeenKeys::step_words, most_steps = 32;
    static_assert(most_gather_ranges * most_range_keys == most_steps * SeenKeys::step_keys);
    ListedPanel& panel = s_.panel[p];
    const Index first = begin / SeenKeys::step_keys,
                steps = ceil_div(end, SeenKeys::step_keys) - first;
    float rows_cost[most_steps] = {}, seen[most_steps] = {};
    KeyBits all[most_steps * words] = {};
    float queries = 0.0f;
    panel.marks = 0, panel.hides = false;
    for_runs(p, [&](const QueryRun& run) {
      const KeyBits* const own = bits(run) + first * words;
      const float cost = costs_.rows(run.rows);
      queries += 1.0f;
      for (Index step = 0; step < steps; ++step) {
        const Index at = step * words;
        const auto keys = static_cast<float>(std::popcount(own[at]) + std::popcount(own[at + 1]));
        rows_cost[step] += cost * keys, seen[step] += keys;
        all[at] |= own[at], all[at + 1] |= own[at + 1];
        const unsigned marks = s_.seen_keys.marks(run.query - first_query_, first + step);
        panel.marks |= marks;
        // Heads that see different keys cannot go by rows together.
        if ((marks & SeenKeys::uneven) != 0) rows_cost[step] = simd::infinity;
      }
    });
    // The estimated number of panels that pack the same keys.
    const float sharing =
        queries > 1.0f ? tuning::gather_sharing : static_cast<float>(ceil_div(call_.group, width));
    Position* const list = s_.tile_list(p);
    Position* to = list;
    for (Index step = 0; step < steps; ++step) {
      const KeyBits* const u = all + step * words;
      const auto keys = static_cast<float>(std::popcount(u[0]) + std::popcount(u[1]));
      const bool hides = seen[step] != keys * queries;
      const float tiles = keys * (hides ? costs_.tile * tuning::gather_tile + costs_.pack
                                        : costs_.tile + costs_.pack / sharing);
      if (keys > 0.0f && tiles <= rows_cost[step]) {
        panel.hides |= hides;
        for (Index w = 0; w < words; ++w) to = add_columns(u[w], (first + step) * words + w, to);
      } else if (keys > 0.0f) {
        panel.row_steps |= std::uint32_t{1} << step;
      }
    }
    panel.tile_keys = to - list;
  }

  // ---- by rows ----

  // f(word) for the words of the steps that panel p attends to by rows.
  template <class F>
  void for_row_words(Index p, F&& f) const {
    const ListedPanel& panel = s_.panel[p];
    for (std::uint32_t left = panel.row_steps; left != 0; left &= left - 1) {
      const Index word =
          panel.begin / SeenKeys::word_keys + std::countr_zero(left) * SeenKeys::step_words;
      for (Index w = word; w < word + SeenKeys::step_words; ++w) f(w);
    }
  }
  // Keys of the ranges from `first` to `end`, for the panels that attend to them now.
  void attend_by_rows(HeadRows k, HeadRows v, Index first, Index end) {
    if (copies_) copy_rows(first, end, k, v);
    for (Index p = 0; p < panels_; ++p) {
      ListedPanel& panel = s_.panel[p];
      if (panel.row_steps == 0) continue;
      float* const queries = s_.queries + p * 2 * width * k_width_;
      if (!std::exchange(panel.read, true))
        for_runs(p, [&](const QueryRun& run) {
          read_queries(rows_of(p, run), queries + run.in_tiles * k_width_);
        });
      const bool biased = call_.logits.has_distances() || (panel.marks & SeenKeys::biased) != 0;
      for_runs(p, [&](const QueryRun& run) {
        const KeyBits* const own = bits(run);
        Position* to = s_.list;
        for_row_words(p, [&](Index w) { to = add_columns(own[w], w, to); });
        if (to != s_.list)
          attend_rows(rows_of(p, run), queries + run.in_tiles * k_width_, k, v, to - s_.list,
                      biased, s_.seen.from(p * width + run.lane));
      });
    }
  }
  // The rows of these keys side by side, if several queries read them or they are not whole packets.
  void copy_rows(Index first, Index end, HeadRows& k, HeadRows& v) {
    KeyBits used[most_gather_ranges * most_range_keys / SeenKeys::word_keys] = {};
    const Index first_word = first / SeenKeys::word_keys;
    Index uses = 0;
    for (Index p = 0; p < panels_; ++p)
      for_runs(p, [&](const QueryRun& run) {
        const KeyBits* const own = bits(run);
        for_row_words(
            p, [&](Index w) { used[w - first_word] |= own[w], uses += std::popcount(own[w]); });
      });
    Position* to = s_.list;
    for (Index w = 0; w < ceil_div(end - first, SeenKeys::word_keys); ++w)
      to = add_columns(used[w], first_word + w, to);
    const bool whole = call_.q.dim() % simd::lanes == 0 && call_.v_dim % simd::lanes == 0;
    if (whole && uses < tuning::gather_uses * (to - s_.list)) return;
    k = copied(k, s_.list, to - s_.list, column_ + first, s_.k);
    v = copied(v, s_.list, to - s_.list, column_ + first, s_.v);
  }
  // Rows list[0, count) of x in the same places from row `first` on, of whole packets: as they are, or widened at once
  // for all queries.
  static HeadRows copied(const HeadRows& x, const Position* list, Index count, Index first,
                         std::byte* memory) {
    const bool widens = x.format->element_bytes == 0;
    const Format& format = widens ? float_format() : *x.format;
    const Index dim = x.shape.dim, row_width = round_up(dim, simd::lanes),
                row_bytes = x.row_bytes();
    const Index used = dim * format.element_bytes, step = row_width * format.element_bytes;
    for (Index i = 0; i < count; ++i) {
      if (i + tuning::token_value_keys < count && row_bytes > 0)
        ask_for(x[list[i + tuning::token_value_keys]], 0, row_bytes);
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

  // Rows of one query, scaled, to to[whole tiles][head_dim, rounded up to whole packets].
  void read_queries(const HeadQueries& rows, float* to) const {
    for (Index i = 0; i < rows_in_tiles(rows.count); ++i, to += k_width_) {
      if (i < rows.count) call_.read_query(rows.b, rows[i], to);
      std::fill(to + (i < rows.count ? call_.q.dim() : 0), to + k_width_, 0.0f);
    }
  }
  // Rows of one query, its `queries` as they were read, to keys list[0, count) alone, rows of whole packets. Addresses
  // are found first, keys' and then values', and the next ones are prefetched in that order while one is multiplied.
  // The weighted values of a list are added up from zero, and then join what the query has seen before.
  void attend_rows(const HeadQueries& rows, const float* queries, const HeadRows& k,
                   const HeadRows& v, Index count, bool biased, const RowSums& seen) {
    const Index tile_rows = token_tile_rows(rows.count), tiles = ceil_div(rows.count, tile_rows);
    const Index tile_size = round_up(count * tile_rows, simd::lanes);
    // Behind the last keys the first values are prefetched.
    k.gathered(s_.list).find(0, count, s_.rows);
    v.gathered(s_.list).find(0, count, s_.rows + count);
    std::fill_n(s_.rows + 2 * count, tuning::gather_row_padding, s_.rows[2 * count - 1]);
    // Where there are several tiles rows stay in L1 for all of them.
    const Index stretch = tiles > 1 ? tuning::token_stretch_keys : count;
    for (Index i = 0; i < count; i += stretch)
      for (Index tile = 0; tile < tiles; ++tile)
        k.format->gather_logits(tile_rows, s_.rows + i, std::min(stretch, count - i), k.shape,
                                queries + tile * tile_rows * k_width_,
                                s_.weights + tile * tile_size + i * tile_rows, tile == 0);
    MaskRow mask_row{s_.mask_row};
    for (Index row = 0; row < rows.count; row += tile_rows) {
      float* const x = s_.weights + row / tile_rows * tile_size;
      HeadQueries of_tile = rows;
      of_tile.first += row, of_tile.count = std::min(tile_rows, rows.count - row);
      call_.logits.rule.apply(x, tile_size);
      if (biased) call_.logits.add_biases(of_tile, {s_.list, 0, count}, x, tile_rows, mask_row);
      SoftmaxState<float> states[4];  // of whole tiles
      std::copy_n(seen.states + row, of_tile.count, states);
      std::fill_n(states + of_tile.count, 4 - of_tile.count, SoftmaxState<float>::identity());
      softmax_tile(x, count, tile_rows, states, s_.factors + row);
      std::copy_n(states, of_tile.count, seen.states + row);
    }
    v.format->gather_values(s_.rows + count, count, v.shape,
                            {s_.weights, tile_rows, tile_size, rows.count}, s_.factors, seen.sums);
  }

  // ---- by tiles ----

  void attend_by_tiles(const HeadRows& k, const HeadRows& v) {
    const Index step = call_.block_keys();
    for (Index at = 0, more = 1; more > 0; at += step) {
      more = 0;
      const Position* packed = nullptr;  // the keys of the block
      Index count = 0;
      for (Index p = 0; p < panels_; ++p) {
        const Index left = s_.panel[p].tile_keys - at;
        if (left <= 0) continue;
        more = std::max(more, left - step);
        const Position* const list = s_.tile_list(p) + at;
        if (packed == nullptr || count != std::min(step, left) ||
            !std::equal(list, list + count, packed)) {
          packed = list, count = std::min(step, left);
          pack(k, v, list, count, std::min(step, left - count));
        }
        if (!std::exchange(s_.panel[p].packed, true))
          tiles_.pack_queries(p), tiles_.clear(p, false);
        const bool biased = fill_bias(p, list, count);
        h_.panel.prefetch.begin_panel();
        tiles_.attend(p, h_.packed,
                      {.count = count,
                       .mask = nullptr,
                       .bias = biased ? h_.bias : nullptr,
                       .rule = call_.logits.rule});
        h_.panel.prefetch.end_panel();
      }
    }
  }
  // Rows list[0, count) as a block; the next ones are prefetched meanwhile.
  void pack(const HeadRows& k, const HeadRows& v, const Position* list, Index count, Index next) {
    const auto find = [&](const HeadRows& x, Index begin, Index rows, BlockRows& to) {
      x.gathered(list).find(begin, rows, to.at);
      to.count = rows, to.format = x.format, to.shape = x.shape;
    };
    find(k, 0, count, h_.k[0]), find(v, 0, count, h_.v[0]);
    find(k, count, next, h_.k[1]), find(v, count, next, h_.v[1]);
    h_.panel.prefetch = {h_.k[1].prefetch(), h_.v[1].prefetch(), panels_};
    PackedBlock& to = h_.packed;
    to.k = &h_.k[0], to.v = &h_.v[0], to.masked = true;
    to.keys = h_.keys, to.values = h_.values;
    call_.arithmetic->pack(to);
  }
  // Finds the biases of the logits of keys list[0, count). Returns whether there are any.
  bool fill_bias(Index p, const Position* list, Index count) {
    const ListedPanel& panel = s_.panel[p];
    const HeadQueries rows = tiles_.panel_rows(p);
    const bool adds = call_.logits.has_distances() || panel.marks != 0;
    if (!panel.hides && !adds) return false;
    for_runs(p, [&](const QueryRun& run) {
      fill_lanes(bits(run), list, count, run.rows, h_.bias + run.lane);
    });
    for (Index key = 0; key < count && rows.count < width; ++key)
      std::fill(h_.bias + key * width + rows.count, h_.bias + (key + 1) * width, -simd::infinity);
    MaskRow mask_row{s_.mask_row};
    if (adds) call_.logits.add_biases(rows, {list, 0, count}, h_.bias, width, mask_row);
    return true;
  }
  // Sets `rows` lanes side by side to 0 or -infinity.
  void fill_lanes(const KeyBits* seen, const Position* list, Index count, Index rows,
                  float* to) const {
    static constexpr float bit_values[2] = {-simd::infinity,
                                            0.0f};  // a branch would be mispredicted
    const auto fill = [&](auto n) {
      for (Index key = 0; key < count; ++key) {
        const Index at = list[key] - column_;
        const float x =
            bit_values[seen[at / SeenKeys::word_keys] >> (at % SeenKeys::word_keys) & 1u];
        for (Index i = 0; i < n; ++i) to[key * width + i] = x;
      }
    };
    if (rows == 4)
      fill(std::integral_constant<Index, 4>{});
    else if (rows == 8)
      fill(std::integral_constant<Index, 8>{});
    else if (rows == 16)
      fill(std::integral_constant<Index, 16>{});
    else
      fill(rows);
  }

  const AttentionCall& call_;
  HeadQueries all_;
  Index panels_, first_query_;
  ListCosts costs_;
  Index range_, k_width_, v_width_;
  bool copies_;
  Index column_ = 0;  // where the stretch begins
  PanelAttention& tiles_;
  ListedScratch& s_;
  PanelMemory& h_;
};

// Panels [first, first + panels) of head b * kv_heads + kv_head: over part `part` of the keys, to partials, or, where
// these have one part, over all keys to the call's output.
inline void attend_lists(const AttentionCall& call, Index head, Index first, Index panels,
                         Index part, const Partials& partials, Arena arena) {
  const KeySequence keys(call, head);
  PanelMemory memory(arena, call, panels);
  ListedScratch scratch(arena, call, panels);
  PanelAttention tiles(keys, head, first, panels, memory);
  ListedPanels(keys, tiles, panels, scratch, memory)
      .attend(gather_columns(call, part, partials.parts), part == 0);
  const HeadQueries rows = tiles.rows();
  if (partials.parts > 1)
    copy(scratch.seen, rows.count, call.v_dim, partials.part(head, part).from(rows.first));
  else
    write(call, rows, scratch.seen);
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
